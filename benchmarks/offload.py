"""What weights and inputs on the host cost a step: seconds, over those of the same step
with all of it on the device.

    python benchmarks/offload.py [--model tiny|1.3b|5b|14b] [--tokens N] [--rounds 5]
    [--steps 4] [--json FILE] [--tiny]

A frozen transformer of Wan's kind with random weights, forward and backward to its
input; the first row is gradient checkpointing with all weights on the device. The ways
take turns, so that a slow minute falls on all of them; the median of each way's rounds
is divided by the first way's in the same round. On CUDA the peak of the device's memory
stands beside it (bf16); on a CPU "the device" is the same memory, and what is measured
is the mechanism alone (float32).
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import videotune  # noqa: F401  (before bitsandbytes, which it tells not to ask for a package)

# isort: split
import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from videotune.memory.block_offload import stream_blocks
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON

MODELS: dict[str, tuple[int, int, int, int]] = {
    "tiny": (4, 1024, 8, 320),
    "1.3b": (12, 8960, 30, 5120),
    "5b": (24, 14336, 30, 5120),
    "14b": (40, 13824, 40, 5120),
}
"""Heads, width of the feed-forward, blocks, and tokens of a sample."""

WAYS = {
    "all on the device, checkpointing ON": (0.0, ON),
    "checkpointing OFF": (0.0, OFF),
    "CPU_OFFLOADED": (0.0, CPU_OFFLOADED),
    "fraction 0.25": (0.25, ON),
    "fraction 0.5": (0.5, ON),
    "fraction 1": (1.0, ON),
    "fraction 1, CPU_OFFLOADED": (1.0, CPU_OFFLOADED),
}


def make(model: str, dtype: torch.dtype) -> nn.Module:
    """A frozen transformer on the CPU, its weights cut from one pool of random numbers."""
    heads, ffn, blocks, _ = MODELS[model]
    with init_empty_weights():
        net = WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=32 if model == "tiny" else 128,
            ffn_dim=ffn,
            num_layers=blocks,
            text_dim=512 if model == "tiny" else 4096,
        )
    pool = (
        torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
        .mul_(0.02)
        .to(dtype)
    )
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                count = parameter.numel()
                values = pool.repeat(-(-count // len(pool)))[:count].view(
                    parameter.shape
                )
                module._parameters[name] = nn.Parameter(
                    values.clone(), requires_grad=False
                )
    return net.train()


def inputs(
    net: Any, model: str, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Five latent frames, and 512 tokens of text."""
    side = 2 * max(1, round(math.sqrt(tokens / 5)))
    text = 64 if model == "tiny" else 512
    return {
        "hidden_states": torch.randn(
            1, 16, 5, side, side, device=device, dtype=dtype, requires_grad=True
        ),
        "timestep": torch.tensor([500.0], device=device),
        "encoder_hidden_states": torch.randn(
            1, text, net.config.text_dim, device=device, dtype=dtype
        ),
    }


def step(net: nn.Module, words: dict[str, Tensor]) -> None:
    """Forward and backward."""
    net(**words, return_dict=False)[0].square().mean().backward()
    words["hidden_states"].grad = None


def measure(
    model: str,
    way: str,
    tokens: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Seconds a step, and GB at the peak on a CUDA device (0 elsewhere); one step
    before it is not counted.
    """
    net = make(model, dtype)
    streams = stream_blocks(net, ["blocks"], device, *WAYS[way])
    words = inputs(net, model, tokens, device, dtype)
    step(net, words)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock = (
        time.perf_counter if cuda else time.process_time
    )  # one thread's own time, whoever else computes
    begun = clock()
    for _ in range(steps):
        step(net, words)
    if cuda:
        torch.cuda.synchronize()
    seconds = (clock() - begun) / steps
    del net, streams
    return seconds, torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0


def main() -> None:
    """Measure the ways in turn and print a row each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument(
        "--tokens", type=int, help="tokens of the sample (default: the model's row)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a rehearsal of a few seconds; its figures mean nothing",
    )
    words = parser.parse_args()
    if words.tiny:
        words.model = "tiny"
        words.tokens = 16
        words.rounds = 1
        words.steps = 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(1)
    tokens = words.tokens or MODELS[words.model][3]
    rounds = [
        {
            way: measure(words.model, way, tokens, words.steps, device, dtype)
            for way in WAYS
        }
        for _ in range(words.rounds)
    ]
    first = next(iter(WAYS))
    rows = []
    for way in WAYS:
        ratios = sorted(one[way][0] / one[first][0] for one in rounds)
        seconds = statistics.median(one[way][0] for one in rounds)
        row = {
            "way": way,
            "ratio": round(statistics.median(ratios), 3),
            "from": round(ratios[0], 3),
            "to": round(ratios[-1], 3),
            "seconds": round(seconds, 4),
            "peak_gb": round(max(one[way][1] for one in rounds), 2),
        }
        rows.append(row)
        print(row, flush=True)
    figures = {
        "model": words.model,
        "tokens": tokens,
        "device": str(device),
        "dtype": str(dtype),
        "rows": rows,
    }
    if words.json:
        words.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
