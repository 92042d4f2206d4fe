"""Whether a difference over clips is more than chance: a one-sided t-test at 5 %."""

from collections.abc import Mapping, Sequence
from math import sqrt

STUDENT_T = (
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
"""95th percentile of Student's t for 2 … 16 clips, with one degree of freedom fewer.

More clips use the last value, which is slightly too strict.
"""


def rise(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean difference of the clips of two readings and its chance level.

    The chance level is t·s/√n, with s the standard deviation of the differences over n
    clips; it is infinite for one clip. Readings without a common clip, as of training
    clips that were exchanged on a resume, show no difference that is more than chance.
    """
    differences = [now[name] - before[name] for name in before if name in now]
    return mean_and_chance(differences) if differences else (0.0, float("inf"))


def mean_and_chance(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and its chance level t·s/√n, see ``rise``."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, float("inf")

    deviation = sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    t = STUDENT_T[min(n, len(STUDENT_T) + 1) - 2]
    return mean, t * deviation / sqrt(n)
