"""A full disk is waited for, and what is printed never ends a run."""

import errno
import fcntl
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support import small_disk
from tests.support.command_line import Patch, Printed, train
from tests.support.run_processes import Running, Work, resume, start
from tests.support.run_results import (
    assert_same_run,
    complete,
    facts_of,
    of_kind,
    same_tensors,
    state,
    warnings_of,
)
from tests.support.small_disk import (
    after_step_three,
    after_the_first_save,
    before_the_export,
    in_the_second_save,
)
from videotune.errors import DONE, FAILED, INTERRUPTED, DoesNotFit, VideotuneError
from videotune.files import read_json
from videotune.job.overrides import Overrides
from videotune.runs.run_life import life
from videotune.trainer import saving

pytestmark = pytest.mark.usefixtures("server")

LIMITED = pytest.mark.parametrize("limited", [False, True], ids=["tmpfs", "limit"])


class Disk:
    """A run on a small disk that fills up at a moment."""

    def __init__(
        self,
        tmp: Path,
        words: Overrides,
        limited: bool,
        when: Callable[..., None],
        *more: str,
    ) -> None:
        self.home, self.kept = tmp / "disk", tmp / "kept"
        self.home.mkdir(parents=True)
        self.kept.mkdir()
        given = (self.home, self.kept, limited, when)
        self.running: Running = start(
            words, self.home / "run", *more, first=small_disk.on_small_disk, given=given
        )

    @property
    def run(self) -> Path:
        """As the process sees it."""
        return small_disk.seen(self.running.pid, self.home) / "run"

    def paused(self) -> None:
        self.running.until_printed("paused: ")

    def room(self) -> None:
        small_disk.make_room(self.running.pid, self.home, self.kept)

    @property
    def after(self) -> Path:
        """What lay there when the process had ended."""
        return self.kept / "copy" / "run"


@pytest.mark.parametrize(
    ("when", "limited", "saved"),
    [
        (after_the_first_save, False, [2]),
        (in_the_second_save, False, [2]),
        (in_the_second_save, True, [2]),
        (before_the_export, False, [2, 4, 6]),
    ],
)
def test_a_run_on_a_full_disk_waits_and_ends_as_if_it_had_never_been_full(
    when: Callable[..., None], limited: bool, saved: list[int], work: Work
) -> None:
    settings = ("steps=6", "save_every=2", "ema.decay=0.9")
    straight, disk = (
        work.finished(*settings),
        Disk(work.tmp, work.overrides(*settings), limited, when),
    )
    disk.paused()
    assert complete(disk.run) == saved
    assert same_tensors(state(disk.run, 2), state(straight, 2)), (
        "the older one is whole"
    )
    assert (life(disk.run) or {})["alive"], "a process that waits is no dead one"
    assert re.search(r"omplete checkpoint.* of steps? 2[,;]", disk.running.stderr)
    assert not list(disk.run.glob("export/*")), "nothing half written stays"
    disk.room()
    assert disk.running.ended() == DONE
    assert complete(disk.after) == [2, 4, 6]
    assert_same_run(disk.after, straight, 2, 4, 6)
    assert [line["step"] for line in of_kind(disk.after, "save")] == [2, 4, 6]
    assert (
        sum("no room to save step" in text for text in warnings_of(disk.after)) == 1
    ), "once, not at each look"
    assert list((disk.after / "checkpoints").glob(".*")) == []
    name = Path("export") / "run-step-6.safetensors"
    assert same_tensors(load_file(disk.after / name), load_file(straight / name))


@LIMITED
def test_a_disk_without_room_for_the_journal_loses_no_line(
    limited: bool, work: Work
) -> None:
    """TensorBoard's curves never end a run; whether they have a gap is the disk's
    choice, and is reported if so.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = ("steps=20", "save_every=0")
    disk = Disk(
        work.tmp,
        work.overrides(*settings, "trackers=tensorboard"),
        limited,
        after_step_three,
    )
    disk.paused()
    whole = (disk.run / "journal.jsonl").read_bytes()
    assert whole.endswith(b"\n"), "the file ends with a whole line while the run waits"
    assert [json.loads(line)["step"] for line in whole.splitlines()[1:]][:3] == [
        1,
        2,
        3,
    ]
    disk.room()
    assert disk.running.ended() == DONE, disk.running.stderr
    assert "Traceback" not in disk.running.stderr
    assert facts_of(disk.after) == facts_of(work.finished(*settings))
    curves = EventAccumulator(str(disk.after / "tensorboard"))
    curves.Reload()
    seen = [event.step for event in curves.Scalars("train/loss")]
    assert (seen[:3], seen[-1]) == ([1, 2, 3], 20)
    gap = seen != list(range(1, 21))
    assert (
        sum("curves for TensorBoard" in text for text in warnings_of(disk.after)) == gap
    )


def test_a_full_disk_before_the_run_is_an_error_that_names_the_file(work: Work) -> None:
    """What a run begins with cannot be written: the file is named, and nothing waits."""
    running = start(
        work.overrides("steps=1", f"cache_dir={work.tmp / 'cache'}"),
        work.run,
        first=no_long_files,
    )
    assert running.ended() == FAILED
    assert "Traceback" not in running.stderr
    assert str(work.tmp) in running.stderr.splitlines()[-1], "which file it was"


def no_long_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("how", "when"), [("SIGINT", after_the_first_save), ("control", before_the_export)]
)
def test_a_run_that_waits_for_room_can_be_ended_and_resumed(
    how: str, when: Callable[..., None], work: Work
) -> None:
    settings, exporting = ("steps=6", "save_every=2"), when is before_the_export
    disk = Disk(work.tmp, work.overrides(*settings), True, when)
    disk.paused()
    if how == "control":
        (disk.run / "control.json").write_text('{"stop": true}')
    else:
        disk.running.send(getattr(signal, how))
    assert disk.running.ended(5) == FAILED, "where steps are not saved: this is no 130"
    last = disk.running.stderr.splitlines()[-1]
    lost = (
        "all steps are saved."
        if exporting
        else "the steps since the last checkpoint are lost."
    )
    assert f"stopped while the disk was full: {lost}" in disk.running.stderr
    assert exporting or "videotune resume " in last
    assert "Traceback" not in disk.running.stderr
    run = shutil.copytree(disk.home / "run", work.tmp / "again" / "run")
    assert resume(run) == DONE
    assert (run / "export" / "run-step-6.safetensors").is_file()
    assert same_tensors(state(run, 6), state(work.finished(*settings), 6))


@pytest.mark.parametrize("room", [False, True])
def test_an_interrupted_run_waits_to_save_until_a_second_signal(
    room: bool, work: Work
) -> None:
    disk = Disk(
        work.tmp, work.overrides("steps=100000", "save_every=2"), True, asked_then_full
    )
    disk.paused()
    if room:
        disk.room()
    else:
        assert disk.running.ended(0.5) is None, (
            "what it was asked to save is not thrown away"
        )
        disk.running.send(signal.SIGINT)
    assert disk.running.ended() == INTERRUPTED
    assert (4 in complete(disk.home / "run")) == room


def asked_then_full(fill: Callable[[], None]) -> None:
    """A signal comes, and before the state is saved the disk is full."""
    save = saving.save

    def ask_and_fill(trainer: Any, step: int, kind: str = "save") -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            fill()
        save(trainer, step, kind)

    saving.save = ask_and_fill


# ---- before anything is written


def test_room_for_two_checkpoints_is_required_and_for_all_of_them_advised(
    work: Work, monkeypatch: Patch, capsys: Printed
) -> None:
    usage = shutil.disk_usage(work.tmp)
    settings = work.overrides(
        "steps=6", "save_every=1", "backup_after=0", "lora.rank=8"
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            saving.shutil,
            "disk_usage",
            lambda _: usage._replace(free=saving.SPARE + 1000),
        )
        with pytest.raises(
            DoesNotFit, match=r"two checkpoints need .* MB, and .* MB are free"
        ):
            train(settings, work.run)
    assert not (work.run).exists(), "nothing was begun"
    assert train(settings, work.tmp / "first") == DONE
    assert "checkpoints and the export need" not in capsys.readouterr().err
    needed = read_json(work.tmp / "first" / "plan.json")["disk"]["run_bytes"]
    monkeypatch.setattr(saving, "SPARE", 0)
    monkeypatch.setattr(
        saving.shutil, "disk_usage", lambda _: usage._replace(free=needed - 1)
    )
    assert train(settings, work.run) == DONE
    assert "6 checkpoints and the export need" in capsys.readouterr().err


def test_room_is_looked_for_before_each_checkpoint_so_that_none_is_begun_in_vain(
    work: Work, monkeypatch: Patch
) -> None:
    usage, looks = shutil.disk_usage(work.tmp), []

    def look(_: Path) -> Any:
        looks.append(list((work.run / "checkpoints").glob(".step-*")))
        return usage._replace(
            free=usage.free if len(looks) not in (2, 3) else saving.SPARE
        )

    monkeypatch.setattr(saving, "TRY_AGAIN", 0.01)
    monkeypatch.setattr(saving, "refuse_small_disk", lambda *_: None)
    monkeypatch.setattr("videotune.trainer.saving.refuse_small_disk", lambda *_: None)
    monkeypatch.setattr(saving.shutil, "disk_usage", look)
    work.train("steps=4", "save_every=2")
    assert len(looks) == 4, "at step 2, and at step 4 until there is room"
    assert looks == [[], [], [], []], "and nothing was begun"
    text = next(text for text in warnings_of(work.run) if "no room" in text)
    assert "are needed" in text
    assert "free" in text


def test_a_broken_disk_is_not_waited_for(work: Work, monkeypatch: Patch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run = work.copy("steps=3")
    monkeypatch.setattr(saving, "save_checkpoint", broken)
    with pytest.raises(
        VideotuneError,
        match=r"step 5 cannot be saved in .*Input/output error.*step 3; resume with",
    ):
        resume(run, "steps=5")


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(
    work: Work, monkeypatch: Patch
) -> None:
    def held(_: Path) -> None:
        raise PermissionError(13, "somebody has it open")

    monkeypatch.setattr(saving, "remove", held)
    work.train("steps=3", "save_every=1", "save_keep=1")
    assert any("step-1 cannot be removed" in text for text in warnings_of(work.run))
    assert complete(work.run) == [1, 2, 3]


def log_on_the_disk(
    home: Path, kept: Path, limited: bool, when: Callable[..., Any]
) -> None:
    """Standard error is a file on the small disk, and its last page is full when the
    rest of the disk is.
    """

    def pad() -> None:
        with suppress(OSError):
            while True:
                os.write(2, b"\n")

    small_disk.on_small_disk(
        home, kept, limited, lambda fill: when(lambda: (fill(), pad()))
    )
    os.dup2(os.open(home / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


def test_a_full_disk_that_also_holds_the_log_pauses_the_run(work: Work) -> None:
    home, kept = work.tmp / "disk", work.tmp / "kept"
    home.mkdir()
    kept.mkdir()
    given = (home, kept, False, small_disk.after_the_first_save)
    running = start(
        work.overrides("steps=6", "save_every=2"),
        home / "run",
        first=log_on_the_disk,
        given=given,
    )
    disk = small_disk.seen(running.pid, home)
    running.until((disk / small_disk.FILLER).is_file, "the full disk")
    assert running.ended(2) is None, "it waits"
    assert [path.name for path in (disk / "run" / "checkpoints").iterdir()] == [
        "step-2"
    ]
    small_disk.make_room(running.pid, home, kept)
    assert running.ended() == DONE
    assert_same_run(kept / "copy" / "run", work.finished("steps=6", "save_every=2"), 6)


def unwritable(how: str) -> None:
    """Standard error is a full device, a pipe without a reader, or closed."""
    read, write = os.pipe()
    match how:
        case "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        case "no reader":
            os.dup2(write, 2)
            os.close(read)
            os.close(write)
        case "closed":
            os.close(2)


@pytest.mark.parametrize("how", ["full", "no reader", "closed"])
def test_an_unwritable_standard_error_does_not_end_a_run(how: str, work: Work) -> None:
    assert (
        start(
            work.overrides("steps=3"), work.run, first=unwritable, given=(how,)
        ).ended()
        == DONE
    )
    assert (work.run / "report.html").is_file()


def test_closed_descriptors_are_not_given_to_files_of_the_run() -> None:
    """Started by a shell with 2>&-: the next file that is opened would otherwise get
    what libraries print.
    """
    code = (
        "from videotune.console import echo, guard_stderr; guard_stderr(); echo('x'); "
    )
    code += "f = open('/dev/null'); print(f.fileno())"
    command = ["bash", "-c", f'exec "{sys.executable}" -c "{code}" 2>&-']
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == DONE
    assert int(ended.stdout) > 2


# ---- the bar in a terminal


def in_a_terminal(code: str, columns: int) -> list[str]:
    """The lines that a process prints to a terminal with this many columns, without
    colours.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    more = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {
        "TERM": "xterm-256color"
    }
    process = subprocess.Popen([sys.executable, "-c", code], stderr=follower, env=more)
    os.close(follower)
    drawn = b""
    with suppress(OSError):  # the terminal's other end is closed
        while part := os.read(leader, 1 << 16):
            drawn += part
    os.close(leader)
    assert process.wait() == 0
    return [
        line.strip()
        for line in re.split(
            r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())
        )
    ]


BAR = """
import time
from videotune.console import bar
now = []
with bar("training", lambda: "".join(now)) as progress:
    progress.update(0, 2000)
    progress.update(1234, 2000, ["loss 1.5840", "0.613 s a step", "LEARNING", "72.5 views a window, high"], 4321)
    time.sleep(0.6)
    now.append("drawing previews")
    time.sleep(0.6)
"""


def test_at_80_columns_the_bar_says_what_matters_whole() -> None:
    lines = in_a_terminal(BAR, 80)
    assert all(len(line) <= 80 for line in lines)
    (step,) = {
        line.split(" ━")[0] for line in lines if "loss" in line and "left" in line
    }
    assert step.split("  ") == [
        "training 1234/2000",
        "1 h 12 min left",
        "loss 1.5840",
        "0.613 s a step",
    ]
    assert any(
        line.startswith("training 1234/2000  drawing previews  loss 1.5840")
        for line in lines
    )
    assert any("72.5 views a window, high" in line for line in in_a_terminal(BAR, 120))
    assert any(line.startswith("training 1234/2000") for line in in_a_terminal(BAR, 30))
