"""A full disk is waited for: the older checkpoint is whole, no line is lost, and the run ends as if nothing had been."""

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.commands import small_disk
from tests.commands.safety_kit import Running, equal, facts_of, of_kind, start, state, warnings_of
from tests.commands.small_disk import (
    after_step_three,
    after_the_first_save,
    before_the_export,
    in_the_middle_of_the_second_save,
    make_room,
)
from tests.shell import train
from videotune.errors import DONE, FAILED, INTERRUPTED, DoesNotFit, VideotuneError
from videotune.files import life, read_json
from videotune.trainer import saving as keeping
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.resolve_config import Overrides
from videotune.trainer.resume import Resume

Say = Callable[..., Overrides]
pytestmark = pytest.mark.usefixtures("server")
LIMITED = pytest.mark.parametrize("limited", [False, True], ids=["tmpfs", "limit"])


class Disk:
    """A run on a small disk that fills up at a moment."""

    def __init__(self, tmp: Path, words: Overrides, limited: bool, when: Callable[..., None], *more: str) -> None:
        self.home, self.kept = tmp / "disk", tmp / "kept"
        self.home.mkdir(parents=True)
        self.kept.mkdir()
        given = (self.home, self.kept, limited, when)
        self.running: Running = start(words, self.home / "run", *more, first=small_disk.on_small_disk, given=given)

    @property
    def run(self) -> Path:
        """As the process sees it."""
        return small_disk.seen(self.running.pid, self.home) / "run"

    def paused(self) -> None:
        self.running.until_said("paused: ")

    def room(self) -> None:
        make_room(self.running.pid, self.home, self.kept)

    @property
    def after(self) -> Path:
        """What lay there when the process had ended."""
        return self.kept / "copy" / "run"


@LIMITED
@pytest.mark.parametrize("when", [after_the_first_save, in_the_middle_of_the_second_save])
def test_a_run_on_a_full_disk_waits_and_ends_as_if_it_had_never_been_full(
    when: Callable[..., None], limited: bool, said: Say, tmp_path: Path
) -> None:
    words = said("steps=6", "save_every=2", "ema.decay=0.9")
    assert train(words, tmp_path / "straight") == DONE
    disk = Disk(tmp_path, words, limited, when)
    disk.paused()
    assert [one.step for one in complete_checkpoints(disk.run)] == [2]
    assert equal(state(disk.run, 2), state(tmp_path / "straight", 2)), "the older one is whole"
    told = life(disk.run)
    assert told is not None
    assert told["alive"], "a process that waits is no dead one"
    assert "Make room, and it goes on by itself" in disk.running.said
    assert "Checkpoints: complete are those of the steps 2" in disk.running.said
    disk.room()
    assert disk.running.ended() == DONE
    assert "there is room again: going on" in disk.running.said
    assert [one.step for one in complete_checkpoints(disk.after)] == [2, 4, 6]
    assert all(equal(state(disk.after, step), state(tmp_path / "straight", step)) for step in (2, 4, 6))
    assert facts_of(disk.after) == facts_of(tmp_path / "straight")
    assert [line["step"] for line in of_kind(disk.after, "save")] == [2, 4, 6]
    assert sum("no room for what step" in text for text in warnings_of(disk.after)) == 1, "said once, not at each look"
    assert list((disk.after / "checkpoints").glob(".*")) == []
    assert (disk.after / "export" / "run-step-6.safetensors").is_file()


@LIMITED
def test_a_disk_that_has_no_room_for_the_journal_alone_loses_no_line(limited: bool, said: Say, tmp_path: Path) -> None:
    words = said("steps=20", "save_every=0")
    assert train(words, tmp_path / "straight") == DONE
    disk = Disk(tmp_path, words, limited, after_step_three)
    disk.paused()
    whole = (disk.run / "journal.jsonl").read_bytes()
    assert whole.endswith(b"\n"), "the file ends with a whole line while the run waits"
    assert [json.loads(line)["step"] for line in whole.splitlines()[1:]][:3] == [1, 2, 3]
    disk.room()
    assert disk.running.ended() == DONE
    assert facts_of(disk.after) == facts_of(tmp_path / "straight")


def test_curves_for_tensorboard_never_end_a_run(said: Say, tmp_path: Path) -> None:
    """A run that waits for room with them on; whether they have a gap is the disk's choice, and is said if so."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = said("steps=40", "save_every=0", "tensorboard=true")
    assert train(words, tmp_path / "straight") == DONE
    disk = Disk(tmp_path, words, False, after_step_three)
    disk.paused()
    disk.room()
    assert disk.running.ended() == DONE, disk.running.said
    assert "Traceback" not in disk.running.said
    assert facts_of(disk.after) == facts_of(tmp_path / "straight")
    board = EventAccumulator(str(disk.after / "tensorboard"))
    board.Reload()
    seen = [event.step for event in board.Scalars("train/loss")]
    assert seen[:3] == [1, 2, 3]
    assert seen[-1] == 40
    gap = seen != list(range(1, 41))
    assert sum("curves for TensorBoard" in text for text in warnings_of(disk.after)) == gap


@LIMITED
def test_a_disk_that_has_no_room_for_the_export_is_waited_for_too(limited: bool, said: Say, tmp_path: Path) -> None:
    words = said("steps=4", "save_every=0")
    assert train(words, tmp_path / "straight") == DONE
    disk = Disk(tmp_path, words, limited, before_the_export)
    disk.paused()
    assert [one.step for one in complete_checkpoints(disk.run)] == [4]
    assert not list(disk.run.glob("export/*")), "nothing half written stays"
    disk.room()
    assert disk.running.ended() == DONE, disk.running.said
    assert "Traceback" not in disk.running.said
    ours, theirs = (
        load_file(folder / "export" / f"{folder.name}-step-4.safetensors")
        for folder in (disk.after, tmp_path / "straight")
    )
    assert equal(ours, theirs)
    assert of_kind(disk.after, "end")[0]["why"] == "done"
    assert (disk.after / "report.html").is_file()


def test_a_run_that_waits_for_room_to_export_can_be_ended_and_exports_when_it_goes_on(
    said: Say, tmp_path: Path
) -> None:
    disk = Disk(tmp_path, said("steps=4", "save_every=0"), True, before_the_export)
    disk.paused()
    (disk.run / "control.json").write_text('{"stop": true}')
    assert disk.running.ended(5) == FAILED
    assert "stopped while the disk was full: all steps are saved." in disk.running.said
    run = shutil.copytree(disk.home / "run", tmp_path / "again" / "run")
    assert train(Overrides(), run, resume=Resume()) == DONE
    assert (run / "export" / "run-step-4.safetensors").is_file()


def test_a_full_disk_before_the_run_is_told_in_a_sentence(said: Say, tmp_path: Path) -> None:
    """What a run begins with cannot be written: the file is named, and nothing waits."""
    running = start(said("steps=1", f"cache_dir={tmp_path / 'cache'}"), tmp_path / "run", first=no_long_files)
    assert running.ended() == FAILED
    assert "Traceback" not in running.said
    assert str(tmp_path) in running.said.splitlines()[-1], "which file it was"


def no_long_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "control"])
def test_a_run_that_waits_for_room_can_be_ended_with_a_sentence(how: str, said: Say, tmp_path: Path) -> None:
    disk = Disk(tmp_path, said("steps=6", "save_every=2"), True, after_the_first_save)
    disk.paused()
    if how == "control":
        (disk.run / "control.json").write_text('{"stop": true}')
    else:
        disk.running.send(getattr(signal, how))
    assert disk.running.ended(5) == FAILED, "the steps since the last checkpoint are not saved: this is no 130"
    last = disk.running.said.splitlines()[-1]
    assert last.startswith("videotune: stopped while the disk was full: the steps since the last checkpoint are lost.")
    assert "--resume" in last
    assert "Traceback" not in disk.running.said
    shutil.copytree(disk.home / "run", tmp_path / "again" / "run")
    assert train(Overrides(), tmp_path / "again" / "run", resume=Resume()) == DONE
    assert train(said("steps=6", "save_every=2"), tmp_path / "straight") == DONE
    assert equal(state(tmp_path / "again" / "run", 6), state(tmp_path / "straight", 6))


def test_a_run_that_was_asked_to_stop_waits_to_save_and_a_second_signal_ends_it(said: Say, tmp_path: Path) -> None:
    disk = Disk(tmp_path, said("steps=100000", "save_every=2"), True, asked_then_full)
    disk.paused()
    assert disk.running.ended(0.5) is None, "what it was asked to save is not thrown away"
    disk.running.send(signal.SIGINT)
    assert disk.running.ended(3) == INTERRUPTED
    assert [one.step for one in complete_checkpoints(disk.home / "run")] == [2]
    disk = Disk(tmp_path / "other", said("steps=100000", "save_every=2"), True, asked_then_full)
    disk.paused()
    disk.room()
    assert disk.running.ended() == INTERRUPTED, "and with room it is saved after all"


def asked_then_full(fill: Callable[[], None]) -> None:
    """A signal comes, and before the state is saved the disk is full."""
    from videotune.trainer import saving

    save = saving.save

    def ask_and_fill(trainer: Any, step: int, kind: str = "save") -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            fill()
        save(trainer, step, kind)

    saving.save = ask_and_fill


# ---- before anything is written


def test_a_disk_without_room_for_two_checkpoints_is_refused_before_the_run(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(keeping.shutil, "disk_usage", lambda _: usage._replace(free=keeping.SPARE + 1000))
    with pytest.raises(DoesNotFit, match=r"two checkpoints need .* MB, and .* MB are free there"):
        train(said("steps=6"), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_a_disk_without_room_for_all_of_them_is_told(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage, words = shutil.disk_usage(tmp_path), said("steps=6", "save_every=1", "backup_after=0", "lora.rank=8")
    assert train(words, tmp_path / "first") == DONE
    assert "checkpoints and the export need" not in capsys.readouterr().err
    needed = read_json(tmp_path / "first" / "plan.json")["disk"]["run_bytes"]
    monkeypatch.setattr(keeping, "SPARE", 0)
    monkeypatch.setattr(keeping.shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    assert train(words, tmp_path / "run") == DONE
    assert "6 checkpoints and the export need" in capsys.readouterr().err


def test_room_is_looked_for_before_each_checkpoint_so_that_none_is_begun_in_vain(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, looks = shutil.disk_usage(tmp_path), []

    def look(_: Path) -> Any:
        looks.append(list((tmp_path / "run" / "checkpoints").glob(".step-*")))
        return usage._replace(free=usage.free if len(looks) not in (2, 3) else keeping.SPARE)

    monkeypatch.setattr(keeping, "TRY_AGAIN", 0.01)
    monkeypatch.setattr(keeping, "refuse_small_disk", lambda *_: None)
    monkeypatch.setattr("videotune.commands.train.refuse_small_disk", lambda *_: None)
    monkeypatch.setattr(keeping.shutil, "disk_usage", look)
    assert train(said("steps=4", "save_every=2"), tmp_path / "run") == DONE
    assert len(looks) == 4, "at step 2, and at step 4 until there is room"
    assert looks == [[], [], [], []], "and nothing was begun"
    text = next(text for text in warnings_of(tmp_path / "run") if "no room" in text)
    assert "are needed" in text
    assert "free" in text


def test_a_broken_disk_is_not_waited_for(said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert train(said("steps=2"), tmp_path / "run") == DONE
    monkeypatch.setattr(keeping, "save_checkpoint", broken)
    words = Overrides(sets=("steps=4",))
    with pytest.raises(VideotuneError, match=r"step 4 cannot be saved in .*Input/output error.*steps 2; go on with"):
        train(words, tmp_path / "run", resume=Resume())


def test_an_old_checkpoint_that_cannot_be_taken_away_ends_no_run(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(_: Path) -> None:
        raise PermissionError(13, "somebody has it open")

    monkeypatch.setattr(keeping, "remove", held)
    assert train(said("steps=3", "save_every=1", "save_keep=1"), tmp_path / "run") == DONE
    assert any("step-1 cannot be taken away" in text for text in warnings_of(tmp_path / "run"))
    assert [one.step for one in complete_checkpoints(tmp_path / "run")] == [1, 2, 3]
