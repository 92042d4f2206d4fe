"""The cache on disk: one safetensors file an entry, which says itself what it holds (in its safetensors metadata).

An entry's name is a hash of what decides its content (clip, times, size, encoder, dtype; not library versions): what changes
gets another name, so no entry is ever stale. A file is there whole or not at all; its hash is checked when it is first read.

And looking after it: read everything again, remove what nobody wants, list what is there.
"""

import hashlib
import json
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, cast

import torch
from filelock import FileLock, Timeout
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor
from typing_extensions import TypedDict

from videotune._version import __version__
from videotune.data.file_checks import refuse_links
from videotune.errors import VideotuneError
from videotune.files import Count, checked, system_errors, write_whole
from videotune.types import DETERMINISTIC_VARIANT, ClipShape

KINDS = ("latents", "text")
SUFFIX = ".safetensors"
LABEL = "videotune"
"""The one key of our metadata; with a single key the order in the file is settled, and so are its bytes."""

UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
)
"""What reading a damaged file can raise: safetensors and torch each have their own; deep JSON is a RuntimeError."""

EntryName = tuple[str, str]
"""(kind, key)."""


class About(TypedDict, total=False):
    """What an entry was made of."""

    clip: str
    window: str
    caption: str
    encoder: str
    variant: int
    length: int
    cut: int


@dataclass(frozen=True)
class CacheEntry:
    """One encoded thing. ``tensors`` maps its names to (dtype, shape); ``bytes`` counts their data, ``hash`` names it.

    ``about`` says what it was made of, ``versions`` by what.
    """

    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,200}$")]
    tensors: Mapping[str, tuple[str, tuple[Count, ...]]]
    bytes: Count
    hash: str
    about: About
    made: str
    versions: Mapping[str, str]

    @property
    def name(self) -> EntryName:
        """(kind, key)."""
        return self.kind, self.key

    @property
    def file(self) -> str:
        """Its file, below the cache folder."""
        return file_of(*self.name)

    @property
    def of(self) -> str:
        """What it was made of, in a few words: the caption, or the clip, the window and its variant."""
        if self.kind == "text":
            return str(self.about.get("caption", ""))
        variant = self.about.get("variant", 0)
        drawn = (
            ""
            if variant == 0
            else " plain"
            if variant == DETERMINISTIC_VARIANT
            else f" variant {variant}"
        )
        clip = str(self.about.get("clip", "")).replace("\\", "/").rpartition("/")[2]
        return f"{clip} {self.about.get('window', '')}{drawn}".strip()


def file_of(kind: str, key: str) -> str:
    """The file of an entry, below the cache folder."""
    return f"{kind}/{key}{SUFFIX}"


def describe(
    kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> CacheEntry:
    """The entry of these tensors (on the CPU, contiguous), not yet in a file."""
    size = sum(x.nbytes for x in tensors.values())
    made = datetime.now().astimezone().isoformat(timespec="seconds")
    return CacheEntry(
        kind,
        key,
        form_of(tensors),
        size,
        hash_of(tensors),
        cast(About, dict(about)),
        made,
        versions(),
    )


def form_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape)."""
    return {
        name: (str(x.dtype).removeprefix("torch."), tuple(x.shape))
        for name, x in tensors.items()
    }


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits that name the tensors: names, dtypes, shapes and every byte."""
    mark = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        x = tensors[name]
        mark.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        mark.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return mark.hexdigest()


@cache
def versions() -> dict[str, str]:
    """What makes an entry: the libraries whose versions may change its bits."""
    return {"videotune": __version__} | {
        name: version(name) for name in ("torch", "diffusers", "transformers", "av")
    }


def read_entry(folder: Path, kind: str, key: str) -> CacheEntry:
    """What a file of the cache says that it holds, without its data.

    Raises one of UNREADABLE where it is missing, cut short or none of ours. A dataset may bring a cache that others made.
    """
    with safe_open(folder / file_of(kind, key), framework="np") as file:
        entry: CacheEntry = checked(CacheEntry, (file.metadata() or {})[LABEL])
    if entry.name != (kind, key):
        raise ValueError(f"it says that it is {entry.file}")
    return entry


def read_tensors(folder: Path, entry: CacheEntry, *, check: bool = True) -> dict[str, Tensor]:
    """An entry's tensors by plain reading, since a memory map of a bad disk would kill the process.

    Raises one of UNREADABLE; with ``check`` also where they are not those that were written. Of what somebody else wrote
    the hash may be right: dtypes and shapes must be those that were promised, numbers finite.
    """
    own = load((folder / entry.file).read_bytes())
    if not check:
        return own
    if hash_of(own) != entry.hash:
        raise ValueError("holds other bytes than were written")
    if form_of(own) != entry.tensors:
        raise ValueError("holds tensors of another kind than it says")
    # of the sums: a third of the time of asking each number
    if not all(x.sum(dtype=torch.float32).isfinite() for x in own.values()):
        raise ValueError("holds infinite or undefined numbers")
    return own


def alone(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and sharing memory with no other, as a file needs it."""
    whole = tensor.detach().cpu().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


LOCK = "lock"
OWNER = "lock.owner"
PART = ".part-"
"""How the names of files begin that are being written."""

EARLIER = "manifest.jsonl"
"""A file of caches that an earlier version wrote."""


class LatentCache:
    """A cache folder. ``kind`` is "latents" or "text".

    Up to ``keep_bytes`` of what was read last stay in memory: a small dataset is then read from the disk once. Opening
    one writes nothing; ``notes`` are sentences for the user on what was found. Reading is safe from many threads, and
    while another process fills the same folder.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._keep = keep_bytes
        self._kept_bytes = 0
        self._kept: OrderedDict[EntryName, dict[str, Tensor]] = OrderedDict()
        self._entries: dict[EntryName, CacheEntry] = {}
        self._checked: set[EntryName] = set()
        self._damaged: set[EntryName] = set()
        self._lock = RLock()
        try:
            refuse_links(folder)
            strays = self.unknown_files()
        except OSError as error:
            raise VideotuneError(
                f"the cache {folder} cannot be read: {error}. Set cache_dir elsewhere."
            ) from error
        if (folder / EARLIER).is_file():
            old = "was made by an earlier version: what a run needs is encoded anew"
            self.notes.append(
                f"the cache {folder} {old}. `videotune cache prune` removes the old files"
            )
        elif strays:
            such = f"{len(strays)} files of the cache {folder} are none of its entries, such as {min(strays)}"
            self.notes.append(f"{such}; pruning removes them")

    def _files(self, kind: str) -> list[str]:
        """Names of the files of a kind."""
        return sorted(os.listdir(self.folder / kind)) if (self.folder / kind).is_dir() else []

    def names(self) -> list[EntryName]:
        """The names of all files that look like entries."""
        found = [(kind, name) for kind in KINDS for name in self._files(kind)]
        whole = [
            (kind, name)
            for kind, name in found
            if name.endswith(SUFFIX) and not name.startswith(PART)
        ]
        return [(kind, name.removesuffix(SUFFIX)) for kind, name in whole]

    def entries(self) -> list[CacheEntry]:
        """All entries that can be read."""
        return [entry for name in self.names() if (entry := self.entry(*name)) is not None]

    def unknown_files(self) -> set[str]:
        """Files below the folders of entries that are none and are not being written, and those of an earlier version."""
        found = {
            f"{kind}/{name}"
            for kind in KINDS
            for name in self._files(kind)
            if not name.startswith(PART)
        }
        old = {EARLIER} if (self.folder / EARLIER).is_file() else set()
        return (
            found - {file_of(*name) for name in self.names() if self.entry(*name) is not None}
            | old
        )

    def parts(self) -> set[str]:
        """Files that are being written, or that killed writers have left behind."""
        return {
            f"{kind}/{name}"
            for kind in KINDS
            for name in self._files(kind)
            if name.startswith(PART)
        }

    def path(self, kind: str, key: str) -> Path:
        """The file in which the entry lies, or would lie."""
        return self.folder / file_of(kind, key)

    def entry(self, kind: str, key: str) -> CacheEntry | None:
        """What an entry's file says of itself; None where there is none that can be read."""
        name = kind, key
        if name not in self._entries:
            with suppress(*UNREADABLE):
                self._entries[name] = read_entry(self.folder, kind, key)
        return self._entries.get(name)

    def has(self, kind: str, key: str) -> bool:
        """Whether the entry is there whole."""
        there = (kind, key) not in self._damaged and self.path(kind, key).is_file()
        return there and self.entry(kind, key) is not None

    def put(
        self, kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        """Write an entry, whole or not at all. Raises VideotuneError where the folder cannot be written."""
        own = {name: alone(tensor) for name, tensor in tensors.items()}
        entry = describe(kind, key, own, about)
        path = self.path(kind, key)
        label = json.dumps(vars(entry), ensure_ascii=False)

        def write(aside: Path) -> None:
            with system_errors(path):
                save_file(own, aside, metadata={LABEL: label})

        with self._writing():
            write_whole(path, write, durable=False)
        with self._lock:
            self._forget(entry.name)
            self._entries[entry.name] = entry

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"the cache {self.folder} cannot be written: {error}"
            raise VideotuneError(f"{what}. Set cache_dir elsewhere.") from error

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Hold the folder's lock, and remove what killed writers left behind.

        Raises VideotuneError that names the process which holds the lock.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / LOCK)
            owner = self.folder / OWNER
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                holder = (
                    owner.read_text(encoding="utf-8", errors="replace").strip()
                    if owner.is_file()
                    else ""
                )
                raise VideotuneError(
                    f"the cache {self.folder} is being written by {holder or 'another process'}. Wait until that is done, "
                    "or set cache_dir elsewhere."
                ) from error
            except NotImplementedError:
                no_locks = f"{self.folder} is on a file system without locks"
                self.notes.append(f"{no_locks}: let no two runs fill this cache at a time")
        try:
            with self._writing():
                since = datetime.now().astimezone().isoformat(timespec="seconds")
                owner.write_text(
                    f"process {os.getpid()} on {socket.gethostname()} since {since}\n",
                    encoding="utf-8",
                )
                began = owner.stat().st_mtime  # by the clock of the disk's owner
                for path in (self.folder / file for file in self.parts()):
                    if path.is_file() and path.stat().st_mtime < began:
                        path.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def drop(self, names: Iterable[EntryName], files: Iterable[str] = ()) -> None:
        """Under the lock: delete entries and other files."""
        with self._lock, self._writing():
            for name in names:
                self.path(*name).unlink(missing_ok=True)
                self._forget(name)
            for file in files:
                if (self.folder / file).is_dir():
                    self.notes.append(
                        f"{self.folder / file} is a folder, which pruning leaves alone"
                    )
                else:
                    (self.folder / file).unlink(missing_ok=True)

    def examine(
        self,
        asked: Mapping[EntryName, ClipShape | None],
        fits: Callable[[CacheEntry, ClipShape | None], bool],
    ) -> None:
        """Entries that are damaged, or not ``fits`` their shape, count as missing from now on.

        Those that stay in memory are read now; one that would not is read in its step.
        """
        lost = 0
        for name, shape in asked.items():
            if not self.path(*name).is_file():
                continue
            entry = self.entry(*name)
            if entry is not None and fits(entry, shape):
                if self._kept_bytes + entry.bytes > self._keep:
                    continue
                with suppress(VideotuneError):
                    self.get(*name)
                    continue
            lost += 1
            self._damaged.add(name)
        if lost:
            self.notes.append(
                f"{lost} entries of the cache are damaged or not of this model, and are made anew"
            )

    def get(self, kind: str, key: str) -> dict[str, Tensor]:
        """Read an entry; its tensors are shared with whoever asks again and must not be written to.

        Raises VideotuneError where it is missing or damaged.
        """
        name = kind, key
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        entry = self._entries.get(name)
        try:
            entry = entry or read_entry(self.folder, kind, key)
            tensors = read_tensors(self.folder, entry, check=name not in self._checked)
            self._checked.add(name)
        except UNREADABLE as error:
            of = f" ({kind} of {entry.of[:80]!r})" if entry else ""
            raise VideotuneError(
                f"cache entry {self.path(*name)}{of} is missing or damaged ({error.args[0] if error.args else error}). "
                f"Run `videotune cache verify {self.folder}`: it drops damaged entries, and the next run encodes them again."
            ) from error
        with self._lock:
            if name not in self._kept:
                self._kept[name] = tensors
                self._kept_bytes += _bytes(tensors)
            while self._kept_bytes > self._keep:
                self._discard(next(iter(self._kept)))
        return tensors

    def _discard(self, name: EntryName) -> None:
        self._kept_bytes -= _bytes(self._kept.pop(name, {}))

    def _forget(self, name: EntryName) -> None:
        """Nothing is known of an entry any more."""
        with self._lock:
            self._discard(name)
            self._entries.pop(name, None)
            self._checked.discard(name)
            self._damaged.discard(name)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


FileProgressFn = Callable[[int, int, str], None]
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

    entries: tuple[CacheEntry, ...]
    entry_bytes: int
    files: tuple[str, ...]
    file_bytes: int
    kept: int


def verify(store: LatentCache, progress: FileProgressFn) -> list[Damaged]:
    """Read every entry, compare it with its hash, and drop those that are damaged, so that they are made anew.

    Raises VideotuneError where another process is filling the cache.
    """
    found = []
    names = store.names()
    with store.filling():
        for done, (kind, key) in enumerate(names):
            file = file_of(kind, key)
            progress(done, len(names), file)
            entry = None
            try:
                entry = read_entry(store.folder, kind, key)
                read_tensors(store.folder, entry)
            except UNREADABLE as error:
                found.append(
                    Damaged(
                        kind, key, file, entry.of if entry else "", f"cannot be read ({error})"
                    )
                )
        progress(len(names), len(names), "")
        store.drop((row.kind, row.key) for row in found)
    return found


def prune(store: LatentCache, wanted: Set[EntryName], *, yes: bool) -> Pruned:
    """What of the cache is not ``wanted``; with ``yes`` it is removed.

    Raises VideotuneError where another process is filling the cache.
    """
    entries = store.entries()
    gone = tuple(entry for entry in entries if entry.name not in wanted)
    others = {file: store.folder / file for file in store.unknown_files() | store.parts()}
    sizes = {file: path.stat().st_size for file, path in others.items() if path.is_file()}
    if yes:
        with store.filling():
            store.drop((entry.name for entry in gone), store.unknown_files())
        sizes = {file: size for file, size in sizes.items() if not others[file].exists()}
    kept = len(entries) - len(gone)
    files = tuple(sorted(sizes))
    return Pruned(gone, sum(entry.bytes for entry in gone), files, sum(sizes.values()), kept)


def listing(store: LatentCache) -> list[dict[str, Any]]:
    """Every entry, latents first, by what it was made of (``of``: the caption or the window), ``made`` when and by what."""
    rows = []
    for entry in store.entries():
        tensors = {
            name: f"{kind} {'x'.join(map(str, size))}".strip()
            for name, (kind, size) in entry.tensors.items()
        }
        row = {
            name: getattr(entry, name)
            for name in ("kind", "key", "of", "bytes", "made", "versions", "file")
        }
        rows.append(
            row
            | {
                "clip": entry.about.get("clip"),
                "encoder": entry.about.get("encoder"),
                "tensors": tensors,
            }
        )
    return sorted(rows, key=lambda row: (row["kind"], row["clip"] or "", row["of"], row["key"]))
