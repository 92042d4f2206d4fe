"""Damage to files: bytes, JSON values and safetensors headers, each change named by its
seed so that it can be repeated.
"""

import io
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError

COUNT = int(os.environ.get("VIDEOTUNE_FUZZ", "400"))
"""Mutations of each kind of file; more by the environment variable."""

LIMIT = 20.0
"""Seconds that one damaged file may take; a thousand times of what it should."""

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-308, "", "x", "\0", "../..",
    "/etc/passwd", "a" * 5000, "\ud800", "(a+)+$", "(.*)*x", "NaN", "é中", [], [[]], [None], [1, "a", None], {}, {"": None},
    {"x": {"y": []}}, [0] * 300, ["diffusers", "AutoModel"], ["os", "system"],
)  # fmt: skip
"""Values that a reader may not expect."""


def damaged_bytes(content: bytes, random_: random.Random) -> bytes:
    """The content with some bytes flipped, cut, doubled, zeroed or swapped."""
    out = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 5))):
        if not out:
            break
        at, length = random_.randrange(len(out)), random_.choice((1, 2, 8, 64, 500))
        kind = random_.randrange(6)
        if kind == 0:
            out[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[at : at + length]
        elif kind == 4:
            out[at : at + length] = bytes(len(out[at : at + length]))
        else:
            out[at:at] = random_.choice(
                (
                    b"\0",
                    b"{",
                    b"]",
                    b'"',
                    b"\xff\xfe",
                    b"NaN",
                    b"9" * 400,
                    b"\n",
                    b"[" * 2000,
                )
            )
    return bytes(out)


def damaged_json(content: bytes, random_: random.Random) -> bytes:
    """The JSON with one value replaced, dropped, doubled under another key, or moved."""
    value = json.loads(content)
    places = list(_places(value))
    if not places or random_.random() < 0.05:
        return json.dumps(random_.choice(ODD)).encode()
    for _ in range(random_.choice((1, 1, 1, 3))):
        container, key = random_.choice(places)
        kind = random_.randrange(5)
        if kind <= 2:
            container[key] = random_.choice(ODD)
        elif kind == 3 and isinstance(container, dict):
            container.pop(key, None)
        else:
            other, name = random_.choice(places)
            container[key] = other.get(name) if isinstance(other, dict) else None
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):  # a value was moved into itself
        return json.dumps(random_.choice(ODD)).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        value
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from _places(value[key])


def damaged_tensors(content: bytes, random_: random.Random) -> bytes:
    """The safetensors file with its header's JSON or its bytes changed; the header's
    length fits, or not.
    """
    if random_.random() < 0.3:
        return damaged_bytes(content, random_)
    length = int.from_bytes(content[:8], "little")
    head = damaged_json(content[8 : 8 + length], random_)
    said = len(head) if random_.random() < 0.9 else random_.choice((0, 1, 2**32, 2**63))
    return said.to_bytes(8, "little") + head + content[8 + length :]


def damaged(path: Path, random_: random.Random) -> bytes:
    """The file's content, damaged as its kind suggests."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return damaged_tensors(content, random_)
    try:
        json.loads(content)
    except ValueError:
        return damaged_bytes(content, random_)
    return (
        damaged_json(content, random_)
        if random_.random() < 0.7
        else damaged_bytes(content, random_)
    )


class TooLong(BaseException):
    """A damaged file was read for longer than ``LIMIT``."""


@contextmanager
def limited(seconds: float = LIMIT) -> Iterator[None]:
    """Raise TooLong where the block takes more seconds of CPU time, or ten times as
    long by the clock.

    The clock alone would fail a test because others use the machine; CPU time alone
    would not end a block that waits.
    """

    def ring(number: int, frame: object) -> None:
        raise TooLong

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds),
    }
    handlers = {number: signal.signal(number, ring) for number in timers}
    try:
        for timer, limit in timers.values():
            signal.setitimer(timer, limit)
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def try_each(
    files: list[Path], read: Callable[[], object], count: int = COUNT, seed: int = 0
) -> dict[str, int]:
    """Damage one of the files, ``read``, put it back; so many times.

    How many readings went well, and how many were refused.

    AssertionError that names the seeds for whatever is no VideotuneError or OSError,
    which the command line tells in a sentence, and for a reading that does not end.
    """
    kept = {path: path.read_bytes() for path in files}
    outcome = {"read": 0, "refused": 0}
    wrong: list[str] = []
    for number in range(count):
        random_ = random.Random(f"{seed} {number}")
        path = random_.choice(files)
        try:
            path.write_bytes(damaged(path, random_))
            with (
                limited(),
                redirect_stdout(io.StringIO()),
                redirect_stderr(io.StringIO()),
            ):
                read()
            outcome["read"] += 1
        except (VideotuneError, OSError) as error:
            outcome["refused"] += 1
            if isinstance(error, VideotuneError) and len(str(error)) > 5000:
                wrong.append(
                    f"seed {number}: {path.name}: {len(str(error))} letters: {str(error)[:100]}"
                )
        except (Exception, TooLong) as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = (
                f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
                if trace
                else "?"
            )
            wrong.append(
                f"seed {number}: {path.name}: {type(error).__name__}: {str(error)[:100]} at {where}"
            )
        finally:
            path.write_bytes(kept[path])
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:30])
    return outcome
