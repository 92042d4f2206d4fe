"""The journal on a disk that is full, broken, or torn by a kill: no line is lost, none
is half there.

TensorBoard's files follow it where they can be written.
"""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.failing_disk import Disk, each_fault
from tests.support.journal_lines import step_line
from tests.support.kill_points import SAVING, kill_points, killed_at
from videotune.errors import VideotuneError
from videotune.runs.journal import History, Journal, read_journal
from videotune.runs.scalars import scalars
from videotune.runs.tensorboard import FOLDER, TensorBoardWriter

PROMPT = "ein roter Würfel, 赤い"


def filled(run: Path, steps: int = 6) -> Journal:
    """A journal of so many steps, with other kinds between."""
    run.mkdir(parents=True, exist_ok=True)
    journal = Journal(run)
    journal.event("start", steps=steps)
    for step in range(1, steps + 1):
        journal.write(step_line(step, loss=0.1 * step))
        if step % 3 == 0:
            journal.event("save", step=step, path=f"checkpoints/step-{step}")
            journal.event(
                "sample", step=step, prompt=PROMPT, path=f"samples/step-{step}.mp4"
            )
    journal.event("end", step=steps, why="done")
    return journal


class Small:
    """A file on a disk that takes so many bytes more: a write takes what fits, as the
    system's does, or fails.
    """

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room, self.name = file, room, file.name

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.room]
        self.room -= len(part)
        return int(self.file.write(part))

    def truncate(self, size: int) -> int:
        end = self.file.seek(0, os.SEEK_END)
        self.room += end - size
        return int(self.file.truncate(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_journal(run) if line["kind"] == "step"]


@settings(max_examples=60, deadline=None)
@given(room=st.integers(0, 400), more=st.integers(1, 200))
def test_a_full_disk_loses_no_line_and_leaves_no_half_of_one(
    room: int, more: int, tmp_path_factory: Any
) -> None:
    run = tmp_path_factory.mktemp("run")
    journal = Journal(run)
    small = Small(journal._file, room)
    journal._file = small  # type: ignore[assignment]
    for step in range(1, 11):
        journal.write(step_line(step, note=PROMPT))
        whole = (run / "journal.jsonl").read_bytes()
        assert whole == b"" or whole.endswith(b"\n"), (
            "after each write the file ends with a whole line"
        )
        assert steps_of(run) == list(range(1, len(steps_of(run)) + 1))
        assert len(steps_of(run)) + journal.waiting == step
        small.room += more if step % 3 == 0 else 0
    if journal.waiting and small.room < 60:
        with pytest.raises(OSError) as caught:
            journal.sync()
        assert caught.value.errno == errno.ENOSPC
    small.room = 10_000
    journal.sync()
    assert journal.waiting == 0
    assert steps_of(run) == list(range(1, 11)), "all of them, in order, each once"


def test_a_broken_disk_is_no_full_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    class Broken(Small):
        def write(self, data: bytes) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal._file = Broken(journal._file, 0)  # type: ignore[assignment]
    with pytest.raises(OSError) as caught:
        journal.event("warning", step=1, text="x")
    assert caught.value.errno == errno.EIO


def test_a_last_line_torn_anywhere_is_dropped_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    """Also inside a letter, where the file is no UTF-8 any more."""
    filled(tmp_path / "whole").close()
    whole = (tmp_path / "whole" / "journal.jsonl").read_bytes()
    begin = whole[:-1].rindex(b"\n", 0, whole.index(PROMPT.encode())) + 1
    end = whole.index(b"\n", begin)
    for length in range(begin + 1, end):
        run = tmp_path / "torn"
        run.mkdir(exist_ok=True)
        (run / "journal.jsonl").write_bytes(whole[:length])
        before = read_journal(run)
        assert steps_of(run) == [1, 2, 3]
        History(run).cut(3)
        assert read_journal(run) == before
        journal = Journal(run)
        journal.write(step_line(4))
        journal.close()
        assert steps_of(run) == [1, 2, 3, 4]
        for line in (run / "journal.jsonl").read_bytes().splitlines():
            json.loads(line)


def test_a_disk_that_fails_while_the_journal_is_cut_leaves_the_old_one_or_the_new_one(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"

    def again() -> None:
        shutil.rmtree(run, ignore_errors=True)
        filled(run).close()

    seen = set()

    def check(broken: Disk) -> None:
        kinds = [line["kind"] for line in read_journal(run)]
        seen.add(kinds.count("step"))
        assert kinds.count("step") in (3, 6)
        assert kinds.count("end") == (kinds.count("step") == 6)
        History(run).cut(3)
        assert steps_of(run) == [1, 2, 3]
        assert [path.name for path in run.iterdir()] == ["journal.jsonl"], (
            "nothing is left beside it"
        )

    each_fault(lambda: History(run).cut(3), again, check)
    assert seen == {3, 6}


def test_killed_anywhere_in_cutting_the_journal_is_the_old_one_or_the_new_one(
    tmp_path: Path,
) -> None:
    def cut(run: Path) -> None:
        History(run).cut(3)

    filled(tmp_path / "before").close()
    points = kill_points(
        cut, shutil.copytree(tmp_path / "before", tmp_path / "dry"), SAVING
    )
    for number, point in enumerate(points):
        run = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        assert killed_at(point, cut, run, SAVING)
        assert steps_of(run) in ([1, 2, 3], [1, 2, 3, 4, 5, 6])
        cut(run)
        assert steps_of(run) == [1, 2, 3]
    assert len(points) >= 3


def step(number: int) -> dict[str, Any]:
    rest = {
        "grad_norm": 1.0,
        "by_t": [None] * 9,
        "lr": {"lora": 1e-3},
        "seconds": {"data": 0.1},
    }
    return step_line(number, **rest)


@pytest.mark.parametrize("taken", [0, 10], ids=["nothing is taken", "a part is"])
def test_a_full_disk_is_told_once_and_the_curves_go_on(
    taken: int, tmp_path: Path
) -> None:
    """The journal has every line; of the curves what could not be written is missing,
    and what comes after it is there.
    """
    told: list[str] = []
    board, journal = TensorBoardWriter(tmp_path, 1, told.append), Journal(tmp_path)
    journal.followers.append(board.line)
    file = board._file
    for number in range(1, 31):
        board._file = Small(file, taken) if 11 <= number <= 13 else file  # type: ignore[assignment]
        journal.write(step(number))
    board.close()
    journal.close()
    assert len(told) == 1
    assert "have a gap, the journal has none: [Errno 28]" in told[0]
    assert [line["step"] for line in read_journal(tmp_path)] == list(range(1, 31))
    found = EventAccumulator(str(tmp_path / FOLDER))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [
        *range(1, 11),
        *range(14, 31),
    ]
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_told_too(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / FOLDER).write_text("in the way")
    board = TensorBoardWriter(tmp_path, 1, told.append)
    board.line(step(1))
    board.close()
    assert len(told) == 1


def test_the_journal_has_a_line_before_anybody_follows_it(tmp_path: Path) -> None:
    journal, seen = Journal(tmp_path), []
    journal.followers.append(
        lambda line: seen.append((line["step"], len(read_journal(tmp_path))))
    )
    for number in (1, 2):
        journal.write(step(number))
    journal.close()
    assert seen == [(1, 1), (2, 2)]


def test_experts_and_probes_have_curves() -> None:
    part = {"normalised": 0.5, "mean": 0.2, "experts": {"high": 0.4, "low": 0.6}}
    validation = scalars(
        {"kind": "validation", "step": 1, "held_out": None, "train": part}
    )
    assert set(validation) == {
        f"validation/train{end}" for end in ("", "_mean", "_high", "_low")
    }
    assert validation["validation/train_low"] == 0.6
    probe = {
        "kind": "sample_metrics",
        "step": 1,
        "samples": [],
        "replication": {"mean": 0.3, "copies": 2},
    }
    motion = {"energy": {"value": 0.1}, "flicker": {"value": None}}
    found = scalars(probe | {"diversity": {"value": 1.5}, "motion": motion})
    known = {"replication": 0.3, "copies": 2.0, "diversity": 1.5, "energy": 0.1}
    assert found == {f"sample_metrics/{name}": value for name, value in known.items()}
    assert (
        scalars({"kind": "sample_metrics", "step": 1, "not_measured": "budget"}) == {}
    )


def test_a_cut_journal_has_not_ended(tmp_path: Path) -> None:
    """Also if it is cut at its last step, after which nothing but its end was written."""
    for step in (6, 5):
        run = tmp_path / f"cut-{step}"
        journal = filled(run)
        journal.cut(step)
        journal.write(step_line(step + 1))
        journal.close()
        kinds = [line["kind"] for line in read_journal(run)]
        assert "end" not in kinds
        assert kinds.count("step") == step + 1
        assert not History(run).of_kind("end")


def test_a_journal_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "thesis.jsonl"
    elsewhere.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").symlink_to(elsewhere)

    with pytest.raises(VideotuneError, match="is a link"):
        Journal(run)
    assert elsewhere.read_text() == "precious"
