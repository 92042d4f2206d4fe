"""An adapter's modules under the names and in the layout of any form of file, alpha kept wherever the form can hold it."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import ZERO, by_module, kind_of, peft_config, side_of
from videotune.errors import VideotuneError
from videotune.exporter.adapter_modules import Module, linear_size, places, rank_of, tensor_name
from videotune.exporter.formats import (
    CONFIG,
    WHY_NOT,
    changes_nothing,
    check_finite,
    refuse_format,
    refuse_overflow,
)
from videotune.models.base import DiffusersModel

FORMS = {
    "diffusers": ("LORA", "DORA"), "comfyui": ("LORA", "LOHA", "LOKR"), "kohya": ("LORA", "LOHA", "LOKR"),
    "original": ("LORA", "LOHA", "LOKR"), "peft": ("LORA", "DORA", "LOHA", "LOKR", "OFT"),
}  # fmt: skip
"""The forms that are written, and the kinds of adapter that each can hold."""

PREFIXES = {"diffusers": "transformer.", "peft": "base_model.model."}
KOHYA = {"lora_A": "lora_down", "lora_B": "lora_up"}
Modules = Mapping[str, Module]
"""An adapter by its paths in diffusers."""


@dataclass(frozen=True)
class WrittenLora:
    """Tensors by their names in a form, the keys of its header, and of PEFT the settings that stand beside the file.

    ``folded``: how many modules have their scale multiplied into a factor, since the form has no place for it.
    """

    tensors: dict[str, Tensor]
    header: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    folded: int = 0


def kind_in(modules: Modules) -> str:
    """The kind of adapter that modules are of."""
    kind = kind_of([f"{path}.{part}" for path, own in modules.items() for part in own.parts])
    assert kind is not None, "no adapter"
    return kind


def settings_of(modules: Modules) -> Any:
    """PEFT's settings under which its modules have just these shapes and scales; ranks that differ stand as exceptions."""
    kind = kind_in(modules)
    first = next(iter(modules.values()))
    none = torch.zeros(0)
    ranks = {
        path: rank_of(own.parts) or max(own.parts.get("lokr_w2", none).shape)
        for path, own in modules.items()
    }
    rank = (
        side_of(first.parts["oft_R"].shape[1])
        if kind == "OFT"
        else Counter(ranks.values()).most_common(1)[0][0]
    )
    config = peft_config(kind, rank, first.scale, 0.0, sorted(modules))
    if kind == "OFT":
        return config
    config.rank_pattern = {path: own for path, own in ranks.items() if own != rank}
    alphas = {path: own.scale * ranks[path] for path, own in modules.items()}
    config.alpha_pattern = {
        path: own for path, own in alphas.items() if own != first.scale * rank
    }
    if kind == "LOKR":
        sides = {
            side
            for own in modules.values()
            for side in own.parts.get("lokr_w1", torch.zeros(1, 2)).shape
        }
        config.decompose_both = any("lokr_w1_a" in own.parts for own in modules.values())
        config.decompose_factor = (
            sides.pop() if len(sides) == 1 else -1
        )  # as LyCORIS's factor, or nearest to equal
    return config


def plain_settings(modules: Modules) -> dict[str, Any]:
    """``settings_of`` as JSON has them."""
    settings = settings_of(modules).to_dict().items()
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in settings
    }


def written(family: DiffusersModel, net: nn.Module, modules: Modules, form: str) -> WrittenLora:
    """An adapter in a form. Raises VideotuneError for a form that this kind, or this family, does not have."""
    kind = kind_in(modules)
    if kind not in FORMS.get(form, ()):
        reason = WHY_NOT.get(
            (kind, form if form in (*PREFIXES, "comfyui") else "comfyui"),
            "nothing reads it there",
        )
        raise VideotuneError(
            f"--to {form}: "
            + (f"{kind} is not written so: {reason}" if form in FORMS else "unknown")
        )
    if form not in PREFIXES:
        return _with_alpha(_named(family, net, modules, form), form)
    names = {path: f"{PREFIXES[form]}{path}" for path in modules}
    tensors = {
        tensor_name(names[path], part): x
        for path, own in modules.items()
        for part, x in own.parts.items()
    }
    settings = plain_settings(modules)
    if form == "peft":
        return WrittenLora(tensors, settings=settings)
    kept = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "target_modules")
    head = json.dumps({f"transformer.{key}": settings[key] for key in kept})
    plain = all(own.scale == 1.0 for own in modules.values())
    return WrittenLora(tensors, {} if plain else {"lora_adapter_metadata": head})


def _named(
    family: DiffusersModel, net: nn.Module, modules: Modules, form: str
) -> dict[str, Module]:
    """Modules by their names in a form that has the authors', joined where it joins them.

    Readers know a form that joins by its joined weights: without one of the first kind an update of nothing stands there.
    """
    named: dict[str, Module] = {}
    for path in modules:
        name, members = _native(family, net, path, form)
        if name not in named:
            named[name] = modules[path] if len(members) == 1 else _joined(net, members, modules)
    for blocks, paths in family.spec.fused_modules.get("comfyui", ())[:1]:
        name, members = _native(family, net, f"{blocks}.0.{paths[0]}", form)
        if not any(
            path.startswith(f"{blocks}.") and path.endswith(tuple(paths)) for path in modules
        ):
            nothing = _zeros(net, members[0], 1)
            named[name] = Module(
                name, members, nothing | {"lora_B": nothing["lora_B"].repeat(len(members), 1)}
            )
    return named


def _zeros(net: nn.Module, path: str, rank: int) -> dict[str, Tensor]:
    rows, columns = linear_size(net, path)
    return {"lora_A": torch.zeros(rank, columns), "lora_B": torch.zeros(rows, rank)}


def _with_alpha(named: Modules, form: str) -> WrittenLora:
    """Modules by their names in a form whose alpha is a tensor beside the factors; whole factors of LoKr have none."""
    tensors: dict[str, Tensor] = {}
    folded = 0
    for name, own in named.items():
        rank = rank_of(own.parts)
        fold = rank is None and own.scale != 1.0
        folded += fold
        for part, value in own.parts.items():
            word = tensor_name(name, part).replace(
                part, KOHYA.get(part, part) if form == "kohya" else part
            )
            tensors[word] = value.float() * own.scale if fold and part in ZERO else value
        if rank is not None and (form == "kohya" or own.scale != 1.0):
            tensors[f"{name}.alpha"] = torch.tensor(own.scale * rank, dtype=torch.float32)
    return WrittenLora(tensors, folded=folded)


def _native(
    family: DiffusersModel, net: nn.Module, path: str, form: str
) -> tuple[str, tuple[str, ...]]:
    """A module's name in a form with the authors' names, and the modules that share it there, in the order of their rows.

    Raises VideotuneError for a module outside the blocks whose name there is not known, and where no such names are.
    """
    inside = path.startswith(tuple(f"{own}." for own in family.spec.blocks))
    original = family.original(f"{path}.weight")
    if original is None and form == "original":
        raise VideotuneError(
            f"--to original: {family.spec.title} has no other names there: take comfyui"
        )
    if original is None and not inside:
        raise VideotuneError(
            f"--to {form}: {path} lies outside the blocks, and no name of it is known there"
        )
    by_authors = original is not None and (form == "original" or not inside)
    name = str(original).removesuffix(".weight") if by_authors else family.to_comfyui_name(path)
    flat = name.replace(".", "_")
    return f"lora_unet_{flat}" if form == "kohya" else f"diffusion_model.{name}", places(
        family, net
    )[flat]


def _joined(net: nn.Module, members: tuple[str, ...], modules: Modules) -> Module:
    """Modules that are one in a form: exactly the same update; those that have none get rows of zeros.

    Modules that share A, as they do where they were one before, have it once. Others have theirs one below the other,
    (Σr, in), and B on the diagonal, (Σout, Σr). Raises VideotuneError for a kind that cannot be joined.
    """
    mine = [modules[path] for path in members if path in modules]
    first = mine[0]
    scales = {own.scale for own in mine}
    if any("lora_A" not in own.parts for own in mine):
        raise VideotuneError(
            f"{first.name}: the form joins {len(members)} modules, and this kind cannot be joined"
        )
    a = [own.parts["lora_A"] for own in mine]
    if (
        len(mine) == len(members)
        and len(scales) == 1
        and all(torch.equal(a[0], other) for other in a)
    ):
        b = torch.cat([own.parts["lora_B"] for own in mine])
        return replace(first, paths=members, parts={"lora_A": a[0], "lora_B": b})
    scale = first.scale if len(scales) == 1 else 1.0
    there = {
        path: of.parts["lora_B"].float() * (of.scale / scale)
        for path, of in modules.items()
        if path in members
    }
    factors = [
        there[path] if path in there else _zeros(net, path, 0)["lora_B"] for path in members
    ]
    parts = {
        "lora_A": torch.cat([value.float() for value in a]),
        "lora_B": torch.block_diag(*factors),
    }
    return replace(first, paths=members, parts=parts, scale=scale)


def baked(
    family: DiffusersModel, format: str, state: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """A run's adapter under the format's names, the scale multiplied into it.

    Raises VideotuneError for a format that there is not, and for an adapter that is NaN or does nothing.
    """
    kind = kind_of(state)
    assert kind is not None, "no adapter"
    refuse_format(family, kind, format)
    check_finite("adapter", state)
    if changes_nothing(state):
        raise VideotuneError(
            "the adapter is zero, so it changes nothing: not exported (did the run train any step?)"
        )
    tensors = written(family, family.skeleton(), trained(state, scale), format).tensors
    return {
        name.removeprefix(PREFIXES["peft"]): value.contiguous()
        for name, value in tensors.items()
    }


def rounded(state: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """A run's adapter with the scale multiplied into it, as ``dtype`` holds it, in float32.

    Raises VideotuneError for numbers that the dtype cannot hold.
    """
    modules = trained(state, scale)
    own = {
        tensor_name(path, part): x
        for path, module in modules.items()
        for part, x in module.parts.items()
    }
    out = {name: value.to(dtype).float() for name, value in own.items()}
    refuse_overflow(own, out, dtype)
    return out


def trained(state: Mapping[str, Tensor], scale: float) -> dict[str, Module]:
    """The modules of a run's adapter in float32, the scale multiplied into them."""
    scales = {part: scale for part in ZERO if part != "oft_R"}
    found = {}
    for path, parts in by_module(state).items():
        own = {
            part: x.detach().cpu().float() * scales.get(part, 1.0) for part, x in parts.items()
        }
        found[path] = Module(path, (path,), own)
    return found


def head_of(state: Mapping[str, Tensor]) -> dict[str, str]:
    """PEFT's settings in the file's head, of a kind that diffusers does not read; nothing of others."""
    known = kind_of(state) in ("LORA", "DORA")
    return {} if known else {CONFIG: json.dumps(plain_settings(trained(state, 1.0)))}
