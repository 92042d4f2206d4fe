"""What processes agree on between steps, how a run ends, and what a step is given."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.run_results import of_kind, steps_of
from tests.support.thread_processes import in_threads
from tests.support.trainers import Lab, trainer_of
from videotune.console import bar
from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.runs.checkpoint import complete_checkpoints, pick
from videotune.runs.stop_signals import Interrupted, Signals
from videotune.trainer import loop, saving
from videotune.trainer.deterministic import deterministic_kernels
from videotune.trainer.loop import (
    NoBatch,
    _agree_on_requests,
    _ended_by_callback,
    _records_until_failure,
    _was_cut_short,
    base_guidance,
    remaining_batches,
    track_peak_memory,
    train_loop,
    train_steps,
)
from videotune.trainer.saving import Saving
from videotune.trainer.step import OutOfMemory
from videotune.trainer.trainer import Callback, Trainer


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


@pytest.mark.parametrize(
    ("stopped_ranks", "control", "writing_ranks", "due_ranks", "expected"),
    [
        ((), "", (), (), (None, False, [False, False])),
        ((), '{"stop": true}', (), (), ("stopped", False, [False, False])),
        ((1,), '{"stop": true}', (), (), ("interrupted", False, [False, False])),
        ((0,), "", (), (1,), ("interrupted", False, [True, False])),
        ((), '{"save": true}', (1,), (), (None, True, [False, True])),
    ],
)
def test_what_one_process_was_asked_for_all_do(
    stopped_ranks: tuple[int, ...],
    control: str,
    writing_ranks: tuple[int, ...],
    due_ranks: tuple[int, ...],
    expected: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    """Only the main one reads control.json, and once."""
    if control:
        (tmp_path / "control.json").write_text(control)

    class Due:
        def __init__(self, key: str, rank: int) -> None:
            self.key = key
            self.is_due = key == "first" and rank in due_ranks

        def due(self, trainer: Trainer, step: int, requests: set[str]) -> bool:
            assert step == 4
            return self.is_due or self.key in requests

    def agree(dist: DistributedContext) -> tuple[Any, ...]:
        pending = SimpleNamespace(is_being_written=dist.rank in writing_ranks)
        trainer: Any = SimpleNamespace(
            run=tmp_path if dist.is_main else tmp_path / "elsewhere",
            dist=dist,
            callbacks=[Due("first", dist.rank), Due("save", dist.rank)],
            signals=Signals(stop=dist.rank in stopped_ranks),
            pending_save=pending,
        )
        return _agree_on_requests(trainer, 4)

    assert in_threads(2, agree) == [expected] * 2
    assert not (tmp_path / "control.json").exists()


@pytest.mark.parametrize(
    ("stop", "lacking", "is_cut_short"),
    [
        ((True, False), (False, True), True),
        ((True, False), (False, False), False),
        ((False, False), (True, True), False),
    ],
)
def test_a_last_step_is_cut_short_where_its_work_was_interrupted(
    stop: tuple[bool, bool], lacking: tuple[bool, bool], is_cut_short: bool
) -> None:
    """Only the main process knows what is lacking, and all must end alike."""

    def cut_short(dist: DistributedContext, of_rank: int) -> bool:
        is_here = dist.rank == of_rank

        def is_lacking(trainer: Trainer, step: int, value: bool) -> bool:
            assert step == 7
            return value

        callbacks = [
            SimpleNamespace(is_lacking=partial(is_lacking, value=is_here and value))
            for value in lacking
        ]
        stops = stop[0] if is_here else stop[1]
        trainer: Any = SimpleNamespace(
            dist=dist, signals=Signals(stop=stops), callbacks=callbacks
        )
        return _was_cut_short(trainer, 7)

    assert in_threads(2, partial(cut_short, of_rank=0)) == [is_cut_short] * 2
    assert in_threads(2, partial(cut_short, of_rank=1)) == [False] * 2


@pytest.mark.parametrize(
    ("stop", "stops", "ended_by"),
    [
        (False, (False, False), None),
        (False, (False, True), "early"),
        (True, (False, False), "interrupted"),
        (True, (True, True), "interrupted"),
    ],
)
def test_a_run_ends_after_a_callback_in_all_processes(
    stop: bool, stops: tuple[bool, bool], ended_by: str | None
) -> None:
    def ended(dist: DistributedContext) -> str | None:
        is_asked = dist.rank == 1
        callbacks = [
            SimpleNamespace(stops=lambda trainer, value=value: is_asked and value)
            for value in stops
        ]
        signals = Signals(stop=is_asked and stop)
        trainer: Any = SimpleNamespace(dist=dist, signals=signals, callbacks=callbacks)
        return _ended_by_callback(trainer)

    assert in_threads(2, ended) == [ended_by] * 2


@pytest.mark.parametrize("error", [OutOfMemory(3, (), True), NoBatch("none")])
def test_before_a_step_s_error_the_last_good_one_is_written(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = object()
    events: list[Any] = []

    def steps(of: Any) -> Iterator[Any]:
        assert of is trainer
        yield "first"
        yield "second"
        raise error

    def settle(of: Any) -> None:
        assert of is trainer
        events.append("settled")

    monkeypatch.setattr(loop, "train_steps", steps)
    monkeypatch.setattr(loop, "settle_pending_save", settle)
    journal: Any = SimpleNamespace(flush=lambda: events.append("flushed"))
    records = _records_until_failure(trainer, journal)
    with pytest.raises(type(error)):
        list(map(events.append, records))
    assert events == ["first", "second", "flushed", "settled"]

    monkeypatch.setattr(loop, "train_steps", lambda of: iter(["only"]))
    events.clear()
    assert list(_records_until_failure(trainer, journal)) == ["only"]
    assert events == []


def shares_of(trainer: Trainer, rank: int, size: int) -> list[Any]:
    trainer.dist = DistributedContext(rank, size)
    return list(remaining_batches(trainer))


def test_each_process_gets_its_samples_of_the_steps_that_are_left(lab: Lab) -> None:
    trainer = trainer_of(lab, {"steps": 4, "batch_size": 3, "dataloader_threads": 2})
    trainer.journal.close()
    trainer.first_step = 3
    whole, first, second = (
        shares_of(trainer, *share) for share in ((0, 1), (0, 2), (1, 2))
    )
    for batches in (whole, first, second):
        assert [batch.step for batch in batches] == [3, 4]
    for all_samples, *parts in zip(whole, first, second, strict=True):
        noise = torch.cat([part.noise for part in parts])
        assert torch.equal(noise, all_samples.noise)
        assert parts[1].first_sample == len(parts[0].batch) == 1


@pytest.mark.parametrize(("sharding", "is_padded"), [("OFF", False), ("FULL", True)])
def test_a_process_without_a_sample_has_padding_where_weights_are_sharded(
    sharding: str, is_padded: bool, lab: Lab
) -> None:
    trainer = trainer_of(lab, {"steps": 1, "sharding": sharding})
    trainer.journal.close()
    (without_sample,) = shares_of(trainer, 0, 2)
    (with_sample,) = shares_of(trainer, 1, 2)
    assert len(with_sample.batch) == 1
    assert not with_sample.is_padding
    assert without_sample.is_padding is is_padded
    assert (without_sample.batch is not None) is is_padded


@pytest.mark.parametrize("error", [VideotuneError("damaged"), OSError("gone")])
def test_a_batch_that_cannot_be_read_is_named(
    error: Exception, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(lab)
    trainer.journal.close()

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(trainer.source.store, "get", refuse)
    with pytest.raises(NoBatch, match=str(error)):
        list(remaining_batches(trainer))


def test_the_peak_of_memory_is_the_largest_of_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What callbacks held before does not count."""
    device = torch.device("cpu")
    events: list[Any] = []
    peaks: dict[str, int] = {}
    with track_peak_memory(device, peaks):
        pass
    assert peaks == {}, "the host has no such count"

    readings = [(5, 10), (7, 8)]

    def stats(of: torch.device) -> dict[str, int]:
        assert of is device
        allocated, reserved = readings.pop(0)
        return {
            "allocated_bytes.all.peak": allocated,
            "reserved_bytes.all.peak": reserved,
        }

    monkeypatch.setattr(loop, "has_streams", lambda of: of is device)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", events.append)
    monkeypatch.setattr(torch.accelerator, "memory_stats", stats)
    for _ in range(2):
        with track_peak_memory(device, peaks):
            events.append("step")
    assert events == [device, "step"] * 2
    assert peaks == {"allocated_bytes": 7, "reserved_bytes": 10}


def test_a_distilled_base_keeps_its_guidance_beside_the_empty_caption(lab: Lab) -> None:
    trainer = trainer_of(lab)
    trainer.journal.close()
    assert base_guidance(trainer) is None
    resolved = trainer.job.resolved
    config = resolved.config.model_copy(update={"distilled_guidance": 3.5})
    trainer.job = replace(trainer.job, resolved=replace(resolved, config=config))
    guidance = base_guidance(trainer)
    assert guidance is not None
    assert guidance.scale == 3.5
    expected = trainer.family.collate_states([trainer.text_states("")])
    assert torch.equal(guidance.empty.text, expected.text)
    trainer.family.device = torch.device("meta")
    guidance = base_guidance(trainer)
    assert guidance is not None
    assert guidance.empty.text.is_meta


def test_the_kernels_of_a_block_are_deterministic_and_then_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)

    def state() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory  # fmt: skip

    before = state()
    assert before == (False, True)
    with deterministic_kernels(False):
        assert state() == before
        assert name not in os.environ
    with deterministic_kernels(True):
        assert state() == (True, False)
        assert os.environ[name] == ":4096:8"
    assert state() == before

    monkeypatch.setenv(name, ":16:8")
    with (
        pytest.raises(RuntimeError, match="something else"),
        deterministic_kernels(True),
    ):
        raise RuntimeError("something else")
    assert os.environ[name] == ":16:8"
    assert state() == before
    message = "put_ has no deterministic implementation\nand more"
    with (
        pytest.raises(VideotuneError, match=r"kernel \(put_ has no .*\)\. Set it"),
        deterministic_kernels(True),
    ):
        raise RuntimeError(message)
    assert state() == before

    # What the process had before is what it has then.
    torch.use_deterministic_algorithms(True)
    try:
        with deterministic_kernels(True):
            pass
        assert state() == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dist", "sharding", "together", "participates"),
    [
        (DistributedContext(), "FULL", False, True),
        (DistributedContext(0, 2), "OFF", False, True),
        (DistributedContext(1, 2), "OFF", False, False),
        (DistributedContext(1, 2), "FULL", True, True),
        (DistributedContext(1, 2, context_parallel=2), "OFF", True, True),
    ],
)
def test_who_takes_part_in_work_between_steps_and_may_be_interrupted(
    dist: DistributedContext,
    sharding: str,
    together: bool,
    participates: bool,
    lab: Lab,
) -> None:
    """Where all must run the network together, none may leave the others waiting."""
    trainer = trainer_of(lab)
    trainer.journal.close()
    resolved = trainer.job.resolved
    config = resolved.config.model_copy(update={"sharding": sharding})
    trainer.job = replace(trainer.job, resolved=replace(resolved, config=config))
    trainer.dist = dist
    assert trainer.must_run_together is together
    assert trainer.weights_sharded is (together and sharding == "FULL")
    assert trainer.participates is participates
    assert isinstance(trainer.in_lockstep(), nullcontext) is not together
    trainer.signals.stop = True
    if together:
        with trainer.interruptible():
            pass
    else:
        with pytest.raises(Interrupted), trainer.interruptible():
            pass
    assert any(isinstance(callback, Saving) for callback in trainer.callbacks)


class Work(Callback):
    """Work of some steps, which notes what is recorded by then."""

    def __init__(self, due_at: tuple[int, ...] = (), *, stops: bool = False) -> None:
        self.due_at = due_at
        self.wants_to_stop = stops
        self.recorded: list[tuple[int, int]] = []

    def due(self, trainer: Trainer, step: int, requests: Collection[str]) -> bool:
        return step in self.due_at

    def run(self, trainer: Trainer, step: int) -> None:
        self.recorded.append((step, trainer.last_step))
        trainer.net.eval()

    def stops(self, trainer: Trainer) -> bool:
        return self.wants_to_stop


def trained(lab: Lab, *work: Callback, steps: int = 4) -> tuple[Trainer, str]:
    trainer = trainer_of(lab, {"steps": steps})
    trainer.callbacks = (*trainer.callbacks, *work)
    return trainer, train_loop(trainer)


def test_a_step_is_recorded_before_work_that_is_due_after_it(lab: Lab) -> None:
    """And the network trains on after work that has used it."""
    work = Work((1, 3, 4))
    trainer, ended = trained(lab, work)
    assert ended == "done"
    assert work.recorded == [(1, 1), (3, 3), (4, 4)]
    trainer.journal.close()
    lines = steps_of(trainer.run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(
        {"data", "forward", "backward", "optimizer"} <= line["seconds"].keys()
        for line in lines
    )

    trainer = trainer_of(lab, {"steps": 1})
    trainer.net.eval()
    next(train_steps(trainer))
    trainer.journal.close()
    assert trainer.net.training


@pytest.mark.parametrize(
    ("due_at", "ended", "last", "saved"),
    [((2,), "early", 2, [2]), ((), "done", 4, [4]), ((4,), "done", 4, [4])],
)
def test_a_run_ends_early_after_work_that_asks_for_it(
    due_at: tuple[int, ...], ended: str, last: int, saved: list[int], lab: Lab
) -> None:
    """With its last step saved; at the last step there is nothing to end."""
    trainer, reason = trained(lab, Work(due_at, stops=True))
    trainer.journal.close()
    assert (reason, trainer.last_step) == (ended, last)
    assert trainer.pending_save is None
    checkpoints = complete_checkpoints(trainer.run)
    assert [each.step for each in checkpoints] == saved
    assert len(of_kind(trainer.run, "save")) == 1


class Stop(Work):
    """A user who asks to stop while a step runs."""

    def due(self, trainer: Trainer, step: int, requests: Collection[str]) -> bool:
        if step in self.due_at:
            trainer.signals.stop = True
        return False


@pytest.mark.parametrize(("at", "ended"), [(2, "interrupted"), (4, "done")])
def test_a_stop_ends_the_run_after_its_step_is_saved(
    at: int, ended: str, lab: Lab
) -> None:
    """In the last step it changes nothing."""
    work = Work()
    work.saves = True
    trainer, reason = trained(lab, Stop((at,)), work)
    trainer.journal.close()
    assert work.recorded == [(at, at)], "the step is recorded before it is saved"
    assert (reason, trainer.last_step) == (ended, at)
    assert trainer.pending_save is None
    (line,) = of_kind(trainer.run, "save")
    assert line["step"] == at
    assert pick(trainer.run, at).kind == "save"
    assert train_loop(trainer) == "interrupted", "nothing begins after it"


def test_steps_go_on_while_a_checkpoint_is_written(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Event()
    write = saving.save_checkpoint
    states: list[tuple[int, bool]] = []

    class Release(Work):
        def due(self, trainer: Trainer, step: int, requests: Collection[str]) -> bool:
            states.append((step, saving.is_writing(trainer)))
            if step == 3:
                written.set()
            return False

    def write_slowly(*arguments: Any) -> Any:
        assert written.wait(timeout=20)
        return write(*arguments)

    monkeypatch.setattr(saving, "save_checkpoint", write_slowly)
    trainer = trainer_of(lab, {"steps": 4, "save_every": 1, "save_keep": 9})
    first, *_ = [each for each in trainer.callbacks if isinstance(each, Saving)]
    first.every = 5  # only the last step, and the one that is saved by hand here
    trainer.callbacks = (first, Release())
    saving.save(trainer, 1)
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    assert states[:3] == [(1, True), (2, True), (3, True)]
    assert [line["step"] for line in of_kind(trainer.run, "save")] == [1, 4]


def test_the_bar_asks_what_the_run_does(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Callable[[], str]]] = []

    def noting_bar(title: str, status: Callable[[], str]) -> Any:
        asked.append((title, status))
        return bar(title, status)

    monkeypatch.setattr(loop, "bar", noting_bar)
    trainer = trainer_of(lab, {"steps": 1})
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    ((title, status),) = asked
    assert title == "training"
    trainer.heartbeat.set("sampling", 1)
    assert status() == "drawing previews"
