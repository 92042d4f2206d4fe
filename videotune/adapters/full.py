"""Full fine-tuning: every weight of the denoiser trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from torch import Tensor, nn


def add_full(net: nn.Module) -> dict[str, nn.Parameter]:
    """Let all weights of the network train, and return them by name, in the network's own dtypes."""
    net.requires_grad_(True)
    return dict(net.named_parameters())


def load_full(parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor], where: str) -> None:
    """Copy saved weights into the network, or into its masters.

    Raises VideotuneError that names a missing, superfluous or misshapen tensor.
    """
    odd = sorted(set(parameters) ^ set(state))
    odd += [name for name, parameter in parameters.items() if name in state and parameter.shape != state[name].shape]
    if odd:
        raise VideotuneError(f"{where} does not fit this model: {len(odd)} tensors differ, the first is {odd[0]}")
    for name, parameter in parameters.items():
        parameter.data.copy_(state[name])
