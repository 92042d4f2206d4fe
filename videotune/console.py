"""Talking to the person: sentences, a table, a progress bar where there is a terminal, a line now and then where not."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from videotune.errors import printable
from videotune.files import size_text as size  # noqa: F401  (sizes in words)

_tables: ContextVar[dict[str, list[dict[str, Any]]] | None] = ContextVar("tables", default=None)

QUIET_SECONDS = 20.0
"""Without a terminal, a progress line at most so often."""


def quiet() -> bool:
    """Of several processes of one run the first alone talks."""
    return os.environ.get("RANK", "0") != "0"


class Unfailing:
    """Standard error for a run of hours: what cannot be written there is dropped, and no error comes of it.

    Its disk may be full, its reader gone, its terminal closed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def guard_stderr() -> None:
    """From now on nothing that is written to standard error can end this process.

    A descriptor that was closed before the start is opened on the null device: the next file would have its number, and
    what libraries print would be written into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    if not isinstance(sys.stderr, Unfailing):
        stream: Any = Unfailing(sys.stderr or open(2, "w", closefd=False))  # noqa: SIM115  (open until the end)
        sys.stderr = stream


def echo(text: str) -> None:
    """A sentence on standard error, so that standard output holds results alone."""
    if not quiet():
        print(printable(text), file=sys.stderr, flush=True)


def out(text: str) -> None:
    """A sentence of the result, on standard output."""
    print(printable(text))


def print_json(value: Any) -> None:
    """A result as JSON, on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def answer(as_json: bool, value: Any, show: Callable[[Any], object]) -> None:
    """The result of a command: as JSON, or as ``show`` prints it."""
    (print_json if as_json else show)(value)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()
) -> None:
    """A table on standard output; without a terminal it is as wide as it needs to be."""
    if (recorded := _tables.get()) is not None:
        recorded.setdefault(title, []).extend(
            dict(zip(columns, row, strict=True)) for row in rows
        )
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else escape(printable(str(cell))) for cell in row))
    Console(width=width()).print(table)


@contextmanager
def recorded_tables() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Tables of this block are not printed but collected, by title: a row is its cells by column."""
    tables: dict[str, list[dict[str, Any]]] = {}
    token = _tables.set(tables)
    try:
        yield tables
    finally:
        _tables.reset(token)


def width() -> int:
    """Columns to print in: the terminal's, or what COLUMNS says, or 200 into a pipe."""
    return shutil.get_terminal_size((200, 24)).columns


class Bar:
    """A progress bar with time left; ``update(done, total, text)`` from any loop."""

    def __init__(self, title: str, progress: Any | None) -> None:
        self._title = title
        self._progress = progress
        self._task = None
        self._said = self._begun = time.monotonic()
        self._first: int | None = None

    def update(
        self,
        done: int,
        total: int,
        text: str | Sequence[str] = "",
        seconds_left: float | None = None,
    ) -> None:
        """``done`` of ``total`` are done; ``text`` is shown beside, of several parts as many as there is room for.

        ``seconds_left``: None, by those done so far.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = done
        pace = (now - self._begun) / max(1, done - self._first)
        left = pace * (total - done) if seconds_left is None else seconds_left
        parts = [text] if isinstance(text, str) else list(text)
        if self._progress is not None:
            remaining = (
                clock(left) if seconds_left is not None or done > self._first else "-:--"
            )
            if self._task is None:
                self._task = self._progress.add_task(
                    self._title, total=total, parts=parts, left=""
                )
            self._progress.update(
                self._task, completed=done, total=total, parts=parts, left=f"{remaining} left"
            )
            return
        if now - self._said >= QUIET_SECONDS or (done == total and now - self._begun > 2):
            self._said = now
            echo("  ".join([f"{self._title}: {done}/{total}", *parts, f"{clock(left)} left"]))

    def close(self) -> None:
        """Nothing is left to be done: the line that stays says no time."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, left="")


def fitting(first: str, parts: Sequence[str], room: int) -> str:
    """As many of the parts, from the first on, as so many columns hold."""
    line = first
    for part in filter(None, parts):
        if len(line) + 2 + len(part) > room:
            break
        line += f"  {part}"
    return line


SHORTEST = 12
"""Columns that the bar itself has at least, with the space before it."""


@contextmanager
def bar(title: str, doing: Callable[[], str] | None = None) -> Iterator[Bar]:
    """A progress bar on standard error for the length of a block.

    ``doing``: asked at each refresh what is done meanwhile, which stands in the place of the time left; empty for nothing.
    """
    if quiet() or not sys.stderr.isatty():
        yield Bar(title, None)
        return
    console = Console(stderr=True)

    class Line(ProgressColumn):
        def render(self, task: Task) -> Text:
            first = f"{task.description} {task.completed:.0f}/{task.total:.0f}"
            now = (doing() if doing else "") or task.fields["left"]
            return Text(
                fitting(first, [now, *task.fields["parts"]], console.width - SHORTEST),
                no_wrap=True,
            )

    columns = (
        Line(Column(no_wrap=True)),
        BarColumn(None, table_column=Column(ratio=1)),
    )  # the bar has what is left
    with Progress(*columns, console=console, refresh_per_second=4, expand=True) as progress:
        made = Bar(title, progress)
        yield made
        made.close()


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    whole = round(seconds)
    hours = whole // 3600
    minutes = whole // 60 % 60
    rest = whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def exactly(error: float) -> str:
    """How near two values are, in words."""
    return f"within {error:.0e}" if error else "bit-identical"
