"""The rows ``matmul8`` of gpu.py: products in eight bits at the real layers' sizes, and
whole steps with them.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_rig import TOY, Case, Rig, device, dtype, fresh, peaks, wait
from torch import Tensor, nn

from videotune.memory.checkpointing import ON
from videotune.memory.compiling import no_compiler
from videotune.memory.eight_bit_matmul import EightBitLinear, refusal
from videotune.memory.quantization import QuantizedLinear
from videotune.trainer.build import DTYPES

Row = dict[str, Any]

SIZES = {
    "5b": {"attention": (3072, 3072), "in": (14336, 3072), "out": (3072, 14336)},
    "14b": {"attention": (5120, 5120), "in": (13824, 5120), "out": (5120, 13824)},
}
"""Outputs and inputs of Wan's layers."""

MODELS = {"5b": ("wan2.2-ti2v-5b", 33, 768), "14b": ("wan2.1-t2v-14b", 17, 512)}
"""Model, frames, pixels of a side."""

RESIDENT = (
    ("micro_batch_size", 1),
    ("gradient_checkpointing", ON),
    ("layer_offload_fraction", 0.0),
)


def rows(tiny: bool, steps: int) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(name, what measures it): layers of Wan 5B and 14B, and steps of both."""
    for name, sizes in SIZES.items():
        model, frames, side = MODELS[name]
        case = Case(model, frames, side, side)
        tokens_of_rows: tuple[int, ...] = (5120, 18432)
        if tiny:
            case = Case(TOY, 5, 64, 64)
            sizes = dict.fromkeys(sizes, (48, 32))
            tokens_of_rows = (64,)

        yield f"matmul8 {name} step", partial(step_row, case, steps)
        for tokens in tokens_of_rows:
            measure = partial(layers_row, sizes, tokens)
            yield f"matmul8 {name} layers, {tokens} tokens", measure


def available() -> list[str]:
    """The kinds of products in eight bits that this device has."""
    return [kind for kind in ("FLOAT_8", "INT_8") if refusal(kind, device()) is None]


def compiles() -> bool:
    """Whether compiled kernels are measured: on a card that has a compiler."""
    return device().type == "cuda" and no_compiler() is None


def step_row(case: Case, steps: int) -> Row:
    """Seconds and peak of a step with products in each dtype, resident, plain and
    compiled, beside weights that are only stored in FLOAT_8.
    """
    kinds = {"auto": ("weight_dtype", "auto"), "stored": ("weight_dtype", "FLOAT_8")}
    kinds |= {kind: ("transformer.matmul_dtype", kind) for kind in available()}

    figures: Row = {}
    for name, pair in kinds.items():
        for compiled in (False, True):
            if compiled and (name == "stored" or not compiles()):
                continue
            fresh()
            rig = Rig(replace(case, sets=(*RESIDENT, pair, ("compile", compiled))))
            losses = rig.losses(2)
            figures[f"{name} compiled" if compiled else name] = {
                "losses": losses,
                "seconds": round(rig.seconds(steps), 4),
                **peaks(),
            }
            del rig
    return figures


def layers_row(sizes: dict[str, tuple[int, int]], tokens: int) -> Row:
    """Milliseconds of layers forward and backward, and their relative errors."""
    kinds = ("auto", "stored FLOAT_8", "stored INT_8", *available())
    figures: Row = {}
    for name, (outputs, inputs) in sizes.items():
        figures[name] = {
            "size": [outputs, inputs],
            **{kind: layer_row(kind, outputs, inputs, tokens) for kind in kinds},
        }
    return figures


def layer_row(kind: str, outputs: int, inputs: int, tokens: int) -> Row:
    """One layer, plain and compiled; errors of its output and of its input's gradient
    against float32.
    """
    torch.manual_seed(0)
    exact = nn.Linear(inputs, outputs, bias=False, device=device())
    weight = exact.weight.detach()
    layer = layer_of(kind, exact)
    wanted = DTYPES[dtype()]
    x = torch.randn(tokens, inputs, device=device()).to(wanted).requires_grad_()
    gradient = torch.randn(tokens, outputs, device=device()).to(wanted)

    row: Row = {"plain": times(layer, x, gradient)}
    assert x.grad is not None
    row["gradient_error"] = relative_error(x.grad, gradient.float() @ weight)
    with torch.no_grad():
        row["output_error"] = relative_error(layer(x), x.float() @ weight.T)
    if not kind.startswith("stored") and compiles():
        row["compiled"] = times(torch.compile(layer), x, gradient)
    return row


def layer_of(kind: str, exact: nn.Linear) -> nn.Module:
    """A frozen layer of this kind with the weight of ``exact``."""
    wanted = DTYPES[dtype()]
    weight = exact.weight.detach()
    if kind == "auto":
        outputs, inputs = weight.shape
        layer = nn.Linear(inputs, outputs, bias=False, device=device())
        layer.weight.data = weight.to(wanted)
        return layer.requires_grad_(False)

    if kind.startswith("stored"):
        packed: QuantizedLinear = QuantizedLinear(exact, kind.split()[1], wanted)
    else:
        packed = EightBitLinear(exact, kind, wanted)
    packed.set_weight(weight, device())
    return packed


def relative_error(value: Tensor, truth: Tensor) -> float:
    """The norm of an error over that of the truth."""
    return round(float((value.float() - truth).norm() / truth.norm()), 6)


def times(layer: Callable[..., Any], x: Tensor, gradient: Tensor) -> Row:
    """Milliseconds of the forward and of the backward pass, the middle of ten."""
    forward, backward = [], []
    for _ in range(13):
        x.grad = None
        wait()
        begun = time.perf_counter()
        out = layer(x)
        wait()
        between = time.perf_counter()
        out.backward(gradient)
        wait()
        forward.append(between - begun)
        backward.append(time.perf_counter() - between)
    return {
        "forward_ms": round(1e3 * statistics.median(forward[3:]), 3),
        "backward_ms": round(1e3 * statistics.median(backward[3:]), 3),
    }
