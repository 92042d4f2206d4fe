"""Kernels of compiled blocks and the bytes that they move, counted from what Inductor
generates.

    python benchmarks/count_compiled.py [MODEL ...] [--tiny] [--json FILE]

One block of a model, with its LoRA, is compiled as a run compiles it, at two small sizes
of a clip. Of each graph the generated kernels and the products and attention of libraries
are counted, and the bytes that generated kernels read and write. Bytes of the real clip
follow from those of the two sizes, since every tensor of a block is affine in the tokens.

The code is that for a CPU: torch writes Triton's code only for a CUDA device that it finds,
since the device's properties decide how kernels are written. Both are fused from the same
graph by the same scheduler, but a CPU may join other loops.
"""

import argparse
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from count import CASES
from gpu_rig import TINY, Case, layout
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

from videotune.memory.checkpointing import OFF, ON
from videotune.memory.compiling import CompiledBlocks
from videotune.models.registry import find
from videotune.planner.measure import FakeRun
from videotune.trainer.trainable import attach

SMALL = ((17, 64, 64), (33, 64, 96))
"""Two clips: frames, height, width."""

GENERATED = re.compile(r"^\s+cpp_fused\w*\(", re.MULTILINE)
LIBRARY = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.aten\._scaled_dot_product\w+")
BYTES_OF_ELEMENT = 4
"""Bytes of the elements in which Inductor counts what a node moves."""


@dataclass(frozen=True)
class BlockCounts:
    """What the graphs of a block do, forward and backward."""

    tokens: int
    generated: int
    """Kernels that Inductor wrote."""
    library: int
    """Matrix products and attention."""
    moved: int
    """Bytes that generated kernels read and write."""


def counted_block(case: Case, checkpointing: str) -> BlockCounts:
    """Compile a block of the model and count."""
    torch._dynamo.reset()
    metrics.reset()
    wanted = case.wanted()
    config = wanted.config.model_copy(update={"train_dtype": "BFLOAT_16"})
    folder = layout(case.model)
    family = find(wanted.spec.name)(folder, torch.device("cpu"), torch.bfloat16)
    net: Any = family.denoiser(fill=lambda skeleton: None)
    for path in wanted.spec.block_lists:
        del net.get_submodule(path)[1:]
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    attach(net, wanted.spec, config)
    net.train()
    CompiledBlocks().add(net, wanted.spec.block_lists, checkpointing)

    shape = wanted.shapes[0]
    batch = FakeRun(family, config).prepared(shape, 1).batch
    assert batch is not None

    def step() -> None:
        predicted = family.predict(net, batch.x0, torch.zeros(1), batch)
        predicted.float().square().mean().backward()

    _, codes = run_and_get_code(step)
    calls = [code[code.index("def call(") :] for code in codes]
    elements = [count for node, count in metrics.nodes_num_elem if not node.is_extern()]
    return BlockCounts(
        wanted.spec.tokens(shape),
        sum(len(GENERATED.findall(code)) for code in calls),
        sum(len(LIBRARY.findall(code)) for code in calls),
        BYTES_OF_ELEMENT * sum(elements),
    )


def counted_model(model: str, checkpointing: str) -> dict[str, Any]:
    """Count the compiled blocks of a whole model at the size of its case."""
    case = CASES[model]
    sizes = []
    for frames, height, width in SMALL:
        small = replace(case, frames=frames, height=height, width=width)
        sizes.append(counted_block(small, checkpointing))
    first, second = sizes

    wanted = case.wanted()
    tokens = wanted.spec.tokens(wanted.shapes[0])
    bytes_a_token = (second.moved - first.moved) / (second.tokens - first.tokens)
    moved = first.moved + (tokens - first.tokens) * bytes_a_token

    family = find(wanted.spec.name)(layout(model), torch.device("cpu"), torch.bfloat16)
    depth = sum(FakeRun(family, wanted.config).depths.values())
    return {
        "blocks": depth,
        "tokens": tokens,
        "generated_a_block": first.generated,
        "library_a_block": first.library,
        "kernels": depth * (first.generated + first.library),
        "bytes": round(depth * moved),
    }


def main(models: Sequence[str]) -> dict[str, Any]:
    """Print a line a model and mode, and return the figures."""
    inductor.force_disable_caches = True
    # Inductor counts bytes only if they would be logged.
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [logging.NullHandler()]
    figures: dict[str, Any] = {}
    for model in models:
        figures[model] = {}
        for checkpointing in (ON, OFF):
            counts = counted_model(model, checkpointing)
            print(
                f"{model}, checkpointing {checkpointing}: {counts['generated_a_block']} generated "
                f"kernels and {counts['library_a_block']} of libraries a block, {counts['kernels']:,} in "
                f"{counts['blocks']} blocks; {counts['bytes'] / 1e9:,.1f} GB outside of matrix products "
                f"and attention at {counts['tokens']:,} tokens",
                flush=True,
            )
            figures[model][checkpointing] = counts
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=["ltx-video-2b", "wan2.1-t2v-1.3b"]
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    blocks_counted = main([TINY] if options.tiny else options.models)
    if options.json:
        text = json.dumps(blocks_counted, indent=2) + "\n"
        options.json.write_text(text, encoding="utf-8")
