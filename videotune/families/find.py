"""Finding a base model: where it lies, which family reads it, what its configs say, and what names its bytes."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import pkgutil
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import videotune.families as home
from videotune.errors import VideotuneError
from videotune.types import BasePlace, FamilySpec

_NO_FAMILY = ("find", "tiny", "wan_nets", "wan_tiny")


def names() -> list[str]:
    """The families there are: one file each in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(home.__path__) if m.name not in _NO_FAMILY)


def find(name: str) -> ModuleType:
    """The family's module, by its name or by another name it is known as.

    Raises VideotuneError with the nearest name.
    """
    wanted = name.strip().lower()
    for known in names():
        if wanted == known:
            return importlib.import_module(f"videotune.families.{known}")
    for known in names():
        module = importlib.import_module(f"videotune.families.{known}")
        if wanted in {alias.lower() for alias in module.SPEC.known_as}:
            return module
    near = difflib.get_close_matches(wanted, names(), 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise VideotuneError(f"there is no family {name!r}{hint}  Families: {', '.join(names())}.")


def place(name: str, *, weights: bool = True) -> BasePlace:
    """Where the base model called ``name`` lies: asset:NAME, a folder, or a Hub id.

    What of a Hub model is not here is downloaded; without ``weights`` its configs alone, a few kilobytes.

    Raises VideotuneError that says what was looked for.
    """
    if name.startswith("asset:"):
        folder = Path(str(resources.files("videotune") / "assets" / name.removeprefix("asset:")))
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(f"base_model_name: videotune comes with no model {name!r}; there is asset:toy")
        return BasePlace(name, folder)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(
                f"base_model_name: {folder} is no model in diffusers layout: it has no model_index.json"
            )
        return BasePlace(name, folder)
    if folder.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise VideotuneError(f"base_model_name: no such folder: {name}")
    return BasePlace(name, _download(name, weights))


def _download(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.txt", "*.model", *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's library raises a dozen kinds; each is told to the person as it is
        raise VideotuneError(
            f"base_model_name: {name} could not be fetched from the Hub: {error}\n"
            "Give a local folder in diffusers layout, or check the network, the id and HF_TOKEN."
        ) from error


def of_base(folder: Path) -> ModuleType:
    """The family whose pipeline class stands in the model's index.

    Raises VideotuneError naming the class where no family reads it.
    """
    name = read_config(folder / "model_index.json").get("_class_name", "?")
    for known in names():
        module = importlib.import_module(f"videotune.families.{known}")
        if name in module.SPEC.known_as:
            return module
    raise VideotuneError(f"{folder}: no family reads a {name}. Families: {', '.join(names())}.")


def spec_for(family: str | None, base: BasePlace | None) -> FamilySpec:
    """The facts of a base model, or a family's own where no base is given.

    Raises VideotuneError where the named family and the base's disagree.
    """
    if base is None:
        assert family is not None
        return find(family).SPEC
    module = of_base(base.folder)
    if family is not None and find(family) is not module:
        raise VideotuneError(f"family: {family!r} does not read {base.name}, which is a {module.SPEC.title}")
    check_parts(base.folder)
    return module.read_spec(base.folder)


def check_parts(folder: Path) -> None:
    """Raise VideotuneError where a part that the model's index names is not there."""
    for part, value in read_config(folder / "model_index.json").items():
        if isinstance(value, list) and len(value) == 2 and value[1] is not None and not (folder / part).is_dir():
            raise VideotuneError(
                f"the base model is incomplete: {folder} has no {part}/, which its model_index.json names"
            )


def read_config(path: Path) -> dict[str, Any]:
    """A part's JSON config; VideotuneError where the file is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VideotuneError(f"the base model is incomplete: {path} is missing") from None
    except json.JSONDecodeError as error:
        raise VideotuneError(f"{path} is not valid JSON: {error.msg} in line {error.lineno}") from error


SAMPLED_ABOVE, BLOCKS, BLOCK = 64 << 20, 256, 64 << 10
"""Files above the first are read in so many blocks of so many bytes, evenly over the file."""


def fingerprint(folder: Path) -> str:
    """16 hex digits that name a part on disk by its files' names, sizes and bytes.

    Files up to 64 MB are read whole; of larger ones 16 MB, in blocks spread evenly: reading all of an 11 GB text encoder
    at every start would cost more than it tells. A change of a few tensors of a large file may thus go unseen.
    """
    name = hashlib.blake2b(digest_size=8)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        name.update(f"{path.relative_to(folder).as_posix()}:{size}".encode())
        with path.open("rb") as file:
            if size <= SAMPLED_ABOVE:
                name.update(file.read())
                continue
            for block in range(BLOCKS):
                file.seek((size - BLOCK) * block // (BLOCKS - 1))
                name.update(file.read(BLOCK))
    return name.hexdigest()
