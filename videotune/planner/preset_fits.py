"""On which cards each preset fits, as plans have calculated it beforehand.

A plan takes a second for each preset; a list of all of them reads this table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.presets.recipes import find_model, preset_for, presets_of
from videotune.text import counted

TABLE = Path(__file__).with_name("preset_fits.json")

CLASSES = (8, 12, 16, 24, 32, 48, 80, 180)
"""GB of the cards that presets are planned for."""

FIT_BASIS = (
    "calculated, not measured, for clips of eight seconds in 1280x720: with the memory "
    "that should stay free on the card, and with what the run keeps in the computer's "
    "own memory instead, which is not checked here"
)
"""What "fits" counts, wherever this table is shown."""

TIGHT_MEANING = "fits if nothing else uses the card"

DRIVER_SHARE = 1.08
"""Drivers report up to so much less memory than a card is sold with."""


@dataclass(frozen=True)
class PresetFit:
    """How a preset fits cards of some memory, for one clip of eight seconds."""

    verdict: str
    """ "fits" or "tight"; empty: it does not fit."""

    hours: tuple[float, ...] = ()
    """The least and the most on known cards of this memory; empty without such cards."""

    @property
    def time(self) -> str:
        """The hours in words; empty if they are not known."""
        if not self.hours:
            return ""
        least, most = (_rounded(hours) for hours in self.hours)
        if least == most:
            return counted(most, "hour")
        return f"{least:g} to {counted(most, 'hour')}"


def fit_of(preset: str, gigabytes: float) -> PresetFit | None:
    """Return how a preset fits a card; None for one that trains on any machine.

    Args:
        preset: its full name.
        gigabytes: memory of the card, as it is sold or as the driver reports it.
    """
    rows = _table().get(preset)
    if rows is None:
        return None
    # A preset that fits a card fits a larger one too.
    reached = [size for size in map(int, rows) if size <= gigabytes * DRIVER_SHARE]
    row = rows[str(max(reached))] if reached else None
    return (
        PresetFit("") if row is None else PresetFit(row["verdict"], tuple(row["hours"]))
    )


def fit_words(fit: PresetFit | None) -> str:
    """Return how a preset fits in words."""
    if fit is None:
        return "any machine"
    return {"fits": "fits", "tight": "is tight"}.get(fit.verdict, "does not fit")


def rank_of(fit: PresetFit | None) -> tuple[int, float]:
    """Return the place of a preset in a list for a card: what fits, then what is tight,
    what trains anywhere and what does not fit; the quickest first.
    """
    verdicts = ["fits", "is tight", "any machine", "does not fit"]
    hours = max(fit.hours, default=math.inf) if fit is not None else math.inf
    return verdicts.index(fit_words(fit)), hours


def best_preset(model: str, gigabytes: float) -> str:
    """Return the preset of a model that a card gets: the largest that is made for it, or
    else the smallest for larger cards that fits by its plan.

    Args:
        model: a model or a preset, as ``find_model`` takes it.
        gigabytes: memory of the card; 0: unknown, for which it is the largest.

    Raises:
        VideotuneError: no preset of the model fits.
    """
    try:
        return preset_for(model, int(gigabytes) or None)
    except VideotuneError:
        for preset in presets_of(find_model(model)):
            fit = fit_of(preset, gigabytes)
            if fit is not None and fit.verdict:
                return preset
        raise


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return read_json(TABLE)


def _rounded(hours: float) -> float:
    return round(hours) if hours >= 5 else max(0.5, round(2 * hours) / 2)
