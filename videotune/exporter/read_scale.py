"""Module names, and the scale with which diffusers reads a LoRA file's modules."""

import math
import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile
from videotune.models.base import DiffusersModel

_PREFIX = re.compile(
    r"((base_model\.)?model\.|diffusion_model\.|transformer\.)+"
    r"|lora_unet_|lora_transformer_|lycoris_"
)

_TABLES: WeakKeyDictionary[Any, dict[str, tuple[str, ...]]] = WeakKeyDictionary()

_MAX_SCALE = 1000.0
"""alpha / rank above which a file is damaged; published files have 1/rank to about 10.
"""


def alpha_rank(parts: Mapping[str, Tensor]) -> int | None:
    """Return the rank that alpha is divided by; None for full factors and for
    rotations.
    """
    for name in ("lora_A", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if name in parts:
            return len(parts[name])
    return None


def paths_by_name(family: DiffusersModel, net: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the modules in diffusers for each name that a form of file may have.

    Dots in the names are underscores. A name has several modules if a form fuses them.
    """
    if net in _TABLES:
        return _TABLES[net]

    paths_of: dict[str, list[str]] = {}
    for path, module in net.named_modules():
        if not hasattr(module, "in_features"):
            continue
        original_name = family.original(f"{path}.weight") or path
        names = {
            path,
            family.to_comfyui_name(path),
            original_name.removesuffix(".weight"),
        }
        for name in names:
            paths_of.setdefault(name.replace(".", "_"), []).append(path)

    # Fused modules are stacked in the order that the family states.
    fused_groups = family.spec.fused_modules.get("comfyui", ())
    fused_order: list[str] = []
    for _, fused_paths in fused_groups:
        fused_order += [f".{path}" for path in fused_paths]

    def position(path: str) -> int:
        matches = (i for i, suffix in enumerate(fused_order) if path.endswith(suffix))
        return next(matches, 0)

    for paths in paths_of.values():
        paths.sort(key=position)
    table = {name: tuple(paths) for name, paths in paths_of.items()}
    return _TABLES.setdefault(net, table)


def flat_name(name: str) -> str:
    """Return a module's name without the form's prefix, and with underscores for dots."""
    return name[len(name_prefix(name)) :].replace(".", "_")


def name_prefix(name: str) -> str:
    """Return the prefix of a form in front of a module's name."""
    match = _PREFIX.match(name)
    return match[0] if match else ""


def read_scale(
    file: AdapterFile, parts: Mapping[str, Tensor], alpha: Tensor | None, path: str
) -> tuple[float, str]:
    """Return a module's alpha / rank, and where alpha was found.

    LyCORIS, musubi and ComfyUI do not scale a LoKr with full factors, whatever its
    alpha; PEFT does.

    Args:
        file: the adapter, whose header may state alpha.
        parts: the module's tensors without alpha.
        alpha: the module's alpha tensor.
        path: the module's path, for the header's exceptions and for messages.

    Raises:
        VideotuneError: if alpha is not a valid number.
    """
    is_lora = "lora_A" in parts
    rank = alpha_rank(parts)
    location = f"{file.path}: {path}"
    header_alpha = file.peft_number(
        "lora_alpha" if is_lora else "alpha", "alpha_pattern", path
    )
    header_rank = None if is_lora else file.peft_number("r", "rank_pattern", path)
    divisor = header_rank or rank or 1

    scale = 1.0
    alpha_source = ""
    if header_alpha is not None:
        is_rank_stabilized = file.settings.get("use_rslora") is True
        scale = header_alpha / (math.sqrt(divisor) if is_rank_stabilized else divisor)
        alpha_source = file.settings_source

    if alpha is not None:
        if alpha.numel() != 1:
            raise VideotuneError(f"{location}: its alpha is not a single number")
        tensor_scale = float(alpha) / rank if rank else 1.0
        scales_agree = math.isclose(tensor_scale, scale, rel_tol=1e-3)
        if header_alpha is not None and not scales_agree:
            raise VideotuneError(
                f"{location}: alpha is {float(alpha):g} in its tensor and {header_alpha:g}"
                " in the header; remove one of them"
            )
        scale = tensor_scale
        alpha_source = "tensor"

    if not 0 < scale <= _MAX_SCALE:
        raise VideotuneError(
            f"{location}: alpha {scale * divisor:g} at rank {rank} is not a valid scale:"
            " the file is damaged"
        )
    return scale, alpha_source
