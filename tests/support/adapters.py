"""Adapters of every kind with drawn numbers, and what a network does with them."""

from pathlib import Path
from typing import Any

import torch

from videotune.adapters.lora import add_lora
from videotune.config.sections import Lora
from videotune.exporter.adapter_export import read_effects

State = dict[str, torch.nn.Parameter]


def scale(kind: str) -> float:
    return 1.0 if kind == "OFT" else 2.0


def network_with_adapter(
    family: Any, kind: str = "LORA", rank: int = 4, expert: str | None = None
) -> tuple[torch.nn.Module, State]:
    """A network with an adapter on its linear layers, and the adapter's tensors."""
    net, alpha = family.denoiser(expert), None if kind == "OFT" else 2.0 * rank
    state = add_lora(
        net,
        family.spec,
        Lora(rank=rank, alpha=alpha, targets="linear", variant=kind),
        seed=0,
    )
    for index, parameter in enumerate(state.values()):
        parameter.data += 0.1 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(index)
        )
    return net, state


def network_output(net: Any) -> torch.Tensor:
    """What a network of Wan makes of one batch."""
    generator = torch.Generator().manual_seed(0)
    x, text = (
        torch.randn(1, 4, 2, 4, 4, generator=generator),
        torch.randn(1, 8, 16, generator=generator),
    )
    given = {
        "hidden_states": x.to(net.dtype),
        "encoder_hidden_states": text.to(net.dtype),
    }
    with torch.no_grad():
        return net(**given, timestep=torch.tensor([500.0]), return_dict=False)[0]


def read_back(family: Any, path: Path) -> dict[str, torch.Tensor]:
    """What each module's adapter does as the file's reader applies it: of LoRA ΔW."""
    return {
        name: calculate() for name, calculate in read_effects(family, path)[0].items()
    }
