"""A bounded folder of fetched objects, which all processes of a user share.

    blobs/NAME           an object, complete; its mtime is when it was last read
    blobs/.part-…-NAME   one that is being fetched; its name has its size
    blobs/.total         bytes of all of them, at least
    pins/…-NAME          a hard link to a blob that a process reads
    locks/XXX            a lock while an object is fetched, so that nobody else fetches it

A blob with a pin is not removed. Of the others those go first that were read longest ago.
A part or pin of a process that has ended is removed when room is needed.
"""

import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.files import digest, is_disk_full, size_text
from videotune.lazy import psutil

RESERVE = 10**9
"""Bytes of the disk that stay free."""

SLACK = 0.05
"""Share of the bound that an eviction frees beyond what is needed, so that the folder is
not read again for each object.
"""

WAIT_SECONDS = 300.0
"""Seconds to wait for room while everything is in use."""

FOREIGN_PIN_SECONDS = 86_400.0
"""Age from which a pin of another machine counts as left behind."""

PART = ".part-"
TOTAL = ".total"
LOCK_DIGITS = 3


class Pin:
    """A blob that stays until it is released."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def release(self) -> None:
        """Let the blob be removed when room is needed."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Blob:
    path: Path
    size: int
    read_at: int
    is_pinned: bool


class BlobStore:
    """The blobs below a folder.

    Args:
        folder: the folder, which need not exist.
        bound: most bytes of all blobs, with those that are being fetched.
    """

    def __init__(self, folder: Path, bound: int) -> None:
        self.bound = bound
        self._blobs = folder / "blobs"
        self._pins = folder / "pins"
        self._locks = folder / "locks"

    def pin(
        self,
        key: object,
        size: int,
        suffix: str,
        fetch: Callable[[Path], None],
        label: str,
        reserved: Callable[[], None] = lambda: None,
    ) -> Pin:
        """Return a pinned blob; fetch it if it is not here.

        Args:
            key: what identifies the content.
            size: its bytes.
            suffix: suffix of its file.
            fetch: writes it to a path.
            label: its name in errors.
            reserved: called when it has its room, before it is fetched.

        Raises:
            VideotuneError: if there is no room, or ``fetch`` raises it.
        """
        name = digest(key) + suffix
        pin = self._pin_existing(name)
        if pin is not None:
            return pin

        # Processes that decode start faster without it, and seldom come here.
        from filelock import Timeout

        try:
            for folder in (self._blobs, self._pins, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            with self._lock(name[:LOCK_DIGITS], seconds=WAIT_SECONDS + size / 1e5):
                pin = self._pin_existing(name)
                if pin is None:
                    part = self._reserve(name, size, label)
                    reserved()
                    pin = self._fill(name, part, size, fetch, label)
                return pin
        except Timeout as error:
            raise VideotuneError(
                f"{label}: another process fetches it, and has not ended. Start the command again."
            ) from error
        except NotImplementedError as error:
            raise VideotuneError(
                f"{self._locks} is on a file system without locks. Set XDG_CACHE_HOME to another disk."
            ) from error
        except OSError as error:
            if is_disk_full(error):
                raise self._disk_full(label, size) from error
            raise VideotuneError(
                f"{label} cannot be kept in {self._blobs}: {error.strerror or error}. "
                "Set XDG_CACHE_HOME to another disk."
            ) from error

    def trim(self) -> None:
        """Remove blobs beyond the bound, such as after it was lowered."""
        if self._blobs.is_dir():
            with self._space_lock():
                self._write_total(self._make_room(0))

    def _pin_existing(self, name: str) -> Pin | None:
        blob = self._blobs / name
        pin_path = self._pins / f"{_process_mark()}-{name}"
        try:
            os.link(blob, pin_path)
        except FileNotFoundError:
            return None
        with suppress(FileNotFoundError):  # it was removed, and the pin keeps its bytes
            os.utime(blob)
        return Pin(pin_path)

    def _fill(
        self,
        name: str,
        part: Path,
        size: int,
        fetch: Callable[[Path], None],
        label: str,
    ) -> Pin:
        """Fetch a blob into its reserved file. The caller holds its lock."""
        try:
            fetch(part)
            if part.stat().st_size != size:
                raise VideotuneError(
                    f"{label} has {part.stat().st_size} bytes, not {size} as its listing says. "
                    "Start the command again."
                )
            pin_path = self._pins / f"{_process_mark()}-{name}"
            # The pin comes first, so that no moment is without one.
            os.link(part, pin_path)
            os.replace(part, self._blobs / name)
        except BaseException:
            with self._space_lock():
                part.unlink(missing_ok=True)
                self._write_total(max(0, self._read_total() - size))
            raise
        return Pin(pin_path)

    def _reserve(self, name: str, size: int, label: str) -> Path:
        """Return an empty file for which there is room, and remove other blobs for it.

        Raises:
            VideotuneError: if all blobs are in use for too long.
        """
        part = self._blobs / f"{PART}{_process_mark()}-{size}-{name}"
        until = time.monotonic() + WAIT_SECONDS
        while True:
            with self._space_lock():
                total = self._read_total()
                if not self._fits(total, size):
                    total = self._make_room(size)
                if self._fits(total, size):
                    part.touch()
                    self._write_total(total + size)
                    return part
                self._write_total(total)

            if size > self.bound or total == 0:
                raise self._too_large(label, size)
            if time.monotonic() > until:
                raise VideotuneError(
                    f"object_cache_gb: the clips that are read now take all of its {size_text(self.bound)}, "
                    f"and {label} of {size_text(size)} waits for room. Set it higher."
                )
            time.sleep(0.05)

    def _too_large(self, label: str, size: int) -> VideotuneError:
        if size > self.bound:
            return too_large(label, size, self.bound)
        return self._disk_full(label, size)

    def _disk_full(self, label: str, size: int) -> VideotuneError:
        return VideotuneError(
            f"{label} of {size_text(size)} does not fit on the disk of {self._blobs}. Free some space, "
            "or set XDG_CACHE_HOME to another disk."
        )

    def _fits(self, total: int, size: int) -> bool:
        free_bytes = shutil.disk_usage(self._blobs).free - RESERVE
        return total + size <= self.bound and size <= free_bytes

    def _make_room(self, size: int) -> int:
        """Remove blobs that were read longest ago until so many bytes fit; return the
        bytes that remain. The caller holds the lock of the space.
        """
        self._remove_left_behind()
        blobs, total = self._read_folder()
        slack = int(SLACK * self.bound) if size else 0
        for blob in sorted(blobs, key=lambda blob: blob.read_at):
            if self._fits(total, size + slack):
                break
            if not blob.is_pinned:
                blob.path.unlink(missing_ok=True)
                total -= blob.size
        return total

    def _read_folder(self) -> tuple[list[_Blob], int]:
        """Return the complete blobs, and the bytes of all with those being fetched."""
        blobs = []
        total = 0
        with os.scandir(self._blobs) as entries:
            for entry in entries:
                if entry.name.startswith(PART):
                    total += _size_of_part(entry.name)
                elif not entry.name.startswith("."):
                    # A DirEntry's stat has no number of links on Windows.
                    status = os.stat(entry.path)
                    blobs.append(
                        _Blob(
                            Path(entry.path),
                            status.st_size,
                            read_at=status.st_mtime_ns,
                            is_pinned=status.st_nlink > 1,
                        )
                    )
                    total += status.st_size
        return blobs, total

    def _remove_left_behind(self) -> None:
        """Remove pins and parts of processes that have ended."""
        for folder, beginning in ((self._pins, ""), (self._blobs, PART)):
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    is_marked = entry.name.startswith(beginning)
                    mark = entry.name.removeprefix(beginning)
                    if is_marked and _is_over(mark, entry):
                        Path(entry.path).unlink(missing_ok=True)

    def _read_total(self) -> int:
        try:
            return max(0, int((self._blobs / TOTAL).read_text(encoding="ascii")))
        except (OSError, ValueError):
            return self._read_folder()[1]

    def _write_total(self, total: int) -> None:
        (self._blobs / TOTAL).write_text(str(total), encoding="ascii")

    @contextmanager
    def _lock(self, name: str, seconds: float) -> Iterator[None]:
        from filelock import FileLock  # as in pin

        with FileLock(self._locks / name, timeout=seconds, poll_interval=0.01):
            yield

    def _space_lock(self) -> AbstractContextManager[None]:
        self._locks.mkdir(parents=True, exist_ok=True)
        return self._lock("space", WAIT_SECONDS)


def too_large(label: str, size: int, bound: int) -> VideotuneError:
    """Return the error of an object that is larger than all objects may be."""
    return VideotuneError(
        f"object_cache_gb: {label} has {size_text(size)}, and {size_text(bound)} are the most that are kept "
        f"of object stores on this disk. Set it to {-(-size // 10**9) + 1} or more, or cut the clip."
    )


@cache
def _host() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _process_mark() -> str:
    """Return host, process, its start and a random part, for the name of a file."""
    return f"{_host()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(4)}"


@cache
def _started(process: int) -> int:
    """Return when a process started, in seconds. The number of this process, or of its
    fork, does not change.
    """
    return int(psutil.Process(process).create_time())


def _is_over(mark: str, entry: "os.DirEntry[str]") -> bool:
    """Return whether a file is that of a process that has ended, by its name."""
    host, process, started, *_ = [*mark.split("-"), "", "", ""]
    if not (process.isdigit() and started.isdigit()):
        return False
    if host != _host():
        with suppress(FileNotFoundError):
            return time.time() - entry.stat().st_mtime > FOREIGN_PIN_SECONDS
        return False
    try:
        actual_start = psutil.Process(int(process)).create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied, OverflowError):
        return True
    # When the clock is corrected, the start of a process moves by a second or two.
    return abs(actual_start - int(started)) > 3


def _size_of_part(name: str) -> int:
    parts = name.removeprefix(PART).split("-")
    return int(parts[4]) if len(parts) > 4 and parts[4].isdigit() else 0
