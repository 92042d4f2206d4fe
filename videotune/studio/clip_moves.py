"""Moving clips of a project, with the files that belong to them: to training, aside for
checking, or to the bin.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.studio import clips, trash
from videotune.studio.clip_history import new_batch
from videotune.studio.clip_row import ClipRow, is_drawn
from videotune.studio.projects import CLIPS, HELD_OUT, Project
from videotune.studio.records import ClipMove


def drawn_beside(project: Project, paths: Sequence[str]) -> list[str]:
    """Return the clips to keep aside by hand, so that those which the check has drawn can
    be trained on again; empty if it has drawn none of them.

    Args:
        project: the project.
        paths: paths of the clips to train on, within the project.

    Raises:
        VideotuneError: if no other clip would be kept aside, since the check would then
            draw some again.
    """
    drawn_paths = [
        path for path, row in clips.table(project).rows.items() if is_drawn(row)
    ]
    others = [path for path in drawn_paths if path not in paths]
    if len(others) < len(drawn_paths) and not others:
        raise VideotuneError(
            "validation_fraction: keeps clips aside by itself. Set it to 0 on the page "
            "Setup to train on all clips"
        )
    return others if len(others) < len(drawn_paths) else []


def move(project: Project, paths: Sequence[str], to: str) -> ClipMove:
    """Move clips with their captions, masks and other companions to training,
    validation, or the bin.

    A picture beside a video of the same name shares these files with it: both go to
    training or validation together; if only one goes to the bin, the files stay for the
    other.

    Args:
        project: the project.
        paths: paths of the clips within the project.
        to: ``CLIPS``, ``HELD_OUT`` or ``trash.BIN``.

    Returns:
        The record of the move, for the history.

    Raises:
        VideotuneError: if a clip is named in a list, or its target exists; nothing is
            moved.
    """
    rows = [clips.find_clip(clips.table(project).rows, path) for path in paths]
    for row in rows:
        if row["fixed"]:
            raise VideotuneError(
                f"{row['name']} is named in a list of clips, or is in another folder: "
                "remove it there"
            )

    others = _rows_sharing_files(project, rows)
    if to != trash.BIN:
        rows += others
        others = []
    files_of_others = set(_files_of(project, others))
    files = [name for name in _files_of(project, rows) if name not in files_of_others]
    item = ""
    targets: list[str] = []
    if to == trash.BIN:
        title = rows[0]["name"] if len(rows) == 1 else f"{len(rows)} clips"
        home = project.folder
        item = trash.move_to_trash(home, "clip", title, [home / name for name in files])
    elif to in (CLIPS, HELD_OUT):
        targets = [f"{to}/{name.partition('/')[2]}" for name in files]
        move_files(project.folder, files, targets)
    else:
        raise VideotuneError(
            f"clips can be moved to {CLIPS}, {HELD_OUT} or {trash.BIN}, not to {to[:40]!r}"
        )
    return {
        "batch": new_batch(),
        "kind": "clip",
        "names": [row["name"] for row in rows],
        "files": files,
        "targets": targets,
        "item": item,
    }


def _rows_sharing_files(project: Project, rows: Sequence[ClipRow]) -> list[ClipRow]:
    """Return the project's other clips that have a caption or companion of ``rows``."""
    files = set(_files_of(project, rows))
    paths = {row["path"] for row in rows}
    return [
        row
        for row in clips.table(project).rows.values()
        if row["path"] not in paths
        and not row["fixed"]
        and files.intersection(_files_of(project, [row]))
    ]


def _files_of(project: Project, rows: Sequence[ClipRow]) -> list[str]:
    """Return the clips, captions and companions of some rows, each once, relative to the
    project.
    """
    files: dict[Path, None] = {}
    for row in rows:
        files[row["clip"].path] = None
        if row["clip"].caption_file:
            files[row["clip"].caption_file] = None
        for _, path in row["clip"].companions:
            files[path] = None
    return [path.relative_to(project.folder).as_posix() for path in files]


def move_files(home: Path, files: Sequence[str], targets: Sequence[str]) -> None:
    """Move files to other names, all relative to ``home``.

    Raises:
        VideotuneError: if a target exists; then nothing is moved.
    """
    moves = []
    for name, target_name in zip(files, targets, strict=True):
        file = home / name
        target = home / target_name
        if target != file and target.exists():
            raise VideotuneError(
                f"{target_name} already exists: rename one of the two files"
            )
        moves.append((file, target))

    for file, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
