"""Open an adapter's file or folder of any program: its checked tensors and its header."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from videotune.bounds import ADAPTER_BYTES, require_file
from videotune.errors import VideotuneError
from videotune.exporter.formats import PEFT_CONFIG_KEY, digest_of
from videotune.exporter.lora_target import adapter_path as adapter_path
from videotune.models.base import DiffusersModel
from videotune.models.model_files import note, parse_object, read_config, some

READABLE_FORMS = (
    "diffusers (transformer.), ComfyUI (diffusion_model.), PEFT (base_model.model.), "
    "kohya and musubi (lora_unet_), LyCORIS (lycoris_), and the authors' names; "
    "A and B as lora_A and lora_B, or lora_down and lora_up; alpha as a tensor or in the header"
)
"""The forms of an adapter file that are read."""

_MODULE_NAME = re.compile(r"[\w.]+")


def refuse_large_file(path: Path) -> None:
    """Raise VideotuneError for a file that is too large for an adapter, and for a pipe."""
    require_file(path)
    if not path.is_file():
        return
    size = path.stat().st_size
    if size > ADAPTER_BYTES:
        raise VideotuneError(
            f"{path} has {size >> 30} GB, which is too large for an adapter"
        )


class AdapterFile:
    """The tensors and the header of a safetensors file, or of the one in a folder.

    A file written by videotune is checked against the digest in its header.

    Raises:
        VideotuneError: for a file that is missing, damaged or changed, for integers,
            and for NaN or infinite numbers unless ``finite`` is False.
    """

    header: dict[str, str]
    """The file's metadata."""

    def __init__(self, path: Path, *, finite: bool = True) -> None:
        path = adapter_path(path)
        refuse_large_file(path)
        self.path = path
        try:
            with safe_open(path, "pt") as file:
                self.header = file.metadata() or {}
                self.tensors = {
                    key: file.get_tensor(key)
                    for key in file.keys()  # noqa: SIM118
                }
        except (SafetensorError, OSError) as error:
            raise VideotuneError(
                f"{path} is not a LoRA or an embedding:"
                f" it cannot be read as safetensors ({error})"
            ) from error

        expected_digest = self.facts.get("digest")
        if expected_digest is not None and expected_digest != digest_of(self.tensors):
            raise VideotuneError(
                f"{path} is damaged: its tensors are not those of its export."
                " Copy or export it again"
            )

        for key, value in self.tensors.items():
            dtype = str(value.dtype).removeprefix("torch.")
            if not value.is_floating_point() or dtype.startswith("float4"):
                raise VideotuneError(
                    f"{path}: {key} holds {dtype}, which is not a weight dtype"
                )

            # PyTorch cannot calculate in 8 bits; bfloat16 holds each of these numbers
            # exactly.
            if value.dtype.itemsize == 1:
                value = value.bfloat16()
                self.tensors[key] = value

            # In float32, because float64 may hold numbers beyond its range.
            is_finite = not finite or bool(torch.isfinite(value.float()).all())
            if not is_finite:
                raise VideotuneError(f"{path}: {key} holds NaN or infinite weights")

    def header_object(self, key: str) -> dict[str, Any]:
        """Return the JSON object under a key of the header; {} if the key is missing."""
        if key not in self.header:
            return {}
        return parse_object(self.header[key], f"{self.path}: its header's {key!r}")

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that videotune writes into the header; {} for a file of another
        program.
        """
        return self.header_object("videotune")

    @property
    def settings(self) -> dict[str, Any]:
        """PEFT's settings. Only alpha is used; the tensors show modules and ranks."""
        return self._settings_and_source[0]

    @property
    def settings_source(self) -> str:
        """Where the settings were found: "header", "lora_config" or "folder"; "" if
        nowhere.
        """
        return self._settings_and_source[1]

    @cached_property
    def _settings_and_source(self) -> tuple[dict[str, Any], str]:
        """PEFT's settings and their source.

        diffusers writes them into the header, finetrainers under another key, PEFT into
        a file next to the weights.
        """
        header_keys = {
            "lora_adapter_metadata": "header",
            "lora_config": "lora_config",
            PEFT_CONFIG_KEY: "header",
        }
        for key, source in header_keys.items():
            if key in self.header:
                entries = self.header_object(key).items()
                settings = {
                    name.removeprefix("transformer."): value for name, value in entries
                }
                return settings, source

        config_file = self.path.with_name("adapter_config.json")
        if self.path.stem.endswith("adapter_model") and config_file.is_file():
            folder_settings = read_config(config_file)
            if folder_settings:
                return folder_settings, "folder"
        return {}, ""

    def peft_number(self, key: str, exceptions: str, module_path: str) -> float | None:
        """Return a number from PEFT's settings for a module, or None if there is none.

        Args:
            key: the setting, such as "lora_alpha".
            exceptions: the setting with exceptions by module, such as "alpha_pattern".
                Only exact names are read: matching an unknown regular expression might
                never end.
            module_path: the module.
        """
        location = f"{self.path}: {module_path}"
        patterns = self.settings.get(exceptions) or {}
        is_readable = isinstance(patterns, dict) and all(
            map(_MODULE_NAME.fullmatch, patterns)
        )
        if not is_readable:
            raise VideotuneError(
                f"{location}: {exceptions} must give modules by their exact names,"
                f" not {str(patterns)[:60]!r}"
            )

        value = self.settings.get(key)
        for name, exception in patterns.items():
            if f".{module_path}".endswith(f".{name}"):
                value = exception
                break

        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise VideotuneError(
                f"{location}: {key} is {str(value)[:40]!r}, not a number"
            )
        return float(value)


def not_a_lora(
    family: DiffusersModel, path: Path, keys: list[str], fault: str
) -> VideotuneError:
    """Build the error for a file that is not a LoRA of this model."""
    content = f"it has the keys {some(sorted(keys))}" if keys else "it has no tensors"
    return VideotuneError(
        f"{path} is not a LoRA of {family.spec.title}: {fault}; {content}."
        f" Readable forms: {READABLE_FORMS}"
    )


def warn_if_other_base(family: DiffusersModel, file: AdapterFile) -> None:
    """Print a warning if videotune trained the file on other weights than the base's."""
    facts = file.facts
    part = family.spec.part_of(facts.get("expert"))
    base = facts.get("base")
    if not isinstance(base, dict):
        return

    trained_on = base.get("fingerprints", {}).get(part)
    if trained_on is not None and trained_on != family.fingerprints().get(part):
        note(
            f"warning: {file.path.name} was trained on {base.get('name')}, whose {part} is not"
            " this base model's"
        )
