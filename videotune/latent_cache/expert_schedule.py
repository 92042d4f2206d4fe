"""Which expert a step trains: runs of steps, dealt out by the experts' shares, a pure function of the step."""

from dataclasses import dataclass
from fractions import Fraction
from math import floor


@dataclass(frozen=True)
class ExpertSchedule:
    """Of one or two experts that train, the first has ``share`` of the runs of ``period`` steps, spread evenly.

    Run p (from 0) is the first one's where ⌊(p + 1)·share + ½⌋ > ⌊p·share + ½⌋ (Bresenham's line), so after P runs it has
    had P·share of them to within one half.
    """

    names: tuple[str, ...]
    share: Fraction = Fraction(1)
    period: int = 1

    def __post_init__(self) -> None:
        assert 1 <= len(self.names) <= 2, self.names
        assert 0 <= self.share <= 1, self.share
        assert self.period >= 1, self.period

    def at(self, step: int) -> str:
        """The expert of a step (from 1)."""
        if len(self.names) == 1:
            return self.names[0]
        run = (step - 1) // self.period
        return self.names[0] if self._runs(run + 1) > self._runs(run) else self.names[1]

    def count(self, step: int, name: str) -> int:
        """How many of the steps 1 … ``step`` are an expert's."""
        if len(self.names) == 1:
            return step if name == self.names[0] else 0
        runs, rest = divmod(step, self.period)
        first = self._runs(runs) * self.period + (rest if rest and self.at(step) == self.names[0] else 0)
        return first if name == self.names[0] else step - first

    def _runs(self, count: int) -> int:
        """How many of the first ``count`` runs are the first expert's."""
        return floor(count * self.share + Fraction(1, 2))


def exact(share: float) -> Fraction:
    """A share as a fraction of small numbers, so that no rounding moves a run."""
    return Fraction(share).limit_denominator(10_000)
