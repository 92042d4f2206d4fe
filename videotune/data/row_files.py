"""A file of rows as a dataset: each row has the path of a clip and its caption."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from videotune.data.clip_file import ClipFile, Role
from videotune.data.companion_files import named_companions
from videotune.data.metadata_files import (
    FILE_COLUMNS,
    Columns,
    read_metadata,
)
from videotune.data.parquet_files import PARQUET_SUFFIX
from videotune.errors import VideotuneError

ROW_SUFFIXES = (".jsonl", ".csv", PARQUET_SUFFIX)
"""Suffixes of files of rows, in lower case."""


def read_rows(
    path: Path, columns: Columns, root: Path | None = None
) -> tuple[list[ClipFile], list[str]]:
    """Return the clips that a file lists, in its order, and notes.

    Paths are relative to the root, or absolute, and lie in that folder, also after
    links.

    Args:
        path: the file of rows.
        columns: the columns of clips and captions, if the dataset names them.
        root: the dataset's folder; default is that of the file.

    Raises:
        VideotuneError: if the file is not valid, or a path is outside its folder or
            listed twice.
    """
    root = root or path.parent
    rows, notes = read_metadata(path, columns, FILE_COLUMNS)
    positions: dict[Path, str] = {}
    clips = []
    for row in rows:
        if re.match("https?://", row.file_name):
            raise VideotuneError(
                f"{row.position} lists {row.file_name[:200]!r}, which is a web address. Download the "
                f"clips into {root}, and list their paths."
            )
        clip_path = _path_of(row.position, row.file_name, root)
        if clip_path in positions:
            raise VideotuneError(
                f"{row.position} lists {row.file_name}, which {positions[clip_path]} lists already. "
                "Keep one row per clip; write several captions as lines of its text."
            )
        positions[clip_path] = row.position

        name_of_row = f"{path.name}:{row.position.rpartition(':')[2]}"
        exists = clip_path.is_file()
        clips.append(
            ClipFile(
                path=clip_path,
                caption_file=None,
                expected_caption=clip_path.with_suffix(".txt"),
                metadata_texts=row.texts,
                metadata_row=name_of_row,
                exists=exists,
                missing_detail=""
                if exists
                else f"{name_of_row} lists it, and it does not exist",
                companions=row_companions(row.position, row.companions, root),
            )
        )
    return clips, notes


def row_companions(
    position: str, companions: Sequence[tuple[Role, str]], root: Path
) -> tuple[tuple[Role, Path], ...]:
    """Return the files that a row names for its clip.

    Args:
        position: file and line of the row.
        companions: roles and paths, as the row has them.
        root: the dataset's folder.

    Raises:
        VideotuneError: if a path is outside the root.
    """
    paths = {role: _path_of(position, name, root) for role, name in companions}
    return named_companions(paths)


def _path_of(position: str, file_name: str, root: Path) -> Path:
    """Return a listed path; raise VideotuneError if it is not below the root."""
    name = file_name.replace("\\", "/")
    path = Path(os.path.normpath(root / name)) if "\0" not in name else root.parent
    inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
    relative_path = os.path.relpath(path, root)
    if not inside or relative_path.startswith(os.pardir):
        raise VideotuneError(
            f"{position} lists {file_name!r}, which is outside {root}. The clips of a "
            "dataset must be in the folder of its rows, and not behind links that lead out of it."
        )
    return root / relative_path
