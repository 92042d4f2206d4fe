"""Which checkpoint was best, by the ruler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any


def best_step(lines: Iterable[Mapping[str, Any]], steps: Collection[int]) -> int | None:
    """Of ``steps`` the one with the lowest normalised reading over held-out clips; None where none was read.

    Only readings of the latest ruler compare. Where no clip is held out nothing can be called best.
    """
    readings = [line for line in lines if line["kind"] == "ruler"]
    now = readings[-1].get("ruler") if readings else None
    found: dict[int, float] = {}
    for line in readings:
        value = (line.get("held_out") or {}).get("normalised")
        if value is not None and line["step"] in steps and line.get("ruler") == now:
            found[line["step"]] = value
    return min(found, key=lambda step: (found[step], step)) if found else None
