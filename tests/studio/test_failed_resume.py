"""What pages say of a run whose resume has failed, and of settings that were changed
before or while a run trained.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import full_run, visible_text, write_file
from videotune.files import write_json
from videotune.queue import entries
from videotune.studio import gpu, projects, queue_page
from videotune.studio.projects import Project

REASON = "the data of runs/run-1 has changed since it started: 1 clip (horse.mp4)"


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(gpu, "list_gpus", list)
    project = projects.create(tmp_path, "Cats", preset="toy")
    (project.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    (project.folder / "clips/a.txt").write_text("a cat\n")
    run = project.folder / "runs" / "run-1"
    entries.add(queue_page.queue_folder(tmp_path), "cats--run-1", {}, run)
    full_run(run)
    write_file(run, "config.json", {"steps": 120})
    return project


def change_settings(project: Project, seconds: float) -> None:
    """Change a setting as long after now."""
    projects.save_draft(project, {"steps": 7})
    later = time.time() + seconds
    os.utime(project.folder / "config.json", (later, later))


def add_job(root: Path, code: int, started: float) -> None:
    """Write the folder of a resume that has ended."""
    queue = queue_page.queue_folder(root)
    entries.requeue(queue, "cats--run-1", ["train", "--resume"])
    entries.change_records(queue, {"cats--run-1": {"added": started}})
    entry = entries.find_entry(queue, "cats--run-1")
    folder = queue / "jobs" / "000001-train"
    folder.mkdir(parents=True)
    facts = {
        "kind": "train", "about": "cats--run-1", "words": ["train"], "cwd": str(queue),
        "started": started, "turn": entry.turn,
    }  # fmt: skip
    write_json(folder / "job.json", facts)
    write_json(folder / "rc.json", {"code": code, "ended": started + 1})
    (folder / "log").write_text(f"videotune: {REASON}\n")


def bars(client: Any, page: str) -> tuple[str, str]:
    """Return the top bar and the path bar of a page, as they are read."""
    text = client.get(f"/p/cats/{page}").text
    top = text.partition('id="r-status"')[2].partition("</div>")[0]
    path = text.partition('<nav class="path"')[2].partition("</nav>")[0]
    return visible_text(top), visible_text(path)


@pytest.mark.parametrize("page", ["data", "setup", "results"])
def test_a_failed_resume_is_told_on_each_page_with_its_reason(
    client: Any, cats: Project, page: str
) -> None:
    change_settings(cats, 2)
    add_job(cats.folder.parent, 1, time.time() + 10)
    top, path = bars(client, page)
    assert REASON in top
    assert f"run-1 failed: {REASON}" in path
    assert "See why it failed" in path
    assert "settings changed since" not in path
    assert 'href="/p/cats/train?run=run-1' in client.get(f"/p/cats/{page}").text


def test_a_failure_is_settled_by_the_next_change_of_the_settings(
    client: Any, cats: Project
) -> None:
    add_job(cats.folder.parent, 1, time.time() + 10)
    change_settings(cats, 60)
    top, path = bars(client, "setup")
    assert REASON not in top + path
    assert "settings changed since run-1" in path


def test_a_change_before_a_resume_or_while_a_run_trains_is_told_after_it(
    client: Any, cats: Project
) -> None:
    change_settings(cats, 30)
    add_job(cats.folder.parent, 0, time.time() + 60)
    ended = time.time() + 90
    os.utime(cats.folder / "runs/run-1/journal.jsonl", (ended, ended))
    assert "settings changed since run-1" in bars(client, "setup")[1]
    assert 'id="older-settings"' in client.get("/p/cats/results").text
