"""Passes as graphs, on the stand-in card: a tape of operations in the graph's place.

It shows that a pass does nothing in which the host takes part, and that all that differs
from pass to pass is among its inputs.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.simcuda.child import on_card
from tests.simcuda.lab import STEPS, Lab
from tests.simcuda.test_families import OWN
from tests.support.command_line import train
from tests.support.run_results import facts_of
from tests.support.taped_graph import taped
from videotune.errors import DONE
from videotune.models.registry import find, names

NO_GRAPH = {name for name in names() if find(name).no_cuda_graphs}
WAYS = {
    "recomputed": ("gradient_checkpointing=ON",),
    "kept": ("gradient_checkpointing=OFF",),
}


def compared(family: str, folder: str) -> dict[str, Any]:
    """Losses of each kind's steps, as usual and with graphs.

    Only the first kind's blocks are also kept: how blocks are recomputed knows no kind.
    """
    lab = Lab(Path(folder))
    found = {}
    first_kind, *_ = find(family).variants
    for kind in find(family).variants:
        for way, memory in WAYS.items():
            if way == "kept" and kind != first_kind:
                continue
            own = OWN.get(f"{family} {kind}", ())
            words = lab.words(family, *own, *memory, variant=kind)
            usual = lab.steps(f"{kind}-{way}", words)
            has_graphs = patch.object(find(family), "no_cuda_graphs", None)
            with taped() as made, has_graphs:
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


FAMILIES = sorted(set(names()) - NO_GRAPH - {"wan"})


@pytest.mark.parametrize(
    "family",
    ["wan", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_a_graph_gives_the_same_losses_to_the_bit(family: str, tmp_path: Path) -> None:
    for kind, seen in on_card(compared, family, tmp_path).items():
        assert seen["failure"] is None, kind
        assert seen["raised"] == "", kind
        assert seen["captured"][0] >= 1, kind
        assert seen["graphs"] == seen["usual"], kind


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(NO_GRAPH))
def test_a_model_that_makes_the_host_wait_has_no_graph(
    family: str, tmp_path: Path
) -> None:
    """Here it is captured all the same, so that the reason is seen to be true."""
    for kind, seen in on_card(compared, family, tmp_path).items():
        assert seen["failure"], kind
        assert seen["graphs"] == seen["usual"], kind


def with_other_callbacks(folder: str) -> dict[str, Any]:
    """Losses of whole runs with validation, previews and an expert's change between."""
    lab = Lab(Path(folder))
    sets = (f"validate_every={STEPS // 2}", f"sample_after={STEPS // 2}")
    sets += ("sample.steps=2", "sample_metrics.budget=0", "experts=both")
    words = lab.words("wan", *sets, variant="t2v-a14b")
    found = {}
    for name in ("usual", "graphs"):
        run = Path(folder) / name
        with taped() if name == "graphs" else nullcontext([]) as made:
            assert train(words, run) == DONE
        found[name] = [[line[1], line[5]] for line in facts_of(run)]
        found[f"{name} failures"] = [passes.failure for passes in made]
    return found


def test_what_runs_between_steps_leaves_no_stale_graph(tmp_path: Path) -> None:
    found = on_card(with_other_callbacks, tmp_path)
    assert found["graphs"] == found["usual"]
    assert found["graphs failures"] == [None]
