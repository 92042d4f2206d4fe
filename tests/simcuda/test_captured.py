"""Passes as graphs, on the stand-in card: a tape of operations in the graph's place.

It shows that a pass does nothing in which the host takes part, and that all that differs
from pass to pass is among its inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.simcuda.child import on_card
from tests.simcuda.lab import Lab
from tests.simcuda.test_families import OWN
from tests.support.taped_graph import TapedGraph
from videotune.models.registry import find, names
from videotune.trainer import loop
from videotune.trainer.captured_passes import CapturedPasses
from videotune.trainer.trainer import Trainer

NO_GRAPH = {name for name in names() if find(name).no_cuda_graphs}
WAYS = {
    "recomputed": ("gradient_checkpointing=ON",),
    "kept": ("gradient_checkpointing=OFF",),
}


@contextmanager
def taped() -> Iterator[list[CapturedPasses]]:
    """Runs within capture their passes on tapes, where the config allows graphs."""
    made: list[CapturedPasses] = []

    def passes(trainer: Trainer) -> CapturedPasses:
        made.append(CapturedPasses(TapedGraph))
        return made[-1]

    with patch.object(loop, "passes_to_capture", passes):
        yield made


def compared(family: str, folder: str, *sets: str) -> dict[str, Any]:
    """Losses of each kind's steps, as usual and with graphs."""
    lab = Lab(Path(folder))
    found = {}
    for kind in find(family).variants:
        for way, memory in WAYS.items():
            own = OWN.get(f"{family} {kind}", ())
            words = lab.words(family, *own, *memory, *sets, variant=kind)
            usual = lab.steps(f"{kind}-{way}", words)
            with taped() as made:
                graphs = lab.steps(f"{kind}-{way}-graph", words)
            found[f"{kind} {way}"] = {
                "usual": usual["losses"],
                "graphs": graphs["losses"],
                "raised": usual["raised"] + graphs["raised"],
                "captured": [len(passes) for passes in made],
                "failure": made[0].failure,
                "errors": graphs["errors"],
            }
    return found


@pytest.mark.parametrize("family", sorted(set(names()) - NO_GRAPH))
def test_a_graph_gives_the_same_losses_to_the_bit(family: str, tmp_path: Path) -> None:
    for kind, seen in on_card(compared, family, tmp_path).items():
        assert seen["failure"] is None, kind
        assert seen["raised"] == "", kind
        assert seen["captured"][0] >= 1, kind
        assert seen["graphs"] == seen["usual"], kind


@pytest.mark.parametrize("family", sorted(NO_GRAPH))
def test_a_model_that_makes_the_host_wait_has_no_graph(
    family: str, tmp_path: Path
) -> None:
    """Here it is captured all the same, so that the reason is seen to be true."""
    for kind, seen in on_card(compared, family, tmp_path).items():
        assert seen["failure"], kind
        assert seen["graphs"] == seen["usual"], kind
