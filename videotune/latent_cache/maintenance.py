"""Look after a cache: read everything again, remove what no run needs, list what it
holds.
"""

from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from videotune.errors import VideotuneError
from videotune.latent_cache.entry import (
    UNREADABLE,
    CacheEntry,
    EntryName,
    read_entry,
    read_tensors,
)
from videotune.latent_cache.remote_entries import LocalEntries
from videotune.latent_cache.store import LatentCache

HEADERS_AT_ONCE = 16
"""Headers of entries that are fetched from an object store at a time."""

FileProgressFn = Callable[[int, int, str], None]
"""Called with how many files are done, how many there are, and which is next."""


@dataclass(frozen=True)
class Damaged:
    """An entry that is not what was written."""

    kind: str
    key: str
    file: str
    of: str
    """What it was made of, if that can be read."""
    why: str


@dataclass(frozen=True)
class Pruned:
    """What a pruning removes, or would remove."""

    entries: tuple[CacheEntry, ...]
    entry_bytes: int
    files: tuple[str, ...]
    """Files that are not entries."""
    file_bytes: int
    kept: int
    """Entries that stay."""


def verify(store: LatentCache, progress: FileProgressFn) -> list[Damaged]:
    """Read every entry, compare it with its hash, and drop the damaged ones, so that
    they are encoded again.

    Of a cache on an object store every object is fetched, one at a time, and dropped
    where it is damaged. A copy that is damaged is dropped alone.

    Raises VideotuneError if another process is filling the cache.
    """
    here = store.names()
    on_store = sorted(store.remote.sizes())
    total = len(here) + len(on_store)
    damaged_here = []
    damaged_on_store = []
    with store.write_lock():
        for done, name in enumerate(here):
            file = store.file(*name)
            progress(done, total, file)
            damage = _damage(store.folder, name, file)
            if damage is not None:
                damaged_here.append(damage)

        for done, name in enumerate(on_store, start=len(here)):
            address = store.remote.address(name)
            progress(done, total, address)
            with TemporaryDirectory(prefix="videotune-verify-") as folder:
                store.remote.fetch_to(name, Path(folder))
                damage = _damage(Path(folder), name, address)
            if damage is not None:
                damaged_on_store.append(damage)

        progress(total, total, "")
        store.drop_copies((entry.kind, entry.key) for entry in damaged_here)
        store.drop((entry.kind, entry.key) for entry in damaged_on_store)
    return damaged_here + damaged_on_store


def _damage(folder: Path, name: EntryName, file: str) -> Damaged | None:
    """Read an entry, and return what is wrong with it.

    Args:
        folder: the cache folder.
        name: the entry's name.
        file: how the entry's file is called for the user.
    """
    kind, key = name
    entry = None
    try:
        entry = read_entry(folder, kind, key)
        read_tensors(folder, entry)
    except UNREADABLE as error:
        made_of = entry.made_of if entry else ""
        return Damaged(kind, key, file, made_of, f"cannot be read ({error})")
    return None


def prune(store: LatentCache, wanted: Set[EntryName], *, yes: bool) -> Pruned:
    """Find entries and files of the cache that are not ``wanted``, and with ``yes`` remove
    them.

    Raises VideotuneError if another process is filling the cache.
    """
    on_store = [
        _listed_entry(name, size) for name, size in store.remote_sizes().items()
    ]
    entries = [*store.entries(), *on_store]
    unwanted = tuple(entry for entry in entries if entry.name not in wanted)
    other_files = {
        file: store.folder / file for file in store.unknown_files() | store.parts()
    }
    sizes = {
        file: path.stat().st_size
        for file, path in other_files.items()
        if path.is_file()
    }

    if yes:
        with store.write_lock():
            store.drop((entry.name for entry in unwanted), store.unknown_files())
        # Files of writers that still write stay.
        sizes = {
            file: size for file, size in sizes.items() if not other_files[file].exists()
        }

    return Pruned(
        entries=unwanted,
        entry_bytes=sum(entry.bytes for entry in unwanted),
        files=tuple(sorted(sizes)),
        file_bytes=sum(sizes.values()),
        kept=len(entries) - len(unwanted),
    )


def _listed_entry(name: EntryName, size: int) -> CacheEntry:
    """Return what a listing of an object store says of an entry that is not here."""
    kind, key = name
    return CacheEntry(
        kind=kind,
        key=key,
        tensors={},
        bytes=size,
        hash="",
        about={"clip": key, "caption": key},
        made="",
        versions={},
    )


def listing(store: LatentCache, progress: FileProgressFn) -> list[dict[str, Any]]:
    """Return every entry as a row, latents first, sorted by what it was made of.

    Of those that are only on an object store the headers are fetched.
    """
    rows = [_row(entry, store.file(*entry.name)) for entry in store.entries()]

    names = sorted(store.remote_sizes())
    with ThreadPoolExecutor(HEADERS_AT_ONCE, "headers") as pool:
        readings = pool.map(lambda name: _entry_on_store(store.remote, name), names)
        for done, (name, entry) in enumerate(zip(names, readings, strict=True)):
            address = store.remote.address(name)
            progress(done, len(names), address)
            if entry is not None:
                rows.append(_row(entry, address))
            else:
                store.notes.append(
                    f"{address} is no entry that videotune wrote; videotune cache verify removes it"
                )
    progress(len(names), len(names), "")
    return sorted(
        rows, key=lambda row: (row["kind"], row["clip"] or "", row["of"], row["key"])
    )


def _entry_on_store(remote: LocalEntries, name: EntryName) -> CacheEntry | None:
    """Return an entry of an object store; None if videotune did not write it."""
    try:
        return remote.read_entry(name)
    except VideotuneError:
        raise
    except UNREADABLE:
        return None


def _row(entry: CacheEntry, file: str) -> dict[str, Any]:
    """Return an entry as a row of the listing."""
    tensors = {}
    for name, (dtype, shape) in entry.tensors.items():
        tensors[name] = f"{dtype} {'x'.join(map(str, shape))}".strip()

    return {
        "kind": entry.kind,
        "key": entry.key,
        "of": entry.made_of,
        "bytes": entry.bytes,
        "made": entry.made,
        "versions": entry.versions,
        "file": file,
        "clip": entry.about.get("clip"),
        "encoder": entry.about.get("encoder"),
        "tensors": tensors,
    }
