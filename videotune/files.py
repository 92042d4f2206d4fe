"""Files that are complete or absent: written aside, synced, then renamed into place; and what a heartbeat's file says."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from videotune._version import BEGUN
from videotune.lazy import psutil

OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the person's share of it is, or a file may not grow further."""


LATE = 30.0
"""A heartbeat that is older than so many seconds is that of a dead process; a living one writes it six times as often."""


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for want of room, which a person can make, rather than for a broken disk."""
    return error.errno in OUT_OF_ROOM


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """What safetensors says in this block of a file that cannot be written becomes the OSError that it is.

    Its own kind of error has the system's number in its text alone.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(
            int(number[1]) if number else None, f"cannot be written: {error}", str(path)
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable (a no-op where the system has no such thing, as on Windows)."""
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


def write_whole(path: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let ``write`` fill a file beside ``path``, then rename it there, so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(
        f".part-{os.getpid()}-{path.name}"
    )  # the suffix stays: readers go by it
    try:
        write(aside)
        if os.name != "nt":
            os.chmod(aside, 0o666 & ~_UMASK)  # safetensors gives its files to their owner alone
        if durable:
            sync_file(aside)
        os.replace(aside, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        if (
            error.filename is None and error.errno is not None
        ):  # which file it was, a full disk does not say
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` that this block fills, and takes its place then; after an error nothing stays."""
    aside = folder.with_name(f".part-{os.getpid()}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_left_behind(part: Path) -> bool:
    """Whether a file that ``write_whole`` writes aside is that of a process that is gone."""
    number = re.match(r"\.part-(\d+)-", part.name)
    if number is None:
        return False
    if int(number[1]) == os.getpid():  # in a container every process may have the same number
        return part.stat().st_mtime < time.time() - (time.perf_counter() - BEGUN)
    return not psutil.pid_exists(int(number[1]))


def append_whole(file: FileIO, content: bytes) -> None:
    """Append to an unbuffered file all of it or nothing, since what comes after half a record cannot be read.

    Raises OSError where the disk takes no more, or only a part.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    except OSError:
        file.truncate(end)
        raise


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write text whole (UTF-8)."""
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write content whole."""
    write_whole(path, lambda aside: _put(aside, content), durable=durable)


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write JSON whole, readable by a person."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)


def read_json(path: Path) -> Any:
    """Read JSON (UTF-8)."""
    return json.loads(path.read_text(encoding="utf-8"))


@cache  # building one takes milliseconds
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


Count = Annotated[int, Interval(ge=0, le=2**53)]
"""So many of something."""

Number = Annotated[float, Interval(ge=0, lt=math.inf)]
"""A time, a share or another size."""

REVALIDATED = {"revalidate_instances": "always"}
"""``__pydantic_config__`` of a dataclass that is made first, of what a file says, and then checked."""


def checked(kind: Any, value: Any, *, partial: bool = False) -> Any:
    """A value from outside as one of a type (a dataclass, a TypedDict, …), read from JSON where it is text.

    Nothing is converted: a number in quotes is none. ``partial``: keys may be missing, and the value comes back as it is.
    Raises ValueError that names the first key that is wrong.
    """
    from pydantic import ValidationError

    try:
        if isinstance(value, str | bytes):
            return _adapter(kind).validate_json(value, strict=True)
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)
        first = min(wrong, key=lambda one: one["type"] == "missing")
        if partial and first["type"] == "missing":
            return value
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key}: {first['msg']}" if key else first["msg"]) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a line that a kill has torn, even inside a letter, is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError):  # of the JSON, or of the UTF-8 around it
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def walk_json(
    value: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(keys that lead to it, value) of a JSON-like value and of all that it holds, the outer ones first.

    It goes one level deeper at a time, so a reader that stops at some depth is safe from whatever lies below.
    """
    yield path, value
    inner = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield from walk_json(one, (*path, key if isinstance(value, list) else str(key)))


def size_text(count: float) -> str:
    """Bytes in words, powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def user_cache() -> Path:
    """The user's cache folder of videotune."""
    import platformdirs

    return platformdirs.user_cache_path("videotune")


def digest(value: Any) -> str:
    """32 hex digits that name a JSON-like value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """32 hex digits that name a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def path_from(folder: Path, path: Path) -> str:
    """A path relative to the folder where it lies in it, else whole."""
    place = path.absolute()
    home = folder.absolute()
    return place.relative_to(home).as_posix() if place.is_relative_to(home) else str(place)


def hash_path(path: Path) -> str:
    """32 hex digits that name a file's bytes, or the names and bytes of all files in a folder."""
    if path.is_file():
        return hash_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest({file.relative_to(path).as_posix(): hash_file(file) for file in files})


def life(run: Path, now: float | None = None) -> dict[str, Any] | None:
    """A run's last heartbeat with ``alive``, ``heard`` (its time) and ``age`` added; None where there never was one.

    On the machine that wrote it a process of that number must still be there; elsewhere its age decides, or where the number
    was given to another process since.
    """
    try:
        path = run / "heartbeat.json"
        facts = read_json(path)
        heard = max(facts["time"], path.stat().st_mtime)
        times = (heard, *(facts.get(key, 0) for key in ("time", "started", "since")))
        if not all(0 <= when <= 2.5e11 for when in times):
            return None  # a time that no calendar has
        age = (time.time() if now is None else now) - heard
        here = facts["host"] == socket.gethostname()
        alive = (
            facts["state"] != "ended"
            and age < LATE
            and (not here or psutil.pid_exists(facts["pid"]))
        )
        return {**facts, "heard": heard, "age": round(max(0.0, age), 1), "alive": alive}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
    ):  # no heartbeat, or none of ours
        return None
