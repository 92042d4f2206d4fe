"""Read a network from a single file of weights in any known layout, one tensor at a
time.

The keys may be those of diffusers, of the model's authors or of ComfyUI, and the
weights may be in fp8 with scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.models.key_names import KeyRules, file_rules, rename_key
from videotune.models.model_files import Header

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's names of a safetensors file's dtypes."""

FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""torch's names of dtypes whose values are used as they are, times a scale if there is
one.
"""

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.model.")
"""Prefixes of all keys in ComfyUI's files."""

_OTHER_PARTS = re.compile(r"(^|\.)(video|audio)_embeddings_connector\.")
"""Tensors of networks between text encoder and transformer, which some files of a
transformer also hold.
"""

VAE_KINDS = ("a VAE",)
TEXT_ENCODER_KINDS = ("a text encoder", "a CLIP encoder")
"""What ``kind_of`` says of files that hold such a part."""

KEY_OF_KIND = {
    "a LoRA": "base_loras",
    "a VAE": "vae.file",
    "a text encoder": "text_encoder.file",
    "a CLIP encoder": "text_encoder.file",
}
"""The key that takes a file of a kind."""

Stored = Mapping[Path, Mapping[str, Header]]
"""The headers of files, by key."""

_SCALES = ("scale_weight", "weight_scale")
_EXTRA_TENSORS = re.compile(
    r"(^|\.)(scaled_fp8|comfy_quant|scale_input|input_scale|scale_weight|weight_scale)$"
)
"""Tensors that belong to a quantization; the scales of activations are not weights."""


@dataclass(frozen=True)
class WeightSource:
    """The part of a file's tensor that holds a tensor of the network."""

    file: Path
    name: str
    stored: Header
    parts: tuple[int, ...] = (0,)
    """Which of ``of`` equal parts of the rows, in order."""
    of: int = 1
    scale: str = ""
    """Key of the scale in the same file, or ""."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the network's tensor; () if the rows cannot be divided."""
        if self.of == 1:
            return self.stored.shape
        rows, *columns = self.stored.shape or (1,)
        if rows % self.of:
            return ()
        return (rows // self.of * len(self.parts), *columns)


def find_sources(
    network: str, wanted: Collection[str], stored: Stored
) -> dict[str, WeightSource]:
    """Find the source of each tensor of a network in files.

    The layout is the one that has most tensors: a family's rules after one of ComfyUI's
    prefixes. In rules, ``NAME#1,0/2`` are the second and then the first half of the
    rows of NAME.

    Args:
        network: class name of the network in diffusers.
        wanted: diffusers' keys.
        stored: the files.

    Returns:
        The sources by diffusers' keys, without those that the layout does not have.

    Raises:
        VideotuneError: if a scale is neither one per tensor nor one per row.
    """
    files = {}
    for path, headers in stored.items():
        for key in headers:
            files[key] = path

    no_rules: KeyRules = ()
    best: dict[str, tuple[str, str]] = {}
    for rules in [no_rules, *file_rules(network)]:
        file_names = {name: rename_key(name, rules) for name in wanted}
        for prefix in PREFIXES:
            matches = {}
            for name, file_name in file_names.items():
                key, _, rows = file_name.partition("#")
                if prefix + key in files:
                    matches[name] = (prefix + key, rows)
            if len(matches) > len(best):
                # The scales of a layout are checked even if a later layout fits better.
                for key, rows in matches.values():
                    _source(files[key], key, rows, stored)
                best = matches
    return {
        name: _source(files[key], key, rows, stored)
        for name, (key, rows) in best.items()
    }


def _source(path: Path, key: str, rows: str, stored: Stored) -> WeightSource:
    header = stored[path][key]
    module = key.removesuffix(".weight")
    scale = ""
    for suffix in _SCALES:
        scale_key = f"{module}.{suffix}"
        if scale_key in stored[path] and scale_key != key:
            scale = scale_key
            break

    shape = stored[path][scale].shape if scale else ()
    if shape not in ((), (1,), header.shape[:1], (*header.shape[:1], 1)):
        size = "x".join(map(str, shape))
        raise VideotuneError(
            f"{path}: scales of shape {size} ({scale}) are not supported. "
            "Use a file with one scale per tensor, or in bfloat16."
        )

    parts, _, of = (rows or "0/1").partition("/")
    return WeightSource(
        file=path,
        name=key,
        stored=header,
        parts=tuple(map(int, parts.split(","))),
        of=int(of),
        scale=scale,
    )


def in_diffusers_layout(sources: Mapping[str, WeightSource]) -> bool:
    """Return whether every tensor has diffusers' key and needs no conversion."""
    return all(
        source.name == name and not source.scale and source.stored.dtype in DTYPES
        for name, source in sources.items()
    )


def left_over(
    sources: Mapping[str, WeightSource], stored: Collection[str]
) -> list[str]:
    """Return the keys that no tensor uses, except for scales and for whole other parts.

    If all used keys have one of ComfyUI's prefixes, keys without it do not count.
    """
    used = {source.name for source in sources.values()}
    common_prefix = ""
    for prefix in PREFIXES[1:]:
        if used and all(name.startswith(prefix) for name in used):
            common_prefix = prefix
            break
    return [
        name
        for name in stored
        if name.startswith(common_prefix)
        and name not in used
        and not _EXTRA_TENSORS.search(name)
        and not _OTHER_PARTS.search(name)
    ]


def refuse_packed(path: Path, stored: Mapping[str, Header]) -> None:
    """Raise VideotuneError for weights in an unsupported quantization."""
    from safetensors import safe_open

    texts = []
    with safe_open(path, "np") as file:
        texts.append((file.metadata() or {}).get("_quantization_metadata", ""))
        for name, header in stored.items():
            if name.endswith("comfy_quant") and header.count < 4096:
                texts.append(file.get_tensor(name).tobytes().decode(errors="replace"))

    formats = set(re.findall(r'"format"\s*:\s*"([^"]{1,40})"', " ".join(texts)))
    for format in formats - set(FP8.values()):
        raise VideotuneError(
            f"{path}: weights in {format} are not supported. "
            "Use the file in bfloat16, float16 or float8_e4m3fn."
        )


def tensors(sources: Mapping[str, WeightSource]) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's tensors by name; each tensor of a file is read once and then
    freed.

    fp8 weights become float32: the value times its scale, if there is one. Other
    tensors may be pages of the file, which stay in memory as long as the tensor does.
    """
    from safetensors import safe_open

    entries = sorted(
        (source.file, source.name, source.scale, name)
        for name, source in sources.items()
    )
    for (path, key, scale), group in groupby(entries, lambda entry: entry[:3]):
        # Opened for each tensor: all pages that were read stay in memory while the file
        # is open.
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(key)
            factor = file.get_tensor(scale).float() if scale else torch.ones(1)
        if not bool(torch.isfinite(factor).all()):
            raise VideotuneError(
                f"{path} is damaged: {scale} is NaN or infinite. Download it again."
            )

        if scale or tensor.dtype.itemsize == 1:
            tensor = tensor.float() * factor.view(-1, *[1] * (tensor.dim() - 1))
        for *_, name in group:
            parts = sources[name].parts
            chunks = tensor.chunk(sources[name].of)
            if len(parts) == 1:
                yield name, chunks[parts[0]]
            else:
                yield name, torch.cat([chunks[part] for part in parts])
        del tensor, chunks


def refuse_kind(kind: str, path: Path, key: str, wanted: str) -> None:
    """Raise VideotuneError for a file of weights that is given in another one's place.

    Args:
        kind: what the file is, by ``kind_of``.
        path: the file.
        key: key of the config that names it.
        wanted: what the key takes, such as "a VAE".
    """
    remedy = f"Set {key} to the file of {wanted}"
    if key.endswith(".file"):
        remedy += ", or remove the key"
    if kind in KEY_OF_KIND:
        remedy += f"; {kind} is given as {KEY_OF_KIND[kind]}"
    raise VideotuneError(f"{key}: {path} is {kind}, not {wanted}. {remedy}.")


def kind_of(stored: Collection[str], family: str | None = None) -> str | None:
    """Describe the kind of a file by most of its keys.

    Args:
        stored: the keys.
        family: name of the family whose transformer is expected.

    Returns:
        The description; None if it is unknown, or may be a transformer of ``family``.
    """
    path = Path(__file__).with_name("file_kinds.json")
    kinds = json.loads(path.read_text(encoding="utf-8"))
    any_prefix = "^(" + "|".join(map(re.escape, PREFIXES[1:])) + ")"
    keys = [re.sub(any_prefix, "", key) for key in stored]

    counts = []
    for _, _, pattern in kinds:
        counts.append(sum(bool(re.search(pattern, key)) for key in keys))
    most = max(counts)
    kind_family, description, _ = kinds[counts.index(most)]

    known_families = [name for name, _, _ in kinds]
    may_be_family = (
        kind_family is not None
        and family is not None
        and (kind_family == family or family not in known_families)
    )
    if may_be_family or 2 * most <= len(keys):
        return None
    return str(description)
