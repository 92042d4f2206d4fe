"""The verdict on a plan: one word and one colour, with the reasons, and what a training is
asked about before it starts.
"""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from videotune.studio import (
    gpu,
    plan_server,
    projects,
    queue_page,
    this_computer,
    verdict,
)
from videotune.studio.verdict import plan_verdict
from videotune.text import about_time_span

Usage = namedtuple("Usage", "total used free")

WAN = "wan 2.1 1.3B LoRA 16GB"
GIGABYTE = 2**30

PLAN: dict[str, Any] = {
    "fits": True,
    "verdict": "fits",
    "hours": 1.5,
    "hours_beside": 0.5,
    "cpu_hours": 900.0,
    "device": {"card": "RTX 4090", "vram_bytes": 24 * GIGABYTE, "need_bytes": 17 * GIGABYTE, "memory_from": "card"},
    "host": {"need_bytes": 5 * GIGABYTE, "total_bytes": 64 * GIGABYTE},
    "disk": {"run_bytes": 10**9},
}  # fmt: skip

A_CARD = gpu.Gpu(
    index=0,
    name="NVIDIA GeForce RTX 4090",
    memory_used=0,
    memory_total=24 * GIGABYTE,
    utilization=None,
    celsius=None,
    watts=None,
)


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> projects.Project:
    """A project of a model that needs a card, which this computer has."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(gpu, "list_gpus", lambda: [A_CARD])
    disk = Usage(10**13, 0, 10**13)
    monkeypatch.setattr(this_computer.shutil, "disk_usage", lambda path: disk)
    project = projects.create(tmp_path, "Cats", preset=WAN)
    (project.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    (project.folder / "clips/a.txt").write_text("a cat\n")
    return project


def judged(project: projects.Project, **changes: Any) -> verdict.Verdict:
    current = projects.find_project(project.folder.parent, project.name)
    found = plan_verdict(current, PLAN | changes)
    assert found is not None
    return found


def test_a_plan_that_fits_is_good_and_needs_no_reason(cats: projects.Project) -> None:
    assert judged(cats) == verdict.Verdict("fits", "good")
    assert plan_verdict(cats, {"device": None}) is None, "not known yet"


@pytest.mark.parametrize(
    ("changes", "word", "said"),
    [
        ({"fits": False, "device": PLAN["device"] | {"need_bytes": 30 * GIGABYTE}}, "does not fit", "needs 30.0 GB"),
        ({"host": {"need_bytes": 70 * GIGABYTE, "total_bytes": 64 * GIGABYTE}}, "too little memory", "has 64.0 GB"),
        ({"disk": {"run_bytes": 10**14}}, "not enough disk", "90 TB of disk are missing"),
    ],
)  # fmt: skip
def test_card_memory_and_disk_each_decide_the_verdict(
    changes: dict[str, Any], word: str, said: str, cats: projects.Project
) -> None:
    found = judged(cats, **changes)
    assert (found.word, found.colour) == (word, "bad")
    assert not found.can_run
    assert said in found.reasons[0]


def test_two_reasons_are_both_said_beside_one_word(cats: projects.Project) -> None:
    short_host = {"need_bytes": 70 * GIGABYTE, "total_bytes": 64 * GIGABYTE}
    found = judged(cats, host=short_host, disk={"run_bytes": 10**14})
    assert found.word == "too little memory"
    assert len(found.reasons) == 2
    assert "of disk are missing" in found.reasons[1]


def test_a_card_in_another_computer_is_no_green_light_for_this_one(
    cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    projects.update(cats, card="RTX 4090")
    monkeypatch.setattr(gpu, "list_gpus", list)
    found = judged(cats)
    assert (found.word, found.colour) == ("not on this computer", "care")
    assert "It fits RTX 4090" in found.reasons[0]
    assert "about 38 days" in found.reasons[0], "the time on the CPU of this computer"

    projects.update(cats, preset="toy")
    assert judged(cats).colour == "good", "the toy trains anywhere"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The plan server's answer, which a test fills in."""
    values: dict[str, Any] = {"plan": dict(PLAN), "current": True, "computing": False}
    monkeypatch.setattr(plan_server, "answer_so_far", lambda out, question: values)
    monkeypatch.setattr(plan_server, "request_answer", lambda out, question: values)
    return values


FORMS = (
    ("/p/cats/setup/start", {"title": ""}),
    ("/p/cats/start", {"run": "", "title": ""}),
    ("/p/cats/sweep", {"key": "seed", "values": "1, 2"}),
)
"""Every form that starts trainings of the settings."""


@pytest.mark.parametrize(("address", "form"), FORMS)
def test_a_large_download_is_asked_about_before_any_start(
    address: str,
    form: dict[str, str],
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued: list[Any] = []
    for name in ("queue_run", "queue_sweep"):
        monkeypatch.setattr(
            f"videotune.studio.queue_page.{name}",
            lambda *arguments, **options: queued.append(arguments) or "run-1",
        )
    reply = client.post(address, data=form)
    assert reply.status_code == 409
    (line,) = json.loads(reply.headers["HX-Trigger"])["ask"]["lines"]
    assert "about 28.9 GB" in line
    assert "10,000 GB are free" in line
    assert queued == []

    assert client.post(address, data=form | {"sure": "1"}).status_code == 204
    assert len(queued) == 1


def lines_asked(client: Any) -> list[str]:
    reply = client.post("/p/cats/setup/start", data={"title": ""})
    assert reply.status_code == 409
    lines: list[str] = json.loads(reply.headers["HX-Trigger"])["ask"]["lines"]
    return lines


def test_days_on_a_cpu_and_what_does_not_fit_are_asked_about(
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer["plan"]["hours"] = 24.0 * 365 * 31
    assert any("about 31 years" in line for line in lines_asked(client))

    monkeypatch.setattr(gpu, "list_gpus", list)
    assert any("on the CPU, which takes about 38 days" in line for line in lines_asked(client))  # fmt: skip

    answer["plan"]["disk"] = {"run_bytes": 10**14}
    assert any("of disk are missing" in line for line in lines_asked(client))


def test_a_start_that_costs_little_is_not_asked_about(
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    projects.update(cats, preset="toy")
    monkeypatch.setattr(gpu, "list_gpus", list)
    answer["plan"]["cpu_hours"] = 0.1
    monkeypatch.setattr("videotune.studio.queue_page.ensure_worker", lambda root: None)
    reply = client.post("/p/cats/setup/start", data={"title": ""})
    assert reply.status_code == 204
    assert "run=run-1" in reply.headers["HX-Redirect"]


def test_the_download_counts_for_the_disk_that_it_goes_to(
    cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (need,) = this_computer.disk_needs(cats, PLAN)
    assert need.needed_bytes == 10**9 + 28.9e9, "one disk for run and model"
    free = Usage(10**11, 0, 20 * 10**9)
    monkeypatch.setattr(this_computer.shutil, "disk_usage", lambda path: free)
    assert judged(cats).word == "not enough disk"


def test_a_start_before_the_plan_is_asked_about_but_not_of_a_trial(
    cats: projects.Project, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    reply = client.post("/p/cats/setup/start", data={})
    assert reply.status_code == 409
    lines = json.loads(reply.headers["HX-Trigger"])["ask"]["lines"]
    assert "not calculated yet" in lines[0]
    projects.update(cats, preset="toy")
    assert client.post("/p/cats/setup/start", data={}).status_code == 204


def test_a_time_under_a_minute_is_not_called_about() -> None:
    assert about_time_span(0.001) == "under 1 min"
    assert about_time_span(2.0) == "about 2 h 00 min"
