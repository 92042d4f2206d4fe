"""``videotune import``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from videotune import commands
from videotune.cli.options import AsJson
from videotune.config.load import shortened
from videotune.console import answer, echo, out, print_table

if TYPE_CHECKING:
    from videotune.interop.translate import Imported

ORDER = ("differs", "unknown", "missing", "none", "translated", "same")
"""Verdicts in the order in which is spoken of their keys."""


def import_config(
    files: Annotated[list[Path], typer.Argument(help="the config; a command line or a dataset's config beside it")],
    to: Annotated[Path | None, typer.Option("--out", help="a new JSON file for videotune's config")] = None,
    as_json: AsJson = False,
) -> None:
    """Translate a config of another trainer, with a row for every key of it."""
    result = commands.import_config.import_config(files, out=to)
    answer(as_json, asdict(result), lambda _: show(result))
    if to is not None:
        echo(f"config: {to}; `videotune check --config {to}` accounts for its clips")


def show(result: Imported) -> None:
    """Print the table, the notes below it, surprises first, and the counts."""
    rows, notes = [], dict[tuple[str, str], list[str]]()
    for row in result.rows:
        value = shortened(json.dumps(row.theirs, ensure_ascii=False, default=str))
        ours = "\n".join(f"{key} = {shortened(json.dumps(one, ensure_ascii=False))}" for key, one in row.ours.items())
        rows.append([f"{row.key} = {value}{'' if row.given else ' (default)'}", row.verdict, ours])
        said = f"{row.note} [{row.source}]" if row.source else row.note
        notes.setdefault((row.verdict, said if row.note else ""), []).append(row.key)
    print_table(f"keys of {result.trainer}", ["theirs", "verdict", "videotune"], rows)
    for (verdict, note), keys in sorted(notes.items(), key=lambda one: ORDER.index(one[0][0])):
        if note:
            out(f"{verdict}: {', '.join(keys)}: {note}")
    counts = Counter(row.verdict for row in result.rows)
    out(f"{len(result.rows)} keys: {', '.join(f'{count} {word}' for word, count in counts.items())}")
