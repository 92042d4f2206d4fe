"""The card of this machine, and what a user calls a card."""

import dataclasses
import json
from pathlib import Path

import pytest

from videotune.errors import VideotuneError
from videotune.planner import gpus
from videotune.planner.gpus import find_card, known_card, measured_file, memory_and_name

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
