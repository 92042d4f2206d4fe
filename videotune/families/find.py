"""Finding a base model: where it lies, which family reads it, what its configs say, and what names its bytes."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import pkgutil
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import videotune.families as home
from videotune.errors import VideotuneError, did_you_mean
from videotune.families.parts import (
    STEMS,
    check_parts,
    complete,
    has_weights,
    headers,
    model_parts,
    read_config,
    said,
    spans_of,
    weight_files,
)
from videotune.families.pretrained import explained
from videotune.families.published import NotHere
from videotune.families.verified import verify
from videotune.files import digest, user_cache
from videotune.types import BasePlace, FamilySpec, WeightDtypes

if TYPE_CHECKING:
    import torch


def names() -> list[str]:
    """The families there are: a folder each in this one."""
    return sorted(module.name for module in pkgutil.iter_modules(home.__path__) if module.ispkg)


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
        if wanted in {alias.lower() for alias in module.SPEC.aliases}:
            return module
    near = difflib.get_close_matches(wanted, names(), 1, 0.4)
    raise VideotuneError(f"there is no family {name!r}{did_you_mean(near)}  Families: {', '.join(names())}.")


def place(
    name: str,
    *,
    weights: bool = True,
    files: Mapping[str, Path] | None = None,
    echo: Callable[[str], None] = said,
) -> BasePlace:
    """Where the base model called ``name`` lies: asset:NAME, a folder, or a Hub id.

    What of a Hub model is not here is downloaded; without ``weights`` its configs and tokenizers alone. With ``weights``
    all of the model must be there, and the heads of its files must fit its configs. ``files`` (``part_files``) stand for
    the weights of the parts that they name. ``echo`` is told what a download takes.

    Raises VideotuneError that says what was looked for, or what is missing.
    """
    files = files or {}
    folder = _folder(name, weights, files, echo)
    if not weights:
        return BasePlace(name, folder)
    complete(name, folder, own=files)
    parts = model_parts(read_config(folder / "model_index.json"))
    verify((file for part, (_, cls) in parts.items() if has_weights(cls) and part not in files
            for file in weight_files(folder / part)), echo)  # fmt: skip
    if files:
        folder = with_files(folder, files)
    from videotune.families.matching import check_base

    check_base(folder)
    return BasePlace(name, folder)


def _folder(name: str, weights: bool, files: Mapping[str, Path], echo: Callable[[str], None]) -> Path:
    if name.startswith("asset:"):
        folder = Path(str(resources.files("videotune") / "assets" / name.removeprefix("asset:")))
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(f"base_model_name: videotune comes with no model {name!r}; there is asset:toy")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise VideotuneError(
                f"base_model_name: {folder} is no model in diffusers layout: it has no model_index.json"
            )
        return folder
    if folder.is_file():
        raise VideotuneError(
            f"base_model_name: {folder} is a file. Name the folder or Hub id of its model in diffusers layout, for its "
            "other parts, and give the file as transformer.file"
        )
    if folder.is_absolute() or name.count("/") != 1 or name.startswith("."):
        raise NotHere(f"base_model_name: no such folder: {name}")
    from videotune.families.hub import fetch

    return fetch(name, weights=weights, own=tuple(files), echo=echo)


def part_files(value: str | Sequence[str | None] | None, spec: FamilySpec) -> dict[str, Path]:
    """``transformer.file`` of the config -> the file that stands for the weights of each part it names.

    The n-th expert of a family lies in ``transformer``, ``transformer_2`` …, as ``expert_part`` says. Raises VideotuneError
    for a file that is not there or cannot be one, for too few or too many, and for one of another expert.
    """
    given = [value] if isinstance(value, str) else list(value or ())
    experts = [expert.name for expert in spec.experts]
    if given and len(given) != len(experts):
        names = f"the experts {', '.join(experts)}: list {len(experts)} files in that order, null for the base's own"
        raise VideotuneError(
            f"transformer.file: {len(given)} given; {spec.title} has {names if len(experts) > 1 else 'one transformer'}"
        )
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
            raise VideotuneError(
                f"transformer.file: {path.name} stands for the expert {expert!r}, and is one for {others[0]!r} by its name. "
                f"The order is {', '.join(experts)}."
            )
        if path.resolve() in {other.resolve() for other in found.values()}:
            raise VideotuneError(f"transformer.file: {path.name} is given for two experts; each has weights of its own")
        headers([path])
        found[expert_part(spec, expert)] = path.absolute()
    return found


def expert_part(spec: FamilySpec, expert: str | None = None) -> str:
    """The folder of an expert's weights in diffusers layout: transformer, then transformer_2, in the order of the spec."""
    names = [known.name for known in spec.experts]
    index = 0 if expert is None else names.index(expert)
    return "transformer" if index == 0 else f"transformer_{index + 1}"


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
        raise VideotuneError(
            f"transformer.file: {folder} cannot be made of links ({error}). Instead, copy {base}, and put the file "
            f"into it as {next(iter(files))}/{STEMS[0]}.safetensors."
        ) from error
    return folder


def of_base(folder: Path) -> ModuleType:
    """The family whose pipeline class stands in the model's index.

    Raises VideotuneError naming the class where no family reads it.
    """
    name = read_config(folder / "model_index.json").get("_class_name", "?")
    for known in names():
        module = importlib.import_module(f"videotune.families.{known}")
        if name in module.SPEC.aliases:
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
    with explained(f"{base.folder}: its configs are not those of a {module.SPEC.title}"):
        return module.read_spec(base.folder)


SAMPLED_ABOVE, BLOCKS, BLOCK = 64 << 20, 256, 64 << 10
"""Files above the first are not read whole: safetensors in two blocks a tensor, others in so many; each of so many bytes."""


def fingerprint(folder: Path) -> str:
    """16 hex digits that name a part on disk by its files' names, sizes and bytes.

    Files up to 64 MB are read whole; of larger safetensors the head, and of each tensor the first 64 KB and as much from
    its middle: so a tensor that was changed is seen, wherever it lies in the file. A few numbers in its depth may not be.
    """
    name = hashlib.blake2b(digest_size=8)
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        name.update(f"{path.relative_to(folder).as_posix()}:{size}".encode())
        with path.open("rb") as file:
            if size <= SAMPLED_ABOVE:
                name.update(file.read())
                continue
            for start, length in _blocks(path, size):
                file.seek(start)
                name.update(file.read(length))
    return name.hexdigest()


def of_text(folder: Path, parts: Iterable[str], weights: WeightDtypes, dtype: torch.dtype) -> str:
    """The name of what reads captions: the bytes of its folders, and the dtypes that it works in."""
    return "-".join([*(fingerprint(folder / part) for part in parts), weights.of_text(dtype)])


def _blocks(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a large file, in the file's order."""
    if path.suffix != ".safetensors":
        yield from (((size - BLOCK) * block // (BLOCKS - 1), BLOCK) for block in range(BLOCKS))
        return
    spans = sorted((span.start, span.start + span.length) for span in spans_of(path).values())
    yield 0, spans[0][0] if spans else BLOCK
    for lo, hi in spans:
        yield lo, min(BLOCK, hi - lo)
        if hi - lo > BLOCK:
            middle = max(lo + BLOCK, (lo + hi - BLOCK) // 2)
            yield middle, min(BLOCK, hi - middle)
