"""When work between steps is due, and which expert can be loaded."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trainers import Lab, trainer_of
from videotune.runs.checkpoint import complete_checkpoints
from videotune.trainer.loop import train_loop
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
