"""How a preset fits a card by the table that comes along."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from videotune.errors import VideotuneError
from videotune.planner import preset_fits
from videotune.planner.preset_fits import (
    PresetFit,
    best_preset,
    fit_of,
    fit_words,
    rank_of,
)

ROWS: Mapping[str, Any] = {
    "small": {
        "8": {"verdict": "tight", "hours": [4.0, 6.4]},
        "16": {"verdict": "fits", "hours": [2.2, 2.3]},
    },
    "large": {"80": {"verdict": "fits", "hours": []}},
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset_fits, "_table", lambda: ROWS)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("preset", "gigabytes", "expected"),
    [
        ("small", 8, PresetFit("tight", (4.0, 6.4))),
        # Between two rows the smaller card's is known.
        ("small", 12, PresetFit("tight", (4.0, 6.4))),
        ("small", 16, PresetFit("fits", (2.2, 2.3))),
        ("small", 180, PresetFit("fits", (2.2, 2.3))),
        # A driver reports a little less than what a card is sold with.
        ("small", 15.0, PresetFit("fits", (2.2, 2.3))),
        ("small", 14.5, PresetFit("tight", (4.0, 6.4))),
        ("small", 7.5, PresetFit("tight", (4.0, 6.4))),
        ("small", 6, PresetFit("")),
        ("large", 80, PresetFit("fits")),
        ("on any machine", 8, None),
    ],
)
def test_a_card_has_the_row_of_the_largest_size_that_it_reaches(
    preset: str, gigabytes: float, expected: PresetFit | None
) -> None:
    assert fit_of(preset, gigabytes) == expected


@pytest.mark.parametrize(
    ("hours", "time"),
    [
        ((), ""),
        ((0.1, 0.2), "0.5 hours"),
        ((0.8, 1.2), "1 hour"),
        ((1.0, 1.4), "1 to 1.5 hours"),
        ((4.9, 5.2), "5 hours"),
        ((4.7, 7.6), "4.5 to 8 hours"),
        ((5.0, 5.6), "5 to 6 hours"),
    ],
)
def test_hours_are_rounded_to_halves_and_from_five_to_whole_ones(
    hours: tuple[float, ...], time: str
) -> None:
    assert PresetFit("fits", hours).time == time


def test_what_fits_comes_first_and_of_equals_the_quickest() -> None:
    fits = [
        PresetFit("fits", (1.0, 2.0)),
        PresetFit("fits", (0.5, 3.0)),
        PresetFit("fits"),
        PresetFit("tight", (0.5, 1.0)),
        None,
        PresetFit(""),
    ]
    shuffled = [fits[place] for place in (4, 2, 0, 5, 1, 3)]
    assert sorted(shuffled, key=rank_of) == fits
    assert rank_of(fits[1]) == (0, 3.0)
    assert rank_of(None) == (2, math.inf)
    words = ["fits", "fits", "fits", "is tight", "any machine", "does not fit"]
    assert [fit_words(fit) for fit in fits] == words


def test_a_card_gets_the_preset_made_for_it_or_the_smallest_that_fits_it() -> None:
    model = "wan 2.1 1.3B LoRA"
    assert best_preset(model, 16) == f"{model} 16GB"
    assert best_preset(model, 0) == best_preset(model, 180)
    smaller = fit_of(f"{model} 16GB", 8)
    assert smaller is not None
    assert smaller.verdict
    assert best_preset(model, 8) == f"{model} 16GB"
    with pytest.raises(VideotuneError):
        best_preset(model, 1)
