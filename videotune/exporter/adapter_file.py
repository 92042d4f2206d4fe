"""Adapter files of any program: what is in one, checked, and its LoRA under diffusers' names with alpha in B."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from videotune.errors import VideotuneError
from videotune.exporter.formats import CONFIG, digest_of
from videotune.models.model_files import note, parse_object, read_config, some
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


class AdapterFile:
    """A safetensors file's ``tensors`` and ``header``; one of our own is held against the digest that its header brings.

    Raises VideotuneError for a file that is missing, damaged or changed, and for integers, NaN or infinite numbers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, "pt") as file:
                self.header: dict[str, str] = file.metadata() or {}
                self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
        except (SafetensorError, OSError) as error:
            why = f"it cannot be read as safetensors ({error})"
            raise VideotuneError(f"{path} is no LoRA and no embedding: {why}") from error
        digest = self.facts.get("digest")
        if digest is not None and digest != digest_of(self.tensors):
            raise VideotuneError(f"{path} is damaged: its tensors are not those of its export. Copy or export it again")
        for key, value in self.tensors.items():
            if not value.is_floating_point():
                raise VideotuneError(f"{path}: {key} holds {str(value.dtype).removeprefix('torch.')}, no weights")
            if value.dtype.itemsize == 1:  # nothing can be calculated in 8 bits; bfloat16 holds each such number
                value = self.tensors[key] = value.bfloat16()
            if not bool(torch.isfinite(value).all()):
                raise VideotuneError(f"{path}: {key} holds NaN or infinite weights")

    def object_in(self, key: str) -> dict[str, Any]:
        """The JSON object under a key of the header; {} where there is none."""
        return parse_object(self.header[key], f"{self.path}: its header's {key!r}") if key in self.header else {}

    @property
    def facts(self) -> dict[str, Any]:
        """What a file of our own says of itself; {} of any other."""
        return self.object_in("videotune")

    @cached_property
    def peft_settings(self) -> dict[str, Any]:
        """PEFT's settings of a kind that diffusers does not read; {} where the header has none."""
        if not self.header.get(CONFIG):
            return {}
        settings, where = self.object_in(CONFIG), f"{self.path}: its header's {CONFIG!r}"
        for key, value in settings.items():
            exact = isinstance(value, list) and all(isinstance(each, str) and _NAME.fullmatch(each) for each in value)
            fine = (
                exact if key == "target_modules" else key == "peft_type" or isinstance(value, bool | int | float | None)
            )
            if not fine:  # patterns are PEFT's regular expressions, which need not come to an end
                raise VideotuneError(f"{where} says {key} {str(value)[:60]!r}; read are exact names alone")
        if settings.get("peft_type") not in ("LOHA", "LOKR", "OFT") or not settings.get("target_modules"):
            raise VideotuneError(f"{where} is of no LOHA, LOKR or OFT on modules by their names")
        return settings

    @cached_property
    def lora_settings(self) -> dict[str, Any]:
        """PEFT's settings of a LoRA, wherever a program puts them; {} where there are none.

        diffusers has them in the header, finetrainers under another key, PEFT in a file beside the weights. Alpha alone is
        used: modules and ranks are those of the tensors.
        """
        for key in ("lora_adapter_metadata", "lora_config"):
            if key in self.header:
                return {name.removeprefix("transformer."): value for name, value in self.object_in(key).items()}
        beside = self.path.with_name("adapter_config.json")
        return read_config(beside) if self.path.stem == "adapter_model" and beside.is_file() else {}

    def alpha(self, place: str) -> float | None:
        """The alpha that PEFT's settings say of a module, by exact names alone: a pattern may never come to an end."""
        patterns, where = self.lora_settings.get("alpha_pattern") or {}, f"{self.path}: {place}"
        if not isinstance(patterns, dict) or not all(_NAME.fullmatch(name) for name in patterns):
            why = f"alpha_pattern must give modules by their exact names, not {str(patterns)[:60]!r}"
            raise VideotuneError(f"{where}: {why}")
        own = [value for name, value in patterns.items() if f".{place}".endswith(f".{name}")]
        alpha = own[0] if own else self.lora_settings.get("lora_alpha")
        if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float)):
            raise VideotuneError(f"{where}: lora_alpha is {str(alpha)[:40]!r}, no number")
        return None if alpha is None else float(alpha)


def refuse(family: Family, path: Path, keys: list[str], why: str) -> VideotuneError:
    """The error for a file that is no LoRA of this model: the keys found, and the forms that are read."""
    found = f"it has the keys {some(sorted(keys))}" if keys else "it has no tensors"
    return VideotuneError(f"{path} is no LoRA of {family.spec.title}: {why}; {found}. Read are: {READS}")


def warn_of_other_base(family: Family, file: AdapterFile) -> None:
    """Print a warning where a file of ours was trained over other weights than the base model's: the header names them."""
    facts = file.facts
    part, base = family.spec.part_of(facts.get("expert")), facts.get("base")
    made = base.get("fingerprints", {}).get(part) if isinstance(base, dict) else None
    if made is not None and made != family.fingerprints().get(part):
        name = base.get("name")  # type: ignore[union-attr]
        note(f"warning: {file.path.name} was trained on {name}, whose {part} is not this base model's")


def lora_of(family: Family, net: nn.Module, file: AdapterFile) -> dict[str, Tensor]:
    """The tensors of a LoRA or DoRA file as ``load_lora_weights`` takes it: diffusers' names, and B times alpha / rank.

    Prints a note where no alpha stands anywhere, and the rank is taken for it. Raises VideotuneError for what
    cannot be read whole.
    """
    path, keys = file.path, list(file.tensors)
    modules: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for key, value in file.tensors.items():
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
        raise refuse(family, path, keys, "it changes none of its modules")
    alphas = any("alpha" in parts for parts in modules.values()) or "lora_alpha" in file.lora_settings
    if not alphas and "videotune" not in file.header:
        note(f"note: {path.name} does not say its alpha: the rank is taken for it, which is a scale of 1")
    table = _places(family, net)
    places = {name: table[_bare(name)] for name in modules if _bare(name) in table}
    known = len(places) == len(modules) and not rest
    state: dict[str, Tensor] = {}
    for name, parts in modules.items():
        paths = places.get(name, [name])
        scale = _scale(file, parts, paths[0], f"{path}: {name}")
        parts["lora_B"] = parts["lora_B"].float() * scale if scale != 1.0 else parts["lora_B"]
        own = _split_rows(net, parts, paths, path) if known else _pair(name, parts["lora_A"], parts["lora_B"])
        if not state.keys().isdisjoint(own) or (not known and "lora_magnitude_vector" in parts):
            raise refuse(family, path, [name], "it names a module twice, or in a way that is not read")
        state |= own
    return state if known else _by_diffusers(family, net, path, state | rest, keys)


def _places(family: Family, net: nn.Module) -> dict[str, list[str]]:
    """The modules of each name that any form of file has, dots or none; several where a form joins them into one."""
    original = family.full_key_maps().get("original", lambda name: name)
    order = [f".{path}" for _, paths in family.spec.fused.get("comfyui", ()) for path in paths]
    found: dict[str, list[str]] = {}
    for path, module in net.named_modules():
        if hasattr(module, "in_features"):
            for name in {path, family.native(path), original(f"{path}.weight").removesuffix(".weight")}:
                found.setdefault(name.replace(".", "_"), []).append(path)
    for paths in found.values():
        paths.sort(key=lambda path: next((i for i, own in enumerate(order) if path.endswith(own)), 0))
    return found


def _bare(name: str) -> str:
    """A module's name in a file without the form's prefix, dots as underscores: so kohya and musubi write them."""
    found = _PREFIX.match(name)
    return name[found.end() if found else 0 :].replace(".", "_")


def _scale(file: AdapterFile, parts: Mapping[str, Tensor], place: str, where: str) -> float:
    """alpha / rank of a module; VideotuneError where A and B are no pair, or alpha is none."""
    a, b = parts.get("lora_A"), parts.get("lora_B")
    if a is None or b is None or a.ndim < 2 or b.ndim < 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        raise VideotuneError(f"{where}: its A and B are no pair of one rank: the file is damaged or incomplete")
    rank, own, stated = a.shape[0], parts.get("alpha"), file.alpha(place)
    if own is not None and own.numel() != 1:
        raise VideotuneError(f"{where}: its alpha is no number")
    root = file.lora_settings.get("use_rslora") is True
    scale = 1.0 if stated is None else stated / (math.sqrt(rank) if root else rank)
    if own is not None:
        if stated is not None and not math.isclose(float(own) / rank, scale, rel_tol=1e-3):
            raise VideotuneError(f"{where}: its tensor says alpha {float(own):g} and its header {stated:g}: which?")
        scale = float(own) / rank
    if not 0 < scale <= _MOST:
        raise VideotuneError(f"{where}: alpha {scale * rank:g} at rank {rank} is no scale: the file is damaged")
    return scale


def _split_rows(net: nn.Module, parts: Mapping[str, Tensor], paths: list[str], path: Path) -> dict[str, Tensor]:
    """A module's tensors under diffusers' names; of one that is several modules there, each has its rows of B."""
    held: list[Any] = [net.get_submodule(place) for place in paths]
    rows, a = [module.out_features for module in held], parts["lora_A"]
    if a.shape[1:] != (held[0].in_features,) or parts["lora_B"].shape[0] != sum(rows):
        raise VideotuneError(f"{path} was made for another base: {paths[0]} differs in size")
    state: dict[str, Tensor] = {}
    for place, b in zip(paths, parts["lora_B"].split(rows), strict=True):
        state |= _pair(f"transformer.{place}", a.clone(), b.contiguous())
    if "lora_magnitude_vector" in parts:
        for place, own in zip(paths, parts["lora_magnitude_vector"].split(rows), strict=True):
            state[f"transformer.{place}.lora_magnitude_vector"] = own.contiguous()
    return state


def _pair(name: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """A and B as PEFT names them."""
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}


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
