"""The types of adapter: PEFT's names for their tensors, and which of these begin at
zero.

With s = alpha / rank:

- LoRA (Hu et al. 2021, arXiv 2106.09685): W + s·B·A
- DoRA (Liu et al. 2024, arXiv 2402.09353): m·V / ‖V‖ row by row, V = W + s·B·A
- LoHa (Hyeon-Woo et al. 2021, arXiv 2108.06098): W + s·(A1·B1)∘(A2·B2)
- LoKr (Yeh et al. 2023, arXiv 2309.14859): W + s·(W1 ⊗ W2)
- OFT (Qiu et al. 2023, arXiv 2306.07280): W·Rᵀ, R made of rotations of a few inputs
  each
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from torch import Tensor

PARTS: Mapping[str, tuple[str, ...]] = {
    "LORA": ("lora_A", "lora_B"),
    "DORA": ("lora_A", "lora_B", "lora_magnitude_vector"),
    "OFT": ("oft_R",),
    "LOHA": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "LOKR": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
}
"""PEFT's tensor names by type.

Each of LoKr's factors is one tensor or a product of _a and _b.
"""

ZERO = ("lora_B", "hada_w2_b", "lokr_w1", "lokr_w1_a", "oft_R")
"""Tensors that begin at zero, so that step 0 is the base model.

All of them except OFT's are those that a scale is multiplied into.
"""

NOT_BY_DEGREES = ("OFT", "DORA")
"""Types that cannot be sampled at another strength: DoRA at strength 0 is not the base
model."""

_NAME = re.compile(rf"(.+)\.({'|'.join(chain(*PARTS.values()))})(\.weight)?")


def parse_param_name(name: str) -> tuple[str, str] | None:
    """Split a checkpoint's tensor name into module path and PEFT's name.

    None if it is not an adapter's tensor.
    """
    match = _NAME.fullmatch(name)
    return (match[1], match[2]) if match else None


def by_module(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group an adapter's tensors by module path and PEFT's name; other tensors are left
    out.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        parsed = parse_param_name(name)
        if parsed is not None:
            path, part = parsed
            modules.setdefault(path, {})[part] = value
    return modules


def kind_of(state: Collection[str]) -> str | None:
    """Return the type of adapter to which the names of a state belong, or None."""
    parts = set()
    for name in state:
        parsed = parse_param_name(name)
        if parsed is not None:
            parts.add(parsed[1])
    if not parts:
        return None
    for kind, kind_parts in PARTS.items():
        if parts <= set(kind_parts):
            return kind
    return None


def peft_config(
    kind: str, rank: int, scale: float, dropout: float, paths: list[str]
) -> Any:
    """Build PEFT's config of an adapter whose tensors the caller initializes.

    Args:
        kind: the type, a key of ``PARTS``.
        rank: rank; for OFT the block size.
        scale: alpha / rank.
        dropout: share of the adapter's inputs (LoRA, DoRA) or of the update's rows
            (LoHa, LoKr) that is dropped; the others are scaled up.
        paths: module paths.
    """
    import peft

    common: dict[str, Any] = {"r": rank, "target_modules": paths}
    alpha = rank * scale
    match kind:
        case "LORA" | "DORA":
            common |= {"init_lora_weights": False, "use_dora": kind == "DORA"}
            return peft.LoraConfig(**common, lora_alpha=alpha, lora_dropout=dropout)
        case "LOHA":
            return peft.LoHaConfig(**common, alpha=alpha, rank_dropout=dropout)
        case "LOKR":
            return peft.LoKrConfig(
                **common, alpha=alpha, rank_dropout=dropout, rank_dropout_scale=True
            )
        case "OFT":
            return peft.OFTConfig(oft_block_size=rank, target_modules=paths)
    raise ValueError(f"{kind} is not a type of adapter")


def side_of(numbers: int) -> int:
    """Return the side b of a rotation that has b(b-1)/2 numbers."""
    side = round((1 + (1 + 8 * numbers) ** 0.5) / 2)
    if side * (side - 1) != 2 * numbers:
        raise VideotuneError(
            f"no rotation has {numbers} numbers: this is not an OFT adapter"
        )
    return side
