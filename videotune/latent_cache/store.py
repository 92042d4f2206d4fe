"""The cache on disk: one safetensors file an entry.

An entry's name is a hash of what decides its content (clip, times, size, encoder, dtype; not library versions): what changes
gets another name, so no entry is ever stale. A file is there whole or not at all; its hash is checked when it is first read.
"""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from threading import RLock
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from videotune.data.file_checks import refuse_links
from videotune.errors import VideotuneError
from videotune.latent_cache.entry import (
    KINDS,
    SUFFIX,
    UNREADABLE,
    Entry,
    Name,
    alone,
    describe,
    file_of,
    read_entry,
    read_tensors,
    write_entry,
)
from videotune.types import ClipShape

LOCK, OWNER = "lock", "lock.owner"
PART = ".part-"
"""How the names of files begin that are being written."""

EARLIER = "manifest.jsonl"
"""A file of caches that an earlier version wrote."""


class Store:
    """A cache folder. ``kind`` is "latents" or "text".

    Up to ``keep_bytes`` of what was read last stay in memory: a small dataset is then read from the disk once. Opening
    one writes nothing; ``notes`` are sentences for the user on what was found. Reading is safe from many threads, and
    while another process fills the same folder.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self._keep, self._kept_bytes = keep_bytes, 0
        self._kept: OrderedDict[Name, dict[str, Tensor]] = OrderedDict()
        self._entries: dict[Name, Entry | None] = {}
        self._checked: set[Name] = set()
        self._damaged: set[Name] = set()
        self._lock = RLock()
        try:
            refuse_links(folder)
            strays = self.strays()
        except OSError as error:
            raise VideotuneError(f"the cache {folder} cannot be read: {error}. Set cache_dir elsewhere.") from error
        if (folder / EARLIER).is_file():
            self.notes.append(
                f"the cache {folder} was made by an earlier version: what a run needs is encoded anew. "
                "`videotune cache prune` removes the old files"
            )
        elif strays:
            self.notes.append(
                f"{len(strays)} files of the cache {folder} are none of its entries, such as {min(strays)}; pruning removes "
                "them"
            )

    def _files(self, kind: str) -> list[str]:
        """Names of the files of a kind."""
        return sorted(os.listdir(self.folder / kind)) if (self.folder / kind).is_dir() else []

    def names(self) -> list[Name]:
        """The names of all files that look like entries."""
        found = [(kind, name) for kind in KINDS for name in self._files(kind)]
        return [
            (k, name.removesuffix(SUFFIX)) for k, name in found if name.endswith(SUFFIX) and not name.startswith(PART)
        ]

    def entries(self) -> list[Entry]:
        """All entries that can be read."""
        return [entry for name in self.names() if (entry := self.entry(*name)) is not None]

    def strays(self) -> set[str]:
        """Files below the folders of entries that are none and are not being written, and those of an earlier version."""
        found = {f"{kind}/{name}" for kind in KINDS for name in self._files(kind) if not name.startswith(PART)}
        old = {EARLIER} if (self.folder / EARLIER).is_file() else set()
        return found - {file_of(*name) for name in self.names() if self.entry(*name) is not None} | old

    def parts(self) -> set[str]:
        """Files that are being written, or that killed writers have left behind."""
        return {f"{kind}/{name}" for kind in KINDS for name in self._files(kind) if name.startswith(PART)}

    def path(self, kind: str, key: str) -> Path:
        """The file in which the entry lies, or would lie."""
        return self.folder / file_of(kind, key)

    def entry(self, kind: str, key: str) -> Entry | None:
        """What an entry's file says of itself; None where there is none that can be read."""
        name = kind, key
        if self._entries.get(name) is None:
            try:
                self._entries[name] = read_entry(self.folder, kind, key)
            except UNREADABLE:
                self._entries[name] = None
        return self._entries[name]

    def has(self, kind: str, key: str) -> bool:
        """Whether the entry is there whole."""
        there = (kind, key) not in self._damaged and self.path(kind, key).is_file()
        return there and self.entry(kind, key) is not None

    def put(self, kind: str, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write an entry. Raises VideotuneError where the folder cannot be written."""
        own = {name: alone(tensor) for name, tensor in tensors.items()}
        entry = describe(kind, key, own, about)
        with self._writing():
            write_entry(self.folder, entry, own)
        with self._lock:
            self._forget(entry.name)
            self._entries[entry.name] = entry

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
        """Hold the folder's lock, and remove what killed writers left behind.

        Raises VideotuneError that names the process which holds the lock.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock, owner = FileLock(self.folder / LOCK), self.folder / OWNER
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                holder = owner.read_text(encoding="utf-8", errors="replace").strip() if owner.is_file() else ""
                raise VideotuneError(
                    f"the cache {self.folder} is being written by {holder or 'another process'}. Wait until that is done, "
                    "or set cache_dir elsewhere."
                ) from error
            except NotImplementedError:
                self.notes.append(
                    f"{self.folder} is on a file system without locks: let no two runs fill this cache at a time"
                )
        try:
            with self._writing():
                since = datetime.now().astimezone().isoformat(timespec="seconds")
                owner.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", encoding="utf-8")
                began = owner.stat().st_mtime  # by the clock of the disk's owner
                for path in (self.folder / file for file in self.parts()):
                    if path.is_file() and path.stat().st_mtime < began:
                        path.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def drop(self, names: Iterable[Name], files: Iterable[str] = ()) -> None:
        """Under the lock: delete entries and other files."""
        with self._lock, self._writing():
            for name in names:
                self.path(*name).unlink(missing_ok=True)
                self._forget(name)
            for file in files:
                if (self.folder / file).is_dir():
                    self.notes.append(f"{self.folder / file} is a folder, which pruning leaves alone")
                else:
                    (self.folder / file).unlink(missing_ok=True)

    def examine(self, asked: Mapping[Name, ClipShape | None], fits: Callable[[Entry, ClipShape | None], bool]) -> None:
        """Entries that are damaged, or not ``fits`` their shape, count as missing from now on.

        Those that stay in memory are read now.
        """
        lost = 0
        for name, shape in asked.items():
            entry = self.entry(*name) if self.path(*name).is_file() else None
            if entry is None:
                lost += self.path(*name).is_file()
            elif not fits(entry, shape) or not self._can_be_read(entry):
                lost += 1
                self._damaged.add(name)
        if lost:
            self.notes.append(f"{lost} entries of the cache are damaged or not of this model, and are made anew")

    def _can_be_read(self, entry: Entry) -> bool:
        """Whether an entry that would stay in memory can be read; one that would not is read in its step."""
        if self._kept_bytes + entry.bytes > self._keep:
            return True
        try:
            self.get(*entry.name)
        except VideotuneError:
            return False
        return True

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
                f"Run `videotune cache verify {self.folder}`: it drops what is damaged, and the next run makes it anew."
            ) from error
        with self._lock:
            if name not in self._kept:
                self._kept[name] = tensors
                self._kept_bytes += _bytes(tensors)
            while self._kept_bytes > self._keep:
                self._discard(next(iter(self._kept)))
        return tensors

    def _discard(self, name: Name) -> None:
        self._kept_bytes -= _bytes(self._kept.pop(name, {}))

    def _forget(self, name: Name) -> None:
        """Nothing is known of an entry any more."""
        with self._lock:
            self._discard(name)
            self._entries.pop(name, None)
            self._checked.discard(name)
            self._damaged.discard(name)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
