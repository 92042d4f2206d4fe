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
from typing import NamedTuple

from videotune import files
from videotune.data.archives import (
    MARGIN,
    MAX_MEMBERS,
    RATIO,
    RESERVE,
    FileProgressFn,
    locked_folder,
)
from videotune.data.clip_file import ClipFile, Role
from videotune.data.companion_files import named_companions
from videotune.data.file_checks import HEAD_BYTES, type_of
from videotune.data.metadata_files import (
    COMPANION_COLUMNS,
    FILE_COLUMNS,
    Columns,
    captions_of,
    companion_columns,
    companions_of,
    text_column,
)
from videotune.data.parquet_files import PARQUET_SUFFIX, ParquetTable
from videotune.data.probe import VIDEO_SUFFIXES
from videotune.data.row_files import row_companions
from videotune.errors import VideotuneError

MAX_SHARDS = 10_000

MAX_CLIP_BYTES = 1 << 30
"""Most bytes of a clip in a row: 1 GiB."""

MAX_NAME_LETTERS = 60
"""Letters of a row's name that are used. A file's name may have 255 bytes."""

_NAMES_FILE = ".rows.json"
"""File in the folder of a shard with the name and the size of each row's clip."""


def _names_file_of(role: Role) -> str:
    """Return the file with the names and sizes of companions; a row without one has
    null.
    """
    return f".rows-{role}.json"


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


class _ShardColumns(NamedTuple):
    """The columns of a shard."""

    clip: str
    caption: str
    companion_bytes: list[Role]
    """Columns of files that belong to the clips."""
    companion_paths: list[Role]
    """Columns of the paths of such files."""


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
    # A column of masks beside one of clips is not meant, unless it is named.
    clip_candidates = [name for name in candidates if name not in COMPANION_COLUMNS]
    if columns.file is not None:
        return columns.file if columns.file in candidates else None

    known_columns = [name for name in FILE_COLUMNS if name in clip_candidates]
    if len(known_columns) == 1:
        return known_columns[0]
    if len(clip_candidates) > 1:
        raise VideotuneError(
            f"{path} has clips in the columns {' and '.join(clip_candidates[:8])}. "
            "Name the one of the clips: datasets.file_column."
        )
    return clip_candidates[0] if clip_candidates else None


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
        columns_by_shard = {}
        stamps = []
        for shard in shards:
            shard_columns, shard_notes = _columns_of(shard, columns)
            columns_by_shard[shard] = shard_columns
            notes.update(dict.fromkeys(shard_notes))
            status = shard.path.stat()
            # Without companions the folder is that of earlier versions.
            names = [shard_columns.clip, *shard_columns.companion_bytes]
            name = names[0] if len(names) == 1 else names
            stamps.append([shard.name, name, status.st_size, status.st_mtime_ns])

        location = str(shards[0].path.absolute())
        folder = home / files.digest([location, stamps])
        home.mkdir(parents=True, exist_ok=True)
        with locked_folder(home, progress):
            for shard, shard_columns in columns_by_shard.items():
                shard_folder = folder / shard.name
                if not _is_complete(shard_folder, shard_columns):
                    shard_folder.parent.mkdir(parents=True, exist_ok=True)
                    # Left by a killed process: no other works here while the lock is held.
                    for stale_folder in shard_folder.parent.glob(".part-*"):
                        shutil.rmtree(stale_folder)
                    with files.whole_folder(shard_folder) as temporary_folder:
                        _unpack(shard, shard_columns, temporary_folder, progress)
    except OSError as error:
        raise VideotuneError(
            f"{shards[0].path.parent}: its Parquet files could not be unpacked into {home}: "
            f"{error.strerror or error}."
        ) from error

    for shard, shard_columns in columns_by_shard.items():
        clips += _clips_of(shard, folder / shard.name, shard_columns)
    return folder, clips, list(notes)


def _check_link(path: Path, within: Path) -> None:
    """Raise VideotuneError if a file is a link to one that is no Parquet file by name."""
    target = os.path.realpath(path)
    is_inside = Path(target).is_relative_to(os.path.realpath(within))
    if not is_inside and not target.lower().endswith(PARQUET_SUFFIX):
        raise VideotuneError(
            f"{path} is a link to {target}, outside {within}. Put the file itself there."
        )


def _is_complete(folder: Path, columns: _ShardColumns) -> bool:
    """Return whether the folder of a shard has all its clips and their companions in their
    sizes, each a file of the folder itself.
    """
    try:
        rows = files.read_json(folder / _NAMES_FILE)
        for role in columns.companion_bytes:
            companions = files.read_json(folder / _names_file_of(role))
            rows += [row for row in companions if row is not None]
        for name, size in rows:
            status = os.lstat(folder / name)
            is_inside = os.path.basename(name) == name
            if not is_inside or not S_ISREG(status.st_mode) or status.st_size != size:
                return False
    except (OSError, ValueError, TypeError, RecursionError):
        return False
    return True


def _unpack(
    shard: Shard, columns: _ShardColumns, folder: Path, progress: FileProgressFn
) -> None:
    """Write the clips of a shard and their companions, within the limits."""
    _Unpacking(shard, folder, progress).run(columns)


class _Unpacking:
    """Writes the clips of a shard and their companions, within the limits.

    Args:
        shard: the Parquet file.
        folder: the folder to write to.
        progress: called with (rows done, rows in all, current file).
    """

    def __init__(self, shard: Shard, folder: Path, progress: FileProgressFn) -> None:
        self._shard = shard
        self._folder = folder
        self._progress = progress
        self._used_names: set[str] = set()
        self._total_bytes = 0
        self._free_bytes = max(0, shutil.disk_usage(folder).free - RESERVE)
        self._most_bytes = RATIO * shard.path.stat().st_size + MARGIN

    def run(self, columns: _ShardColumns) -> None:
        """Write all files, and their names.

        Raises:
            VideotuneError: if a limit is exceeded.
        """
        table = ParquetTable(self._shard.path)
        if table.row_count > MAX_MEMBERS:
            raise VideotuneError(
                f"{self._shard.path} has {table.row_count} rows of clips; {MAX_MEMBERS:,} are unpacked. "
                "Split it into several files."
            )

        rows = []
        for number, (content, name) in enumerate(table.clips(columns.clip), start=1):
            self._progress(number, table.row_count, f"unpacking {self._shard.name}")
            rows.append(self._write(number, content, name))
        files.write_json(self._folder / _NAMES_FILE, rows)

        for role in columns.companion_bytes:
            companions = []
            for number, (content, name) in enumerate(table.clips(role), start=1):
                is_given = bool(content)
                row = self._write(number, content, name) if is_given else None
                companions.append(row)
            files.write_json(self._folder / _names_file_of(role), companions)

    def _write(self, number: int, content: bytes, written_name: str) -> tuple[str, int]:
        """Write a file of a row, and return its name and size."""
        shard = self._shard
        position = f"{shard.path}:{number}"
        if len(content) > MAX_CLIP_BYTES:
            raise VideotuneError(
                f"{position} has a clip of {len(content) / 1e9:.1f} GB; {MAX_CLIP_BYTES / 1e9:.1f} GB "
                "are read. Save it as a file."
            )
        content = clip_content(content)
        self._total_bytes += len(content)
        if self._total_bytes > self._most_bytes:
            raise VideotuneError(
                f"{shard.path} unpacks to more than {self._most_bytes / 1e9:.1f} GB, over {RATIO} times "
                "its size. If you trust it, save its clips as files."
            )
        if self._total_bytes > self._free_bytes:
            raise VideotuneError(
                f"{shard.path} does not fit: {self._free_bytes / 1e9:.1f} GB are free on the disk of "
                f"{self._folder.parent}. Free some space, or set cache_dir to another disk."
            )

        name = _clip_name(written_name, content, number, self._used_names)
        (self._folder / name).write_bytes(content)
        return name, len(content)


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


def _columns_of(shard: Shard, columns: Columns) -> tuple[_ShardColumns, list[str]]:
    """Return the columns of a shard's clips and captions, and notes."""
    column = clip_column_of(shard.path, columns)
    if column is None:
        raise VideotuneError(
            f"{shard.path} has no column with the bytes of clips. "
            "Name it: datasets.file_column."
        )
    table = ParquetTable(shard.path)
    text_columns = table.text_columns
    caption_column, notes = text_column(shard.path, text_columns, columns.caption)
    used_columns = (column, caption_column)
    shard_columns = _ShardColumns(
        clip=column,
        caption=caption_column,
        companion_bytes=companion_columns(table.clip_columns, used=used_columns),
        companion_paths=companion_columns(text_columns, used=used_columns),
    )
    return shard_columns, notes


def _clips_of(shard: Shard, folder: Path, columns: _ShardColumns) -> list[ClipFile]:
    """Return the unpacked clips of a shard with the captions of its rows."""
    table = ParquetTable(shard.path)
    names = files.read_json(folder / _NAMES_FILE)
    companion_names = {
        role: files.read_json(folder / _names_file_of(role))
        for role in columns.companion_bytes
    }

    clips = []
    columns_read = [columns.caption, *columns.companion_paths]
    for index, values in enumerate(table.texts(columns_read)):
        row = dict(zip(columns_read, values, strict=True))
        position = f"{shard.path}:{index + 1}"
        listed = companions_of(position, row, columns.companion_paths)
        companions = dict(row_companions(position, listed, shard.path.parent))
        for role, unpacked in companion_names.items():
            if unpacked[index] is not None:
                companions[role] = folder / unpacked[index][0]

        path = folder / names[index][0]
        clips.append(
            ClipFile(
                path=path,
                caption_file=None,
                expected_caption=path.with_suffix(".txt"),
                metadata_texts=captions_of(
                    position, columns.caption, row[columns.caption]
                ),
                metadata_row=f"{shard.name}:{index + 1}",
                companions=named_companions(companions),
            )
        )
    return clips
