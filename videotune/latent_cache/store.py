"""The cache on disk: one safetensors file for each entry.

The key of an entry is a hash of everything that decides its content (clip, times, size,
and the encoder with its dtype). If one of them changes, the entry has another key. Kind
and key are the entry's name (``EntryName``) and decide its file. Versions of libraries are
recorded in the entry, but not hashed into its key: an upgrade of PyAV or torch keeps the
cache. A file is written completely or not at all, and its hash is checked when it is first
read.
"""

import json
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from videotune.data.file_checks import refuse_links
from videotune.errors import VideotuneError
from videotune.files import CACHE_LOCK as LOCK
from videotune.files import OLD_MANIFEST, system_errors, tag_cache, write_whole
from videotune.latent_cache.entry import (
    KINDS,
    METADATA_KEY,
    SUBFOLDER_LETTERS,
    UNREADABLE,
    CacheEntry,
    EntryName,
    entry_of_file,
    existing_file_of,
    file_of,
    new_entry,
    old_file_of,
    own_storage,
    read_entry,
    read_tensors,
)
from videotune.latent_cache.remote_entries import LOCAL_ONLY, LocalEntries
from videotune.text import as_argument, counted, counted_are

LOCK_OWNER = "lock.owner"
PART = ".part-"
"""Prefix of the names of files that are being written."""


Item = TypeVar("Item")


class LatentCache:
    """A cache folder. Opening it writes nothing.

    Reading is safe from many threads, and while another process fills the same folder.
    """

    def __init__(
        self,
        folder: Path,
        keep_bytes: int = 0,
        remote: LocalEntries = LOCAL_ONLY,
    ) -> None:
        """Open the cache in ``folder``.

        Args:
            folder: the cache folder; it need not exist.
            keep_bytes: how much of what was read last stays in memory, so that a small
                dataset is read only once.
            remote: the entries on an object store, of which the folder has copies.

        Raises:
            VideotuneError: if the folder cannot be read.
        """
        self.folder = folder
        self.notes: list[str] = []
        """Sentences for the user on what was found."""
        self.masks_without_effect = 0
        """Masks, of those encoded through this object, that hide everything or nothing."""
        self._keep_bytes = keep_bytes
        self._in_memory: OrderedDict[EntryName, dict[str, Tensor]] = OrderedDict()
        self._in_memory_bytes = 0
        self._entries: dict[EntryName, CacheEntry] = {}
        self._checked: set[EntryName] = set()
        self._unusable: set[EntryName] = set()
        self.remote = remote
        """The entries on an object store."""
        self._checks: dict[EntryName, Callable[[CacheEntry], bool]] = {}
        """By entry that is not in the folder yet: whether what comes from an object store or
        another process fits what it is for. ``put`` drops the check, since what this
        process encodes fits.
        """
        self._lock = RLock()

        try:
            refuse_links(folder, KINDS)
            unknown_files = self.unknown_files()  # reads all entries into _entries
        except OSError as error:
            raise VideotuneError(
                f"the cache {folder} cannot be read: {error}. Set cache_dir to another folder."
            ) from error

        if (folder / OLD_MANIFEST).is_file():
            self.notes.append(
                f"the cache {folder} was made by an earlier version: what a run needs is encoded again. "
                "`videotune cache prune` removes the old files"
            )
        elif unknown_files:
            self.notes.append(
                f"{counted(len(unknown_files), 'file')} in the cache {folder} without an entry, "
                f"such as {min(unknown_files)}; videotune cache prune removes it"
            )

    @property
    def place(self) -> str:
        """The address of the object store with the entries, or the folder."""
        return self.remote.where or str(self.folder)

    def _files(self) -> Iterator[str]:
        """Yield all files below the folders of entries, relative to the cache folder."""
        for kind in KINDS:
            folder = self.folder / kind
            if not folder.is_dir():
                continue
            for name in sorted(os.listdir(folder)):
                is_subfolder = (
                    len(name) <= SUBFOLDER_LETTERS and (folder / name).is_dir()
                )
                if not is_subfolder:
                    yield f"{kind}/{name}"
                    continue
                for file_name in sorted(os.listdir(folder / name)):
                    yield f"{kind}/{name}/{file_name}"

    def names(self) -> list[EntryName]:
        """Return the names of all files in the folder that look like entries."""
        names = map(entry_of_file, self._files())
        # An entry that was written again may also have its file of an earlier version.
        return list(dict.fromkeys(name for name in names if name is not None))

    def entries(self) -> list[CacheEntry]:
        """Return all entries of the folder that can be read."""
        entries = [self.entry(*name) for name in self.names()]
        return [entry for entry in entries if entry is not None]

    def unknown_files(self) -> set[str]:
        """Return files that are neither entries nor being written, and those of an
        earlier version.
        """
        files = {file for file in self._files() if not _is_part(file)}
        files -= {self.file(*entry.name) for entry in self.entries()}
        if (self.folder / OLD_MANIFEST).is_file():
            files.add(OLD_MANIFEST)
        return files

    def parts(self) -> set[str]:
        """Return files that are being written, or that killed writers have left behind."""
        return {file for file in self._files() if _is_part(file)}

    def file(self, kind: str, key: str) -> str:
        """Return the file of an entry, relative to the cache folder, whether or not it
        exists.
        """
        return existing_file_of(self.folder, kind, key)

    def path(self, kind: str, key: str) -> Path:
        """Return the path of an entry's file, whether or not it exists."""
        return self.folder / self.file(kind, key)

    def entry(self, kind: str, key: str) -> CacheEntry | None:
        """Return an entry's metadata, or None if the folder has no readable entry."""
        name = (kind, key)
        if name not in self._entries:
            with suppress(*UNREADABLE):
                self._entries[name] = read_entry(self.folder, kind, key)
        return self._entries.get(name)

    def has(self, kind: str, key: str) -> bool:
        """Return whether there is a complete entry."""
        if (kind, key) in self._unusable:
            return False
        if not self.path(kind, key).is_file():
            return self.remote.has((kind, key))
        return self.entry(kind, key) is not None

    def remote_sizes(self) -> dict[EntryName, int]:
        """Return the bytes of the entries on the object store that are not in the
        folder.
        """
        return {
            name: size
            for name, size in self.remote.sizes().items()
            if not self.path(*name).is_file()
        }

    def finish_uploads(self, wanted: Iterable[EntryName] = ()) -> None:
        """Wait until what was written, and of these entries what is missing there, is on
        the object store.

        Raises:
            VideotuneError: if an entry could not be uploaded.
        """
        self.remote.finish(wanted)

    def put(
        self,
        kind: str,
        key: str,
        tensors: Mapping[str, Tensor],
        about: Mapping[str, Any],
    ) -> None:
        """Write an entry, completely or not at all.

        Args:
            kind: one of ``KINDS``.
            key: hash of everything that decides the content.
            tensors: the content.
            about: what it was made of, see ``About``.

        Raises:
            VideotuneError: if the folder cannot be written.
        """
        stored = {name: own_storage(tensor) for name, tensor in tensors.items()}
        entry = new_entry(kind, key, stored, about)
        path = self.folder / file_of(kind, key)
        metadata = {METADATA_KEY: json.dumps(vars(entry), ensure_ascii=False)}

        def write(temporary: Path) -> None:
            with system_errors(path):
                save_file(stored, temporary, metadata=metadata)

        with self._writing():
            write_whole(path, write, durable=False)
            (self.folder / old_file_of(kind, key)).unlink(missing_ok=True)
        with self._lock:
            self._forget(entry.name)
            self._entries[entry.name] = entry
        self.remote.written(entry.name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a failure to write into a VideotuneError."""
        try:
            yield
        except OSError as error:
            raise VideotuneError(
                f"the cache {self.folder} cannot be written: {error}. Set cache_dir to another folder."
            ) from error

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Hold the folder's lock, and remove what killed writers have left behind.

        Raises VideotuneError that names the process which holds the lock, or a link in
        the folder, through which something elsewhere would be written.
        """
        owner_file = self.folder / LOCK_OWNER
        with self._writing():
            tag_cache(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            # A link may have come since the cache was opened.
            refuse_links(self.folder, KINDS)
            lock = FileLock(self.folder / LOCK)
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                raise VideotuneError(
                    f"the cache {self.folder} is being written by {self._lock_holder()}. "
                    "Wait until that is done, or set cache_dir to another folder."
                ) from error
            except NotImplementedError:
                self.notes.append(
                    f"{self.folder} is on a file system without locks: "
                    "do not let two runs fill this cache at the same time"
                )

        try:
            with self._writing():
                since = datetime.now().astimezone().isoformat(timespec="seconds")
                owner_file.write_text(
                    f"process {os.getpid()} on {socket.gethostname()} since {since}\n",
                    encoding="utf-8",
                )
                self._remove_parts(before=owner_file.stat().st_mtime)
            yield
        finally:
            with suppress(OSError):
                owner_file.unlink()
            lock.release()

    def _lock_holder(self) -> str:
        owner_file = self.folder / LOCK_OWNER
        if not owner_file.is_file():
            return "another process"
        return (
            owner_file.read_text(encoding="utf-8", errors="replace").strip()
            or "another process"
        )

    def _remove_parts(self, before: float) -> None:
        """Remove unfinished files from before a time, by the clock of the disk's host."""
        for file in self.parts():
            path = self.folder / file
            if path.is_file() and path.stat().st_mtime < before:
                path.unlink(missing_ok=True)

    def drop(self, names: Iterable[EntryName], files: Iterable[str] = ()) -> None:
        """Delete entries, also on the object store, and other files. The caller holds the
        lock.
        """
        names = list(names)
        self.remote.dropped(names)
        self.drop_copies(names)
        with self._lock, self._writing():
            for file in files:
                path = self.folder / file
                if path.is_dir():
                    self.notes.append(
                        f"{path} is a folder, which pruning leaves in place"
                    )
                else:
                    path.unlink(missing_ok=True)

    def drop_copies(self, names: Iterable[EntryName]) -> None:
        """Delete the folder's files of entries, and leave an object store as it is. The
        caller holds the lock.
        """
        with self._lock, self._writing():
            for name in names:
                (self.folder / file_of(*name)).unlink(missing_ok=True)
                (self.folder / old_file_of(*name)).unlink(missing_ok=True)
                self._forget(name)

    def mark_unusable(
        self, items: Mapping[EntryName, Item], fits: Callable[[CacheEntry, Item], bool]
    ) -> None:
        """Count entries as missing that are damaged or do not fit what they are for.

        Entries that stay in memory are read now. Others are checked in the step that
        reads them.

        Args:
            items: what each entry is for.
            fits: returns whether an entry can hold that.
        """
        newly_unusable = 0
        for name, item in items.items():
            if not self.path(*name).is_file():
                self._checks[name] = _check_of(item, fits)
                continue

            entry = self.entry(*name)
            if entry is not None and fits(entry, item):
                if self._in_memory_bytes + entry.bytes > self._keep_bytes:
                    continue
                with suppress(VideotuneError):
                    self.get(*name)  # raises it if the entry is damaged
                    continue

            # A second try of an encoding finds the same entries again.
            newly_unusable += name not in self._unusable
            self._unusable.add(name)
        if newly_unusable:
            self.notes.append(
                f"{counted_are(newly_unusable, 'entry', plural='entries')} damaged or not of this model: "
                "encoded again"
            )

    def get(self, kind: str, key: str) -> dict[str, Tensor]:
        """Read an entry.

        Its tensors are shared with other callers and must not be written to.

        Raises VideotuneError if the entry is missing or damaged.
        """
        name = (kind, key)
        with self._lock:
            if name in self._in_memory:
                self._in_memory.move_to_end(name)
                return self._in_memory[name]

        try:
            tensors = self.remote.read(name, lambda: self._read(name))
        except VideotuneError:  # of the object store
            raise
        except UNREADABLE as error:
            entry = self._entries.get(name)
            made_of = f" ({kind} of {entry.made_of[:80]!r})" if entry else ""
            reason = error.args[0] if error.args else error
            remedy = self.remote.remedy(name) or (
                f"Run `videotune cache verify {as_argument(self.folder)}`: it drops damaged entries, and the next run encodes "
                "them again."
            )
            raise VideotuneError(
                f"cache entry {self.path(*name)}{made_of} is missing or damaged ({reason}). {remedy}"
            ) from error

        self._remember(name, tensors)
        return tensors

    def _read(self, name: EntryName) -> dict[str, Tensor]:
        """Read an entry of the folder.

        Raises one of UNREADABLE if it is missing, damaged, or does not fit.
        """
        entry = self._entries.get(name)
        if entry is None:
            entry = read_entry(self.folder, *name)
        fits = self._checks.get(name)
        if fits is not None and not fits(entry):
            raise ValueError("it is not of this model")
        tensors = read_tensors(self.folder, entry, check=name not in self._checked)
        self._checked.add(name)
        return tensors

    def _remember(self, name: EntryName, tensors: dict[str, Tensor]) -> None:
        """Keep an entry in memory, and drop those read longest ago beyond the limit."""
        with self._lock:
            if name not in self._in_memory:
                self._in_memory[name] = tensors
                self._in_memory_bytes += _bytes(tensors)
            while self._in_memory_bytes > self._keep_bytes:
                self._drop_from_memory(next(iter(self._in_memory)))

    def _drop_from_memory(self, name: EntryName) -> None:
        self._in_memory_bytes -= _bytes(self._in_memory.pop(name, {}))

    def _forget(self, name: EntryName) -> None:
        """Remove everything that is known of an entry."""
        with self._lock:
            self._drop_from_memory(name)
            self._entries.pop(name, None)
            self._checked.discard(name)
            self._unusable.discard(name)
            self._checks.pop(name, None)


def _check_of(
    item: Item, fits: Callable[[CacheEntry, Item], bool]
) -> Callable[[CacheEntry], bool]:
    """Return whether an entry fits an item, as a function of the entry."""
    return lambda entry: fits(entry, item)


def _is_part(file: str) -> bool:
    return file.rpartition("/")[2].startswith(PART)


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
