"""Read metadata.csv, .jsonl and .parquet, which list a folder's clips with their
captions.
"""

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from videotune.bounds import require_file
from videotune.data.captions import read_utf8
from videotune.data.clip_file import Role
from videotune.data.file_checks import ClipProblem
from videotune.data.parquet_files import MAX_ROWS, PARQUET_SUFFIX, ParquetTable
from videotune.errors import VideotuneError

METADATA_SUFFIXES = (".csv", ".jsonl", PARQUET_SUFFIX)

METADATA_NAMES = tuple(f"metadata{suffix}" for suffix in METADATA_SUFFIXES)
"""Names of metadata files, by the Hub's convention."""

TEXT_COLUMNS = ("text", "caption", "prompt")
"""Names of the column of captions.

``text`` is the Hub's and wins; the others count if it is absent.
"""


FILE_COLUMNS = (
    "file_name",
    "video_path",
    "image_path",
    "media_path",
    "file_path",
    "video",
    "image",
    "path",
    "file",
)
"""Names of the column of clips in a file of rows. In a metadata file it is the first."""

COMPANION_COLUMNS: tuple[Role, ...] = ("reference", "control", "mask", "loss_mask")
"""Names of the columns of files that belong to a row's clip: their roles."""

MAX_BYTES = 1 << 29
"""Most bytes of a metadata file or a file of rows: 512 MiB."""


class Columns(NamedTuple):
    """The columns that a dataset names."""

    file: str | None = None
    caption: str | None = None


NO_COLUMNS = Columns()


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """A row of a metadata file."""

    file_name: str
    """Path of the clip as written there."""

    texts: tuple[str, ...] | None
    """Captions as written there, without blank ones; each may have several lines. None if
    the file has no column of captions.
    """

    position: str
    """File and line: "PATH:line"."""

    companions: tuple[tuple[Role, str], ...] = ()
    """Files that belong to the clip, by their role, as written there."""


def read_metadata(
    path: Path,
    columns: Columns = NO_COLUMNS,
    file_columns: Sequence[str] = FILE_COLUMNS[:1],
    *,
    needs_captions: bool = True,
) -> tuple[list[MetadataRow], list[str]]:
    """Read the rows of a metadata file, and notes on data that is not used.

    In JSON a list of texts are variants.

    Args:
        path: the file.
        columns: the columns of clips and captions, if the dataset names them.
        file_columns: names of the column of clips, if it does not. That of captions is
            one of ``TEXT_COLUMNS`` then.
        needs_captions: without a column of captions the file is refused, even if it names
            companions.

    Raises:
        VideotuneError: for anything else; the message names file and line.
    """
    require_file(path)
    if path.stat().st_size > MAX_BYTES:
        raise VideotuneError(
            f"{path} has {path.stat().st_size / 1e6:.0f} MB; a file of rows may have {MAX_BYTES >> 20} MiB. "
            "Split it into several datasets."
        )
    if columns.file is not None:
        file_columns = (columns.file,)
    if path.suffix.lower() == PARQUET_SUFFIX:
        return _read_parquet(path, columns, file_columns, needs_captions=needs_captions)
    try:
        text = read_utf8(path)
    except ClipProblem as problem:
        raise VideotuneError(f"{problem.detail}.") from problem

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        # Twice, since rows that are read take ten times as much memory as their text.
        if path.suffix.lower() == ".csv":
            return _csv_rows(path, text, file_columns)
        return _json_rows(path, text)

    names: dict[str, None] = {}
    count = 0
    for _, row in rows():
        names.update(dict.fromkeys(row))
        count += 1
    if count > MAX_ROWS:
        raise VideotuneError(
            f"{path} has {count} rows; {MAX_ROWS} are read. Split it into several datasets."
        )
    if not count:
        raise VideotuneError(
            f"{path} lists no clips. Write one row per clip, or delete the file."
        )

    file_column = _file_column(path, list(names), file_columns)
    column: str | None = None
    notes: list[str] = []
    if needs_captions or not _only_names_companions(list(names), columns):
        column, notes = text_column(path, list(names), columns.caption)

    roles = companion_columns(list(names), used=(file_column, column))
    metadata_rows = []
    for position, row in rows():
        metadata_row = _parse_row(path, position, row, column, file_column)
        companions = companions_of(position, row, roles)
        metadata_rows.append(replace(metadata_row, companions=companions))
    return metadata_rows, notes


def _only_names_companions(names: Sequence[str], columns: Columns) -> bool:
    """Return whether a file has columns of companions and none of captions."""
    has_captions = columns.caption is not None or any(
        name in names for name in TEXT_COLUMNS
    )
    return not has_captions and bool(companion_columns(names, used=()))


def _read_parquet(
    path: Path, columns: Columns, file_columns: Sequence[str], *, needs_captions: bool
) -> tuple[list[MetadataRow], list[str]]:
    """Read the rows of a Parquet file that has the clips' paths as text."""
    table = ParquetTable(path)
    clip_columns = [name for name in file_columns if name in table.clip_columns]
    if clip_columns:
        raise VideotuneError(
            f"{path} holds the clips themselves, in the column {clip_columns[0]}. "
            "Give the file itself as the dataset's path."
        )
    file_column = _file_column(path, table.text_columns, file_columns)
    caption_column: str | None = None
    notes: list[str] = []
    names = table.text_columns
    if needs_captions or not _only_names_companions(names, columns):
        caption_column, notes = text_column(path, names, columns.caption)

    used_columns = [file_column]
    if caption_column is not None:
        used_columns.append(caption_column)
    roles = companion_columns(table.text_columns, used=used_columns)
    for role in companion_columns(
        table.columns, used=[*table.text_columns, *used_columns]
    ):
        notes.append(f"{path}: the column {role} is not used: it has no paths as text")

    rows = []
    columns_read = [*used_columns, *roles]
    for number, values in enumerate(table.texts(columns_read), start=1):
        row = dict(zip(columns_read, values, strict=True))
        position = f"{path}:{number}"
        metadata_row = _parse_row(path, position, row, caption_column, file_column)
        companions = companions_of(position, row, roles)
        rows.append(replace(metadata_row, companions=companions))
    return rows, notes


def companion_columns(
    columns: Sequence[str], used: Collection[str | None]
) -> list[Role]:
    """Return the columns of files that belong to clips.

    Args:
        columns: columns of a file.
        used: those of them that have another meaning, by the dataset's keys.
    """
    return [role for role in COMPANION_COLUMNS if role in columns and role not in used]


def companions_of(
    position: str, row: Mapping[str, Any], roles: Sequence[Role]
) -> tuple[tuple[Role, str], ...]:
    """Return the files that a row names for its clip, as they are written.

    Args:
        position: file and line of the row.
        row: values by column. An absent, null or blank one names no file.
        roles: the columns of such files.

    Raises:
        VideotuneError: if a value is no text.
    """
    companions = []
    for role in roles:
        name = row.get(role)
        if name is None:
            continue
        if not isinstance(name, str):
            raise VideotuneError(
                f"{position}: {role} must be the path of a file, not {json.dumps(name)[:80]}. "
                "Write its path, or rename the column if it is not the clip's file."
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise _broken_character(position, error) from error
        if name.strip():
            companions.append((role, name.strip()))
    return tuple(companions)


def _file_column(
    path: Path, columns: Sequence[str], file_columns: Sequence[str]
) -> str:
    """Return the column of the clips' paths."""
    present = [name for name in file_columns if name in columns]
    if not present:
        raise VideotuneError(
            f"{path} has no column {' or '.join(file_columns[:4])}; its columns are "
            f"{', '.join(columns)}. Name the column of the clips' paths: datasets.file_column."
        )
    if len(present) > 1:
        raise VideotuneError(
            f"{path} has the columns {' and '.join(present)}. Name the one of the clips' paths: "
            "datasets.file_column."
        )
    return present[0]


def text_column(
    path: Path, columns: Sequence[str], named: str | None
) -> tuple[str, list[str]]:
    """Return the column of captions, and a note on others that might be meant.

    Args:
        path: the file.
        columns: its columns.
        named: the column that the dataset names, if it does.

    Raises:
        VideotuneError: if there is no such column, or it cannot be told.
    """
    column_list = ", ".join(columns)
    if named is not None:
        if named in columns:
            return named, []
        raise VideotuneError(
            f"{path} has no column {named} (datasets.caption_column); its columns are {column_list}. "
            "Name one of them."
        )

    text_columns = [name for name in TEXT_COLUMNS if name in columns]
    if not text_columns:
        raise VideotuneError(
            f"{path} has no column text; its columns are {column_list}. "
            "Name the column of the captions: datasets.caption_column."
        )
    if len(text_columns) == 1:
        return text_columns[0], []

    if text_columns[0] != "text":
        raise VideotuneError(
            f"{path} has the columns {' and '.join(text_columns)}, but no column text. "
            "Name the column of the captions: datasets.caption_column."
        )
    unused_columns = " or ".join(text_columns[1:])
    note = f"{path}: captions are taken from the column text, not from {unused_columns}"
    return "text", [note]


def _csv_rows(
    path: Path, text: str, file_columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a CSV file, each with the position ("PATH:line") at which it
    begins.
    """
    delimiter = _delimiter_of(text, file_columns)
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        strict=True,
        skipinitialspace=True,
    )
    header: list[str] = []
    line = 1
    try:
        for cells in reader:
            position = f"{path}:{line}"
            line = reader.line_num + 1

            # Spreadsheets append empty cells.
            while len(cells) > len(header) and not cells[-1].strip():
                cells.pop()
            if not any(cell.strip() for cell in cells):
                continue

            if not header:
                header = _csv_header(cells, position)
            elif len(cells) == len(header):
                yield position, dict(zip(header, cells, strict=True))
            else:
                raise VideotuneError(
                    f"{position} has {len(cells)} columns, the header has {len(header)}. "
                    f'Put a text that contains {delimiter!r} in "…".'
                )
    except csv.Error as error:
        raise VideotuneError(
            f"{path}:{line} is not valid CSV: {error}. "
            f'Put a text that contains {delimiter!r} or " in "…", and double each " in it.'
        ) from error


def _delimiter_of(text: str, file_columns: Sequence[str]) -> str:
    """Return the delimiter that makes one of the names a column of the header.

    csv.Sniffer would guess from the captions, whose commas mislead it.
    """
    top = text.lstrip()[:65536]
    headers: dict[str, list[str]] = {}
    for delimiter in ",;\t":
        reader = csv.reader(io.StringIO(top, newline=""), delimiter=delimiter)
        headers[delimiter] = next(reader, [])

    for delimiter, header in headers.items():
        if not {cell.strip() for cell in header}.isdisjoint(file_columns):
            return delimiter
    return max(headers, key=lambda delimiter: len(headers[delimiter]))


def _csv_header(cells: Sequence[str], position: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    if len(set(header)) < len(header):
        duplicate = max(header, key=header.count)
        raise VideotuneError(
            f"{position}: the column {duplicate!r} appears twice. Rename or remove one."
        )
    return header


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, each with its position ("PATH:line")."""
    # Not splitlines: a JSON string may contain other line ends unescaped.
    for line, row in enumerate(_split(text, "\n"), start=1):
        if not row.strip():
            continue

        try:
            value = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise VideotuneError(
                f"{path}:{line} is not valid JSON: {error}. Write one object per line."
            ) from error
        if not isinstance(value, dict):
            raise VideotuneError(
                f'{path}:{line} is not an object {{"file_name": "…", "text": "…"}}. '
                "Write one object per line."
            )
        yield f"{path}:{line}", value


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield the parts of a text between separators."""
    begin = 0
    while (end := text.find(separator, begin)) >= 0:
        yield text[begin:end]
        begin = end + len(separator)
    yield text[begin:]


def _parse_row(
    path: Path,
    position: str,
    row: Mapping[str, Any],
    column: str | None,
    file_column: str,
) -> MetadataRow:
    """Check a row; a text that is absent, null or blank has no variants.

    Args:
        path: the metadata file.
        position: file and line of the row.
        row: values by column.
        column: the column of captions, if there is one.
        file_column: the column of the clips' paths.
    """
    file_name = row.get(file_column)
    if not isinstance(file_name, str) or not file_name.strip():
        raise VideotuneError(
            f"{position} has no {file_column}. Set it to the clip's path, relative to "
            f"{path.parent}."
        )

    try:
        file_name.encode()
    except UnicodeEncodeError as error:
        raise _broken_character(position, error) from error
    written_texts = None
    if column is not None:
        written_texts = captions_of(position, column, row.get(column))
    return MetadataRow(file_name.strip(), written_texts, position)


def captions_of(position: str, column: str, value: Any) -> tuple[str, ...]:
    """Return the captions of a row: a text or a list of texts, without blank ones.

    Args:
        position: file and row.
        column: the column of captions.
        value: what the row has there.

    Raises:
        VideotuneError: if it is anything else.
    """
    if value is None:
        texts = []
    elif isinstance(value, list):
        texts = value
    else:
        texts = [value]
    if not all(isinstance(text, str) for text in texts):
        raise VideotuneError(
            f"{position}: {column} must be a text or a list of texts, "
            f"not {json.dumps(value)[:80]}."
        )

    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise _broken_character(position, error) from error
    return tuple(text for text in texts if text.strip())


def _broken_character(position: str, error: UnicodeEncodeError) -> VideotuneError:
    return VideotuneError(
        f"{position} has a broken character ({error.reason}). Save the file as UTF-8."
    )
