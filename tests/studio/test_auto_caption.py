"""Auto-caption before its job: what can be said at once is said at once."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.dripping_server import dripping
from tests.support.http_server import Handler, serving
from videotune.captioning.offered_models import offered_models
from videotune.studio import (
    auto_caption,
    caption_choices,
    captions_edit,
    gpu,
    projects,
)

DATA = "/p/cats/data"


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[str], dict[str, str]]]:
    """What jobs would have been started with."""
    projects.create(tmp_path, "Cats")
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(
        captions_edit,
        "start_captioning",
        lambda project, arguments, environment: calls.append((arguments, environment)),
    )
    return calls


def write(client: Any, **words: str) -> Any:
    return client.post(f"{DATA}/auto-caption", data=words)


def test_without_a_network_a_model_that_is_not_here_is_refused_at_once(
    client: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    answer = write(client, how="Qwen/Qwen3-VL-4B-Instruct")
    assert time.monotonic() - begun < 8
    assert answer.status_code == 422
    assert "not on this computer" in answer.text
    assert started == []

    monkeypatch.setattr(auto_caption, "_is_cached", lambda model: True)
    assert write(client, how="Qwen/Qwen3-VL-4B-Instruct").status_code == 204
    (arguments, environment) = started[0]
    assert "--model=Qwen/Qwen3-VL-4B-Instruct" in arguments
    assert environment == {"HF_HUB_OFFLINE": "1"}, "no retries of a download"


def test_a_form_without_a_model_or_a_server_starts_nothing(
    client: Any, started: list[Any]
) -> None:
    assert "server" in write(client, how="server").text
    assert "choose one" in write(client, how="").text
    assert started == []


@pytest.mark.parametrize(
    ("card", "memory", "colours"),
    [
        (None, 8, ["bad", "bad", "bad"]),
        (None, 16, ["care", "bad", "bad"]),
        (None, 64, ["care", "care", "care"]),
        (8, 4, ["good", "bad", "bad"]),
        (24, 4, ["good", "good", "good"]),
    ],
)
def test_a_model_is_judged_by_the_computer_that_runs_it(
    tmp_path: Path,
    client: Any,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    card: int | None,
    memory: int,
    colours: list[str],
) -> None:
    """The card of the plan may be elsewhere. Without one, weights are in float32."""
    projects.update(projects.find_project(tmp_path, "cats"), card="RTX 3090")
    card_here = SimpleNamespace(memory_total=(card or 0) * 2**30)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [card_here] if card else [])
    total = SimpleNamespace(total=memory * 2**30)
    monkeypatch.setattr(caption_choices.psutil, "virtual_memory", lambda: total)
    choices = caption_choices.caption_choices()
    assert [choice.colour for choice in choices] == colours
    if not card:
        page = client.get(DATA).text
        assert all(choice.verdict in page for choice in choices)


class Listing(Handler):
    """A caption server's list of models, or something else."""

    content = json.dumps({"data": [{"id": "m"}, {"id": 3}, "x"]})
    status = 200

    def do_GET(self) -> None:
        headers = {"Location": "http://127.0.0.1:9/"} if self.status == 302 else {}
        self.answer(self.status, self.content.encode(), headers)


@pytest.mark.parametrize(
    ("status", "content", "model", "good", "said"),
    [
        (200, Listing.content, "", True, "these models"),
        (200, Listing.content, "m", True, "this model"),
        (200, Listing.content, "other", False, "no model other"),
        (401, "", "", True, "Type the name"),
        (404, "", "", False, "error 404"),
        (302, "", "", False, "error 302"),
        (200, "[" * 20_000, "", False, "does not answer as such a server"),
        (200, "x" * 2_000_000, "", False, "larger than 1.0 MB"),
    ],
)
def test_a_server_is_tested(
    client: Any, started: list[Any], status: int, content: str, model: str, good: bool, said: str
) -> None:  # fmt: skip
    class Server(Listing):
        pass

    Server.status = status
    Server.content = content
    with serving(Server) as server:
        answer = client.post(
            f"{DATA}/test-server",
            data={"endpoint": f"{server.url}/v1", "model": model},
        ).json()
    assert answer["good"] is good
    assert said in answer["said"]


@pytest.mark.parametrize("where", ["headers", "body", "silent"])
def test_a_server_that_never_ends_its_answer_is_given_up(
    client: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(auto_caption, "TEST_SECONDS", 0.3)
    begun = time.monotonic()
    with dripping(where) as address:
        answer = client.post(
            f"{DATA}/test-server", data={"endpoint": f"{address}/v1", "model": ""}
        ).json()
    assert time.monotonic() - begun < 5
    assert answer["good"] is False
    assert "does not answer as such a server" in answer["said"]


def test_a_server_inside_the_network_is_not_tested_for_a_visitor(
    visitor: Any, tmp_path: Path
) -> None:
    projects.create(tmp_path, "Cats")
    answer = visitor.post(
        f"{DATA}/test-server", data={"endpoint": "http://127.0.0.1:9/v1"}
    )
    assert (answer.status_code, "own network" in answer.text) == (422, True)


def test_each_offered_model_says_what_it_takes() -> None:
    rows = offered_models()
    assert len(rows) == 3
    needs = [row["memory_gb"] for row in rows]
    assert needs == sorted(needs)
    for row in rows:
        assert row["download_gb"] < row["memory_gb"]
        assert row["licence"]
        assert auto_caption.HUB_MODEL.fullmatch(row["model"])
