"""Full fine-tuning: every weight of the denoiser trains, or the layers that the config names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from videotune.adapters.patterns import named_by
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from torch import Tensor, nn


def layers_of(names: Iterable[str], layers: Sequence[str] | None) -> list[str]:
    """The parameters that train: all (None), or those that a pattern names, by itself or by a module that it lies in.

    Raises VideotuneError for a pattern that names nothing.
    """
    names = list(names)
    if layers is None:
        return names
    above = {name: [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)] for name in names}
    paths = list(dict.fromkeys(path for own in above.values() for path in own))
    found = named_by(paths, layers, "transformer.layers", "module or parameter of the transformer")
    return [name for name in names if not found.isdisjoint(above[name])]


def add_full(net: nn.Module, layers: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """Let weights of the network train, all or those of ``layers``, and return them by name, in the network's own dtypes."""
    parameters = dict(net.named_parameters())
    net.requires_grad_(False)
    chosen = {name: parameters[name] for name in layers_of(parameters, layers)}
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    return chosen


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
