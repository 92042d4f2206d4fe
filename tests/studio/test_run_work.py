"""What waits in the queue is told where it was asked for, and is not queued twice."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import full_run, visible_text, write_file
from videotune.queue import entries as queued
from videotune.queue import jobs
from videotune.queue.entries import QueueEntry
from videotune.studio import projects, queue_page
from videotune.studio.projects import Project
from videotune.studio.status import process_progress, read_live

CATS = "/p/cats"
EXPORT = f"{CATS}/run/export"
OF_STEP_120 = {"run": "run-1", "step": "120", "format": ["comfyui", "diffusers"]}


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with a run that has ended and no file of it, and no worker."""
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "Cats", preset="toy")
    run = full_run(project.folder / "runs" / "run-1")
    settings = {"base_model_name": "asset:toy", "training_method": "LORA"}
    write_file(run, "config.json", {"steps": 120, "settings": settings})
    write_file(run, "exports.json", [])
    for step in (60, 120):
        (run / f"checkpoints/step-{step}/COMPLETE").touch()
    return project


def entries(project: Project) -> list[QueueEntry]:
    return queued.entries(queue_page.queue_folder(project.folder.parent))


def results(client: Any) -> str:
    return str(client.get(f"{CATS}/results", params={"run": "run-1"}).text)


def place_of_files(client: Any) -> str:
    return results(client).split('id="result-title"')[1].split("<h3>")[0]


def let_train(project: Project) -> None:
    """Queue a training that runs before all that is queued later."""
    queue_page.submit(project.folder.parent, project, "run-2", ["train", "x"])


def toast(answer: Any) -> str:
    assert answer.status_code == 204
    return str(answer.headers.get("HX-Trigger", ""))


def test_the_place_of_the_files_says_what_their_export_waits_for(
    client: Any, cats: Project
) -> None:
    let_train(cats)
    assert "Write the files of step 120" in place_of_files(client)
    client.post(EXPORT, data=OF_STEP_120)

    place = place_of_files(client)
    assert "waits for run-2 of Cats" in visible_text(place)
    assert "Write the files of step 120" not in place
    assert "No file of step 120" not in place

    # Out of the queue again, its button is back.
    export = next(entry for entry in entries(cats) if entry.kind == "export")
    client.post("/queue/stop", data={"name": export.name})
    assert "Write the files of step 120" in place_of_files(client)


def test_the_export_of_another_step_leaves_the_button(
    client: Any, cats: Project
) -> None:
    let_train(cats)
    client.post(EXPORT, data={"run": "run-1", "step": "60", "format": "diffusers"})
    assert "Write the files of step 120" in place_of_files(client)

    page = results(client)
    row = page.split('id="save-60"')[1].split("</tr>")[0]
    assert 'data-make="60"' in row, "its file for ComfyUI is not asked for yet"
    below = page.split('id="r-exporting"')[1].split("</section>")[0]
    assert "step 60 waits for run-2 of Cats" in visible_text(below)

    client.post(EXPORT, data={"run": "run-1", "step": "60", "format": "comfyui"})
    row = results(client).split('id="save-60"')[1].split("</tr>")[0]
    assert "data-make" not in row
    assert "waits" in visible_text(row)


def test_the_same_export_is_queued_once(client: Any, cats: Project) -> None:
    assert "queued already" not in toast(client.post(EXPORT, data=OF_STEP_120))
    assert "queued already" in toast(client.post(EXPORT, data=OF_STEP_120))
    assert len(entries(cats)) == 1

    reordered = OF_STEP_120 | {"format": ["diffusers", "comfyui"]}
    assert "queued already" in toast(client.post(EXPORT, data=reordered))
    newest = {"run": "run-1", "step": "", "format": ["comfyui"]}
    assert "queued already" in toast(client.post(EXPORT, data=newest))
    assert len(entries(cats)) == 1

    # What is not queued yet of a request is.
    client.post(EXPORT, data=OF_STEP_120 | {"merge": "yes"})
    assert [("--merge" in entry.arguments) for entry in entries(cats)] == [False, True]
    client.post(EXPORT, data=OF_STEP_120 | {"step": "60"})
    assert len(entries(cats)) == 3


def test_two_tabs_at_once_queue_one_export(client: Any, cats: Project) -> None:
    def press() -> None:
        client.post(EXPORT, data=OF_STEP_120)

    tabs = [threading.Thread(target=press) for _ in range(4)]
    for tab in tabs:
        tab.start()
    for tab in tabs:
        tab.join()
    assert len(entries(cats)) == 1


def test_an_export_that_has_ended_can_be_asked_for_again(
    client: Any, cats: Project
) -> None:
    client.post(EXPORT, data=OF_STEP_120)
    (entry,) = entries(cats)
    queued.hold(queue_page.queue_folder(cats.folder.parent), entry.name)
    client.post(EXPORT, data=OF_STEP_120)
    assert [entry.state for entry in entries(cats)] == ["stopped", "waiting"]


def test_the_same_video_is_queued_once_and_says_what_it_waits_for(
    client: Any, cats: Project
) -> None:
    let_train(cats)
    posted = {"run": "run-1", "prompt": "a cat on a roof", "step": "60", "seed": "3"}
    assert "queued already" not in toast(client.post(f"{CATS}/run/draw", data=posted))
    assert "queued already" in toast(client.post(f"{CATS}/run/draw", data=posted))
    assert len(entries(cats)) == 2
    assert len(list((cats.folder / "tries/run-1").iterdir())) == 1

    below = results(client).split('id="r-trying"')[1].split("</section>")[0]
    assert "Waits for run-2 of Cats" in visible_text(below)
    client.post(f"{CATS}/run/draw", data=posted | {"seed": "4"})
    assert len(entries(cats)) == 3


@pytest.mark.parametrize(
    ("arguments", "done", "total"),
    [
        ((), 60, 120),
        (("--from", "40"), 40, 120),
        (("--from", "0", "--set", "steps=90", "--override"), 0, 90),
        (("--set", "steps=150"), 60, 150),
    ],
)
def test_a_process_that_goes_back_begins_there(
    cats: Project, arguments: tuple[str, ...], done: int, total: int
) -> None:
    """Until it has loaded the model, the journal has the steps of the one before."""
    folder = cats.folder / "runs" / "run-1"
    (folder / "checkpoints/step-120/COMPLETE").unlink()
    job = jobs.QueuedJob(
        folder=cats.folder / "jobs" / "000009-train",
        kind="train",
        about="run-1",
        arguments=("train", "--out", str(folder), "--resume", *arguments),
        state="running",
        code=None,
        started=time.time() + 60,
        ended=None,
        env={},
    )
    progress = process_progress(read_live(folder), job)
    assert (progress.done, progress.total) == (done, total)


def test_a_command_that_runs_is_not_started_again_in_its_place(
    client: Any, cats: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second click on Publish must not end an upload."""
    started: list[str] = []
    posted = {"run": "run-1", "kind": "publish", "repo": "cats"}
    run = cats.folder / "runs" / "run-1"
    job = jobs.QueuedJob(
        folder=cats.folder / "jobs" / "000001-publish",
        kind="publish",
        about="run-1",
        arguments=("publish", str(run), "--repo", "cats"),
        state="running",
        code=None,
        started=0.0,
        ended=None,
        env={},
    )
    monkeypatch.setattr(jobs, "latest", lambda *_: job)
    monkeypatch.setattr(jobs, "restart", lambda *call: started.append(call[1]))
    assert "runs already" in toast(client.post(f"{CATS}/run/write", data=posted))
    assert started == []
    client.post(f"{CATS}/run/write", data=posted | {"repo": "dogs"})
    assert started == ["publish"]
