"""Look after a cache: read everything again, remove what no run needs, list what it
holds.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from videotune.latent_cache.entry import (
    UNREADABLE,
    CacheEntry,
    EntryName,
    read_entry,
    read_tensors,
)
from videotune.latent_cache.store import LatentCache

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

    Raises VideotuneError if another process is filling the cache.
    """
    damaged = []
    names = store.names()
    with store.write_lock():
        for done, (kind, key) in enumerate(names):
            file = store.file(kind, key)
            progress(done, len(names), file)
            entry = None
            try:
                entry = read_entry(store.folder, kind, key)
                read_tensors(store.folder, entry)
            except UNREADABLE as error:
                made_of = entry.made_of if entry else ""
                damaged.append(
                    Damaged(kind, key, file, made_of, f"cannot be read ({error})")
                )

        progress(len(names), len(names), "")
        store.drop((entry.kind, entry.key) for entry in damaged)
    return damaged


def prune(store: LatentCache, wanted: Set[EntryName], *, yes: bool) -> Pruned:
    """Find entries and files of the cache that are not ``wanted``, and with ``yes`` remove
    them.

    Raises VideotuneError if another process is filling the cache.
    """
    on_store = [
        _entry_on_store(name, size) for name, size in store.remote_sizes().items()
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


def _entry_on_store(name: EntryName, size: int) -> CacheEntry:
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


def listing(store: LatentCache) -> list[dict[str, Any]]:
    """Return every entry as a row, latents first, sorted by what it was made of."""
    rows = []
    for entry in store.entries():
        tensors = {}
        for name, (dtype, shape) in entry.tensors.items():
            tensors[name] = f"{dtype} {'x'.join(map(str, shape))}".strip()
        rows.append(
            {
                "kind": entry.kind,
                "key": entry.key,
                "of": entry.made_of,
                "bytes": entry.bytes,
                "made": entry.made,
                "versions": entry.versions,
                "file": store.file(*entry.name),
                "clip": entry.about.get("clip"),
                "encoder": entry.about.get("encoder"),
                "tensors": tensors,
            }
        )
    return sorted(
        rows, key=lambda row: (row["kind"], row["clip"] or "", row["of"], row["key"])
    )
