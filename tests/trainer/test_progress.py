"""What a run writes of itself: the line of a resume, each step's line, and its bar."""

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.run_results import of_kind, steps_of, warnings_of
from tests.support.trainers import Lab, trainer_of
from videotune.distributed import DistributedContext
from videotune.runs import journal
from videotune.runs.run_dir import versions
from videotune.trainer import saving
from videotune.trainer.loop import train_steps
from videotune.trainer.progress import Resumed, announce, write_step
from videotune.trainer.step_record import (
    FIRST_MSE,
    GRAD_NORM,
    LOSS,
    LOSS_SCALE,
    StepRecord,
)
from videotune.trainer.trainer import Trainer

STEPS = 4


class ListeningBar:
    """Keeps what the bar is given."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, Sequence[str], float | None]] = []

    def update(
        self, done: int, total: int, parts: Sequence[str], seconds: float | None
    ) -> None:
        self.updates.append((done, total, parts, seconds))


@pytest.fixture
def trainer(tmp_path: Path, small_clips: Path) -> Iterator[Trainer]:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, {"steps": STEPS, "resolution": "32x32"})
    yield trainer
    trainer.journal.close()


@pytest.fixture
def records(trainer: Trainer) -> list[StepRecord]:
    """What the steps of the run return."""
    return list(train_steps(trainer))


def test_a_resume_says_where_it_goes_on_and_with_what(trainer: Trainer) -> None:
    trainer.first_step = 3
    announce(trainer, Resumed())
    announce(trainer, Resumed(("steps: 4, was 3",), restarted=True))
    plain, changed = of_kind(trainer.run, "resume")
    assert plain.keys() == {"kind", "time", "from_step", "versions"}
    assert plain["from_step"] == 2
    assert plain["versions"] == versions()
    assert changed["changes"] == ["steps: 4, was 3"]
    assert changed["restarted"] is True
    assert changed.keys() == plain.keys() | {"changes", "restarted"}


def test_a_resume_says_how_many_processes_go_on_the_run_of_how_many(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each compares itself with the one before it, the first with the run's begin."""
    for size in (1, 2, 3, 3, 1, 1):
        trainer.dist = DistributedContext(0, size)
        announce(trainer, Resumed())
    processes = [
        (line.get("processes_before"), line.get("processes"))
        for line in of_kind(trainer.run, "resume")
    ]
    assert processes == [
        (None, None),
        (1, 2),
        (2, 3),
        (None, 3),
        (3, None),
        (None, None),
    ]
    assert "".join(capsys.readouterr()).count("continue the run of") == 3


def test_processes_that_share_samples_count_at_the_begin(trainer: Trainer) -> None:
    """A run of one group of two processes was begun by two."""
    trainer.dist = DistributedContext(0, 2, context_parallel=2)
    announce(trainer, Resumed())
    (line,) = of_kind(trainer.run, "resume")
    assert line["processes"] == 2
    assert "processes_before" not in line


def test_the_first_line_is_written_once_and_describes_the_run(
    trainer: Trainer,
) -> None:
    announce(trainer, None)
    announce(trainer, Resumed())
    (line,) = of_kind(trainer.run, "start")
    job = trainer.job
    assert line["steps"] == STEPS
    assert line["effective_batch"] == job.effective_batch
    assert line["device"] == "cpu"
    assert line["versions"] == versions()
    assert line["windows"] == len(job.library.windows) > 0
    assert line["notes"] == list(job.notes)
    parameters = sum(p.numel() for p in trainer.parameters.values())
    assert line["trainable_parameters"] == parameters
    (bucket,) = line["buckets"]
    (shape,) = job.shapes
    assert bucket == {
        "shape": str(shape),
        "windows": len(job.buckets[0]),
        "tokens": job.spec.tokens(shape),
    }


def test_each_step_is_a_line_and_moves_the_bar(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    bar = ListeningBar()
    for record in records:
        write_step(trainer, record, bar)
        assert trainer.last_step == record.step
        # It is in the file at once, not at the end.
        assert steps_of(trainer.run)[-1]["step"] == record.step

    lines = steps_of(trainer.run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, record in zip(lines, records, strict=True):
        expected = record.read()
        captions = line.pop("captions")
        assert line == expected
        of_windows = zip(record.window_ids, record.captions, captions, strict=True)
        for window_id, caption, number in of_windows:
            assert trainer.job.captions[window_id][number] == caption

    totals = [sum(line["seconds"].values()) for line in lines]
    for (done, total, parts, seconds), line in zip(bar.updates, lines, strict=True):
        step = line["step"]
        assert (done, total) == (step, STEPS)
        assert parts[0] == f"loss {line['loss']:.4f}"
        # The first step of a process warms up: the next ones are what the rest will take.
        measured = totals[:1] if step == 1 else totals[1:step]
        expected = sum(measured) / len(measured) * (STEPS - step)
        assert seconds == pytest.approx(expected)


def test_an_empty_caption_has_no_number(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    (first, *_) = records
    dropped = replace(first, captions=("",) * len(first.captions))
    write_step(trainer, dropped, ListeningBar())
    assert steps_of(trainer.run)[0]["captions"] == [None] * len(first.captions)


def spoilt(record: StepRecord, **values: float) -> StepRecord:
    """The record with other values of the step."""
    positions = {"loss": LOSS, "grad_norm": GRAD_NORM, "loss_scale": LOSS_SCALE}
    changed = record.values.clone()
    for name, value in values.items():
        changed[positions[name]] = value
    return replace(record, values=changed)


def test_steps_in_a_row_that_were_not_applied_are_counted_and_told(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    """An overflow of float16's loss scale is neither a fault nor a step that went well."""
    nan, inf = torch.nan, torch.inf
    counts = []
    for record, values in zip(
        records,
        (
            {"loss": nan, "grad_norm": nan},
            {"grad_norm": inf, "loss_scale": 1024.0},
            {"loss": nan},
            {},
        ),
        strict=True,
    ):
        write_step(trainer, spoilt(record, **values), ListeningBar())
        counts.append(trainer.skipped_in_a_row)
    assert counts == [1, 1, 2, 0]

    warnings = of_kind(trainer.run, "warning")
    assert [line["step"] for line in warnings] == [1, 2, 3]
    assert "1024 -> 512" in warnings[1]["text"]
    for warning, record in ((warnings[0], records[0]), (warnings[2], records[2])):
        for window_id in record.window_ids:
            assert f"({window_id})" in warning["text"]
    clips = {clip.id: clip.path for clip in trainer.job.library.clips}
    windows = {window.id: window for window in trainer.job.library.windows}
    path = clips[windows[records[0].window_ids[0]].clip_id]
    assert str(path) in warnings[0]["text"]
    assert [line.get("skipped") for line in steps_of(trainer.run)] == [
        *[True] * 3,
        None,
    ]


def test_a_line_that_the_disk_does_not_take_is_waited_for(
    trainer: Trainer, records: list[StepRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's line is in the file before the next step's is made."""
    append: Callable[..., None] = journal.append_whole
    calls = 0

    def full_at_first(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(*args)

    monkeypatch.setattr(saving, "TRY_AGAIN", 0.0)
    monkeypatch.setattr(journal, "append_whole", full_at_first)
    write_step(trainer, records[0], ListeningBar())
    assert trainer.journal.waiting == 0
    assert [line["step"] for line in steps_of(trainer.run)] == [1]
    assert any("the run waits" in text for text in warnings_of(trainer.run))


def test_the_other_processes_have_no_bar(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    trainer.dist = DistributedContext(1, 2)
    bar = ListeningBar()
    write_step(trainer, records[0], bar)
    assert bar.updates == []
    assert trainer.last_step == 1


def test_a_step_that_was_not_applied_names_the_broken_clip_alone(
    tmp_path: Path, small_clips: Path
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    settings = {"steps": 1, "resolution": "32x32", "batch_size": 2}
    trainer = trainer_of(lab, settings)
    (record,) = train_steps(trainer)
    values = record.values.clone()
    values[LOSS] = float("nan")
    values[FIRST_MSE + 1] = float("nan")
    spoiled = replace(record, values=values)

    write_step(trainer, spoiled, ListeningBar())
    trainer.journal.close()
    (warning,) = warnings_of(trainer.run)
    first, second = record.window_ids
    assert second in warning
    assert first not in warning
