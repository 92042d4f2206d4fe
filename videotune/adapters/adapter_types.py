"""What sets the kinds of adapter apart: PEFT's names for their tensors, and which of these begin at zero.

With s = alpha / rank:

- LoRA (Hu et al. 2021, arXiv 2106.09685): W + s·B·A
- DoRA (Liu et al. 2024, arXiv 2402.09353): m·V / ‖V‖ row by row, V = W + s·B·A
- LoHa (Hyeon-Woo et al. 2021, arXiv 2108.06098): W + s·(A1·B1)∘(A2·B2)
- LoKr (Yeh et al. 2023, arXiv 2309.14859): W + s·(W1 ⊗ W2)
- OFT (Qiu et al. 2023, arXiv 2306.07280): W·Rᵀ, R made of rotations of a few inputs each
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from torch import Tensor

PARTS: Mapping[str, tuple[str, ...]] = {
    "LORA": ("lora_A", "lora_B"), "DORA": ("lora_A", "lora_B", "lora_magnitude_vector"), "OFT": ("oft_R",),
    "LOHA": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "LOKR": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
}  # fmt: skip
"""PEFT's names of a kind's tensors; of LoKr's factors each is either whole, or a product of _a and _b."""

ZERO = ("lora_B", "hada_w2_b", "lokr_w1", "lokr_w1_a", "oft_R")
"""The tensors that begin at zero, so that step 0 is the base model. All but OFT's are what a scale is multiplied into."""

NOT_BY_DEGREES = ("OFT", "DORA")
"""Kinds whose effect cannot be drawn at another strength: DoRA's at strength 0 would not be the base."""

_NAME = re.compile(
    rf"(.+)\.({'|'.join(part for parts in PARTS.values() for part in parts)})(\.weight)?"
)


def parse_param_name(name: str) -> tuple[str, str] | None:
    """A checkpoint's name of an adapter's tensor -> its module's path and PEFT's name; None for any other tensor."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found else None


def by_module(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """An adapter's tensors by module path and PEFT's name; what is of no adapter is left out."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if place := parse_param_name(name):
            found.setdefault(place[0], {})[place[1]] = value
    return found


def kind_of(state: Collection[str]) -> str | None:
    """Which kind of adapter the names of a state are of; None: of none."""
    parts = {place[1] for name in state if (place := parse_param_name(name))}
    return next((kind for kind, own in PARTS.items() if parts and parts <= set(own)), None)


def peft_config(kind: str, rank: int, scale: float, dropout: float, paths: list[str]) -> Any:
    """PEFT's settings of an adapter on these modules, whose tensors somebody else sets.

    ``rank`` of OFT is the side of its rotations. ``dropout`` leaves out inputs of the adapter (LoRA, DoRA) or rows of the
    update (LoHa, LoKr), and scales the rest up.
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
    return peft.OFTConfig(oft_block_size=rank, target_modules=paths)


def side_of(numbers: int) -> int:
    """The side b of a rotation that has b(b-1)/2 numbers."""
    side = round((1 + (1 + 8 * numbers) ** 0.5) / 2)
    if side * (side - 1) // 2 != numbers:
        raise VideotuneError(f"no rotation has {numbers} numbers: this is no OFT adapter")
    return side
