"""LoRA (Hu et al. 2021, arXiv 2106.09685): W + (alpha / rank) B A, injected into the diffusers model by PEFT.

The adapter is part of the model, never a wrapper around it: one object trains, is sampled and is saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError
from videotune.randomness import draws
from videotune.types import FamilySpec

if TYPE_CHECKING:
    from torch import Tensor, nn

ADAPTER = "default"


@dataclass(frozen=True)
class LoraSettings:
    """rank and alpha of the update (alpha None: rank), dropout on its input, and which modules have one."""

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = "attention"

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank


def matching(net: nn.Module, spec: FamilySpec, targets: str | Sequence[str]) -> list[str]:
    """Paths of the Linear modules inside the family's blocks that the targets name, in the model's order.

    ``targets`` is a named set of the family, or patterns: a whole path as a regular expression, or its last parts.
    Raises VideotuneError where a pattern matches nothing.
    """
    from torch import nn

    if isinstance(targets, str):
        if targets not in spec.lora_targets:
            known = ", ".join(sorted(spec.lora_targets))
            raise VideotuneError(
                f"lora.targets: {targets!r} is no named set of {spec.title} ({known}) and no list of patterns"
            )
        patterns = list(spec.lora_targets[targets])
    else:
        patterns = list(targets)
    inside = tuple(f"{blocks}." for blocks in spec.blocks)
    paths = [name for name, module in net.named_modules() if isinstance(module, nn.Linear) and name.startswith(inside)]
    found: set[str] = set()
    for pattern in patterns:
        try:
            hits = {path for path in paths if re.fullmatch(pattern, path) or f".{path}".endswith(f".{pattern}")}
        except re.error as error:
            raise VideotuneError(f"lora.targets: {pattern!r} is not a valid pattern: {error}") from error
        if not hits:
            examples = ", ".join(paths[:3])
            raise VideotuneError(
                f"lora.targets: {pattern!r} matches no Linear module of the blocks, such as {examples}"
            )
        found |= hits
    return [path for path in paths if path in found]


def add_lora(net: nn.Module, spec: FamilySpec, settings: LoraSettings, seed: int) -> dict[str, nn.Parameter]:
    """Inject the adapter and return its parameters, float32, by name: ``{module path}.lora_A.weight`` and B.

    A is uniform in ±1/√in by the counted draw of its module's name, B is zero: step 0 is the base model exactly.
    """
    import torch
    from peft import LoraConfig

    paths = matching(net, spec, settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank * settings.scale,
        lora_dropout=settings.dropout,
        target_modules=paths,
        init_lora_weights=False,
    )
    net.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    parameters = lora_parameters(net)
    for name, parameter in parameters.items():
        if ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5
            values = draws(seed, "lora", name).uniform(-bound, bound, size=tuple(parameter.shape))
            parameter.data = torch.tensor(values, dtype=torch.float32, device=parameter.device)
        else:
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
    return parameters


@contextmanager
def adapter_off(net: nn.Module) -> Iterator[None]:
    """The base model as it predicts: without the adapter and without dropout. After it ``net`` is as it was."""
    training = [(module, module.training) for module in net.modules()]
    trains = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    net.disable_adapters()  # type: ignore[operator]
    net.eval()
    try:
        yield
    finally:
        net.enable_adapters()  # type: ignore[operator]
        for parameter, before in trains:  # PEFT turns gradients off and on with the adapter
            parameter.requires_grad_(before)
        for module, before in training:
            module.training = before


def lora_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by name, without PEFT's adapter name in it."""
    mark = f".{ADAPTER}.weight"
    return {
        name.replace(mark, ".weight"): parameter
        for name, parameter in net.named_parameters()
        if ".lora_" in name and name.endswith(mark)
    }


def load_lora(parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor], where: str) -> None:
    """Copy saved weights into the adapter.

    Raises VideotuneError that names a missing, superfluous or misshapen tensor.
    """
    if set(parameters) != set(state):
        odd = sorted(set(parameters) ^ set(state))
        raise VideotuneError(f"{where} does not fit this adapter: {len(odd)} tensors differ, the first is {odd[0]}")
    for name, parameter in parameters.items():
        if parameter.shape != state[name].shape:
            raise VideotuneError(
                f"{where}: {name} is {tuple(state[name].shape)}, the adapter's is {tuple(parameter.shape)}"
            )
        parameter.data.copy_(state[name])


def updates(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """ΔW = scale · B A of each module, float64 on the CPU, by module path."""
    names = [name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")]
    return {
        name: scale * _double(state[f"{name}.lora_B.weight"]) @ _double(state[f"{name}.lora_A.weight"])
        for name in names
    }


def _double(x: Tensor) -> Tensor:
    return x.detach().cpu().double()
