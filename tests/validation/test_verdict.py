"""The verdict is a pure function of the validation losses: planted courses, and what chance alone does."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from videotune.validation.overfitting import LEARNING, OVERFITTING, PLATEAU, T, Verdict, as_good, in_a_row, judge, rise

HARD = np.linspace(-0.2, 0.2, 8)
"""What makes one clip harder than another."""


def reading(step: int, held: Sequence[float] | float, train: float, validation: str = "aaaaaaaa") -> dict[str, Any]:
    """A reading whose held-out clips lie at these values, or all about one."""
    clips = held + HARD if isinstance(held, float) else np.asarray(held)

    def part(values: np.ndarray) -> dict[str, Any]:
        mean = float(values.mean())
        named = {f"{i:012x}": float(value) for i, value in enumerate(values)}
        return {"normalised": mean, "by_quantile": [mean * (9 - i) for i in range(9)], "clips": named}

    kinds = {"kind": "validation", "step": step, "validation": validation}
    return kinds | {"held_out": part(clips), "train": part(train + HARD)}


def course(held: Sequence[float], train: Sequence[float], scatter: float = 0.004) -> list[dict[str, Any]]:
    """Readings every ten steps; each clip is off by a scatter of its own."""
    random = np.random.default_rng(0)
    pairs = enumerate(zip(held, train, strict=True))
    return [reading(10 * i, h + HARD + scatter * random.standard_normal(8), t) for i, (h, t) in pairs]


def word(lines: list[dict[str, Any]]) -> str | None:
    found = judge(lines)
    assert found is not None
    return found.word


DOWN = (1.0, 0.8, 0.6, 0.5)


def test_held_out_clips_that_rise_twice_while_training_clips_fall_are_overfitting() -> None:
    lines = course([*DOWN, 0.55, 0.6], [*DOWN, 0.4, 0.3])
    assert word(lines[:4]) == LEARNING
    assert word(lines[:5]) == LEARNING, "once may be chance"
    found = judge(lines)
    assert found is not None
    assert (found.word, found.best_step) == (OVERFITTING, 30)
    assert found.best == pytest.approx(0.5, abs=0.01)
    assert "step 30" in found.reason
    assert found.quantile in range(1, 10)


def test_a_rise_that_one_clip_alone_makes_is_within_the_scatter() -> None:
    lines = course([*DOWN], [*DOWN])
    for step in (40, 50):
        held = 0.5 + HARD
        held[3] += 0.4  # the mean rises by as much as in the test above
        lines.append(reading(step, held, 0.3))
    assert word(lines) != OVERFITTING


def test_where_training_clips_rise_as_well_it_is_no_copying() -> None:
    lines = course([*DOWN, 0.55, 0.6], [*DOWN, 0.6, 0.7])
    found = judge(lines)
    assert found is not None
    assert found.word != OVERFITTING


def test_where_nothing_falls_any_more_it_is_a_plateau() -> None:
    assert word(course([*DOWN, 0.5, 0.5, 0.5, 0.5], [*DOWN, 0.5, 0.5, 0.5, 0.5])) == PLATEAU
    assert word(course([*DOWN, 0.45, 0.4], [*DOWN, 0.5, 0.5])) == LEARNING


def test_a_run_that_flies_apart_is_not_said_to_rest() -> None:
    up = (1.0, 0.9, 0.8, 1.2, 1.8, 2.5)
    found = judge(course(up, up))
    assert found is not None
    assert (found.word, found.best_step, found.turned) == (PLATEAU, 20, True)
    assert "both have got worse, a sign of too high a learning_rate" in found.reason
    assert "chance" not in found.reason
    rested = judge(course((*DOWN, 0.5, 0.5), (*DOWN, 0.5, 0.5)))
    assert rested is not None
    assert not rested.turned


def test_a_call_says_what_was_seen_when_it_was_made() -> None:
    """The training clips at the reading that rose, not at a later one at which they may lie higher again."""
    found = judge(course([*DOWN, 0.55, 0.6, 0.61], [*DOWN, 0.4, 0.3, 0.9]))
    assert found is not None
    assert found.word == OVERFITTING
    assert "training clips fell from 0.500 to 0.300" in found.reason


def test_training_clips_that_fall_alone_are_no_learning() -> None:
    found = judge(course([*DOWN, 0.5, 0.5, 0.5, 0.5], [*DOWN, 0.45, 0.4, 0.35, 0.3]))
    assert found is not None
    assert found.word == PLATEAU
    assert found.reason.endswith("what is still learnt is these clips alone")


def test_overfitting_stands_until_held_out_clips_have_a_new_best() -> None:
    held, train = [*DOWN, 0.55, 0.6, 0.505], [*DOWN, 0.4, 0.3, 0.2]
    found = judge(course(held, train))
    assert found is not None
    assert (found.word, found.best_step) == (OVERFITTING, 30)
    assert "rose to 0.6" in found.reason
    assert "at step 50 (now 0.5" in found.reason
    assert word(course([*held, 0.4], [*train, 0.2])) == LEARNING


def test_too_few_readings_say_nothing() -> None:
    assert judge([]) is None
    for count in (1, 2):
        found = judge(course(DOWN[:count], DOWN[:count]))
        assert found is not None
        assert found.word is None
        assert "3 are needed" in found.reason


def test_without_held_out_clips_no_validation_is_possible() -> None:
    lines = [line | {"held_out": None} for line in course(DOWN, DOWN)]
    found = judge(lines)
    assert found is not None
    assert found.word is None
    assert found.reason.startswith("no validation possible")
    one = [line | {"held_out": line["held_out"] | {"clips": {"a": 1.0}}} for line in course(DOWN, DOWN)]
    assert "one held-out clip" in str(judge(one))


def test_a_reading_that_is_not_finite_is_said() -> None:
    lines = course(DOWN, DOWN)
    lines[2]["train"] |= {"normalised": None}
    found = judge(lines)
    assert found is not None
    assert (found.word, found.reason) == (None, "a validation loss is not finite")


def test_another_ruler_begins_anew() -> None:
    lines = course([*DOWN, 0.55, 0.6], [*DOWN, 0.4, 0.3])
    assert word([*lines, reading(60, 1.0, 1.0, "bbbbbbbb")]) is None
    assert word([{"kind": "step", "step": 1}, *lines, {"kind": "save", "step": 50}]) == OVERFITTING


def test_the_readings_in_a_row_are_counted_from_the_last() -> None:
    lines = course([*DOWN, 0.55, 0.6, 0.65, 0.7], [*DOWN, 0.4, 0.3, 0.2, 0.1])
    assert [in_a_row(lines[:n], OVERFITTING) for n in range(3, 9)] == [0, 0, 0, 1, 2, 3]
    assert in_a_row([*lines, reading(80, 0.3, 0.05)], OVERFITTING) == 0


def test_the_noise_level_that_turned_first_is_named() -> None:
    """The fourth turns two readings before all others do."""
    lines = course([*DOWN, 0.55, 0.6], [*DOWN, 0.4, 0.3])
    for line, early in zip(lines, (1.0, 0.5, 0.6, 0.7, 0.8, 0.9), strict=True):
        line["held_out"]["by_quantile"][3] = early
    found = judge(lines)
    assert found is not None
    assert found.quantile == 4


def test_steps_whose_readings_cannot_be_told_from_the_best_are_as_good() -> None:
    held = [dict(enumerate(0.5 + HARD + shift)) for shift in (0.2, 0.0, 0.2)]
    held.insert(2, dict(enumerate(0.5 + HARD + 0.01 * np.array([1, -1, 1, -1, 1, -1, 1, -0.9]))))
    assert as_good(held, 1) == (1, 2)


def test_the_chance_is_students() -> None:
    """Its table against 100,000 draws: a mean of n normal differences lies above it once in twenty times."""
    random = np.random.default_rng(0)
    for n in range(2, 2 + len(T)):
        draws = random.standard_normal((100_000, n))
        share = (draws.mean(1) > T[n - 2] * draws.std(1, ddof=1) / np.sqrt(n)).mean()
        assert share == pytest.approx(0.05, abs=0.003), n
    before, now = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.1, "b": 2.3, "c": 3.2}
    mean, chance = rise(before, now)
    assert (mean, chance) == (pytest.approx(0.2), pytest.approx(2.920 * 0.1 / 3**0.5))


def test_chance_alone_is_seldom_called_overfitting() -> None:
    """Two hundred courses that fall and then rest, with the scatter of each clip and of all together."""
    called = 0
    for seed in range(200):
        random, lines = np.random.default_rng(seed), []
        for i in range(11):
            level, common = 0.4 + 0.6 * float(np.exp(-i)), 0.005 * random.standard_normal()
            own = 0.005 * random.standard_normal(8)
            lines.append(reading(i, level + common + HARD + own, level + common))
        called += any(word(lines[:n]) == OVERFITTING for n in range(1, 12))
    assert called <= 4


def test_the_line_has_all_that_a_verdict_says() -> None:
    line = Verdict(PLATEAU, "so", 30, 20, 0.5, (20, 30), True, None, "aaaaaaaa").to_json()
    assert line["verdict"] == PLATEAU
    assert line["as_good"] == [20, 30]
    assert set(line) == {
        "verdict",
        "reason",
        "step",
        "best_step",
        "best",
        "as_good",
        "turned",
        "quantile",
        "validation",
    }
