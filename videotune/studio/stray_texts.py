"""Text files beside the clips that no clip uses, which the page Data can remove."""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Response

from videotune.data.captions import read_caption
from videotune.data.clip_file import CAPTION_SUFFIXES
from videotune.data.remarks import code_of
from videotune.data.unused_captions import near_name
from videotune.errors import VideotuneError
from videotune.studio import captions_edit, clips, projects, trash
from videotune.studio.clip_row import ClipRow, needs_caption
from videotune.studio.data_notes import DataNotes
from videotune.studio.outside_clips import is_outside
from videotune.studio.projects import CLIPS, HELD_OUT, Project, visible_files
from videotune.studio.web import CurrentPage, PostedForm, ToastAction, reply

routes = APIRouter()

NOTE = "captions_without_clip"
"""The code of the note that names them."""

_NO_NAMES = re.compile(r" and \d+ more$| \(nearly [^()]*\)")
"""What the note says of the files besides their names."""


def stray_texts(project: Project, rows: Collection[ClipRow]) -> list[str]:
    """Return the text files that no clip uses, relative to the project."""
    used_files: set[Path] = set()
    for row in rows:
        if is_outside(row):
            continue
        clip = row["clip"]
        used_files.add(clip.expected_caption)
        if clip.caption_file:
            used_files.add(clip.caption_file)
        used_files.update(path for _, path in clip.companions)

    paths = []
    for part in (CLIPS, HELD_OUT):
        for path in sorted(visible_files(project.folder / part)):
            if path.suffix.lower() in CAPTION_SUFFIXES and path not in used_files:
                paths.append(path.relative_to(project.folder).as_posix())
    return paths


def with_strays(
    project: Project, rows: Collection[ClipRow], notes: DataNotes
) -> tuple[DataNotes, list[str]]:
    """Return the notes of a check, and the text files that they name and that are still
    there; without such a file the note on them is left out. Files of other folders are
    only in the note.
    """
    stray_notes = [note for note in notes.serious if code_of(note) == NOTE]
    if not stray_notes:
        return notes, []

    listing = _NO_NAMES.sub("", stray_notes[0].rpartition(": ")[2]).split(", ")
    strays = [
        path for path in stray_texts(project, rows) if path.partition("/")[2] in listing
    ]
    # Files of other folders are named, and stay as they are.
    if strays or any(is_outside(row) for row in rows):
        return notes, strays
    others = [note for note in notes.serious if code_of(note) != NOTE]
    return replace(notes, serious=tuple(others)), []


def clip_of_stray(path: str, rows: Collection[ClipRow]) -> ClipRow | None:
    """Return the clip without a caption whose name differs from that of a text file by a
    slip.
    """
    lacking = {Path(row["name"]).stem: row for row in rows if needs_caption(row)}
    name = near_name(Path(path).stem, lacking)
    if name is None:
        return None
    return lacking[name]


@routes.post("/data/use-text")
def use_text(page: CurrentPage, form: PostedForm) -> Response:
    """Make a text file the caption of the clip that it is nearly named as, and move the
    file to the bin.
    """
    project = page.current_project
    path = form["path"]

    with projects.lock_of(project.folder):
        rows = clips.table(project).rows.values()
        row = None
        if path in stray_texts(project, rows):
            row = clip_of_stray(path, rows)
        if row is None:
            raise VideotuneError(
                f"no clip without a caption is nearly named as {path[:200]}: reload the page"
            )

        stray_file = project.folder / path
        text = "\n".join(read_caption(stray_file))
        batch = captions_edit.change(project, {row["path"]: text}, "edit")
        trash.move_to_trash(project.folder, "text", stray_file.name, [stray_file])

    address = f"/p/{quote(project.name, safe='')}/data/undo"
    undo = ToastAction(words="Undo", post=address, values={"batch": batch})
    return reply(f"{row['name']} has the caption of {Path(path).name}", action=undo)


@routes.post("/data/remove-text")
def remove_text(page: CurrentPage, form: PostedForm) -> Response:
    """Move a text file that no clip uses to the bin."""
    project = page.current_project
    path = form["path"]
    with projects.lock_of(project.folder):
        if path not in stray_texts(project, clips.table(project).rows.values()):
            raise VideotuneError(
                f"{path[:200]} is not a text file without a clip: reload the page"
            )
        name = Path(path).name
        stray_file = project.folder / path
        item = trash.move_to_trash(project.folder, "text", name, [stray_file])
    address = f"/p/{quote(project.name, safe='')}/data/bin/restore"
    undo = ToastAction(words="Undo", post=address, values={"id": item})
    return reply(f"{name} moved to the bin", action=undo)
