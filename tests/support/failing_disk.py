"""A disk that fails at its n-th operation: every call by which our code changes files
is counted, and one of them fails.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import save, save_file

import videotune.files
from videotune.runs import checkpoint_writer

CALLS = (
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "remove",
    "rmdir",
    "chmod",
    "ftruncate",
)
"""Of ``os``; pathlib and shutil call these by the same names."""


@dataclass
class Disk:
    """Counts operations; the one with number ``broken`` fails: before it did anything,
    half way, or after it was done.
    """

    broken: int
    how: str
    number: int = errno.EIO
    done: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the operation that was to fail has been reached."""
        return len(self.done) >= self.broken

    def fail(self, name: str) -> None:
        raise OSError(
            self.number, f"{os.strerror(self.number)} (made by the test in {name})"
        )

    def counted(
        self,
        name: str,
        call: Callable[..., Any],
        half: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """The call, counted. ``half`` does a part of its work."""

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.done.append(name)
            if len(self.done) != self.broken:
                return call(*args, **kwargs)
            if self.how == "half" and half is not None:
                half(*args, **kwargs)
            elif self.how == "after":
                call(*args, **kwargs)
            return self.fail(name)

        return counting


def _half(path: Path, pieces: Iterable[bytes]) -> None:
    content = b"".join(pieces)
    path.write_bytes(content[: len(content) // 2])


def _half_tensors(tensors: Any, path: Path, *_: Any, **__: Any) -> None:
    whole = save(tensors)
    path.write_bytes(whole[: len(whole) // 2])


def _half_copy(source: Path, target: Path, **_: Any) -> None:
    data = Path(source).read_bytes()
    Path(target).write_bytes(data[: len(data) // 2])


def _unless_read(
    open_file: Callable[..., Any], counted: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what opens a file uncounted if it is read (``bounds.open_regular``)."""

    def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        is_read = flags & os.O_NONBLOCK
        return (open_file if is_read else counted)(path, flags, *args, **kwargs)

    return opening


@contextmanager
def disk(
    broken: int = 0, how: str = "before", number: int = errno.EIO
) -> Iterator[Disk]:
    """For the length of a block the disk fails at operation ``broken`` (from 1; 0:
    never).
    """
    one = Disk(broken, how, number)
    with (
        patch.multiple(
            os, **{name: one.counted(name, getattr(os, name)) for name in CALLS}
        ),
        patch.object(
            videotune.files,
            "_write_pieces",
            one.counted("write", videotune.files._write_pieces, _half),
        ),
        patch.object(
            checkpoint_writer,
            "save_file",
            one.counted("save_file", save_file, _half_tensors),
        ),
        patch.object(
            shutil, "copyfile", one.counted("copyfile", shutil.copyfile, _half_copy)
        ),
        patch.object(os, "open", _unless_read(os.open, one.counted("open", os.open))),
    ):
        yield one


HOWS = ("before", "half", "after")
"""Where no half of an operation is known, half is before."""


def each_fault(
    work: Callable[[], Any],
    again: Callable[[], None],
    check: Callable[[Disk], None],
    hows: Sequence[str] = HOWS,
) -> list[str]:
    """Run ``work`` on a disk that fails at its first operation, its second, …, until it
    passes; the operations' names.

    ``again`` comes before each try, ``check`` after each failure.
    """
    with patch.object(
        os, "fsync", lambda _: None
    ):  # it is counted and may fail; nobody has to wait for it
        return _each_fault(work, again, check, hows)


def _each_fault(
    work: Callable[[], Any],
    again: Callable[[], None],
    check: Callable[[Disk], None],
    hows: Sequence[str],
) -> list[str]:
    names: list[str] = []
    for how in hows:
        broken = 0
        while True:
            broken += 1
            again()
            with disk(broken, how) as one:
                try:
                    work()
                    raised = False
                except OSError:
                    raised = True
            if not one.failed:
                assert not raised
                break
            check(one)
        names = one.done
    return names
