"""Config files of other trainers, read whole: every value by its dotted key, files that they refer to included."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from videotune.config.load import config_text, parsed, refuse_unreadable
from videotune.errors import VideotuneError
from videotune.interop.command_line import options_of

MOST_FILES, UPWARD = 64, 6
"""Files that one config may refer to, and folders, its own first, that its paths may be relative to."""


@dataclass(frozen=True)
class Theirs:
    """A config of another trainer.

    ``values``: every leaf by its dotted key, such as "datasets.0.num_frames"; lists of scalars and lists of such lists
    are one leaf. A file that is referred to has its leaves under the key that refers to it ("dataset.directory.0.path");
    so has a file of that kind that is given alone.
    ``files``: what was read. ``missing``: key and path of the files that are referred to and are not there.
    """

    trainer: str
    values: Mapping[str, Any]
    files: tuple[Path, ...]
    missing: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _File:
    path: Path
    values: dict[str, Any]
    kind: Mapping[str, Any]


def read_theirs(paths: Sequence[Path]) -> Theirs:
    """Read configs of one other trainer, in any order, with the files that they refer to.

    Raises VideotuneError for a file that cannot be read, that is no config of a known trainer, and for files of several
    trainers or of several runs.
    """
    given = [_read(path) for path in dict.fromkeys(paths)]
    trainers = sorted({file.kind["trainer"] for file in given})
    if len(trainers) != 1:
        raise VideotuneError(
            f"{' and '.join(str(path) for path in paths)} are of {' and '.join(trainers)}: give one run's"
        )
    values: dict[str, Any] = {}
    parts = {file.kind["part"]: file for file in given if "part" in file.kind}
    mains = [file for file in given if "part" not in file.kind]
    if len(given) - len(mains) > len(parts):
        raise VideotuneError("several of the files are the same part of a config: give the files of one run")
    files, missing = [file.path for file in given], list[tuple[str, str]]()
    for file in sorted(mains, key=lambda file: "script" in file.values):  # a command line is above a file
        values |= file.values
        for key, name in _references(file):
            if key in parts:
                continue
            found = _found(name, file.path.parent)
            if found is None or len(files) >= MOST_FILES:
                missing.append((key, name))
                continue
            inner = _leaves(parsed_file(found))
            whole = key in file.kind.get("whole", ())
            values = {**inner, **values} if whole else values | {f"{key}.{name}": one for name, one in inner.items()}
            files.append(found)
    for key, part in parts.items():
        values |= {f"{key}.{name}": value for name, value in part.values.items()}
    return Theirs(trainers[0], values, tuple(files), tuple(missing))


def parsed_file(path: Path) -> Any:
    """The value of a JSON, YAML or TOML file, or the options of a command line in any other.

    Raises VideotuneError with one sentence.
    """
    text = config_text(path)
    known = path.suffix.lower() in (".json", ".yaml", ".yml", ".toml") or text.lstrip()[:1] in ("{", "[")
    value = parsed(text, path) if known else options_of(text, path)
    refuse_unreadable(value, str(path))
    return value


def plain(key: str) -> str:
    """A key with N in the place of each index: "datasets.0.path" is "datasets.N.path"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "N", key)


def _read(path: Path) -> _File:
    values = {re.sub(r"^-+", "", key): value for key, value in _leaves(parsed_file(path)).items()}
    held = {start for key in values for start in _starts(key)}
    held |= {plain(start) for start in held}
    kind = next((kind for kind in _kinds() if held.issuperset(kind["keys"])), None)
    if kind is None:
        names = ", ".join(dict.fromkeys(kind["trainer"] for kind in _kinds()))
        raise VideotuneError(f"{path} is no config that videotune import reads; it reads those of {names}")
    return _File(path, values, kind)


@lru_cache
def _kinds() -> list[dict[str, Any]]:
    return list(json.loads((resources.files("videotune") / "interop" / "trainers.json").read_text(encoding="utf-8")))


def _starts(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a nested value by its dotted key; empty objects are leaves."""
    if isinstance(value, Mapping) and value:
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        inner = enumerate(value)
    else:
        return {prefix.removesuffix("."): value}
    return {key: leaf for name, one in inner for key, leaf in _leaves(one, f"{prefix}{name}.").items()}


def _references(file: _File) -> Iterator[tuple[str, str]]:
    """Key and path of each file that a config refers to; of a list of paths each has its index."""
    refers = file.kind.get("refers", ())
    for key, value in file.values.items():
        if plain(key) in refers:
            names = (
                [(key, value)] if not isinstance(value, list) else [(f"{key}.{i}", one) for i, one in enumerate(value)]
            )
            yield from ((key, one) for key, one in names if isinstance(one, str) and one)


def _found(name: str, folder: Path) -> Path | None:
    """The file that a name means, seen from the config's folder, one above it, or the working folder; None: not there."""
    folders = [*[folder.resolve(), *folder.resolve().parents][:UPWARD], Path()]
    try:
        return next((path / name for path in folders if (path / name).is_file()), None)
    except OSError:  # a name too long for a file
        return None
