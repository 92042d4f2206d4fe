"""How a trained adapter is written: which formats a kind of adapter has, and its tensors under their names.

The scale alpha / rank is multiplied into one tensor, and no file says an alpha that differs from its rank: every reader
then applies the update as it was trained, whatever it assumes of alpha.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from videotune.adapters.kinds import ZERO, by_module, kind_of, peft_config, rank_in, split
from videotune.cache.entry import alone, hash_of
from videotune.errors import VideotuneError
from videotune.export.fused import fuse
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config"
"""The key of a file's header under which PEFT's settings stand, as JSON; only kinds that diffusers does not read have it."""

WHY_NOT = {
    ("DORA", "comfyui"): "ComfyUI divides DoRA's weights by another norm than it was trained with",
    ("LOHA", "diffusers"): "diffusers' load_lora_weights reads LoRA and DoRA alone",
    ("LOKR", "diffusers"): "diffusers' load_lora_weights reads LoRA and DoRA alone for video models",
    ("OFT", "diffusers"): "diffusers' load_lora_weights reads LoRA and DoRA alone",
    ("OFT", "comfyui"): "ComfyUI's OFT turns a weight's outputs and PEFT's its inputs",
}

JOINED = "its form of this model lays several modules into one weight, which updates of this kind cannot be joined into"


def formats_of(family: Family, kind: str) -> tuple[str, ...]:
    """The formats in which an adapter of this kind can be written for this family."""
    known = tuple(sorted(family.key_maps()))
    if kind == "LORA":
        return known
    if kind == "DORA":
        return tuple(name for name in known if name == "diffusers")
    apart = [name for name in known if name not in family.spec.fused]  # products of factors cannot be joined
    own = [name for name in apart if name == "comfyui"] if kind in ("LOHA", "LOKR") else []
    return (*own, "peft")


def refuse_format(family: Family, kind: str, name: str) -> None:
    """Raise VideotuneError for a format that this kind of adapter or this family does not have, with the reason."""
    known = formats_of(family, kind)
    if name in known:
        return
    what = family.spec.title if kind == "LORA" else f"{kind} for {family.spec.title}"
    reason = WHY_NOT.get((kind, name), JOINED if name in family.spec.fused and kind in ("LOHA", "LOKR") else None)
    why = f": {reason}. `videotune export RUN --merge` serves everyone" if reason else ""
    raise VideotuneError(f"output_model_format: {what} has {', '.join(known)}, not {name!r}{why}")


def changes_nothing(state: Mapping[str, Tensor]) -> bool:
    """Whether an adapter is as it was before its first step."""
    return not any(bool(value.any()) for name, value in state.items() if (place := split(name)) and place[1] in ZERO)


def baked(family: Family, format: str, state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The adapter under the format's names, the scale multiplied into it.

    Raises VideotuneError for a format that there is not, and for an adapter that is NaN or does nothing.
    """
    kind = kind_of(state)
    assert kind is not None, "no adapter"
    refuse_format(family, kind, format)
    if any(not bool(value.isfinite().all()) for value in state.values()):
        raise VideotuneError("the adapter holds NaN or infinite weights: it is not exported")
    places = {name: place for name in state if (place := split(name))}
    if changes_nothing(state):
        raise VideotuneError(
            "the adapter is zero, so it changes nothing: it is not exported (did the run train any step?)"
        )
    rename = family.key_maps().get(format, lambda path: path)
    scaled = {
        name: state[name].detach().cpu().float() * (scale if part in ZERO and part != "oft_R" else 1.0)
        for name, (_, part) in places.items()
    }
    if format in family.spec.fused:
        scaled = fuse(scaled, family.skeleton(), family.spec.fused[format])
    out = {}
    for name, value in scaled.items():
        path, part = split(name) or ("", "")
        weight = ".weight" if name.endswith(".weight") and part != "lora_magnitude_vector" else ""  # as PEFT saves it
        out[f"{rename(path)}.{part}{weight}"] = value.contiguous()
    return out


def header(state: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, str]:
    """What stands in the file's head: our own facts, and PEFT's settings of a kind that diffusers does not read."""
    words = {"format": "pt", "videotune": json.dumps(dict(facts), ensure_ascii=False)}
    kind = kind_of(state)
    if kind in ("LOHA", "LOKR", "OFT"):
        words[CONFIG] = json.dumps(said(peft_config(kind, rank_in(state), 1.0, 0.0, sorted(by_module(state)))))
    return words


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits that name tensors by their names, shapes, dtypes and bytes."""
    return hash_of({name: alone(value) for name, value in tensors.items()})


def said(config: Any) -> dict[str, Any]:
    """PEFT's settings, those alone that are not PEFT's defaults."""
    plain, mine = type(config)().to_dict(), config.to_dict()
    kept = {key: value for key, value in mine.items() if key not in plain or value != plain[key]}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in kept.items()} | {
        "peft_type": config.peft_type.value,
        "target_modules": sorted(config.target_modules),
    }
