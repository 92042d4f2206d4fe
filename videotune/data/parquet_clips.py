"""Clips whose bytes are in the rows of Parquet files, as the library datasets and the Hub
write them: unpacked once into the cache, each file of rows into a folder of its own.

No name of a row leads anywhere: only its letters, digits, dots and dashes are used, and
the suffix follows the content. Bytes that are neither a video nor an image are not
written, except for their beginning, by which ``check`` tells what they are.
"""

import os
import re
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from videotune import files
from videotune.data.archives import (
    MARGIN,
    MAX_MEMBERS,
    RATIO,
    RESERVE,
    FileProgressFn,
    locked_folder,
)
from videotune.data.clip_file import ClipFile
from videotune.data.file_checks import HEAD_BYTES, type_of
from videotune.data.metadata_files import (
    FILE_COLUMNS,
    Columns,
    captions_of,
    text_column,
)
from videotune.data.parquet_files import PARQUET_SUFFIX, ParquetTable
from videotune.data.probe import VIDEO_SUFFIXES
from videotune.errors import VideotuneError

MAX_SHARDS = 10_000

MAX_CLIP_BYTES = 1 << 30
"""Most bytes of a clip in a row: 1 GiB."""

MAX_NAME_LETTERS = 60
"""Letters of a row's name that are used. A file's name may have 255 bytes."""

_NAMES_FILE = ".rows.json"
"""File in the folder of a shard with the name and the size of each row's clip."""

OTHER_SPLITS = ("test", "val", "valid", "validation", "dev", "eval")
"""Names of the splits of a dataset that are not for training."""

_SUFFIXES = (
    (0, b"\x89PNG", ".png"),
    (0, b"\xff\xd8\xff", ".jpg"),
    (0, b"BM", ".bmp"),
    (0, b"II*\0", ".tif"),
    (0, b"MM\0*", ".tif"),
    (0, b"GIF8", ".gif"),
    (8, b"WEBP", ".webp"),
    (8, b"AVI ", ".avi"),
    (4, b"ftypqt", ".mov"),
    (0, b"\x1a\x45\xdf\xa3", ".mkv"),
    (0, b"FLV\x01", ".flv"),
    (0, b"\x30\x26\xb2\x75", ".wmv"),
    (0, b"\0\0\1", ".mpg"),
    (0, b"G", ".ts"),
)
"""Offset, bytes at it, and the suffix of such a clip. Others are .mp4."""


@dataclass(frozen=True)
class Shard:
    """A Parquet file of a dataset."""

    path: Path

    name: str
    """Its path within the dataset, with / between its parts."""


def find_shards(
    folder: Path, within: Path | None = None
) -> tuple[list[Shard], list[str]]:
    """Return the Parquet files of a folder, in the order of their names, and notes.

    Files of a test or validation split are left out if there are others.

    Args:
        folder: the dataset's folder.
        within: links may lead out of this folder only to Parquet files; default is
            ``folder``.

    Raises:
        VideotuneError: if there are too many of them, or a link leads to another file.
    """
    shards = []
    for parent, folder_names, names in os.walk(folder):
        folder_names[:] = [name for name in folder_names if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(PARQUET_SUFFIX) and not name.startswith("."):
                path = Path(parent, name)
                _check_link(path, within or folder)
                shards.append(Shard(path, path.relative_to(folder).as_posix()))
    if len(shards) > MAX_SHARDS:
        raise VideotuneError(
            f"{folder} has {len(shards)} Parquet files; {MAX_SHARDS} are read. "
            "Make several datasets of them."
        )

    shards.sort(key=lambda shard: shard.name)
    other_splits = [shard for shard in shards if is_other_split(shard.name)]
    if not other_splits or len(other_splits) == len(shards):
        return shards, []
    note = (
        f"{len(other_splits)} Parquet files of test and validation splits are not used "
        f"({other_splits[0].name}); name one as a dataset of kind validation"
    )
    return [shard for shard in shards if shard not in other_splits], [note]


def is_other_split(name: str) -> bool:
    """Return whether a path is that of a test or validation split: by a folder of it, or
    by the beginning of the file's name (``test-00000-of-00002.parquet``).
    """
    *folders, file_name = name.lower().split("/")
    stem = re.split(r"[-_.]", file_name)[0]
    return any(part in OTHER_SPLITS for part in (*folders, stem))


def clip_column_of(path: Path, columns: Columns) -> str | None:
    """Return the column of a Parquet file that holds clips as bytes; None if it has only
    their paths.

    Raises:
        VideotuneError: if the file cannot be read, or it cannot be told which column is
            meant.
    """
    table = ParquetTable(path)
    candidates = table.clip_columns
    if columns.file is not None:
        return columns.file if columns.file in candidates else None

    known_columns = [name for name in FILE_COLUMNS if name in candidates]
    if len(known_columns) == 1:
        return known_columns[0]
    if len(candidates) > 1:
        raise VideotuneError(
            f"{path} has clips in the columns {' and '.join(candidates[:8])}. "
            "Name the one of the clips: datasets.file_column."
        )
    return candidates[0] if candidates else None


def read_clips(
    shards: Sequence[Shard], cache: Path, columns: Columns, progress: FileProgressFn
) -> tuple[Path, list[ClipFile], list[str]]:
    """Unpack the clips of Parquet files into a folder below ``cache``/archives, unless
    they already are there, and read their captions.

    A file that is unpacked stays if a later one is interrupted.

    Args:
        shards: the files.
        cache: the dataset's cache folder.
        columns: the columns of clips and captions, if the dataset names them.
        progress: called with (rows done, rows in all, current file).

    Returns:
        The folder, the clips in the order of the rows, and notes.

    Raises:
        VideotuneError: if a file is damaged, has no such columns, or has far more
            content than its size allows.
    """
    home = cache / "archives"
    clips: list[ClipFile] = []
    notes: dict[str, None] = {}
    try:
        column_by_shard = {}
        stamps = []
        for shard in shards:
            column, caption_column, shard_notes = _columns_of(shard, columns)
            column_by_shard[shard] = column, caption_column
            notes.update(dict.fromkeys(shard_notes))
            status = shard.path.stat()
            stamps.append([shard.name, column, status.st_size, status.st_mtime_ns])

        location = str(shards[0].path.absolute())
        folder = home / files.digest([location, stamps])
        home.mkdir(parents=True, exist_ok=True)
        with locked_folder(home, progress):
            for shard, (column, _) in column_by_shard.items():
                shard_folder = folder / shard.name
                if not _is_complete(shard_folder):
                    shard_folder.parent.mkdir(parents=True, exist_ok=True)
                    # Left by a killed process: no other works here while the lock is held.
                    for stale_folder in shard_folder.parent.glob(".part-*"):
                        shutil.rmtree(stale_folder)
                    with files.whole_folder(shard_folder) as temporary_folder:
                        _unpack(shard, column, temporary_folder, progress)
    except OSError as error:
        raise VideotuneError(
            f"{shards[0].path.parent}: its Parquet files could not be unpacked into {home}: "
            f"{error.strerror or error}."
        ) from error

    for shard, (_, caption_column) in column_by_shard.items():
        clips += _clips_of(shard, folder / shard.name, caption_column)
    return folder, clips, list(notes)


def _check_link(path: Path, within: Path) -> None:
    """Raise VideotuneError if a file is a link to one that is no Parquet file by name."""
    target = os.path.realpath(path)
    is_inside = Path(target).is_relative_to(os.path.realpath(within))
    if not is_inside and not target.lower().endswith(PARQUET_SUFFIX):
        raise VideotuneError(
            f"{path} is a link to {target}, outside {within}. Put the file itself there."
        )


def _is_complete(folder: Path) -> bool:
    """Return whether the folder of a shard has all its clips in their sizes, each a file
    of the folder itself.
    """
    try:
        rows = files.read_json(folder / _NAMES_FILE)
        for name, size in rows:
            status = os.lstat(folder / name)
            is_inside = os.path.basename(name) == name
            if not is_inside or not S_ISREG(status.st_mode) or status.st_size != size:
                return False
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    return True


def _unpack(shard: Shard, column: str, folder: Path, progress: FileProgressFn) -> None:
    """Write the clips of a shard, within the limits."""
    table = ParquetTable(shard.path)
    if table.row_count > MAX_MEMBERS:
        raise VideotuneError(
            f"{shard.path} has {table.row_count} rows of clips; {MAX_MEMBERS:,} are unpacked. "
            "Split it into several files."
        )
    free_bytes = max(0, shutil.disk_usage(folder).free - RESERVE)
    most_bytes = RATIO * shard.path.stat().st_size + MARGIN

    rows: list[tuple[str, int]] = []
    used_names: set[str] = set()
    total_bytes = 0
    for number, (content, written_name) in enumerate(table.clips(column), start=1):
        position = f"{shard.path}:{number}"
        if len(content) > MAX_CLIP_BYTES:
            raise VideotuneError(
                f"{position} has a clip of {len(content) / 1e9:.1f} GB; {MAX_CLIP_BYTES / 1e9:.1f} GB "
                "are read. Save it as a file."
            )
        content = clip_content(content)
        total_bytes += len(content)
        if total_bytes > most_bytes:
            raise VideotuneError(
                f"{shard.path} unpacks to more than {most_bytes / 1e9:.1f} GB, over {RATIO} times "
                "its size. If you trust it, save its clips as files."
            )
        if total_bytes > free_bytes:
            raise VideotuneError(
                f"{shard.path} does not fit: {free_bytes / 1e9:.1f} GB are free on the disk of "
                f"{folder.parent}. Free some space, or set cache_dir to another disk."
            )

        name = _clip_name(written_name, content, number, used_names)
        progress(number, table.row_count, f"unpacking {shard.name}")
        (folder / name).write_bytes(content)
        rows.append((name, len(content)))
    files.write_json(folder / _NAMES_FILE, rows)


def clip_content(content: bytes) -> bytes:
    """Return what is written of a row's bytes: only the beginning if they are no clip."""
    if type_of(content[:HEAD_BYTES]) in ("video", "image"):
        return content
    return content[:HEAD_BYTES]


def _clip_name(
    written_name: str, content: bytes, number: int, used_names: set[str]
) -> str:
    """Return the file name of a row's clip: that of the row, or its number if another
    row has the same.
    """
    base_name = written_name.replace("\\", "/").rpartition("/")[2]
    stem, suffix = os.path.splitext(base_name)
    stem = unicodedata.normalize("NFC", re.sub(r"[^\w.-]+", "_", stem))
    stem = stem[:MAX_NAME_LETTERS].strip("._-")

    is_video = type_of(content[:HEAD_BYTES]) == "video"
    if not is_video or suffix.lower() not in VIDEO_SUFFIXES:
        suffix = _suffix_of(content)
    # Some disks tell no upper case from lower case.
    if not stem or stem.casefold() in used_names:
        stem = f"{number:06d}"
    while stem.casefold() in used_names:
        stem += "-"
    used_names.add(stem.casefold())
    return f"{stem}{suffix.lower()}"


def _suffix_of(content: bytes) -> str:
    for offset, magic, suffix in _SUFFIXES:
        if content[offset : offset + len(magic)] == magic:
            return suffix
    return ".mp4"


def _columns_of(shard: Shard, columns: Columns) -> tuple[str, str, list[str]]:
    """Return the columns of a shard's clips and captions, and notes."""
    column = clip_column_of(shard.path, columns)
    if column is None:
        raise VideotuneError(
            f"{shard.path} has no column with the bytes of clips. "
            "Name it: datasets.file_column."
        )
    text_columns = ParquetTable(shard.path).text_columns
    caption_column, notes = text_column(shard.path, text_columns, columns.caption)
    return column, caption_column, notes


def _clips_of(shard: Shard, folder: Path, caption_column: str) -> list[ClipFile]:
    """Return the unpacked clips of a shard with the captions of its rows."""
    table = ParquetTable(shard.path)
    clips = []
    names = files.read_json(folder / _NAMES_FILE)
    values = table.texts([caption_column])
    for number, ((name, _), (text,)) in enumerate(
        zip(names, values, strict=True), start=1
    ):
        path = folder / name
        position = f"{shard.path}:{number}"
        clips.append(
            ClipFile(
                path=path,
                caption_file=None,
                expected_caption=path.with_suffix(".txt"),
                metadata_texts=captions_of(position, caption_column, text),
                metadata_row=f"{shard.name}:{number}",
            )
        )
    return clips
