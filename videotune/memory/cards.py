"""Cards by name: memory, dense bfloat16 rate with float32 sums and link to the host, as their makers state.

Consumer cards sum in float32 at half the rate of their advertised one. What a step really reaches of a rate is
``REACHED``, an assumption until measured on the card itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from videotune.errors import VideotuneError

REACHED = 0.4
"""Share of the dense rate that a training step of a video transformer is taken to reach: assumed, measured nowhere yet."""


@dataclass(frozen=True)
class Card:
    """Bytes of memory; flops a second (dense bf16); bytes a second of its link to the host."""

    name: str
    vram: int
    flops: float
    link: float


def _card(name: str, gigabytes: int, teraflops: float, link: float) -> Card:
    return Card(name, gigabytes * 2**30, teraflops * 1e12, link * 1e9)


CARDS = (
    _card("RTX 3060", 12, 25.6, 24),
    _card("RTX 3070", 8, 40.6, 24),
    _card("RTX 3080", 10, 59.5, 24),
    _card("RTX 3090", 24, 71.0, 24),
    _card("RTX 4060", 8, 30.0, 12),
    _card("RTX 4060 Ti", 16, 44.0, 12),
    _card("RTX 4070", 12, 58.0, 24),
    _card("RTX 4080", 16, 97.5, 24),
    _card("RTX 4090", 24, 165.0, 24),
    _card("RTX 5070 Ti", 16, 88.0, 48),
    _card("RTX 5080", 16, 112.5, 48),
    _card("RTX 5090", 32, 209.5, 48),
    _card("A6000", 48, 154.8, 24),
    _card("L40S", 48, 362.0, 24),
    _card("A100 40GB", 40, 312.0, 24),
    _card("A100 80GB", 80, 312.0, 24),
    _card("H100", 80, 989.0, 48),
    _card("H200", 141, 989.0, 48),
    _card("B200", 180, 2250.0, 48),
)

USUAL = _card("a usual card", 24, 100.0, 24)
"""What settings are compared on where no card is named; no time is told then."""


def card(name: str) -> Card:
    """The card of that name, however it is spelt ("rtx4090", "NVIDIA GeForce RTX 4090").

    Raises VideotuneError that lists those known.
    """
    asked = _plain(name)
    found = [one for one in CARDS if _plain(one.name) in asked or asked in _plain(one.name)]
    if not found:
        known = ", ".join(one.name for one in CARDS)
        raise VideotuneError(f"--card: {name!r} is not known ({known}); give its memory instead: --vram GB")
    return max(
        found, key=lambda one: (_plain(one.name) in asked, len(_plain(one.name)) if _plain(one.name) in asked else 0)
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|laptop", "", name.lower())
