"""Operations of a training step and the bytes that they move, counted at a model's real
size without a GPU, memory or weights.

    python benchmarks/count.py [MODEL ...] [--tiny] [--set KEY=VALUE ...] [--peers]
    [--json FILE]

With --peers, steps of other loops on the same network are counted the same way, see
``plain_loops.py``. The step is the run's own, on fake tensors of a CPU, so figures are the same on every
machine. Views and allocations start no kernel and are left out. An operation is one
kernel on a card, or a few; those of clipping and the optimizer are fewer on a card, and
are printed by themselves. Bytes are those of all inputs and outputs. Compiled blocks
cannot be counted so: benchmarks/count_compiled.py counts them in Inductor's output, and
benchmarks/gpu.py on a card.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from gpu_rig import TINY, Case, layout
from plain_loops import LOOPS, PlainStep

from videotune.memory.checkpointing import OFF, ON, checkpoint_blocks
from videotune.models.registry import find
from videotune.planner.ledger import Ledger
from videotune.planner.measure import FakeRun
from videotune.trainer.build import DTYPES

CASES = {
    "ltx-video-2b": Case("ltx-video-2b", 49, 512, 768),
    "wan2.1-t2v-1.3b": Case("wan2.1-t2v-1.3b", 45, 480, 832),
    "wan2.1-t2v-14b": Case("wan2.1-t2v-14b", 45, 480, 832),
    TINY: Case(TINY, 17, 64, 64),
}

OURS = "videotune"
AFTER_PASSES = "optimizer"
"""The phase of the update; clipping counts as part of the passes, in every loop."""


class Counts(Ledger):
    """Counts the names of operations too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def count_operation(self, func: Any, name: str, *others: Any) -> None:
        """Count an operation, and its name."""
        super().count_operation(func, name, *others)
        self.names[name] += 1

    def figures(self) -> dict[str, int]:
        """Return operations of the passes and of the optimizer, and bytes moved outside
        of matrix products and attention.
        """
        in_optimizer = self.operations[AFTER_PASSES]
        return {
            "passes": self.operations.total() - in_optimizer,
            "optimizer": in_optimizer,
            "bytes": self.moved,
        }


def prepared_run(case: Case) -> FakeRun:
    """Return the run of a case, on fake tensors."""
    wanted = case.wanted()
    usual_dtype = "FLOAT_32" if case.model == TINY else "BFLOAT_16"
    dtype = DTYPES[dict(case.sets).get("train_dtype", usual_dtype)]
    family = find(wanted.spec.name)(layout(case.model), torch.device("cpu"), dtype)
    return FakeRun(family, wanted.config)


def counted(case: Case, checkpointing: str) -> Counts:
    """Count a step of the whole network, after one that makes the optimizer's state."""
    run = prepared_run(case)
    network = run.network(tuple(run.depths.items()))

    checkpoint_blocks(network.net, checkpointing)
    counts = Counts()
    with run.mode, run.family.planning_mode():
        batch = run.prepared(case.wanted().shapes[0], case.batch)
        run._train(network, batch, Ledger())
        run._train(network, batch, counts)
    return counts


def counted_loop(case: Case, checkpointing: str, name: str) -> Counts:
    """Count a step of another loop in the same way."""
    run = prepared_run(case)
    ours = run.network(tuple(run.depths.items()))
    step = PlainStep(run, ours, LOOPS[name], checkpointing == ON)
    counts = Counts()
    with run.mode, run.family.planning_mode(), catch_warnings(action="ignore"):
        batch = run.prepared(case.wanted().shapes[0], case.batch)
        step(batch, lambda: None)
        with counts:
            step(batch, lambda: counts.phase(AFTER_PASSES))
    return counts


def counted_beside(case: Case, checkpointing: str) -> dict[str, Counts]:
    """Count our step and those of the other loops."""
    loops = {name: counted_loop(case, checkpointing, name) for name in LOOPS}
    return {OURS: counted(case, checkpointing), **loops}


def sized(model: str, sets: Sequence[str] = ()) -> Case:
    """Return a model's case, batch 1, with settings."""
    pairs = tuple(tuple(word.split("=", 1)) for word in sets)
    case = CASES[model]
    return Case(case.model, case.frames, case.height, case.width, 1, pairs)


def print_counts(title: str, counts: Counts) -> None:
    """Print a line."""
    figures = counts.figures()
    most = ", ".join(f"{n} {name}" for name, n in counts.names.most_common(8))
    print(
        f"{title}: {figures['passes']:,} operations forward and backward, "
        f"{figures['optimizer']:,} of the optimizer; {figures['bytes'] / 1e9:,.1f} GB "
        f"outside of matrix products and attention; {most}",
        flush=True,
    )


def main(
    models: Sequence[str], sets: Sequence[str], *, with_peers: bool
) -> Mapping[str, Any]:
    """Print a line a step, and return the figures by model, checkpointing and loop."""
    figures: dict[str, Any] = {}
    for model in models:
        case = sized(model, sets)
        figures[model] = {}
        for checkpointing in (ON, OFF):
            if with_peers:
                steps = counted_beside(case, checkpointing)
            else:
                steps = {OURS: counted(case, checkpointing)}
            for name, counts in steps.items():
                print_counts(f"{model}, checkpointing {checkpointing}, {name}", counts)
            figures[model][checkpointing] = {
                name: counts.figures() for name, counts in steps.items()
            }
    return {"torch": torch.__version__.partition("+")[0], "steps": figures}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=["ltx-video-2b", "wan2.1-t2v-1.3b"]
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--peers", action="store_true", help="count other loops too")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    chosen = [TINY] if options.tiny else options.models
    steps = main(chosen, options.set, with_peers=options.peers or options.tiny)
    if options.json:
        options.json.write_text(json.dumps(steps, indent=2) + "\n", encoding="utf-8")
