"""Files of a dataset on an object store: a pointer in the place of each, its bytes on demand.

The folder of a dataset on S3 is a mirror in the user's cache (``object_mirror``), in which
a clip is a pointer: a few lines with its address, size and tag. ``local_copy`` opens it.
Only files below the folder of mirrors are pointers. A stranger's dataset with a file that
looks like one makes nobody fetch anything with the user's credentials.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from videotune.data.object_blobs import BlobStore, Pin
from videotune.data.object_store import (
    SCHEME,
    ObjectUrl,
    StoredObject,
    object_store,
    parse_url,
)
from videotune.errors import VideotuneError
from videotune.files import user_cache

POINTER = "videotune object 1"
"""The first line of a pointer."""

MOST_POINTER_BYTES = 8192
BOUND_VARIABLE = "VIDEOTUNE_OBJECT_CACHE_GB"
"""Environment variable by which child processes have the bound."""

DEFAULT_BOUND_GB = 50.0
MOST_SUFFIX_LETTERS = 8


def objects_folder() -> Path:
    """Return the folder of everything that comes from object stores."""
    return user_cache() / "objects"


def mirrors_folder() -> Path:
    """Return the folder of all mirrors."""
    return objects_folder() / "mirrors"


def set_bound(gigabytes: float) -> None:
    """Set the most bytes of objects on this disk, for this process and its children."""
    os.environ[BOUND_VARIABLE] = repr(float(gigabytes))


def bound_bytes() -> int:
    """Return the most bytes of objects on this disk."""
    try:
        gigabytes = float(os.environ.get(BOUND_VARIABLE, DEFAULT_BOUND_GB))
    except ValueError:
        gigabytes = DEFAULT_BOUND_GB
    return int(gigabytes * 1e9) if 0 < gigabytes < math.inf else 0


def blob_store() -> BlobStore:
    """Return the folder of fetched objects."""
    return BlobStore(objects_folder(), bound_bytes())


def name_in_mirror(path: str | Path) -> str | None:
    """Return the path of a file relative to the folder of mirrors; None if it is
    elsewhere. No link is followed.
    """
    prefix = os.path.join(os.path.abspath(mirrors_folder()), "")
    absolute = os.path.abspath(path)
    return absolute[len(prefix) :] if absolute.startswith(prefix) else None


def address_in_mirror(path: str | Path) -> str | None:
    """Return the address of the object that a file of a mirror stands for; None for
    other files.
    """
    name = name_in_mirror(path)
    if name is None:
        return None
    return SCHEME + name.replace(os.sep, "/").partition("/")[2]


def pointer_text(stored: StoredObject) -> str:
    """Return the content of a pointer."""
    etag = json.dumps(stored.etag)
    return f"{POINTER}\nurl {stored.url}\nsize {stored.size}\netag {etag}\n"


def read_pointer(path: str | Path) -> StoredObject | None:
    """Return the object that a file stands for; None if the file itself has the content.

    The address follows from the place of the file, so that no content leads elsewhere.

    Raises:
        VideotuneError: if the pointer is damaged.
    """
    name = name_in_mirror(path)
    if name is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_POINTER_BYTES)
    except OSError:
        return None  # opening the file reports what is wrong
    if not content.startswith(f"{POINTER}\n".encode()):
        return None

    # A mirror's folder has the bucket and the whole key below it.
    mirror, _, address = name.replace(os.sep, "/").partition("/")
    try:
        url = parse_url(SCHEME + address)
        _, url_line, size_line, etag_line, _ = content.decode().split("\n")
        size = int(size_line.removeprefix("size "))
        etag = json.loads(etag_line.removeprefix("etag "))
        if url_line != f"url {url}" or not isinstance(etag, str) or size < 0:
            raise ValueError("it is the pointer of another object")
    except ValueError as error:
        raise VideotuneError(
            f"{path} is a damaged pointer to an object ({error}). Delete the folder "
            f"{mirrors_folder() / mirror}; the next start writes it again."
        ) from error
    return StoredObject(url, size, etag, modified=0.0)


@contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """Give a file whose bytes can be opened, for the length of a block.

    An ordinary file is given as it is. A pointer's object is fetched, unless it is here,
    and stays at least until the block ends.

    Raises:
        VideotuneError: if the object cannot be fetched.
    """
    stored = read_pointer(path)
    if stored is None:
        yield Path(path)
        return
    pin = pin_object(stored)
    try:
        yield pin.path
    finally:
        pin.release()


def pin_object(
    stored: StoredObject, reserved: Callable[[], None] = lambda: None
) -> Pin:
    """Return an object's file, which stays until it is released; fetch it if needed.

    Args:
        stored: the object.
        reserved: called when it has its room on the disk, before it is fetched.

    Raises:
        VideotuneError: if the object cannot be fetched.
    """
    return blob_store().pin(
        [str(stored.url), stored.etag, stored.size],
        stored.size,
        suffix_of(stored.url),
        lambda part: object_store().fetch(stored, part),
        str(stored.url),
        reserved,
    )


def suffix_of(url: ObjectUrl) -> str:
    """Return the suffix of an object's file: FFmpeg tells some containers by it."""
    suffix = os.path.splitext(url.name)[1].lower()
    is_plain = suffix[1:].isascii() and suffix[1:].isalnum()
    return suffix if is_plain and len(suffix) <= MOST_SUFFIX_LETTERS else ""


def object_address(path: str | Path) -> str:
    """Return an address as the user wrote it: ``Path`` makes one slash of two."""
    return re.sub("^s3:/+", SCHEME, str(path))[:200]


def refuse_object_store(path: str | Path, purpose: str) -> None:
    """Refuse a dataset on an object store, or its mirror, in which files come and go.

    Args:
        path: what the user named.
        purpose: what would be written, for the error.

    Raises:
        VideotuneError: if it is one.
    """
    if str(path).startswith("s3:/") or name_in_mirror(path) is not None:
        raise VideotuneError(
            f"{object_address(path)}: {purpose} need a folder of this machine. Copy the clips here (aws s3 sync), give "
            "that folder, and upload the result."
        )


def size_of(path: Path, status: os.stat_result) -> int:
    """Return the bytes of a file, or of the object that it stands for."""
    stored = read_pointer(path)
    return status.st_size if stored is None else stored.size
