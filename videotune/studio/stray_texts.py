"""Text files beside the clips that no clip uses, which the page Data can remove."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from videotune.data.clip_file import CAPTION_SUFFIXES
from videotune.data.remarks import code_of
from videotune.studio import clips, trash
from videotune.studio.clip_row import ClipRow
from videotune.studio.projects import CLIPS, HELD_OUT, Project, visible_files

NOTE = "captions_without_clip"
"""The code of the note that names them."""

_REST = re.compile(r" and \d+ more$")


def stray_texts(project: Project, rows: Collection[ClipRow]) -> list[str]:
    """Return the text files that no clip uses, relative to the project."""
    used_files: set[Path] = set()
    for row in rows:
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


def strays_of_notes(
    project: Project, rows: Collection[ClipRow], notes: Iterable[str]
) -> list[str]:
    """Return the files that a check's note names and that are still there."""
    listings = [
        _REST.sub("", note.rpartition(": ")[2]).split(", ")
        for note in notes
        if code_of(note) == NOTE
    ]
    if not listings:
        return []
    return [
        path
        for path in stray_texts(project, rows)
        if path.partition("/")[2] in listings[0]
    ]


def remove_stray_text(project: Project, path: str) -> bool:
    """Move such a file to the bin; return whether it was one."""
    rows = clips.table(project).rows.values()
    if path not in stray_texts(project, rows):
        return False
    name = Path(path).name
    trash.move_to_trash(project.folder, "text", name, [project.folder / path])
    return True
