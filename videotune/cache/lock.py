"""One writer at a time: the lock of a cache folder."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from videotune.errors import VideotuneError

LOCK = "lock"


@contextmanager
def only_writer(folder: Path) -> Iterator[str | None]:
    """Hold the folder's lock; the system frees it when the process ends, however it ends.

    Yields a sentence where the file system keeps no locks. Raises VideotuneError that names whoever holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        note = None
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise VideotuneError(
                    f"the cache {folder} is being written by {_holder(path)}. Wait until that is done, "
                    "or set cache_dir elsewhere."
                ) from error
            note = f"{folder} is on a file system without locks: let no two runs fill this cache at a time"
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        yield note
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock at once or raise OSError. It lies far behind the text, which others read."""
    if os.name == "nt":
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
