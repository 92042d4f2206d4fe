"""The files that belong to a clip, as the page Data shows them beside it."""

import os
from pathlib import Path
from typing import NamedTuple

from videotune.data.clip_file import CLIP_SUFFIXES, ROLE_LABELS, ClipFile, Role
from videotune.data.images import IMAGE_SUFFIXES
from videotune.errors import VideotuneError
from videotune.studio.projects import Project, inside

HELP: dict[Role, str] = {
    "loss_mask": "the loss weighs its white part by loss_mask.inside, its black part by loss_mask.outside",
    "mask": "the condition mask paints its white part anew; it is the loss mask too, unless the clip has another",
    "reference": "the condition reference shows it",
    "control": "the condition control shows it",
    "start_image": "in the place of the first frame",
}
"""What each is for, in the player."""


class ClipCompanion(NamedTuple):
    """A file that belongs to a clip."""

    label: str
    help: str
    name: str
    """Its path as the page names it."""

    path: str
    """Its path within the project, which the routes of media take; "" if none can be
    shown.
    """

    is_still: bool
    changed: int
    """When it changed last, in nanoseconds."""


def companions_of(
    project: Project, clip: ClipFile, start_image: str | None
) -> tuple[ClipCompanion, ...]:
    """Return the files that belong to a clip, each once.

    Args:
        project: the project.
        clip: the clip.
        start_image: path of its start image, if the last check found one.
    """
    role_by_path: dict[Path, Role] = {}
    # A file that is mask and loss mask is called a mask: the later role counts.
    for role, path in clip.companions:
        role_by_path[path] = role
    if start_image is not None:
        role_by_path[Path(start_image)] = "start_image"

    companions = []
    for path, role in role_by_path.items():
        media_path = shown_path(project, path)
        name = media_path.partition("/")[2] or path.name
        companions.append(
            ClipCompanion(
                label=ROLE_LABELS[role],
                help=HELP[role],
                name=name,
                path=media_path,
                is_still=path.suffix.lower() in IMAGE_SUFFIXES,
                changed=os.stat(path).st_mtime_ns if media_path else 0,
            )
        )
    return tuple(companions)


def shown_path(project: Project, path: Path | None) -> str:
    """Return the path of a picture or video within the project; "" if it is none, or if
    it is missing or a link out of the project.
    """
    if path is None or not path.is_relative_to(project.folder):
        return ""
    relative_path = path.relative_to(project.folder).as_posix()
    if not relative_path.lower().endswith(CLIP_SUFFIXES):
        return ""
    try:
        is_file = inside(project.folder, relative_path).is_file()
    except VideotuneError:
        return ""
    return relative_path if is_file else ""
