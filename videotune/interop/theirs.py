"""Config files of other trainers, read whole: every value by its dotted key, files that they refer to included."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.config.load import config_text, parsed, refuse_unreadable
from videotune.config.suggestions import flat_leaves, other_trainer, plain
from videotune.errors import VideotuneError
from videotune.interop.command_line import options_of

MOST_KEYS, MOST_FILES, UPWARD = 2_000, 64, 6
"""Keys of a config, files that it may refer to, and folders, its own first, that its paths may be relative to."""


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


def read_theirs(paths: Sequence[Path]) -> Theirs:
    """Read configs of one run of another trainer, in any order, with the files that they refer to.

    Raises VideotuneError for a file that cannot be read, that is no config of a known trainer, and for files of several
    trainers or of several runs.
    """
    given = [_known(path) for path in dict.fromkeys(paths)]
    trainers = sorted({kind["trainer"] for _, _, kind in given})
    parts = {kind["part"]: leaves for _, leaves, kind in given if "part" in kind}
    mains = [one for one in given if "part" not in one[2]]
    if len(trainers) != 1 or len(parts) + len(mains) < len(given):
        raise VideotuneError(f"the files are of {' and '.join(trainers)}, or of several runs: give those of one run")
    values: dict[str, Any] = {}
    files, missing = [path for path, _, _ in given], list[tuple[str, str]]()
    for path, leaves, kind in sorted(mains, key=lambda one: "script" in one[1]):  # a command line is above a file
        values |= leaves
        for key, name in _references(leaves, kind.get("refers", ())):
            found = None if key in parts or len(files) >= MOST_FILES else _found(name, path.parent)
            if found is not None:
                inner = flat_leaves(parsed_file(found))
                whole = key in kind.get("whole", ())
                values = {**inner, **values} if whole else values | {f"{key}.{one}": inner[one] for one in inner}
                files.append(found)
            elif key not in parts:
                missing.append((key, name))
    for key, leaves in parts.items():
        values |= {f"{key}.{name}": value for name, value in leaves.items()}
    if len(values) > MOST_KEYS:
        raise VideotuneError(f"{paths[0]} has {len(values):,} keys; at most {MOST_KEYS:,} are read")
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


def _known(path: Path) -> tuple[Path, dict[str, Any], Mapping[str, Any]]:
    """A file, its leaves without leading dashes, and what kind of config it is."""
    leaves = {re.sub("^-+", "", key): value for key, value in flat_leaves(parsed_file(path)).items()}
    if (kind := other_trainer(leaves)) is None:
        raise VideotuneError(f"{path} is no config that videotune import reads: docs/interop.md lists the trainers")
    return path, leaves, kind


def _references(leaves: Mapping[str, Any], refers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Key and path of each file that a config refers to; of a list of paths each has its index."""
    for key, value in ((key, leaves[key]) for key in leaves if plain(key) in refers):
        names = [(f"{key}.{i}", one) for i, one in enumerate(value)] if isinstance(value, list) else [(key, value)]
        yield from ((key, one) for key, one in names if isinstance(one, str) and one)


def _found(name: str, folder: Path) -> Path | None:
    """The file that a name means, seen from the config's folder, one above it, or the working folder; None: not there."""
    folders = [*[folder.resolve(), *folder.resolve().parents][:UPWARD], Path()]
    return next((path / name for path in folders if os.path.isfile(path / name)), None)
