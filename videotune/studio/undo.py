"""Undo and redo on the page Data: the last action is taken back first, whether it changed
captions or moved clips.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from videotune.errors import VideotuneError
from videotune.studio import (
    captions_edit,
    clip_history,
    clip_moves,
    clip_row,
    clips,
    trash,
)
from videotune.studio.clip_history import Action
from videotune.studio.clip_row import ClipRow
from videotune.studio.projects import CLIPS, Project, inside, lock_of
from videotune.studio.records import CaptionChange, ClipMove
from videotune.text import counted

Direction = Literal["undo", "redo"]

CAPTION_WORDS = {
    "edit": "caption",
    "undo": "caption",
    "redo": "caption",
    "restore": "caption",
    "replace": "replacement in the caption",
}
"""What a change of one caption is called, by what made it; others keep their name."""

CAPTION_PLURALS = {
    "edit": "captions",
    "undo": "captions",
    "redo": "captions",
    "restore": "captions",
    "replace": "replacement in the captions",
}


@dataclass(frozen=True)
class UndoChoice:
    """An action that the page can take back, or do again."""

    batch: str

    name: str
    """What it was: "caption of cat.mp4"."""


def choices(project: Project) -> dict[Direction, UndoChoice | None]:
    """Return what the next undo and the next redo take; None if there is nothing."""
    done, undone = clip_history.actions(project)
    return {
        "undo": _first_choice(project, done, "undo"),
        "redo": _first_choice(project, undone, "redo"),
    }


def _first_choice(
    project: Project, actions: Sequence[Action], direction: Direction
) -> UndoChoice | None:
    for action in actions:
        if _is_possible(project, action, direction):
            return UndoChoice(action.batch, name_of(action))
    return None


def name_of(action: Action) -> str:
    """Return what an action was, with the clip or their number."""
    move = action.move
    if move is None:
        return _caption_action_name(action.changes)

    noun = "scene" if move["kind"] == "scene" else "clip"
    subject = _subject(move["names"], noun)
    if not move["targets"]:
        return f"removal of {subject}"
    if move["targets"][0].startswith(f"{CLIPS}/"):
        return f"training on {subject}"
    return f"keeping {subject} aside"


def _caption_action_name(changes: Sequence[CaptionChange]) -> str:
    maker = changes[0]["by"]
    if len(changes) == 1:
        return f"{CAPTION_WORDS.get(maker, maker)} of {changes[0]['name']}"
    words = CAPTION_PLURALS.get(maker, maker)
    return f"{words} of {counted(len(changes), 'clip')}"


def _subject(names: Sequence[str], noun: str) -> str:
    return names[0] if len(names) == 1 else counted(len(names), noun)


def _is_possible(project: Project, action: Action, direction: Direction) -> bool:
    """Return whether the files that the action had are still where it left them."""
    move = action.move
    if move is None:
        row_by_name = _editable_rows(project)
        return any(change["name"] in row_by_name for change in action.changes)

    if direction == "undo" and move["item"]:
        return (project.folder / trash.BIN / Path(move["item"]).name).is_dir()
    names = move["targets"] if direction == "undo" else move["files"]
    return any((project.folder / name).exists() for name in names)


def _editable_rows(project: Project) -> dict[str, ClipRow]:
    rows = clips.table(project).rows.values()
    return {row["name"]: row for row in rows if not row["caption_fixed"]}


def apply(project: Project, direction: Direction, batch: str = "") -> str:
    """Undo an action, or do it again; return the sentence that says what happened.

    Args:
        project: the project.
        direction: "undo" or "redo".
        batch: id of the action; empty for the next one.

    Raises:
        VideotuneError: if there is no such action, or its files cannot be moved.
    """
    with lock_of(project.folder):
        action = _find_action(project, direction, batch)
        if action.move is not None:
            return _apply_move(project, action.batch, action.move, direction)
        return _apply_captions(project, action, direction)


def undo(project: Project, batch: str = "") -> str:
    """Undo an action; see ``apply``."""
    return apply(project, "undo", batch)


def redo(project: Project, batch: str = "") -> str:
    """Do an undone action again; see ``apply``."""
    return apply(project, "redo", batch)


def _find_action(project: Project, direction: Direction, batch: str) -> Action:
    done, undone = clip_history.actions(project)
    for action in done if direction == "undo" else undone:
        is_wanted = batch in ("", action.batch)
        if is_wanted and _is_possible(project, action, direction):
            return action

    if batch:
        raise VideotuneError(f"there is no longer anything to {direction} here")
    raise VideotuneError(f"there is no change of captions or clips to {direction}")


def _apply_captions(project: Project, action: Action, direction: Direction) -> str:
    """Write the captions as they were before or after an action.

    A caption that was changed again since then keeps its text.
    """
    row_by_name = _editable_rows(project)
    text_by_path = {}
    changed_texts = {}
    for change in action.changes:
        row = row_by_name.get(change["name"])
        if row is None:
            continue

        current = clip_row.caption_of(row["clip"])
        if direction == "undo":
            expected = change["after"]
            wanted = change["before"]
        else:
            expected = change["before"]
            wanted = change["after"]
        text_by_path[row["path"]] = wanted if current == expected else current
        if current == expected:
            changed_texts[row["name"]] = wanted

    captions_edit.change(
        project,
        text_by_path,
        direction,
        undoes=action.batch if direction == "undo" else "",
        redoes=action.batch if direction == "redo" else "",
    )
    return _captions_sentence(
        changed_texts, direction, kept=len(text_by_path) - len(changed_texts)
    )


def _captions_sentence(
    changed_texts: dict[str, str], direction: Direction, *, kept: int
) -> str:
    if not changed_texts:
        words = "It was" if kept == 1 else "They were"
        return f"{words} changed since then: nothing was changed now"

    if len(changed_texts) == 1:
        subject = f"The caption of {next(iter(changed_texts))} is"
    else:
        subject = f"{counted(len(changed_texts), 'caption')} are"
    if not any(changed_texts.values()):
        result = "empty again"
    elif direction == "undo":
        result = "as before"
    else:
        result = "written again"

    sentence = f"{subject} {result}"
    if kept:
        verb = "was" if kept == 1 else "were"
        sentence += f"; {counted(kept, 'caption')} {verb} changed since then and stayed"
    return sentence


def _apply_move(
    project: Project, batch: str, move: ClipMove, direction: Direction
) -> str:
    subject = _subject(move["names"], "scene" if move["kind"] == "scene" else "clip")
    verb = "is" if len(move["names"]) == 1 else "are"
    home = project.folder
    record: ClipMove = {**move, "batch": clip_history.new_batch()}

    if direction == "undo":
        if move["item"]:
            trash.restore(home, move["item"])
        else:
            _move_known_files(home, move["targets"], move["files"])
        clip_history.record_move(project, record, undoes=batch)
        return f"{subject} {verb} back"

    if move["targets"]:
        _move_known_files(home, move["files"], move["targets"])
        result = "moved again"
    else:
        files = [_path_of(home, name) for name in move["files"]]
        existing_files = [file for file in files if file.exists()]
        record["item"] = trash.move_to_trash(
            home, move["kind"], subject, existing_files
        )
        result = "in the bin again"
    clip_history.record_move(project, record, redoes=batch)
    return f"{subject} {verb} {result}"


def _move_known_files(home: Path, files: Sequence[str], targets: Sequence[str]) -> None:
    """Move the files that still exist; a caption may have been emptied meanwhile."""
    existing_files = []
    existing_targets = []
    for name, target in zip(files, targets, strict=True):
        _path_of(home, target)
        if _path_of(home, name).exists():
            existing_files.append(name)
            existing_targets.append(target)
    clip_moves.move_files(home, existing_files, existing_targets)


def _path_of(home: Path, relative: str) -> Path:
    """Return the path of a file of the history, which may come from a stranger.

    The file itself may be a link to a place outside; its folder may not.
    """
    path = PurePosixPath(relative)
    if path.name.startswith("."):
        raise VideotuneError(f"{relative!r} is not a path inside {home.name}")
    return inside(home, path.parent.as_posix()) / path.name


def record_restored(project: Project, item: str) -> None:
    """Record that a removal was taken back in the bin, if the history has it."""
    done, _ = clip_history.actions(project)
    for action in done:
        move = action.move
        if move is not None and move["item"] == item:
            record: ClipMove = {**move, "batch": clip_history.new_batch()}
            clip_history.record_move(project, record, undoes=action.batch)
