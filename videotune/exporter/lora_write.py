"""Convert an adapter's modules to any form of file; alpha is kept if the form has it."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import (
    ZERO,
    by_module,
    kind_of,
    peft_config,
    side_of,
)
from videotune.errors import VideotuneError
from videotune.exporter.adapter_modules import (
    AdapterModule,
    linear_shape,
    pipeline_name,
    tensor_name,
)
from videotune.exporter.formats import (
    PEFT_CONFIG_KEY,
    UNSUPPORTED,
    check_finite,
    has_no_effect,
    refuse_format,
    refuse_overflow,
)
from videotune.exporter.lora_target import FORM_KINDS, refuse_form
from videotune.exporter.read_scale import alpha_rank, paths_by_name
from videotune.models.base import DiffusersModel

PREFIXES = {"diffusers": "transformer.", "peft": "base_model.model."}
"""The prefix of module names in the forms that use diffusers' names."""

KOHYA_NAMES = {"lora_A": "lora_down", "lora_B": "lora_up"}

DIFFUSERS_METADATA = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
    "target_modules",
)
"""PEFT's settings that diffusers reads from a file's header."""

Modules = Mapping[str, AdapterModule]
"""An adapter by its paths in diffusers."""


@dataclass(frozen=True)
class WrittenLora:
    """An adapter in a form, ready to be saved."""

    tensors: dict[str, Tensor]

    header: dict[str, str] = field(default_factory=dict)

    settings: dict[str, Any] | None = None
    """PEFT's settings, which are saved in a file next to the tensors."""

    folded: int = 0
    """Modules whose scale is multiplied into a factor, because the form cannot store
    it.
    """


def kind_of_modules(modules: Modules) -> str:
    """Return the kind of adapter that the modules belong to."""
    names = []
    for path, module in modules.items():
        names += [f"{path}.{part}" for part in module.parts]
    kind = kind_of(names)
    assert kind is not None, "no adapter"
    return kind


def peft_settings(modules: Modules) -> Any:
    """Return PEFT's settings for modules of exactly these shapes and scales.

    The most common rank is the default; other ranks and alphas are exceptions by
    module.
    """
    kind = kind_of_modules(modules)
    first_module = next(iter(modules.values()))
    if kind == "OFT":
        block_size = side_of(first_module.parts["oft_R"].shape[1])
        return peft_config(kind, block_size, first_module.scale, 0.0, sorted(modules))

    ranks = {path: _peft_rank(module) for path, module in modules.items()}
    default_rank = Counter(ranks.values()).most_common(1)[0][0]
    default_alpha = first_module.scale * default_rank
    alphas = {path: module.scale * ranks[path] for path, module in modules.items()}

    config = peft_config(kind, default_rank, first_module.scale, 0.0, sorted(modules))
    config.rank_pattern = {
        path: rank for path, rank in ranks.items() if rank != default_rank
    }
    config.alpha_pattern = {
        path: alpha for path, alpha in alphas.items() if alpha != default_alpha
    }
    if kind == "LOKR":
        config.decompose_both = any(
            "lokr_w1_a" in module.parts for module in modules.values()
        )
        config.decompose_factor = _lokr_factor(modules)
    return config


def _peft_rank(module: AdapterModule) -> int:
    """Return the rank that PEFT needs; for LoKr with full factors one that keeps them
    full.
    """
    rank = alpha_rank(module.parts)
    if rank:
        return rank
    return max(module.parts["lokr_w2"].shape)


def _lokr_factor(modules: Modules) -> int:
    """Return LyCORIS's factor: the side of square W1 factors, or -1 (nearest to a
    square).
    """
    sides: set[int] = set()
    for module in modules.values():
        if "lokr_w1" not in module.parts:
            return -1
        sides.update(module.parts["lokr_w1"].shape)
    return sides.pop() if len(sides) == 1 else -1


def peft_settings_json(modules: Modules) -> dict[str, Any]:
    """Return ``peft_settings`` as JSON values."""
    settings = {}
    for key, value in peft_settings(modules).to_dict().items():
        if isinstance(value, set):
            settings[key] = sorted(value)
        else:
            settings[key] = getattr(value, "value", value)  # enums
    return settings


def write_form(
    family: DiffusersModel, net: nn.Module, modules: Modules, form: str
) -> WrittenLora:
    """Return an adapter in a form.

    Raises:
        VideotuneError: for a form that this kind or this family does not have.
    """
    kind = kind_of_modules(modules)
    refuse_form(form)
    if kind not in FORM_KINDS[form]:
        # The authors' names and kohya's have the limits of ComfyUI.
        reason_form = form if form in PREFIXES else "comfyui"
        reason = UNSUPPORTED.get((kind, reason_form), "nothing reads it there")
        if kind == "DORA" and reason_form == "comfyui":
            reason = (
                "ComfyUI divides by the norm of the base's weights; `videotune export RUN`"
                " has them, and writes it"
            )
        raise VideotuneError(
            f"--to {form}: {kind} is not written in this form: {reason}"
        )

    if form not in PREFIXES:
        return _with_alpha_tensors(_rename_and_fuse(family, net, modules, form), form)

    folded = 0
    if any(map(family.spec.is_connector, modules)):
        if form == "peft":
            raise VideotuneError(
                "--to peft: a file of PEFT is for one network, and this one changes the transformer"
                " and the text connectors. Use diffusers or comfyui"
            )
        modules, folded = _scales_folded(modules)
    tensors = {}
    for path, module in modules.items():
        name = f"{PREFIXES[form]}{path}"
        if form == "diffusers":
            name = pipeline_name(family, path)
        for part, value in module.parts.items():
            tensors[tensor_name(name, part)] = value
    settings = peft_settings_json(modules)
    if form == "peft":
        return WrittenLora(tensors, settings=settings)

    if all(module.scale == 1.0 for module in modules.values()):
        return WrittenLora(tensors, folded=folded)
    metadata = {f"transformer.{key}": settings[key] for key in DIFFUSERS_METADATA}
    return WrittenLora(tensors, {"lora_adapter_metadata": json.dumps(metadata)})


def _scales_folded(modules: Modules) -> tuple[dict[str, AdapterModule], int]:
    """Return modules with their scale multiplied into B, and how many had one.

    The header has one alpha, of the transformer.
    """
    result = {}
    folded = 0
    for path, module in modules.items():
        parts = dict(module.parts)
        if module.scale != 1.0:
            folded += 1
            for part in ZERO & parts.keys():
                parts[part] = parts[part].float() * module.scale
        result[path] = replace(module, parts=parts, scale=1.0)
    return result, folded


def _rename_and_fuse(
    family: DiffusersModel, net: nn.Module, modules: Modules, form: str
) -> dict[str, AdapterModule]:
    """Return modules by the authors' names, fused if the form does so."""
    named: dict[str, AdapterModule] = {}
    for path, module in modules.items():
        name, members = form_name(family, net, path, form)
        if name in named:
            continue
        named[name] = module if len(members) == 1 else _fuse(net, members, modules)

    # Readers recognize a fused form by its fused weights, so the first kind of them
    # gets at least one update, which is zero.
    fused_groups = family.spec.fused_modules.get("comfyui", ())
    for blocks, suffixes in fused_groups[:1]:
        name, members = form_name(family, net, f"{blocks}.0.{suffixes[0]}", form)
        has_fused = any(
            path.startswith(f"{blocks}.") and path.endswith(tuple(suffixes))
            for path in modules
        )
        if not has_fused:
            parts = _zero_factors(net, members[0], rank=1)
            parts["lora_B"] = parts["lora_B"].repeat(len(members), 1)
            named[name] = AdapterModule(name, members, parts)
    return named


def _zero_factors(net: nn.Module, path: str, rank: int) -> dict[str, Tensor]:
    rows, columns = linear_shape(net, path)
    return {"lora_A": torch.zeros(rank, columns), "lora_B": torch.zeros(rows, rank)}


def _with_alpha_tensors(named: Modules, form: str) -> WrittenLora:
    """Return modules in a form whose alpha is a tensor next to the factors.

    Full factors of LoKr have no alpha there, so their scale is multiplied in.
    """
    tensors: dict[str, Tensor] = {}
    folded = 0
    for name, module in named.items():
        rank = alpha_rank(module.parts)
        is_folded = rank is None and module.scale != 1.0
        folded += is_folded

        for part, value in module.parts.items():
            key = tensor_name(name, part)
            if form == "kohya":
                key = key.replace(part, KOHYA_NAMES.get(part, part))
            if is_folded and part in ZERO:
                value = value.float() * module.scale
            tensors[key] = value

        if rank is not None and (form == "kohya" or module.scale != 1.0):
            tensors[f"{name}.alpha"] = torch.tensor(module.scale * rank)
    return WrittenLora(tensors, folded=folded)


def form_name(
    family: DiffusersModel, net: nn.Module, path: str, form: str
) -> tuple[str, tuple[str, ...]]:
    """Return a module's name in a form with the authors' names.

    Returns:
        The name, and the paths of the modules that share it, in the order of their
        rows.

    Raises:
        VideotuneError: if the module has no known name in the form.
    """
    original = family.original(f"{path}.weight")
    if original is None and form == "original":
        raise VideotuneError(
            f"--to original: {family.spec.title} has no other names there; use comfyui"
        )
    is_in_block = path.startswith(
        tuple(f"{blocks}." for blocks in family.spec.block_lists)
    )
    if original is None and not is_in_block:
        raise VideotuneError(
            f"--to {form}: {path} is outside the blocks and has no known name in this form"
        )

    if original is not None and (form == "original" or not is_in_block):
        name = original.removesuffix(".weight")
    else:
        name = family.to_comfyui_name(path)
    underscored_name = name.replace(".", "_")
    members = paths_by_name(family, net)[underscored_name]
    if form == "kohya":
        return f"lora_unet_{underscored_name}", members
    return f"diffusion_model.{name}", members


def _fuse(net: nn.Module, members: tuple[str, ...], modules: Modules) -> AdapterModule:
    """Return one module for several that a form fuses, with exactly the same update.

    Modules that share A, because they were fused before, get it once. Otherwise their A
    are stacked (Σr, in), and their B are on the diagonal (Σout, Σr). Members without an
    update get rows of zeros.

    Raises:
        VideotuneError: for a kind that cannot be fused.
    """
    updates = [modules[path] for path in members if path in modules]
    first = updates[0]
    if any("lora_A" not in update.parts for update in updates):
        raise VideotuneError(
            f"{first.name}: the form joins {len(members)} modules,"
            " and this kind of adapter cannot be joined"
        )

    scales = {update.scale for update in updates}
    first_a = first.parts["lora_A"]
    is_complete = len(updates) == len(members)
    if is_complete and len(scales) == 1:
        shares_a = all(
            torch.equal(first_a, update.parts["lora_A"]) for update in updates
        )
        if shares_a:
            b = torch.cat([update.parts["lora_B"] for update in updates])
            return replace(first, paths=members, parts={"lora_A": first_a, "lora_B": b})

    # Different scales are multiplied into B.
    scale = first.scale if len(scales) == 1 else 1.0
    diagonal = []
    for path in members:
        if path in modules:
            update = modules[path]
            diagonal.append(update.parts["lora_B"].float() * (update.scale / scale))
        else:
            diagonal.append(_zero_factors(net, path, rank=0)["lora_B"])
    parts = {
        "lora_A": torch.cat([update.parts["lora_A"].float() for update in updates]),
        "lora_B": torch.block_diag(*diagonal),
    }
    return replace(first, paths=members, parts=parts, scale=scale)


def bake_adapter(
    family: DiffusersModel, format: str, state: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Return a run's adapter under a format's names, with the scale multiplied into it.

    Raises:
        VideotuneError: for an unknown format, and for an adapter that is NaN or has no
            effect.
    """
    kind = kind_of(state)
    assert kind is not None, "no adapter"
    refuse_format(family, kind, format)
    check_finite("adapter", state)
    if has_no_effect(state):
        raise VideotuneError(
            "the adapter is zero, so it changes nothing: not exported"
            " (did the run train any step?)"
        )

    modules = scaled_modules(state, scale)
    tensors = write_form(family, family.skeleton(), modules, format).tensors
    return {
        name.removeprefix(PREFIXES["peft"]): value.contiguous()
        for name, value in tensors.items()
    }


def round_adapter(
    state: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a run's adapter times its scale, rounded to ``dtype``, in float32.

    Raises:
        VideotuneError: for numbers that the dtype cannot hold.
    """
    exact = {}
    for path, module in scaled_modules(state, scale).items():
        for part, value in module.parts.items():
            exact[tensor_name(path, part)] = value

    rounded = {name: value.to(dtype).float() for name, value in exact.items()}
    refuse_overflow(exact, rounded, dtype)
    return rounded


def scaled_modules(
    state: Mapping[str, Tensor], scale: float
) -> dict[str, AdapterModule]:
    """Return the modules of a run's adapter in float32, with the scale multiplied into
    them.
    """
    modules = {}
    for path, tensors in by_module(state).items():
        parts = {}
        for part, tensor in tensors.items():
            is_scaled = part in ZERO and part != "oft_R"
            parts[part] = tensor.detach().cpu().float() * (scale if is_scaled else 1.0)
        modules[path] = AdapterModule(path, (path,), parts)
    return modules


def peft_header(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the header entry with PEFT's settings; {} for kinds that diffusers reads."""
    if kind_of(state) in ("LORA", "DORA"):
        return {}
    settings = peft_settings_json(scaled_modules(state, 1.0))
    return {PEFT_CONFIG_KEY: json.dumps(settings)}
