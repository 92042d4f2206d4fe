"""The media index as a plain value, to look into it and to spoil it."""

import json
import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

from videotune.sqlite_files import JOURNAL_MAGIC


def read_index(path: Path) -> dict[str, Any]:
    """Return ``{"version", "av", "files", "contents"}``."""
    with closing(sqlite3.connect(path)) as database:
        value: dict[str, Any] = dict(database.execute("SELECT * FROM about").fetchall())
        value["files"] = {
            name: {"size": size, "mtime_ns": mtime_ns, "content": content}
            for name, size, mtime_ns, content in database.execute("SELECT * FROM files")
        }
        value["contents"] = {
            key: json.loads(row)
            for key, row in database.execute("SELECT * FROM contents")
        }
    return value


def write_index(path: Path, value: dict[str, Any]) -> None:
    """Write what ``read_index`` returned, changed or not."""
    with closing(sqlite3.connect(path)) as database, database:
        for table in ("about", "files", "contents"):
            database.execute(f"DELETE FROM {table}")
        about = [(key, value[key]) for key in ("version", "av")]
        database.executemany("INSERT INTO about VALUES (?, ?)", about)
        for name, row in value["files"].items():
            cells = (name, *(row.get(key) for key in ("size", "mtime_ns", "content")))
            database.execute("INSERT INTO files VALUES (?, ?, ?, ?)", cells)
        contents = [(key, json.dumps(row)) for key, row in value["contents"].items()]
        database.executemany("INSERT INTO contents VALUES (?, ?)", contents)


def as_json(value: dict[str, Any]) -> str:
    """Return an index as versions up to 0.3 wrote it."""
    rows = {
        name: {
            "size": row["size"],
            "mtime_ns": row["mtime_ns"],
            "id": row["content"][:32],
        }
        for name, row in value["files"].items()
    }
    return json.dumps({**value, "version": int(value["version"]), "files": rows})


def leading_journal(database: Path, victim: Path) -> bytes:
    """A rollback journal without pages that names a journal of several databases, as
    SQLite's file format has it.
    """
    page_bytes = int.from_bytes(database.read_bytes()[16:18], "big")
    pages = database.stat().st_size // page_bytes
    header = struct.pack(">8sIIIII", JOURNAL_MAGIC, 0, 1234, pages, 512, page_bytes)
    name = os.fsencode(victim)
    lock_page = (1 << 30) // page_bytes + 1
    end = struct.pack(">II8s", len(name), sum(name), JOURNAL_MAGIC)
    return header.ljust(512, b"\0") + struct.pack(">I", lock_page) + name + end
