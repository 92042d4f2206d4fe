"""The queue of all projects: runs, other commands and sweeps go into it, and its worker
is started where it is needed.
"""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.studio.test_jobs import sleeper
from tests.support.job_folders import steps
from tests.support.reports import full_run, write_file
from tests.support.waiting import wait_until
from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.queue import entries, jobs
from videotune.studio import gpu, projects, queue_page, run_states
from videotune.studio.gpu import Gpu


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> projects.Project:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    monkeypatch.setattr(queue_page, "DOUBLE_CLICK_SECONDS", 0.0)
    project = projects.create(tmp_path, "Cats", preset="toy")
    (project.folder / "clips" / "a.mp4").write_bytes(b"")
    return project


def test_a_run_waits_with_its_settings_as_they_were(
    tmp_path: Path, cats: projects.Project
) -> None:
    projects.save_draft(cats, {"steps": 7})
    assert queue_page.queue_run(tmp_path, cats) == "run-1"
    projects.save_draft(cats, {"steps": 8})
    assert (
        queue_page.queue_run(tmp_path, cats, "lange Nacht für Kätzchen")
        == "lange-Nacht-fur-Katzchen"
    )
    assert queue_page.queue_run(tmp_path, cats) == "run-2"
    first = queue_page.training_entry(tmp_path, cats, "run-1")
    assert first is not None
    assert first.config.read_text().count('"steps": 7') == 1
    assert first.arguments[:3] == ("train", "--preset", "toy")
    assert first.arguments[3:] == (
        "--config",
        str(first.config),
        "--out",
        str(cats.folder / "runs" / "run-1"),
    )
    with pytest.raises(VideotuneError):
        queue_page.queue_run(tmp_path, cats, "run-1")
    assert not (cats.folder / "runs" / "run-1").exists(), (
        "a run that waits has no folder yet"
    )


def test_a_double_click_is_one_run(
    tmp_path: Path, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "DOUBLE_CLICK_SECONDS", 60.0)
    assert {queue_page.queue_run(tmp_path, cats) for _ in range(3)} == {"run-1"}


def test_other_commands_are_numbered_and_a_run_waits_again_by_new_words(
    tmp_path: Path, cats: projects.Project
) -> None:
    queue_page.queue_run(tmp_path, cats)
    names = [
        queue_page.submit(tmp_path, cats, "run-1", ["sample", "x"], kind="sample")
        for _ in range(2)
    ]
    assert names == ["cats--run-1--sample-1", "cats--run-1--sample-2"]
    assert [
        one.name for one in queue_page.project_entries(tmp_path, cats, "run-1")
    ] == [
        "cats--run-1",
        *names,
    ]
    assert queue_page.project_entries(tmp_path, cats, "run") == []
    with pytest.raises(VideotuneError):
        queue_page.submit(tmp_path, cats, "run-1", ["train", "--resume"])
    entries.hold(queue_page.queue_folder(tmp_path), "cats--run-1")
    queue_page.submit(tmp_path, cats, "run-1", ["train", "--resume"])
    again = queue_page.training_entry(tmp_path, cats, "run-1")
    assert again is not None
    assert (again.state, again.arguments) == ("waiting", ("train", "--resume"))


@pytest.mark.parametrize("run", ["", "..", "a/b", "a b", "ä", "x" * 80])
def test_a_name_that_is_no_run_is_refused(cats: projects.Project, run: str) -> None:
    with pytest.raises(VideotuneError):
        queue_page.run_folder(cats, run)


def test_the_run_that_trains_is_shown_before_those_that_wait_for_it(
    tmp_path: Path, cats: projects.Project, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    queue_page.queue_sweep(tmp_path, cats, {"learning_rate": "1e-4,2e-4,3e-4"})
    shown = re.compile(r'data-run="([^"]*)"')
    assert shown.search(client.get("/p/cats/train").text)[1] == "sweep-1.3"

    first, *others = queue_page.project_entries(tmp_path, cats)
    # An earlier run may train on from a step while the newest has ended.
    for state in ("waiting", "done"):
        entries_now = [replace(first, state="running")]
        entries_now += [replace(other, state=state) for other in others]
        monkeypatch.setattr(
            queue_page, "project_entries", lambda *_, now=entries_now, **__: now
        )
        assert shown.search(client.get("/p/cats/train").text)[1] == "sweep-1.1"
    chosen = client.get("/p/cats/train", params={"run": "sweep-1.2"}).text
    assert shown.search(chosen)[1] == "sweep-1.2"


def test_a_sweep_is_a_run_for_each_combination_or_none_at_all(
    tmp_path: Path, cats: projects.Project
) -> None:
    for wrong in ({"steps": "5"}, {"steps": "5,many"}, {"stepz": "1,2"}, {}):
        with pytest.raises(VideotuneError):
            queue_page.queue_sweep(tmp_path, cats, wrong)
    assert queue_page.project_entries(tmp_path, cats) == []
    assert (
        queue_page.queue_sweep(
            tmp_path, cats, {"learning_rate": "1e-4,3e-4", "lora.rank": "4, 8"}
        )
        == "sweep-1"
    )
    found = queue_page.project_entries(tmp_path, cats)
    assert [one.run.name for one in found] == [f"sweep-1.{n}" for n in (1, 2, 3, 4)]
    assert '"rank": 8' in found[1].config.read_text()
    assert queue_page.queue_sweep(tmp_path, cats, {"seed": "1,2"}) == "sweep-2"

    # An imported project has the runs without the record of their sweep.
    imported_run = queue_page.run_folder(cats, "sweep-3.1")
    write_file(imported_run, "config.json", {})
    assert queue_page.queue_sweep(tmp_path, cats, {"seed": "1,2"}) == "sweep-4"


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_sweep_says_whether_a_loss_will_come(
    tmp_path: Path,
    client: Any,
    cats: projects.Project,
    monkeypatch: pytest.MonkeyPatch,
    has_ended: bool,
) -> None:
    """Without clips kept aside it is not measured."""
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    queue_page.queue_sweep(tmp_path, cats, {"learning_rate": "1e-4,3e-4"})
    if has_ended:
        for entry in queue_page.project_entries(tmp_path, cats):
            entries.remove(queue_page.queue_folder(tmp_path), entry.name)
    shown = client.get("/queue").text
    assert shown.count("none yet") == (0 if has_ended else 2)
    assert '<th scope="col">Learning rate</th>' in shown

    for run in ("sweep-1.1", "sweep-1.2"):
        full_run(cats.folder / "runs" / run)
    shown = client.get("/queue").text
    assert "/p/cats/compare?run=sweep-1.1&amp;run=sweep-1.2" in shown
    assert "sweep-doubt" not in shown

    check_file = cats.folder / "runs/sweep-1.2/check.json"
    check = json.loads(check_file.read_text())
    check["clips"].pop()
    check_file.write_text(json.dumps(check))
    assert "Clips were changed between these runs" in client.get("/queue").text


def test_the_worker_begins_where_something_waits_has_each_card_and_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu(0, "Card", 0, 24_000_000_000, 0, 40, 20.0)
    monkeypatch.setattr(
        gpu, "list_gpus", lambda: [card, Gpu(1, *list(card.__dict__.values())[1:])]
    )
    queue = queue_page.queue_folder(tmp_path)
    queue_page.ensure_worker(tmp_path)
    assert jobs.all_jobs(queue) == [], "nothing waits"
    entries.add(
        queue,
        "cats--run-1--sample-1",
        {},
        tmp_path / "run",
        arguments=["wait", str(tmp_path), "--timeout", "0"],
    )
    for _ in range(3):
        queue_page.ensure_worker(tmp_path)
    (worker,) = jobs.all_jobs(queue, "queue")
    assert worker.arguments[-2:] == ("--gpus", "0,1")
    wait_until(lambda: not jobs.read_job(worker.folder).is_running)
    entry = entries.find_entry(queue, "cats--run-1--sample-1")
    assert entry.job is not None
    assert entry.job.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert entry.state in ("done", "failed")


def test_a_worker_of_a_terminal_is_enough(tmp_path: Path) -> None:
    from filelock import FileLock

    queue = queue_page.queue_folder(tmp_path)
    entries.add(queue, "a", {}, tmp_path / "run", arguments=["wait", str(tmp_path)])
    with FileLock(queue / ".lock"):
        queue_page.ensure_worker(tmp_path)
    assert jobs.all_jobs(queue) == []


def test_what_earlier_versions_started_in_a_project_is_found(
    tmp_path: Path, cats: projects.Project
) -> None:
    write_json(cats.folder / "jobs" / "000001-train" / "job.json", {
        "kind": "train", "about": "old", "words": [], "cwd": ".", "started": time.time() - 99})  # fmt: skip
    job = queue_page.run_job(tmp_path, cats, "old")
    assert job is not None
    assert job.state == "dead"
    assert queue_page.run_job(tmp_path, cats, "never") is None


def test_a_run_has_its_own_entries_whatever_its_name(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    """Names may begin with, or look like, those of others."""
    queue = queue_page.queue_folder(tmp_path)
    sample = queue_page.submit(tmp_path, cats, "a", ["sample", "x"], kind="sample")
    for title in ("a", "a--b", "a--sample-1", "a--sample-1--1", "a--export-1"):
        assert queue_page.queue_run(tmp_path, cats, title) == title
    other = projects.create(tmp_path, "Cats a", preset="toy")
    (other.folder / "clips" / "a.mp4").write_bytes(b"")
    queue_page.queue_run(tmp_path, other, "b")

    runs = {entry.name: entry.run.name for entry in entries.entries(queue)}
    assert sorted(runs.values()) == sorted(
        ["a", "a", "a--b", "a--sample-1", "a--sample-1--1", "a--export-1", "b"]
    )
    for run in ("a--b", "a--sample-1", "a--export-1"):
        training = queue_page.training_entry(tmp_path, cats, run)
        assert training is not None
        assert training.run.name == run
    job = jobs.start(queue, "sample", ["wait", "x", "--timeout", "0"], sample)
    of_run = queue_page.shown_entries(tmp_path, cats, "a")
    (about,) = [entry.job for entry in of_run if entry.kind == "sample"]
    assert about is not None
    assert about.folder == job.folder
    of_other = queue_page.shown_entries(tmp_path, cats, "a--sample-1")
    assert [entry.kind for entry in of_other] == ["train"]
    wait_until(lambda: not jobs.read_job(job.folder).is_running)

    assert client.post("/p/cats/run/remove", data={"run": "a"}).status_code == 204
    left = {entry.run.name for entry in entries.entries(queue)}
    assert left == {"a--b", "a--sample-1", "a--sample-1--1", "a--export-1", "b"}
    assert client.post("/p/cats/remove").status_code == 204
    assert {entry.run.name for entry in entries.entries(queue)} == {"b"}


def test_an_entry_that_leaves_the_queue_meanwhile_has_nothing_ahead(
    tmp_path: Path, cats: projects.Project
) -> None:
    queue_page.queue_run(tmp_path, cats, "a")
    queue_page.queue_run(tmp_path, cats, "b")
    entry = queue_page.training_entry(tmp_path, cats, "b")
    assert entry is not None
    assert len(run_states.entries_ahead(tmp_path, entry)) == 1
    entries.remove(queue_page.queue_folder(tmp_path), entry.name)
    assert run_states.entries_ahead(tmp_path, entry) == []


def test_a_click_on_start_after_the_clock_was_set_back_is_a_click(
    tmp_path: Path, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "DOUBLE_CLICK_SECONDS", 3.0)
    queue_page.queue_run(tmp_path, cats)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    assert queue_page.queue_run(tmp_path, cats) == "run-2"


def test_a_run_that_was_killed_says_so_and_counts_from_its_checkpoint(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    queue_page.queue_run(tmp_path, cats)
    run = cats.folder / "runs/run-1"
    steps(run, range(1, 36))
    write_json(run / "config.json", {"steps": 60, "settings": {}})
    queue = queue_page.queue_folder(tmp_path)
    killed = queue / "jobs/000000-train"
    killed.mkdir(parents=True)
    facts = {"kind": "train", "about": "cats--run-1", "words": [], "cwd": "."}
    write_json(killed / "job.json", facts | {"started": time.time() - 60})
    write_json(killed / "rc.json", {"code": -9, "ended": time.time()})

    job, process = sleeper(queue, "cats--run-1")
    try:
        text = client.get("/p/cats/train").text
        assert "ended unexpectedly: its process was killed by signal 9" in text
        assert "started again from the beginning" in text
        assert "0 of 60 steps" in text
        assert "35 of 60" not in text
        assert "58 %" not in text

        marker = run / "checkpoints/step-20/COMPLETE"
        marker.parent.mkdir(parents=True)
        marker.touch()
        text = client.get("/p/cats/train").text
        assert "started again from step 20" in text
        assert "20 of 60 steps" in text

        # The process has cut the journal to the checkpoint, and goes on.
        (run / "journal.jsonl").unlink()
        steps(run, range(1, 23))
        with (run / "journal.jsonl").open("a") as journal:
            journal.write('{"kind": "resume", "from_step": 20, "versions": {}}\n')
        os.utime(run / "journal.jsonl", (job.started + 1, job.started + 1))
        text = client.get("/p/cats/train").text
        assert "started again from step 20" in text
        assert "22 of 60 steps" in text
    finally:
        process.kill()
        process.wait()


def test_what_runs_in_another_project_is_shown_with_that_projects_title(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    """Every project has a run-1."""
    projects.create(tmp_path, "Dogs", preset="toy")
    arguments = ["wait", str(tmp_path), "--timeout", "60"]
    job = jobs.start(cats.folder, "train", arguments, "run-1")
    try:
        name = f"{cats.title}: run-1"
        assert name in client.get("/p/dogs/data").text
        assert name in client.get("/").text
        own_page = client.get("/p/cats/data").text
        assert name not in own_page
        assert "run-1" in own_page
    finally:
        # A job that has just begun may have no process yet that could be asked to end.
        wait_until(lambda: jobs.stop(job))
        wait_until(lambda: not jobs.read_job(job.folder).is_running)


def test_a_run_waits_for_what_is_really_ahead(
    tmp_path: Path, cats: projects.Project, client: Any
) -> None:
    """A sample of a run that is done is not that run."""
    queue_page.submit(tmp_path, cats, "a", ["sample", "x"], kind="sample")
    queue_page.submit(tmp_path, cats, "a", ["export", "x"], kind="export")
    queue_page.queue_run(tmp_path, cats, "b")
    entry = queue_page.training_entry(tmp_path, cats, "b")
    assert entry is not None
    ahead = run_states.entries_ahead(tmp_path, entry)
    assert ahead == ["a sample from a of Cats", "an export of a of Cats"]
    queue_page.queue_run(tmp_path, cats, "c")
    after_b = queue_page.training_entry(tmp_path, cats, "c")
    assert after_b is not None
    assert run_states.entries_ahead(tmp_path, after_b) == [*ahead, "b of Cats"]
