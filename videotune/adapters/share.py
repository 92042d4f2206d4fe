"""Parameters that outlive a network: another one of the same shape computes with the very same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from videotune.adapters.lora import places

if TYPE_CHECKING:
    from torch import nn


def share(net: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Put these parameters in the place of the network's own of their names; an adapter's without its adapter's name.

    Whatever updates them then updates the network, as if it had been there from the beginning.
    """
    held = places(net)
    for name, parameter in parameters.items():
        path, _, own = name.rpartition(".")
        module, last = held[name] if name in held else (net.get_submodule(path), own)
        assert getattr(module, last).shape == parameter.shape, name
        setattr(module, last, parameter)
