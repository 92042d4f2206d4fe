"""GPUs by name: memory, dense bfloat16 rate with float32 sums, and link to the host.

``gpus.json`` is the table, with the makers' figures. Consumer GPUs sum in float32 at
half of their advertised rate.
"""

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from videotune.errors import VideotuneError, did_you_mean
from videotune.files import read_json, read_typed, user_cache

REACHED = 0.4
"""Share of the dense rate that a training step is assumed to reach, until it is
measured.
"""


@dataclass(frozen=True)
class Card:
    """A GPU and its rates."""

    name: str
    vram: int
    """Bytes of memory."""
    flops: float
    """Dense bfloat16 operations a second."""
    link: float
    """Bytes a second between host and device."""
    peer_link: float = 24e9
    """Bytes a second that it sends to another GPU of its machine: over NVLink, if all of
    the machine have it, else over its link to the host.
    """
    network_name: str = ""
    """What its maker's machines are connected with; empty: it is not known."""
    network: float = 0.0
    """Bytes a second over this network, for each card of a machine."""
    timed: bool = True
    """Whether the rate is the GPU's own, so that a time can be calculated from it."""
    bandwidth: float | None = None
    """Bytes a second of its own memory, as its maker states; None: unknown."""
    reached: float = REACHED
    """Share of the rate that a training step reaches, where its bandwidth is unknown, and
    an autoencoder.
    """
    pace: float = 1.0
    """Measured seconds of a step as a share of the counted ones."""
    measured: str = ""
    """Day on which this GPU was measured; empty if it was not."""

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bfloat16; the table has no rate of one that does not."""
        return self.timed


USUAL = Card("a usual card", 24 * 2**30, 100e12, 24e9, bandwidth=900e9)
"""The card for which settings are compared if none is named; no time is printed then.
"""


@lru_cache
def cards() -> tuple[Card, ...]:
    """Return every card of the table.

    A card that is sold with several memories has several rows, whose names have the
    memory.
    """
    content = read_json(Path(__file__).with_name("gpus.json"))
    rows = content["cards"]
    nvlink = content["nvlink"]
    networks = content["network"]
    names = [row[0] for row in rows]

    table = []
    for name, gigabytes, rate, link, bandwidth in rows:
        title = f"{name} {gigabytes}GB" if names.count(name) > 1 else name
        network_name, gigabits = networks.get(name, ("", 0))
        table.append(
            Card(
                name=title,
                vram=gigabytes * 2**30,
                flops=USUAL.flops if rate is None else rate * 1e12,
                link=link * 1e9,
                peer_link=nvlink.get(name, link) * 1e9,
                network_name=network_name,
                network=gigabits * 1e9 / 8,
                timed=rate is not None,
                bandwidth=bandwidth * 1e9,
            )
        )
    return tuple(table)


_DESKTOP = re.compile(r"RTX \d{4}(?!.*(Laptop|Ada))")


def cards_with_memory(gigabytes: int) -> list[Card]:
    """Return the cards of a memory that have a rate, the slowest first.

    If there are desktop cards of it, they are only those.
    """
    timed = [card for card in cards() if card.timed and card.vram >> 30 == gigabytes]
    desktop = [card for card in timed if _DESKTOP.match(card.name)]
    return sorted(desktop or timed, key=lambda card: card.flops)


_IGNORED_WORDS = (
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
)
_OPTIONAL_WORDS = ("rtx", "pcie")
"""Words that users omit: the first never tell two cards apart, the others may."""


_ARTICLE = re.compile(r"\s*(?:an?|the|my)\s+", re.IGNORECASE)
_MEMORY = re.compile(
    r"(\d{1,4}(?:[.,]\d+)?)\s*g(?:i?b)?(?:\s+(?:of\s+)?(?:v?ram|card|gpu|memory))*",
    re.IGNORECASE,
)


_BARE_MEMORY = re.compile(r"\d{1,3}(?:[.,]\d+)?")
"""A number that is a memory; with four digits, as 4090, it is the name of a card."""


def memory_in_name(name: str) -> float | None:
    """Return the GB of a card that is named by its memory only, such as "16 GB" or
    "16".
    """
    if _BARE_MEMORY.fullmatch(name.strip()):
        return float(name.replace(",", "."))
    article = _ARTICLE.match(name)
    memory = _MEMORY.fullmatch(name[article.end() if article else 0 :].strip())
    return float(memory[1].replace(",", ".")) if memory else None


def memory_and_name(
    memory: float | None, name: str | None
) -> tuple[float | None, str | None]:
    """Return (GB, name of a card) as a user means them: a name such as "16 GB" is a
    memory.

    Raises:
        VideotuneError: The name is a memory of less than 1 GB, or another one is given
            too.
    """
    named_memory = None if name is None else memory_in_name(name)
    if named_memory is None:
        return memory, name
    if memory not in (None, named_memory):
        raise VideotuneError(
            f"--card {name!r}: it is a memory, and --vram {memory:g} is another. Give one of them"
        )
    if named_memory < 1:
        raise VideotuneError(f"--card {name!r}: a card has at least 1 GB")
    return named_memory, None


def memory_or_card(text: str) -> float | Card:
    """Return what a user calls a card: its GB if the text is a memory, or else the card
    of that name.

    Raises:
        VideotuneError: It is less than 1 GB, or no card, or several, have the name.
    """
    memory, _ = memory_and_name(None, text)
    if memory is None:
        return find_card(text)
    return memory


def find_card(name: str, memory: float | None = None) -> Card:
    """Return the card with a name as users or nvidia-smi write it.

    Such names are "4090", "an RTX 4090", "rtx 4060 ti 16gb", "NVIDIA A100-SXM4-80GB".
    Every word counts, so that a Ti, Super or Laptop card is never taken for another.

    Args:
        name: The name.
        memory: GB that tell cards of the same name apart, if the name has none.

    Raises:
        VideotuneError: No card, or several, have the name; the message has similar
            names.
    """
    words, gigabytes = _split_name(name)
    same_name = _cards_with_words(words)
    article = _ARTICLE.match(name)
    if not same_name and article:  # "A 100" is tried first: its A is no article
        words, gigabytes = _split_name(name[article.end() :])
        same_name = _cards_with_words(words)
    fitting = [card for card in same_name if gigabytes in (None, card.vram >> 30)]
    if len(fitting) > 1:
        fitting = [card for card in fitting if memory == card.vram >> 30]
    if len(fitting) == 1:
        return fitting[0]
    if same_name:
        names = " or ".join(
            f"{card.name!r} ({card.vram >> 30} GB)" for card in same_name
        )
        raise VideotuneError(
            f"--card {name!r}: several cards or memories match: {names}. "
            f"Give one of these names, or the memory: --card {same_name[0].vram >> 30}."
        )

    hint = did_you_mean(_similar_names(words), ".")
    raise VideotuneError(
        f"--card {name[:80]!r}: unknown card{hint} You can give its memory instead: --card 24 for 24 GB."
    )


def _similar_names(words: tuple[str, ...]) -> list[str]:
    """Return the names of the cards that words are nearest to, the nearest first."""
    names_by_words: dict[str, list[str]] = {}
    for card in cards():
        names_by_words.setdefault(_joined(card.name), []).append(card.name)

    text = " ".join(_without(words, _IGNORED_WORDS))
    nearest = difflib.get_close_matches(text, list(names_by_words), 4, 0.6)
    names: list[str] = []
    for similar in nearest:
        names += names_by_words[similar]
    return names


def _cards_with_words(words: tuple[str, ...]) -> list[Card]:
    """Return the cards with the same words; if there are none, without ignored words."""
    for omitted in ((), _IGNORED_WORDS, _IGNORED_WORDS + _OPTIONAL_WORDS):
        wanted = _without(words, omitted)
        same = [
            card
            for card in cards()
            if wanted and _without(_split_name(card.name)[0], omitted) == wanted
        ]
        if same:
            return same
    return []


def _split_name(name: str) -> tuple[tuple[str, ...], int | None]:
    """Return (the words of a card's name, the GB in it); numbers are words of their
    own.
    """
    text = name.lower()
    memory = re.search(r"(?<![a-z0-9])(\d+)\s*g(?:i?b)?\b", text)
    if memory:
        text = text.replace(memory[0], " ")
    text = re.sub(r"(hbm|sxm|gddr)\d+\w?", " ", text)
    words = tuple(re.findall(r"[a-z]+|\d+", text))
    return words, int(memory[1]) if memory else None


def _joined(name: str) -> str:
    return " ".join(_split_name(name)[0])


def _without(words: tuple[str, ...], omitted: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in omitted)


@dataclass(frozen=True)
class Report:
    """The part of the report of ``videotune doctor --gpu`` that plans use."""

    card: Card


def measured_file(name: str) -> Path:
    """Return the file of the report on this machine's card, by its driver's name for
    it.
    """
    file_name = re.sub(r"[^A-Za-z0-9]+", "-", name)
    return user_cache() / "cards" / f"{file_name}.json"


def known_card(name: str, memory: int) -> Card | None:
    """Return this machine's card, with measured rates if it was measured.

    Args:
        name: The driver's name for the card.
        memory: Bytes of its memory.

    Returns:
        None for a card that is not in the table.
    """
    with suppress(OSError, ValueError):  # not measured, or by another version
        report: Report = read_typed(measured_file(name), Report)
        if min(report.card.flops, report.card.link, report.card.reached) > 0:
            return report.card

    return card_of_table(name, memory)


def card_of_table(name: str, memory: int) -> Card | None:
    """Return the table's card of a driver's name and bytes of memory, or None."""
    # the driver's name of some cards lacks the memory
    for candidate in (name, f"{name} {round(memory / 2**30)}GB"):
        with suppress(VideotuneError):
            return find_card(candidate)
    return None
