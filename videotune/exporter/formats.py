"""Formats of a trained adapter, and files that are verified before they take their
name.

The scale alpha / rank is multiplied into one tensor, and no file states an alpha that
differs from its rank. So every reader applies the update as it was trained, whatever it
assumes about alpha. Each file is read back and compared with what was trained before it
takes its name.
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

PEFT_CONFIG_KEY = "adapter_config"
"""The header key of PEFT's settings as JSON, for kinds that diffusers does not read."""

UNSUPPORTED = {
    (
        "OFT",
        "comfyui",
    ): "ComfyUI's OFT rotates a weight's outputs and PEFT's its inputs",
    ("LOHA", "diffusers"): "diffusers' load_lora_weights reads only LoRA and DoRA",
    ("LOKR", "diffusers"): "diffusers' load_lora_weights reads only LoRA and DoRA",
    ("OFT", "diffusers"): "diffusers' load_lora_weights reads only LoRA and DoRA",
}
"""Why a kind of adapter is not written in a format."""

FUSED_MODULES = (
    "its form of this model joins several modules into one weight,"
    " and updates of this kind cannot be joined"
)


@dataclass(frozen=True)
class Exported:
    """A file that was written and read back."""

    format: str

    path: Path

    modules: int

    max_error: float
    """The largest relative difference of ΔW over the modules."""

    reader: str
    """The program that read the file back."""

    use: str = ""
    """Code that uses the file."""

    def to_json(self, run: Path) -> dict[str, Any]:
        """Return an entry of the run's ``exports.json``."""
        return {
            "format": self.format,
            "path": path_from(run, self.path),
            "use": self.use,
            "verified": {
                "max_error": self.max_error,
                "modules": self.modules,
                "reader": self.reader,
            },
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
    """Write tensors to a file, and verify it before it takes its name.

    Args:
        format: the name of the format.
        path: the file.
        modules: how many modules the tensors change.
        tensors: the file's tensors.
        facts: written into the header under ``videotune``, with the tensors' digest.
        verify: reads the file, and returns the largest error and the program that read
            it.
        header: further entries of the header.
    """
    # JSON in ASCII, because names of files in the facts may hold undecodable bytes.
    facts_json = json.dumps({**facts, "digest": digest_of(tensors)})
    metadata = {"format": "pt", "videotune": facts_json, **(header or {})}
    results: list[tuple[float, str]] = []

    def write(temporary_path: Path) -> None:
        with system_errors(path):
            save_file(dict(tensors), temporary_path, metadata=metadata)
        results.append(verify(temporary_path))

    write_whole(path, write)
    max_error, reader = results[0]
    return Exported(
        format=format,
        path=path,
        modules=modules,
        max_error=max_error,
        reader=reader,
        use=facts.get("use", ""),
    )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 hex digits that identify tensors by their names, shapes, dtypes and
    bytes.
    """
    return hash_of({name: own_storage(value) for name, value in tensors.items()})


def check_finite(title: str, *states: Mapping[str, Tensor]) -> None:
    """Raise VideotuneError for NaN or infinite weights."""
    for state in states:
        for value in state.values():
            if not bool(value.isfinite().all()):
                raise VideotuneError(
                    f"the {title} holds NaN or infinite weights: it is not exported"
                )


def refuse_overflow(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Raise VideotuneError if finite weights become infinite in the dtype of a file."""
    for name, value in after.items():
        is_infinite = not bool(value.isfinite().all())
        if is_infinite and bool(before[name].isfinite().all()):
            raise VideotuneError(
                f"output_dtype: {dtype} holds numbers up to {torch.finfo(dtype).max:g},"
                f" and {name} has larger ones: set it to BFLOAT_16; nothing was exported"
            )


def check_same(
    expected: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    path: Path,
    needed: Collection[str] | None = None,
) -> None:
    """Compare the tensors of a file with those that were written.

    Args:
        expected: the tensors that were written.
        tensors: names and tensors of the file.
        path: the file.
        needed: names that must be in the file; None: all.

    Raises:
        VideotuneError: if a tensor differs, or a needed one is missing.
    """
    file_names = set()
    for name, value in tensors:
        file_names.add(name)
        match = expected.get(name)
        if (
            match is None
            or match.shape != value.shape
            or not bool((value == match).all())
        ):
            raise verification_error(path, f"{name} does not match")

    missing = set(expected if needed is None else needed) - file_names
    if missing:
        raise verification_error(
            path, f"{len(missing)} weights are missing, such as {min(missing)}"
        )


def check_updates(
    expected: Mapping[str, Callable[[], Tensor]],
    actual: Mapping[str, Callable[[], Tensor]],
    path: Path,
    reader: str,
) -> float:
    """Compare the updates of a file with the trained ones; one module at a time is in
    memory.

    Args:
        expected: the trained updates, calculated at the call; see
            ``adapters.effect.effects``.
        actual: those of the file.
        path: the file.
        reader: the program that read the file.

    Returns:
        The largest difference of ΔW over the modules, each relative to its own largest
        entry.

    Raises:
        VideotuneError: if a module is missing, or differs by more than is allowed.
    """
    unexpected = sorted(set(actual) - set(expected))
    misfits = sorted(set(expected) - set(actual))
    # In a format that joins modules, modules without an adapter read back as zero
    # updates.
    misfits += [name for name in unexpected if bool(actual[name]().any())]
    if misfits:
        raise verification_error(
            path,
            f"{reader} reads {len(actual)} of {len(expected)} modules; the first that does not"
            f" match is {misfits[0]}",
        )

    max_error = 0.0
    for name, calculate in expected.items():
        update = calculate()
        error = float((actual[name]() - update).abs().max())
        if bool(update.any()):
            error /= float(update.abs().max())
        max_error = max(max_error, error)
    if max_error > TOLERANCE:
        raise verification_error(
            path,
            f"through {reader}, ΔW differs by {max_error:.1e} (allowed: {TOLERANCE:.0e})",
        )
    return max_error


def verification_error(path: Path, fault: str) -> VideotuneError:
    """Build the error for a file that does not read back as it was written."""
    return VideotuneError(
        f"Verification of {path} failed: after re-reading the file, {fault}."
        " Nothing was exported."
    )


def formats_of(family: DiffusersModel, kind: str) -> tuple[str, ...]:
    """Return the formats in which an adapter of this kind can be written for this
    family.
    """
    lora_formats = family.lora_formats()
    if kind == "LORA":
        return lora_formats
    # Products of factors cannot be fused, and neither can magnitudes.
    is_fused = "comfyui" in family.spec.fused_modules
    if kind == "DORA":
        return tuple(
            name
            for name in lora_formats
            if name == "diffusers" or (name == "comfyui" and not is_fused)
        )
    if "comfyui" in lora_formats and not is_fused and kind != "OFT":
        return ("comfyui", "peft")
    return ("peft",)


CONVERTED = ("kohya", "original")
"""Forms that no export has, but into which its file can be converted."""


def refuse_format(family: DiffusersModel, kind: str, name: str) -> None:
    """Raise VideotuneError for a format that this kind or this family does not have."""
    supported = formats_of(family, kind)
    if name in supported:
        return

    is_fused = name in family.spec.fused_modules and kind in ("DORA", "LOHA", "LOKR")
    reason = UNSUPPORTED.get((kind, name), FUSED_MODULES if is_fused else "")
    remedy = ""
    if reason:
        remedy = f": {reason}. `videotune export RUN --merge` works with every program"
    elif name in CONVERTED:
        remedy = f"; `videotune lora convert FILE --to {name}` writes it of an export"
    subject = family.spec.title if kind == "LORA" else f"{kind} for {family.spec.title}"
    raise VideotuneError(
        f"output_model_format: {subject} has {', '.join(supported)}, not {name!r}{remedy}"
    )


def check_formats(config: Config, family: DiffusersModel) -> None:
    """Raise VideotuneError, before the training, for a format that could not be
    written.
    """
    method = config.training_method
    for name in configured_formats(config, family):
        if method == "FINE_TUNE":
            _check_format_of_model(config, family, name)
        if method == "EMBEDDING" and name not in family.embedding_keys():
            supported = ", ".join(sorted(family.embedding_keys()))
            raise VideotuneError(
                f"output_model_format: {family.spec.title} has {supported}, not {name!r}"
            )
        if method == "LORA":
            refuse_format(family, config.lora.variant, name)


def _check_format_of_model(config: Config, family: DiffusersModel, name: str) -> None:
    """Raise VideotuneError for a format that a fine-tuned model does not have."""
    has_layout = family.single_file_names() is not None
    supported = "diffusers, comfyui" if has_layout else "diffusers"
    if name == "diffusers":
        return
    if name != "comfyui" or not has_layout:
        raise VideotuneError(
            f"output_model_format: a fine-tuned {family.spec.title} has {supported}, not {name!r}"
        )
    if config.text_encoder.train or not config.transformer.train:
        raise VideotuneError(
            "output_model_format: 'comfyui' is one file of the transformer, and a text encoder trains"
            " too. Leave it out, or set it to diffusers"
        )


def configured_formats(config: Config, family: DiffusersModel) -> list[str]:
    """Return the formats that the config names; by default diffusers' and ComfyUI's, as
    far as the model and the method have them.
    """
    formats = config.output_model_format
    if formats is None:
        return _default_formats(config, family)
    return [formats] if isinstance(formats, str) else list(formats)


def _default_formats(config: Config, family: DiffusersModel) -> list[str]:
    supported: Collection[str]
    if config.training_method == "FINE_TUNE":
        supported = ("diffusers",)
    elif config.training_method == "EMBEDDING":
        supported = family.embedding_keys()
    else:
        supported = formats_of(family, config.lora.variant)

    # LoHa and LoKr have ComfyUI's names as well, but their own library reads PEFT's.
    defaults = [name for name in ("diffusers", "comfyui") if name in supported]
    return defaults if "diffusers" in supported else ["peft", *defaults]


def has_no_effect(state: Mapping[str, Tensor]) -> bool:
    """Return whether an adapter is as it was before its first step."""
    for name, value in state.items():
        parsed_name = parse_param_name(name)
        is_zero_part = parsed_name is not None and parsed_name[1] in ZERO
        if is_zero_part and bool(value.any()):
            return False
    return True
