"""Runs of the studio that ask for several GPUs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_folders import steps as write_steps
from tests.support.job_folders import write_heartbeat
from videotune.files import read_json, write_json
from videotune.queue import entries
from videotune.queue.entries import QueueEntry, change_records
from videotune.queue.jobs import QueuedJob
from videotune.studio import gpu, projects, queue_page, run_cards
from videotune.studio.gpu import Gpu

CARD = Gpu(0, "Card", 0, 24_000_000_000, 0, 40, 20.0)


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> projects.Project:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    monkeypatch.setattr(queue_page, "DOUBLE_CLICK_SECONDS", 0.0)
    project = projects.create(tmp_path, "Cats", preset="toy")
    (project.folder / "clips" / "a.mp4").write_bytes(b"")
    return project


@pytest.fixture
def have_cards(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_count(count: int) -> None:
        cards = [replace(CARD, index=index) for index in range(count)]
        monkeypatch.setattr(gpu, "list_gpus", lambda: cards)

    return set_count


def queued(root: Path) -> dict[str, int]:
    """The GPUs that each run asks for."""
    all_entries = entries.entries(queue_page.queue_folder(root))
    return {entry.run.name: entry.cards for entry in all_entries}


@pytest.mark.parametrize(("count", "fields"), [(0, 0), (1, 0), (4, 2)])
def test_a_computer_with_several_gpus_has_a_choice(
    count: int,
    fields: int,
    have_cards: Callable[[int], None],
    cats: projects.Project,
    client: Any,
) -> None:
    have_cards(count)
    text = client.get("/p/cats/setup").text
    assert text.count('name="gpus"') == fields, "to start, and to try several values"
    assert ('<option value="4">' in text.partition('name="gpus"')[2]) == (count == 4)


def test_start_sweep_and_branch_ask_for_the_gpus_of_their_form(
    tmp_path: Path,
    have_cards: Callable[[int], None],
    cats: projects.Project,
    client: Any,
) -> None:
    have_cards(2)
    for address, form in (
        ("setup/start", {"title": "first", "gpus": "2"}),
        ("setup/start", {"title": "second", "gpus": "1"}),
        ("start", {"title": "third", "gpus": "2"}),
        ("start", {"title": "fourth"}),
        ("sweep", {"key": "seed", "values": "1,2", "gpus": "2"}),
    ):
        answer = client.post(f"/p/cats/{address}", data=form)
        assert answer.status_code in (200, 204), answer.text
    assert queued(tmp_path) == {
        "first": 2,
        "second": 1,
        "third": 2,
        "fourth": 1,
        "sweep-1.1": 2,
        "sweep-1.2": 2,
    }


@pytest.mark.parametrize("asked", ["3", "0", "x"])
def test_more_gpus_than_there_are_are_refused(
    asked: str,
    tmp_path: Path,
    have_cards: Callable[[int], None],
    cats: projects.Project,
    client: Any,
) -> None:
    have_cards(2)
    answer = client.post("/p/cats/setup/start", data={"gpus": asked})
    assert answer.status_code == 422
    assert queued(tmp_path) == {}


def test_a_run_that_left_the_queue_goes_on_with_the_gpus_that_it_had(
    tmp_path: Path, have_cards: Callable[[int], None]
) -> None:
    run = tmp_path / "run"
    assert run_cards.cards_of_run(run) == 1
    run.mkdir()
    write_json(
        run / "config.json", {"processes": 2, "settings": {"context_parallel": 2}}
    )
    have_cards(8)
    assert run_cards.cards_of_run(run) == 4
    have_cards(2)
    assert run_cards.cards_of_run(run) == 2

    have_cards(8)
    journal = run / "journal.jsonl"
    resume = {"kind": "resume", "from_step": 3, "versions": {}, "processes": 3}
    journal.write_text(json.dumps(resume) + "\n")
    assert run_cards.cards_of_run(run) == 3
    resume.pop("processes")
    with journal.open("a") as file:
        file.write(json.dumps(resume) + "\n")
    assert run_cards.cards_of_run(run) == 1


def test_a_refused_run_says_why_on_its_page_and_in_the_queue(
    tmp_path: Path,
    have_cards: Callable[[int], None],
    cats: projects.Project,
    client: Any,
) -> None:
    have_cards(2)
    queue_page.queue_run(tmp_path, cats, "wide", cards=2)
    sentence = "it asks for 2 GPUs, and this machine has 1"
    queue = queue_page.queue_folder(tmp_path)
    change_records(queue, {"cats--wide": {"refused": sentence}})
    assert f"It cannot start: {sentence}" in client.get("/queue").text
    text = client.get("/p/cats/train?run=wide").text
    assert f"It cannot start: {sentence}" in text


def working(name: str, cards: str) -> QueueEntry:
    job = QueuedJob(
        folder=Path(name),
        kind="train",
        about=name,
        arguments=(),
        state="running",
        code=None,
        started=0.0,
        ended=None,
        env={entries.GPU_VARIABLE: cards} if cards else {},
    )
    return QueueEntry(
        name=name,
        config=Path(name),
        run=Path(name),
        priority=0,
        added=0.0,
        first_added=0.0,
        skips=None,
        state="running",
        tries=0,
        job=job,
    )


def test_a_job_on_two_gpus_is_shown_at_the_first_and_named_at_the_other() -> None:
    cards = [replace(CARD, index=index) for index in range(3)]
    wide, narrow, other = working("a", "0,2"), working("b", "1"), working("c", "")
    by_card, elsewhere = run_cards.jobs_by_card([wide, narrow, other], cards)
    shown = {index: (list(j.first), list(j.further)) for index, j in by_card.items()}
    assert shown == {0: ([wide], []), 1: ([narrow], []), 2: ([], [wide])}
    assert elsewhere == [other]


def test_the_page_of_a_run_has_a_row_for_each_process_and_names_the_slow_one(
    cats: projects.Project, client: Any
) -> None:
    run = cats.folder / "runs" / "run-1"
    write_steps(run, range(1, 4))
    write_json(run / "config.json", {"steps": 30, "settings": {}})
    write_heartbeat(run, 1)
    assert 'id="processes"' not in client.get("/p/cats/train").text
    figures = {
        "host": "host",
        "step": 60,
        "measured": 50,
        "samples": 1,
        "waiting_seconds": 0.1,
        "data_seconds": 0.01,
        "samples_per_second": 0.9,
        "memory_bytes": 3_000_000_000,
        "peak_bytes": 4_000_000_000,
    }
    ranks = [
        figures | {"rank": 0, "device": "GPU 0", "own_seconds": 1.0},
        figures | {"rank": 1, "device": "GPU 1", "own_seconds": 2.5},
    ]
    heartbeat = read_json(run / "heartbeat.json")
    write_json(run / "heartbeat.json", heartbeat | {"ranks": ranks})
    text = client.get("/p/cats/train").text
    assert "Process 1 (GPU 1 of host) is slower than the others" in text
    table = text.partition('class="processes"')[2].partition("</table>")[0]
    assert table.count("<tr>") == 3
    assert table.count(">slow<") == 1
    assert "2.50 s" in table
