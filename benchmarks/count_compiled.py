"""Kernels of compiled blocks, counted from the code that Inductor generates.

    python benchmarks/count_compiled.py [FAMILY ...] [--tiny] [--json FILE]

A block of a family's tiny checkpoint is compiled as a run compiles it, with its LoRA, and
the calls in the code of its graphs are counted: generated kernels, and matrix products
and attention of libraries. A block of the real model has the same operations, so its
number times the depth is that of the real model's blocks.

The code is that for a CPU: torch generates Triton's only if it finds a CUDA device, whose
properties decide how it is written. Both fuse the same graph by the same scheduler, but
a CPU joins more loops in one kernel, and keeps reductions apart that Triton joins. Bytes
are those of sizes of a tiny model, and are not counted.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from videotune.config.nested_keys import unflatten
from videotune.config.resolve import resolve
from videotune.memory.checkpointing import OFF, ON
from videotune.memory.compiling import CompiledBlocks
from videotune.models.base_model import spec_for
from videotune.models.registry import find
from videotune.planner.measure import FakeRun
from videotune.trainer.trainable import attach
from videotune.types import BasePlace, ClipShape

DEPTHS = {"ltx_video": {"2B": 28}, "wan": {"1.3B": 30, "14B": 40}}
"""Blocks of published models by family."""

GENERATED = re.compile(r"^\s+cpp_fused\w*\(", re.MULTILINE)
LIBRARY = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.aten\._scaled_dot_product\w+")


def counted_block(family_name: str, checkpointing: str) -> dict[str, int]:
    """Count the kernels of one block, forward and backward."""
    with tempfile.TemporaryDirectory() as name:
        folder = find(family_name).tiny(Path(name) / "tiny")
        spec = spec_for(None, BasePlace("tiny", folder))
        settings = unflatten({"train_dtype": "BFLOAT_16"})
        config = resolve(settings, {}, spec).config
        family = find(family_name)(folder, torch.device("cpu"), torch.bfloat16)
        net: Any = family.denoiser()
        for path in spec.block_lists:
            del net.get_submodule(path)[1:]
        attach(net, spec, config)
        net.train()
        CompiledBlocks().add(net, spec.block_lists, checkpointing)

        shape = ClipShape(17, 64, 64, spec.rules.fps)
        batch = FakeRun(family, config).prepared(shape, 1).batch
        assert batch is not None

        def step() -> None:
            predicted = family.predict(net, batch.x0, torch.zeros(1), batch)
            predicted.float().square().mean().backward()

        _, codes = run_and_get_code(step)
    calls = [code[code.index("def call(") :] for code in codes]
    return {
        "graphs": len(codes),
        "generated": sum(len(GENERATED.findall(code)) for code in calls),
        "library": sum(len(LIBRARY.findall(code)) for code in calls),
    }


def main(families: Sequence[str]) -> dict[str, Any]:
    """Print a line a family and mode, and return the figures."""
    inductor.force_disable_caches = True
    figures: dict[str, Any] = {}
    for family in families:
        figures[family] = {}
        for checkpointing in (ON, OFF):
            torch._dynamo.reset()
            block = counted_block(family, checkpointing)
            kernels = block["generated"] + block["library"]
            blocks = ", ".join(
                f"{size}: {depth * kernels:,}" for size, depth in DEPTHS[family].items()
            )
            print(
                f"{family}, checkpointing {checkpointing}: {block['generated']} generated and "
                f"{block['library']} of libraries a block; in all blocks of {blocks}",
                flush=True,
            )
            figures[family][checkpointing] = block
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", default=list(DEPTHS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    blocks_counted = main(["wan"] if options.tiny else options.families)
    if options.json:
        text = json.dumps(blocks_counted, indent=2) + "\n"
        options.json.write_text(text, encoding="utf-8")
