"""A run whose clips have changed is asked about before it is resumed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import write_clip
from tests.support.job_folders import steps
from tests.support.waiting import wait_until
from videotune.files import write_json
from videotune.reporter.read import read_run
from videotune.studio import (
    captions_edit,
    clip_moves,
    clips,
    data_changes,
    projects,
    queue_page,
)


@pytest.fixture
def cats(
    tmp_path: Path, small_clips: Path, monkeypatch: pytest.MonkeyPatch
) -> projects.Project:
    """A project with a run that has stopped; its account is that of the command."""
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "Cats", preset="toy")
    for name, clip in zip("ab", sorted(small_clips.rglob("*.mp4")), strict=False):
        shutil.copy(clip, project.folder / "clips" / f"{name}.mp4")
        (project.folder / "clips" / f"{name}.txt").write_text(f"a ball {name}\n")
    projects.save_draft(project, {"datasets": {"trigger": "ohwx"}})

    run = project.folder / "runs" / "run-1"
    steps(run, range(1, 4))
    datasets = projects.datasets(project)
    write_json(run / "config.json", {"steps": 9, "settings": {"datasets": datasets}})
    command = [sys.executable, "-m", "videotune", "check", "--json"]
    command += projects.command_arguments(project)
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    write_json(run / "check.json", json.loads(answer.stdout))
    # Files that have just been copied may still change, so others would wait for them.
    monkeypatch.setattr(clips, "QUIET_SECONDS", -1)
    clips.start_check(project)
    wait_until(lambda: clips.latest_check(project) is not None, 60)
    return project


def resume(client: Any, **values: str) -> Any:
    return client.post("/p/cats/run/resume", data={"run": "run-1", **values})


def is_queued(project: projects.Project) -> bool:
    entry = queue_page.training_entry(project.folder.parent, project, "run-1")
    return entry is not None


def asked_about(answer: Any) -> str:
    assert answer.status_code == 409
    return str(json.loads(answer.headers["HX-Trigger"])["ask"]["lines"][0])


def test_a_run_whose_clips_are_as_they_were_is_resumed_at_once(
    cats: projects.Project, client: Any
) -> None:
    assert resume(client).status_code == 204
    assert is_queued(cats)


def test_a_result_of_other_captions_is_called_that(
    cats: projects.Project, client: Any
) -> None:
    """On the page Results and in the path, once the run is done."""
    run = cats.folder / "runs" / "run-1"
    with (run / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"kind": "end", "step": 9, "why": "done"}) + "\n")
    write_json(run / "exports.json", [])
    write_json(
        run / "config.json",
        json.loads((run / "config.json").read_text()) | {"steps": 3},
    )
    (run / "checkpoints" / "step-00000003").mkdir(parents=True, exist_ok=True)

    before = client.get("/p/cats/results?run=run-1").text
    assert "clips changed since" not in before
    captions_edit.change(cats, {"clips/a.mp4": "a red ball"}, "edit")
    after = client.get("/p/cats/results?run=run-1").text
    assert "clips changed since run-1" in after
    assert "with older clips" in after or "after the next run" in after


def test_a_run_with_another_caption_is_asked_about_before_it_starts(
    cats: projects.Project, client: Any
) -> None:
    captions_edit.change(cats, {"clips/a.mp4": "a red ball"}, "edit")
    assert "1 clip with another caption (a.mp4)" in asked_about(resume(client))
    assert "a.mp4" in asked_about(resume(client, step="2"))
    assert not is_queued(cats)

    assert resume(client, sure="1").status_code == 204
    entry = queue_page.training_entry(cats.folder.parent, cats, "run-1")
    assert entry is not None
    assert "--allow-data-change" in entry.arguments


def test_a_clip_that_is_gone_or_kept_aside_is_asked_about(
    cats: projects.Project, client: Any
) -> None:
    clip_moves.move(cats, ["clips/a.mp4"], "bin")
    assert "1 clip removed (a.mp4)" in asked_about(resume(client))


def test_a_change_that_was_undone_is_none(cats: projects.Project, client: Any) -> None:
    captions_edit.change(cats, {"clips/a.mp4": "a red ball"}, "edit")
    client.post("/p/cats/data/undo", data={})
    assert resume(client).status_code == 204


def test_a_file_of_a_known_name_is_called_moved_only_if_the_other_is_gone(
    cats: projects.Project,
) -> None:
    """A new a.mp4 in another folder, and b.mp4 kept aside."""
    folder = cats.folder / "clips" / "again"
    folder.mkdir()
    frames = np.random.default_rng(5).integers(0, 255, (24, 64, 64, 3), np.uint8)
    write_clip(folder / "a.mp4", frames, 12)
    (folder / "a.txt").write_text("noise")
    clip_moves.move(cats, ["clips/b.mp4"], "held-out")

    clips.start_check(cats)
    rows = clips.table(cats).rows
    wait_until(
        lambda: clips.table(cats).rows["clips/again/a.mp4"]["state"] == "used", 60
    )
    assert set(rows) == {"clips/a.mp4", "clips/again/a.mp4", "held-out/b.mp4"}

    changes = data_changes.changes_since(cats, read_run(cats.folder / "runs" / "run-1"))
    assert changes == "1 clip added (again/a.mp4); 1 clip now kept aside (b.mp4)"


def test_a_clip_in_another_folder_is_neither_new_nor_kept_aside(
    cats: projects.Project,
) -> None:
    folder = cats.folder / "clips" / "again"
    folder.mkdir()
    for name in ("a.mp4", "a.txt"):
        (cats.folder / "clips" / name).rename(folder / name)
    clips.start_check(cats)
    wait_until(
        lambda: clips.table(cats).rows["clips/again/a.mp4"]["state"] == "used", 60
    )

    changes = data_changes.changes_since(cats, read_run(cats.folder / "runs" / "run-1"))
    assert changes == "1 clip in another folder (again/a.mp4)"


def test_clips_kept_aside_elsewhere_are_not_called_changed(
    cats: projects.Project, client: Any
) -> None:
    """Of clips outside of the project's folders the page knows nothing."""
    account_path = cats.folder / "runs" / "run-1" / "check.json"
    account = json.loads(account_path.read_text())
    elsewhere = account["clips"][0] | {"path": "/films/x.mp4", "held_out": True}
    account["clips"].append(elsewhere)
    write_json(account_path, account)
    captions_edit.change(cats, {"clips/a.mp4": "a red ball"}, "edit")

    answer = resume(client)
    assert answer.status_code == 409
    lines = json.loads(answer.headers["HX-Trigger"])["ask"]["lines"]
    assert not any("kept aside" in line for line in lines)


def test_the_new_token_of_an_embedding_is_no_change_of_the_captions(
    cats: projects.Project,
) -> None:
    """The run puts it in front of captions; the page asked to train again, and again."""
    run = cats.folder / "runs" / "run-1"
    settings = {"training_method": "EMBEDDING", "datasets": [{"path": "clips"}]}
    write_json(run / "config.json", {"steps": 9, "settings": settings})
    account = json.loads((run / "check.json").read_text())
    for row in account["clips"]:
        row["captions"] = [f"<videotune>, {caption}" for caption in row["captions"]]
    write_json(run / "check.json", account)
    assert not data_changes.changes_since(cats, read_run(run))

    captions_edit.change(cats, {"clips/a.mp4": "a red ball"}, "edit")
    changes = data_changes.changes_since(cats, read_run(run))
    assert changes == "1 clip with another caption (a.mp4)"
