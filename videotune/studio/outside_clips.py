"""Clips of a project that lie in other folders and datasets: the studio shows them, and
does not change their files.
"""

from collections.abc import Iterable
from pathlib import Path

from videotune.studio import clip_row, projects
from videotune.studio.clip_row import ClipRow
from videotune.studio.projects import Project


def short_name(project: Project, path: str) -> str:
    """Return a clip's path from its source's folder on, such as "cats/one.mp4"; of a clip
    in no folder that the project names, such as one of a downloaded dataset, the last
    two parts of its path.
    """
    for source in project.facts.get("sources", []):
        folder = Path(source["path"])
        if Path(path).is_relative_to(folder):
            return str(Path(folder.name) / Path(path).relative_to(folder))
    return "/".join(Path(path).parts[-2:])


def missing_sources(project: Project) -> list[str]:
    """Return the folders and files of other places that are not there, such as those of a
    disk that is not connected.
    """
    paths = [source["path"] for source in project.facts.get("sources", [])]
    return [path for path in paths if Path(path).is_absolute() and not _exists(path)]


def _exists(path: str) -> bool:
    """Return whether a path is there; a folder that may not be read is."""
    try:
        return Path(path).exists()
    except PermissionError:
        return True


def is_outside(row: ClipRow) -> bool:
    """Return whether a clip is in no folder of the project."""
    return not row["part"]


def lacks_caption(row: ClipRow) -> bool:
    """Return whether a clip cannot be used only because it has no caption."""
    return clip_row.state_of(row) == "without"


def stopping_clips(project: Project, rows: Iterable[ClipRow]) -> list[ClipRow]:
    """Return the clips outside the project at which a training would stop: those that
    cannot be used or have no caption, and are not left out.
    """
    leaves_out = bool(project.facts.get("allow_skips"))
    takes_uncaptioned = projects.draft(project).get("missing_caption") not in (
        None,
        "error",
    )
    stopping = []
    for row in rows:
        if not is_outside(row) or row["state"] != "skipped":
            continue
        is_left_out = leaves_out
        if lacks_caption(row):
            is_left_out = takes_uncaptioned
        if not is_left_out:
            stopping.append(row)
    return stopping
