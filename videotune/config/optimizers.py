"""The optimizers: for each, what a config must know of it and how it is built from its
library.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError

from videotune.config.data_schema import Section
from videotune.config.fields import fatal, override, word
from videotune.config.installed import refuse_what_is_not_installed
from videotune.config.optimizer_classes import (
    CLASS_NAME,
    class_named,
    failing_parts,
    is_class,
    is_imported,
    nearest_class,
    table,
    usable_classes,
)
from videotune.config.suggestions import nearest_value
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
    """Return torch's Muon for matrices, with beta1 as momentum, and AdamW for all else.

    Muon is of Jordan and others, 2024. Its updates are scaled as by Liu and others, 2025
    (arXiv 2502.16982), so that AdamW's rates fit it.
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
    """Return pytorch_optimizer's CAME (Luo and others, 2023, arXiv 2307.02047); the decay
    of its confidence is its default.
    """
    from pytorch_optimizer import CAME

    numbers = _numbers(settings) | {
        "lr": 1.0,
        "betas": (settings.beta1, settings.beta2, 0.9999),
    }
    # ``foreach`` would hold the updates of all parameters at once
    return [CAME(rows, foreach=False, **numbers)]


def _schedule_free(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """Return schedulefree's AdamW (Defazio and others, 2024, arXiv 2405.15682), left in
    its training mode.
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


def _of_class(rows: Rows, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """Those of the class that the name says, one a group, as it finds its own rate or
    forms means over all of a group.
    """
    optimizer_class = load_class(settings.name)
    entry = table().get(settings.name, {})
    arguments = {}
    for key, value in settings.args.items():
        arguments[key] = tuple(value) if isinstance(value, list) else value

    optimizers: list[torch.optim.Optimizer] = []
    for row in _by_shape(rows, entry.get("flag")):
        try:
            with redirect_stdout(io.StringIO()):
                optimizers.append(optimizer_class([row], lr=row["lr"], **arguments))
        except Exception as error:  # whatever a class of a library raises
            reason = " ".join(str(error).split())[:200]
            raise VideotuneError(
                f"optimizer: {settings.name} cannot be built with args {settings.args}: {type(error).__name__}: {reason}. "
                "Correct optimizer.args, or choose another optimizer"
            ) from error
    return optimizers


def _by_shape(rows: Rows, flag: str | None) -> Rows:
    """Return the groups; where a class wants a flag at groups of matrices, those apart
    from all others.
    """
    if flag is None:
        return rows
    split_rows: Rows = []
    for row in rows:
        for is_matrix in (True, False):
            parameters = [
                parameter
                for parameter in row["params"]
                if (parameter.ndim >= 2) is is_matrix
            ]
            if parameters:
                split_rows.append(row | {"params": parameters, flag: is_matrix})
    return split_rows


def load_class(name: str) -> type[Any]:
    """Import the class of an optimizer.

    Raises:
        VideotuneError: if the module is not that of an installed package, or has no
            such class.
    """
    module_name, _, class_name = name.partition(":")
    if is_imported(name):
        refuse_what_is_not_installed(module_name, "optimizer.name")
    import torch

    try:
        optimizer_class = getattr(
            importlib.import_module(module_name), class_name, None
        )
    except ImportError as error:
        raise VideotuneError(
            f"optimizer.name: {module_name} cannot be imported: {error}. Install the package that it is of"
        ) from error
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, torch.optim.Optimizer
    ):
        raise VideotuneError(
            f"optimizer.name: {module_name} has no optimizer {class_name!r}: a class derived from torch.optim.Optimizer"
        )
    return optimizer_class


def kind_of(name: str) -> OptimizerKind:
    """Return what a config must know of an optimizer.

    The bytes of a class are measured (``trainer/optimizer_bytes.py``).
    """
    if not is_class(name):
        return OPTIMIZERS[name]
    rate = table().get(name, {}).get("rate")
    return OptimizerKind(_of_class, 0, betas=False, learning_rate=rate)


NUMBERS_OF_NAMES = ("beta1", "beta2", "weight_decay")
"""Keys of the optimizers of the table; a class has its own in ``args``."""


def finds_its_rate(name: str) -> bool:
    """Return whether an optimizer multiplies the rate by one that it finds."""
    return kind_of(name).learning_rate is not None


def updates_apart(name: str) -> bool:
    """Return whether each tensor may have an optimizer of its own."""
    is_listed = not is_imported(name)
    return name != "PRODIGY" and is_listed and not any(failing_parts(name, ("apart",)))


def optimizer_named(text: str) -> str | None:
    """Return an optimizer's name as it is written, or None if there is no such one."""
    letters = text.upper().replace("_", "")
    for name in OPTIMIZERS:
        if name.replace("_", "") == letters:
            return name
    return class_named(text)


def _name(value: Any) -> Any:
    """Return an optimizer's name as it is written."""
    if not isinstance(value, str):
        raise PydanticKnownError("string_type")
    name = optimizer_named(value)
    if name is not None:
        return name

    hint = nearest_value(value, list(OPTIMIZERS)) or nearest_class(value)
    if not hint:
        hint = (
            f". It takes {', '.join(OPTIMIZERS)}, a class of torch.optim, pytorch_optimizer or bitsandbytes, or "
            "module:Class of another installed package"
        )
    raise PydanticCustomError(
        "optimizer_name",
        "{text}",
        {"text": f"there is no optimizer {value[:80]!r}{hint}"},
    )


OptimizerName = Annotated[
    str,
    BeforeValidator(_name),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": [*OPTIMIZERS, *usable_classes()]},
                {"type": "string", "pattern": f"^{CLASS_NAME.pattern}$"},
            ]
        }
    ),
]


class Optimizer(Section):
    """How gradients become updates."""

    name: OptimizerName = fatal("ADAMW")
    """ADAMW, ADAMW_8BIT, PAGED_ADAMW_8BIT, ADAFACTOR, PRODIGY, LION, LION_8BIT, MUON,
    CAME, SCHEDULE_FREE; or a class of torch.optim, pytorch_optimizer or bitsandbytes,
    such as pytorch_optimizer:Lamb
    """
    args: dict[str, Any] = fatal({})
    """of a class: arguments by name, such as {"betas": [0.9, 0.95]}; its own defaults
    for all others
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
