"""Find the parts of a base model in a folder of files, such as ComfyUI's ``models``, by
what the files hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune import user_settings
from videotune.errors import VideotuneError
from videotune.lazy import diffusers, torch, transformers
from videotune.models import model_files, single_file
from videotune.models.converted_parts import converter_of
from videotune.models.part_check import check_part
from videotune.models.skeletons import on_meta

if TYPE_CHECKING:
    from torch import nn

    from videotune.model_spec import ModelSpec

VARIABLE = "VIDEOTUNE_MODELS_FOLDER"
"""Environment variable with the folder, if none is named and none was."""

MOST_FILES = 5000
"""Files of weights that are looked at."""

_SETTING = "models_folder"


def remember(folder: Path) -> None:
    """Keep a folder of models for later commands."""
    user_settings.remember(**{_SETTING: str(folder.absolute())})


def remembered() -> Path | None:
    """Return the folder that was named before, if it is still there."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        text = str(user_settings.read_settings().get(_SETTING) or "")
    folder = Path(text).expanduser() if text else None
    return folder if folder is not None and folder.is_dir() else None


def find_files(
    folder: Path, base: Path, parts: Collection[str], spec: ModelSpec
) -> dict[str, list[Path]]:
    """Return the files that hold a part of a base model, by part, each sorted by name.

    Only headers are read. Of two experts, which have the same shapes, a file belongs to
    the one in its name; a name without one fits neither.

    Args:
        folder: the folder, searched to any depth.
        base: the base model's folder, whose configs count.
        parts: the parts to look for.
        spec: gives the experts.
    """
    index = model_files.read_config(base / "model_index.json")
    classes = model_files.model_parts(index)
    nets: dict[str, tuple[Any, nn.Module]] = {}
    for part in parts:
        library, class_name = classes[part]
        module = transformers if library == "transformers" else diffusers
        cls = getattr(module, class_name)
        nets[part] = (cls, on_meta(cls, base / part))

    found: dict[str, list[Path]] = {part: [] for part in parts}
    for path in _weight_files(folder):
        try:
            stored = model_files.headers([path])
        except VideotuneError:
            continue  # a damaged file of somebody's is not this command's concern
        for part, (cls, net) in nets.items():
            if _names_other_expert(path, part, spec):
                continue
            if _fits(cls, base / part, net, path, stored):
                found[part].append(path)
    return found


def choose(found: Mapping[str, list[Path]], folder: Path) -> dict[str, Path]:
    """Return the one file of each part that has any.

    Raises VideotuneError if several fit: which one is meant is not for us to say.
    """
    chosen = {}
    for part, paths in found.items():
        if len(paths) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in paths[:8])
            raise VideotuneError(
                f"--models-folder: {len(paths)} files fit the base model's {part}: {names}."
                f" Choose one with --set {_key_of(part)}=FILE"
            )
        if paths:
            chosen[part] = paths[0]
    return chosen


def _key_of(part: str) -> str:
    if part == "vae":
        return "vae.file"
    return (
        "text_encoder.file" if part.startswith("text_encoder") else "transformer.file"
    )


def _weight_files(folder: Path) -> Iterator[Path]:
    """Yield the safetensors below a folder in the order of their paths.

    Raises VideotuneError if there are too many.
    """
    paths = []
    visited = set()
    # Folders of models are often links to another disk, and a link may lead back.
    for place, folders, names in os.walk(folder, followlinks=True):
        real_place = os.path.realpath(place)
        if real_place in visited:
            folders.clear()
            continue
        visited.add(real_place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [Path(place, name) for name in names if name.endswith(".safetensors")]
        if len(paths) > MOST_FILES:
            raise VideotuneError(
                f"--models-folder: {folder} has more than {MOST_FILES:,} files of weights."
                " Give a folder further down"
            )
    return iter(sorted(path for path in paths if path.is_file()))


def _names_other_expert(path: Path, part: str, spec: ModelSpec) -> bool:
    """Whether a file belongs to another expert than a part by its name, or to none."""
    experts = {spec.part_of(expert.name): expert.name for expert in spec.experts}
    if part not in experts:
        return False
    noise_levels = set(re.findall("(high|low)[^a-z]?noise", path.stem.lower()))
    if len(experts) == 1:
        return bool(noise_levels)
    return noise_levels != {experts[part]}


def _fits(
    cls: Any,
    folder: Path,
    net: nn.Module,
    path: Path,
    stored: Mapping[str, model_files.Header],
) -> bool:
    """Whether a file holds the weights of a network, in any layout that is read."""
    try:
        sources = single_file.find_sources(
            cls.__name__, net.state_dict(), {path: stored}
        )
        if 2 * len(sources) > len(net.state_dict()):
            check_part(cls, folder, net, files=[path])
            return True
    except VideotuneError:
        return False
    return _fits_after_conversion(cls, net, stored)


def _fits_after_conversion(
    cls: Any, net: nn.Module, stored: Mapping[str, model_files.Header]
) -> bool:
    """Whether diffusers' converter makes a network's weights of a file."""
    convert = converter_of(cls)
    if convert is None:
        return False
    shapes = {
        name: torch.empty(header.shape, device="meta")
        for name, header in stored.items()
    }
    try:
        converted = convert(shapes)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # each converter refuses another layout in a way of its own
    return all(
        name in converted and converted[name].shape == weight.shape
        for name, weight in net.state_dict().items()
    )
