"""The cache on disk: entries in safetensors shards, and a manifest that says what each was made from.

An entry's name is a hash of what decides its content (clip, times, size, encoder, dtype; not library versions): what changes
gets another name, so no entry is ever stale. An entry is in a file of its own as soon as it is made, and later moves into
a shard with others. It counts where its file has the size that was written; its hash is checked when it is first read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from videotune.cache import manifest, shards
from videotune.cache.lock import LOCK, only_writer
from videotune.cache.manifest import Contents
from videotune.cache.shards import Entry, Name
from videotune.data.file_checks import refuse_links
from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.types import ClipShape

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 64 * 10**6
SHARD_ENTRIES = 512
"""So much, or so many entries, lying alone become a shard."""

OPEN_SHARDS = 32
"""Shards kept open for reading."""


class Store:
    """A cache folder. ``kind`` is "latents" or "text".

    Up to ``keep_bytes`` of what was read last stay in memory: a small dataset is then read from the disk once. Opening
    one writes nothing; ``notes`` are sentences for the person on what was found. Reading is safe from many threads, and
    while another process fills the same folder.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._keep, self._kept_bytes = keep_bytes, 0
        self._kept: OrderedDict[Name, dict[str, Tensor]] = OrderedDict()
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = RLock()
        self._origin: str | None = None
        self._checked: set[Name] = set()
        self._damaged: set[Name] = set()
        try:
            refuse_links(folder)
            self._load()
        except OSError as error:
            raise VideotuneError(f"the cache {folder} cannot be read: {error}. Set cache_dir elsewhere.") from error
        self._tell()

    def _load(self) -> None:
        self._read_at = self._stamp()
        self._contents = manifest.read_contents(self.folder)
        alone = [entry for entry in self._contents.entries.values() if _packable(entry)]
        self._alone = Counter({kind: sum(entry.kind == kind for entry in alone) for kind in shards.KINDS})
        self._alone_bytes = Counter[str]()
        for entry in alone:
            self._alone_bytes[entry.kind] += entry.bytes

    def _tell(self) -> None:
        found = self._contents
        if self._read_at is None and found.entries:
            self.notes.append(f"the cache {self.folder} has no manifest; what its files hold was read from themselves")
        if found.damaged_lines:
            self.notes.append(
                f"{found.damaged_lines} lines of {self.folder / 'manifest.jsonl'} cannot be read; "
                "what they spoke of was looked up in the files themselves"
            )
        if found.strays:
            self.notes.append(
                f"{len(found.strays)} files of the cache {self.folder} are none of its entries, "
                f"such as {min(found.strays)}; pruning removes them"
            )

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = (self.folder / "manifest.jsonl").stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def entries(self) -> list[Entry]:
        """All entries that the store knows, whole or not."""
        return list(self._contents.entries.values())

    def contents(self) -> Contents:
        """What the folder held when it was read last, for those who take care of it."""
        return self._contents

    def path(self, kind: str, key: str) -> Path:
        """The file in which the entry lies, or would lie."""
        entry = self._contents.entries.get((kind, key))
        return self.folder / (entry.file if entry else f"{kind}/{key}{shards.SUFFIX}")

    def has(self, kind: str, key: str) -> bool:
        """Whether the entry is there whole."""
        entry = self._contents.entries.get((kind, key))
        if entry is None or entry.name in self._damaged:
            return False
        if self._is_whole(entry):
            return True
        return (
            self._refresh() and (again := self._contents.entries.get((kind, key))) is not None and self._is_whole(again)
        )

    def _is_whole(self, entry: Entry) -> bool:
        wanted = self._contents.shards.get(entry.file) if entry.shard else entry.file_bytes
        try:
            return (self.folder / entry.file).stat().st_size == wanted
        except FileNotFoundError:
            return False

    def _refresh(self) -> bool:
        """Read the folder again if its manifest has changed: another process may have packed or pruned."""
        with self._lock:
            if self._stamp() == self._read_at:
                return False
            self._load()
            return True

    def about(self, kind: str, key: str) -> dict[str, Any]:
        """What the manifest says of an entry; what it was made of is under "about"."""
        return self._contents.entries[kind, key].to_json()

    def put(self, kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write an entry whole, then its line in the manifest.

        Raises VideotuneError where the folder cannot be written.
        """
        assert kind in shards.KINDS, kind
        assert "." not in key, key
        own = {name: shards.alone(tensor) for name, tensor in tensors.items()}
        with self._writing():
            origin = self._named_origin()
            entry = shards.describe(kind, key, own, about, origin)
            entry = shards.write_entry(self.folder, entry, self._contents.origins[origin], own)
            manifest.append(self.folder, manifest.entry_line(entry))
        with self._lock:
            old = self._contents.entries.get(entry.name)
            self._contents.entries[entry.name] = entry
            self._count(old, -1)
            self._count(entry, 1)
            self._forget(entry.name)
            self._checked.discard(entry.name)
            self._damaged.discard(entry.name)

    def _named_origin(self) -> str:
        """The name of what makes entries now; written down at the first one."""
        if self._origin is None or self._origin not in self._contents.origins:
            of = shards.versions()
            self._origin = digest(of)[:8]
            self._contents.origins[self._origin] = of
            manifest.append(self.folder, manifest.origin_line(self._origin, of))
        return self._origin

    def _count(self, entry: Entry | None, by: int) -> None:
        if entry is not None and _packable(entry):
            self._alone[entry.kind] += by
            self._alone_bytes[entry.kind] += by * entry.bytes

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VideotuneError(
                f"the cache {self.folder} cannot be written: {error}. Set cache_dir elsewhere."
            ) from error

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Hold the folder's lock, and put away what killed writers left behind.

        Raises VideotuneError that names the process which holds the lock.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
        with only_writer(self.folder) as note:
            self.notes += [note] if note else []
            with self._lock, self._writing():
                self._load()
                self._origin = None
                self._tidy()
            yield

    def _tidy(self) -> None:
        """Under the lock: drop what is not whole, delete what no entry needs, and write the manifest if it was not so."""
        found = self._contents
        began = (self.folder / LOCK).stat().st_mtime  # by the clock of the disk's owner
        for file in found.parts:
            path = self.folder / file
            if path.is_file() and path.stat().st_mtime < began:
                path.unlink(missing_ok=True)
        lost = [entry for entry in found.entries.values() if not found.whole(entry)]
        if lost:
            self.notes.append(f"{len(lost)} entries of the cache were gone or cut short; those needed are made anew")
        for entry in lost:
            del found.entries[entry.name]
        broken = {entry.file for entry in lost if entry.file in found.sizes}
        needed = {entry.file for entry in found.entries.values()}
        useless = (found.gone | found.leftovers | broken) - needed
        if useless or lost or found.untidy:
            self._discard(useless)

    def _discard(self, files: Iterable[str]) -> None:
        """Delete files so that a kill at any moment does not bring them back."""
        files = set(files)
        for file in files:
            self._contents.shards.pop(file, None)
            self._open.pop(file, None)
        if files:
            manifest.write_manifest(self.folder, self._contents, files)
        for file in files:
            (self.folder / file).unlink(missing_ok=True)
        manifest.write_manifest(self.folder, self._contents)
        self._load()

    def full(self, kind: str) -> bool:
        """Whether so much lies alone that it should be packed."""
        return self._alone[kind] >= SHARD_ENTRIES or self._alone_bytes[kind] >= SHARD_BYTES

    def pack(self, kind: str) -> None:
        """Under the lock: move entries that lie alone into shards; one that is damaged is deleted, with a note."""
        with self._lock, self._writing():
            alone = [entry for entry in self._contents.entries.values() if entry.kind == kind and _packable(entry)]
            for group in _groups(alone):
                self._shard(group)

    def _shard(self, group: list[Entry]) -> None:
        pairs = []
        for entry in group:
            [(_, tensors, trouble)] = self.checked([entry])
            if tensors is None:
                self.notes.append(f"{self.folder / entry.file} {trouble}; it is made anew when it is needed")
                del self._contents.entries[entry.name]
                self._count(entry, -1)
                self._discard([entry.file])
            else:
                pairs.append((entry, tensors))
        if len(pairs) < 2:
            return
        self._store_shard(pairs)
        for entry, _ in pairs:
            self._count(entry, -1)
            (self.folder / entry.file).unlink(missing_ok=True)

    def _store_shard(self, pairs: list[tuple[Entry, dict[str, Tensor]]]) -> None:
        """Write a shard and its line; from then on its entries are read there."""
        file = shards.write_shard(self.folder, pairs, self._contents.origins)
        size = (self.folder / file).stat().st_size
        manifest.append(self.folder, manifest.shard_line(file, size, [entry.key for entry, _ in pairs]), durable=True)
        self._contents.shards[file] = size
        self._open.pop(file, None)
        name = Path(file).name.removesuffix(shards.SUFFIX)
        for entry, _ in pairs:
            self._contents.entries[entry.name] = replace(entry, shard=name, file_bytes=0)

    def drop(self, names: Iterable[Name], *, merge: bool = True) -> None:
        """Under the lock: forget entries and give their bytes back; shards that lose some are written anew.

        With ``merge`` small shards become larger ones.
        """
        names = set(names)
        with self._lock, self._writing():
            found = self._contents
            held: dict[str, list[Entry]] = {}
            for entry in found.entries.values():
                held.setdefault(entry.file, []).append(entry)
            losing = [file for file, entries in held.items() if any(entry.name in names for entry in entries)]
            small = [file for file, entries in held.items() if entries[0].shard and _small(entries)]
            small = small if merge and len(small) > 1 else []
            again = list(dict.fromkeys([*losing, *small]))
            for name in names:
                found.entries.pop(name, None)
                self._forget(name)
            for kind in shards.KINDS:
                self._write_anew([file for file in again if file.startswith(f"{kind}/")], held, names)
            self._discard(file for file in again if file not in {entry.file for entry in found.entries.values()})

    def _write_anew(self, files: list[str], held: dict[str, list[Entry]], names: set[Name]) -> None:
        """Put what stays of these files into shards of their own."""
        pairs: list[tuple[Entry, dict[str, Tensor]]] = []
        for done, file in enumerate(files, 1):
            for entry, tensors, trouble in self.checked([entry for entry in held[file] if entry.name not in names]):
                if tensors is None:
                    self.notes.append(f"{file}: entry {entry.key} {trouble}; it is made anew when it is needed")
                    del self._contents.entries[entry.name]
                else:
                    pairs.append((entry, tensors))
            if pairs and (_is_full([entry for entry, _ in pairs]) or done == len(files)):
                self._store_shard(pairs)
                pairs = []

    def sweep(self, files: Iterable[str]) -> None:
        """Under the lock: delete files that are no entries."""
        with self._lock, self._writing():
            for file in files:
                path = self.folder / file
                if path.is_dir() and not path.is_symlink():
                    self.notes.append(f"{path} is a folder, which pruning leaves alone")
                else:
                    path.unlink(missing_ok=True)
            self._load()

    def checked(self, entries: list[Entry]) -> list[tuple[Entry, dict[str, Tensor] | None, str]]:
        """Read entries of one file from the disk, and compare them with their hashes.

        With each its tensors, or None and what is wrong with it.
        """
        if not entries:
            return []
        path = self.folder / entries[0].file
        if not self._is_whole(entries[0]):
            why = "has another size than was written" if path.is_file() else "is gone"
            return [(entry, None, why) for entry in entries]
        try:
            tensors = shards.read_file(path)
            marks = {entry.key: entry.hash for entry in shards.read_label(path)["entries"]}
        except shards.UNREADABLE as error:
            return [(entry, None, f"cannot be read ({error})") for entry in entries]
        return [(entry, *shards.true_to(entry, tensors, marks.get(entry.key))) for entry in entries]

    def examine(self, asked: Mapping[Name, ClipShape | None], fits: Callable[[Entry, ClipShape | None], bool]) -> None:
        """What does not ``fits`` its shape counts as missing, and what is damaged of what stays in memory, read now."""
        before = len(self._damaged)
        for name, shape in asked.items():
            if not self.has(*name):
                continue
            entry = self._contents.entries[name]
            if not fits(entry, shape):
                self._damaged.add(name)
            elif self._kept_bytes + entry.bytes <= self._keep:
                try:
                    self.get(*name)
                except VideotuneError:
                    self._damaged.add(name)
        if lost := len(self._damaged) - before:
            self.notes.append(f"{lost} entries of the cache are damaged or not of this model, and are made anew")

    def get(self, kind: str, key: str) -> dict[str, Tensor]:
        """Read an entry; its tensors are shared with whoever asks again and must not be written to.

        At its first read its hash, dtypes and shapes are compared with the manifest's. Raises VideotuneError where it is
        missing or damaged.
        """
        name = kind, key
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        tensors = self._read(name)
        with self._lock:
            if name not in self._kept:
                self._kept[name] = tensors
                self._kept_bytes += _bytes(tensors)
            while self._kept_bytes > self._keep:
                self._forget(next(iter(self._kept)))
        return tensors

    def _forget(self, name: Name) -> None:
        self._kept_bytes -= _bytes(self._kept.pop(name, {}))

    def _read(self, name: Name, again: bool = True) -> dict[str, Tensor]:
        entry = self._contents.entries.get(name)
        try:
            if entry is None:
                raise KeyError("the manifest does not know it")
            if not self._is_whole(entry):
                raise OSError("it is gone or cut short")
            whole = self._from_shard(entry) if entry.shard else shards.read_file(self.folder / entry.file)
            own = whole if entry.shard else shards.pick(entry, whole)
            if name not in self._checked:
                if wrong := shards.wrong_with(entry, own):
                    raise ValueError(f"it {wrong}")
                self._checked.add(name)
            return own
        except shards.UNREADABLE as error:
            # another process may just have packed it, or this one in another thread
            if again and (self._refresh() or self._contents.entries.get(name) is not entry):
                return self._read(name, again=False)
            of = f" ({name[0]} of {entry.of[:80]!r})" if entry else ""
            raise VideotuneError(
                f"cache entry {self.path(*name)}{of} is missing or damaged ({error.args[0] if error.args else error}). "
                f"Run `videotune cache verify {self.folder}`: it drops what is damaged, and the next run makes it anew."
            ) from error

    def _from_shard(self, entry: Entry) -> dict[str, Tensor]:
        """Copies, as a map of the file must not outlive it."""
        handle = self._handle(entry.file)
        return {name: handle.get_tensor(f"{entry.key}.{name}").clone() for name in entry.tensors}

    def _handle(self, file: str) -> Any:
        """The shard, open for reading; those asked for longest ago are closed when nobody reads them any more."""
        from safetensors import safe_open

        with self._lock:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            self._open.move_to_end(file)
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
            return self._open[file]


def _packable(entry: Entry) -> bool:
    return entry.shard is None and entry.bytes < SHARD_BYTES


def _is_full(entries: list[Entry]) -> bool:
    return len(entries) >= SHARD_ENTRIES or sum(entry.bytes for entry in entries) >= SHARD_BYTES


def _small(entries: list[Entry]) -> bool:
    return len(entries) < SHARD_ENTRIES // 8 and sum(entry.bytes for entry in entries) < SHARD_BYTES // 8


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    """One after the other until a shard is full."""
    group: list[Entry] = []
    for entry in entries:
        group.append(entry)
        if _is_full(group):
            yield group
            group = []
    if group:
        yield group


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
