"""When work between steps is due, and which expert can be loaded."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.trainers import Lab, trainer_of
from videotune.memory.compiling import CompiledBlocks
from videotune.runs.checkpoint import complete_checkpoints
from videotune.trainer import loop
from videotune.trainer.gradient_norms import GradientNorms
from videotune.trainer.loop import (
    NotFinite,
    _must_flush_now,
    _refuse_skipped_steps,
    run_callbacks,
    step_context,
    train_loop,
)
from videotune.trainer.step_context import StepContext
from videotune.trainer.trainer import Callback, Trainer


class Looking(Callback):
    """Work that a user can ask for."""

    every = 4
    control_key = "look"


@pytest.mark.parametrize(
    ("step", "asked", "is_due", "left"),
    [
        (3, (), False, 3),
        (3, ("look", "save"), True, 3),
        (3, ("save",), False, 3),
        (4, (), True, 2),
        (9, (), False, 1),
        (10, (), True, 0),
    ],
)
def test_work_is_due_at_its_steps_at_the_last_one_and_where_it_is_asked_for(
    step: int, asked: tuple[str, ...], is_due: bool, left: int
) -> None:
    """Of ten steps."""
    trainer: Any = SimpleNamespace(job=SimpleNamespace(steps=10))
    callback = Looking()
    assert callback.due(trainer, step, asked) is is_due
    assert callback.seconds_left(trainer, step, took=0.5) == 0.5 * left


class StopAtTwo(Callback):
    """Another process's signal to stop, heard of when all others have decided."""

    def due(self, trainer: Trainer, step: int, requests: Collection[str]) -> bool:
        if step == 2:
            trainer.signals.stop = True
        return False


def test_a_stop_that_is_heard_of_late_leaves_a_save_and_no_backup(
    tmp_path: Path, small_clips: Path
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, {"backup_every": 1, "save_every": 0, "steps": 4})
    trainer.callbacks = (*trainer.callbacks, StopAtTwo())
    assert train_loop(trainer) == "interrupted"
    checkpoints = complete_checkpoints(trainer.run)
    kinds = {checkpoint.step: checkpoint.kind for checkpoint in checkpoints}
    assert kinds[2] == "save"
    assert trainer.pending_save is None, "and it is whole when the loop ends"


@pytest.mark.parametrize(
    ("due", "stop_requested", "is_last", "ran", "result"),
    [
        ((False, False), False, False, [], False),
        ((True, False), False, False, ["saves"], False),
        ((False, True), False, False, ["other"], True),
        ((True, True), False, False, ["saves", "other"], True),
        ((False, True), True, False, ["saves"], False),
        ((False, True), True, True, ["saves", "other"], True),
        ((False, False), False, True, ["saves"], False),
    ],
)
def test_on_a_stop_and_at_the_end_what_saves_runs_and_other_work_if_it_is_due(
    due: tuple[bool, bool],
    stop_requested: bool,
    is_last: bool,
    ran: list[str],
    result: bool,
) -> None:
    events: list[str] = []

    class Noting(Callback):
        def __init__(self, name: str) -> None:
            self.name = name
            self.saves = name == "saves"

        def run(self, trainer: Trainer, step: int) -> None:
            assert step == 5
            sleep(0.002)
            events.append(self.name)

    callbacks = [Noting("saves"), Noting("other")]
    took: dict[Callback, float] = {}
    trainer: Any = SimpleNamespace(
        callbacks=callbacks,
        participates=True,
        pool=SimpleNamespace(free_graphs=lambda: events.append("free graphs")),
        throughput=SimpleNamespace(took=took),
    )
    ran_more = run_callbacks(
        trainer, 5, list(due), stop_requested=stop_requested, is_last=is_last
    )
    assert ran_more is result
    assert [event for event in events if event != "free graphs"] == ran
    # Previews and validation need the memory of graphs; what saves does not.
    assert ("free graphs" in events) is ("other" in ran)
    if "other" in ran:
        assert events[-2:] == ["free graphs", "other"]
    assert [callback.name for callback in took] == ran  # type: ignore[attr-defined]
    assert all(0.002 <= seconds < 5 for seconds in took.values())

    # Another process than the main one only saves.
    events.clear()
    trainer.participates = False
    run_callbacks(trainer, 5, [True, True], stop_requested=False, is_last=False)
    assert events == ["saves", "free graphs"]


@pytest.mark.parametrize(
    ("step", "skipped", "flushes"),
    [(3, 0, True), (4, 0, False), (2, 0, False), (4, 3, False), (4, 4, True)],
)
def test_a_step_is_waited_for_if_it_is_the_first_or_may_be_the_last(
    step: int, skipped: int, flushes: bool
) -> None:
    """Five steps in a row that are not finite end the run, the present one included."""
    trainer: Any = SimpleNamespace(first_step=3, skipped_in_a_row=skipped)
    assert _must_flush_now(trainer, step) is flushes
    trainer.skipped_in_a_row = 4
    _refuse_skipped_steps(trainer)
    trainer.skipped_in_a_row = 5
    with pytest.raises(NotFinite, match="5 steps in a row"):
        _refuse_skipped_steps(trainer)


def test_while_a_run_trains_its_bar_and_its_compiler_s_clock_run(
    tmp_path: Path, small_clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, {"steps": 2})
    trainer.pool.compiled = CompiledBlocks()
    clock = trainer.pool.compiled.clock
    bars: list[tuple[str, Any]] = []
    updates: list[int] = []

    @contextmanager
    def bar(title: str, doing: Any) -> Iterator[Any]:
        bars.append((title, doing))
        yield SimpleNamespace(update=lambda step, *more: updates.append(step))

    def compile_something(number: int) -> None:
        torch.compile(lambda x: x + number, backend="eager")(torch.ones(1))

    class Compiling(Callback):
        every = 2

        def run(self, trainer: Trainer, step: int) -> None:
            compile_something(1)
            trainer.heartbeat.set("sampling", step)
            ((title, doing),) = bars
            assert (title, doing()) == ("training", "drawing previews")

    monkeypatch.setattr(loop, "bar", bar)
    trainer.callbacks = (Compiling(),)
    compile_something(2)
    assert clock.seconds == 0
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    assert updates == [1, 2]
    seconds = clock.seconds
    assert seconds > 0
    compile_something(3)
    assert clock.seconds == seconds


def test_what_all_steps_share_is_the_run_s(tmp_path: Path, small_clips: Path) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    knobs = {
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 3,
        "max_grad_norm": 0.7,
        "seed": 5,
        "lora.dropout": 0.1,
    }
    trainer = trainer_of(lab, knobs)
    trainer.journal.close()
    trainer.job = replace(trainer.job, processes=3)
    trainer.pool.compiled = CompiledBlocks()
    trainer.gradient_norms = GradientNorms(bool, 1, trainer.device)
    assert step_context(trainer) == StepContext(
        family=trainer.family,
        objective=trainer.source.objective,
        micro_batch_count=6,
        max_grad_norm=0.7,
        network_seed=5,
        micro_batch_size=3,
        dist=trainer.dist,
        gradient_norms=trainer.gradient_norms,
        compiled=trainer.pool.compiled,
    )
    plain = trainer_of(lab)
    plain.journal.close()
    assert step_context(plain).network_seed is None


def test_an_expert_that_the_model_lacks_is_named(
    tmp_path: Path, small_clips: Path
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab)
    trainer.journal.close()
    assert len(list(trainer.pool)) == 1
    with pytest.raises(KeyError, match="nobody"):
        trainer.pool.load("nobody")


def test_the_heartbeat_follows_the_steps_and_what_is_done_between_them(
    tmp_path: Path, small_clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    trainer = trainer_of(lab, {"save_every": 2, "steps": 3})
    states: list[tuple[Any, ...]] = []
    set_state = trainer.heartbeat.set

    def note(*state: Any) -> None:
        states.append(state)
        set_state(*state)

    monkeypatch.setattr(trainer.heartbeat, "set", note)
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    assert states == [
        ("training", 0),
        ("training", 1),
        ("training", 1),
        ("training", 2),
        ("saving", 2),
        ("training", 2),
        ("training", 3),
        ("saving", 3),
        ("training", 3),
    ]
