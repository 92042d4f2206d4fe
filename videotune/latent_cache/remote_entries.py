"""Entries of a cache on an object store: written there too, and fetched when they are read.

The cache's folder holds copies. So one machine encodes, and another trains without opening
a clip. Copies beyond the bound are removed, those that were read longest ago first.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from videotune import files
from videotune.data.object_blobs import too_large
from videotune.data.object_files import bound_bytes
from videotune.data.object_store import (
    ObjectChanged,
    ObjectUrl,
    StoredObject,
    is_object_url,
    object_store,
    parse_url,
)
from videotune.errors import VideotuneError
from videotune.latent_cache.entry import (
    KINDS,
    SUFFIX,
    CacheEntry,
    EntryName,
    entry_of_file,
    existing_file_of,
    file_of,
    read_entry_from_beginning,
)

MAX_ENTRIES = 10_000_000
"""Most objects of a cache on a store."""

UPLOADS = 4
"""Entries that are uploaded at a time."""

READ_ATTEMPTS = 3
"""Times that an entry is fetched again because another process removed its copy."""

SLACK = 0.05
"""Share of the bound that is freed beyond what is needed."""

NUM_LOCKS = 64

Result = TypeVar("Result")


class LocalEntries:
    """Entries that are only in the cache's folder."""

    where: str | None = None
    """The address of the store."""

    def has(self, name: EntryName) -> bool:
        """Return whether an entry is on the store."""
        return False

    def sizes(self) -> Mapping[EntryName, int]:
        """Return the bytes of all entries on the store."""
        return {}

    def read(self, name: EntryName, read: Callable[[], Result]) -> Result:
        """Return what ``read`` returns, once the entry's file is here."""
        return read()

    def written(self, name: EntryName) -> None:
        """Upload an entry that was written, later."""

    def finish(self, wanted: Iterable[EntryName]) -> None:
        """Wait until everything is uploaded, also what an earlier process could not.

        Args:
            wanted: entries that the run reads.

        Raises:
            VideotuneError: if an entry could not be uploaded.
        """

    def dropped(self, names: Iterable[EntryName]) -> None:
        """Delete entries on the store."""

    def read_entry(self, name: EntryName) -> CacheEntry:
        """Return what the store's file of an entry says that it is."""
        raise KeyError(name)

    def fetch_to(self, name: EntryName, folder: Path) -> None:
        """Write the store's file of an entry to another cache folder."""
        raise KeyError(name)

    def address(self, name: EntryName) -> str:
        """Return the address of an entry on the store."""
        raise KeyError(name)

    def remedy(self, name: EntryName) -> str | None:
        """Return what to do about a damaged entry; None if its file is damaged here."""
        return None


LOCAL_ONLY = LocalEntries()


class RemoteEntries(LocalEntries):
    """Entries below an address of an object store. Safe from many threads.

    Args:
        url: the address.
        folder: the cache's folder, with the copies.
        bound: most bytes of the copies.
    """

    def __init__(self, url: ObjectUrl, folder: Path, bound: int) -> None:
        self.where = str(url)
        self._url = url
        self._folder = folder
        self._bound = bound
        self._objects = self._list()
        self._uploads: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._local_bytes: int | None = None
        self._lock = threading.Lock()  # guards the fields above
        self._fetch_locks = [threading.Lock() for _ in range(NUM_LOCKS)]
        self._readers: dict[EntryName, int] = {}

    def _list(self) -> dict[EntryName, StoredObject]:
        objects: dict[EntryName, StoredObject] = {}
        for stored in object_store().list_objects(self._url):
            # A stranger may write there, too: other names are no entries.
            name = entry_of_file(stored.url.key.removeprefix(self._url.prefix))
            if name is None or not _is_plain(name[1]):
                continue
            objects[name] = stored
            if len(objects) > MAX_ENTRIES:
                raise VideotuneError(
                    f"cache_dir: {self._url} has more than {MAX_ENTRIES:,} entries. Set it to another folder."
                )
        return objects

    def has(self, name: EntryName) -> bool:
        """Return whether an entry was on the store when it was listed, or is uploaded."""
        return name in self._objects

    def sizes(self) -> Mapping[EntryName, int]:
        """Return the bytes of all entries on the store."""
        return {name: stored.size for name, stored in self._objects.items()}

    def read(self, name: EntryName, read: Callable[[], Result]) -> Result:
        """Return what ``read`` returns, once the entry's file is here.

        Raises:
            VideotuneError: if the entry cannot be fetched.
        """
        with self._lock:
            self._readers[name] = self._readers.get(name, 0) + 1
        try:
            for attempt in range(1, READ_ATTEMPTS + 1):
                self._bring(name)
                try:
                    return read()
                except FileNotFoundError:
                    if attempt == READ_ATTEMPTS or name not in self._objects:
                        raise
            raise AssertionError("the last attempt returns or raises")
        finally:
            with self._lock:
                self._readers[name] -= 1
                if not self._readers[name]:
                    del self._readers[name]

    def _path(self, name: EntryName) -> Path:
        return self._folder / existing_file_of(self._folder, *name)

    def _bring(self, name: EntryName) -> None:
        """Fetch an entry that is only on the store, or note that its copy is read now."""
        with suppress(FileNotFoundError):
            os.utime(self._path(name))
            return
        with self._fetch_locks[hash(name) % NUM_LOCKS]:
            stored = self._objects.get(name)
            if stored is None or self._path(name).exists():
                return
            try:
                self._fetch(name, stored)
            except ObjectChanged:
                # Another machine has written the same entry again.
                stored = object_store().find_object(stored.url)
                if stored is None:
                    raise
                with self._lock:
                    self._objects[name] = stored
                self._fetch(name, stored)

    def _fetch(self, name: EntryName, stored: StoredObject) -> None:
        path = self._folder / file_of(*name)
        with self._keeping(stored, self._folder):
            self._count(stored.size, is_here=False)
            files.write_whole(
                path, lambda part: object_store().fetch(stored, part), durable=False
            )

    @contextmanager
    def _keeping(self, stored: StoredObject, folder: Path) -> Iterator[None]:
        """Refuse a copy beyond the bound, and turn a failure to write it into a
        VideotuneError.
        """
        if stored.size > self._bound:
            raise too_large(str(stored.url), stored.size, self._bound)
        try:
            yield
        except OSError as error:
            raise VideotuneError(
                f"{stored.url} cannot be kept in {folder}: {error.strerror or error}. Free some space, or "
                "set object_cache_gb lower."
            ) from error

    def written(self, name: EntryName) -> None:
        """Upload an entry that was written, in a thread.

        Raises:
            VideotuneError: if an earlier one could not be uploaded.
        """
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(UPLOADS, "upload")
            finished = [upload for upload in self._uploads if upload.done()]
            self._uploads = [upload for upload in self._uploads if not upload.done()]
            self._uploads.append(self._pool.submit(self._upload, name))
        for upload in finished:
            upload.result()

    def _upload(self, name: EntryName) -> None:
        path = self._path(name)
        url = self._url.child(file_of(*name))
        object_store().upload(path, url)
        stored = object_store().find_object(url)
        if stored is None or stored.size != path.stat().st_size:
            raise VideotuneError(
                f"{url} is not what was uploaded. Start the command again, which uploads it anew."
            )
        with self._lock:
            self._objects[name] = stored
        self._count(stored.size, is_here=True)

    def finish(self, wanted: Iterable[EntryName]) -> None:
        """Wait until everything is uploaded, also what an earlier process could not.

        Raises:
            VideotuneError: if an entry could not be uploaded.
        """
        with self._lock:
            uploads = self._uploads
            self._uploads = []
        for upload in uploads:
            upload.result()
        missing = [
            name
            for name in wanted
            if name not in self._objects and self._path(name).is_file()
        ]
        for name in missing:
            self.written(name)
        if missing:
            self.finish(())

    def dropped(self, names: Iterable[EntryName]) -> None:
        """Delete entries on the store."""
        on_store = [name for name in names if name in self._objects]
        object_store().delete(self._objects[name].url for name in on_store)
        with self._lock:
            for name in on_store:
                del self._objects[name]

    def read_entry(self, name: EntryName) -> CacheEntry:
        """Return what the store's file of an entry says that it is; only its header is
        fetched.

        Raises:
            UNREADABLE: one of these, if it was not written by videotune.
            VideotuneError: if the store cannot be asked.
        """
        stored = self._objects[name]
        return read_entry_from_beginning(
            lambda size: object_store().read_beginning(stored, size), name
        )

    def fetch_to(self, name: EntryName, folder: Path) -> None:
        """Write the store's file of an entry to another cache folder.

        Raises:
            VideotuneError: if it cannot be fetched or written.
        """
        stored = self._objects[name]
        path = folder / file_of(*name)
        with self._keeping(stored, folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            object_store().fetch(stored, path)

    def address(self, name: EntryName) -> str:
        """Return the address of an entry on the store."""
        return str(self._objects[name].url)

    def remedy(self, name: EntryName) -> str | None:
        """Return what to do about a damaged entry; None if it is not on the store."""
        stored = self._objects.get(name)
        if stored is None:
            return None
        return f"Delete {stored.url} and {self._path(name)}; the next run encodes it again."

    def _count(self, size: int, *, is_here: bool) -> None:
        """Count a file of the folder, and remove copies beyond the bound.

        Args:
            size: its bytes.
            is_here: whether it is in the folder already, and does not come now.
        """
        with self._lock:
            if self._local_bytes is not None:
                self._local_bytes += size
                if self._local_bytes <= self._bound:
                    return

            # Read anew, since other processes fetch and remove, too.
            copies = sorted(self._copies())
            total = sum(bytes_ for _, bytes_, _ in copies)
            if not is_here:
                total += size
            self._local_bytes = total
            if total <= self._bound:
                return
            for _, bytes_, name in copies:
                if total <= self._bound * (1 - SLACK):
                    break
                # What is not on the store yet has no other copy.
                if name in self._objects and name not in self._readers:
                    self._path(name).unlink(missing_ok=True)
                    total -= bytes_
            self._local_bytes = total

    def _copies(self) -> Iterator[tuple[int, int, EntryName]]:
        """Yield when each file of an entry was read, its bytes, and its name."""
        for kind in KINDS:
            for path in (self._folder / kind).glob(f"*/*{SUFFIX}"):
                name = entry_of_file(path.relative_to(self._folder).as_posix())
                if name is not None:
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        yield status.st_mtime_ns, status.st_size, name


def _is_plain(key: str) -> bool:
    """Return whether a key can be the name of a file."""
    return 0 < len(key) <= 200 and key.replace("-", "").replace("_", "").isalnum()


def entries_of(cache_dir: str | None, folder: Path) -> LocalEntries:
    """Return the entries that belong to a config's ``cache_dir``.

    Raises:
        VideotuneError: if it is on a store that cannot be listed.
    """
    if cache_dir is None or not is_object_url(cache_dir):
        return LOCAL_ONLY
    return RemoteEntries(parse_url(cache_dir), folder, bound_bytes())
