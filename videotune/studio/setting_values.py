"""What a setting takes, in words for a page: "a whole number from 1 to 8,192"."""

import re

from videotune.text import plain

LARGEST_BOUND = 1e12
"""A bound above it is one of the machine, and says nothing to a user."""

_BOUND = re.compile(r", (?P<sign>length ≥|≥|>|≤|<) (?P<limit>[\d.e+-]+)")

_NOUNS = (
    (r"\blist of integer or text\b", "a list of them"),
    (r"\bnumber\b", "a number"),
    (r"\binteger\b", "a whole number"),
    (r"\blist of a (whole number|number)\b", r"a list of \1s"),
    (r"\blist of\b", "a list of"),
    (r"\bobject\b", "names with values, as JSON"),
    (r"\{([^}]*)\}", r"entries with \1"),
    (r"\btrue, false\b", "on or off"),
)


def describe_values(key: str, text: str) -> str:
    """Return what a setting takes, in words.

    Args:
        key: the dotted name of the setting.
        text: what the schema says of it: "integer, ≥ 1, ≤ 100".
    """
    if key == "resolution":
        return (
            "one number for about as many pixels each way, or height x width (384x640), "
            "or a list of those"
        )

    parts = []
    for part in text.split(" or "):
        bounds = [(match["sign"], match["limit"]) for match in _BOUND.finditer(part)]
        noun = _BOUND.sub("", part)
        for pattern, words in _NOUNS:
            noun = re.sub(pattern, words, noun)
        parts.append(noun + _range(bounds))
    return " or ".join(parts)


def _range(bounds: list[tuple[str, str]]) -> str:
    """Return bounds as they are said after a noun: " from 1 to 100"."""
    limits = {
        sign: float(limit)
        for sign, limit in bounds
        if abs(float(limit)) < LARGEST_BOUND and sign != "length ≥"
    }
    if "≥" in limits and "≤" in limits:
        return f" from {plain(limits['≥'])} to {plain(limits['≤'])}"

    words = {"≥": "at least", ">": "above", "≤": "at most", "<": "below"}
    said = [f"{words[sign]} {plain(limit)}" for sign, limit in limits.items()]
    return f" {' and '.join(said)}" if said else ""
