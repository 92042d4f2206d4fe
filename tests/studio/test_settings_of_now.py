"""Where a run has the project's settings of now, pages name it and lead to it."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import full_run, visible_text, write_file
from videotune.config.nested_keys import flatten, unflatten
from videotune.presets.shipped import read_preset
from videotune.studio import gpu, projects, queue_page
from videotune.studio.form import inherited_values
from videotune.studio.projects import Project


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose settings have changed after each of its runs."""
    monkeypatch.setattr(gpu, "list_gpus", list)
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "Cats", preset="toy", card="RTX 3090")
    (project.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    (project.folder / "clips/a.txt").write_text("a cat\n")
    return project


def set_settings(project: Project, keys: dict[str, Any]) -> None:
    projects.save_draft(project, keys)
    later = time.time() + 60
    os.utime(project.folder / "config.json", (later, later))


def add_run(
    project: Project,
    name: str,
    keys: Mapping[str, Any],
    end: str = "done",
    steps: int = 120,
) -> Path:
    """Make a run with settings as a training leaves it; a later one is newer."""
    run = full_run(project.folder / "runs" / name)
    settings = {**inherited_values("toy"), **keys}
    settings = {
        key: value for key, value in settings.items() if not key.startswith("datasets.")
    }
    origins = {
        **dict.fromkeys(settings, "default"),
        **dict.fromkeys(flatten(read_preset("toy")), "preset"),
        **dict.fromkeys(keys, "user"),
    }
    config = {"settings": unflatten(settings), "origins": origins, "preset": "toy"}
    write_file(run, "config.json", {**config, "steps": steps})
    with (run / "journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write(json.dumps({"kind": "end", "step": 120, "why": end}) + "\n")
    return run


def results_banner(client: Any, run: str, banner: str = "older-settings") -> str:
    text = str(client.get("/p/cats/results", params={"run": run}).text)
    return text.split(f'id="{banner}"')[1].split("</div>")[0]


def path_bar(client: Any) -> str:
    text = str(client.get("/p/cats/setup").text)
    return text.partition('<nav class="path"')[2].partition("</nav>")[0]


RANK_4 = {"lora.rank": 4}
RANK_8 = {"lora.rank": 8}


def test_a_result_of_older_settings_leads_to_the_run_that_was_trained_with_those_of_now(
    client: Any, cats: Project
) -> None:
    add_run(cats, "run-1", {})
    add_run(cats, "low-rank", RANK_4)
    set_settings(cats, unflatten(RANK_4))
    place = results_banner(client, "run-1")
    assert "low-rank was trained with those." in visible_text(place)
    assert 'href="/p/cats/results?run=low-rank"' in place
    assert "Train with the settings of now" not in place

    set_settings(cats, unflatten(RANK_8))
    place = results_banner(client, "run-1")
    assert "low-rank" not in place
    assert "Train with the settings of now" in place


def test_a_run_of_a_sweep_is_not_that_of_the_settings(
    client: Any, cats: Project
) -> None:
    """Although it is later than they are."""
    set_settings(cats, unflatten(RANK_4))
    add_run(cats, "run-1", RANK_4)
    add_run(cats, "sweep-1.2", RANK_8)
    for name in (projects.CONFIG, projects.PROJECT_FILE):
        os.utime(cats.folder / name, (1, 1))
    sweep = {"runs": {"sweep-1.2": {"lora.rank": "8"}}}
    write_file(cats.folder / ".studio" / "sweeps", "sweep-1.json", sweep)
    bar = visible_text(path_bar(client))
    assert "run-1: done" in bar
    assert "sweep" not in bar

    set_settings(cats, {"lora": {"rank": 6}})
    assert "sweep-1.2 has values of a sweep" in visible_text(path_bar(client))
    banner = visible_text(results_banner(client, "sweep-1.2"))
    assert "sweep-1.2 is a run of a sweep" in banner
    assert "again" not in banner


def test_the_path_speaks_of_a_stopped_run_whose_settings_are_used_again(
    client: Any, cats: Project
) -> None:
    add_run(cats, "run-1", RANK_4, end="stopped", steps=1500)
    add_run(cats, "third-try", RANK_8)
    set_settings(cats, {"lora": {"rank": 6}})
    assert "settings changed since third-try" in visible_text(path_bar(client))

    assert client.post("/p/cats/run/use", data={"run": "run-1"}).status_code == 204
    bar = path_bar(client)
    assert "run-1: stopped at step 120 of 1,500" in visible_text(bar)
    assert "Next: Go to Resume of run-1" in visible_text(bar)
    assert 'href="/p/cats/train?run=run-1#r-run"' in bar
    assert "settings changed" not in bar

    place = results_banner(client, "third-try")
    assert "run-1 was trained with those, and stopped at step 120 of 1,500." in (
        visible_text(place)
    )
    assert 'href="/p/cats/train?run=run-1"' in place


def test_the_path_speaks_of_the_result_of_a_run_whose_settings_are_used_again(
    client: Any, cats: Project
) -> None:
    add_run(cats, "run-1", RANK_4)
    add_run(cats, "run-2", RANK_8)
    set_settings(cats, unflatten(RANK_4))
    bar = path_bar(client)
    assert "run-1: done" in visible_text(bar)
    assert "/p/cats/results?run=run-1#r-result" in bar


@pytest.mark.parametrize(
    "reason", ["begins from a checkpoint", "failed", "other clips"]
)
def test_a_run_that_is_no_result_of_these_settings_is_not_named(
    client: Any, cats: Project, reason: str
) -> None:
    keys: dict[str, Any] = dict(RANK_4)
    if reason == "begins from a checkpoint":
        keys["init_from"] = "runs/run-0/checkpoints/step-60"
    run = add_run(cats, "run-1", keys)
    if reason == "failed":
        journal = run / "journal.jsonl"
        lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
        journal.write_text("".join(line for line in lines if '"end"' not in line))
        beat = {"pid": 2**22 + 1, "host": "x", "step": 0, "state": "ended", "time": 1.0}
        write_file(run, "heartbeat.json", beat | {"started": 1.0})
    if reason == "other clips":
        write_file(run, "check.json", account_of(cats, "another caption"))
    add_run(cats, "run-2", RANK_8)
    set_settings(cats, unflatten(RANK_4))
    assert "settings changed since run-2" in visible_text(path_bar(client))


def account_of(project: Project, caption: str) -> dict[str, Any]:
    """Return the account of a run that was trained with the project's clip."""
    clip = {
        "path": str(project.folder / "clips/a.mp4"), "used": True, "held_out": False,
        "captions": [caption], "id": "a" * 64,
    }  # fmt: skip
    return {"clips": [clip]}


def test_a_result_of_older_clips_leads_to_the_run_that_has_those_of_now(
    client: Any, cats: Project
) -> None:
    set_settings(cats, unflatten(RANK_4))
    run = add_run(cats, "run-1", RANK_4)
    write_file(run, "check.json", account_of(cats, "an earlier caption"))
    place = results_banner(client, "run-1", "older-clips")
    assert "Train with the clips of now" in place

    run = add_run(cats, "run-2", RANK_4)
    write_file(run, "check.json", account_of(cats, "a cat"))
    place = results_banner(client, "run-1", "older-clips")
    assert "run-2 was trained with those." in visible_text(place)
    assert "Train with the clips of now" not in place
