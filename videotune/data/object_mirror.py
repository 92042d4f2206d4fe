"""Mirrors of folders on object stores, in the user's own cache.

``mirrors/<hash of the address>/<bucket>/<key>`` has a file for each object: text, such as
captions, as it is; archives and Parquet files that are the dataset, as they are; anything
else as a pointer (``object_files``). So everything that reads a dataset's folder reads a
mirror. Each start lists the store again and changes what has changed.

Keys are a stranger's data: those that are no plain relative paths are left out.
"""

import hashlib
import os
import shutil
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from videotune import files
from videotune.data.archives import (
    ARCHIVE_SUFFIXES,
    RESERVE,
    FileProgressFn,
    locked_folder,
)
from videotune.data.clip_file import CAPTION_SUFFIXES, CLIP_FOLDERS, CLIP_SUFFIXES
from videotune.data.companion_files import COMPANION_FOLDERS
from videotune.data.metadata_files import METADATA_NAMES, NO_COLUMNS, Columns
from videotune.data.object_blobs import too_large
from videotune.data.object_files import (
    blob_store,
    bound_bytes,
    mirrors_folder,
    pointer_text,
)
from videotune.data.object_store import (
    ObjectUrl,
    StoredObject,
    has_control_letters,
    object_store,
    parse_url,
)
from videotune.data.parquet_clips import is_other_split
from videotune.data.parquet_files import PARQUET_SUFFIX
from videotune.data.row_files import ROW_SUFFIXES
from videotune.data.shards import SHARD_SUFFIXES
from videotune.errors import VideotuneError
from videotune.files import size_text
from videotune.text import counted_are

MAX_OBJECTS = 1_000_000
"""Most objects of a folder."""

MAX_TEXT_BYTES = 1 << 29
"""Most bytes of a text, such as a metadata file."""

MAX_ALL_TEXT_BYTES = 4 << 30
"""Most bytes of all texts of a folder."""

MAX_NAME_BYTES = 255
"""Most bytes of a part of a path, on nearly every file system."""

MAX_KEY_BYTES = 1024
"""Most bytes of a key, in every store."""

FETCHERS = 16
"""Texts that are fetched at a time."""

TEXT_SUFFIXES = (*CAPTION_SUFFIXES, ".csv", ".jsonl")
LISTING = "listing.json"
"""File of a mirror that says what it was made of."""

_WINDOWS_ONLY = '<>:"|?*'


@dataclass
class Mirror:
    """A folder of an object store, as a folder of this machine."""

    path: Path
    """The folder of clips, or the archive or file of rows that is the dataset."""

    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Entry:
    """A file of a mirror."""

    stored: StoredObject
    name: str
    """Its path below the mirror's folder: the bucket and the key."""
    is_whole: bool
    """Whether it has the object's bytes, and is no pointer."""

    @property
    def state(self) -> list[Any]:
        """What a later start compares."""
        stored = self.stored
        return [stored.size, stored.etag, stored.modified, self.is_whole]


def mirror_dataset(
    address: str, caption_suffix: str, columns: Columns, progress: FileProgressFn
) -> Mirror:
    """Mirror a dataset of an object store, and download what must be here as a whole.

    Args:
        address: s3://bucket/folder, or the address of an archive or a file of rows.
        caption_suffix: suffix of the caption files.
        columns: the columns that the dataset names, see ``_dataset_files``.
        progress: called while objects are listed and fetched.

    Raises:
        VideotuneError: if there is nothing, or too much, or a clip is too large.
    """
    url = parse_url(address)
    single_object = _single_object(url)
    folder_url = url
    if single_object is not None and url.name.lower().endswith(ROW_SUFFIXES):
        # Its rows list files beside it.
        folder_url = ObjectUrl(url.bucket, url.key.rpartition("/")[0])

    writer = _MirrorWriter(folder_url, caption_suffix, progress)
    with writer.locked():
        if single_object is not None and folder_url == url:
            entries = [_Entry(single_object, f"{url.bucket}/{url.key}", is_whole=True)]
        else:
            entries = writer.list_entries()
        if not entries:
            raise VideotuneError(_nothing_message(url))

        names = [writer.relative(entry) for entry in entries]
        whole_names: Collection[str] = [url.name]
        if single_object is None:
            whole_names = _dataset_files(names, columns)
        entries = [
            replace(entry, is_whole=True) if name in whole_names else entry
            for name, entry in zip(names, entries, strict=True)
        ]
        writer.write(entries)

    path = writer.root
    if single_object is not None and folder_url == url:
        path = writer.folder / url.bucket / url.key
    elif single_object is not None:
        path = writer.root / url.name
    elif _is_single_archive(whole_names):
        path = writer.root.joinpath(*next(iter(whole_names)).split("/"))
    return Mirror(path, writer.notes)


def _single_object(url: ObjectUrl) -> StoredObject | None:
    """Return the object that alone is the dataset; None if the address is a folder."""
    if not url.name.lower().endswith((*ARCHIVE_SUFFIXES, *ROW_SUFFIXES)):
        return None
    return object_store().find_object(url)


def _is_single_archive(names: Collection[str]) -> bool:
    """Return whether what is downloaded is one archive, which is no shard among others."""
    return len(names) == 1 and next(iter(names)).lower().endswith(ARCHIVE_SUFFIXES)


def _dataset_files(names: Sequence[str], columns: Columns) -> set[str]:
    """Return the files that are the dataset: archives, shards or Parquet files. Of clips
    as files there are none.

    Args:
        names: all files, relative to the dataset's folder.
        columns: the columns that the dataset names. Without them Parquet files beside
            clips list nothing.
    """
    lower_names = [name.lower() for name in names]
    has_clips = any(name.endswith(CLIP_SUFFIXES) for name in lower_names)
    has_metadata = any(name.split("/")[-1] in METADATA_NAMES for name in names)
    lists_clips = columns != NO_COLUMNS and not has_metadata
    if has_clips and not lists_clips:
        return set()

    in_folder = [name for name in names if "/" not in name]
    shards = [name for name in in_folder if name.lower().endswith(SHARD_SUFFIXES)]
    if shards and not has_clips:
        return set(shards)

    tables = [name for name in names if name.lower().endswith(PARQUET_SUFFIX)]
    if tables:
        return {name for name in tables if not is_other_split(name)} or set(tables)

    archives = [name for name in names if name.lower().endswith(ARCHIVE_SUFFIXES)]
    if len(archives) == 1 and not has_clips:
        return set(archives)
    return set()


def _nothing_message(url: ObjectUrl) -> str:
    if object_store().find_object(url) is not None:
        return (
            f"{url} is a single object, and neither an archive nor a file of rows. "
            "Give the folder of the clips."
        )
    return (
        f"{url}: there are no objects below it that can be used. Check the bucket and the folder, "
        "and AWS_ENDPOINT_URL in the environment."
    )


class _MirrorWriter:
    """Brings one mirror up to date.

    Args:
        url: the folder on the store.
        caption_suffix: suffix of the caption files.
        progress: called while objects are listed and fetched.
    """

    def __init__(
        self, url: ObjectUrl, caption_suffix: str, progress: FileProgressFn
    ) -> None:
        self.url = url
        self.notes: list[str] = []
        self.folder = mirrors_folder() / files.digest(str(url))
        self.root = self.folder.joinpath(url.bucket, *_parts(url.key))
        self._text_suffixes = (*TEXT_SUFFIXES, caption_suffix.lower())
        self._progress = progress

    def locked(self) -> Any:
        """Hold the mirror's lock for a block; say so while another process has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that lists {self.url}"
        return locked_folder(self.folder, self._progress, waiting)

    def relative(self, entry: _Entry) -> str:
        """Return the path of a file relative to the dataset's folder."""
        return entry.stored.url.key.removeprefix(self.url.prefix)

    def list_entries(self) -> list[_Entry]:
        """List the objects of the folder that can be files, in the order of their keys.

        Of a folder ``videos`` those of ``captions`` and the like beside it, too.

        Raises:
            VideotuneError: if there are too many, or one does not fit into the bound.
        """
        urls = [self.url]
        if self.url.name in CLIP_FOLDERS and self.url.key:
            parent = ObjectUrl(self.url.bucket, self.url.key.rpartition("/")[0])
            urls += [parent.child(name) for name in ("captions", *COMPANION_FOLDERS)]

        listed: list[StoredObject] = []
        for url in urls:
            for stored in object_store().list_objects(url):
                listed.append(stored)
                if len(listed) > MAX_OBJECTS:
                    raise VideotuneError(
                        f"{self.url} has more than {MAX_OBJECTS:,} objects. Make several datasets of it, "
                        "or pack the clips into tar files."
                    )
                if len(listed) % 1000 == 0:
                    self._progress(0, len(listed), f"listing {self.url}")

        usable = self._usable(listed)
        self._check_sizes(usable)
        return [
            _Entry(
                stored, f"{stored.url.bucket}/{stored.url.key}", self._is_text(stored)
            )
            for stored in usable
        ]

    def _is_text(self, stored: StoredObject) -> bool:
        return stored.url.key.lower().endswith(self._text_suffixes)

    def _usable(self, listed: Iterable[StoredObject]) -> list[StoredObject]:
        """Leave out objects whose keys are no file names, and hidden ones."""
        by_key: dict[str, StoredObject] = {}
        faults: dict[str, str] = {}
        for stored in listed:
            name = stored.url.key.removeprefix(self.url.prefix)
            # Consoles of stores make an empty object for a folder.
            if name.endswith("/") or _is_hidden(name):
                continue
            fault = _fault_of(stored.url.key)
            if fault:
                faults[stored.url.key] = fault
            else:
                by_key[stored.url.key] = stored

        folders: set[str] = set()
        for key in by_key:
            parts = key.split("/")
            for count in range(1, len(parts)):
                folders.add(_folded("/".join(parts[:count])))
        earlier_names: set[str] = set()
        for key in sorted(by_key):
            folded = _folded(key)
            if folded in folders:
                faults[key] = "is a file and a folder"
            elif folded in earlier_names:
                faults[key] = "differs from another only in the case of letters"
            earlier_names.add(folded)

        self._note_faults(faults)
        return [stored for key, stored in sorted(by_key.items()) if key not in faults]

    def _note_faults(self, faults: Mapping[str, str]) -> None:
        if not faults:
            return
        examples = "; ".join(
            f"{key[:80]!r} {fault}" for key, fault in list(faults.items())[:3]
        )
        self.notes.append(
            f"{self.url}: {counted_are(len(faults), 'object')} left out, because the names are not those of "
            f"files here ({examples}{'; …' if len(faults) > 3 else ''})"
        )

    def _check_sizes(self, usable: Sequence[StoredObject]) -> None:
        """Raise VideotuneError if an object or all texts are too large."""
        bound = bound_bytes()
        text_bytes = 0
        for stored in usable:
            if self._is_text(stored):
                text_bytes += stored.size
                if stored.size > MAX_TEXT_BYTES:
                    raise VideotuneError(
                        f"{stored.url} has {size_text(stored.size)}; a text of a dataset may have "
                        f"{size_text(MAX_TEXT_BYTES)}. Move it out of {self.url}."
                    )
            elif stored.size > bound and stored.url.key.lower().endswith(CLIP_SUFFIXES):
                raise too_large(str(stored.url), stored.size, bound)

        if text_bytes > MAX_ALL_TEXT_BYTES:
            raise VideotuneError(
                f"{self.url} has {size_text(text_bytes)} of captions and other texts; "
                f"{size_text(MAX_ALL_TEXT_BYTES)} are read. Make several datasets of it."
            )

    def write(self, entries: Sequence[_Entry]) -> None:
        """Write what has changed, and remove what is gone.

        Raises:
            VideotuneError: if something cannot be fetched or written.
        """
        try:
            self._write(entries)
            blob_store().trim()
        except OSError as error:
            raise VideotuneError(
                f"{self.url} cannot be mirrored in {self.folder}: {error.strerror or error}. "
                "Set XDG_CACHE_HOME to another disk."
            ) from error

    def _write(self, entries: Sequence[_Entry]) -> None:
        previous = self._read_listing()
        present = self._present_files()
        wanted = {entry.name: entry for entry in entries}
        for name in present - wanted.keys():
            self._path(name).unlink()
        self._remove_empty_folders()

        changed = []
        listing = {}
        for entry in entries:
            state = previous.get(entry.name)
            # What was downloaded for other settings serves these as well.
            if state == [*entry.state[:-1], True]:
                entry = replace(entry, is_whole=True)
            listing[entry.name] = entry.state
            if state != entry.state or entry.name not in present:
                changed.append(entry)
        if not changed and listing == previous:
            return

        self._check_disk(changed)
        for entry in changed:
            self._path(entry.name).parent.mkdir(parents=True, exist_ok=True)
        for entry in changed:
            if not entry.is_whole:
                self._place(entry, _write_pointer)
        self._fetch([entry for entry in changed if entry.is_whole])
        files.write_json(self.folder / LISTING, listing, durable=False)

    def _fetch(self, entries: Sequence[_Entry]) -> None:
        """Download files whole, many at a time."""
        store = object_store()

        def fetch(entry: _Entry) -> None:
            self._place(entry, store.fetch)

        pool = ThreadPoolExecutor(FETCHERS)
        try:
            futures = [pool.submit(fetch, entry) for entry in entries]
            for done, future in enumerate(as_completed(futures)):
                self._progress(done, len(entries), f"fetching {self.url}")
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _place(self, entry: _Entry, write: Any) -> None:
        """Write a file completely, with a time that changes with the object."""
        path = self._path(entry.name)

        def write_with_time(temporary: Path) -> None:
            write(entry.stored, temporary)
            time_ns = _time_ns(entry.stored)
            os.utime(temporary, ns=(time_ns, time_ns))

        files.write_whole(path, write_with_time, durable=False)

    def _check_disk(self, changed: Iterable[_Entry]) -> None:
        """Raise VideotuneError if what is downloaded whole does not fit on the disk."""
        whole_bytes = sum(entry.stored.size for entry in changed if entry.is_whole)
        free_bytes = max(0, shutil.disk_usage(self.folder).free - RESERVE)
        if whole_bytes > free_bytes:
            raise VideotuneError(
                f"{self.url} has {size_text(whole_bytes)} to download, and {size_text(free_bytes)} are free on "
                f"the disk of {self.folder}. Free some space, or set XDG_CACHE_HOME to another disk."
            )

    def _path(self, name: str) -> Path:
        return self.folder.joinpath(*_parts(name))

    def _read_listing(self) -> dict[str, Any]:
        try:
            listing = files.read_json(self.folder / LISTING)
        except (OSError, ValueError, RecursionError):
            return {}
        return listing if isinstance(listing, dict) else {}

    def _present_files(self) -> set[str]:
        present: set[str] = set()
        for parent, _, names in os.walk(self.folder / self.url.bucket):
            folder = os.path.relpath(parent, self.folder).replace(os.sep, "/")
            present.update(f"{folder}/{name}" for name in names)
        return present

    def _remove_empty_folders(self) -> None:
        bucket_folder = self.folder / self.url.bucket
        for parent, _, _ in os.walk(bucket_folder, topdown=False):
            if Path(parent) != bucket_folder and not os.listdir(parent):
                os.rmdir(parent)


def _write_pointer(stored: StoredObject, path: Path) -> None:
    path.write_text(pointer_text(stored), encoding="utf-8")


def _time_ns(stored: StoredObject) -> int:
    """Return the time of change that a file gets.

    A store's times are whole seconds. Two versions of one second differ by their tag,
    from which the rest comes, so that they are told apart as other files are.
    """
    content = f"{stored.etag} {stored.size}".encode()
    fraction = int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "big")
    return int(stored.modified) * 10**9 + fraction % 10**9


def _parts(name: str) -> list[str]:
    return name.split("/") if name else []


def _is_hidden(name: str) -> bool:
    """Return whether a dataset's folder would not show a file: by a dot before a part."""
    parts = name.split("/")
    return any(part.startswith(".") and part not in (".", "..") for part in parts)


def _folded(key: str) -> str:
    """Return the name that a file system without cases and forms of letters sees."""
    return unicodedata.normalize("NFC", key).casefold()


def _fault_of(key: str) -> str:
    """Return why a key is no path of a file; "" if it is one."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads through another folder"
    if "\\" in key:
        return "has a backslash"
    if has_control_letters(key):
        return "has control characters"
    too_long = len(key.encode()) > MAX_KEY_BYTES
    if too_long or any(len(part.encode()) > MAX_NAME_BYTES - 40 for part in parts):
        return "is too long"
    if os.name == "nt" and any(letter in _WINDOWS_ONLY for letter in key):
        return "has characters that Windows does not allow"
    return ""
