"""The verdict on planted courses of the validation loss, and on pure chance.

research/verdict.json has the results of research/verdict.py on the toy model;
docs/monitor.md describes them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from videotune.validation.chance import STUDENT_T
from videotune.validation.overfitting import (
    LEARNING,
    OVERFITTING,
    PLATEAU,
    _direction,
    as_good,
    count_latest,
    judge,
    recommend,
    rise,
    turned_first,
)
from videotune.validation.selection import MAX_WINDOWS

HARD = np.linspace(-0.2, 0.2, 8)
"""How much harder each clip is than the mean."""


def reading(
    step: int, held: Sequence[float] | float, train: float, validation: str = "aaaaaaaa"
) -> dict[str, Any]:
    """Return a reading with these values of held-out clips, or all around one value."""
    clips = held + HARD if isinstance(held, float) else np.asarray(held)

    def part(values: np.ndarray) -> dict[str, Any]:
        mean = float(values.mean())
        named = {f"{i:012x}": float(value) for i, value in enumerate(values)}
        return {
            "normalised": mean,
            "by_quantile": [mean * (9 - i) for i in range(9)],
            "clips": named,
        }

    kinds = {"kind": "validation", "step": step, "validation": validation}
    return kinds | {"held_out": part(clips), "train": part(train + HARD)}


def course(
    held: Sequence[float], train: Sequence[float], scatter: float = 0.004
) -> list[dict[str, Any]]:
    """Return readings every ten steps; each clip has its own scatter."""
    random = np.random.default_rng(0)
    pairs = enumerate(zip(held, train, strict=True))
    return [
        reading(10 * i, h + HARD + scatter * random.standard_normal(8), t)
        for i, (h, t) in pairs
    ]


def label_of(lines: list[dict[str, Any]]) -> str | None:
    verdict = judge(lines)
    return verdict.label


DOWN = (1.0, 0.8, 0.6, 0.5)
UP = (1.0, 0.9, 0.8, 1.2, 1.8, 2.5)
COURSES = {
    "still falling": (DOWN, DOWN, LEARNING, None, ""),
    "clips kept aside rose once, which may be chance": ((*DOWN, 0.55), (*DOWN, 0.4), LEARNING, None, ""),
    "they rose twice while training clips fall": ((*DOWN, 0.55, 0.6), (*DOWN, 0.4, 0.3), OVERFITTING, 30, "step 30"),
    "training clips rise as well": ((*DOWN, 0.55, 0.6), (*DOWN, 0.6, 0.7), PLATEAU, 30, "both have got worse"),
    "nothing falls any more": ((*DOWN, 0.5, 0.5, 0.5, 0.5), (*DOWN, 0.5, 0.5, 0.5, 0.5), PLATEAU, None, ""),
    "clips kept aside alone still fall": ((*DOWN, 0.45, 0.4), (*DOWN, 0.5, 0.5), LEARNING, None, ""),
    "the run flies apart": (UP, UP, PLATEAU, 20, "both have got worse, a sign of too high a learning_rate"),
    # the training clips at the validation that rose, not at a later one at which they
    # may lie higher again
    "what was seen when it was called": (
        (*DOWN, 0.55, 0.6, 0.61), (*DOWN, 0.4, 0.3, 0.9), OVERFITTING, 30, "training clips fell from 0.500 to 0.300",
    ),
    "training clips alone still fall": (
        (*DOWN, 0.5, 0.5, 0.5, 0.5), (*DOWN, 0.45, 0.4, 0.35, 0.3), PLATEAU, None,
        "the model now improves only on the training clips",
    ),
    "it stands": ((*DOWN, 0.55, 0.6, 0.505), (*DOWN, 0.4, 0.3, 0.2), OVERFITTING, 30, "at step 50 (now 0.5"),
    "until there is a new best": ((*DOWN, 0.55, 0.6, 0.505, 0.4), (*DOWN, 0.4, 0.3, 0.2, 0.2), LEARNING, None, ""),
}  # fmt: skip
"""Validation losses of held-out and of training clips; the verdict, its best step, and
a part of its reason.
"""


@pytest.mark.parametrize("how", COURSES)
def test_the_verdict_of_a_course(how: str) -> None:
    held, train, verdict, best, reason = COURSES[how]
    found = judge(course(held, train))
    assert found.label == verdict
    assert found.best_step == best or best is None
    assert reason in found.reason
    assert verdict != PLATEAU or found.turned == ("worse" in reason)
    assert "chance" not in found.reason or "worse" not in reason


def test_a_rise_that_one_clip_alone_makes_is_within_the_scatter() -> None:
    lines = course([*DOWN], [*DOWN])
    for step in (40, 50):
        held = 0.5 + HARD
        held[3] += 0.4  # the mean rises by as much as in the test above
        lines.append(reading(step, held, 0.3))
    assert label_of(lines) != OVERFITTING


def test_too_few_readings_say_nothing() -> None:
    assert judge([]) is None
    for count in (1, 2):
        found = judge(course(DOWN[:count], DOWN[:count]))
        assert found.label is None
        assert "needs 3 validations" in found.reason


def test_a_living_run_says_when_its_verdict_comes() -> None:
    first = course(DOWN[:1], DOWN[:1])
    second = course(DOWN[:2], DOWN[:2])
    assert judge(first, [20, 40, 60]).reason.endswith("at step 40")
    assert judge(second, [40, 60]).reason.endswith("at step 40")
    assert "the run makes 2" in judge(first, [40]).reason
    assert judge(course(DOWN, DOWN), [60]).label is not None


def test_without_held_out_clips_no_validation_is_possible() -> None:
    lines = [line | {"held_out": None} for line in course(DOWN, DOWN)]
    found = judge(lines)
    assert found.label is None
    assert "no clip is kept aside for checking" in found.reason
    one = [
        line | {"held_out": line["held_out"] | {"clips": {"a": 1.0}}}
        for line in course(DOWN, DOWN)
    ]
    assert "at least two clips kept aside" in str(judge(one))


def test_a_reading_that_is_not_finite_is_said() -> None:
    lines = course(DOWN, DOWN)
    lines[2]["train"] |= {"normalised": None}
    found = judge(lines)
    assert (found.label, found.reason) == (None, "a validation loss is not finite")


def test_another_ruler_begins_anew() -> None:
    lines = course([*DOWN, 0.55, 0.6], [*DOWN, 0.4, 0.3])
    assert label_of([*lines, reading(60, 1.0, 1.0, "bbbbbbbb")]) is None
    assert (
        label_of([{"kind": "step", "step": 1}, *lines, {"kind": "save", "step": 50}])
        == OVERFITTING
    )


def test_the_readings_in_a_row_are_counted_from_the_last() -> None:
    lines = course([*DOWN, 0.55, 0.6, 0.65, 0.7], [*DOWN, 0.4, 0.3, 0.2, 0.1])
    assert [count_latest(lines[:n], OVERFITTING) for n in range(3, 9)] == [
        0,
        0,
        0,
        1,
        2,
        3,
    ]
    assert count_latest([*lines, reading(80, 0.3, 0.05)], OVERFITTING) == 0


def test_the_noise_level_that_turned_first_is_named() -> None:
    """The fourth turns two readings before all others do."""
    lines = course([*DOWN, 0.55, 0.6], [*DOWN, 0.4, 0.3])
    for line, early in zip(lines, (1.0, 0.5, 0.6, 0.7, 0.8, 0.9), strict=True):
        line["held_out"]["by_quantile"][3] = early
    found = judge(lines)
    assert found.quantile == 4


def test_steps_whose_readings_cannot_be_told_from_the_best_are_as_good() -> None:
    held = [dict(enumerate(0.5 + HARD + shift)) for shift in (0.2, 0.0, 0.2)]
    held.insert(
        2, dict(enumerate(0.5 + HARD + 0.01 * np.array([1, -1, 1, -1, 1, -1, 1, -0.9])))
    )
    assert as_good(held, 1) == (1, 2)


def test_the_chance_is_students() -> None:
    """Its table against 100,000 draws: a mean of n normal differences lies above it
    once in twenty times.
    """
    random = np.random.default_rng(0)
    for n in range(2, 2 + len(STUDENT_T)):
        draws = random.standard_normal((100_000, n))
        share = (
            draws.mean(1) > STUDENT_T[n - 2] * draws.std(1, ddof=1) / np.sqrt(n)
        ).mean()
        assert share == pytest.approx(0.05, abs=0.003), n
    before, now = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.1, "b": 2.3, "c": 3.2}
    mean, chance = rise(before, now)
    assert (mean, chance) == (pytest.approx(0.2), pytest.approx(2.920 * 0.1 / 3**0.5))


def test_chance_alone_is_seldom_called_overfitting() -> None:
    """Two hundred courses that fall and then rest, with the scatter of each clip and of
    all together.
    """
    called = 0
    for seed in range(200):
        random, lines = np.random.default_rng(seed), []
        for i in range(11):
            level, common = (
                0.4 + 0.6 * float(np.exp(-i)),
                0.005 * random.standard_normal(),
            )
            own = 0.005 * random.standard_normal(8)
            lines.append(reading(i, level + common + HARD + own, level + common))
        called += any(label_of(lines[:n]) == OVERFITTING for n in range(1, 12))
    assert called <= 4


ROOT = Path(__file__).parents[2]


def test_the_verdict_was_right_as_often_as_is_said() -> None:
    found = json.loads((ROOT / "research" / "verdict.json").read_text(encoding="utf-8"))
    told, summary, rows = (
        (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8"),
        found["summary"],
        found["runs"],
    )
    assert found["settings"]["held_out"] <= MAX_WINDOWS - MAX_WINDOWS // 3, (
        "the figures are of another validation"
    )
    four, endless, levels = (
        [row for row in rows if row["case"] == case]
        for case in ("four", "endless", "levels")
    )
    assert len(four) == len(endless) == 20
    right = tuple(
        summary["four"][name] for name in ("overfitting", "within_one_reading", "both")
    )
    assert right[0] == sum(row["called_at"] is not None for row in four)
    assert right[1] == sum(
        abs(row["best_step"] - row["dense_best"]) <= found["settings"]["every"]
        for row in four
    )
    assert all(row["called_at"] is None for row in endless)
    for words in (
        f"called in {right[0]} of 20",
        f"within one validation of it in {right[1]} of 20",
        f"both in {right[2]}",
        f"called in {summary['levels']['overfitting']} of {len(levels)}",
    ):
        assert words in told, words


def test_a_single_rise_is_no_overfitting_wherever_it_comes() -> None:
    """After a reading as low as the best one too, with training clips still falling."""
    assert label_of(course((*DOWN, 0.5, 0.55), (*DOWN, 0.45, 0.4))) != OVERFITTING
    one_of_two = course((*DOWN, 0.55, 0.5, 0.55), (*DOWN, 0.45, 0.4, 0.35))
    assert label_of(one_of_two) != OVERFITTING
    twice = course((*DOWN, 0.5, 0.55, 0.6), (*DOWN, 0.45, 0.4, 0.35))
    assert label_of(twice) == OVERFITTING


def test_the_trend_is_that_of_the_last_third() -> None:
    """Of 13 readings the last five: two that fall, then three that stay."""
    falling = [1.0 - 0.05 * i for i in range(11)]
    held = (*falling, falling[-1], falling[-1])
    assert label_of(course(held, held)) == LEARNING
    fell_at_the_tenth = (*falling[:10], *[falling[9]] * 3)
    assert label_of(course(fell_at_the_tenth, fell_at_the_tenth)) == LEARNING
    flat = (*falling[:9], *[falling[8]] * 4)
    assert label_of(course(flat, flat)) == PLATEAU
    fell_at_the_last = (*[0.6] * 12, 0.5)
    assert label_of(course(fell_at_the_last, fell_at_the_last)) == LEARNING


RECOMMENDED = {
    "no saved step was validated: the nearest": ({}, 25, (10, 20, 40), 20),
    "of two as near the first": ({}, 30, (20, 40), 20),
    "the best itself": ({20: 0.4, 40: 0.6}, 20, (20, 40), 20),
    "the best is not saved": ({20: 0.4, 30: 0.6, 40: 0.5}, 20, (30, 40), 40),
}
"""Losses by step, the best step and the saved steps; the step to recommend."""


@pytest.mark.parametrize("case", RECOMMENDED)
def test_a_step_that_was_saved_is_recommended(case: str) -> None:
    losses, best, saved, expected = RECOMMENDED[case]
    step, reason = recommend(losses, best, saved)
    assert step == expected
    assert bool(reason) == (step != best)


def test_a_verdict_names_its_reading_and_its_set() -> None:
    lines = course(DOWN, DOWN)
    without = [line | {"held_out": None} for line in lines]
    few = lines[:2]
    for readings, best in ((lines, 30), (few, 10), (without, None)):
        found = judge(readings)
        assert found.step == readings[-1]["step"]
        assert found.validation == "aaaaaaaa"
        assert found.best_step == best
    best = min(line["held_out"]["normalised"] for line in lines)
    assert judge(lines).best == best


SPANS = {
    "from the first to the last": ((0.5, 0.5, 0.5, 0.5, 0.5), 2, (0, 4)),
    "two before, one after": ((0.9, 0.5, 0.5, 0.5, 0.5, 0.9), 3, (1, 4)),
    "the best alone": ((0.9, 0.7, 0.5, 0.7, 0.9), 2, (2, 2)),
    "the best is the first": ((0.5, 0.5, 0.9), 0, (0, 1)),
    "the best is the last": ((0.9, 0.5, 0.5), 2, (1, 2)),
    "beyond a higher one is not asked": ((0.5, 0.9, 0.5, 0.9, 0.5), 2, (2, 2)),
}
"""Readings, the index of the best one, and the first and last that are as good."""


@pytest.mark.parametrize("case", SPANS)
def test_readings_as_good_as_the_best_are_its_neighbours(case: str) -> None:
    values, best, span = SPANS[case]
    readings = []
    for index, value in enumerate(values):
        # each differs from the best by as much up as down: the mean says nothing
        offset = 0.01 * (index != best)
        clips = [value + offset * (-1) ** clip for clip in range(8)]
        readings.append({str(clip): number for clip, number in enumerate(clips)})
    assert as_good(readings, best) == span


def levels(*curves: Sequence[float]) -> list[dict[str, Any]]:
    """Readings whose held-out losses at each noise level follow these curves."""
    return [
        {"held_out": {"by_quantile": list(values)}}
        for values in zip(*curves, strict=True)
    ]


def test_the_level_that_rose_first_is_named() -> None:
    late = [1.0, 0.8, 0.6, 0.9]
    early = [1.0, 0.5, 0.8, 0.9]
    still = [1.0, 0.9, 0.8, 0.8]
    assert turned_first(levels(still, late, early)) == 3
    assert turned_first(levels(still, late, still)) == 2
    # one that rose by less than half as much as the greatest rise does not count
    slight = [1.0, 0.7, 0.8, 0.8]
    assert turned_first(levels(slight, late, still)) == 2
    half = [1.0, 0.7, 0.8, 0.85]
    assert turned_first(levels(half, late, still)) == 1
    # a rise is a share of the level's first reading
    large = [10.0, 9.0, 9.0, 9.3]
    assert turned_first(levels(large, late, still)) == 2
    # of two that turned at once the greater rise
    greater = [1.0, 0.5, 0.8, 1.0]
    assert turned_first(levels(still, early, greater)) == 3


def test_a_best_that_is_the_base_itself_is_said() -> None:
    _, with_base = recommend({0: 0.5, 10: 0.8}, 0, (10,))
    _, without = recommend({5: 0.5, 10: 0.8}, 5, (10,))
    assert len(with_base) > len(without)
    assert without.startswith(with_base.partition(" 0")[0])


@pytest.mark.parametrize("clips", [2, 3, 15, 16, 17, 40])
def test_the_chance_level_is_that_of_students_t(clips: int) -> None:
    differences = np.random.default_rng(clips).normal(0.3, 0.1, clips)
    before = {str(clip): 1.0 for clip in range(clips)}
    now = {str(clip): 1.0 + value for clip, value in enumerate(differences)}
    mean, chance = rise(before, now)
    freedom = min(clips, 16) - 1  # more clips use the value of 16
    t = scipy.stats.t.ppf(0.95, freedom)
    assert mean == pytest.approx(differences.mean())
    assert chance == pytest.approx(
        t * differences.std(ddof=1) / np.sqrt(clips), rel=1e-3
    )
    assert rise({"a": 1.0}, {"a": 2.0}) == (1.0, float("inf"))


def test_two_held_out_clips_are_enough_and_every_clip_must_be_finite() -> None:
    lines = []
    for line in course(DOWN, DOWN):
        two = dict(list(line["held_out"]["clips"].items())[:2])
        lines.append(line | {"held_out": line["held_out"] | {"clips": two}})
    assert judge(lines).label == LEARNING
    for part in ("held_out", "train"):
        broken = course(DOWN, DOWN)
        first_clip = next(iter(broken[1][part]["clips"]))
        broken[1][part]["clips"][first_clip] = None
        assert judge(broken).label is None
        assert "not finite" in judge(broken).reason


FLAT = (0.5,) * 4
RISING = (0.5, 0.6, 0.7, 0.8)
FALLING = RISING[::-1]
TRENDS = {
    "clips kept aside fall": (FALLING, FLAT, LEARNING, ("clips kept aside went",)),
    "both rise": (RISING, RISING, PLATEAU, ("both have got worse",)),
    "only clips kept aside rise": (RISING, FLAT, PLATEAU, ("training clips went", "which may be chance")),
    "only training clips rise": (FLAT, RISING, PLATEAU, ("neither has fallen", "which may be chance")),
    "only training clips fall": (FLAT, FALLING, PLATEAU, ("only on the training clips",)),
    "nothing moves": (FLAT, FLAT, PLATEAU, ("neither has fallen",)),
}  # fmt: skip
"""Held-out and training clips; the label and what the reason says."""


@pytest.mark.parametrize("case", TRENDS)
def test_the_reason_says_what_moved(case: str) -> None:
    held, train, label, words = TRENDS[case]
    found = judge(course(held, train))
    assert found.label == label
    assert all(word in found.reason for word in words), found.reason
    others = {word for row in TRENDS.values() for word in row[3]} - set(words)
    exclusive = others & {"both have got worse", "only on the training clips", "neither has fallen"}  # fmt: skip
    assert not any(word in found.reason for word in exclusive), found.reason
    assert f"since step {10 * (len(held) - 3)}" in found.reason


def test_an_overfit_run_has_turned_and_its_reason_names_the_readings() -> None:
    found = judge(course((*DOWN, 0.55, 0.6, 0.58), (*DOWN, 0.4, 0.3, 0.2)))
    assert found.label == OVERFITTING
    assert found.turned is True
    assert "have risen to 0.58" in found.reason
    assert "over 8 clips" in found.reason
    fallen_back = judge(course((*DOWN, 0.55, 0.6, 0.505), (*DOWN, 0.4, 0.3, 0.2)))
    assert " rose to " in fallen_back.reason
    worse = judge(course((*DOWN, 0.6), (*DOWN, 0.6)))
    assert worse.turned is True
    back = judge(course((0.5, 0.8, 0.9, 0.5), (0.5, 0.8, 0.9, 0.5)))
    assert back.turned is False


@pytest.mark.parametrize(
    ("difference", "direction"), [(0.02, 1), (0.005, 0), (-0.005, 0), (-0.02, -1)]
)
def test_the_direction_of_a_single_clip_has_a_fixed_threshold(
    difference: float, direction: int
) -> None:
    assert _direction({"a": 1.0}, {"a": 1.0 + difference}) == direction


def test_the_direction_of_two_clips_is_beyond_their_scatter() -> None:
    before = {"a": 1.0, "b": 1.0}
    assert _direction(before, {"a": 1.001, "b": 1.001}) == 1
    assert _direction(before, {"a": 0.999, "b": 0.999}) == -1
    assert _direction(before, {"a": 1.5, "b": 0.9}) == 0


def test_a_fall_that_may_be_chance_is_not_called_none() -> None:
    """Two clips that scatter by more than they fall, with training clips that fall or
    stay: the reason says how few there are, and not that nothing has fallen.
    """
    for train in (FLAT, FALLING):
        lines = []
        for index, (held, t) in enumerate(zip((0.6, 0.5, 0.45), train, strict=False)):
            clips = np.array([held + 0.05 * index, held - 0.05 * index])
            lines.append(reading(10 * index, clips, t))
        verdict = judge(lines)
        assert verdict.label == PLATEAU
        assert "may have fallen" in verdict.reason
        assert "with the 2 clips kept aside that it measures" in verdict.reason
        assert "neither has fallen" not in verdict.reason
