"""What a run does while its disk takes nothing, and what it says of what is saved."""

import errno
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.run_results import of_kind, warnings_of
from tests.support.trainers import Lab, trainer_of
from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.runs.checkpoint import Checkpoint, complete_checkpoints
from videotune.trainer import saving
from videotune.trainer.saving import (
    finish_pending_save,
    is_writing,
    rescue_message,
    retire,
    save,
    save_before_error,
    settle_pending_save,
    wait_for_writer,
    wait_or_raise,
    with_disk_retry,
)
from videotune.trainer.trainer import PendingSave, Trainer

FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def trainer(
    tmp_path: Path, small_clips: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Trainer]:
    monkeypatch.setattr(saving, "TRY_AGAIN", 0.01)
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, {"steps": 4, "resolution": "32x32"})
    yield trainer
    trainer.journal.close()


def failing(times: int, error: OSError = FULL) -> Callable[[], str]:
    """Return a function that fails ``times`` times and then succeeds."""
    left = [error] * times

    def write() -> str:
        if left:
            raise left.pop()
        return "written"

    return write


def test_a_full_disk_is_waited_for_and_told_once(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.heartbeat.set("saving", 2)
    assert with_disk_retry(trainer, 2, failing(3)) == "written"
    (warning,) = of_kind(trainer.run, "warning")
    assert warning["step"] == 2
    reason = "no room to save step 2 (No space left on device)"
    assert warning["text"] == f"{reason}: the run waits until there is"
    text = "".join(capsys.readouterr())
    assert text.count("paused: ") == 1
    assert text.count("there is room again") == 1
    assert trainer.heartbeat.state == "saving"
    assert trainer.paused_at is None
    # The next pause is told again; without one nothing is.
    assert with_disk_retry(trainer, 3, failing(0)) == "written"
    assert "".join(capsys.readouterr()) == ""
    with_disk_retry(trainer, 3, failing(1))
    assert len(of_kind(trainer.run, "warning")) == 2


def test_the_heartbeat_says_that_the_run_waits(trainer: Trainer) -> None:
    wait_or_raise(trainer, 3, FULL)
    assert trainer.heartbeat.state == "paused"
    beat = json.loads((trainer.run / "heartbeat.json").read_text())
    assert (beat["state"], beat["step"]) == ("paused", 3)


def test_a_broken_disk_ends_the_run(trainer: Trainer) -> None:
    with pytest.raises(VideotuneError, match=r"step 2 cannot .*begins at step 0"):
        with_disk_retry(trainer, 2, failing(1, BROKEN))
    trainer.dist = DistributedContext(1, 2)
    with pytest.raises(VideotuneError, match="step 2 cannot be saved"):
        with_disk_retry(trainer, 2, failing(1, BROKEN))
    # Beside the main process, none waits by itself.
    assert with_disk_retry(trainer, 2, failing(2)) == "written"
    assert trainer.paused_at is None


def test_a_request_from_before_the_pause_does_not_end_it(trainer: Trainer) -> None:
    """It has led to this save. A later one does, or one in control.json."""
    trainer.signals.stop = True
    trainer.signals.at = 0.0
    wait_or_raise(trainer, 2, FULL)
    assert trainer.paused_at is not None
    trainer.signals.at = trainer.paused_at
    with pytest.raises(VideotuneError, match="since the last checkpoint are lost"):
        wait_or_raise(trainer, 2, FULL)

    trainer.signals.stop = False
    (trainer.run / "control.json").write_text('{"save": true}')
    wait_or_raise(trainer, 2, FULL)
    save(trainer, 2, "backup", thread=False)
    (trainer.run / "control.json").write_text('{"stop": true}')
    with pytest.raises(VideotuneError, match="all steps are saved"):
        wait_or_raise(trainer, 2, FULL)
    (trainer.run / "control.json").write_text('{"stop": true}')
    with pytest.raises(VideotuneError, match="are lost"):
        wait_or_raise(trainer, 3, FULL)


def test_it_is_said_where_a_run_can_be_resumed(trainer: Trainer) -> None:
    assert "begins at step 0" in rescue_message(trainer.run)
    save(trainer, 1, thread=False)
    text = rescue_message(trainer.run)
    assert text.startswith("The only complete checkpoint is of step 1; ")
    assert text.endswith(f"videotune resume {trainer.run}")


def steps_saved(trainer: Trainer) -> list[int]:
    return [checkpoint.step for checkpoint in complete_checkpoints(trainer.run)]


def test_an_error_leaves_the_last_step_saved(trainer: Trainer) -> None:
    assert "step 0" in save_before_error(trainer, 0)
    assert steps_saved(trainer) == []
    assert "step 2" in save_before_error(trainer, 2)
    assert trainer.pending_save is None
    assert steps_saved(trainer) == [2]
    save_before_error(trainer, 2)
    assert len(of_kind(trainer.run, "save")) == 1
    save(trainer, 3, "backup", thread=False)
    save_before_error(trainer, 3)
    kinds = {each.step: each.kind for each in complete_checkpoints(trainer.run)}
    assert kinds == {2: "save", 3: "backup"}, "a backup is enough"
    trainer.dist = DistributedContext(1, 2)
    save_before_error(trainer, 4)
    assert steps_saved(trainer) == [2, 3]


def test_a_process_that_has_all_of_it_saves_alone(trainer: Trainer) -> None:
    """Another process of the run hears nothing of it."""
    trainer.dist = DistributedContext(0, 2)
    names = []
    write = saving.save_checkpoint

    def note_thread(*arguments: Any) -> Checkpoint:
        names.append(threading.current_thread().name)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", note_thread)
        save(trainer, 1, thread=False)
        save(trainer, 2)
        finish_pending_save(trainer)
    assert steps_saved(trainer) == [1, 2]
    assert names[0] == threading.current_thread().name
    assert names[1].startswith("checkpoint")


def test_a_full_disk_is_looked_at_again_after_a_while(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And requests to stop several times a second."""
    naps: list[float] = []
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        naps.append(seconds)
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(saving, "TRY_AGAIN", 5.0)
    monkeypatch.setattr(saving, "time", clock)
    wait_or_raise(trainer, 3, FULL)
    assert sum(naps) == pytest.approx(5.0, abs=0.5)
    assert max(naps) <= 0.5
    assert trainer.paused_at == 100.0


def ended(result: Checkpoint | OSError) -> Future[Checkpoint]:
    future: Future[Checkpoint] = Future()
    if isinstance(result, OSError):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def test_a_failing_process_writes_nothing_again_that_others_write_with_it(
    trainer: Trainer,
) -> None:
    """They may train on, or be gone."""
    settle_pending_save(trainer)
    wait_for_writer(trainer)
    save(trainer, 1, thread=False)
    (checkpoint,) = complete_checkpoints(trainer.run)

    def write() -> Checkpoint:
        raise AssertionError("it is written again")

    def pending(result: Checkpoint | OSError | None, **fields: Any) -> PendingSave:
        written = None if result is None else ended(result)
        return PendingSave(1, 0.0, write, written, **fields)

    trainer.pending_save = pending(FULL, is_shared=True)
    settle_pending_save(trainer)
    (warning,) = warnings_of(trainer.run)
    assert warning.startswith("step 1 is not saved: ")
    assert trainer.pending_save is None

    trainer.pending_save = pending(checkpoint, is_shared=True)
    assert not is_writing(trainer)
    settle_pending_save(trainer)
    assert len(of_kind(trainer.run, "save")) == 2
    trainer.dist = DistributedContext(1, 2)
    trainer.pending_save = pending(FULL, is_shared=True)
    settle_pending_save(trainer)
    assert len(warnings_of(trainer.run)) == 1

    # What one process writes, or no thread, is written again.
    for save_of in (pending(FULL), pending(None, is_shared=True)):
        trainer.pending_save = save_of
        with pytest.raises(AssertionError, match="written again"):
            settle_pending_save(trainer)
    trainer.pending_save = replace(pending(None), written=Future())
    assert is_writing(trainer)


def test_a_save_that_waits_for_room_is_told_with_its_step(trainer: Trainer) -> None:
    save(trainer, 1, thread=False)
    (checkpoint,) = complete_checkpoints(trainer.run)
    write = failing(1)

    def write_checkpoint() -> Checkpoint:
        write()
        return checkpoint

    pending = PendingSave(3, 0.0, write_checkpoint, ended(FULL), waited=5.0)
    trainer.pending_save = pending
    finish_pending_save(trainer)
    assert trainer.pending_save is None
    assert 5 < of_kind(trainer.run, "save")[-1]["waited"] < 65
    (warning,) = of_kind(trainer.run, "warning")
    assert warning["step"] == 3
    assert "step 3" in warning["text"]
    assert len(of_kind(trainer.run, "save")) == 2

    trainer.pending_save = PendingSave(3, 0.0, write_checkpoint, ended(BROKEN))
    finish_pending_save(trainer)  # the disk is well again
    assert len(of_kind(trainer.run, "save")) == 3


def test_a_save_s_line_has_its_seconds_and_a_backup_is_called_one(
    trainer: Trainer,
) -> None:
    save(trainer, 1, "backup")
    assert (trainer.heartbeat.state, trainer.heartbeat.step) == ("saving", 1)
    assert trainer.pending_save is not None
    finish_pending_save(trainer)
    save(trainer, 2, thread=False)
    backup, plain = of_kind(trainer.run, "save")
    assert backup["backup"] is True
    assert "backup" not in plain
    for line, step in ((backup, 1), (plain, 2)):
        assert (line["step"], line["path"]) == (step, f"checkpoints/step-{step}")
        assert 0 < line["waited"] <= line["seconds"] < 60
        assert round(line["seconds"], 3) == line["seconds"]
    views = [line["step"] for line in of_kind(trainer.run, "views")]
    assert views == [1, 2]


def test_a_checkpoint_that_cannot_be_removed_stays_and_is_named(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trainer.job.config.model_copy(update={"save_keep": 1})
    resolved = replace(trainer.job.resolved, config=config)

    def refuse(folder: Path) -> None:
        raise OSError(errno.EACCES, "in use", str(folder))

    for step in (1, 2, 3):
        save(trainer, step, thread=False)
    trainer.job = replace(trainer.job, resolved=resolved)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "remove", refuse)
        retire(trainer)
    assert steps_saved(trainer) == [1, 2, 3]
    warnings = of_kind(trainer.run, "warning")
    assert [warning["step"] for warning in warnings] == [3, 3]
    for warning, step in zip(warnings, (1, 2), strict=True):
        assert f"step-{step} cannot be removed" in warning["text"]
    retire(trainer)
    assert steps_saved(trainer) == [3]
