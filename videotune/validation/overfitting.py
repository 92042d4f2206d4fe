"""The verdict: whether a run learns, has come to rest or copies its clips, from the validation losses alone.

A pure function of the readings so far. What is compared are pairs: the same held-out clip at two readings, so that what
makes one clip harder than another falls out, and the scatter of the differences over clips says how far their mean can be
trusted. docs/monitor.md has the formulas, and what the constants rest on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil, sqrt
from typing import Any

from videotune.runs.journal import readings_of

LEARNING = "LEARNING"
PLATEAU = "PLATEAU"
OVERFITTING = "OVERFITTING"

T = (
    6.314,
    2.920,
    2.353,
    2.132,
    2.015,
    1.943,
    1.895,
    1.860,
    1.833,
    1.812,
    1.796,
    1.782,
    1.771,
    1.761,
    1.753,
)
"""Student's t for 2 … 16 clips, as many as are read: a mean of differences that lies so many of its standard errors above 0
does so by chance once in twenty times. For more clips the last one, which is a little too strict, stands."""

LEAST_RISE = 0.01
"""A rise of less than this share of the first reading is no overfitting, however alike the clips take it: the weights of
two steps differ by as much where nothing is copied."""

ENOUGH = 3
"""So many readings, the first included, before anything is said."""


@dataclass(frozen=True)
class Verdict:
    """``word``: LEARNING, PLATEAU, OVERFITTING, or None where nothing can be said yet; ``reason`` in words.

    ``step`` of the reading that it was made at; ``best_step`` has the lowest held-out reading so far, ``best``, and
    ``as_good`` is the first and last step around it whose readings are as good. ``turned``: the last state is not the
    recommended checkpoint, since the run overfits, or held-out clips lie above their best by more than chance now.
    ``quantile``, 1 to 9 from little noise to much: where held-out clips turned first, of a run that overfits.
    ``validation``: the name of the validation set.
    """

    word: str | None
    reason: str
    step: int
    best_step: int | None = None
    best: float | None = None
    as_good: tuple[int, int] | None = None
    turned: bool = False
    quantile: int | None = None
    validation: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The journal's line, without its kind and time."""
        found = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
        }
        return {"verdict": found.pop("word")} | found


def judge(lines: Iterable[Mapping[str, Any]]) -> Verdict | None:
    """The verdict on a run by its validations so far; None where there is none."""
    readings = readings_of(lines)
    if not readings:
        return None
    step = int(readings[-1]["step"])
    name = readings[-1].get("validation")
    why = _unable(readings)
    if why:
        return Verdict(None, why, step, validation=name)
    held = [clips_of(reading, "held_out") for reading in readings]
    best = lowest(readings)
    first, last = as_good(held, best)
    found = Verdict(
        word=None,
        reason=f"a verdict needs {ENOUGH} validations, and the run has {len(readings)}",
        step=step,
        best_step=int(readings[best]["step"]),
        best=float(readings[best]["held_out"]["normalised"]),
        as_good=(int(readings[first]["step"]), int(readings[last]["step"])),
        validation=name,
    )
    if len(readings) < ENOUGH:
        return found
    risen = overfits(readings, best)
    if risen is not None:
        reason = _copied(readings, best, risen)
        return replace(
            found, word=OVERFITTING, reason=reason, turned=True, quantile=turned_first(readings)
        )
    word, reason = _others(readings)
    return replace(found, word=word, reason=reason, turned=_above(held[best], held[-1]))


def in_a_row(lines: Iterable[Mapping[str, Any]], word: str) -> int:
    """At how many of the latest readings, one after another, the verdict was ``word``."""
    readings = readings_of(lines)
    verdicts = (judge(readings[:end]) for end in range(len(readings), 0, -1))
    return sum(
        1 for _ in takewhile(lambda found: found is not None and found.word == word, verdicts)
    )


def _unable(readings: Sequence[Mapping[str, Any]]) -> str:
    """Why no verdict is possible, whatever follows; empty where it is."""
    if readings[-1].get("held_out") is None:
        return "no validation possible: no clip is held out, and only such clips tell learning from copying"
    if any(None in _values(reading) for reading in readings):
        return "a validation loss is not finite"
    if any(len(clips_of(reading, "held_out")) < 2 for reading in readings):
        return "no validation possible: one held-out clip does not say how much clips differ"
    return ""


def _values(reading: Mapping[str, Any]) -> list[float | None]:
    parts = [reading["held_out"], reading["train"]]
    return [
        value
        for part in parts
        for value in (part["normalised"], *part.get("clips", {}).values())
    ]


def clips_of(reading: Mapping[str, Any], part: str) -> dict[str, float]:
    """Each clip's value in a part of a reading; empty where the reading has none of clips."""
    return dict((reading.get(part) or {}).get("clips") or {})


def lowest(readings: Sequence[Mapping[str, Any]]) -> int:
    """Which reading has the lowest mean over held-out clips, the first of equals."""
    return min(range(len(readings)), key=lambda i: (readings[i]["held_out"]["normalised"], i))


def rise(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[float, float]:
    """(mean, what chance explains) of the clips' differences between two readings.

    The second number is t·s/√n, with s the differences' standard deviation over n clips.
    """
    both = [now[name] - before[name] for name in before if name in now]
    n = len(both)
    mean = sum(both) / n
    if n < 2:
        return mean, float("inf")
    spread = sqrt(sum((x - mean) ** 2 for x in both) / (n - 1))
    return mean, T[min(n, len(T) + 1) - 2] * spread / sqrt(n)


def overfits(readings: Sequence[Mapping[str, Any]], best: int) -> int | None:
    """The latest reading at which held-out clips lay above their best by more than chance, as at the one before it, and
    training clips below theirs; None: there is none. It stands until a reading is lower than the best."""
    risen = [_risen(readings[best], reading) for reading in readings]
    return max(
        (i for i in range(best + 2, len(readings)) if risen[i] and risen[i - 1]), default=None
    )


def _copied(readings: Sequence[Mapping[str, Any]], best: int, risen: int) -> str:
    """Why a run overfits, in words."""
    first = readings[best]
    worst = readings[risen]
    now = readings[-1]
    since = "have risen" if worst is now else "rose"
    then = (
        ""
        if worst is now
        else f" at step {worst['step']} (now {now['held_out']['normalised']:.3f}, no new best)"
    )
    return (
        f"held-out clips were best at step {first['step']} ({first['held_out']['normalised']:.3f} of the base) and {since} "
        f"to {worst['held_out']['normalised']:.3f}{then}, more than the scatter over {len(clips_of(now, 'held_out'))} clips "
        f"explains and twice in a row, while training clips fell from {first['train']['normalised']:.3f} to "
        f"{worst['train']['normalised']:.3f}: the clips are being copied"
    )


def _risen(best: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    higher = _above(clips_of(best, "held_out"), clips_of(now, "held_out"))
    return higher and now["train"]["normalised"] < best["train"]["normalised"]


def _above(best: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether clips have risen by more than chance explains, and by more than weights of two steps differ anyway."""
    mean, chance = rise(best, now)
    return mean > max(chance, LEAST_RISE)


def as_good(held: Sequence[Mapping[str, float]], best: int) -> tuple[int, int]:
    """The first and last reading around the best one that lie above it by no more than chance."""
    first = last = best
    while first > 0 and _alike(held[best], held[first - 1]):
        first -= 1
    while last < len(held) - 1 and _alike(held[best], held[last + 1]):
        last += 1
    return first, last


def _alike(best: Mapping[str, float], other: Mapping[str, float]) -> bool:
    mean, chance = rise(best, other)
    return mean <= chance


def recommend(
    held_out: Mapping[int, float], best: int, saved: Collection[int]
) -> tuple[int, str]:
    """Of the saved steps of a run that has turned the recommended one, and why it is not ``best``; empty where it is.

    The one whose held-out clips were best; where none of them was validated, the nearest to ``best``. ``held_out``: the
    validation loss by step; ``best``: the step at which it was lowest.
    """
    if measured := [step for step in saved if step in held_out]:
        found = min(measured, key=lambda step: (held_out[step], step))
        under = "" if best else "; held-out clips were best under the base model itself"
        why = f"it is the best of those saved: there is no checkpoint of step {best}{under}"
        return found, "" if found == best else why
    near = f"it is the nearest to step {best}, where held-out clips were best: no saved step was validated"
    return min(saved, key=lambda step: (abs(step - best), step)), near


def turned_first(readings: Sequence[Mapping[str, Any]]) -> int:
    """The quantile, from 1, at which held-out clips turned: of those that have risen at least half as much as the one that
    has risen most, the one whose lowest reading is the earliest."""
    curves = list(
        zip(*(reading["held_out"]["by_quantile"] for reading in readings), strict=True)
    )
    base = readings[0]["held_out"]["by_quantile"]
    rises = [
        (curve[-1] - min(curve)) / max(first, 1e-12)
        for curve, first in zip(curves, base, strict=True)
    ]
    much = [i for i, value in enumerate(rises) if value >= max(rises) / 2]
    return 1 + min(much, key=lambda i: (curves[i].index(min(curves[i])), -rises[i]))


def _others(readings: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """LEARNING or PLATEAU over the last third of the readings, at least three, and why."""
    last = readings[-max(ENOUGH, ceil(len(readings) / 3)) :]
    changes = []
    went = {}
    for part, what in (("held_out", "held-out clips"), ("train", "training clips")):
        went[part] = _went(clips_of(last[0], part), clips_of(last[-1], part))
        values = f"from {last[0][part]['normalised']:.3f} to {last[-1][part]['normalised']:.3f}"
        changes.append(
            f"{what} went {values}" + ("" if went[part] else ", within what chance explains")
        )
    since = f"since step {last[0]['step']}"
    if went["held_out"] < 0:
        return LEARNING, f"{since} {' and '.join(changes)}"
    if went["held_out"] > 0:
        both = (
            ": both have got worse, a sign of too high a learning_rate"
            if went["train"] > 0
            else ""
        )
        return PLATEAU, f"{since} {' and '.join(changes)}{both}"
    if went["train"] < 0:
        return (
            PLATEAU,
            f"{since} {' and '.join(changes)}: what is still learnt is these clips alone",
        )
    return PLATEAU, f"{since} neither has fallen: {' and '.join(changes)}"


def _went(before: Mapping[str, float], now: Mapping[str, float]) -> int:
    """-1: clips fell by more than chance explains; 1: they rose by more; 0: neither. One clip: by the least rise."""
    mean, chance = rise(before, now)
    least = chance if len(before) > 1 else LEAST_RISE
    return (mean > least) - (mean < -least)
