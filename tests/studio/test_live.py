"""What keeps a page up to date: the stream of its regions, and the answers to its
buttons.
"""

import json
import shutil
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.browser import Studio
from videotune.studio import projects


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Studio(tmp_path_factory.mktemp("live"))
    yield one
    one.end()


def events(
    address: str, count: int, timeout: float = 30, **words: str
) -> list[tuple[float, str, Any]]:
    """The first events of a page's stream, with when they came; beats do not count."""
    found, name = list[tuple[float, str, Any]](), ""
    with httpx2.stream(
        "GET", f"{address}/live", params=words, timeout=timeout
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:") and name != "beat":
                found.append((time.monotonic(), name, json.loads(line[5:])))
                if len(found) == count:
                    break
    return found


def test_a_change_reaches_an_open_page_at_once_and_nothing_else_does(
    studio: Studio,
) -> None:
    got: list[Any] = []
    tags = {"tags": "cards:old,status:old"}
    listener = threading.Thread(
        target=lambda: got.extend(events(studio.address, 3, page="projects", **tags))
    )
    listener.start()
    time.sleep(1.5)  # both regions came, and a second look changed nothing
    httpx2.post(
        f"{studio.address}/create",
        data={"title": "New one"},
        headers={"HX-Request": "true"},
    )
    listener.join(20)
    assert [one[2]["id"] for one in got] == ["r-status", "r-cards", "r-cards"]
    assert "New one" not in got[1][2]["html"]
    assert "New one" in got[2][2]["html"]


def test_what_a_page_shows_already_is_not_sent_but_a_beat_twice_a_second(
    studio: Studio,
) -> None:
    first = events(studio.address, 2, page="projects", tags="cards:old,status:old")
    tags = ",".join(f"{one[2]['id'][2:]}:{one[2]['tag']}" for one in first)
    sent = raw_events(studio.address, seconds=3, tags=tags)
    assert {name for name, _ in sent} == {"beat"}

    beats = [time for _, time in sent]
    gaps = [later - earlier for earlier, later in pairwise(beats)]
    assert max(gaps) < 1.5, "a page takes a longer silence for a dead server"


def raw_events(address: str, seconds: float, tags: str) -> list[tuple[str, float]]:
    """The names of all events within some seconds, with when they came."""
    names: list[tuple[str, float]] = []
    end = time.monotonic() + seconds
    words = {"page": "projects", "tags": tags}
    with httpx2.stream("GET", f"{address}/live", params=words, timeout=5) as answer:
        for line in answer.iter_lines():
            if line.startswith("event:"):
                names.append((line[6:].strip(), time.monotonic()))
            if time.monotonic() > end:
                return names
    raise AssertionError("the stream ended")


def test_a_project_that_goes_away_ends_the_stream_with_a_word(studio: Studio) -> None:
    assert httpx2.get(f"{studio.address}/live?page=nothing").status_code == 404
    project = projects.create(studio.root, "short lived")
    timer = threading.Timer(1.5, lambda: shutil.rmtree(project.folder))
    timer.start()
    assert [one[1] for one in events(studio.address, 2, page="projects", project=project.name, tags="cards:old")] == [
        "region", "gone",
    ]  # fmt: skip


def test_a_server_that_ends_closes_open_streams_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    studio = Studio(tmp_path)
    listener = threading.Thread(
        target=lambda: events(studio.address, 9, page="projects", tags="cards:old")
    )
    listener.start()
    time.sleep(1)
    studio.end()
    listener.join(10)
    assert not listener.is_alive()
    assert "Traceback" not in capfd.readouterr().err
