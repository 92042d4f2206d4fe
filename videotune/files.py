"""Files that are complete or absent, checked JSON, and hashes.

A file is written under another name, synced, and then renamed.
"""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, Predicate

from videotune._version import BEGUN
from videotune.bounds import can_be_path, open_regular, read_at_most
from videotune.lazy import psutil

CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
"""Endings of a config file; TOML is one of another trainer, and refused as such."""

OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the user's quota is, or a file may not grow further."""

PIECE_CHARS = 1 << 16
"""Characters of JSON that are written together, at least."""

LATEST_TIME = 2.5e11
"""Seconds since 1970 that a calendar can show, at most."""

MAX_PROCESS_ID = 2**31 - 1

MAX_JSON_BYTES = 4_000_000
"""Size limit of a JSON file that a program writes about itself."""

MAX_OWN_JSON_BYTES = 2**30
"""Size limit of a JSON file that names each clip of a set."""


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for lack of space, and not because of a broken disk."""
    return error.errno in OUT_OF_ROOM


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raise safetensors' error about a file that cannot be written as an OSError.

    safetensors has the system's error number only in its text.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else None
        raise OSError(number, f"cannot be written: {error}", str(path)) from error


def near_paths(path: Path) -> list[str]:
    """Return what lies beside a missing file or folder and has nearly its name."""
    folder = path.parent
    if path.exists() or not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    return [str(folder / name) for name in get_close_matches(path.name, names, 2)]


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable; Windows has no such operation."""
    if os.name != "nt":
        sync_file(folder, os.O_RDONLY)


def sync_file(path: Path, flags: int = os.O_RDWR) -> None:
    """Flush a finished file to the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_UMASK = os.umask(0)
os.umask(_UMASK)


def write_whole(
    path: Path, write: Callable[[Path], None], *, durable: bool = True
) -> None:
    """Let ``write`` fill a temporary file, then rename it to ``path``.

    A reader sees the complete file or none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _temporary_path(path)
    try:
        write(part)
        if os.name != "nt":
            os.chmod(part, 0o666 & ~_UMASK)  # safetensors lets only the owner read
        if durable:
            sync_file(part)
        os.replace(part, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        # a full disk names no file
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        part.unlink(missing_ok=True)


def _temporary_path(path: Path) -> Path:
    """Return a path beside ``path`` that no other write uses, also of another thread.

    Readers choose a format by the suffix, so it stays.
    """
    return path.with_name(f".part-{os.getpid()}-{secrets.token_hex(4)}-{path.name}")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Let this block fill a temporary folder, then rename it to ``folder``.

    After an error nothing stays.
    """
    part = _temporary_path(folder)
    part.mkdir(parents=True)
    try:
        yield part
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_left_behind(part: Path) -> bool:
    """Whether a temporary file of ``write_whole`` is that of a process that has ended."""
    match = re.match(r"\.part-(\d+)-", part.name)
    if match is None:
        return False
    process = int(match[1])
    if process == os.getpid():  # in a container every process may have the same number
        started = time.time() - (time.perf_counter() - BEGUN)
        return part.stat().st_mtime < started
    return process > MAX_PROCESS_ID or not psutil.pid_exists(process)


def append_whole(file: FileIO, content: bytes) -> None:
    """Append all of the content to an unbuffered file, or nothing.

    What follows half a record could not be read.

    Raises:
        OSError: The disk takes no more, or only a part.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    except OSError:
        file.truncate(end)
        raise


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write text (UTF-8) as a whole."""
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write content as a whole."""
    write_whole(path, lambda part: _write_pieces(part, [content]), durable=durable)


def _write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(pieces)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write indented JSON as a whole."""

    def pieces() -> Iterator[bytes]:
        for text in json_pieces(value, rows_of):
            yield text.encode()
        yield b"\n"

    write_whole(path, lambda part: _write_pieces(part, pieces()), durable=durable)


def json_pieces(value: Any, default: Callable[[Any], Any]) -> Iterator[str]:
    """Yield indented JSON in pieces of some 64 KB, so that neither its text nor the rows of
    a long sequence are in memory as a whole.

    Args:
        value: what is written.
        default: turns a value that JSON does not know into one that it knows.
    """
    encoder = json.JSONEncoder(indent=2, ensure_ascii=False, default=default)
    parts: list[str] = []
    num_chars = 0
    for part in encoder.iterencode(value):
        parts.append(part)
        num_chars += len(part)
        if num_chars >= PIECE_CHARS:
            yield "".join(parts)
            parts.clear()
            num_chars = 0
    yield "".join(parts)


class _StreamedRows(list[Any]):
    """A sequence as a list for the JSON encoder, which makes each row when it is written.

    The encoder takes only lists, and asks one for its length and its items in order.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__()
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def rows_of(value: Any) -> list[Any]:
    """Return the rows of a sequence that JSON does not know.

    Raises:
        TypeError: if it is no sequence.
    """
    if isinstance(value, Sequence):
        return _StreamedRows(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def plain(value: Any) -> Any:
    """Return rows of a sequence, or the text of anything else that JSON does not know."""
    return _StreamedRows(value) if isinstance(value, Sequence) else str(value)


def read_json(path: Path) -> Any:
    """Read JSON (UTF-8).

    Raises:
        ValueError: It is no JSON, too large, or a pipe, which would be waited for.
        OSError: The file cannot be read.
    """
    return json.loads(_read_file(path, MAX_OWN_JSON_BYTES).decode("utf-8"))


def _read_file(path: Path, max_bytes: int) -> bytes:
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = read_at_most(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content


@cache  # building one takes milliseconds
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


Count = Annotated[int, Interval(ge=0, le=2**53)]
"""A number of things."""

Number = Annotated[float, Interval(ge=0, lt=math.inf)]
"""A time, a share or another size."""


PathText = Annotated[str, Predicate(can_be_path)]
"""A text that a file name can hold."""

REVALIDATED = {"revalidate_instances": "always"}
"""``__pydantic_config__`` of a dataclass that is built from a file and then checked."""


def checked(kind: Any, value: Any, *, partial: bool = False) -> Any:
    """Check a value from outside against a type, such as a dataclass or a TypedDict.

    Nothing is converted: a number in quotes is not a number.

    Args:
        kind: The type.
        value: The value; text is read as JSON.
        partial: Allow missing keys; the value is then returned as it is.

    Raises:
        ValueError: Names the first wrong key.
    """
    from pydantic import ValidationError

    try:
        if isinstance(value, str | bytes):
            return _adapter(kind).validate_json(value, strict=True)
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        first = min(problems, key=lambda problem: problem["type"] == "missing")
        if partial and first["type"] == "missing":
            return value
        key = ".".join(map(str, first["loc"]))
        message = f"{key}: {first['msg']}" if key else first["msg"]
        raise ValueError(message) from error


def read_typed(path: Path, kind: Any, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file that may be damaged, or made by a stranger, as a type.

    Args:
        path: The file.
        kind: Its type, such as a TypedDict; see ``checked``.
        max_bytes: Size from which the file is not read.

    Raises:
        ValueError: The file is too large, nested too deep, or has another type; the
            message names the first wrong key.
        OSError: The file cannot be read.
    """
    return checked(kind, _read_file(path, max_bytes))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, without damaged or torn lines."""
    if not path.is_file():
        return []
    values = []
    for line in path.read_bytes().split(b"\n"):
        # of the JSON, of torn UTF-8, or of a line that is nested too deep
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


Keys = tuple[str | int, ...]


def walk_json(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) of a JSON-like value and everything in it, the outer ones
    first.

    It descends one level at a time: a reader that stops at some depth is safe from
    deeper nesting.
    """
    yield path, value
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from walk_json(entry, (*path, str(key)))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from walk_json(entry, (*path, index))


def size_text(count: float) -> str:
    """Return a number of bytes as text, in powers of 1000."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def disk_usage(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder; links are followed."""
    return sum(
        file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()
    )


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    absolute_path = path.absolute()
    return next(
        folder for folder in (absolute_path, *absolute_path.parents) if folder.is_dir()
    )


def user_cache() -> Path:
    """Return the user's cache folder of videotune."""
    import platformdirs

    return platformdirs.user_cache_path("videotune")


CACHE_NAME = ".videotune-cache"
"""Name of the cache folder, in a dataset or beside it."""

CACHE_LOCK = "lock"
"""A file in every cache folder."""

OLD_MANIFEST = "manifest.jsonl"
"""A file of caches that an earlier version wrote."""

CACHE_TAGS = {
    "CACHEDIR.TAG": (
        "Signature: 8a477f597d28d172789f06886806bc55\n"
        "# Backup programs leave this folder out: videotune can write it again.\n"
        "# See https://bford.info/cachedir/\n"
    ),
    ".gitignore": "*\n",
}
"""Files that keep a cache folder out of backups, archives and repositories."""


def tag_cache(folder: Path) -> None:
    """Make a cache folder, with CACHE_TAGS in it.

    A folder that is the user's own, by its name and since it exists, gets no tag:
    other files in it may be wanted in backups.
    """
    if folder.name != CACHE_NAME and folder.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in CACHE_TAGS.items():
        if not os.path.lexists(folder / name):
            write_text(folder / name, text, durable=False)


def name_in_cache(cache: Path, path: Path) -> str:
    """Return how the files of a cache name a clip.

    It is relative to the dataset if the cache lies in one, so that a copy of the
    dataset names no folder of this machine; otherwise absolute.
    """
    absolute = path.absolute()
    if cache.name == CACHE_NAME:
        with suppress(ValueError):  # on another drive
            return os.path.relpath(absolute, cache.absolute().parent)
    return str(absolute)


def digest(value: Any) -> str:
    """Return 32 hex digits of a JSON-like value; the order of its keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    content = text.encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """Return 32 hex digits of a file's bytes; OSError if it is not a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=16)
        ).hexdigest()


def path_from(folder: Path, path: Path) -> str:
    """Return a path relative to the folder if it is in it, or else absolute."""
    absolute = path.absolute()
    root = folder.absolute()
    if absolute.is_relative_to(root):
        return absolute.relative_to(root).as_posix()
    return str(absolute)


def hash_path(path: Path, hash_one: Callable[[Path], str] = hash_file) -> str:
    """Return 32 hex digits of a file's bytes, or of all names and bytes in a folder.

    Args:
        path: the file or folder.
        hash_one: returns the hash of a file's bytes.
    """
    if path.is_file():
        return hash_one(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest({file.relative_to(path).as_posix(): hash_one(file) for file in files})


Moment = Annotated[float, Interval(ge=0, le=LATEST_TIME)]
"""Seconds since 1970."""


ProcessId = Annotated[int, Interval(ge=1, le=MAX_PROCESS_ID)]
"""The number of a process."""
