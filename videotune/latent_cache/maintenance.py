"""Looking after a cache: read everything again, remove what nobody wants, list what is there."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from videotune.latent_cache.store import UNREADABLE, Entry, Name, Store, file_of, read_entry, read_tensors

Progress = Callable[[int, int, str], None]
"""Called with how many are done, how many there are, and which is next."""


@dataclass(frozen=True)
class Damaged:
    """An entry that is not what was written, what it was made of, and what is wrong with it."""

    kind: str
    key: str
    file: str
    of: str
    why: str


@dataclass(frozen=True)
class Pruned:
    """What a pruning removes, or would: entries with their bytes, and files that are none; ``kept`` entries stay."""

    entries: tuple[Entry, ...]
    entry_bytes: int
    files: tuple[str, ...]
    file_bytes: int
    kept: int


def verify(store: Store, progress: Progress) -> list[Damaged]:
    """Read every entry, compare it with its hash, and drop those that are damaged, so that they are made anew.

    Raises VideotuneError where another process is filling the cache.
    """
    found, names = [], store.names()
    with store.filling():
        for done, (kind, key) in enumerate(names):
            file = file_of(kind, key)
            progress(done, len(names), file)
            entry = None
            try:
                entry = read_entry(store.folder, kind, key)
                read_tensors(store.folder, entry)
            except UNREADABLE as error:
                found.append(Damaged(kind, key, file, entry.of if entry else "", f"cannot be read ({error})"))
        progress(len(names), len(names), "")
        store.drop((row.kind, row.key) for row in found)
    return found


def prune(store: Store, wanted: Set[Name], *, yes: bool) -> Pruned:
    """What of the cache is not ``wanted``; with ``yes`` it is removed.

    Raises VideotuneError where another process is filling the cache.
    """
    entries = store.entries()
    gone = tuple(entry for entry in entries if entry.name not in wanted)
    sizes = {
        f: (store.folder / f).stat().st_size for f in store.strays() | store.parts() if (store.folder / f).is_file()
    }
    if yes:
        with store.filling():
            store.drop((entry.name for entry in gone), store.strays())
        sizes = {file: size for file, size in sizes.items() if not (store.folder / file).exists()}
    kept, files = len(entries) - len(gone), tuple(sorted(sizes))
    return Pruned(gone, sum(entry.bytes for entry in gone), files, sum(sizes.values()), kept)


def listing(store: Store) -> list[dict[str, Any]]:
    """Every entry, latents first, by what it was made of (``of``: the caption or the window), ``made`` when and by what."""
    rows = []
    for entry in store.entries():
        tensors = {name: f"{kind} {'x'.join(map(str, size))}".strip() for name, (kind, size) in entry.tensors.items()}
        row = {name: getattr(entry, name) for name in ("kind", "key", "of", "bytes", "made", "versions", "file")}
        rows.append(row | {"clip": entry.about.get("clip"), "encoder": entry.about.get("encoder"), "tensors": tensors})
    return sorted(rows, key=lambda row: (row["kind"], row["clip"] or "", row["of"], row["key"]))
