"""What an adapter does to a weight, by its definition, in float64: the truth that exports and merges are held against."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from videotune.adapters.adapter_types import by_module, side_of

AdapterTensors = Mapping[str, Tensor]
"""The tensors of an adapter in one module, by PEFT's names."""


def new_weight(weight: Tensor, parts: AdapterTensors, scale: float) -> Tensor:
    """The weight (out, in) that the module acts with, float64 on the CPU."""
    own = _double(weight)
    if "oft_R" in parts:
        turned = rotations(parts["oft_R"])
        blocks = own.unflatten(1, (len(turned), -1))
        return torch.einsum("obk,bck->obc", blocks, turned).flatten(1)
    own = own + change(parts, scale)
    if "lora_magnitude_vector" in parts:
        own = own * (_double(parts["lora_magnitude_vector"]) / own.norm(dim=1))[:, None]
    return own


def change(parts: AdapterTensors, scale: float) -> Tensor:
    """What is added to a module's weight (before DoRA's magnitude is set); of OFT R - 1 (blocks, b, b).

    float64 on the CPU.
    """
    if "oft_R" in parts:
        blocks = rotations(parts["oft_R"])
        return blocks - torch.eye(blocks.shape[1], dtype=blocks.dtype)
    if "lora_A" in parts:
        return scale * _double(parts["lora_B"]) @ _double(parts["lora_A"])
    if "hada_w1_a" in parts:
        one, two = (
            _double(parts[f"hada_w{i}_a"]) @ _double(parts[f"hada_w{i}_b"]) for i in (1, 2)
        )
        return scale * one * two
    return scale * torch.kron(_factor(parts, "lokr_w1"), _factor(parts, "lokr_w2")).contiguous()


def _factor(parts: AdapterTensors, name: str) -> Tensor:
    """A factor of LoKr, whole or as a product."""
    if name in parts:
        return _double(parts[name])
    return _double(parts[f"{name}_a"]) @ _double(parts[f"{name}_b"])


def rotations(numbers: Tensor) -> Tensor:
    """Numbers above the diagonal of skew matrices Q (blocks, b(b-1)/2) -> PEFT's rotations (blocks, b, b), float64.

    R = 1 + 2Q + 2Q² + 2Q³ + Q⁴: the series of Cayley's (1 + Q)(1 - Q)⁻¹, cut off as PEFT does (Qiu et al. 2025,
    arXiv 2506.19847).
    """
    side = side_of(numbers.shape[1])
    rows, columns = torch.triu_indices(side, side, 1)
    skew = torch.zeros(len(numbers), side, side, dtype=torch.float64)
    skew[:, rows, columns] = _double(numbers)
    skew = skew - skew.transpose(1, 2)
    squared = skew @ skew
    return (
        torch.eye(side, dtype=torch.float64)
        + 2 * (skew + squared + squared @ skew)
        + squared @ squared
    )


def effects(state: Mapping[str, Tensor], scale: float) -> dict[str, Callable[[], Tensor]]:
    """What decides an adapter's effect on any base, by module path, calculated at the call: see ``change``.

    DoRA's magnitudes stand beside it, under the path and " magnitude".
    """
    found: dict[str, Callable[[], Tensor]] = {}
    for path, parts in by_module(state).items():
        found[path] = partial(change, parts, scale)
        if "lora_magnitude_vector" in parts:
            found[f"{path} magnitude"] = partial(_double, parts["lora_magnitude_vector"])
    return found


def _double(x: Tensor) -> Tensor:
    return x.detach().to(x.device if x.is_meta else "cpu", torch.float64)
