"""What a cache on an object store has beside its entries: the media index, and pictures.

The index is fetched on a machine that has none, and uploaded after a scan that changed it.
Files of datasets on a store have the same names and times in it on every machine, so a
machine that trains need not open a clip.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from videotune import files
from videotune.data.object_store import (
    StoredObject,
    is_object_url,
    object_store,
    parse_url,
)
from videotune.errors import VideotuneError
from videotune.files import size_text

TRANSFERS = 8
"""Small files that are fetched or uploaded at a time."""

MAX_PICTURE_BYTES = 1 << 22
"""Most bytes of a picture that is fetched."""

MAX_INDEX_BYTES = 8 << 30
"""Most bytes of an index."""


@contextmanager
def index_on_store(cache_dir: str | None, path: Path) -> Iterator[None]:
    """Fetch the index of a cache before a block that scans, and upload it afterwards.

    Args:
        cache_dir: the config's; an ordinary folder has nothing to fetch.
        path: the index on this disk.

    Raises:
        VideotuneError: if the store cannot be used.
    """
    if cache_dir is None or not is_object_url(cache_dir):
        yield
        return

    url = parse_url(cache_dir).child(path.name)
    store = object_store()
    stored = store.find_object(url)
    if stored is not None and not path.exists():
        if stored.size > MAX_INDEX_BYTES:
            raise VideotuneError(
                f"{url} has {size_text(stored.size)}, and an index has at most {size_text(MAX_INDEX_BYTES)}. "
                "Delete it; the clips are then read again."
            )
        index = stored
        files.write_whole(path, lambda part: store.fetch(index, part), durable=False)

    before = files.hash_file(path) if path.is_file() else ""
    yield
    is_changed = path.is_file() and files.hash_file(path) != before
    if path.is_file() and (is_changed or stored is None):
        store.upload(path, url)


def fetch_pictures(cache_dir: str | None, paths: Iterable[Path]) -> None:
    """Fetch the files of a cache that its store has and its folder has not.

    Args:
        cache_dir: the config's; an ordinary folder has nothing to fetch.
        paths: the files, in one subfolder of the cache.

    Raises:
        VideotuneError: if the store cannot be used.
        OSError: if a file cannot be written.
    """
    missing = {path.name: path for path in paths if not path.is_file()}
    if cache_dir is None or not is_object_url(cache_dir) or not missing:
        return
    store = object_store()
    folder = next(iter(missing.values())).parent.name
    on_store = [
        stored
        for stored in store.list_objects(parse_url(cache_dir).child(folder))
        if stored.url.name in missing and stored.size <= MAX_PICTURE_BYTES
    ]

    def fetch(stored: StoredObject) -> None:
        path = missing[stored.url.name]
        files.write_whole(path, lambda part: store.fetch(stored, part), durable=False)

    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(fetch, on_store))


def upload_pictures(cache_dir: str | None, paths: Iterable[Path]) -> None:
    """Upload files of a cache, below the name of their folder.

    Raises:
        VideotuneError: if the store cannot be used.
    """
    if cache_dir is None or not is_object_url(cache_dir):
        return
    store = object_store()
    url = parse_url(cache_dir)

    def upload(path: Path) -> None:
        store.upload(path, url.child(f"{path.parent.name}/{path.name}"))

    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(upload, paths))
