"""What a run writes of itself: the line of a resume, each step's line, and its bar."""

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.run_results import of_kind, steps_of, warnings_of
from tests.support.trainers import Lab, trainer_of
from videotune.data.dataset import totals
from videotune.distributed import DistributedContext
from videotune.files import digest
from videotune.memory.compiling import CompiledBlocks
from videotune.memory.sharding import Shard, Shards
from videotune.runs import journal, trackers
from videotune.runs.run_dir import read_run_config, versions
from videotune.runs.trackers import TrackedRun, without_paths
from videotune.text import counted
from videotune.trainer import saving
from videotune.trainer.loop import train_steps
from videotune.trainer.progress import (
    CompileReport,
    Resumed,
    _count_modules,
    announce,
    clips_of,
    current_work,
    write_step,
)
from videotune.trainer.step_record import (
    FIRST_MSE,
    GRAD_NORM,
    LOSS,
    LOSS_SCALE,
    StepRecord,
)
from videotune.trainer.trainer import Callback, Trainer

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
    lines = "".join(capsys.readouterr()).splitlines()
    (samples,) = set(trainer.job.schedule.batch_sizes)
    steps = f"its steps keep their {counted(samples, 'sample')}"
    assert [line for line in lines if "continue" in line] == [
        f"2 processes continue the run of 1: {steps}",
        f"3 processes continue the run of 2: {steps}",
        f"1 process continues the run of 3: {steps}",
    ]


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
    assert line["clips"] == totals(job.library)
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


def test_a_step_that_updates_during_backward_may_be_applied_in_part(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    """Where the loss is finite, tensors with a finite gradient have moved."""
    resolved = trainer.job.resolved
    optimizer = resolved.config.optimizer.model_copy(update={"step_in_backward": True})
    config = resolved.config.model_copy(update={"optimizer": optimizer})
    trainer.job = replace(trainer.job, resolved=replace(resolved, config=config))
    spoilt_steps = [
        spoilt(records[0], grad_norm=torch.nan),
        spoilt(records[1], loss=torch.nan, grad_norm=torch.nan),
    ]
    for record in spoilt_steps:
        write_step(trainer, record, ListeningBar())
    in_part, not_at_all = warnings_of(trainer.run)
    assert "but for the tensors whose gradient was finite" in in_part
    assert "but for" not in not_at_all


def test_a_window_that_the_data_do_not_have_is_named_without_a_clip(
    trainer: Trainer,
) -> None:
    (first, *_) = trainer.job.library.windows
    path = trainer.source.clips[first.clip_id].path
    text = clips_of(trainer, (first.id, "unknown"))
    assert text == f"{path} ({first.id}), ? (unknown)"


def test_what_a_step_has_compiled_is_told_once(
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the number of graphs that this process has made since the run began."""
    stats = torch._dynamo.utils.counters["stats"]
    monkeypatch.setitem(stats, "unique_graphs", 5)
    report = CompileReport(trainer)
    monkeypatch.setitem(stats, "unique_graphs", 7)
    report.after(1)
    assert "".join(capsys.readouterr()) == "", "nothing of this run is compiled"

    compiled = CompiledBlocks()
    compiled.kinds = {"Second", "First"}
    trainer.pool.compiled = compiled
    lines = []
    for step, graphs in ((1, 7), (2, 7), (3, 8)):
        monkeypatch.setitem(stats, "unique_graphs", graphs)
        report.after(step)
        lines.append("".join(capsys.readouterr()).strip())
    assert lines == [
        "compiled First, Second: 7 graphs by step 1, in 0 s",
        "",
        "compiled First, Second: 8 graphs by step 3, in 0 s",
    ]
    compiled.failure = "no compiler"
    for step in (4, 5):
        report.after(step)
    (warning,) = of_kind(trainer.run, "warning")
    assert warning["step"] == 4
    assert "no compiler" in warning["text"]


def test_the_bar_says_what_is_done_between_steps(trainer: Trainer) -> None:
    expected = {
        "training": "",
        "measuring": "measuring the loss",
        "sampling": "drawing previews",
        "probing": "measuring samples",
        "saving": "saving",
        "paused": "waiting for room on the disk",
    }
    for state, text in expected.items():
        trainer.heartbeat.set(state, 1)
        assert current_work(trainer) == text
    compiled = CompiledBlocks()
    compiled.kinds = {"First", "Second"}
    trainer.pool.compiled = compiled
    assert current_work(trainer) == "waiting for room on the disk"
    compiled.clock = SimpleNamespace(is_compiling=True, seconds=12.4)  # type: ignore[assignment]
    assert current_work(trainer) == "compiling 2 kinds of blocks, 12 s so far"


@pytest.mark.parametrize(
    ("size", "parts", "sharding", "text"),
    [
        (1, 1, "NONE", "on cpu, into"),
        (2, 1, "NONE", "on 2 processes, this one on cpu, into"),
        (4, 2, "NONE", "on 4 processes, this one on cpu, 2 to a sample, into"),
        (
            2,
            1,
            "FULL",
            "on 2 processes, this one on cpu, which share its weights, into",
        ),
    ],
)
def test_a_run_is_told_in_a_sentence(
    size: int,
    parts: int,
    sharding: str,
    text: str,
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resolved = trainer.job.resolved
    config = resolved.config.model_copy(update={"sharding": sharding})
    trainer.job = replace(trainer.job, resolved=replace(resolved, config=config))
    trainer.dist = DistributedContext(0, size, context_parallel=parts)
    announce(trainer, None)
    numbers = sum(p.numel() for p in trainer.parameters.values())
    modules = len(trainer.parameters) // 2
    (line,) = "".join(capsys.readouterr()).splitlines()
    what = f"{counted(numbers, 'parameter')} in {modules} modules"
    assert line == f"training {what} {text} {trainer.run}"


def test_rows_of_other_processes_count_among_what_trains(trainer: Trainer) -> None:
    """An adapter's factor of which this process has none of eight rows, and one of which
    it has two.
    """
    layout = {
        "a.lora_A.weight": Shard((8, 3), first=0, count=0),
        "blocks.0.lora_B.weight": Shard((6, 5), first=2, count=2),
        "norm.weight": Shard((4,), first=0, count=4),
        "norm.bias": Shard((4,), first=0, count=4),
    }
    expert = next(iter(trainer.pool.trainables))
    before = sum(p.numel() for p in trainer.parameters.values())
    modules = len(trainer.parameters) // 2
    shards = Shards()
    shards.layout = layout
    trainer.pool.shards[expert] = shards
    announce(trainer, None)
    (line,) = of_kind(trainer.run, "start")
    assert line["trainable_parameters"] == before + 24 + 30 + 8
    assert _count_modules(trainer) == modules + 3


def test_a_run_that_is_done_says_so_and_trains_nothing(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.first_step = STEPS + 1
    announce(trainer, Resumed())
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert line == f"{STEPS} steps are done already: exporting again"
    trainer.first_step = STEPS
    announce(trainer, Resumed())
    assert "training " in "".join(capsys.readouterr())


def test_what_is_odd_about_a_run_is_told_with_it(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = trainer.job.resolved
    config = resolved.config.model_copy(update={"deterministic": True})
    trainer.job = replace(trainer.job, resolved=replace(resolved, config=config))
    trainer.plan = {"adapter": {"idle": {"sound": 2, "text": 1}}}
    announce(trainer, None)
    first, _, last = "".join(capsys.readouterr()).splitlines()
    assert first.startswith("deterministic: ")
    assert last.startswith("note: 3 modules ")


def test_a_process_that_is_slower_is_warned_of_by_the_main_one(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    added: list[tuple[Any, ...]] = []
    meter: Any = SimpleNamespace(
        add=lambda *parts: added.append(parts), newly_slow=lambda: ["process 1 is slow"]
    )
    trainer.rank_meter = meter
    trainer.peaks = {"reserved_bytes": 7}
    write_step(trainer, records[0], ListeningBar())
    trainer.dist = DistributedContext(1, 2)
    write_step(trainer, records[1], ListeningBar())
    (warning,) = of_kind(trainer.run, "warning")
    assert (warning["step"], warning["text"]) == (1, "process 1 is slow")
    seconds = [record.read()["seconds"] for record in records[:2]]
    samples = len(records[0].window_ids)
    assert added == [(1, seconds[0], samples, 7), (2, seconds[1], samples, 7)]


def test_steps_that_wait_for_data_are_warned_of_once(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    shares = [None, 0.5, None]
    monitor: Any = SimpleNamespace(
        add=lambda bucket, seconds: shares.pop(0),
        waiting=lambda: 0.5,
        seconds_a_step=2.0,
        by_bucket={},
        took={},
    )
    trainer.throughput = monitor
    bar = ListeningBar()
    for record in records[:3]:
        write_step(trainer, record, bar)
    (warning,) = of_kind(trainer.run, "warning")
    assert warning["step"] == records[1].step
    assert warning["text"].startswith("the steps wait for data: 50%")
    assert "waiting for data 50%" in bar.updates[0][2]
    assert "2 s a step" in bar.updates[0][2]


class NotingTracker:
    """Notes what it is opened with and sent."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.lines: list[Any] = []

    def line(self, line: Any) -> None:
        self.lines.append(line)


class FailingTracker(NotingTracker):
    """Cannot be reached."""

    def line(self, line: Any) -> None:
        raise ConnectionError("no network")


def test_trackers_follow_the_journal(
    trainer: Trainer, records: list[StepRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a tracker fails, the journal has a warning with the step, and the run goes on."""
    opened: list[NotingTracker] = []

    def open_tracker(run: TrackedRun) -> NotingTracker:
        opened.append(FailingTracker(run) if opened else NotingTracker(run))
        return opened[-1]

    for name in ("first", "second"):
        monkeypatch.setitem(trackers.CLIENTS, name, open_tracker)
    resolved = trainer.job.resolved
    config = resolved.config.model_copy(
        update={"trackers": ["first", "second"], "tracker_project": "a project"}
    )
    trainer.job = replace(trainer.job, resolved=replace(resolved, config=config))
    announce(trainer, None)
    trainer.heartbeat.set("training", 1)
    write_step(trainer, records[0], ListeningBar())

    (start,) = of_kind(trainer.run, "start")
    first, second = opened
    expected = TrackedRun(
        folder=trainer.run.resolve(),
        id=digest(start)[:16],
        project="a project",
        config=without_paths(read_run_config(trainer.run)["settings"]),
        first=1,
    )
    assert first.run == second.run == expected
    assert len(expected.id) == 16
    (step,) = (line for line in first.lines if line["kind"] == "step")
    assert step == steps_of(trainer.run)[0]
    (warning,) = of_kind(trainer.run, "warning")
    assert warning["step"] == 1
    assert warning["text"].startswith("second gets nothing more")


def test_callbacks_have_a_word_on_the_bar_until_the_last_step(
    trainer: Trainer, records: list[StepRecord]
) -> None:
    """At the end they have the last word below it."""

    class Talking(Callback):
        def status(self) -> str:
            return "it learns"

    trainer.callbacks = (Callback(), Talking())
    bar = ListeningBar()
    for record in records:
        write_step(trainer, record, bar)
    told = ["it learns" in parts for _, _, parts, _ in bar.updates]
    assert told == [True] * (STEPS - 1) + [False]
    assert all("" not in parts for _, _, parts, _ in bar.updates)
