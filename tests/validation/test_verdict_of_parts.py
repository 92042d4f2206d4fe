"""The verdict on a run that learns video and sound: each by itself, and both together."""

from collections.abc import Mapping
from typing import Any

import pytest

from videotune.runs.journal import readings_of, with_mean_of_modalities
from videotune.validation.overfitting import (
    LEARNING,
    OVERFITTING,
    PLATEAU,
    judge,
    ranking,
)

FALLING = (1.0, 0.8, 0.6, 0.4, 0.3)
RISING = (1.0, 0.7, 0.9, 1.1, 1.3)
FLAT = (1.0, 1.0, 1.0, 1.0, 1.0)


def part(value: float | None, clips: int = 4) -> dict[str, Any]:
    """Clips that all have nearly the same value."""
    values = {
        f"clip{i}": None if value is None else value + 0.001 * i for i in range(clips)
    }
    return {
        "normalised": value,
        "mean": value,
        "by_quantile": [value] * 9,
        "windows": clips,
        "clips": values,
    }


def lines(
    video: tuple[float, ...], sound: tuple[Any, ...], sound_clips: int = 4
) -> list[Mapping[str, Any]]:
    """Validations every 100 steps, of which training clips fall."""
    journal = []
    for index, (of_video, of_sound) in enumerate(zip(video, sound, strict=True)):
        train = part(1 - 0.15 * index)
        journal.append(
            {
                "kind": "validation",
                "validation": "a",
                "step": 100 * index,
                "held_out": part(of_video),
                "train": train,
                "sound": {"held_out": part(of_sound, sound_clips), "train": train},
            }
        )
    return journal


@pytest.mark.parametrize(
    ("video", "sound", "label"),
    [
        (FALLING, FALLING, LEARNING),
        (FALLING, FLAT, LEARNING),
        (FLAT, FALLING, LEARNING),
        (FLAT, FLAT, PLATEAU),
        (FALLING, RISING, OVERFITTING),
        (RISING, FALLING, OVERFITTING),
    ],
)
def test_a_run_copies_if_either_does_and_otherwise_learns_if_either_does(
    video: tuple[float, ...], sound: tuple[float, ...], label: str
) -> None:
    verdict = judge(lines(video, sound))
    assert verdict is not None
    assert verdict.label == label
    own = {"video": judge(lines(video, video)), "sound": judge(lines(sound, sound))}
    assert verdict.parts == {
        name: each.label if each else None for name, each in own.items()
    }
    assert verdict.turned is (label == OVERFITTING)


def test_the_best_step_is_that_of_the_mean_of_both() -> None:
    journal = lines((1.0, 0.5, 0.6, 0.7, 0.8), (1.0, 0.9, 0.6, 0.55, 0.56))
    verdict = judge(journal)
    assert verdict is not None
    means = {
        line["step"]: line["held_out"]["normalised"]
        for line in with_mean_of_modalities(readings_of(journal))
    }
    assert verdict.best_step == min(means, key=means.__getitem__) == 200
    assert verdict.best == pytest.approx(0.6)
    assert verdict.as_good is None


def test_a_part_without_a_verdict_leaves_the_other_ones_numbers() -> None:
    """One clip with sound is held out: the scatter over clips needs two."""
    journal = lines(RISING, FALLING, sound_clips=1)
    alone = judge([{**line, "sound": None} for line in journal])
    verdict = judge(journal)
    assert verdict is not None
    assert alone is not None
    assert verdict.parts == {"video": OVERFITTING, "sound": None}
    assert (verdict.label, verdict.best_step) == (OVERFITTING, alone.best_step)
    ranked = ranking(readings_of(journal), verdict)
    values = [line["held_out"]["normalised"] for line in ranked]
    assert values == list(RISING), "not the mean of both"


def test_sound_of_no_training_clip_gives_no_verdict_of_it() -> None:
    journal = [
        {**line, "sound": {**line["sound"], "train": None}}
        for line in lines(RISING, FALLING)
    ]
    verdict = judge(journal)
    assert verdict is not None
    assert verdict.label == OVERFITTING
    assert verdict.parts == {"video": OVERFITTING, "sound": None}


def test_no_held_out_clip_with_sound_gives_no_verdict_of_it() -> None:
    journal = [
        {**line, "sound": {**line["sound"], "held_out": None}}
        for line in lines(FALLING, FALLING)
    ]
    verdict = judge(journal)
    assert verdict is not None
    assert verdict.parts == {"video": LEARNING, "sound": None}


def test_a_reading_that_is_not_finite_is_no_best_step() -> None:
    journal = lines(RISING, (1.0, 0.8, None, 0.6, 0.5))
    verdict = judge(journal)
    assert verdict is not None
    assert verdict.parts == {"video": OVERFITTING, "sound": None}
    assert verdict.best_step == 100
