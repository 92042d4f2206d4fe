"""What ``trackers`` and ``push_to`` write, read back by others' readers; a failure of
either costs a run nothing.
"""

import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import wandb
from PIL import Image

from tests.support.command_line import Patch, train
from tests.support.hub_uploads import upload_hub
from tests.support.index_files import leading_journal
from tests.support.run_results import facts_of, of_kind, warnings_of
from tests.support.trainers import Lab, overrides_of, trainer_of
from videotune.errors import DONE, VideotuneError
from videotune.job.overrides import Overrides
from videotune.runs.journal import read_journal
from videotune.runs.tensorboard import FOLDER
from videotune.runs.trackers import CLIENTS, PACKAGES, TrackedRun, Trackers
from videotune.trainer.resume import Resume

# read when the library is imported
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp())

SHOWN = {
    "steps": 3,
    "validate_every": 3,
    "sample_after": 3,
    "samples": ["a cat"],
    "sample.frames": 5,
    "save_every": 2,
}
OTHERS = tuple(CLIENTS)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: Patch) -> None:
    wandb.teardown()  # it reads the environment once a process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(
        "WANDB_DISABLE_WEAVE", "true"
    )  # else a hint on Weave where another test has imported openai


class Found(NamedTuple):
    """What a tracker has of a run: loss by step, config and verdict as text, and the
    number of previews.
    """

    losses: list[tuple[int, float]]
    config: str
    verdict: str
    media: int


def run_of(lab: Lab, **knobs: Any) -> Path:
    """A whole run with monitoring."""
    assert train(overrides_of(lab, SHOWN | knobs), lab.tmp / "run") == DONE
    return lab.tmp / "run"


def losses(run: Path) -> list[Any]:
    """What is found where each step was sent once."""
    return [
        (line["step"], pytest.approx(line["loss"])) for line in of_kind(run, "step")
    ]


@pytest.mark.effect("trackers")
def test_tensorboard_has_curves_validation_and_previews(lab: Lab) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for wanted in ([], ["tensorboard"]):
        shutil.rmtree(lab.tmp / "run", ignore_errors=True)
        lines = read_journal(run_of(lab, trackers=wanted))
        folder = lab.tmp / "run" / FOLDER
        assert folder.exists() == bool(wanted)
    board = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    board.Reload()
    tags = board.Tags()
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    for tag, key in (
        ("train/loss", "loss"),
        ("train/mse", "mse"),
        ("train/grad_norm", "grad_norm"),
    ):
        found = {event.step: event.value for event in board.Scalars(tag)}
        assert found == {step: pytest.approx(line[key]) for step, line in steps.items()}
    assert {
        "validation/train",
        "views/max_window",
        "seconds/forward",
        "lr/transformer",
    } <= set(tags["scalars"])
    assert any(tag.startswith("mse_by_t/") for tag in tags["scalars"])
    (preview,) = tags["images"]
    assert (preview, [event.step for event in board.Images(preview)]) == (
        "a cat (seed 42)",
        [0, 3],
    )
    gif: Any = Image.open(BytesIO(board.Images(preview)[0].encoded_image_string))
    assert (gif.format, gif.n_frames) == ("GIF", 5)
    assert [tag for tag in tags["tensors"] if tag.startswith("verdict")], (
        "no verdict, said in words"
    )


@pytest.mark.effect("trackers")
@pytest.mark.parametrize("name", ["tensorboard", *OTHERS])
def test_a_missing_package_is_an_error_before_any_work(
    name: str, lab: Lab, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES.get(name, (name,))[-1], None)
    with pytest.raises(VideotuneError, match=rf"pip install .*\[{name}\]"):
        trainer_of(lab, {"trackers": name})
    assert not (lab.tmp / "run0").exists()


def records(folder: Path) -> Iterator[Any]:
    """The records of the offline runs in a folder, oldest first: LevelDB's log format
    (blocks of 32 KiB; of each part a checksum, its length and its type), with a head of
    7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:  # the rest of a block that takes no part
                at += 32768 - at % 32768
                continue
            size, kind = (
                int.from_bytes(content[at + 4 : at + 6], "little"),
                content[at + 6],
            )
            whole += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(whole)
                whole = b""


def read_wandb(run: Path, project: str) -> Found:
    found, results, config, media = [], {}, "", 0
    for record in records(run):
        assert record.run.run_id in (
            "",
            next(iter(run.glob("wandb/offline*"))).name.split("-")[-1],
        )
        config += "".join(item.value_json for item in record.run.config.update)
        row = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        found += (
            [(record.history.step.num, row["train/loss"])]
            if "train/loss" in row
            else []
        )
        media += sum("path" in item.nested_key for item in record.history.item)
        results |= {
            item.key or item.nested_key[0]: item.value_json
            for item in record.summary.update
        }
    return Found(
        [*dict(found).items()], config, results["verdict"], media
    )  # offline, each process has a file


def read_trackio(run: Path, project: str) -> Found:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (own,) = trackio.Api().runs(project)
    rows = SQLiteStorage.get_logs(project, own.name, run_id=own.id)
    found = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    media = sum(
        isinstance(value, dict)
        for row in rows
        for key, value in row.items()
        if key.startswith("samples/")
    )
    return Found(found, json.dumps(own.config), str(own.alerts()), media)


def read_mlflow(run: Path, project: str) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    (own,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    assert own.info.status == "FINISHED"
    found = [
        (one.step, one.value)
        for one in client.get_metric_history(own.info.run_id, "train/loss")
    ]
    media = len(list(run.glob("mlartifacts/*/artifacts/samples/*/*.mp4")))
    return Found(found, json.dumps(own.data.params), own.data.tags["verdict"], media)


READERS = {"wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}


@pytest.mark.effect("trackers", "tracker_project")
@pytest.mark.parametrize("name", OTHERS)
def test_a_tracker_has_curves_previews_verdict_and_config_and_goes_on_after_a_resume(
    name: str, lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resume from step 2 leaves the steps before it once, in the same run; no local
    path is in the config.
    """
    project = f"moving-{name}"
    run = run_of(lab, trackers=name, tracker_project=project)
    found = READERS[name](run, project)
    assert found.losses == losses(run)
    assert (
        found.media,
        "no verdict" in found.verdict,
        lab.clips.name in found.config,
    ) == (
        2,
        True,
        True,
    )
    assert not any(
        str(folder) in found.config for folder in (lab.tmp.parent, lab.clips.parent)
    )
    assert train(Overrides(sets=("steps=5",)), run, resume=Resume(step=2)) == DONE
    assert READERS[name](run, project).losses == losses(run)
    assert warnings_of(run) == []
    printed = "".join(capfd.readouterr()).splitlines()
    assert [
        line
        for line in printed
        if any(word in line for word in ("rackio", "INFO", "wandb:", "mlflow."))
    ] == []


@pytest.mark.parametrize("name", OTHERS)
def test_a_server_that_fails_costs_one_warning_and_no_number(
    name: str, lab: Lab, monkeypatch: Patch
) -> None:
    secret = "0123456789abcdef" * 3
    straight = facts_of(run_of(lab))
    shutil.move(lab.tmp / "run", lab.tmp / "straight")
    with upload_hub(monkeypatch) as server:
        server.status = {"": 500}
        uri = server.url.replace("//", f"//me:{secret}@")
        own = {
            "WANDB_MODE": "online",
            "WANDB_BASE_URL": server.url,
            "WANDB_INIT_TIMEOUT": "2",
        }
        own |= {
            "WANDB_API_KEY": secret[:40],
            "MLFLOW_TRACKING_URI": uri,
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        }
        for key, value in (
            own | {"TRACKIO_SERVER_URL": server.url, "TRACKIO_WRITE_TOKEN": secret}
        ).items():
            monkeypatch.setenv(key, value)
        wandb.teardown()
        run = run_of(lab, trackers=[name, "tensorboard"])
    (warning,) = warnings_of(run)
    assert warning.startswith(name)
    assert facts_of(run) == straight
    assert len(list((run / FOLDER).iterdir())) == 1, "the other tracker has the run"
    assert not any(
        secret[:40].encode() in path.read_bytes()
        for path in run.rglob("*")
        if path.is_file()
    )


def test_the_first_failure_on_a_line_or_at_the_close_is_the_last(
    monkeypatch: Patch,
) -> None:
    """A tracker that raises on its second line, and at its close."""
    for lines in (1, 6):
        told: list[str] = []
        answers = iter([None])
        failing = SimpleNamespace(
            line=lambda _, answers=answers: next(answers), close=lambda: 1 / 0
        )
        monkeypatch.setitem(CLIENTS, "wandb", lambda run, failing=failing: failing)
        trackers = Trackers(
            ["wandb"], TrackedRun(Path("run"), "0", "videotune", {}, 1), told.append
        )
        for _ in range(lines):
            trackers.line({"kind": "step"})
        trackers.close()
        trackers.close()
        assert len(told) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_that_cannot_be_written_costs_one_warning(
    name: str, lab: Lab, monkeypatch: Patch
) -> None:
    """What the library would make is there already, as a file or a folder of that name."""
    run = lab.tmp / "taken"
    (run / "mlflow.db").mkdir(parents=True)
    (run / "wandb").touch()
    if name == "trackio":
        from trackio import sqlite_storage

        (run / "trackio").touch()
        monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", run / "trackio")
    told: list[str] = []
    trackers = Trackers(
        [name], TrackedRun(run, "0", f"taken-{name}", {}, 1), told.append
    )
    trackers.line({"kind": "save", "step": 1, "seconds": 0.1})
    trackers.close()
    assert len(told) == 1


def test_a_database_of_a_stranger_costs_one_warning_and_no_file(lab: Lab) -> None:
    """SQLite would delete the file that its journal names."""
    run = lab.tmp / "strange"
    run.mkdir()
    victim = lab.tmp / "thesis.mp4"
    victim.write_bytes(b"precious")
    database = run / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE any_table (any_column)")
    journal = run / "mlflow.db-journal"
    journal.write_bytes(leading_journal(database, victim))

    warnings: list[str] = []
    tracked_run = TrackedRun(run, "0", "strange", {}, 1)
    trackers = Trackers(["mlflow"], tracked_run, warnings.append)
    trackers.close()
    assert victim.read_bytes() == b"precious"
    (warning,) = warnings
    assert "names another file" in warning


@pytest.mark.effect("push_to")
@pytest.mark.parametrize("code", [None, 500])
def test_a_run_is_pushed_at_its_end_and_a_failure_is_a_warning(
    code: int | None, lab: Lab, monkeypatch: Patch
) -> None:
    straight = facts_of(run_of(lab))
    shutil.move(lab.tmp / "run", lab.tmp / "straight")
    with upload_hub(monkeypatch) as hub:
        hub.status = {"create": code} if code else {}
        run = run_of(lab, push_to="user/mine")
    assert facts_of(run) == straight
    if code:
        (warning,) = warnings_of(run)
        assert "--repo user/mine" in warning
        assert hub.files == {}
    else:
        assert warnings_of(run) == []
        assert {"README.md", "run-step-3.safetensors"} < set(hub.files)
