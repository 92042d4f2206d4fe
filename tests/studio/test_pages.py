"""What the pages say of runs and jobs."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.studio.test_jobs import steps
from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.queue import jobs
from videotune.studio import actions, projects, run_pages, status


def ended_job(project: projects.Project, kind: str, code: int, log: str = "", **facts: Any) -> Path:
    """A job's folder as a command leaves it."""
    folder = project.folder / "jobs" / f"{1 + len(list((project.folder / 'jobs').iterdir())):06d}-{kind}"
    folder.mkdir()
    now = time.time()
    told = {"kind": kind, "about": "run-1", "words": [], "cwd": str(project.folder), "started": now}
    write_json(folder / "job.json", told | facts)
    write_json(folder / "rc.json", {"code": code, "ended": now + 1})
    (folder / "log").write_text(log)
    return folder


def test_an_error_is_told_whole_and_by_the_names_of_the_project(tmp_path: Path) -> None:
    project = projects.create(tmp_path, "one")
    said = f"encoding 3/4\nvideotune: 1 clip has no caption:\n  {project.folder}/clips/a.mp4: there is no a.txt\nWrite it.\n"
    told = jobs.why(jobs.read(ended_job(project, "train", 1, said)))
    assert told == "1 clip has no caption:\n  clips/a.mp4: there is no a.txt\nWrite it."


def test_a_run_that_did_not_go_on_says_so_beside_how_it_stood(tmp_path: Path) -> None:
    project = projects.create(tmp_path, "one")
    run = project.folder / "runs" / "run-1"
    steps(run, range(1, 4))
    write_json(run / "config.json", {"steps": 3, "settings": {}})
    os.utime(run / "journal.jsonl", (time.time() - 60, time.time() - 60))
    assert "did not begin" not in run_pages.train_part(tmp_path, project, {})
    ended_job(project, "train", 1, "videotune: this changes what it learns\n")
    shown = run_pages.train_part(tmp_path, project, {})
    assert "The last attempt to go on did not begin: this changes what it learns" in shown
    assert "3 of 3" in shown


def test_another_number_of_steps_is_meant_where_it_is_asked_for(tmp_path: Path) -> None:
    def resumed(**words: str) -> list[str]:
        return actions.resume_words(tmp_path, actions.Words(words))

    assert resumed(run="run-1") == ["train", "--out", str(tmp_path), "--resume"]
    assert resumed(**{"from": "2"})[-2:] == ["--from", "2"]
    assert resumed(**{"from": "2"}, steps="50")[-3:] == ["--set", "steps=50", "--override"]
    with pytest.raises(VideotuneError, match="whole number"):
        resumed(steps="many")


@pytest.mark.parametrize("variant", ["LORA", "DORA", "LOHA", "LOKR", "OFT"])
def test_export_offers_what_an_adapter_of_the_kind_can_be_written_as(tmp_path: Path, variant: str) -> None:
    import torch

    from videotune.exporter.formats import formats_of
    from videotune.models.base_model import place
    from videotune.models.wan import Wan

    family = Wan(place("asset:toy").folder, torch.device("cpu"), torch.float32)
    write_json(tmp_path / "config.json", {"settings": {"training_method": "LORA", "lora": {"variant": variant}}})
    offered = run_pages.offered(status.read_live(tmp_path))
    assert sorted(offered) == sorted(formats_of(family, variant))
    assert set(offered) <= set(projects.texts()["formats"])


def test_measured_samples_stand_beside_the_clip_that_they_are_nearest_to(tmp_path: Path) -> None:
    project = projects.create(tmp_path, "one")
    run, clip = project.folder / "runs" / "run-1", project.folder / "clips" / "cat.mp4"
    (run / "sample_metrics").mkdir(parents=True)
    for path in (run / "sample_metrics" / "a.mp4", clip):
        path.write_bytes(b"video")
    one = {"path": "sample_metrics/a.mp4", "prompt": "a cat", "seed": 7, "clip": str(clip)}
    one |= {"similarity": 0.98765, "copy": True}
    probe = {"kind": "sample_metrics", "step": 20, "samples": [one, {**one, "path": "sample_metrics/gone.mp4"}]}
    sample = {"kind": "sample", "step": 0, "prompt": "a cat", "path": "samples/a.mp4"}
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (sample, probe)))
    write_json(run / "config.json", {})
    shown = run_pages.samples_part(tmp_path, project, {})
    assert "path=runs/run-1/sample_metrics/a.mp4" in shown
    assert "path=clips/cat.mp4" in shown
    assert "nearest training clip: cat.mp4, likeness 0.988: likely a copy" in shown
    assert "gone.mp4" not in shown
