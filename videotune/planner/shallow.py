"""A deep network from shallow ones: blocks of a list are alike, so every number is affine in how many there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from videotune.planner.measure import Reading

Depths = tuple[tuple[str, int], ...]
"""How many blocks of each list of blocks, by the list's path."""

FEW, MORE = 2, 4
"""Blocks of a list in the shallow networks. Of one block alone the first and the last would be the same."""


def deep(read: Callable[[Depths], Reading], blocks: Mapping[str, int]) -> Reading:
    """The reading of a network with so many ``blocks`` of each list, from one shallow reading and another for each list.

    Each phase is taken for itself: the largest of several lines is no line. Networks that are shallow themselves are read
    as they are.
    """
    few = {path: min(FEW, count) for path, count in blocks.items()}
    base = read(tuple(few.items()))
    phases = {phase: dict(parts) for phase, parts in base.phases.items()}
    flops = base.flops
    for path, count in blocks.items():
        if count <= few[path]:
            continue
        more = min(MORE, count)
        other, steps = read(tuple({**few, path: more}.items())), (count - few[path]) / (more - few[path])
        flops += (other.flops - base.flops) * steps
        for phase, parts in phases.items():
            before, after = base.phases[phase], other.phases[phase]
            for part in sorted({*before, *after}):
                change = after.get(part, 0) - before.get(part, 0)
                parts[part] = parts.get(part, 0) + round(change * steps)
    return Reading(phases, flops)
