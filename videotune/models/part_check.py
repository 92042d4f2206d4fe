"""Check the stored weights of a part against its network before loading."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.models import single_file
from videotune.models.model_files import (
    CONFIGS,
    Header,
    headers,
    read_config,
    weight_files,
)
from videotune.models.single_file import DTYPES, FP8, WeightSource
from videotune.models.skeletons import (
    on_meta,
)
from videotune.types import LogFn

if TYPE_CHECKING:
    from torch import nn


_MAX_EXTRA_SHARE = 0.01
"""Up to this share, weights that the model lacks are left out with a note; more is
another model.
"""


def refuse_dtypes(
    files: list[Path],
    stored: Mapping[str, Header],
    allowed: Collection[str] = tuple(DTYPES),
) -> None:
    """Raise VideotuneError for integers and other dtypes that are not ``allowed``."""
    refused = [
        name
        for name, header in stored.items()
        if header.dtype not in allowed and not name.endswith("position_ids")
    ]
    if refused:
        name = refused[0]
        raise VideotuneError(
            f"{shown(files)} holds weights of the dtype {stored[name].dtype} ({name}): "
            "take the file in bfloat16, float16 or float32"
        )


def check_part(
    cls: Any,
    folder: Path,
    net: nn.Module,
    echo: LogFn | None = None,
    files: list[Path] | None = None,
) -> dict[str, WeightSource]:
    """Compare the headers of a part's files with the model of its config.

    Args:
        cls: class of the part.
        folder: folder of the part.
        net: the part's network, of which only the shapes count.
        echo: gets a line about weights in fp8 and about those that are left out.
        files: the files of weights; None: those in the folder.

    Returns:
        The source of each tensor of the model.

    Raises:
        VideotuneError: if they differ; it describes both models.
    """
    files = weight_files(folder) if files is None else files
    stored = {Path(shown([path])): headers([path]) for path in files}
    all_headers = headers(files)
    wanted = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    for path, file_headers in stored.items():
        single_file.refuse_packed(path, file_headers)

    sources = single_file.find_sources(cls.__name__, wanted, stored)
    if not sources:
        kind = single_file.kind_of(all_headers) or "of no known kind"
        raise VideotuneError(
            f"{shown(files)} is {kind}: it has no tensor of a {cls.__name__}"
        )
    used_headers = {source.name: source.stored for source in sources.values()}
    refuse_dtypes(files, used_headers, {*DTYPES, *FP8})

    shapes = {name: source.shape for name, source in sources.items()}
    wrong = [name for name in wanted if shapes.get(name) != wanted[name]]
    extra = single_file.left_over(sources, all_headers)
    extra_count = sum(all_headers[name].count for name in extra)
    count = sum(map(math.prod, shapes.values())) + extra_count
    if wrong or extra_count > _MAX_EXTRA_SHARE * count:
        names = wrong or extra
        name = names[0]
        file_shape = all_headers[name].shape if name in all_headers else ()
        file_size = "x".join(map(str, shapes.get(name, file_shape))) or "missing"
        model_size = (
            "x".join(map(str, wanted[name])) if name in wanted else "not in the model"
        )
        model_count = sum(map(math.prod, wanted.values()))
        raise VideotuneError(
            f"{shown(files)} does not fit {shown([folder / 'config.json'])}: "
            f"it holds {_count_text(count)} parameters, a {cls.__name__} of this config "
            f"{_count_text(model_count)}. {len(names)} tensors differ: {name}: {file_size} in the "
            f"file, {model_size} by the config.{_published(cls, stored)}"
        )

    if echo:
        for note in _notes(cls, sources, extra):
            echo(f"note: {shown(files)}: {note}")
    return sources


def _notes(
    cls: Any, sources: Mapping[str, WeightSource], extra: list[str]
) -> Iterator[str]:
    """Yield what is unusual about weights that fit, and not an error."""
    fp8_count = sum(source.stored.dtype in FP8 for source in sources.values())
    if fp8_count:
        yield (
            f"{fp8_count} of {len(sources)} weights are in fp8; "
            "the base model is what these give"
        )
    if extra:
        yield (
            f"{len(extra)} weights that no {cls.__name__} has are left out: {extra[0]} …"
        )


def _count_text(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 5e6 else f"{count:,}"


def _published(cls: Any, stored: Mapping[Path, Mapping[str, Header]]) -> str:
    """Return a sentence with the published model that has the shapes of these files, or
    "".
    """
    for path in sorted(CONFIGS.glob("*/transformer/config.json")):
        if read_config(path).get("_class_name") != cls.__name__:
            continue
        state = on_meta(cls, path.parent).state_dict()
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        sources = single_file.find_sources(cls.__name__, shapes, stored)
        if shapes == {name: source.shape for name, source in sources.items()}:
            return f" Its shapes are those of {path.parents[1].name}."
    return ""


def shown(files: list[Path]) -> str:
    """Return the files as the user knows them: videotune's links are resolved."""
    first = files[0]
    if first.is_symlink() and "blobs" not in first.resolve().parts:
        first = first.resolve()
    return str(first) if len(files) == 1 else f"{first} (and {len(files) - 1} more)"
