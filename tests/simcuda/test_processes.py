"""Two processes, each with a stand-in card of its own, are one; collectives are gloo's."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.simcuda.child import on_card, on_cards
from tests.simcuda.lab import QUIET, Lab, seen_by_card
from tests.support.command_line import train
from tests.support.run_results import steps_of
from videotune.errors import DONE

SAME = ("train_dtype=FLOAT_32", "learning_rate=0.0003", "warmup_steps=0", *QUIET)
WAYS = {
    "LORA": ("training_method=LORA",),
    "sharded FINE_TUNE": ("training_method=FINE_TUNE", "sharding=FULL"),
}

KNOWN = {
    "freed while aten::_fused_adamw_ on stream 0 may still run: record_stream is missing"
}
"""Of sharded gradients: torch has a stream of its own for them, which waits for
computation before it allocates again.
"""


def trained(folder: str, name: str, sets: list[str]) -> dict[str, Any]:
    """What the card of this process sees of a training."""
    with seen_by_card() as seen:
        assert (
            train(Lab(Path(folder)).words("wan", *SAME, *sets), Path(folder) / name)
            == DONE
        )
    return asdict(seen)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_are_one(way: str, tmp_path: Path) -> None:
    """The same losses and norms to rounding; no card finds a fault."""
    Lab(tmp_path).words(
        "wan"
    )  # the tiny checkpoint and the clips, before processes ask for them at once
    seen = [on_card(trained, tmp_path, "one", [*WAYS[way], "batch_size=2"])]
    seen += on_cards(2, trained, tmp_path, "two", [*WAYS[way], "batch_size=1"])
    assert set().union(*(one["errors"] for one in seen)) <= (
        KNOWN if "sharded" in way else set()
    )
    one, two = (
        [[line["loss"], line["grad_norm"]] for line in steps_of(tmp_path / run)]
        for run in ("one", "two")
    )
    assert len(one) == len(two) > 0
    for alone, together in zip(one, two, strict=True):
        assert together == pytest.approx(alone, rel=1e-4)
