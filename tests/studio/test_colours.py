"""Colours that stand beside each other can be told apart, in both themes."""

import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from videotune.studio import memory_bar

STATIC = Path(memory_bar.__file__).parent / "static"
TOKENS = (STATIC / "tokens.css").read_text()
THEMES = ("light", "dark")


def token(name: str, theme: str) -> str:
    """The colour of a token, such as #5048c8."""
    match = re.search(rf"--{name}:light-dark\((#\w{{6}}),(#\w{{6}})\)", TOKENS)
    assert match is not None, name
    return match[1 + THEMES.index(theme)]


def linear(colour: str) -> list[float]:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    """The contrast of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(two)))
    return (light + 0.05) / (dark + 0.05)


def lab(colour: str) -> tuple[float, float, float]:
    """A colour in CIE L*a*b*."""
    red, green, blue = linear(colour)
    weights = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (w ** (1 / 3) if w > 0.008856 else 7.787 * w + 16 / 116 for w in weights)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, two: str) -> float:
    squares = [(a - b) ** 2 for a, b in zip(lab(one), lab(two), strict=True)]
    return sum(squares) ** 0.5


@pytest.mark.parametrize("theme", THEMES)
def test_the_parts_of_the_memory_can_be_told_apart(theme: str) -> None:
    rules = (STATIC / "setup.css").read_text()
    names = re.findall(r"\.part-\d\{background:var\(--([\w-]+)\)", rules)
    assert len(names) == memory_bar.MEMORY_COLOURS
    colours = [token(name, theme) for name in names]
    for one, two in pairwise(colours):
        assert distance(one, two) >= 40, (one, two)
    for one, two in combinations(colours, 2):
        assert distance(one, two) >= 30, (one, two)
    for colour in colours:
        assert contrast(colour, token("surface", theme)) >= 3, "beside what is free"


@pytest.mark.parametrize("theme", THEMES)
def test_the_rim_of_a_button_is_seen(theme: str) -> None:
    for ground in ("bg", "surface"):
        assert contrast(token("rim", theme), token(ground, theme)) >= 1.8
        assert contrast(token("accent", theme), token(ground, theme)) >= 3, "the focus"
    assert contrast(token("muted", theme), token("raised", theme)) >= 4.5, "disabled"


def test_the_smallest_parts_become_one() -> None:
    sizes = {f"part {number}": 10.0 - number for number in range(9)} | {"none": 0.0}
    parts = memory_bar.memory_parts(sizes)
    assert len(parts) == memory_bar.MEMORY_COLOURS
    assert parts[-1] == ("3 others", 4.0 + 3.0 + 2.0)
    assert sum(size for _, size in parts) == sum(sizes.values())
    assert memory_bar.memory_parts({"a": 1.0, "b": 2.0}) == [("b", 2.0), ("a", 1.0)]
