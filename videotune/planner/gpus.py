"""Cards by name: memory, dense bfloat16 rate with float32 sums and link to the host, as their makers state.

Consumer cards sum in float32 at half the rate of their advertised one. What a step really reaches of a rate is
``REACHED``, an assumption until measured on the card itself. ``gpus.json`` is the table.
"""

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from videotune.errors import VideotuneError, did_you_mean
from videotune.files import checked, read_json, user_cache

REACHED = 0.4
"""Share of the dense rate that a training step of a video transformer is taken to reach on a card that was not measured."""


@dataclass(frozen=True)
class Card:
    """Bytes of memory; flops a second (dense bf16); bytes a second of its link to the host.

    ``timed``: whether the rate is the card's own, so that a time can be calculated from it. ``reached``: the share of the
    rate that a training step reaches; ``measured``: the day on which this card was measured (empty: never).
    """

    name: str
    vram: int
    flops: float
    link: float
    timed: bool = True
    reached: float = REACHED
    measured: str = ""


USUAL = Card("a usual card", 24 * 2**30, 100e12, 24e9)
"""What settings are compared on where no card is named; no time is told then."""


@lru_cache
def cards() -> tuple[Card, ...]:
    """Every card of the table; one that is sold with several memories has several rows, whose names say the memory."""
    rows = read_json(Path(__file__).with_name("gpus.json"))["cards"]
    names = [row[0] for row in rows]
    found = []
    for name, gigabytes, rate, link in rows:
        title = f"{name} {gigabytes}GB" if names.count(name) > 1 else name
        flops = USUAL.flops if rate is None else rate * 1e12
        found.append(Card(title, gigabytes * 2**30, flops, link * 1e9, rate is not None))
    return tuple(found)


_NOISE = (
    (
        "nvidia",
        "geforce",
        "tesla",
        "gpu",
        "generation",
        "edition",
        "blackwell",
        "workstation",
        "server",
        "max",
        "q",
    ),
    ("rtx", "pcie"),
)
"""Words that may be left out of a card's name: the first are never part of it, the others are where two cards differ."""


def card(name: str) -> Card:
    """The card of that name as people or nvidia-smi write it ("4090", "rtx 4060 ti 16gb", "NVIDIA A100-SXM4-80GB").

    Every word counts, so that a Ti, Super or Laptop card is never taken for another. Raises VideotuneError with the near
    names where none or several cards have the name.
    """
    asked, gigabytes = _words(name)
    same: list[Card] = []
    for noise in ((), _NOISE[0], _NOISE[0] + _NOISE[1]):
        wanted = _without(asked, noise)
        same = same or [
            one for one in cards() if wanted and _without(_words(one.name)[0], noise) == wanted
        ]
    fitting = [one for one in same if gigabytes in (None, one.vram >> 30)]
    if len(fitting) == 1:
        return fitting[0]
    if same:
        names = " or ".join(f"{one.name!r} ({one.vram >> 30} GB)" for one in same)
        raise VideotuneError(
            f"--card {name!r}: videotune knows {names}. Name one; for another memory give --vram GB."
        )
    near = difflib.get_close_matches(
        " ".join(asked), [" ".join(_words(one.name)[0]) for one in cards()], 4, 0.6
    )
    told = dict.fromkeys(one.name for one in cards() if " ".join(_words(one.name)[0]) in near)
    hint = did_you_mean(told, ".")
    raise VideotuneError(
        f"--card: {name[:80]!r} is not known{hint} Its memory does as well: --vram GB."
    )


def _words(name: str) -> tuple[tuple[str, ...], int | None]:
    """The words of a card's name, numbers apart from letters, and the GB that it says."""
    text = name.lower()
    memory = re.search(r"(?<![a-z0-9])(\d+)\s*g(?:i?b)?\b", text)
    text = text.replace(memory[0], " ") if memory else text
    text = re.sub(r"(hbm|sxm|gddr)\d+\w?", " ", text)
    return tuple(re.findall(r"[a-z]+|\d+", text)), int(memory[1]) if memory else None


def _without(words: tuple[str, ...], noise: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in noise)


@dataclass(frozen=True)
class Report:
    """What is read of the report of ``videotune doctor --gpu``."""

    card: Card


def measured_file(name: str) -> Path:
    """Where the report lies on this machine's card that a driver calls so."""
    return user_cache() / "cards" / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.json"


def known_card(name: str, memory: int) -> Card | None:
    """The card that a driver calls so and that has so many bytes; None where videotune does not know it.

    With its own rates where it was measured on this machine.
    """
    with suppress(OSError, ValueError):  # never measured, or by another version
        found: Card = checked(Report, measured_file(name).read_text(encoding="utf-8")).card
        if min(found.flops, found.link, found.reached) > 0:
            return found
    for word in (
        name,
        f"{name} {round(memory / 2**30)}GB",
    ):  # the driver's name of some does not tell the memory
        with suppress(VideotuneError):
            return card(word)
    return None
