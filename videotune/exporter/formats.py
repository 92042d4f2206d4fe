"""How a trained adapter is written: which formats a kind of adapter has, and its tensors under their names.

The scale alpha / rank is multiplied into one tensor, and no file says an alpha that differs from its rank: every reader
then applies the update as it was trained, whatever it assumes of alpha.
What is written is read back and compared with what was trained, before its file takes its name.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from videotune.adapters.adapter_types import ZERO, parse_param_name
from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.files import path_from, system_errors, write_whole
from videotune.latent_cache.entry import hash_of, own_storage
from videotune.models.base import DiffusersModel

TOLERANCE = 1e-6
"""Largest allowed difference of ΔW, relative to its largest entry."""


@dataclass(frozen=True)
class Exported:
    """A file that was written and read back; ``max_error`` is the largest relative difference of ΔW over the modules.

    ``use``: how it is used, in code.
    """

    format: str
    path: Path
    modules: int
    max_error: float
    reader: str
    use: str = ""

    def to_json(self, run: Path) -> dict[str, Any]:
        """A line of the run's ``exports.json``."""
        verified = {"max_error": self.max_error, "modules": self.modules, "reader": self.reader}
        return {
            "format": self.format,
            "path": path_from(run, self.path),
            "use": self.use,
            "verified": verified,
        }


def write_verified(
    format: str,
    path: Path,
    modules: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    verify: Callable[[Path], tuple[float, str]],
    header: Mapping[str, str] | None = None,
) -> Exported:
    """Write tensors, with our facts and their digest in the head under ``videotune``, beside the other keys of ``header``.

    ``verify`` reads the file back before it takes its name, and answers with the largest error and the reader.
    """
    own = json.dumps(
        {**facts, "digest": digest_of(tensors)}
    )  # ASCII: a file's name may hold what is no letter
    found: list[tuple[float, str]] = []

    def write(aside: Path) -> None:
        with system_errors(path):
            save_file(
                dict(tensors),
                aside,
                metadata={"format": "pt", "videotune": own, **(header or {})},
            )
        found.append(verify(aside))

    write_whole(path, write)
    return Exported(format, path, modules, *found[0], facts.get("use", ""))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits that name tensors by their names, shapes, dtypes and bytes."""
    return hash_of({name: own_storage(value) for name, value in tensors.items()})


def check_finite(what: str, *states: Mapping[str, Tensor]) -> None:
    """Raise VideotuneError for NaN or infinite weights."""
    if any(not bool(value.isfinite().all()) for state in states for value in state.values()):
        raise VideotuneError(f"the {what} holds NaN or infinite weights: it is not exported")


def refuse_overflow(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Raise VideotuneError where finite weights are infinite in the dtype of a file."""
    for name, value in after.items():
        if not bool(value.isfinite().all()) and bool(before[name].isfinite().all()):
            most = f"{dtype} holds numbers up to {torch.finfo(dtype).max:g}, and {name} has larger ones"
            raise VideotuneError(
                f"output_dtype: {most}: set it to BFLOAT_16; nothing was exported"
            )


def check_same(
    wanted: Mapping[str, Tensor],
    found: Iterable[tuple[str, Tensor]],
    path: Path,
    needed: Collection[str] | None = None,
) -> None:
    """Raise VideotuneError where a tensor that was found is not the wanted one, or a needed one (None: any) is missing."""
    seen = set()
    for name, value in found:
        seen.add(name)
        own = wanted.get(name)
        if own is None or own.shape != value.shape or not bool((value == own).all()):
            raise failed(path, f"{name} does not match")
    if lacking := set(wanted if needed is None else needed) - seen:
        raise failed(path, f"{len(lacking)} weights are missing, such as {min(lacking)}")


def check_updates(
    wanted: Mapping[str, Callable[[], Tensor]],
    found: Mapping[str, Callable[[], Tensor]],
    path: Path,
    reader: str,
) -> float:
    """The largest difference of ΔW over the modules, each relative to its own largest entry; one at a time in memory.

    ``adapters.effect.effects`` says what the values calculate. Raises VideotuneError where a module is missing or differs
    by more than is allowed.
    """
    # where a format joins modules, a reader finds updates of nothing in those that have none
    spare = [name for name in sorted(set(found) - set(wanted)) if bool(found[name]().any())]
    if odd := sorted(set(wanted) - set(found)) or spare:
        raise failed(
            path,
            f"{reader} reads {len(found)} of {len(wanted)} modules; the first odd one is {odd[0]}",
        )
    worst = 0.0
    for name, calculate in wanted.items():
        update = calculate()
        off = float((found[name]() - update).abs().max())
        worst = max(worst, off / float(update.abs().max()) if bool(update.any()) else off)
    if worst > TOLERANCE:
        raise failed(
            path, f"through {reader}, ΔW differs by {worst:.1e} (allowed: {TOLERANCE:.0e})"
        )
    return worst


def failed(path: Path, what: str) -> VideotuneError:
    """The error of a file that does not read back as it was written."""
    return VideotuneError(
        f"Verification of {path} failed: after re-reading the file, {what}. Nothing was exported."
    )


CONFIG = "adapter_config"
"""The key of a file's header under which PEFT's settings stand, as JSON; only kinds that diffusers does not read have it."""

WHY_NOT = {
    (
        "DORA",
        "comfyui",
    ): "ComfyUI divides DoRA's weights by another norm than it was trained with",
    ("OFT", "comfyui"): "ComfyUI's OFT turns a weight's outputs and PEFT's its inputs",
} | {
    (kind, "diffusers"): "diffusers' load_lora_weights reads only LoRA and DoRA"
    for kind in ("LOHA", "LOKR", "OFT")
}
JOINED = "its form of this model joins several modules into one weight, and updates of this kind cannot be joined"


def formats_of(family: DiffusersModel, kind: str) -> tuple[str, ...]:
    """The formats in which an adapter of this kind can be written for this family."""
    known = family.lora_formats()
    if kind in ("LORA", "DORA"):
        return known if kind == "LORA" else tuple(name for name in known if name == "diffusers")
    apart = (
        "comfyui" in known and "comfyui" not in family.spec.fused_modules
    )  # products of factors cannot be joined
    return ("comfyui", "peft") if apart and kind != "OFT" else ("peft",)


def refuse_format(family: DiffusersModel, kind: str, name: str) -> None:
    """Raise VideotuneError for a format that this kind of adapter or this family does not have, with the reason."""
    known = formats_of(family, kind)
    if name in known:
        return
    what = f"{kind} for {family.spec.title}".removeprefix("LORA for ")
    reason = WHY_NOT.get(
        (kind, name),
        JOINED if name in family.spec.fused_modules and kind in ("LOHA", "LOKR") else "",
    )
    why = f": {reason}. `videotune export RUN --merge` serves everyone" if reason else ""
    raise VideotuneError(
        f"output_model_format: {what} has {', '.join(known)}, not {name!r}{why}"
    )


def check_formats(config: Config, family: DiffusersModel) -> None:
    """Raise VideotuneError for a format that could not be written: before a training, not after it."""
    method = config.training_method
    title = family.spec.title
    for name in named_formats(config):
        if method == "FINE_TUNE" and name != "diffusers":
            raise VideotuneError(
                f"output_model_format: a fine-tuned model is a diffusers folder, not {name!r}"
            )
        if method == "EMBEDDING" and name not in family.embedding_keys():
            known = ", ".join(sorted(family.embedding_keys()))
            raise VideotuneError(f"output_model_format: {title} has {known}, not {name!r}")
        if method == "LORA":
            refuse_format(family, config.lora.variant, name)


def named_formats(config: Config) -> list[str]:
    """The formats that the config names."""
    named = config.output_model_format
    return [named] if isinstance(named, str) else list(named)


def changes_nothing(state: Mapping[str, Tensor]) -> bool:
    """Whether an adapter is as it was before its first step."""
    return not any(
        bool(value.any())
        for name, value in state.items()
        if (place := parse_param_name(name)) and place[1] in ZERO
    )
