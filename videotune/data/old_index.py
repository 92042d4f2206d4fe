"""Take over the index of an earlier version: one JSON file with all rows."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from videotune import files
from videotune.data.index_database import FileRow, IndexDatabase

OLD_NAME = "index.json"


def take_over(
    path: Path,
    database: IndexDatabase,
    index_version: int,
    name_of: Callable[[Path], str],
) -> list[str]:
    """Move the rows of an old index beside a database into it, and delete the old index.

    The rows are checked when they are looked up, like any others.

    Args:
        path: the database's file.
        database: receives the rows.
        index_version: version of rows that are taken over; others are only deleted.
        name_of: returns the name of a file in the index.

    Returns:
        A note if the old index was damaged.
    """
    old_path = path.with_name(OLD_NAME)
    if old_path == path or not old_path.is_file():
        return []

    notes = []
    try:
        value = files.read_json(old_path)
        if (value["version"], value["av"]) == (index_version, version("av")):
            for name, row in value["files"].items():
                # Earlier versions named files in a dataset by absolute paths.
                text = name_of(Path(name)) if os.path.isabs(name) else name
                suffix = os.path.splitext(name)[1].lower()
                key = str(row["id"]) + suffix
                database.put_file(
                    text.encode(errors="backslashreplace").decode(),
                    FileRow(int(row["size"]), int(row["mtime_ns"]), key),
                )
            for key, row in value["contents"].items():
                database.put_content(key, json.dumps(row))
            database.close()
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        notes.append(
            f"the index {old_path} was damaged ({type(error).__name__}) "
            "and has been rebuilt"
        )
    with suppress(OSError):
        old_path.unlink()
    return notes
