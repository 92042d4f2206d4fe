"""The optimizers: for each, what a config must know of it and how it is built from its
library.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from videotune.config.data_schema import Section
from videotune.config.fields import fatal, override, word
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    import torch

Rows = list[dict[str, Any]]
"""torch's parameter groups, each with its name."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of a library."""

    build: Callable[[Rows, Optimizer], list[torch.optim.Optimizer]]
    """Returns the library's own optimizers for some groups.

    All of them step together.
    """
    state_bytes: int
    """Bytes of state for each number of a large matrix."""
    betas: bool = True
    """Whether it uses beta1 and beta2."""
    by_number: bool = False
    """Whether the update of a number needs only that number's gradient and moments, so
    that shards of a matrix can be updated separately.
    """
    learning_rate: float | None = None
    """Its own default rate. None: the training method's."""


def _numbers(settings: Optimizer) -> dict[str, Any]:
    return {
        "lr": 0.0,
        "betas": (settings.beta1, settings.beta2),
        "weight_decay": settings.weight_decay,
    }


# Libraries are imported by the builders: the config is read where nothing trains, and
# must load no torch.


def _adamw(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """torch's (Loshchilov and Hutter 2019, arXiv 1711.05101).

    The fused kernel can skip a step on the device.
    """
    import torch

    return [torch.optim.AdamW(rows, **_numbers(settings), fused=True)]


def _bitsandbytes(
    name: str,
) -> Callable[[Rows, Optimizer], list[torch.optim.Optimizer]]:
    """bitsandbytes' optimizer of that name; one that pages its moments needs CUDA."""

    def build(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
        import bitsandbytes

        if name.startswith("Paged") and not all(map(_is_on_cuda, rows)):
            raise VideotuneError(
                "optimizer: PAGED_ADAMW_8BIT pages its moments between a CUDA device and the host, and what trains here "
                "is not on a CUDA device. ADAMW_8BIT is the same without pages"
            )
        return [getattr(bitsandbytes.optim, name)(rows, **_numbers(settings))]

    return build


def _is_on_cuda(row: dict[str, Any]) -> bool:
    return all(parameter.device.type == "cuda" for parameter in row["params"])


def _adafactor(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """transformers' (Shazeer and Stern 2018, arXiv 1804.04235), with the run's rate,
    not one of its own.

    torch's always multiplies the rate by the weight's own size, which for an adapter
    that begins at 0 is next to nothing.
    """
    from transformers.optimization import Adafactor

    fixed = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    return [Adafactor(rows, lr=0.0, weight_decay=settings.weight_decay, **fixed)]


def _prodigy(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """prodigyopt's (Mishchenko and Defazio 2023, arXiv 2306.06101): the rate multiplies
    one that it finds for each group.
    """
    from prodigyopt import Prodigy

    with redirect_stdout(io.StringIO()):  # it prints that its weight decay is decoupled
        return [Prodigy([row], **_numbers(settings) | {"lr": 1.0}) for row in rows]


def _muon(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """torch's (Jordan et al.

    2024) for matrices, with beta1 as momentum, scaled so that AdamW's rates fit it.

    The scale is that of Liu et al. 2025 (arXiv 2502.16982). Everything else is updated
    by AdamW.
    """
    import torch

    matrix_rows: Rows = []
    other_rows: Rows = []
    for row in rows:
        matrices = [parameter for parameter in row["params"] if parameter.ndim == 2]
        others = [parameter for parameter in row["params"] if parameter.ndim != 2]
        if matrices:
            matrix_rows.append(row | {"params": matrices})
        if others:
            other_rows.append(row | {"params": others})

    optimizers: list[torch.optim.Optimizer] = []
    if matrix_rows:
        optimizers.append(
            torch.optim.Muon(
                matrix_rows,
                lr=0.0,
                weight_decay=settings.weight_decay,
                momentum=settings.beta1,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if other_rows:
        optimizers += _adamw(other_rows, settings)
    return optimizers


def _came(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """pytorch_optimizer's (Luo et al.

    2023, arXiv 2307.02047); the decay of its confidence is its default.
    """
    from pytorch_optimizer import CAME

    numbers = _numbers(settings) | {
        "lr": 1.0,
        "betas": (settings.beta1, settings.beta2, 0.9999),
    }
    # ``foreach`` would hold the updates of all parameters at once
    return [CAME(rows, foreach=False, **numbers)]


def _schedule_free(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """schedulefree's AdamW (Defazio et al.

    2024, arXiv 2405.15682), left in its training mode.
    """
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(rows, **_numbers(settings))
    optimizer.train()
    return [optimizer]


OPTIMIZERS = {
    "ADAMW": OptimizerKind(_adamw, 8, by_number=True),
    # moments of weights of 4096 numbers and more in 8 bits (Dettmers et al. 2022, arXiv
    # 2110.02861)
    "ADAMW_8BIT": OptimizerKind(_bitsandbytes("AdamW8bit"), 2),
    # the same in unified memory, which CUDA moves to the host and back (Dettmers et al.
    # 2023, arXiv 2305.14314)
    "PAGED_ADAMW_8BIT": OptimizerKind(_bitsandbytes("PagedAdamW8bit"), 2),
    "ADAFACTOR": OptimizerKind(
        _adafactor, 0, betas=False
    ),  # its rows and columns are next to nothing
    "PRODIGY": OptimizerKind(_prodigy, 16, learning_rate=1.0),
    # the sign of a mean, one moment (Chen et al. 2023, arXiv 2302.06675)
    "LION": OptimizerKind(_bitsandbytes("Lion"), 4, by_number=True),
    "LION_8BIT": OptimizerKind(_bitsandbytes("Lion8bit"), 1),
    "MUON": OptimizerKind(_muon, 4),
    "CAME": OptimizerKind(_came, 4),  # as ADAFACTOR's, and one moment
    "SCHEDULE_FREE": OptimizerKind(_schedule_free, 8),
}

OptimizerName = Annotated[Literal[*OPTIMIZERS], BeforeValidator(word)]  # type: ignore[valid-type]


class Optimizer(Section):
    """How gradients become updates."""

    name: OptimizerName = fatal("ADAMW")
    """torch's AdamW and Muon, bitsandbytes' 8-bit and paged AdamW and Lion, Adafactor,
    Prodigy, CAME, schedule-free AdamW
    """
    beta1: float = override(0.9, ge=0, lt=1)
    """beta1 of Adam (decay of the gradient's mean); MUON: its momentum"""
    beta2: float = override(0.99, ge=0, lt=1)
    """beta2 of Adam (decay of the mean of the gradient's square); LION: its beta2;
    MUON: AdamW's
    """
    weight_decay: float = override(0.01, ge=0)
    """decoupled weight decay"""
    masters: Annotated[
        Literal["FLOAT_32", "STOCHASTIC_ROUNDING"], BeforeValidator(word)
    ] = fatal("FLOAT_32")
    """of FINE_TUNE in BFLOAT_16: float32 copies of the weights, or none, and updates
    are rounded by chance
    """
    step_in_backward: bool = override(False)
    """update each tensor in backward and free its gradient; max_grad_norm and the
    finite check are each tensor's own
    """


def default_warmup(steps: int) -> int:
    """5 % of the steps, at most 100."""
    return min(100, steps // 20)


def default_decay(steps: int) -> int:
    """20 % of the steps, at least 1 (Hägele et al. 2024, arXiv 2405.18392)."""
    return max(1, steps // 5)
