"""Find the cache that a path names, before torch is imported."""

from pathlib import Path

from videotune.data.file_checks import refuse_linked_folder
from videotune.data.object_files import object_address
from videotune.data.object_store import is_object_url, parse_url
from videotune.errors import VideotuneError
from videotune.files import CACHE_LOCK, CACHE_NAME, OLD_MANIFEST


def cache_address(path: Path) -> str | None:
    """Return the address of an object store that a path is; None if it is a path.

    Raises VideotuneError if it is not written like one.
    """
    address = object_address(path)
    if not is_object_url(address):
        return None
    return str(parse_url(address))


def cache_at(path: Path) -> Path:
    """Return the cache folder that a path is, or that a dataset at this path has.

    Raises VideotuneError if there is none.
    """
    if (path / CACHE_NAME).is_dir():
        return refuse_linked_folder(path / CACHE_NAME)
    has_cache_files = (path / CACHE_LOCK).exists() or (path / OLD_MANIFEST).exists()
    if path.name == CACHE_NAME:
        return refuse_linked_folder(path)
    if has_cache_files:
        return path
    # The cache of an archive is beside it.
    if path.is_file() and (path.parent / CACHE_NAME).is_dir():
        return refuse_linked_folder(path.parent / CACHE_NAME)

    if not path.is_dir():
        raise VideotuneError(
            f"{path}: there is no such folder. Name a cache folder, or a dataset that was encoded."
        )
    raise VideotuneError(
        f"{path}: neither a cache nor a dataset with one ({CACHE_NAME}). "
        "`videotune cache --data DIR …` makes one; if cache_dir was set, name that folder."
    )


def place_of_cache(path: Path) -> str:
    """Return the folder or address of the cache that a path names, for the user.

    Raises VideotuneError if it names no folder of a cache, nor an address.
    """
    return cache_address(path) or str(cache_at(path))
