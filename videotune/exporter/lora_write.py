"""An adapter's modules under the names and in the layout of any form of file, alpha kept wherever the form can hold it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from videotune.adapters.kinds import ZERO, kind_of, peft_config
from videotune.errors import VideotuneError
from videotune.exporter.adapter_modules import Module, linear_size, places, rank_of
from videotune.exporter.formats import WHY_NOT

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videotune.types import Family

FORMS = {
    "diffusers": ("LORA", "DORA"), "comfyui": ("LORA", "LOHA", "LOKR"), "kohya": ("LORA", "LOHA", "LOKR"),
    "original": ("LORA", "LOHA", "LOKR"), "peft": ("LORA", "DORA", "LOHA", "LOKR", "OFT"),
}  # fmt: skip
"""The forms that are written, and the kinds of adapter that each can hold."""

KOHYA = {"lora_A": "lora_down", "lora_B": "lora_up"}


@dataclass(frozen=True)
class Written:
    """Tensors by their names in a form, the keys of its header, and of PEFT the settings that stand beside the file.

    ``folded``: how many modules have their scale multiplied into a factor, since the form has no place for it.
    """

    tensors: dict[str, Tensor]
    header: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    folded: int = 0


def tensor_name(path: str, part: str) -> str:
    """The name under which PEFT saves a tensor of a module."""
    return f"{path}.{part}.weight" if part in ("lora_A", "lora_B", "oft_R") else f"{path}.{part}"


def kind_in(modules: Mapping[str, Module]) -> str:
    """The kind of adapter that modules are of."""
    kind = kind_of([f"{path}.{part}" for path, own in modules.items() for part in own.parts])
    assert kind is not None, "no adapter"
    return kind


def settings_of(modules: Mapping[str, Module]) -> Any:
    """PEFT's settings under which its modules have just these shapes and scales; ranks that differ stand as exceptions."""
    kind = kind_in(modules)
    whole = {path: max(own.parts["lokr_w2"].shape) if "lokr_w2" in own.parts else 0 for path, own in modules.items()}
    ranks = {path: rank_of(own.parts) or whole[path] for path, own in modules.items()}
    if kind == "OFT":
        ranks = {path: round((1 + (1 + 8 * own.parts["oft_R"].shape[1]) ** 0.5) / 2) for path, own in modules.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    first = next(iter(modules.values()))
    config = peft_config(kind, rank, first.scale, 0.0, sorted(modules))
    if kind != "OFT":
        alphas = {path: own.scale * ranks[path] for path, own in modules.items()}
        alpha = first.scale * rank
        config.rank_pattern = {path: own for path, own in ranks.items() if own != rank}
        config.alpha_pattern = {path: own for path, own in alphas.items() if own != alpha}
    if kind == "LOKR":
        config.decompose_both = any("lokr_w1_a" in own.parts for own in modules.values())
        config.decompose_factor = _factor_of(modules)
    return config


def _factor_of(modules: Mapping[str, Module]) -> int:
    """The setting by which PEFT's LoKr splits sizes as these modules have them; -1 (nearest to equal) where none does."""
    from peft.tuners.lokr.layer import factorization

    def sides(own: Module) -> tuple[tuple[int, int], tuple[int, int]]:
        one, two = (
            own.parts[name].shape
            if name in own.parts
            else (len(own.parts[f"{name}_a"]), own.parts[f"{name}_b"].shape[1])
            for name in ("lokr_w1", "lokr_w2")
        )
        return (one[0], two[0]), (one[1], two[1])

    found = [side for own in modules.values() for side in sides(own)]
    tried = (-1, *sorted({min(side) for side in found}))
    return next((own for own in tried if all(factorization(a * b, own) == (a, b) for a, b in found)), -1)


def written(family: Family, net: nn.Module, modules: Mapping[str, Module], form: str) -> Written:
    """An adapter in a form. Raises VideotuneError for a form that this kind, or this family, does not have."""
    refuse_form(family, kind_in(modules), form)
    if form == "peft":
        tensors = {
            tensor_name(f"base_model.model.{path}", part): value
            for path, own in modules.items()
            for part, value in own.parts.items()
        }
        settings = {
            key: sorted(value) if isinstance(value, set) else value for key, value in _plain(settings_of(modules))
        }
        return Written(tensors, settings=settings)
    if form == "diffusers":
        tensors = {
            tensor_name(f"transformer.{path}", part): value
            for path, own in modules.items()
            for part, value in own.parts.items()
        }
        same = all(own.scale == 1.0 for own in modules.values()) and len({own.rank for own in modules.values()}) == 1
        config = settings_of(modules)
        kept = {key: getattr(config, key) for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora")}
        head = {f"transformer.{key}": value for key, value in (kept | {"target_modules": sorted(modules)}).items()}
        return Written(tensors, {} if same else {"lora_adapter_metadata": json.dumps(head)})
    named: dict[str, Module] = {}
    for path in modules:
        name, members = native_name(family, net, path, form)
        if name not in named:
            named[name] = modules[path] if len(members) == 1 else joined(net, members, modules)
    return _with_alpha(named, form)


def _plain(config: Any) -> list[tuple[str, Any]]:
    return [(key, getattr(value, "value", value)) for key, value in config.to_dict().items()]


def _with_alpha(named: Mapping[str, Module], form: str) -> Written:
    """Modules by their names in a form whose alpha is a tensor beside the factors; whole factors of LoKr have none."""
    tensors: dict[str, Tensor] = {}
    folded = 0
    for name, own in named.items():
        rank = rank_of(own.parts)
        fold = rank is None and own.scale != 1.0
        folded += fold
        for part, value in own.parts.items():
            word = KOHYA.get(part, part) if form == "kohya" else part
            scaled = value.float() * own.scale if fold and part in ZERO else value
            tensors[tensor_name(name, part).replace(part, word)] = scaled
        if rank is not None and (form == "kohya" or own.scale != 1.0):
            tensors[f"{name}.alpha"] = torch.tensor(own.scale * rank, dtype=torch.float32)
    return Written(tensors, folded=folded)


def refuse_form(family: Family, kind: str, form: str) -> None:
    """Raise VideotuneError where a form cannot hold a kind of adapter, or the family has no such names."""
    if form not in FORMS:
        raise VideotuneError(f"--to {form}: there is no such form of a LoRA file; there are {', '.join(FORMS)}")
    if kind not in FORMS[form]:
        reason = WHY_NOT.get((kind, "comfyui" if form in ("kohya", "original") else form), "no reader takes it there")
        raise VideotuneError(f"--to {form}: it has no place for {kind}: {reason}")
    if form == "original" and form not in family.full_key_maps():
        raise VideotuneError(
            f"--to original: {family.spec.title} has no other names there; its blocks are those of comfyui"
        )


def native_name(family: Family, net: nn.Module, path: str, form: str) -> tuple[str, tuple[str, ...]]:
    """A module's name in a form with the authors' names, and the modules that share it there, in the order of their rows.

    Raises VideotuneError for a module outside the blocks whose name there is not known.
    """
    inside = any(path.startswith(f"{blocks}.") for blocks in family.spec.blocks)
    original = family.full_key_maps().get("original")
    if original is None and not inside:
        raise VideotuneError(f"--to {form}: {path} lies outside the blocks, and no name of it is known there")
    use_original = original is not None and (form == "original" or not inside)
    name = original(f"{path}.weight").removesuffix(".weight") if use_original and original else family.native(path)
    members = places(family, net)[name.replace(".", "_")]
    return (f"lora_unet_{name.replace('.', '_')}" if form == "kohya" else f"diffusion_model.{name}"), members


def joined(net: nn.Module, members: tuple[str, ...], modules: Mapping[str, Module]) -> Module:
    """Modules that are one in a form: exactly the same update; those that have none get rows of zeros.

    Modules that share A, as they do where they were one before, have it once. Others have theirs one below the other,
    (Σr, in), and B on the diagonal, (Σout, Σr). Raises VideotuneError for a kind that cannot be joined.
    """
    mine = [modules[path] for path in members if path in modules]
    if any("lora_A" not in own.parts for own in mine):
        raise VideotuneError(f"{mine[0].name}: the form joins {len(members)} modules, and this kind cannot be joined")
    a = [own.parts["lora_A"] for own in mine]
    if len(mine) == len(members) and all(
        torch.equal(a[0], other) and own.scale == mine[0].scale for own, other in zip(mine, a, strict=True)
    ):
        parts = {"lora_A": a[0], "lora_B": torch.cat([own.parts["lora_B"] for own in mine])}
        return replace(mine[0], paths=members, parts=parts)
    same = len({own.scale for own in mine}) == 1
    blocks = [
        modules[path].parts["lora_B"].float() * (1.0 if same else modules[path].scale)
        if path in modules
        else torch.zeros(linear_size(net, path)[0], 0)
        for path in members
    ]
    parts = {"lora_A": torch.cat([value.float() for value in a]), "lora_B": torch.block_diag(*blocks)}
    return replace(mine[0], paths=members, parts=parts, scale=mine[0].scale if same else 1.0)
