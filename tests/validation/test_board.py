"""What TensorBoard's files do where they cannot be written."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.journal_lines import step_line
from videotune.trainer.logging.journal import Journal, read_journal
from videotune.trainer.logging.tensorboard import FOLDER, TensorBoardWriter, scalars


def step(number: int) -> dict[str, Any]:
    rest = {"grad_norm": 1.0, "by_t": [None] * 9, "lr": {"lora": 1e-3}, "seconds": {"data": 0.1}}
    return step_line(number, **rest)


@pytest.mark.parametrize("taken", [None, 10], ids=["nothing is taken", "a part is"])
def test_a_full_disk_is_told_once_and_the_curves_go_on(taken: int | None, tmp_path: Path) -> None:
    """The journal has every line; of the curves what could not be written is missing, and what comes after it is there."""
    told: list[str] = []
    board, journal = TensorBoardWriter(tmp_path, 1, told.append), Journal(tmp_path)
    journal.followers.append(board.tell)
    file = board._file
    assert file is not None

    class Full:
        """The file on a full disk, which may take the beginning of what is written."""

        def write(self, data: bytes) -> int:
            if taken is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return file.write(data[:taken])

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    for number in range(1, 31):
        board._file = Full() if 11 <= number <= 13 else file  # type: ignore[assignment]
        journal.write(step(number))
    board.close()
    journal.close()
    assert len(told) == 1
    assert "have a gap, the journal has none: [Errno 28]" in told[0]
    assert [line["step"] for line in read_journal(tmp_path)] == list(range(1, 31))
    found = EventAccumulator(str(tmp_path / FOLDER))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [*range(1, 11), *range(14, 31)]
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_told_too(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / FOLDER).write_text("in the way")
    board = TensorBoardWriter(tmp_path, 1, told.append)
    board.tell(step(1))
    board.close()
    assert len(told) == 1


def test_the_journal_has_a_line_before_anybody_follows_it(tmp_path: Path) -> None:
    journal, seen = Journal(tmp_path), []
    journal.followers.append(lambda line: seen.append((line["step"], len(read_journal(tmp_path)))))
    for number in (1, 2):
        journal.write(step(number))
    journal.close()
    assert seen == [(1, 1), (2, 2)]


def test_experts_and_probes_have_curves() -> None:
    part = {"normalised": 0.5, "mean": 0.2, "experts": {"high": 0.4, "low": 0.6}}
    validation = scalars({"kind": "validation", "step": 1, "held_out": None, "train": part})
    assert set(validation) == {f"validation/train{end}" for end in ("", "_mean", "_high", "_low")}
    assert validation["validation/train_low"] == 0.6
    probe = {"kind": "sample_metrics", "step": 1, "samples": [], "replication": {"mean": 0.3, "copies": 2}}
    motion = {"energy": {"value": 0.1}, "flicker": {"value": None}}
    found = scalars(probe | {"diversity": {"value": 1.5}, "motion": motion})
    known = {"replication": 0.3, "copies": 2.0, "diversity": 1.5, "energy": 0.1}
    assert found == {f"sample_metrics/{name}": value for name, value in known.items()}
    assert scalars({"kind": "sample_metrics", "step": 1, "not_measured": "budget"}) == {}
