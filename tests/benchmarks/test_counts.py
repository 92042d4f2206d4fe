"""The operations of a tiny model's step, which may only fall: on a card a small model's
step waits for them.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from count import CASES, TINY, counted

from videotune.memory.checkpointing import OFF, ON

MOST = {ON: 658, OFF: 490}


@pytest.mark.parametrize("checkpointing", [ON, OFF])
def test_a_step_makes_no_more_operations_than_this(checkpointing: str) -> None:
    counts = counted(CASES[TINY], checkpointing)
    operations = sum(counts.operations.values()) - counts.operations["optimizer"]
    assert operations <= MOST[checkpointing], counts.names.most_common()
