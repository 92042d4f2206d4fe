"""The card of this machine, and what a user calls a card."""

import dataclasses
import json
from pathlib import Path

import pytest

from videotune.errors import VideotuneError
from videotune.planner import gpus
from videotune.planner.gpus import (
    USUAL,
    Card,
    card_of_table,
    cards_with_memory,
    find_card,
    known_card,
    measured_file,
    memory_and_name,
    memory_in_name,
)

DRIVERS_NAME = "NVIDIA GeForce RTX 4090"
MEMORY = 24 * 2**30


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the report on the card of this machine belongs."""
    monkeypatch.setattr(gpus, "user_cache", lambda: tmp_path)
    file = measured_file(DRIVERS_NAME)
    file.parent.mkdir(parents=True)
    return file


def write_report(file: Path, **changes: float) -> None:
    card = dataclasses.asdict(find_card("RTX 4090"))
    file.write_text(json.dumps({"card": {**card, **changes}}))


def test_a_card_that_was_measured_has_its_measured_rates(report: Path) -> None:
    write_report(report, reached=0.31, pace=1.2)
    card = known_card(DRIVERS_NAME, MEMORY)
    assert card is not None
    assert (card.reached, card.pace) == (0.31, 1.2)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"card": {"name": "x"}}', "[1]"])
def test_a_damaged_report_gives_the_rates_of_the_table(
    content: str, report: Path
) -> None:
    report.write_text(content)
    assert known_card(DRIVERS_NAME, MEMORY) == find_card("RTX 4090")


@pytest.mark.parametrize("rate", ["flops", "link", "reached"])
def test_a_report_with_a_rate_of_nothing_is_not_taken(rate: str, report: Path) -> None:
    write_report(report, **{rate: 0.0})
    assert known_card(DRIVERS_NAME, MEMORY) == find_card("RTX 4090")


def test_a_card_without_a_report_is_that_of_the_table_or_none(report: Path) -> None:
    assert known_card(DRIVERS_NAME, MEMORY) == find_card("RTX 4090")
    assert known_card("NVIDIA Unheard 7", MEMORY) is None


def test_the_driver_s_name_and_the_memory_tell_cards_apart(report: Path) -> None:
    cards = [known_card("NVIDIA GeForce RTX 4060 Ti", gb << 30) for gb in (8, 16)]
    assert [card.vram >> 30 for card in cards if card] == [8, 16]


def test_a_memory_of_a_card_is_at_least_1_gb() -> None:
    assert memory_and_name(None, "1 GB") == (1.0, None)
    assert memory_and_name(1.0, "1 GB") == (1.0, None)
    for memory, name in ((None, "0.9 GB"), (2.0, "1 GB")):
        with pytest.raises(VideotuneError):
            memory_and_name(memory, name)
    assert memory_and_name(8.0, "RTX 4090") == (8.0, "RTX 4090")


def test_rates_of_the_table_are_bytes_and_operations_a_second() -> None:
    """As the makers state them: Gbit/s of a network, TFLOP/s, and GB/s of the rest."""
    assert find_card("h100") == Card(
        name="H100",
        vram=80 * 2**30,
        flops=989e12,
        link=48e9,
        peer_link=450e9,
        network_name="InfiniBand NDR",
        network=400e9 / 8,
        bandwidth=3350e9,
    )
    assert find_card("rtx 4090") == Card(
        name="RTX 4090",
        vram=24 * 2**30,
        flops=165e12,
        link=24e9,
        bandwidth=1008e9,
    )
    t4 = find_card("t4")
    assert (t4.timed, t4.flops, t4.peer_link) == (False, USUAL.flops, t4.link)


def test_a_file_of_a_report_has_the_letters_and_digits_of_the_name(
    report: Path,
) -> None:
    file = measured_file("NVIDIA (R) GeForce--RTX 4090/x")
    assert file == report.parent / "NVIDIA-R-GeForce-RTX-4090-x.json"
    assert file.parent.name == "cards"


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("16", 16),
        (" 7.5 ", 7.5),
        ("7,5", 7.5),
        ("999", 999),
        ("4090", None),
        ("4090 g", 4090),
        ("an 8 gib gpu", 8),
        ("The 7,5 GB of VRAM card", 7.5),
        ("my 12 g memory", 12),
        ("rtx 12 gb", None),
        ("12345 gb", None),
    ],
)
def test_a_name_is_a_memory_if_it_is_nothing_else(
    name: str, memory: float | None
) -> None:
    assert memory_in_name(name) == memory


def test_a_driver_s_name_lacks_the_memory_of_some_cards() -> None:
    near_8_gib = 8 * 2**30 - 2**28
    card = card_of_table("NVIDIA GeForce RTX 3060", near_8_gib)
    assert card is not None
    assert card.name == "RTX 3060 8GB"
    assert card_of_table("NVIDIA GeForce RTX 3060", 10 * 2**30) is None


def test_cards_of_a_memory_are_the_slowest_first_and_have_a_rate() -> None:
    for gigabytes in (8, 16, 24, 80):
        cards = cards_with_memory(gigabytes)
        rates = [card.flops for card in cards]
        assert rates == sorted(rates)
        assert {card.vram for card in cards} == {gigabytes << 30}
        assert all(card.timed for card in cards)
    names = [card.name for card in cards_with_memory(16)]
    assert not any("Laptop" in name or name == "T4" for name in names)
    assert "H100" in [card.name for card in cards_with_memory(80)]


def test_what_is_refused_names_the_card_and_its_memories() -> None:
    with pytest.raises(VideotuneError, match=r"'RTX 3060 8GB' \(8 GB\)") as error:
        find_card("rtx 3060")
    assert "'RTX 3060 12GB' (12 GB)" in str(error.value)
    assert "--card 12" in str(error.value)
    with pytest.raises(VideotuneError, match="several"):
        find_card("rtx 3060", 24)
    with pytest.raises(VideotuneError, match="unknown card"):
        find_card("a voodoo 5")
    assert find_card("a 100", 80).name == "A100 80GB"
    assert find_card("a 4090", 24).name == "RTX 4090"


@pytest.mark.parametrize(
    ("name", "suggestions"),
    [
        ("rtx 4099", ["RTX 4090", "RTX 4090 D", "RTX 5090", "RTX 4080"]),
        (
            "nvidia rtx 30 60",
            ["RTX 3060 12GB", "RTX 3060 8GB", "RTX 5060", "RTX 4060", "RTX 3090"],
        ),
        ("zzz", []),
    ],
)
def test_four_of_the_nearest_names_are_suggested_with_all_their_memories(
    name: str, suggestions: list[str]
) -> None:
    with pytest.raises(VideotuneError) as refused:
        find_card(name)
    words = str(refused.value).partition("did you mean ")[2].partition("?")[0]
    assert words == " or ".join(map(repr, suggestions))
