"""Captions: reading them from text files and from metadata.csv or .jsonl, the trigger word, hints."""

import csv
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.data.file_checks import ClipProblem
from videotune.errors import VideotuneError

LONG_CAPTION = 512
"""Words beyond which a caption is surely cut by every model's text encoder."""

METADATA_NAMES = ("metadata.csv", "metadata.jsonl")
"""Files that list a folder's clips with their captions, by the Hub's convention."""

TEXT_COLUMNS = ("text", "caption", "prompt")
"""Names of the column of captions. ``text`` is the Hub's and wins; the others count where it is absent."""

_TEMPORAL = re.compile(
    r"\b(first|firstly|then|next|afterwards?|finally|lastly)\b", re.IGNORECASE
)

_PLACEHOLDERS = re.compile(
    r"(your |insert )?(captions?|text|prompt|description|placeholder)( here)?|todo|tbd|fixme|xxx|lorem ipsum|none|null|nan"
    r"|n/?a|untitled|unknown|test|example|((a|an|the) )?(video|clip|image|picture)"
)
"""Captions that were never written, as ``_plain`` gives them."""

_INVISIBLE = frozenset(
    "\ufeff\ufffd\u200b\u2060\u00ad\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
"""Characters that show nothing, or that something was lost (U+FFFD); joiners, which some scripts need, are not here."""


@dataclass(frozen=True)
class MetadataRow:
    """A row of a metadata file: a clip's ``file_name`` as written there, its variants, and its ``place`` ("PATH:line")."""

    file_name: str
    text: tuple[str, ...]
    place: str


def read_caption(path: Path) -> tuple[str, ...]:
    """The variants of a caption: the lines of a UTF-8 file, trimmed, without blank ones; ClipProblem where there is none."""
    if path.exists() and not path.is_file():  # a pipe's reader would wait for ever
        raise ClipProblem("missing_caption", f"{path} is no regular file")
    lines = variants(_read_text(path))
    if not lines:
        raise ClipProblem("empty_caption", f"{path} has no text")
    return lines


def variants(text: str) -> tuple[str, ...]:
    """The lines of a text, trimmed, without blank ones: each is a caption of its own."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _read_text(path: Path) -> str:
    """UTF-8 text, with a byte order mark or without; ClipProblem names the encoding that it looks like instead."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ClipProblem(
            "missing_caption", f"{path} cannot be read: {error.strerror}"
        ) from error
    try:
        text = content.decode("utf-8-sig")
        fault = f"holds a NUL (byte {content.find(0)})"
    except UnicodeDecodeError as error:
        text = "\0"
        fault = f"is not UTF-8 text (byte {error.start})"
    if "\0" in text:
        looks = (
            "UTF-16, UTF-32 or no text"
            if 0 in content
            else "an older encoding (Windows-1252, GBK, Shift-JIS …)"
        )
        raise ClipProblem(
            "undecodable_caption", f"{path} {fault}; it looks like {looks}; save it as UTF-8"
        )
    return text


def read_metadata(path: Path) -> tuple[list[MetadataRow], list[str]]:
    """The rows of a metadata.csv or metadata.jsonl, and notes on what of it is not used.

    Needs a column ``file_name`` and one of ``TEXT_COLUMNS``. Several lines in a text, and in JSON a list of texts, are
    variants. VideotuneError that names the file and the line for all that cannot be read as that.
    """
    try:
        text = _read_text(path)
    except ClipProblem as problem:
        raise VideotuneError(f"{problem.detail}.") from problem
    rows = list(_csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text))
    columns = list(dict.fromkeys(column for _, row in rows for column in row))
    if not rows:
        raise VideotuneError(f"{path} lists nothing. Write a row a clip, or delete the file.")
    column, notes = _text_column(path, columns)
    listed = [_listed(path, place, row, column) for place, row in rows]
    broken = sum(
        isinstance(row.get(column), str) and len(variants(row[column])) > 1 for _, row in rows
    )
    if broken:
        notes.append(f"{broken} captions of {path} hold line breaks; each line is a variant")
    return listed, notes


def _text_column(path: Path, columns: Sequence[str]) -> tuple[str, list[str]]:
    """The column that holds the captions, and a note on another that might be taken for it."""
    there = ", ".join(columns)
    if "file_name" not in columns:
        raise VideotuneError(
            f"{path} has no column file_name; its columns: {there}. Call the clips' paths so."
        )
    found = [name for name in TEXT_COLUMNS if name in columns]
    if not found:
        raise VideotuneError(
            f"{path} has no column text; its columns: {there}. Name the captions' column text."
        )
    if found[0] != "text" and len(found) > 1:
        raise VideotuneError(
            f"{path} has the columns {' and '.join(found)}, and no column text. Name one text."
        )
    others = (
        f"{path}: captions are taken from the column text, not from {' or '.join(found[1:])}"
    )
    return found[0], [others] if len(found) > 1 else []


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with the place ("PATH:line") that each begins at.

    The separator is the one that makes file_name a column of the head: csv.Sniffer guesses from the captions, whose
    commas mislead it.
    """
    top = text.lstrip()[:65536]
    readings = {
        mark: next(csv.reader(io.StringIO(top, newline=""), delimiter=mark), [])
        for mark in ",;\t"
    }
    named = [mark for mark, head in readings.items() if "file_name" in map(str.strip, head)]
    delimiter = named[0] if named else max(readings, key=lambda mark: len(readings[mark]))
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True
    )
    head: list[str] = []
    line = 1
    try:
        for cells in reader:
            place = f"{path}:{line}"
            line = reader.line_num + 1
            while len(cells) > len(head) and not cells[-1].strip():
                cells.pop()
            if not any(cell.strip() for cell in cells):
                continue
            if not head:
                head = [cell.strip() for cell in cells]
                if len(set(head)) < len(head):
                    raise VideotuneError(
                        f"{place} names the column {max(head, key=head.count)!r} twice."
                    )
            elif len(cells) != len(head):
                counts = f"{len(cells)} columns, the head has {len(head)}"
                raise VideotuneError(
                    f'{place} has {counts}. Put a text that holds {delimiter!r} in "…".'
                )
            else:
                yield place, dict(zip(head, cells, strict=True))
    except csv.Error as error:
        remedy = (
            f'Put a text that holds {delimiter!r} or " in "…", and write each " in it twice.'
        )
        raise VideotuneError(f"{path}:{line} is no CSV: {error}. {remedy}") from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for line, row in enumerate(
        text.split("\n"), start=1
    ):  # not splitlines: JSON may hold other line ends as they are
        if row.strip():
            try:
                value = json.loads(row)
            except (ValueError, RecursionError) as error:
                raise VideotuneError(
                    f"{path}:{line} is no JSON: {error}. Write one object a line."
                ) from error
            if not isinstance(value, dict):
                raise VideotuneError(
                    f'{path}:{line} is no object {{"file_name": "…", "text": "…"}}.'
                )
            yield f"{path}:{line}", value


def _listed(path: Path, place: str, row: Mapping[str, Any], column: str) -> MetadataRow:
    """A row understood; a text that is absent, null or blank has no variants."""
    name = row.get("file_name")
    value = row.get(column)
    if not isinstance(name, str) or not name.strip():
        raise VideotuneError(
            f"{place} has no file_name. Name the clip's file, relative to {path.parent}."
        )
    texts = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise VideotuneError(
            f"{place}: {column} must be a text or a list of texts, not {json.dumps(value)[:80]}."
        )
    try:
        "".join([name, *texts]).encode()
    except UnicodeEncodeError as error:
        raise VideotuneError(
            f"{place} holds half of a character ({error.reason}). Write it whole."
        ) from error
    return MetadataRow(
        name.strip(), tuple(variant for text in texts for variant in variants(text)), place
    )


def with_trigger(caption: str, trigger: str | None) -> str:
    """The caption with the trigger word in front, unless it holds that word already."""
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption, re.IGNORECASE):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def with_token(caption: str, token: str) -> str:
    """The caption with a new token in front, unless it holds it already, to the letter: tokenizers know no other form."""
    return caption if token in caption else f"{token}, {caption}" if caption else token


def lint(caption: str, name: str | None = None) -> list[str]:
    """Hints on a caption; none of them is an error. ``name`` is its clip's file name without suffix."""
    hints = []
    words = sorted({word.lower() for word in _TEMPORAL.findall(caption)})
    if words:
        quoted = ", ".join(f'"{word}"' for word in words)
        hints.append(f"the caption tells a sequence ({quoted}); describe what is seen instead")
    count = len(caption.split())
    if count > LONG_CAPTION:
        hints.append(f"the caption has {count} words; text encoders cut it long before")
    if _PLACEHOLDERS.fullmatch(_plain(caption)):
        hints.append(f'the caption is only "{caption.strip()}"; it looks like a placeholder')
    elif name and _plain(caption) == _plain(name):
        hints.append(
            f'the caption is only the file\'s name, "{caption.strip()}"; describe what is seen'
        )
    odd = dict.fromkeys(char for char in caption if _shows_nothing(char))
    if odd:
        codes = ", ".join(f"U+{ord(char):04X}" for char in list(odd)[:5])
        hints.append(f"the caption holds characters that do not show ({codes}); type it anew")
    return hints


def _plain(text: str) -> str:
    """Small letters and single blanks, without marks around: "<TODO>" and "todo." are both "todo"."""
    return " ".join(
        re.sub(r"[\s_\-]+", " ", text).lower().strip(" \"'.,:;!?<>[](){}*…").split()
    )


def _shows_nothing(char: str) -> bool:
    return char in _INVISIBLE or (
        unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs") and char not in "\t\n\r"
    )


def lint_all(captions: Mapping[str, Iterable[str]]) -> list[str]:
    """Hints on the captions of a whole dataset, given by clip; none of them is an error.

    A caption that more than half of at least 8 clips share teaches nothing that a trigger word would not.
    """
    if len(captions) < 8:
        return []
    shared = Counter(
        text
        for texts in captions.values()
        for text in {" ".join(text.split()) for text in texts}
    )
    for text, count in shared.most_common(1):
        if count > len(captions) / 2:
            what = (
                f'the same caption ("{text[:60]}{"…" if len(text) > 60 else ""}")'
                if text
                else "an empty caption"
            )
            return [
                f"{count} of {len(captions)} clips have {what}; describe what each one shows"
            ]
    return []
