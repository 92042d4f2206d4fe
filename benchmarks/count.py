"""Operations of a training step and the bytes that they move, counted at a model's real
size without a GPU, memory or weights.

    python benchmarks/count.py [MODEL ...] [--tiny] [--set KEY=VALUE ...]

The step is the run's own, on fake tensors of a CPU, so figures are the same on every
machine. Views and allocations start no kernel and are left out. An operation is one
kernel on a card, or a few; those of clipping and the optimizer are fewer on a card, and
are printed by themselves. Bytes are those of all inputs and outputs. Compiled blocks
cannot be counted so: benchmarks/gpu.py counts their kernels on a card.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from gpu_rig import TINY, Case, layout

from videotune.memory.checkpointing import OFF, ON, checkpoint_blocks
from videotune.models.registry import find
from videotune.planner.ledger import Ledger
from videotune.planner.measure import FakeRun
from videotune.trainer.build import DTYPES

CASES = {
    "ltx-video-2b": Case("ltx-video-2b", 49, 512, 768),
    "wan2.1-t2v-1.3b": Case("wan2.1-t2v-1.3b", 45, 480, 832),
    TINY: Case(TINY, 17, 64, 64),
}


class Counts(Ledger):
    """Counts the names of operations too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def count_operation(self, func: Any, name: str, *others: Any) -> None:
        """Count an operation, and its name."""
        super().count_operation(func, name, *others)
        self.names[name] += 1


def counted(case: Case, checkpointing: str) -> Counts:
    """Count a step of the whole network, after one that makes the optimizer's state."""
    wanted = case.wanted()
    is_tiny = case.model == TINY
    dtype = DTYPES["FLOAT_32" if is_tiny else "BFLOAT_16"]
    family = find(wanted.spec.name)(layout(case.model), torch.device("cpu"), dtype)
    run = FakeRun(family, wanted.config)
    network = run.network(tuple(run.depths.items()))

    checkpoint_blocks(network.net, checkpointing)
    counts = Counts()
    with run.mode, family.planning_mode():
        batch = run.prepared(wanted.shapes[0], case.batch)
        run._train(network, batch, Ledger())
        run._train(network, batch, counts)
    return counts


def main(models: Sequence[str], sets: Sequence[str]) -> None:
    """Print a table."""
    pairs = tuple(tuple(word.split("=", 1)) for word in sets)
    for model in models:
        case = CASES[model]
        case = Case(case.model, case.frames, case.height, case.width, 1, pairs)
        for checkpointing in (ON, OFF):
            counts = counted(case, checkpointing)
            steps = sum(counts.operations.values()) - counts.operations["optimizer"]
            most = ", ".join(f"{n} {name}" for name, n in counts.names.most_common(8))
            print(
                f"{model}, checkpointing {checkpointing}: {steps:,} operations forward and "
                f"backward, {counts.operations['optimizer']:,} of the optimizer; "
                f"{counts.moved / 1e9:,.1f} GB outside of matrix products and attention; {most}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=["ltx-video-2b", "wan2.1-t2v-1.3b"]
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    main([TINY] if options.tiny else options.models, options.set)
