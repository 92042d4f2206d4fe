"""Bands of how often a run shows a window, and their texts."""

from collections.abc import Mapping
from typing import Any

from videotune.config.safe_views import LOW_RATE, SAFE_VIEWS
from videotune.text import times_between

BANDS = ((10.0, "conservative"), (50.0, "moderate"), (100.0, "high"))
"""Upper limits, exclusive: [0, 10) conservative, [10, 50) moderate, [50, 100) high, and
from 100 on risky.
"""

ADVICE = {
    "conservative": "so few views may teach too little",
    "moderate": "a balanced number",
    "high": "watch the previews for copies of the clips",
    "risky": "it is likely to copy the clips; more clips or fewer steps would help",
}
"""A sentence for each band."""


def band(views: float) -> str:
    """Return the band of a number of views."""
    for limit, name in BANDS:
        if views < limit:
            return name
    return "risky"


def band_limits(name: str) -> str:
    """Return which numbers of views are in a band, in words."""
    lower = 0.0
    for upper, band_name in BANDS:
        if name == band_name:
            return f"{lower:g} to below {upper:g}" if lower else f"below {upper:g}"
        lower = upper
    return f"{lower:g} or more"


def views_text(per_window: Mapping[str, Any], *, with_limits: bool = False) -> str:
    """Return how often the training windows are seen, and the band.

    Args:
        per_window: ``min``, ``max`` and ``band``, as a plan has them.
        with_limits: whether to say which numbers are in the band.
    """
    times = times_between(per_window["min"], per_window["max"])
    name = per_window["band"]
    band_text = f"{name}: {band_limits(name)}" if with_limits else name
    return f"each window seen {times} ({band_text})"


def advice(views: float, learning_rate: float) -> str:
    """Describe the band, and how many views a low learning rate allows."""
    text = ADVICE[band(views)]
    if learning_rate > LOW_RATE:
        return text
    safe = f"20-{SAFE_VIEWS} views should be safe"
    if band(views) == "moderate" and views > SAFE_VIEWS:
        return f"at a rate of {learning_rate:g} only up to {safe}"
    return f"{text}; at a rate of {learning_rate:g} up to {safe}"
