"""The media index as a plain value, to look into it and to spoil it."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


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
