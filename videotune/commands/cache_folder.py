"""Find the cache that a path names, before torch is imported."""

from pathlib import Path

from videotune.data.file_checks import refuse_linked_folder
from videotune.data.object_files import object_address
from videotune.errors import VideotuneError
from videotune.files import CACHE_LOCK, CACHE_NAME, OLD_MANIFEST


def cache_at(path: Path) -> Path:
    """Return the cache folder that a path is, or that a dataset at this path has.

    Raises VideotuneError if there is none.
    """
    if str(path).startswith("s3:/"):
        raise VideotuneError(
            f"{object_address(path)}: a folder of this machine can be listed and verified, not an object store. "
            "Entries are verified when a run fetches them; `videotune cache prune` with a config works on both."
        )
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
