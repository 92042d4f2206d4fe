"""How long the parts of a planned run take, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from videotune.cli.plan_verdict import time_text
from videotune.text import counted

if TYPE_CHECKING:
    from videotune.commands.plan import PlanResult

SHORT_HOURS = 1 / 60
"""Hours below which the short plan leaves a time out."""


def encoding_hours(result: PlanResult) -> float | None:
    """Return the hours in which an empty cache is filled; None without a rate."""
    if result.cpu_cache_seconds is not None:
        return result.cpu_cache_seconds / 3600
    hours: float | None = result.plan["hours_encoding"]
    return hours


def encoding_text(result: PlanResult) -> str:
    """Return how long windows and conditions are encoded."""
    disk = result.plan["disk"]
    subject = counted(disk["latent_entries"], "window")
    if disk["condition_entries"]:
        conditions = counted(disk["condition_entries"], "condition")
        subject += f" and {conditions}"
    is_rough = result.cpu_cache_seconds is None
    time = time_text(encoding_hours(result) or 0.0, 0, is_rough=is_rough)
    return f"encoding {subject} once: {time} (calculated, not measured)"


def total_text(result: PlanResult) -> str:
    """Return how long the whole run takes; empty if that is not known, or if its steps are
    most of it.
    """
    steps = result.plan["hours"]
    if result.cpu_seconds is not None:
        steps = result.cpu_seconds / 3600
    if steps is None:
        return ""

    shares = [part["share"] for part in result.plan["beside"].values() if part]
    beside = steps * sum(shares)
    encoding = encoding_hours(result) or 0.0
    total = steps + beside + encoding
    if steps > total / 2 or total < SHORT_HOURS:
        return ""
    is_rough = result.cpu_seconds is None and not result.plan["device"]["measured"]
    times = {
        "in all": total,
        "steps": steps,
        "validation, previews and metrics": beside,
        "encoding": encoding,
    }
    parts = [
        f"{name} {time_text(hours, 0, is_rough=is_rough)}"
        for name, hours in times.items()
    ]
    return f"time: {', '.join(parts)} (calculated, not measured)"
