"""The base model of a run: where it lies, which family reads it, and the files that stand for its weights."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.files import digest, user_cache
from videotune.lazy import diffusers, torch
from videotune.models.hub import fetch, verify
from videotune.models.loading import check_part, to_fill
from videotune.models.model_files import (
    STEMS,
    NotHere,
    check_parts,
    complete,
    has_weights,
    headers,
    model_parts,
    note,
    read_config,
    weight_files,
)
from videotune.models.pretrained import explained
from videotune.models.registry import find, names, of_pipeline
from videotune.types import BasePlace, Family, ModelSpec, Say

CONFIGS = Path(str(resources.files("videotune") / "assets" / "models"))
"""A folder of configs for each published model; ``index.json`` says which base model names mean it."""


def published(name: str) -> Path | None:
    """The configs that come with videotune, of a base model by its Hub id or by its folder's name; None: there are none.

    With them a plan needs no network.
    """
    known: dict[str, str] = json.loads((CONFIGS / "index.json").read_text(encoding="utf-8"))
    folder = CONFIGS / known.get(name, name)
    return folder if name in {*known, *known.values()} else None


def place(name: str, *, weights: bool = True, files: Mapping[str, Path] | None = None, echo: Say = note) -> BasePlace:
    """Where the base model called ``name`` lies: asset:NAME, a folder, or a Hub id.

    What of a Hub model is not here is downloaded; without ``weights`` its configs and tokenizers alone. With ``weights``
    all of the model must be there, and the heads of its files must fit its configs. ``files`` (``part_files``) stand for
    the weights of the parts that they name. ``echo`` is told what a download takes.

    Raises VideotuneError that says what was looked for, or what is missing.
    """
    files = files or {}
    folder = _folder(name, weights, files, echo)
    if weights:
        complete(name, folder, own=files)
        parts = model_parts(read_config(folder / "model_index.json"))
        nets = {part: library for part, (library, cls) in parts.items() if has_weights(cls)}
        verify((file for part in nets if part not in files for file in weight_files(folder / part)), echo)
        folder = with_files(folder, files) if files else folder
        check_base(folder)
    return BasePlace(name, folder)


def check_base(folder: Path) -> None:
    """Raise VideotuneError where the weights of a network of diffusers are not those of its config.

    Only the heads of the files are read, so that a wrong file is known before anything is encoded. The VAE is compared where
    it is loaded, which encoding begins with.
    """
    for part, (library, name) in model_parts(read_config(folder / "model_index.json")).items():
        if library == "diffusers" and has_weights(name) and part != "vae":
            cls = getattr(diffusers, name, None)
            if cls is None:
                raise VideotuneError(f"{folder / part}: this diffusers has no {name}: install a newer one")
            check_part(cls, folder / part, to_fill(cls, folder / part, torch.float32))


def _folder(name: str, weights: bool, files: Mapping[str, Path], echo: Say) -> Path:
    if name.startswith("asset:"):
        folder = Path(str(resources.files("videotune") / "assets" / name.removeprefix("asset:")))
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(f"base_model_name: videotune comes with no model {name!r}; there is asset:toy")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(f"base_model_name: {folder} is not in diffusers layout: it has no model_index.json")
        return folder
    if folder.is_file():
        remedy = "Name its model's folder or Hub id, and give the file as transformer.file"
        raise VideotuneError(f"base_model_name: {folder} is a file. {remedy}")
    if folder.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise NotHere(f"base_model_name: no such folder: {name}")
    return fetch(name, weights=weights, own=tuple(files), echo=echo)


def part_files(value: str | Sequence[str | None] | None, spec: ModelSpec) -> dict[str, Path]:
    """``transformer.file`` of the config -> the file that stands for the weights of each part it names.

    The n-th expert of a family lies in ``transformer``, ``transformer_2`` …, as ``ModelSpec.part_of`` says. Raises
    VideotuneError for a file that is not there or cannot be one, for too few or too many, and for one of another expert.
    """
    given = [value] if isinstance(value, str) else list(value or ())
    experts = [expert.name for expert in spec.experts]
    if given and len(given) != len(experts):
        order = f"{spec.title} takes {len(experts)} ({', '.join(experts)}; null for the base's own)"
        raise VideotuneError(f"transformer.file: {len(given)} given; {order}")
    found: dict[str, Path] = {}
    for expert, text in zip(experts, given, strict=False):
        if text is None:
            continue
        path = Path(text).expanduser()
        if not path.is_file():
            raise VideotuneError(f"transformer.file: no such file: {path}")
        if path.suffix != ".safetensors":
            raise VideotuneError(f"transformer.file: {path.name} is not read: it must be a .safetensors file")
        others = [name for name in experts if name != expert and re.search(rf"{name}[^a-z]?noise", path.stem.lower())]
        if others:
            fault = f"{path.name} stands for the expert {expert!r}, and is one for {others[0]!r} by its name"
            raise VideotuneError(f"transformer.file: {fault}. The order is {', '.join(experts)}.")
        if path.resolve() in {other.resolve() for other in found.values()}:
            raise VideotuneError(f"transformer.file: {path.name} is given for two experts; each has weights of its own")
        headers([path])
        found[spec.part_of(expert)] = path.absolute()
    return found


def with_files(base: Path, files: Mapping[str, Path]) -> Path:
    """A folder of links that is the model in ``base`` with other files as the weights of some parts.

    It lies in the user's cache, named by what it links to, and takes no room.
    """
    links = {entry.name: entry for entry in sorted(base.iterdir()) if entry.name not in files}
    for part, path in files.items():
        links[f"{part}/config.json"] = base / part / "config.json"
        links[f"{part}/{STEMS[0]}.safetensors"] = path
    absolute = {name: str(target.absolute()) for name, target in links.items()}
    folder = user_cache() / "bases" / digest(absolute)
    if folder.is_dir():
        return folder
    aside = folder.with_name(f".part-{os.getpid()}-{folder.name}")
    try:
        for name, target in absolute.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).symlink_to(target)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        if folder.is_dir():  # another process of the run was quicker
            return folder
        remedy = f"Copy {base}, and put the file into it as {next(iter(files))}/{STEMS[0]}.safetensors."
        raise VideotuneError(f"transformer.file: {folder} cannot be made of links ({error}). {remedy}") from error
    return folder


def of_base(folder: Path) -> type[Family]:
    """The family whose pipeline class stands in the model's index.

    Raises VideotuneError naming the class where no family reads it.
    """
    name = read_config(folder / "model_index.json").get("_class_name", "?")
    found = of_pipeline(name)
    if found is None:
        raise VideotuneError(f"{folder}: no family reads a {name}. Families: {', '.join(names())}.")
    return found


def spec_for(family: str | None, base: BasePlace | None) -> ModelSpec:
    """The spec of a base model, or a family's own where no base is given.

    Raises VideotuneError where the named family and the base's disagree.
    """
    if base is None:
        assert family is not None
        return find(family).spec
    cls = of_base(base.folder)
    if family is not None and find(family) is not cls:
        raise VideotuneError(f"family: {family!r} does not read {base.name}, which is a {cls.spec.title}")
    check_parts(base.folder)
    with explained(f"{base.folder}: its configs are not those of a {cls.spec.title}"):
        return cls.read_spec(base.folder)
