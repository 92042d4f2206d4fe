"""Read metadata.csv and metadata.jsonl, which list a folder's clips with their
captions.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.bounds import require_file
from videotune.data.captions import read_utf8
from videotune.data.file_checks import ClipProblem
from videotune.errors import VideotuneError

METADATA_NAMES = ("metadata.csv", "metadata.jsonl")
"""Names of metadata files, by the Hub's convention."""

TEXT_COLUMNS = ("text", "caption", "prompt")
"""Names of the column of captions.

``text`` is the Hub's and wins; the others count if it is absent.
"""


@dataclass(frozen=True)
class MetadataRow:
    """A row of a metadata file."""

    file_name: str
    """Path of the clip as written there."""

    texts: tuple[str, ...]
    """Captions as written there, without blank ones; each may have several lines."""

    position: str
    """File and line: "PATH:line"."""


def read_metadata(path: Path) -> tuple[list[MetadataRow], list[str]]:
    """Read the rows of a metadata file, and notes on data that is not used.

    The file needs a column ``file_name`` and one of ``TEXT_COLUMNS``. In JSON a list of
    texts are variants.

    Raises:
        VideotuneError: for anything else; the message names file and line.
    """
    require_file(path)
    try:
        text = read_utf8(path)
    except ClipProblem as problem:
        raise VideotuneError(f"{problem.detail}.") from problem

    rows = list(
        _csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text)
    )
    if not rows:
        raise VideotuneError(
            f"{path} lists no clips. Write one row per clip, or delete the file."
        )

    columns: dict[str, None] = {}
    for _, row in rows:
        columns.update(dict.fromkeys(row))
    column, notes = _text_column(path, list(columns))

    metadata_rows = [_parse_row(path, position, row, column) for position, row in rows]
    return metadata_rows, notes


def _text_column(path: Path, columns: Sequence[str]) -> tuple[str, list[str]]:
    """Return the column of captions, and a note on others that might be meant."""
    column_list = ", ".join(columns)
    if "file_name" not in columns:
        raise VideotuneError(
            f"{path} has no column file_name; its columns are {column_list}. "
            "Rename the column of the clips' paths to file_name."
        )

    text_columns = [name for name in TEXT_COLUMNS if name in columns]
    if not text_columns:
        raise VideotuneError(
            f"{path} has no column text; its columns are {column_list}. "
            "Rename the column of the captions to text."
        )
    if len(text_columns) == 1:
        return text_columns[0], []

    if text_columns[0] != "text":
        raise VideotuneError(
            f"{path} has the columns {' and '.join(text_columns)}, but no column text. "
            "Rename the column of the captions to text."
        )
    unused_columns = " or ".join(text_columns[1:])
    note = f"{path}: captions are taken from the column text, not from {unused_columns}"
    return "text", [note]


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a CSV file, each with the position ("PATH:line") at which it
    begins.
    """
    delimiter = _delimiter_of(text)
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


def _delimiter_of(text: str) -> str:
    """Return the delimiter that makes file_name a column of the header.

    csv.Sniffer would guess from the captions, whose commas mislead it.
    """
    top = text.lstrip()[:65536]
    headers: dict[str, list[str]] = {}
    for delimiter in ",;\t":
        reader = csv.reader(io.StringIO(top, newline=""), delimiter=delimiter)
        headers[delimiter] = next(reader, [])

    for delimiter, header in headers.items():
        if "file_name" in [cell.strip() for cell in header]:
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
    for line, row in enumerate(text.split("\n"), start=1):
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


def _parse_row(
    path: Path, position: str, row: Mapping[str, Any], column: str
) -> MetadataRow:
    """Check a row; a text that is absent, null or blank has no variants.

    Args:
        path: the metadata file.
        position: file and line of the row.
        row: values by column.
        column: the column of captions.
    """
    file_name = row.get("file_name")
    if not isinstance(file_name, str) or not file_name.strip():
        raise VideotuneError(
            f"{position} has no file_name. Set it to the clip's path, relative to "
            f"{path.parent}."
        )

    value = row.get(column)
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
        "".join([file_name, *texts]).encode()
    except UnicodeEncodeError as error:
        raise VideotuneError(
            f"{position} has a broken character ({error.reason}). Save the file as UTF-8."
        ) from error

    written_texts = tuple(text for text in texts if text.strip())
    return MetadataRow(file_name.strip(), written_texts, position)
