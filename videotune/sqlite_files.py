"""The files of a SQLite database that a stranger may have made."""

import os
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

FILE_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Ends of the names of the files of a database."""

JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a rollback journal that names a journal of several databases
(https://www.sqlite.org/fileformat.html#the_rollback_journal).
"""


def refuse_leading_files(path: Path) -> None:
    """Check that no file of a database leads SQLite to another file.

    SQLite would write through a link. It would wait for a pipe. And it deletes the file
    that a rollback journal names as the journal of several databases, which ours never
    are.

    Raises:
        sqlite3.DatabaseError: if one does.
    """
    for file in database_files(path):
        with suppress(FileNotFoundError):
            status = file.lstat()
            is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if not is_plain and not stat.S_ISDIR(status.st_mode):
                raise sqlite3.DatabaseError(f"{file.name} is a link or a device")

    with (
        suppress(FileNotFoundError, IsADirectoryError),
        path.with_name(f"{path.name}-journal").open("rb") as journal,
    ):
        journal.seek(max(0, os.fstat(journal.fileno()).st_size - len(JOURNAL_MAGIC)))
        if journal.read() == JOURNAL_MAGIC:
            raise sqlite3.DatabaseError(f"{journal.name} names another file")


def database_files(path: Path) -> list[Path]:
    """Return the files that SQLite may have for a database."""
    return [path.with_name(path.name + suffix) for suffix in FILE_SUFFIXES]
