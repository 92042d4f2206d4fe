"""The parts of the memory that a plan needs, as a bar shows them."""

from collections.abc import Mapping

MEMORY_COLOURS = 7
"""Parts of a card's memory that the bar tells apart."""


WORDS = {"ring": "blocks being copied to the card"}
"""What a part is called on the page, if it is not called by its name in the plan."""


def memory_parts(sizes: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the parts of a card's memory, the largest first; the smallest are one part
    where there are more than the bar has colours.
    """
    parts = [(WORDS.get(name, name), size) for name, size in sizes.items() if size]
    parts.sort(key=lambda part: -part[1])
    if len(parts) <= MEMORY_COLOURS:
        return parts

    shown = parts[: MEMORY_COLOURS - 1]
    others = parts[MEMORY_COLOURS - 1 :]
    total = sum(size for _, size in others)
    return [*shown, (f"{len(others)} others", total)]


def gigabytes(count: float) -> str:
    """Return bytes of a card or of the computer's memory as text, on all pages in GB of
    1024^3 bytes, as cards are sold by them: "24.0 GB".
    """
    return f"{count / 2**30:,.1f} GB"
