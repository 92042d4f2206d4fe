"""Adapter files of any program: what is in one, checked, and its LoRA under diffusers' names with alpha in B."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.export.formats import digest_of
from videotune.models.model_files import parse_object, read_config, some
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

READS = (
    "diffusers (transformer.), ComfyUI (diffusion_model.), PEFT (base_model.model.), kohya and musubi (lora_unet_), and the "
    "authors' names alone; A and B as lora_A and lora_B, or lora_down and lora_up; alpha as a tensor or in the header"
)
"""The forms of a LoRA file that are read."""

_PARTS = {"lora_down": "lora_A", "lora_up": "lora_B"}
_NAMES = "lora_A|lora_B|lora_down|lora_up|lora_magnitude_vector"
_KEY = re.compile(rf"(.+)\.(?:({_NAMES})(?:\.(?!bias$|weight$)\w+)??(?:\.weight)?|(alpha))")
_PREFIX = re.compile(r"(base_model\.model\.|model\.|diffusion_model\.|transformer\.)+|lora_unet_|lora_transformer_")
_NAME = re.compile(r"[\w.]+")
_MOST = 1000.0
"""alpha / rank beyond which a file is damaged; published ones lie between 1/rank and some 10."""


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A safetensors file's tensors and header; one of our own is held against the digest that its header brings.

    Raises VideotuneError for a file that is missing, damaged or changed, and for integers, NaN or infinite numbers.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except (SafetensorError, OSError) as error:
        raise VideotuneError(
            f"{path} is no LoRA and no embedding: it cannot be read as safetensors ({error})"
        ) from error
    said = facts_in(header, path).get("digest")
    if said is not None and said != digest_of(tensors):
        raise VideotuneError(
            f"{path} is damaged: its tensors are not those that were exported. Copy or export it again"
        )
    for key, value in tensors.items():
        if not value.is_floating_point():
            raise VideotuneError(f"{path}: {key} holds {str(value.dtype).removeprefix('torch.')}, no weights")
        if value.dtype.itemsize == 1:  # with weights of 8 bits nothing can be calculated; bfloat16 holds each of them
            value = tensors[key] = value.bfloat16()
        if not bool(torch.isfinite(value).all()):
            raise VideotuneError(f"{path}: {key} holds NaN or infinite weights")
    return tensors, header


def facts_in(header: Mapping[str, str], path: Path) -> dict[str, Any]:
    """What a file of our own says of itself; {} of any other."""
    return parse_object(header["videotune"], f"{path}: its header's 'videotune'") if "videotune" in header else {}


def refuse(family: Family, path: Path, keys: list[str], why: str) -> VideotuneError:
    """The error for a file that is no LoRA of this model: the keys found, and the forms that are read."""
    found = f"it has the keys {some(sorted(keys))}" if keys else "it has no tensors"
    return VideotuneError(f"{path} is no LoRA of {family.spec.title}: {why}; {found}. Read are: {READS}")


def warn_base_differs(family: Family, facts: Mapping[str, Any], path: Path, echo: Callable[[str], None]) -> None:
    """Tell ``echo`` where a file of ours was trained over other weights than the base model's: the header names them."""
    part = family.spec.part_of(facts.get("expert"))
    base = facts.get("base")
    made = base.get("fingerprints", {}).get(part) if isinstance(base, dict) else None
    if made is not None and made != family.fingerprints().get(part):
        echo(f"warning: {path.name} was trained on {base.get('name')}, whose {part} is not this base model's")  # type: ignore[union-attr]


def lora_of(
    family: Family,
    net: nn.Module,
    path: Path,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str],
    echo: Callable[[str], None],
) -> dict[str, Tensor]:
    """The tensors of a LoRA or DoRA file as ``load_lora_weights`` takes it: diffusers' names, and B times alpha / rank.

    ``echo`` is told where no alpha stands anywhere, and the rank is taken for it. Raises VideotuneError for what
    cannot be read whole.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for key, value in tensors.items():
        found = _KEY.fullmatch(key)
        part = "" if found is None else _PARTS.get(found[2], found[2]) or found[3]
        if found is None:
            rest[key] = value
        elif part in modules.setdefault(found[1], {}):
            raise refuse(family, path, [key], "it holds several adapters")
        else:
            modules[found[1]][part] = value
    modules = {name: parts for name, parts in modules.items() if set(parts) != {"alpha"}}
    if not any(bool(parts["lora_B"].any()) for parts in modules.values() if "lora_B" in parts):
        raise refuse(family, path, list(tensors), "it changes none of its modules")
    settings = _settings(header, path)
    alphas = any("alpha" in parts for parts in modules.values()) or "lora_alpha" in (settings or {})
    if not alphas and "videotune" not in header:
        echo(f"note: {path.name} does not say its alpha: the rank is taken for it, which is a scale of 1")
    table = _places(family, net)
    places = {name: table[_bare(name)] for name in modules if _bare(name) in table}
    known = len(places) == len(modules) and not rest
    state: dict[str, Tensor] = {}
    for name, parts in modules.items():
        paths = places.get(name, [name])
        scale = _scale(parts, settings, paths[0], f"{path}: {name}")
        parts["lora_B"] = parts["lora_B"].float() * scale if scale != 1.0 else parts["lora_B"]
        laid = _laid(net, parts, paths, path) if known else _kept(name, parts)
        if not state.keys().isdisjoint(laid) or (not known and "lora_magnitude_vector" in parts):
            raise refuse(family, path, [name], "it names a module twice, or in a way that is not read")
        state |= laid
    return state if known else _by_diffusers(family, net, path, state | rest, list(tensors))


def _places(family: Family, net: nn.Module) -> dict[str, list[str]]:
    """The modules of each name that any form of file has, dots or none; several where a form lays them into one."""
    original = family.full_key_maps().get("original", lambda name: name)
    rows = [path for _, paths in family.spec.fused.get("comfyui", ()) for path in paths]
    found: dict[str, list[str]] = {}
    for path, module in net.named_modules():
        if hasattr(module, "in_features"):
            for name in {path, family.native(path), original(f"{path}.weight").removesuffix(".weight")}:
                found.setdefault(name.replace(".", "_"), []).append(path)
    order = {path: i for i, path in enumerate(rows)}
    return {
        name: sorted(paths, key=lambda path: next((i for own, i in order.items() if path.endswith(f".{own}")), 0))
        for name, paths in found.items()
    }


def _bare(name: str) -> str:
    """A module's name in a file without the form's prefix, dots as underscores: so kohya and musubi write them."""
    found = _PREFIX.match(name)
    return name[found.end() if found else 0 :].replace(".", "_")


def _scale(parts: Mapping[str, Tensor], settings: Mapping[str, Any] | None, place: str, where: str) -> float:
    """alpha / rank of a module; VideotuneError where A and B are no pair, or alpha is none."""
    a, b = parts.get("lora_A"), parts.get("lora_B")
    if a is None or b is None or a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        raise VideotuneError(f"{where}: its A and B are no pair of one rank: the file is damaged or incomplete")
    rank, own, told = a.shape[0], parts.get("alpha"), _told(settings, place, where)
    if own is not None and own.numel() != 1:
        raise VideotuneError(f"{where}: its alpha is no number")
    root = bool(settings) and settings.get("use_rslora") is True  # type: ignore[union-attr]
    scale = 1.0 if told is None else told / (math.sqrt(rank) if root else rank)
    if own is not None:
        if told is not None and not math.isclose(float(own) / rank, scale, rel_tol=1e-3):
            raise VideotuneError(f"{where}: its tensor says alpha {float(own):g} and its header {told:g}: which?")
        scale = float(own) / rank
    if not 0 < scale <= _MOST:
        raise VideotuneError(f"{where}: alpha {scale * rank:g} at rank {rank} is no scale: the file is damaged")
    return scale


def _settings(header: Mapping[str, str], path: Path) -> dict[str, Any] | None:
    """PEFT's settings of a LoRA, wherever a program puts them; None where there are none.

    diffusers has them in the header, finetrainers under another key, PEFT in a file beside the weights. Alpha alone is used:
    modules and ranks are those of the tensors.
    """
    beside = path.with_name("adapter_config.json")
    for key in ("lora_adapter_metadata", "lora_config"):
        if key in header:
            found = parse_object(header[key], f"{path}: its header's {key!r}")
            return {name.removeprefix("transformer."): value for name, value in found.items()}
    return read_config(beside) if path.stem == "adapter_model" and beside.is_file() else None


def _told(settings: Mapping[str, Any] | None, place: str, where: str) -> float | None:
    """The alpha that PEFT's settings say of a module, by exact names alone: a pattern may never come to an end."""
    if settings is None:
        return None
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(_NAME.fullmatch(name) for name in patterns):
        raise VideotuneError(
            f"{where}: alpha_pattern must give modules by their exact names, not {str(patterns)[:60]!r}"
        )
    own = [value for name, value in patterns.items() if f".{place}".endswith(f".{name}")]
    alpha = own[0] if own else settings.get("lora_alpha")
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float)):
        raise VideotuneError(f"{where}: lora_alpha is {str(alpha)[:40]!r}, no number")
    return None if alpha is None else float(alpha)


def _laid(net: nn.Module, parts: Mapping[str, Tensor], paths: list[str], path: Path) -> dict[str, Tensor]:
    """A module's tensors under diffusers' names; of one that is several modules there, B's rows dealt out."""
    held: list[Any] = [net.get_submodule(place) for place in paths]
    rows = [module.out_features for module in held]
    if parts["lora_A"].shape[1:] != (held[0].in_features,) or parts["lora_B"].shape[0] != sum(rows):
        raise VideotuneError(f"{path} was made for another base: {paths[0]} differs in size")
    magnitudes = parts["lora_magnitude_vector"].split(rows) if "lora_magnitude_vector" in parts else []
    state: dict[str, Tensor] = {}
    for i, (place, b) in enumerate(zip(paths, parts["lora_B"].split(rows), strict=True)):
        state |= _kept(f"transformer.{place}", {"lora_A": parts["lora_A"].clone(), "lora_B": b.contiguous()})
        if magnitudes:
            state[f"transformer.{place}.lora_magnitude_vector"] = magnitudes[i].contiguous()
    return state


def _kept(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A and B as PEFT names them."""
    return {f"{name}.{part}.weight": parts[part] for part in ("lora_A", "lora_B")}


def _by_diffusers(
    family: Family, net: nn.Module, path: Path, state: dict[str, Tensor], keys: list[str]
) -> dict[str, Tensor]:
    """What diffusers' own converters make of names that are not in our table, such as those of whole biases."""
    there, odd = dict(net.named_modules()), refuse(family, path, keys, "it has modules or tensors that are not read")
    if any("alpha" in key or "dora_scale" in key or key.startswith("text_encoder") for key in state):
        raise odd
    try:
        found: dict[str, Tensor] = family.pipeline_class().lora_state_dict(state)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # each converter has its way to say no
        raise odd from error
    for key in found:
        place = key.removeprefix("transformer.").rpartition(".lora_")[0]
        if not place or place not in there:
            raise odd
    return found
