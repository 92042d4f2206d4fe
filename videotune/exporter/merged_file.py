"""Export a merged model's transformer as one file in the layout that ComfyUI reads.

The merged folder is read and the file written one tensor at a time, so the transformer
is never in memory as a whole.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from videotune.exporter.formats import Exported, check_same, verification_error
from videotune.exporter.single_file_export import READER, in_one_layout
from videotune.files import write_whole
from videotune.models import single_file
from videotune.models.base import DiffusersModel
from videotune.models.key_names import KeyRules, rename_key
from videotune.models.part_check import check_part
from videotune.models.single_file import WeightSource

DTYPE_NAMES = {
    getattr(torch, name): header_name
    for header_name, name in single_file.DTYPES.items()
}
"""How a safetensors header names torch's dtypes."""

Sources = Mapping[str, WeightSource]
"""Where each weight of a network is, by diffusers' names."""


def export_merged_file(
    family: DiffusersModel,
    expert: str,
    folder: Path,
    path: Path,
    facts: Mapping[str, Any],
) -> Exported:
    """Write the transformer of a merged model's folder to one file, and read it back.

    Each weight keeps its dtype.

    Args:
        family: the family of the model.
        expert: the expert whose transformer is written.
        folder: the merged model in diffusers layout.
        path: the file.
        facts: written into the header.

    Raises:
        VideotuneError: if a weight reads back differently.
    """
    rules = family.single_file_names()
    assert rules is not None, "the command refuses a family without such a layout"
    part = family.spec.part_of(expert)
    net: Any = family.skeleton(expert)
    sources = check_part(type(net), folder / part, net)

    def write(temporary_path: Path) -> None:
        _write_tensors(temporary_path, sources, rules, facts)
        written = check_part(type(net), folder / part, net, files=[temporary_path])
        _check_written(sources, written, path)

    write_whole(path, write)
    return Exported(
        format="merged-comfyui",
        path=path,
        modules=len(sources),
        max_error=0.0,
        reader=READER,
        use=facts.get("use", ""),
    )


def _write_tensors(
    path: Path, sources: Sources, rules: KeyRules, facts: Mapping[str, Any]
) -> None:
    """Write a safetensors file: the header's length, the header, the tensors' bytes."""
    shapes = {}
    names_by_key: dict[str, list[str]] = {}
    for name, source in sources.items():
        dtype = getattr(torch, single_file.DTYPES[source.stored.dtype])
        shapes[name] = torch.empty(source.shape, dtype=dtype, device="meta")
        key = rename_key(name, rules).partition("#")[0]
        names_by_key.setdefault(key, []).append(name)

    metadata = {"format": "pt", "videotune": json.dumps(dict(facts))}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for key, tensor in in_one_layout(shapes, rules).items():
        header[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)

    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little"))
        file.write(header_bytes)
        for key, names in names_by_key.items():
            weights = {name: _read(sources[name], name) for name in names}
            tensor = in_one_layout(weights, rules)[key].contiguous()
            file.write(tensor.flatten().view(torch.uint8).numpy().data)


def _check_written(expected: Sources, written: Sources, path: Path) -> None:
    """Raise VideotuneError if a weight of the written file differs from the folder's."""
    missing = sorted(set(expected) - set(written))
    if missing:
        raise verification_error(path, f"{missing[0]} is missing")
    for name, source in expected.items():
        weights = {name: _read(source, name)}
        check_same(weights, [(name, _read(written[name], name))], path)


def _read(source: WeightSource, name: str) -> Tensor:
    """Read one weight of a network."""
    ((_, weight),) = single_file.tensors({name: source})
    return weight
