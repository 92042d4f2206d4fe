"""Output for the user: lines, tables, and progress bars or, without a terminal,
progress lines.
"""

import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from videotune import files
from videotune.errors import printable
from videotune.files import size_text as size  # noqa: F401  (for commands)
from videotune.text import time_left

_tables: ContextVar[dict[str, list[dict[str, Any]]] | None] = ContextVar(
    "tables", default=None
)

_hides_bars: ContextVar[bool] = ContextVar("hides_bars", default=False)

_UNUSUAL = re.compile(r"[^\n\x20-\x7e]")
"""What may need an escape in indented JSON."""

QUIET_SECONDS = 20.0
"""Seconds between two progress lines without a terminal."""

SHORTEST_BAR = 12
"""Minimum columns of a progress bar, with the space before it."""


def is_silent_process() -> bool:
    """Whether this is a process of a distributed run that prints nothing."""
    return os.environ.get("RANK", "0") != "0"


class Unfailing:
    """Standard error for long runs: text that cannot be written is dropped without an
    error.

    The disk may be full, the reader gone, or the terminal closed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text if possible."""
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def guard_stderr() -> None:
    """Make sure that writing to standard error can never end this process.

    A descriptor that was closed before the start is opened on the null device.
    Otherwise the next opened file would get its number, and libraries would print into
    that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one

    if not isinstance(sys.stderr, Unfailing):
        stream: Any = sys.stderr
        if stream is None:
            stream = open(2, "w", closefd=False)  # noqa: SIM115  (open until the end)
        stream = Unfailing(stream)
        sys.stderr = stream


def echo(text: str) -> None:
    """Print a line on standard error, so that standard output has only results."""
    if not is_silent_process():
        print(for_stderr(text), file=sys.stderr, flush=True)


def for_stderr(text: str) -> str:
    """Return a message in lines of the terminal's width, if standard error is one."""
    return wrapped(text) if sys.stderr.isatty() else printable(text)


def doing(text: str) -> None:
    """Print what takes more than a second, before it begins: on standard error, which
    need not be writable.
    """
    guard_stderr()
    echo(f"{text} …")


def out(text: object) -> None:
    """Print a line of the result, such as a text or a path, on standard output."""
    print(printable(str(text)))


_COMMAND = re.compile(r"(next: .*|\s+)(videotune|torchrun) ")
"""A line that ends with a command."""


def wrapped(text: str, indent: str = "  ") -> str:
    """Return a text in lines of the terminal's width; without a terminal as it is.

    A line with a command stays one line, which the terminal folds: so it can be copied.

    Args:
        text: The text; characters that a terminal obeys are escaped.
        indent: What the lines after the first begin with.
    """
    columns = shutil.get_terminal_size((0, 24)).columns
    lines = printable(text).splitlines() or [""]
    if not columns:
        return "\n".join(lines)

    return "\n".join(
        textwrap.fill(
            line,
            columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(line) > columns and not _COMMAND.match(line)
        else line
        for line in lines
    )


def tell(text: str, indent: str = "  ") -> None:
    """Print a sentence of the result, in lines of the terminal's width.

    Args:
        text: The sentence.
        indent: What the lines after the first begin with.
    """
    print(wrapped(text, indent))


def print_json(value: Any) -> None:
    """Print a result as JSON on standard output.

    Characters that a terminal does not print, or that reverse the writing direction,
    are escapes of JSON.
    """
    for piece in files.json_pieces(value, files.plain):
        print(_UNUSUAL.sub(_json_escape, piece), end="")
    print()


def _json_escape(match: re.Match[str]) -> str:
    char = match[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]


def answer(as_json: bool, value: Any, show: Callable[[Any], object]) -> None:
    """Print a command's result as JSON, or with ``show``."""
    if as_json:
        print_json(value)
    else:
        show(value)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right: Sequence[int] = (),
) -> None:
    """Print a table on standard output; without a terminal it is as wide as it needs to
    be. A table whose words do not fit the terminal becomes a list.

    Args:
        title: The title.
        columns: The headings.
        rows: The cells; None is an empty cell.
        right: Indices of right-aligned columns.
    """
    recorded = _tables.get()
    if recorded is not None:
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        recorded.setdefault(title, []).extend(records)
        return

    cells = []
    for row in rows:
        cells.append(["" if cell is None else printable(str(cell)) for cell in row])
    widths = column_widths([list(columns), *cells], width())
    if widths is None:
        _print_list(title, columns, cells)
        return

    table = Table(header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(
            name, justify="right" if i in right else "left", width=widths[i]
        )
    for row_cells in cells:
        table.add_row(*map(escape, row_cells))
    console = Console(width=width())
    # The title has a line of its own, since a table would break a path in it anywhere.
    console.print(Text(printable(title), style="table.title"), soft_wrap=True)
    console.print(table)


BORDER = 3
"""Terminal columns that a column of a table takes beside its text."""


def column_widths(rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return the width of each column of a table in which no word is broken, and no
    name, which the first column has, if there is room.

    Args:
        rows: The cells, with the headings.
        room: The terminal's columns.

    Returns:
        None if the longest words do not fit beside each other.
    """
    least = []
    most = []
    for column in zip(*rows, strict=True):
        lines = [line for cell in column for line in cell.splitlines()]
        longest_line = max(map(cell_len, lines), default=0)
        words = [word for line in lines for word in line.split()]
        least.append(max(map(cell_len, words), default=0))
        most.append(longest_line)

    room -= BORDER * len(least) + 1
    if sum(least) > room:
        return None
    if most[0] + sum(least[1:]) <= room:
        least[0] = most[0]
    widths = list(least)
    spare = room - sum(least)
    narrowest_first = sorted(range(len(least)), key=lambda i: most[i] - least[i])
    for position, i in enumerate(narrowest_first):
        share = spare // (len(least) - position)
        added = min(share, most[i] - least[i])
        widths[i] += added
        spare -= added
    return widths


def _print_list(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table as a list: the first cell, and the others with their headings."""
    print(title)
    for first, *others in rows:
        tell(first, indent="    ")
        parts = []
        for name, cell in zip(columns[1:], others, strict=True):
            if cell:
                text = cell.replace("\n", ", ")
                parts.append(f"{name}: {text}" if name else text)
        if parts:
            tell(f"  {'; '.join(parts)}", indent="    ")


@contextmanager
def recorded_tables() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Collect the tables of this block by title, instead of printing them.

    A row is a dict of its cells by column.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    token = _tables.set(tables)
    try:
        yield tables
    finally:
        _tables.reset(token)


def are_tables_recorded() -> bool:
    """Whether what is printed is collected for ``--json``, so that no question is seen."""
    return _tables.get() is not None


def width() -> int:
    """Return the columns of the terminal, or the value of COLUMNS, or 200 for a pipe."""
    return shutil.get_terminal_size((200, 24)).columns


class Bar:
    """A progress bar with the time left."""

    def __init__(
        self, title: str, progress: Any | None, *, is_hidden: bool = False
    ) -> None:
        self._title = title
        self._is_hidden = is_hidden
        self._progress = progress
        self._task = None
        self._begun = time.monotonic()
        self._printed = self._begun
        self._has_printed_end = False
        self._first: int | None = None
        self._first_at = self._begun

    def update(
        self,
        done: int,
        total: int,
        text: str | Sequence[str] = "",
        seconds_left: float | None = None,
    ) -> None:
        """Show progress.

        Args:
            done: What is done.
            total: What there is to do.
            text: Shown beside the bar; of several parts as many as fit.
            seconds_left: The time left. None: estimated from what is done.
        """
        if self._is_hidden:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = done
            self._first_at = now
        is_known = seconds_left is not None or done > self._first
        if seconds_left is None:
            seconds_each = (now - self._first_at) / max(1, done - self._first)
            seconds_left = seconds_each * (total - done)

        parts = [text] if isinstance(text, str) else list(text)
        if self._progress is not None:
            left = f"{time_left(seconds_left)} left" if is_known else ""
            if self._task is None:
                self._task = self._progress.add_task(
                    self._title, total=total, parts=parts, left=""
                )
            self._progress.update(
                self._task, completed=done, total=total, parts=parts, left=left
            )
            return

        is_due = now - self._printed >= QUIET_SECONDS
        is_end = done == total
        is_first_end = is_end and now - self._begun > 2 and not self._has_printed_end
        if is_due or is_first_end:
            self._printed = now
            self._has_printed_end = is_end
            line = [f"{self._title}: {done}/{total}", *filter(None, parts)]
            if done < total and is_known:
                line.append(f"{time_left(seconds_left)} left")
            echo("  ".join(line))

    def close(self) -> None:
        """Remove the time left from the line that stays."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, left="")


def fitting(first: str, parts: Sequence[str], room: int) -> str:
    """Return ``first`` and as many of the parts, in order, as fit into ``room``
    columns.
    """
    line = first
    for part in filter(None, parts):
        if len(line) + 2 + len(part) > room:
            break
        line += f"  {part}"
    return line


class _TextColumn(ProgressColumn):
    """The text of a progress bar: title, counts, and as many parts as fit."""

    def __init__(self, console: Console, doing: Callable[[], str] | None) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console
        self._doing = doing

    def render(self, task: Task) -> Text:
        first = f"{task.description} {task.completed:.0f}/{task.total:.0f}"
        doing = self._doing() if self._doing else ""
        parts = [doing or task.fields["left"], *task.fields["parts"]]
        line = fitting(first, parts, self._console.width - SHORTEST_BAR)
        return Text(line, no_wrap=True)


@contextmanager
def without_bars() -> Iterator[None]:
    """Show no progress bar in this block, which repeats work that had one."""
    token = _hides_bars.set(True)
    try:
        yield
    finally:
        _hides_bars.reset(token)


@contextmanager
def bar(title: str, doing: Callable[[], str] | None = None) -> Iterator[Bar]:
    """Show a progress bar on standard error for the length of a block.

    Args:
        title: The title.
        doing: Returns what is done at the moment, shown instead of the time left; or
            "".
    """
    if is_silent_process() or _hides_bars.get() or not sys.stderr.isatty():
        yield Bar(title, None, is_hidden=_hides_bars.get())
        return

    console = Console(stderr=True)
    columns = (
        _TextColumn(console, doing),
        BarColumn(None, table_column=Column(ratio=1)),
    )
    with Progress(
        *columns, console=console, refresh_per_second=4, expand=True
    ) as progress:
        progress_bar = Bar(title, progress)
        yield progress_bar
        progress_bar.close()


def exactly(error: float) -> str:
    """Return how close two values are."""
    return f"within {error:.0e}" if error else "bit-identical"
