"""An adapter's file or folder of any program: its tensors, checked, and what its header says."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from videotune.errors import VideotuneError
from videotune.exporter.formats import CONFIG, digest_of
from videotune.models.base import DiffusersModel
from videotune.models.model_files import note, parse_object, read_config, some

READS = (
    "diffusers (transformer.), ComfyUI (diffusion_model.), PEFT (base_model.model.), kohya and musubi (lora_unet_), LyCORIS "
    "(lycoris_), and the authors' names alone; A and B as lora_A and lora_B, or lora_down and lora_up; alpha as a tensor or "
    "in the header"
)
"""The forms of an adapter file that are read."""

_NAME = re.compile(r"[\w.]+")


def adapter_path(path: Path) -> Path:
    """The file of an adapter: itself, or the one safetensors file of a folder, as PEFT and diffusers save adapters.

    Raises VideotuneError where there is none, several, or a form that can run code when it is read.
    """
    if path.is_dir():
        names = sorted(
            own.name for own in path.glob("*.safetensors") if not own.name.startswith(".")
        )
        usual = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
        own = [name for name in names if name in usual] or names
        if len(own) != 1:
            raise VideotuneError(
                f"{path} holds {len(own)} safetensors files, and must hold one adapter: name the file"
            )
        return path / own[0]
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".pkl"):
        raise VideotuneError(
            f"{path} can run code when it is read, and is not read: convert it to safetensors"
        )
    return path


class AdapterFile:
    """A safetensors file's ``tensors`` and ``header``; one of our own is held against the digest that its header brings.

    A folder stands for the adapter in it. Raises VideotuneError for a file that is missing, damaged or changed, and for
    integers, NaN or infinite numbers (these are let through where ``finite`` is False).
    """

    def __init__(self, path: Path, *, finite: bool = True) -> None:
        self.path = path = adapter_path(path)
        try:
            with safe_open(path, "pt") as file:
                self.header: dict[str, str] = file.metadata() or {}
                self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
        except (SafetensorError, OSError) as error:
            why = f"it cannot be read as safetensors ({error})"
            raise VideotuneError(f"{path} is no LoRA and no embedding: {why}") from error
        digest = self.facts.get("digest")
        if digest is not None and digest != digest_of(self.tensors):
            raise VideotuneError(
                f"{path} is damaged: its tensors are not those of its export. Copy or export it again"
            )
        for key, value in self.tensors.items():
            dtype = str(value.dtype).removeprefix("torch.")
            if not value.is_floating_point() or dtype.startswith("float4"):
                raise VideotuneError(f"{path}: {key} holds {dtype}, no weights")
            if (
                value.dtype.itemsize == 1
            ):  # nothing can be calculated in 8 bits; bfloat16 holds each such number
                value = self.tensors[key] = value.bfloat16()
            if finite and not bool(
                torch.isfinite(value.float()).all()
            ):  # float64 beyond float32 too
                raise VideotuneError(f"{path}: {key} holds NaN or infinite weights")

    def object_in(self, key: str) -> dict[str, Any]:
        """The JSON object under a key of the header; {} where there is none."""
        return (
            parse_object(self.header[key], f"{self.path}: its header's {key!r}")
            if key in self.header
            else {}
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What a file of our own says of itself; {} of any other."""
        return self.object_in("videotune")

    @cached_property
    def settings(self) -> tuple[dict[str, Any], str]:
        """PEFT's settings of a LoRA, and where a program has put them: "header", "lora_config", "folder"; "": nowhere.

        diffusers has them in the header, finetrainers under another key, PEFT in a file beside the weights. Alpha alone is
        used: modules and ranks are those of the tensors.
        """
        for key, place in (
            ("lora_adapter_metadata", "header"),
            ("lora_config", "lora_config"),
            (CONFIG, "header"),
        ):
            if key in self.header:
                own = self.object_in(key)
                return {
                    name.removeprefix("transformer."): value for name, value in own.items()
                }, place
        beside = self.path.with_name("adapter_config.json")
        found = (
            read_config(beside)
            if self.path.stem.endswith("adapter_model") and beside.is_file()
            else {}
        )
        return found, "folder" if found else ""

    def number(self, key: str, exceptions: str, place: str) -> float | None:
        """What PEFT's settings say of a module, by exact names alone: a pattern may never come to an end."""
        patterns = self.settings[0].get(exceptions) or {}
        where = f"{self.path}: {place}"
        if not isinstance(patterns, dict) or not all(
            _NAME.fullmatch(name) for name in patterns
        ):
            why = f"{exceptions} must give modules by their exact names, not {str(patterns)[:60]!r}"
            raise VideotuneError(f"{where}: {why}")
        own = [value for name, value in patterns.items() if f".{place}".endswith(f".{name}")]
        value = own[0] if own else self.settings[0].get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise VideotuneError(f"{where}: {key} is {str(value)[:40]!r}, no number")
        return None if value is None else float(value)


def refuse(family: DiffusersModel, path: Path, keys: list[str], why: str) -> VideotuneError:
    """The error for a file that is no LoRA of this model: the keys found, and the forms that are read."""
    found = f"it has the keys {some(sorted(keys))}" if keys else "it has no tensors"
    return VideotuneError(
        f"{path} is no LoRA of {family.spec.title}: {why}; {found}. Read are: {READS}"
    )


def warn_of_other_base(family: DiffusersModel, file: AdapterFile) -> None:
    """Print a warning where a file of ours was trained over other weights than the base model's: the header names them."""
    facts = file.facts
    part = family.spec.part_of(facts.get("expert"))
    base = facts.get("base")
    made = base.get("fingerprints", {}).get(part) if isinstance(base, dict) else None
    if made is not None and made != family.fingerprints().get(part):
        name = base.get("name")  # type: ignore[union-attr]
        note(
            f"warning: {file.path.name} was trained on {name}, whose {part} is not this base model's"
        )
