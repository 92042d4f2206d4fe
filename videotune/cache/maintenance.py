"""Looking after a cache: read everything again, remove what nobody wants, list what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, replace

from videotune.cache.shards import Entry, Name
from videotune.cache.store import Store

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


@dataclass(frozen=True)
class Row:
    """One entry as a person reads it: ``of`` is the caption or the window, ``made`` when, by the ``versions``."""

    kind: str
    key: str
    of: str
    clip: str | None
    bytes: int
    tensors: dict[str, str]
    encoder: str | None
    made: str | None
    versions: dict[str, str]
    file: str
    whole: bool

    def to_json(self) -> dict[str, object]:
        """The row as JSON."""
        return asdict(self)


def verify(store: Store, progress: Progress) -> list[Damaged]:
    """Read every entry, compare it with its hash, and drop those that are damaged, so that they are made anew.

    Raises VideotuneError where another process is filling the cache.
    """
    found: list[Damaged] = []
    known = {entry.name: entry for entry in store.entries()}
    with store.filling():  # which itself drops what is cut short, and says so only in sum
        there = {entry.name for entry in store.entries()}
        found += [_damaged(entry, "was gone or cut short") for name, entry in known.items() if name not in there]
        held: dict[str, list[Entry]] = {}
        for entry in store.entries():
            held.setdefault(entry.file, []).append(entry)
        bad = []
        for done, file in enumerate(sorted(held)):
            progress(done, len(held), file)
            for entry, tensors, why in store.checked(held[file]):
                if tensors is None:
                    bad.append(entry.name)
                    found.append(_damaged(entry, why))
        progress(len(held), len(held), "")
        if bad:
            store.drop(bad, merge=False)
    return found


def _damaged(entry: Entry, why: str) -> Damaged:
    return Damaged(entry.kind, entry.key, entry.file, entry.of, why)


def prune(store: Store, wanted: Set[Name], *, yes: bool) -> Pruned:
    """What of the cache is not ``wanted``; with ``yes`` it is removed, and small shards become larger ones.

    Raises VideotuneError where another process is filling the cache.
    """
    files = store.contents().strays | store.contents().parts | store.contents().leftovers
    sizes = {file: (store.folder / file).stat().st_size for file in files if (store.folder / file).is_file()}
    pruned = _pruned(store, wanted, sizes)
    if not yes:
        return pruned
    with store.filling():  # which removes what killed writers left behind
        pruned = _pruned(store, wanted, sizes)
        store.drop(entry.name for entry in pruned.entries)
        store.sweep(store.contents().strays)
    gone = {file: size for file, size in sizes.items() if not (store.folder / file).exists()}
    return replace(pruned, files=tuple(sorted(gone)), file_bytes=sum(gone.values()))


def _pruned(store: Store, wanted: Set[Name], sizes: Mapping[str, int]) -> Pruned:
    entries = tuple(entry for entry in store.entries() if entry.name not in wanted)
    kept = len(store.entries()) - len(entries)
    return Pruned(entries, sum(e.bytes for e in entries), tuple(sorted(sizes)), sum(sizes.values()), kept)


def listing(store: Store) -> list[Row]:
    """Every entry, latents first, by what it was made of."""
    origins = store.contents().origins
    rows = []
    for entry in store.entries():
        origin = dict(origins.get(entry.origin, {}))
        row = Row(
            kind=entry.kind,
            key=entry.key,
            of=entry.of,
            clip=entry.about.get("clip"),
            bytes=entry.bytes,
            tensors={
                name: f"{dtype} {'x'.join(map(str, shape))}".strip() for name, (dtype, shape) in entry.tensors.items()
            },
            encoder=entry.about.get("encoder"),
            made=origin.pop("made", None),
            versions=origin,
            file=entry.file,
            whole=store.has(*entry.name),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (row.kind, row.clip or "", row.of, row.key))
