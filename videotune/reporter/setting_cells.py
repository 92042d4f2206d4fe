"""The settings that differ between runs, each in a few words a run, and folders' names.

A setting that is a list of sections, such as ``datasets``, has a name for each entry,
and of its keys only those that differ between the runs and from their defaults.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, get_args

from videotune.reporter.read import items
from videotune.text import value_text

MOST_SHARED_NAMES = 2
"""Entries that all runs have which are named; of more only the number is."""

Entry = Mapping[str, Any]


def setting_cells(key: str, values: Sequence[Any]) -> list[str]:
    """Return a setting that differs in a few words for each run.

    Args:
        key: its dotted name.
        values: its value in each run.
    """
    if not any(_has_entries(value) for value in values):
        return [value_text(_without_folders(value)) for value in values]

    names = _names(values)
    entries_by_run = [_by_identity(value) for value in values]
    shared = []
    for identity, entry in entries_by_run[0].items():
        if all(entries.get(identity) == entry for entries in entries_by_run):
            shared.append(identity)

    defaults = _defaults_of_entries(key)
    return [
        _cell(entries, shared, entries_by_run, names, defaults)
        for entries in entries_by_run
    ]


def _cell(
    entries: Mapping[str, Entry],
    shared: Sequence[str],
    entries_by_run: Sequence[Mapping[str, Entry]],
    names: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> str:
    """Return the entries of a run: those that all runs have by name or number only."""
    parts = [names[identity] for identity in shared]
    if len(shared) > MOST_SHARED_NAMES:
        parts = [f"{len(shared)} that all runs have"]

    for identity, entry in entries.items():
        if identity in shared:
            continue

        versions = [of_run[identity] for of_run in entries_by_run if identity in of_run]
        facts = []
        for key, value in entry.items():
            is_unusual = value != defaults.get(key) and key != _identity_key(entry)
            differs = any(version.get(key) != value for version in versions)
            if differs or (is_unusual and len(versions) < len(entries_by_run)):
                facts.append(f"{key} {value_text(_without_folders(value))}")
        details = f" ({', '.join(facts)})" if facts else ""
        parts.append(f"{names[identity]}{details}")
    return "; ".join(parts) or "none"


def _has_entries(value: Any) -> bool:
    return bool(items(value)) and all(isinstance(entry, Mapping) for entry in value)


def _identity_key(entry: Entry) -> str:
    """Return the key that names an entry: the first that its section declares."""
    return next(iter(entry), "")


def _by_identity(value: Any) -> dict[str, Entry]:
    """Return entries by what names them; a second one of a name gets its number."""
    entries: dict[str, Entry] = {}
    for entry in items(value):
        if not isinstance(entry, Mapping):
            entry = {"value": entry}
        identity = str(entry.get(_identity_key(entry), ""))
        if identity in entries:
            identity += f" #{len(entries) + 1}"
        entries[identity] = entry
    return entries


def _names(values: Sequence[Any]) -> dict[str, str]:
    """Return the name of each entry: of a folder the last part of its path, and of
    folders of one name also the part that differs.
    """
    identities: dict[str, None] = {}
    for value in values:
        identities |= dict.fromkeys(_by_identity(value))
    folders = [Path(identity) for identity in identities if _is_folder(identity)]
    name_by_folder = folder_names(folders)
    names = {}
    for identity in identities:
        names[identity] = identity
        if _is_folder(identity):
            names[identity] = name_by_folder[Path(identity)]
    return names


def _is_folder(text: str) -> bool:
    return PurePath(text).is_absolute()


def _without_folders(value: Any) -> Any:
    """Return a value whose absolute paths are their last parts."""
    if isinstance(value, str) and _is_folder(value):
        return PurePath(value).name
    if isinstance(value, list):
        return [_without_folders(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _without_folders(entry) for key, entry in value.items()}
    return value


def _defaults_of_entries(key: str) -> dict[str, Any]:
    """Return the defaults of the section whose entries a setting lists."""
    from pydantic import BaseModel

    from videotune.config.schema import Config

    section: type[BaseModel] | None = Config
    for part in key.split("."):
        field = section.model_fields.get(part) if section is not None else None
        section = None if field is None else _section_in(field.annotation)
    if section is None:
        return {}
    return {name: field.default for name, field in section.model_fields.items()}


def _section_in(annotation: Any) -> Any:
    """Return the section that an annotation holds, such as list[Dataset]; else None."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        section = _section_in(argument)
        if section is not None:
            return section
    return None


def folder_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each folder: the last part of its path, and of folders of one
    name also the part of their paths that differs.
    """
    folders_by_name: dict[str, list[Path]] = {}
    for folder in folders:
        folders_by_name.setdefault(folder.name, []).append(folder)

    names = {}
    for name, alike in folders_by_name.items():
        if len(alike) == 1:
            names[alike[0]] = name
            continue
        # Some may be relative to the working directory.
        absolute = [Path(os.path.abspath(folder.parent)) for folder in alike]
        above = Path(os.path.commonpath(absolute))
        parents = [parent.relative_to(above).parts for parent in absolute]
        num_shared = _num_shared_at_end(parents)
        for folder, parts in zip(alike, parents, strict=True):
            differing = parts[: len(parts) - num_shared]
            shared = ["…"] if num_shared else []
            names[folder] = "/".join((*differing, *shared, name))
    return names


def _num_shared_at_end(paths: Sequence[tuple[str, ...]]) -> int:
    """Return how many parts at their ends several paths share."""
    count = 0
    for parts in zip(*(reversed(path) for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count
