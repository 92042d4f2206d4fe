"""What TensorBoard's files do where they cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from videotune.monitor.board import FOLDER, Board, scalars
from videotune.monitor.journal import Journal, read_journal


def step(number: int) -> dict[str, Any]:
    rest = {"grad_norm": 1.0, "by_t": [None] * 9, "lr": {"lora": 1e-3}, "seconds": {"data": 0.1}}
    return {"kind": "step", "step": number, "loss": 1.0, "mse": 1.0, **rest}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_once_and_a_further_file_goes_on(tmp_path: Path) -> None:
    """The thread of TensorBoard's writer fails; the journal has every line, and the steps after it are in the curves."""
    told: list[str] = []
    board, journal = Board(tmp_path, 1, told.append), Journal(tmp_path)
    journal.followers.append(board.tell)
    for number in range(1, 11):
        journal.write(step(number))
    board._writer.flush()

    def full(_: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board._writer._async_writer._writer.write = full
    journal.write(step(11))
    board._writer._async_writer._worker.join()
    for number in range(12, 31):
        journal.write(step(number))
    board.close()
    journal.close()
    assert len(told) == 1
    assert "have a gap, the journal has none" in told[0]
    assert [line["step"] for line in read_journal(tmp_path)] == list(range(1, 31))
    found = EventAccumulator(str(tmp_path / FOLDER))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [*range(1, 11), *range(13, 31)]


def test_the_journal_has_a_line_before_anybody_follows_it(tmp_path: Path) -> None:
    journal, seen = Journal(tmp_path), []
    journal.followers.append(lambda line: seen.append((line["step"], len(read_journal(tmp_path)))))
    for number in (1, 2):
        journal.write(step(number))
    journal.close()
    assert seen == [(1, 1), (2, 2)]


def test_experts_and_probes_have_curves() -> None:
    part = {"normalised": 0.5, "mean": 0.2, "experts": {"high": 0.4, "low": 0.6}}
    ruler = scalars({"kind": "ruler", "step": 1, "held_out": None, "train": part})
    assert ruler == {"ruler/train": 0.5, "ruler/train_mean": 0.2, "ruler/train_high": 0.4, "ruler/train_low": 0.6}
    probe = {
        "kind": "probe",
        "step": 1,
        "samples": [],
        "replication": {"mean": 0.3, "copies": 2},
        "diversity": {"value": 1.5},
        "motion": {"energy": {"value": 0.1}, "flicker": {"value": None}},
    }
    assert scalars(probe) == {
        "probe/replication": 0.3,
        "probe/copies": 2.0,
        "probe/diversity": 1.5,
        "probe/energy": 0.1,
    }
    assert scalars({"kind": "probe", "step": 1, "not_measured": "budget"}) == {}
