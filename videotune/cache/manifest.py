"""What a store holds: its manifest and its files, read together. Every file of entries says itself what it holds."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from videotune.cache.shards import KINDS, PART, SHARD, SUFFIX, UNREADABLE, Entry, File, Label, Name, Origins, read_label
from videotune.files import Count, checked, write_bytes


class Line(TypedDict, total=False):
    """A line of the manifest: an entry in a file of its own; or a shard, with its size and the keys of its entries; or what
    names the versions ``of`` entries; or a file that counts no more."""

    entry: Entry
    shard: File
    bytes: Count
    keys: list[str]
    origin: str
    of: dict[str, str]
    gone: File


@dataclass
class Contents:
    """What a cache folder holds, as its manifest and its files say together.

    ``shards`` maps files to the bytes that they must have; ``gone`` are files that count no more; ``leftovers`` of killed
    writers nobody needs; ``strays`` are none of our entries. ``untidy``: the manifest does not say all of this.
    """

    entries: dict[Name, Entry] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    leftovers: set[str] = field(default_factory=set)
    strays: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    damaged_lines: int = 0
    untidy: bool = False

    def whole(self, entry: Entry) -> bool:
        """Whether its file was there with the right size when the folder was read."""
        wanted = self.shards.get(entry.file) if entry.shard else entry.file_bytes
        return wanted is not None and self.sizes.get(entry.file) == wanted


def read_contents(folder: Path) -> Contents:
    """Read the manifest, and adopt what lies in the folder without a line in it. Writes nothing."""
    contents = Contents()
    for kind in KINDS:
        _list(folder, kind, contents)
    lines = _bytes_of(folder / "manifest.jsonl").split(b"\n")
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            _take(contents, checked(Line, line))
        except (ValueError, KeyError):
            contents.untidy = True
            contents.damaged_lines += i + 1 < len(lines)  # the last one is torn by a kill, which is no news
    files = sorted(file for file in contents.sizes if file not in contents.gone)
    in_shards = [file for file in files if f"/{SHARD}" in file]
    for file in in_shards:
        if file not in contents.shards:
            _adopt(folder, file, contents)
    own = {entry.file for entry in contents.entries.values() if entry.shard is None and contents.whole(entry)}
    for file in files:
        if f"/{SHARD}" not in file and file not in own:
            kind, _, name = file.partition("/")
            known = contents.entries.get((kind, name.removesuffix(SUFFIX)))
            if known is not None and contents.whole(known):
                contents.leftovers.add(file)
            else:
                _adopt(folder, file, contents)
    living = {entry.file for entry in contents.entries.values() if contents.whole(entry)}
    contents.leftovers |= {file for file in in_shards if file in contents.shards and file not in living}
    return contents


def _list(folder: Path, kind: str, contents: Contents) -> None:
    """Which files there are, with their sizes."""
    if not (folder / kind).is_dir():
        return
    with os.scandir(folder / kind) as items:
        for item in items:
            file = f"{kind}/{item.name}"
            if item.name.startswith(PART):
                contents.parts.add(file)
            elif not item.name.endswith(SUFFIX) or not item.is_file():
                contents.strays.add(file)
            else:
                try:
                    contents.sizes[file] = item.stat().st_size
                except FileNotFoundError:  # another process has just packed it
                    continue


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _take(contents: Contents, value: Line) -> None:
    """Add what one line of the manifest says; a later line counts more than an earlier one."""
    if "entry" in value:
        entry = value["entry"]
        contents.entries[entry.name] = entry
        contents.gone.discard(entry.file)
    elif "shard" in value:
        file, size, keys = value["shard"], value["bytes"], value["keys"]
        kind, _, name = file.partition("/")
        contents.gone.discard(file)
        if all((kind, key) in contents.entries for key in keys):  # else the shard itself is asked
            contents.shards[file] = size
        for key in keys:
            if (kind, key) in contents.entries:
                shard = name.removesuffix(SUFFIX)
                contents.entries[kind, key] = replace(contents.entries[kind, key], shard=shard, file_bytes=0)
    elif "origin" in value:
        contents.origins[value["origin"]] = value["of"]
    else:
        contents.gone.add(value["gone"])
        contents.untidy = True


def _adopt(folder: Path, file: str, contents: Contents) -> None:
    """Take over the entries of a file that the manifest does not know, but for those that are whole elsewhere."""
    kind, _, name = file.removesuffix(SUFFIX).partition("/")
    try:
        label: Label = read_label(folder / file)
    except FileNotFoundError:
        return
    except UNREADABLE:
        contents.strays.add(file)
        return
    is_shard = name.startswith(SHARD)
    if any(entry.kind != kind or not (is_shard or entry.key == name) for entry in label["entries"]):
        contents.strays.add(file)
        return
    contents.untidy = True
    if is_shard:
        contents.shards[file] = contents.sizes[file]
    for entry in label["entries"]:
        known = contents.entries.get(entry.name)
        if known is None or not contents.whole(known):
            own = {"shard": name} if is_shard else {"file_bytes": contents.sizes[file]}
            contents.entries[entry.name] = replace(entry, **own)
            contents.origins[entry.origin] = label["origins"].get(entry.origin, {})


def entry_line(entry: Entry) -> dict[str, Any]:
    """The manifest's line of an entry in a file of its own."""
    return {"entry": entry.to_json()}


def shard_line(file: str, size: int, keys: Iterable[str]) -> dict[str, Any]:
    """The manifest's line that says: these entries are in this shard now."""
    return {"shard": file, "bytes": size, "keys": list(keys)}


def origin_line(name: str, of: Mapping[str, str]) -> dict[str, Any]:
    """The manifest's line of the versions that made the entries naming it."""
    return {"origin": name, "of": dict(of)}


def append(folder: Path, line: Mapping[str, Any], *, durable: bool = False) -> None:
    """Add a line to the manifest in one write; after a line that a kill has torn, on a line of its own."""
    path = folder / "manifest.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        data = (b"\n" if torn else b"") + _line(line)
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, "the manifest could not be written to its end", str(path))
        if durable:
            os.fsync(file.fileno())


def write_manifest(folder: Path, contents: Contents, gone: Iterable[str] = ()) -> None:
    """Write the manifest anew, whole."""
    used = {entry.origin for entry in contents.entries.values()}
    lines = [origin_line(name, of) for name, of in contents.origins.items() if name in used]
    keys: dict[str, list[str]] = {}
    for entry in contents.entries.values():
        lines.append(entry_line(entry))
        if entry.shard:
            keys.setdefault(entry.file, []).append(entry.key)
    lines += [shard_line(file, contents.shards[file], keys[file]) for file in keys]
    lines += [{"gone": file} for file in sorted(gone)]
    write_bytes(folder / "manifest.jsonl", b"".join(map(_line, lines)))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
