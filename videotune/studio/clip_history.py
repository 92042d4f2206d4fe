"""The history of a project's clips: every change of a caption and every move of a clip,
in ``history.jsonl``.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from videotune.files import append_whole, checked
from videotune.studio.projects import Project
from videotune.studio.records import CaptionChange, ClipMove

HISTORY = "history.jsonl"
"""Every change: when, of which clip, by what, the text before and after.

``batch`` joins the changes of one action.
"""

MAX_HISTORY_BYTES = 64_000_000
"""Bytes of the history that are read, from its end."""

HistoryLine = CaptionChange | ClipMove

CLOCK_STEP = 0.001
"""Seconds by which the recorded time of a move may be before the move, as it is rounded."""


@dataclass(frozen=True)
class MovedFile:
    """A file that the page has moved."""

    original: Path
    """Where it was at first."""

    moved_at: float
    """When it came to where it is now, in seconds."""


@dataclass(frozen=True)
class Action:
    """What a user did with one press: changes of captions, or one move of clips."""

    batch: str
    """Its id; it stays the same where the action is undone and done again."""

    lines: tuple[HistoryLine, ...]

    @property
    def move(self) -> ClipMove | None:
        """The move; None if the action changed captions."""
        first = self.lines[0]
        return cast(ClipMove, first) if "files" in first else None

    @property
    def changes(self) -> list[CaptionChange]:
        """The changes of captions; empty if the action moved clips."""
        return [cast(CaptionChange, line) for line in self.lines if "after" in line]


def new_batch() -> str:
    """Return the id of a new action."""
    return f"{time.time_ns():x}"


def append(project: Project, records: Sequence[Mapping[str, Any]]) -> None:
    """Add lines to the history."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    with (project.folder / HISTORY).open("ab", buffering=0) as file:
        append_whole(file, text.encode())


def record_move(
    project: Project, move: ClipMove, *, undoes: str = "", redoes: str = ""
) -> None:
    """Add a move of clips to the history."""
    action = {"undoes": undoes, "redoes": redoes, "time": round(time.time(), 3)}
    append(project, [{**move, **action}])


def size(project: Project) -> int:
    """Return the bytes of the history, which grow with each line."""
    path = project.folder / HISTORY
    return path.stat().st_size if path.is_file() else 0


def moved_files(project: Project, since: float) -> dict[Path, MovedFile]:
    """Return the files that were moved, or came back from the bin, by where they are now.

    Args:
        project: the project.
        since: seconds; what was moved before is left out.
    """
    moved: dict[Path, MovedFile] = {}
    for line in _lines(project):
        time_of_move = line.get("time", 0.0)
        if "files" not in line or time_of_move < since:
            continue
        for source, target in _moved_pairs(cast(ClipMove, line)):
            before = moved.pop(project.folder / source, None)
            original = before.original if before else project.folder / source
            moved_at = time_of_move + CLOCK_STEP
            moved[project.folder / target] = MovedFile(original, moved_at)
    return moved


def _moved_pairs(move: ClipMove) -> list[tuple[str, str]]:
    """Return each file of a line before and after it; none if they went to the bin."""
    is_undone = bool(move.get("undoes"))
    if move["targets"]:
        pairs = list(zip(move["files"], move["targets"], strict=False))
        return [(target, source) for source, target in pairs] if is_undone else pairs
    return [(name, name) for name in move["files"]] if is_undone else []


def caption_changes(project: Project, name: str | None = None) -> list[CaptionChange]:
    """Return the changes of captions, newest first.

    Args:
        project: the project.
        name: only of the clip of this name; None for all.
    """
    changes = []
    for line in reversed(_lines(project)):
        if "after" in line:
            change = cast(CaptionChange, line)
            if name in (None, change["name"]):
                changes.append(change)
    return changes


def _lines(project: Project) -> tuple[HistoryLine, ...]:
    path = project.folder / HISTORY
    if not path.is_file():
        return ()
    return _read_history(path, path.stat().st_size)


@lru_cache(maxsize=8)
def _read_history(path: Path, size: int) -> tuple[HistoryLine, ...]:
    """Return the lines, oldest first, without those that are damaged or torn."""
    with path.open("rb") as file:
        file.seek(max(0, size - MAX_HISTORY_BYTES))
        content = file.read(MAX_HISTORY_BYTES)

    lines: list[HistoryLine] = []
    for line in content.split(b"\n"):
        kind = ClipMove if b'"files"' in line else CaptionChange
        try:
            lines.append(checked(kind, line))
        except ValueError:
            continue
    return tuple(lines)


def actions(project: Project) -> tuple[list[Action], list[Action]]:
    """Return the actions that count, and those that were undone since the last new one.

    Both in the order in which the next undo, or the next redo, takes them.
    """
    done: dict[str, Action] = {}
    undone: dict[str, Action] = {}

    for batch, group in groupby(_lines(project), key=lambda line: line["batch"]):
        lines = tuple(group)
        undone_batch = lines[0].get("undoes")
        redone_batch = lines[0].get("redoes")
        if undone_batch:
            if undone_batch in done:
                undone[undone_batch] = done.pop(undone_batch)
        elif redone_batch:
            undone.pop(redone_batch, None)
            done[redone_batch] = Action(redone_batch, lines)
        else:
            undone.clear()
            done[batch] = Action(batch, lines)
    return [*reversed(done.values())], [*reversed(undone.values())]
