"""The operations of a tiny model's step: on a card a small model's step waits for them."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from count import CASES, OURS, TINY, counted, counted_beside, sized

from videotune.memory.checkpointing import OFF, ON

MOST = {ON: 658, OFF: 490}
"""Operations of our passes, which may only fall."""

WRITTEN = json.loads(Path(__file__).with_name("counts.json").read_text())
"""Written by scripts/write_counts.py."""


@pytest.mark.parametrize("checkpointing", [ON, OFF])
def test_a_step_makes_no_more_operations_than_this(checkpointing: str) -> None:
    counts = counted(CASES[TINY], checkpointing)
    assert counts.figures()["passes"] <= MOST[checkpointing], counts.names.most_common()


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != WRITTEN["torch"],
    reason="counts are those of another version of torch",
)
@pytest.mark.parametrize("checkpointing", [ON, OFF])
def test_steps_of_ours_and_of_other_loops_are_counted_exactly(
    checkpointing: str,
) -> None:
    """An operation more or less shows here; scripts/write_counts.py writes new counts."""
    case = sized(TINY, ["train_dtype=BFLOAT_16"])
    steps = counted_beside(case, checkpointing)
    figures = {name: counts.figures() for name, counts in steps.items()}
    assert figures == WRITTEN["steps"][TINY][checkpointing]
    for name, loop in figures.items():
        if name != OURS:
            assert figures[OURS]["passes"] < loop["passes"]
            assert figures[OURS]["bytes"] < loop["bytes"]
