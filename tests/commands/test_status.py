"""``videotune status``: what runs, projects and clips of a folder stand at."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.command_line import run
from tests.support.reports import (
    export_step,
    full_run,
    overfitting_run,
    start,
    step,
    write_file,
    write_journal,
)
from videotune.cli.train import show_training
from videotune.commands.status import runs_below
from videotune.commands.train import TrainResult
from videotune.errors import DONE, VideotuneError
from videotune.runs.checkpoint import MARKER

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "output.schema.json"


def status_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``status --json`` prints, which the schema describes."""
    assert run("status", folder, as_json=True) == DONE
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(value, json.loads(SCHEMA.read_text()))
    return value


def beat(folder: Path, state: str = "training", **changed: Any) -> None:
    """Write a heartbeat of this process, which is alive."""
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "step": 3,
        "state": state,
        "time": time.time(),
        "started": time.time() - 60,
    }
    write_file(folder, "heartbeat.json", facts | changed)


def test_each_run_says_how_it_stands_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full_run(tmp_path / "runs" / "finished")
    running = tmp_path / "runs" / "running"
    write_journal(running, [start(), *(step(number) for number in range(1, 4))])
    write_file(running, "config.json", {"steps": 120})
    beat(running)
    killed = tmp_path / "other" / "killed"
    write_journal(killed, [start(), step(1)])
    beat(killed, pid=2**22 + 1, time=time.time() - 3600)
    os.utime(killed / "heartbeat.json", (1, 1))
    encoding = tmp_path / "encoding"
    beat(encoding, "encoding", step=0)

    rows = {Path(row["run"]).name: row for row in status_of(tmp_path, capsys)["runs"]}
    assert set(rows) == {"finished", "running", "killed", "encoding"}
    assert rows["finished"]["state"] == "done"
    assert rows["finished"]["exports"]
    assert rows["finished"]["next"].startswith("videotune sample ")
    assert rows["running"]["state"] == rows["encoding"]["state"] == "running"
    assert (rows["running"]["step"], rows["running"]["steps"]) == (3, 120)
    assert rows["running"]["seconds_left"] > 0
    assert rows["finished"]["seconds_left"] is None
    assert rows["killed"]["state"] == "dead"
    assert rows["killed"]["next"] == f"videotune resume {killed}"
    # the newest first, and each command names its run
    assert rows["running"]["next"] == f"videotune wait {running}"
    assert Path(runs_below(tmp_path)[-1].run).name in ("killed", "finished")


def test_a_verdict_stands_with_what_it_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = overfitting_run(tmp_path / "run")
    (overview,) = status_of(folder, capsys)["runs"]
    assert overview["verdict_reason"]
    assert run("status", folder) == DONE
    words = " ".join(capsys.readouterr().out.split())
    assert f"{overview['shown_verdict']}: {overview['verdict_reason']}" in words


def test_the_files_and_the_next_command_are_of_the_recommended_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = full_run(tmp_path / "run")
    end = {"kind": "end", "step": 120, "why": "done"}
    take = {"step": 60, "why": "step 60 was better"}
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps(end | {"take": take}) + "\n")
    names = [f"run-step-{step:06d}-comfyui.safetensors" for step in (120, 60)]
    rows = [{"format": "comfyui", "path": f"export/{name}"} for name in names]
    write_file(folder, "exports.json", rows[:1])
    for name in names:
        (folder / "export" / name).write_bytes(b"weights")

    (row,) = status_of(tmp_path, capsys)["runs"]
    assert row["next"] == f"videotune export {folder} --step 60"
    write_file(folder, "exports.json", rows)
    (row,) = status_of(tmp_path, capsys)["runs"]
    assert row["recommended"] == 60
    assert [Path(path).name for path in row["exports"]] == [*reversed(names)]
    assert row["next"] == f'videotune sample {folder} --step 60 --prompt "…"'

    assert run("status", tmp_path) == DONE
    lines = capsys.readouterr().out.splitlines()
    of_files = [line for line in lines if "-comfyui" in line]
    assert ["recommended" in line for line in of_files] == [True, False]


def test_likely_copies_and_faulty_samples_are_named_with_where_to_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    black = {"picture": {"fault": "black"}}
    replication = {"line": 0.7, "copies": 2, "base_copies": 0}
    measured = {"kind": "sample_metrics", "step": 3, "samples": [black, {}, {}]}
    records = [start(), *(step(number) for number in range(1, 4))]
    records += [measured | {"replication": replication}]
    records += [{"kind": "save", "step": 3, "path": "checkpoints/step-3"}]
    write_journal(folder, records)

    (row,) = status_of(tmp_path, capsys)["runs"]
    found = {"step": 3, "copies": 2, "base_copies": 0, "samples": 3}
    assert row["likely_copies"] == found
    assert "1 is black" in row["faulty_samples"]

    assert run("status", folder) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(f"videotune report {folder}") == 2, "there is no report yet"
    (folder / "report.html").touch()
    assert run("status", folder) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(str(folder / "report.html")) == 2

    # The end of a training says the same.
    report = folder / "report.html"
    recommended = {"step": 3, "why": "it is the last"}
    show_training(
        TrainResult(folder, "done", 3, recommended=recommended, report=report)
    )
    printed = " ".join(capsys.readouterr().err.split())
    assert "2 of 3 samples are likely copies" in printed
    assert "1 is black" in printed


def test_of_several_runs_the_others_are_named_with_the_command_that_shows_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1, 6):
        folder = full_run(tmp_path / f"run-{number}")
        os.utime(folder / "journal.jsonl", (number, number))
    killed = tmp_path / "killed"
    write_journal(killed, [start(), step(1)])
    beat(killed, pid=2**22 + 1, time=time.time() - 3600)
    for path in killed.iterdir():
        os.utime(path, (0, 0))

    assert run("status", tmp_path) == DONE
    lines = capsys.readouterr().out.split("\n")
    below_table = lines[lines.index(f"newest: {tmp_path / 'run-5'}") :]
    text = "\n".join(below_table)
    assert f"next: videotune sample {tmp_path / 'run-5'}" in text
    assert f"next for {killed} (dead): videotune resume {killed}" in text
    assert "4 other runs" in text
    for number in (4, 3, 2):
        assert str(tmp_path / f"run-{number}") in text
    assert str(tmp_path / "run-1") not in text
    assert "1 more in the table" in text
    command = f"videotune status {tmp_path / 'run-4'}"
    assert below_table[-2].endswith(command)

    assert run("status", tmp_path / "run-4") == DONE
    printed = capsys.readouterr().out
    assert "other run" not in printed
    assert "newest:" not in printed


def test_a_folder_of_clips_without_a_run_says_what_is_missing(
    small_clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a name").mkdir()
    clip = next(path for path in small_clips.rglob("*.mp4"))
    (tmp_path / "a name" / "a.mp4").symlink_to(clip)
    dataset = status_of(tmp_path / "a name", capsys)["dataset"]
    assert (dataset["clips"], dataset["without_caption"]) == (1, 1)
    assert dataset["unreadable"] == 0
    assert dataset["next"].startswith("videotune caption '")

    (tmp_path / "a name" / "a.txt").write_text("a ball")
    dataset = status_of(tmp_path / "a name", capsys)["dataset"]
    assert dataset["without_caption"] == 0
    assert dataset["next"].startswith("videotune check '")


def test_nothing_and_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = status_of(tmp_path, capsys)
    assert (empty["runs"], empty["projects"], empty["dataset"]) == ([], [], None)
    assert list(tmp_path.iterdir()) == [], "status writes nothing"
    with pytest.raises(VideotuneError):
        run("status", tmp_path / "nowhere")


def test_a_damaged_run_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full_run(tmp_path / "good")
    write_journal(tmp_path / "bad", [], tail='{"kind": "step"\nno json\n')
    write_file(tmp_path / "bad", "config.json", ["no", "object"])
    write_file(tmp_path / "bad", "exports.json", {"path": 3})
    (tmp_path / ".hidden").mkdir()
    full_run(tmp_path / ".hidden" / "run")
    names = [Path(row["run"]).name for row in status_of(tmp_path, capsys)["runs"]]
    assert sorted(names) == ["bad", "good"]


def test_a_project_of_the_studio_says_what_its_pages_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from videotune.studio import projects

    project = projects.create(tmp_path, "cats")
    (row,) = status_of(tmp_path, capsys)["projects"]
    assert [stage["stage"] for stage in row["stages"]] == [
        *("clips", "captions", "model", "plan", "run", "result")
    ]
    assert row["stages"][0]["state"] == "open"
    assert row["next"] == "Add clips"
    assert not (tmp_path / ".queue").exists(), "status writes nothing"

    full_run(project.folder / "runs" / "run-1")
    write_file(project.folder / "runs" / "run-1", "config.json", {"steps": 120})
    value = status_of(tmp_path, capsys)
    states = {
        stage["stage"]: stage["state"] for stage in value["projects"][0]["stages"]
    }
    assert (states["run"], states["result"]) == ("done", "done")
    assert len(value["runs"]) == 1


def test_a_damaged_clip_does_not_lack_a_caption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    dataset = status_of(tmp_path, capsys)["dataset"]
    assert (dataset["without_caption"], dataset["unreadable"]) == (0, 1)
    assert dataset["next"].startswith("videotune check ")


@pytest.mark.parametrize("base", ["asset:toy", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"])
def test_files_of_the_toy_are_called_so(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = full_run(tmp_path / "runs" / "finished")
    config = json.loads((finished / "config.json").read_text())
    config["settings"]["base_model_name"] = base
    (finished / "config.json").write_text(json.dumps(config))

    assert run("status", finished) == DONE
    assert ("only with the toy model" in capsys.readouterr().out) == base.startswith(
        "asset:"
    )


@pytest.mark.parametrize("saves", [[], [5, 40]])
def test_a_stopped_run_says_what_happened_and_what_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saves: list[int]
) -> None:
    stopped = tmp_path / "run"
    stopped.mkdir()
    lines = [{"kind": "end", "step": 44, "why": "interrupted"}]
    (stopped / "journal.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    for saved in saves:
        folder = stopped / "checkpoints" / f"step-{saved}"
        folder.mkdir(parents=True)
        (folder / MARKER).write_text("{}")
    (stopped / "checkpoints" / "step-44").mkdir(
        parents=True
    )  # was not written to its end
    assert run("status", stopped) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "(interrupted)" in printed
    expected = "step 40 is saved" if saves else "nothing is saved yet"
    assert expected in printed
    assert f"next: videotune resume {stopped}" in printed


@pytest.mark.parametrize("why", ["stopped", "interrupted", "early"])
def test_a_run_that_more_steps_make_worse_goes_on_with_its_recommended_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    folder = overfitting_run(tmp_path / "run", why)
    (folder / "checkpoints/step-120" / MARKER).write_text("{}")
    (row,) = status_of(tmp_path, capsys)["runs"]
    assert row["recommended"] == 60
    assert row["next"] == f"videotune export {folder} --step 60"

    export_step(folder, 120)
    (row,) = status_of(tmp_path, capsys)["runs"]
    assert row["next"] == f"videotune export {folder} --step 60", "of another step"
    export_step(folder, 60)
    (row,) = status_of(tmp_path, capsys)["runs"]
    assert row["next"] == f'videotune sample {folder} --step 60 --prompt "…"'

    assert run("status", folder) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "recommended, for ComfyUI" in printed
    if why != "early":
        assert "a resume continues from there; more steps on these clips" in printed


def test_a_run_that_failed_after_it_copied_is_diagnosed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = overfitting_run(tmp_path / "run")
    journal = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "journal.jsonl").write_text("\n".join(journal[:-1]) + "\n")
    beat(folder, "ended", pid=2**22 + 1)
    (row,) = status_of(tmp_path, capsys)["runs"]
    assert row["next"] == f"videotune doctor {folder}"
