"""One file of weights: which of its tensors are which of a network's, and their numbers, one tensor at a time.

Its tensors have the names of diffusers, of the model's authors or of ComfyUI, and may be in fp8 with scales beside them.
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
from videotune.models.key_names import file_rules, rename_key
from videotune.models.model_files import Header

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of torch's for those of a safetensors file."""

FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Likewise, of the dtypes whose numbers are read as they are, times a scale where one stands beside them."""

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.model.")
"""What ComfyUI's files put in front of each name."""

Stored = Mapping[Path, Mapping[str, Header]]
"""The heads of files, by the names of their tensors."""

_SCALES = ("scale_weight", "weight_scale")
_BESIDE = re.compile(
    r"(^|\.)(scaled_fp8|comfy_quant|scale_input|input_scale|scale_weight|weight_scale)$"
)
"""Tensors beside a network's own; the scales of activations are no part of the weights."""


@dataclass(frozen=True)
class WeightSource:
    """Where the numbers of a network's tensor lie: in which of how many equal parts of the rows of a tensor in a file."""

    file: Path
    name: str
    stored: Header
    parts: tuple[int, ...] = (0,)
    of: int = 1
    scale: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the network's tensor gets; () where the rows do not divide."""
        if self.of == 1:
            return self.stored.shape
        rows, *rest = self.stored.shape or (1,)
        return () if rows % self.of else (rows // self.of * len(self.parts), *rest)


def find_sources(
    network: str, wanted: Collection[str], stored: Stored
) -> dict[str, WeightSource]:
    """Where each tensor of a network of this class lies in files; those left out that no layout has.

    The layout is the one that has most of them: a family's table of names behind one of ComfyUI's prefixes. In a table,
    ``NAME#1,0/2`` are the second and the first half of the rows of NAME. Raises VideotuneError for scales that are not one
    a tensor or one a row.
    """
    tables = [(), *file_rules(network)]
    files = {name: path for path, headers in stored.items() for name in headers}
    best: dict[str, WeightSource] = {}
    for table in tables:
        places = {name: rename_key(name, table).partition("#") for name in wanted}
        for prefix in PREFIXES:
            found = {
                name: (prefix + one, rows)
                for name, (one, _, rows) in places.items()
                if prefix + one in files
            }
            if len(found) > len(best):
                best = {
                    name: _source(files[one], one, rows, stored)
                    for name, (one, rows) in found.items()
                }
    return best


def _source(path: Path, name: str, rows: str, stored: Stored) -> WeightSource:
    header = stored[path][name]
    module = name.removesuffix(".weight")
    scale = next(
        (
            one
            for word in _SCALES
            if (one := f"{module}.{word}") in stored[path] and one != name
        ),
        "",
    )
    shape = stored[path][scale].shape if scale else ()
    if shape not in ((), (1,), header.shape[:1], (*header.shape[:1], 1)):
        fault = f"scales of the shape {'x'.join(map(str, shape))} ({scale})"
        raise VideotuneError(
            f"{path} has {fault}: take a file with one scale a tensor, or in bfloat16"
        )
    parts, _, of = (rows or "0/1").partition("/")
    return WeightSource(path, name, header, tuple(map(int, parts.split(","))), int(of), scale)


def in_diffusers_layout(sources: Mapping[str, WeightSource]) -> bool:
    """Whether each tensor of a network is a file's of its name, as it is."""
    return all(
        one.name == name and not one.scale and one.stored.dtype in DTYPES
        for name, one in sources.items()
    )


def left_over(sources: Mapping[str, WeightSource], stored: Collection[str]) -> list[str]:
    """The tensors of which nothing is made, but for scales; of a file with a prefix those alone that have it."""
    used = {source.name for source in sources.values()}
    prefix = next(
        (one for one in PREFIXES[1:] if used and all(name.startswith(one) for name in used)), ""
    )
    return [
        name
        for name in stored
        if name.startswith(prefix) and name not in used and not _BESIDE.search(name)
    ]


def refuse_packed(path: Path, stored: Mapping[str, Header]) -> None:
    """Raise VideotuneError for weights in fewer bits than fp8, or in a layout of scales that is not read, by its name."""
    from safetensors import safe_open

    marks = [
        name
        for name, header in stored.items()
        if name.endswith("comfy_quant") and header.count < 4096
    ]
    with safe_open(path, "np") as file:
        said = [(file.metadata() or {}).get("_quantization_metadata", "")]
        said += [file.get_tensor(name).tobytes().decode(errors="replace") for name in marks]
    for format in set(re.findall(r'"format"\s*:\s*"([^"]{1,40})"', " ".join(said))) - set(
        FP8.values()
    ):
        raise VideotuneError(
            f"{path} holds weights in {format}: take the file in bfloat16, float16 or float8_e4m3fn"
        )


def tensors(sources: Mapping[str, WeightSource]) -> Iterator[tuple[str, Tensor]]:
    """The network's tensors by name; each tensor of a file is read once, and let go before the next.

    What stands in fp8 is given in float32: the number times its scale, where there is one. Others may be pages of the file,
    which stay in memory as long as the tensor does.
    """
    from safetensors import safe_open

    places = sorted((one.file, one.name, one.scale, name) for name, one in sources.items())
    for (path, stored, scale), own in groupby(places, lambda place: place[:3]):
        with safe_open(
            path, "pt"
        ) as file:  # opened anew, as all pages that were read stay while it is open
            whole = file.get_tensor(stored)
            factor = file.get_tensor(scale).float() if scale else torch.ones(1)
        if not bool(torch.isfinite(factor).all()):
            raise VideotuneError(
                f"{path} is damaged: {scale} is NaN or infinite. Fetch it again"
            )
        if scale or whole.dtype.itemsize == 1:
            whole = whole.float() * factor.view(-1, *[1] * (whole.dim() - 1))
        for *_, name in own:
            parts = sources[name].parts
            cut = whole.chunk(sources[name].of)
            yield (
                name,
                cut[parts[0]] if len(parts) == 1 else torch.cat([cut[part] for part in parts]),
            )
        del whole, cut


def kind_of(stored: Collection[str], family: str | None = None) -> str | None:
    """What a file is by the names of most of its tensors, in words; None where they say nothing.

    ``family``: None too where it may be a transformer of this one.
    """
    kinds = json.loads((Path(__file__).parent / "file_kinds.json").read_text(encoding="utf-8"))
    plain = [
        re.sub("^(" + "|".join(map(re.escape, PREFIXES[1:])) + ")", "", name) for name in stored
    ]
    shares = [sum(bool(re.search(pattern, name)) for name in plain) for _, _, pattern in kinds]
    of, what, _ = kinds[shares.index(max(shares))]
    may_be = (
        of is not None
        and family is not None
        and (of == family or family not in [one for one, _, _ in kinds])
    )
    return None if may_be or 2 * max(shares) <= len(plain) else str(what)
