"""Measure this process of a run that has several, and name one that is slower.

The figures travel with the signs of life of ``ProcessWatch``, through the launcher's
store and in a thread, so no step waits for them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import psutil
import torch

from videotune.distributed import DistributedContext
from videotune.latent_cache.step_batch import share_of
from videotune.memory.accelerator import has_streams
from videotune.runs.rank_figures import (
    RankFigures,
    find_stragglers,
    from_text,
    to_text,
)

WINDOW = 50
"""Latest steps whose medians are taken."""

LOOKS = 3
"""Times in a row, with new figures, that a process must be slower before it is named."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step of this process, in seconds."""

    step: int
    samples: int
    total: float
    waiting: float
    data: float
    memory: int
    """Bytes that the process held after it."""


class RankMeter:
    """Keeps the latest steps of this process, and compares all of them on the main one."""

    def __init__(
        self, dist: DistributedContext, device: torch.device, *, in_lockstep: bool
    ) -> None:
        """Measure a process.

        Args:
            dist: this process among those of the run.
            device: on which it computes.
            in_lockstep: it runs the network together with others, within which it waits.
        """
        self._dist = dist
        self._device = device
        self._in_lockstep = in_lockstep
        # Replaced as a whole: a thread reads it.
        self._steps: tuple[MeasuredStep, ...] = ()
        self._is_warm = False
        self._peak = 0
        self._told: tuple[str, ...] = ()
        self._compared_steps: list[tuple[int, int]] = []
        self._looks: dict[int, int] = {}
        self._named: set[int] = set()
        if dist.watch is not None:
            dist.watch.details = lambda: to_text(self.figures())

    def add(
        self, step: int, seconds: Mapping[str, float], samples: int, peak: int
    ) -> None:
        """Add a step.

        Args:
            step: its number.
            seconds: of each phase.
            samples: of the whole step.
            peak: bytes that the device has held at most.
        """
        self._peak = max(self._peak, peak)
        if not self._is_warm:
            self._is_warm = True  # the first step warms everything up
            return
        begin, end = share_of((self._dist.data_rank, self._dist.data_size), samples)
        measured = MeasuredStep(
            step=step,
            samples=end - begin,
            total=sum(seconds.values()),
            waiting=seconds.get("waiting", 0.0),
            data=seconds.get("data", 0.0),
            memory=self._memory(),
        )
        self._steps = (*self._steps, measured)[-WINDOW:]

    def figures(self) -> RankFigures | None:
        """Return what was measured so far; None before the second step.

        It is called in the thread that sends signs of life, and reads nothing that could
        fail: if that thread ended, the others would think that this process is dead.
        """
        steps = self._steps
        if not steps:
            return None
        total = median(step.total for step in steps)
        samples = steps[-1].samples
        waiting = median(step.waiting for step in steps)
        own_work = median(step.total - step.waiting for step in steps)
        return RankFigures(
            rank=self._dist.rank,
            host=socket.gethostname(),
            device=_name_of(self._device),
            step=steps[-1].step,
            measured=len(steps),
            samples=samples,
            own_seconds=None if self._in_lockstep else round(own_work, 6),
            waiting_seconds=None if self._in_lockstep else round(waiting, 6),
            data_seconds=round(median(step.data for step in steps), 6),
            samples_per_second=round(samples / total, 6) if total else None,
            memory_bytes=steps[-1].memory,
            peak_bytes=self._peak,
        )

    def _memory(self) -> int:
        """Return the bytes that this process holds on its device, or of the host."""
        if has_streams(self._device):
            return int(torch.accelerator.memory_reserved(self._device))
        memory = int(psutil.Process().memory_info().rss)
        self._peak = max(self._peak, memory)  # between two steps, as far as it was seen
        return memory

    def _figures_of_others(self) -> list[RankFigures]:
        watch = self._dist.watch
        texts = () if watch is None else watch.details_of_others
        return [figures for figures in map(from_text, texts) if figures is not None]

    def all_ranks(self) -> list[RankFigures]:
        """Return the figures of all processes that have told them, by rank."""
        figures = self.figures()
        ranks = self._figures_of_others()
        if figures is not None:
            ranks.append(figures)
        return sorted(ranks, key=lambda figures: figures.rank)

    def newly_slow(self) -> list[str]:
        """Return a sentence on each process that turns out to be slower than the others.

        Each is named once. The main process calls this after each step; it looks only when
        the others have told figures of new steps.
        """
        watch = self._dist.watch
        if watch is None or watch.details_of_others is self._told:
            return []
        self._told = watch.details_of_others
        ranks = self.all_ranks()
        steps = [(figures.rank, figures.step) for figures in ranks]
        if steps == self._compared_steps:
            return []
        self._compared_steps = steps

        slow = {
            straggler.figures.rank: straggler for straggler in find_stragglers(ranks)
        }
        self._looks = {rank: self._looks.get(rank, 0) + 1 for rank in slow}
        sentences = []
        for rank, straggler in slow.items():
            if self._looks[rank] >= LOOKS and rank not in self._named:
                self._named.add(rank)
                sentences.append(str(straggler))
        return sentences


def _name_of(device: torch.device) -> str:
    """Return a device's name, with the number of the card that was given to it."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = device.index
    if device.type == "cuda" and number is not None and number < len(cards):
        return f"GPU {cards[number] or number}"
    return str(device)
