"""What each process of a run needs for a step: its memory, its own work, its waiting; and
which process is slower than the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

FEWEST_STEPS = 20
"""Steps that a process must have measured before it is compared."""

SLOW_RATIO = 1.5
SLOW_SECONDS = 0.1
"""A process is a straggler if a step's own work takes it this many times as long as the
median of the others, and this many seconds longer.
"""


@dataclass(frozen=True)
class RankFigures:
    """What a process has measured of its latest steps; seconds are medians of a step."""

    rank: int
    host: str
    device: str
    step: int
    """The last step that was measured."""
    measured: int
    """How many steps the medians are of."""
    samples: int
    """Samples of a step that this process computes."""
    own_seconds: float | None
    """Its own work, without waiting for other processes. None: it runs the network in
    step with others, where the two cannot be told apart.
    """
    waiting_seconds: float | None
    """Waiting for other processes, and what they send. None: as for ``own_seconds``."""
    data_seconds: float
    """Waiting for its samples to be read; a part of ``own_seconds``."""
    samples_per_second: float | None
    """Its own samples by the time of the whole step."""
    memory_bytes: int
    """Memory that it holds now: of its device, or of the host on a CPU."""
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the figures as ``heartbeat.json`` has them."""
        return asdict(self)

    @property
    def compared_seconds(self) -> float:
        """The seconds in which processes are compared."""
        return self.data_seconds if self.own_seconds is None else self.own_seconds


@dataclass(frozen=True)
class Straggler:
    """A process that is slower than the others."""

    figures: RankFigures
    others_seconds: float
    """The median of the others."""

    def __str__(self) -> str:
        figures = self.figures
        work = "its own work of a step"
        remedy = "Look at that card's temperature, its clocks, and what else runs on it"
        if figures.own_seconds is None:
            work = "reading the samples of a step"
            remedy = "Look at its disk and its processors"
        return (
            f"process {figures.rank} ({figures.device} of {figures.host}) is slower than the others, which wait for it: "
            f"{work} takes {figures.compared_seconds:.2f} s, that of the others {self.others_seconds:.2f} s. {remedy}"
        )


def find_stragglers(ranks: Iterable[RankFigures]) -> list[Straggler]:
    """Return the processes that are slower than the others, in the order of their ranks.

    A process is compared with those that have as many samples in a step. One median does
    not depend on a few slow steps, such as those of a save.
    """
    measured = [figures for figures in ranks if figures.measured >= FEWEST_STEPS]
    stragglers = []
    for figures in measured:
        others = [
            peer.compared_seconds
            for peer in measured
            if peer.rank != figures.rank and peer.samples == figures.samples
        ]
        if not others:
            continue
        usual = median(others)
        excess = figures.compared_seconds - usual
        is_slow = figures.compared_seconds > SLOW_RATIO * usual
        if is_slow and excess > SLOW_SECONDS:
            stragglers.append(Straggler(figures, usual))
    return stragglers


def to_text(figures: RankFigures | None) -> str:
    """Return figures as a line for another process; empty if there are none."""
    return "" if figures is None else json.dumps(figures.to_json())


def from_text(text: str) -> RankFigures | None:
    """Return the figures of another process's line, or None."""
    with suppress(ValueError):
        return from_json(json.loads(text))
    return None


def from_json(value: Any) -> RankFigures | None:
    """Return the figures of a JSON object; None if it is not one of these."""
    if not isinstance(value, Mapping):
        return None
    names = [field.name for field in fields(RankFigures)]
    if any(name not in value for name in names):
        return None
    figures = RankFigures(**{name: value[name] for name in names})
    return figures if _is_sound(figures) else None


def _is_sound(figures: RankFigures) -> bool:
    """Return whether each value has its type; a file may be damaged."""
    numbers = [
        figures.own_seconds,
        figures.waiting_seconds,
        figures.samples_per_second,
        figures.data_seconds,
    ]
    counts = [
        figures.rank,
        figures.step,
        figures.measured,
        figures.samples,
        figures.memory_bytes,
        figures.peak_bytes,
    ]
    texts = [figures.host, figures.device]
    return (
        all(number is None or isinstance(number, int | float) for number in numbers)
        and isinstance(figures.data_seconds, int | float)
        and all(isinstance(count, int) for count in counts)
        and all(isinstance(text, str) for text in texts)
    )


def ranks_in(heartbeat: Mapping[str, Any] | None) -> Sequence[RankFigures]:
    """Return the figures in a run's heartbeat, by rank; empty for a single process."""
    rows = (heartbeat or {}).get("ranks")
    if not isinstance(rows, list):
        return []
    ranks = [figures for figures in map(from_json, rows) if figures is not None]
    return sorted(ranks, key=lambda figures: figures.rank)
