"""The database of the media index: rows of files and of contents in SQLite.

    files     (name, size, mtime_ns, content)
    contents  (key, value)   the value is JSON
    about     (key, value)   versions of what wrote the rows

A database of other versions is emptied, and a damaged one is replaced. Rows are written
in batches, each in one transaction, so that a killed process loses at most its last batch
and two processes can fill one index. On a local disk the database has a write-ahead log.
Network disks do not support that and get a rollback journal.

It may have come with a dataset: its schema must be exactly ours, and readers check the
rows. Files of SQLite that would lead it to other files are deleted before it sees them.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from videotune.files import tag_cache
from videotune.lazy import psutil
from videotune.sqlite_files import database_files, refuse_leading_files

SCHEMA = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "CREATE TABLE files (name TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, content TEXT) "
    "WITHOUT ROWID",
    "CREATE INDEX files_by_size ON files (size)",
    "CREATE TABLE contents (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
)

NETWORK_DISKS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse")
"""Beginnings of the types of file systems that several machines may share."""

WAIT_SECONDS = 60.0
"""How long a writer waits for another process's transaction."""

MAX_ROW_BYTES = 64_000_000
"""Size of a row from which the database counts as damaged."""

KEYS_A_QUERY = 500
"""Keys that one query asks for; SQLite allows at least 999."""

ROWS_A_BATCH = 512
"""Rows of one transaction, at most."""

Result = TypeVar("Result")


class FileRow(NamedTuple):
    """What the index knows of a file. A damaged database may hold any type."""

    size: Any
    mtime_ns: Any
    content: Any
    """Key of its content."""


class IndexDatabase:
    """Rows by name and by key. Nothing is opened before the first use.

    Args:
        path: the database; None keeps it in memory.
        versions: what wrote the rows. Rows of other versions are dropped.
    """

    def __init__(self, path: Path | None, versions: Mapping[str, str]) -> None:
        self.path = path
        self.notes: list[str] = []
        """Reports of a database that was damaged or cannot be written."""
        self.is_new = False
        """Whether this object made the database, which then began empty."""
        self._is_writable = True
        self._loss = ""
        """The note on rows that cannot be written."""

        self._versions = dict(versions)
        self._connection: sqlite3.Connection | None = None
        self._files: dict[str, FileRow] = {}
        self._contents: dict[str, str | None] = {}
        """Rows of the next batch; None deletes a content."""

    # -- reading -----------------------------------------------------------------------

    def files(self, names: Sequence[str]) -> dict[str, FileRow]:
        """Return the rows of those files that have one."""
        rows = {
            name: FileRow(*row)
            for name, *row in self._select(
                "SELECT name, size, mtime_ns, content FROM files WHERE name IN", names
            )
        }
        rows.update({name: self._files[name] for name in names if name in self._files})
        return rows

    def files_of_sizes(self, sizes: Sequence[int]) -> dict[str, FileRow]:
        """Return the files that have one of these sizes."""
        query = "SELECT name, size, mtime_ns, content FROM files WHERE size IN"
        rows = {name: FileRow(*row) for name, *row in self._select(query, sizes)}
        wanted = set(sizes)
        rows.update(
            {name: row for name, row in self._files.items() if row.size in wanted}
        )
        return rows

    def contents(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the JSON of those contents that have a row."""
        rows = dict(self._select("SELECT key, value FROM contents WHERE key IN", keys))
        for key in keys:
            if key in self._contents:
                rows.pop(key, None)
                value = self._contents[key]
                if value is not None:
                    rows[key] = value
        return rows

    def names(self) -> Iterator[list[str]]:
        """Yield the names of all files, some at a time.

        Those that were yielded may be dropped in the meantime.
        """
        if self._files:
            yield list(self._files)
        query = "SELECT name FROM files WHERE name > ? ORDER BY name LIMIT ?"
        last_name = ""
        while True:
            keys = (last_name, KEYS_A_QUERY)
            rows = self._run(partial(_rows_of, query, keys), list[tuple[Any, ...]]())
            if not rows:
                return
            yield [name for (name,) in rows]
            last_name = rows[-1][0]

    def _select(self, query: str, keys: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows whose key is one of ``keys``."""
        for first in range(0, len(keys), KEYS_A_QUERY):
            part = keys[first : first + KEYS_A_QUERY]
            rows: list[tuple[Any, ...]] = []
            yield from self._run(partial(_rows_with, query, part), rows)

    # -- writing -----------------------------------------------------------------------

    def put_file(self, name: str, row: FileRow) -> None:
        """Write the row of a file with the next batch."""
        self._files[name] = row
        self._flush_if_full()

    def put_content(self, key: str, value: str) -> None:
        """Write the row of a content with the next batch."""
        self._contents[key] = value
        self._flush_if_full()

    def drop_content(self, key: str) -> None:
        """Delete a content with the next batch."""
        self._contents[key] = None

    def drop_files(self, names: Sequence[str]) -> None:
        """Delete files now."""
        self.flush()
        self._write("DELETE FROM files WHERE name = ?", [(name,) for name in names])

    def drop_unused_contents(self) -> None:
        """Delete the contents that no file has now."""
        self.flush()
        unused = "key NOT IN (SELECT content FROM files)"
        query = f"SELECT 1 FROM contents WHERE {unused} LIMIT 1"
        if self._run(lambda database: database.execute(query).fetchall(), []):
            self._write(f"DELETE FROM contents WHERE {unused}", [()])

    def flush(self) -> None:
        """Write the rows of the batch in one transaction."""
        if not self._files and not self._contents:
            return
        dropped = [(key,) for key, value in self._contents.items() if value is None]
        contents = [
            (key, value) for key, value in self._contents.items() if value is not None
        ]
        files = [(name, *row) for name, row in self._files.items()]
        is_written = self._write(
            *("DELETE FROM contents WHERE key = ?", dropped),
            # Contents first: a row of a file without its content would be useless.
            *("INSERT OR REPLACE INTO contents VALUES (?, ?)", contents),
            *("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", files),
        )
        # What cannot be written stays here until the end.
        if is_written:
            self._files.clear()
            self._contents.clear()

    def _write(self, *statements_and_rows: Any) -> bool:
        """Execute statements, each with the rows that follow it, in one transaction.

        Returns:
            Whether they were written.
        """
        if not self._is_writable:
            return False

        def write(database: sqlite3.Connection) -> bool:
            if not self._is_writable:
                return False
            database.execute("BEGIN IMMEDIATE")
            statements = statements_and_rows[::2]
            rows_of = statements_and_rows[1::2]
            for statement, rows in zip(statements, rows_of, strict=True):
                database.executemany(statement, rows)
            database.execute("COMMIT")
            return True

        return self._run(write, otherwise=False)

    def _flush_if_full(self) -> None:
        self._note_loss()
        pending_rows = max(len(self._files), len(self._contents))
        if self._is_writable and pending_rows >= ROWS_A_BATCH:
            self.flush()

    # -- the connection ----------------------------------------------------------------

    def open(self) -> None:
        """Open the database now."""
        self._run(lambda _: None, None)

    def close(self) -> None:
        """Write the last batch and close the database; a later use opens it again.

        A database in memory stays.
        """
        self.flush()
        if self._connection is not None and self.path is not None:
            self._connection.close()
            self._connection = None

    def _run(
        self, act: Callable[[sqlite3.Connection], Result], otherwise: Result
    ) -> Result:
        """Let ``act`` use the database, which is replaced if it turns out to be damaged.

        If it cannot be written, that is noted, and ``act`` sees what can be read.

        Returns:
            What ``act`` returns, or ``otherwise`` if it failed twice.
        """
        for _ in range(3):
            try:
                if self._connection is None:
                    self._connection = self._connect()
                return act(self._connection)
            except (sqlite3.DatabaseError, OSError) as error:
                self._recover(error)
        return otherwise

    def _recover(self, error: Exception) -> None:
        """Close the database after an error. Delete it if it was damaged."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        if self.path is None:
            raise error

        if isinstance(error, sqlite3.OperationalError | OSError):
            self._is_writable = False
            reason = getattr(error, "strerror", None) or str(error)
            self._loss = (
                f"{self.path.parent} cannot be written ({reason}): "
                "the clips are read again next time"
            )
            self._note_loss()
            return

        self._note(
            f"the index {self.path} was damaged ({type(error).__name__}) "
            "and has been rebuilt"
        )
        for file in database_files(self.path):
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _note_loss(self) -> None:
        """Note that rows are lost, if there are any."""
        if self._loss and (self._files or self._contents):
            self._note(self._loss)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _connect(self) -> sqlite3.Connection:
        """Open the database, or make it. If it cannot be written, open it for reading,
        or an empty one in memory.
        """
        if self.path is None:
            return self._connect_to(":memory:")
        if not self._is_writable:
            if self.path.is_file():
                # No other process writes it either, so it needs no lock.
                uri = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
                with suppress(sqlite3.DatabaseError):
                    return self._connect_to(uri)
            self._is_writable = True
            self.path = None
            return self._connect_to(":memory:")

        tag_cache(self.path.parent)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        refuse_leading_files(self.path)
        return self._connect_to(str(self.path))

    def _connect_to(self, name: str) -> sqlite3.Connection:
        """Open a database by its path or URI."""
        connection = sqlite3.connect(
            name,
            timeout=WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=name.startswith("file:"),
        )
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES)
            connection.text_factory = _text
            connection.execute("PRAGMA trusted_schema = OFF")
            if self.path is not None and self._is_writable:
                on_network = is_network_disk(self.path.parent)
                journal = "DELETE" if on_network else "WAL"
                connection.execute(f"PRAGMA journal_mode = {journal}")
                connection.execute("PRAGMA synchronous = NORMAL")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or check them; drop the rows of other versions.

        Raises:
            sqlite3.DatabaseError: if the tables are not ours.
        """
        if _has_schema(connection) and _versions_of(connection) == self._versions:
            return

        connection.execute("BEGIN IMMEDIATE")
        # Another process may have made the tables in the meantime.
        if not _has_schema(connection):
            self.is_new = True
            for statement in SCHEMA:
                connection.execute(statement)
        if _versions_of(connection) != self._versions:
            for table in ("about", "files", "contents"):
                connection.execute(f"DELETE FROM {table}")
            connection.executemany(
                "INSERT INTO about VALUES (?, ?)", self._versions.items()
            )
        connection.execute("COMMIT")


def _text(content: bytes) -> str:
    """Read a text, which is damaged if it is not UTF-8."""
    return content.decode("utf-8", "replace")


def _rows_with(
    query: str, keys: Sequence[Any], database: sqlite3.Connection
) -> list[tuple[Any, ...]]:
    """Return the rows of a query that ends with "IN", for these keys."""
    marks = ",".join("?" * len(keys))
    return database.execute(f"{query} ({marks})", list(keys)).fetchall()


def _rows_of(
    query: str, keys: Sequence[Any], database: sqlite3.Connection
) -> list[tuple[Any, ...]]:
    """Return the rows of a query with these keys."""
    return database.execute(query, keys).fetchall()


def _has_schema(connection: sqlite3.Connection) -> bool:
    """Return whether the database has our tables; False if it is empty.

    Raises:
        sqlite3.DatabaseError: if it has others.
    """
    statements = {
        sql
        for (sql,) in connection.execute("SELECT sql FROM sqlite_master")
        if sql is not None
    }
    if statements and statements != set(SCHEMA):
        raise sqlite3.DatabaseError("the tables are not those of an index")
    return bool(statements)


def _versions_of(connection: sqlite3.Connection) -> dict[str, Any]:
    return dict(connection.execute("SELECT key, value FROM about").fetchall())


def is_network_disk(folder: Path) -> bool:
    """Return whether a folder is on a file system that several machines may share."""
    path = os.path.realpath(folder)
    best_length = -1
    best_type = ""
    with suppress(OSError):
        for partition in psutil.disk_partitions(all=True):
            mount = os.path.join(partition.mountpoint, "")
            if os.path.join(path, "").startswith(mount) and len(mount) > best_length:
                best_length = len(mount)
                best_type = partition.fstype.lower()
    return best_type.startswith(NETWORK_DISKS)
