"""What a run that was stopped says of the verdict that it has not reached."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from videotune.validation.recommended_checkpoint import recommend_checkpoint
from videotune.validation.to_come import validations_to_come


def stopped(run: Path, *, steps: int, every: int | None) -> Any:
    """A trainer of a run with one validation so far."""
    clips = {"a": 1.0, "b": 1.0}
    part = {"mean": 1.0, "normalised": 1.0, "clips": clips, "by_quantile": [1.0]}
    reading = {"kind": "validation", "step": 0, "validation": "x", "time": 1.0}
    events = [reading | {"held_out": part, "train": part}]
    return SimpleNamespace(
        run=run,
        job=SimpleNamespace(config=SimpleNamespace(validate_every=every), steps=steps),
        journal=SimpleNamespace(history=SimpleNamespace(events=events)),
    )


@pytest.mark.parametrize(
    ("steps", "every", "step", "expected"),
    [
        (60, 20, 10, [20, 40, 60]),
        (600, 20, 10, [20, 40, 60]),
        (60, 20, 60, []),
        (60, None, 10, []),
        (50, 20, 10, [20, 40, 50]),
    ],
)
def test_validations_to_come_are_those_that_are_due(
    tmp_path: Path, steps: int, every: int | None, step: int, expected: list[int]
) -> None:
    trainer = stopped(tmp_path, steps=steps, every=every)
    assert validations_to_come(trainer, step) == expected


def test_a_stopped_run_names_the_step_of_its_verdict(tmp_path: Path) -> None:
    trainer = stopped(tmp_path, steps=60, every=20)
    assert "at step 40" in recommend_checkpoint(trainer, 10)["why"]
    assert "smaller validate_every" in recommend_checkpoint(trainer, 60)["why"]
