"""The scenes that a long video was cut into, until each is kept or removed."""

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fastapi import Response

from videotune.data.clip_file import CLIP_SUFFIXES
from videotune.data.file_checks import ClipProblem
from videotune.data.probe import probe
from videotune.errors import VideotuneError
from videotune.queue.jobs import latest
from videotune.studio import clip_history, trash
from videotune.studio.projects import CLIPS, Project, inside
from videotune.studio.records import ClipMove
from videotune.studio.web import FormData, reply

SCENES = "scenes"
"""Folder of a project that holds the scenes of each film until they are kept or
removed.
"""


MAX_DIFFERENCE = 0.1
"""Seconds by which a scene and a film without a cut may differ."""

SECONDS_TOLD = 600
"""How long the page says that a film has no cut."""


def folder_of_scenes(project: Project, name: str) -> Path:
    """Return the folder that the scenes of a film are written to."""
    return project.folder / SCENES / re.sub(r"[^\w -]", "_", Path(name).stem)


def files_of_scenes(film: Path) -> list[str]:
    """Return the file names of a film's scenes."""
    if not film.is_dir():
        return []
    return sorted(
        path.name
        for path in film.iterdir()
        if path.suffix.lower() in CLIP_SUFFIXES and not path.name.startswith(".")
    )


def is_whole(scene: Path, film: Path) -> bool:
    """Return whether a scene is as long as its film, which then has no cut.

    The only scene may also be what is left where the others are too short.
    """
    try:
        return abs(probe(scene).seconds - probe(film).seconds) < MAX_DIFFERENCE
    except ClipProblem:
        return False


def remove_scenes(film: Path) -> None:
    """Delete the folder of a film's scenes."""
    shutil.rmtree(film)


def describe_cut(project: Project) -> str:
    """Return that the film of which scenes were asked for last has none, for some minutes;
    empty otherwise.
    """
    job = latest(project.folder, "split")
    if job is None or job.state != "done" or not (project.folder / job.about).is_file():
        return ""
    if time.time() - (job.ended or 0) > SECONDS_TOLD:
        return ""
    name = Path(job.about).name
    if files_of_scenes(folder_of_scenes(project, name)):
        return ""
    return f"{name} has no cut, so it stays as it is."


def list_films(project: Project) -> list[tuple[str, list[str]]]:
    """Return the folder name of each film that has scenes, and their file names."""
    films = []
    for film in sorted((project.folder / SCENES).glob("[!.]*")):
        scene_names = files_of_scenes(film)
        if scene_names:
            films.append((film.name, scene_names))
    return films


def decide_scenes(project: Project, form: FormData) -> Response:
    """Keep one scene of a film, or all, as clips of the project, or move them to the
    bin.
    """
    film = inside(project.folder / SCENES, form["film"])
    names = [form["name"]] if form["name"] else files_of_scenes(film)

    files = []
    for name in names:
        path = inside(film, name)
        files += [file for file in (path, path.with_suffix(".txt")) if file.is_file()]

    if not form["keep"]:
        title = form["name"] or f"Scenes of {film.name}"
        item = trash.move_to_trash(project.folder, "scene", title, files)
        _record(project, names, files, item=item)
        return reply("In the bin")

    targets = [project.folder / CLIPS / file.name for file in files]
    for target in targets:
        if target.exists():
            raise VideotuneError(
                f"the clips already include {target.name}: rename one of the two files"
            )
    for file, target in zip(files, targets, strict=True):
        file.rename(target)
    _record(project, names, files, targets=targets)
    return reply(f"{len(names)} kept" if len(names) > 1 else "Kept")


def _record(
    project: Project,
    names: list[str],
    files: list[Path],
    *,
    targets: Sequence[Path] = (),
    item: str = "",
) -> None:
    """Add what was decided to the history of the page."""
    home = project.folder
    move: ClipMove = {
        "batch": clip_history.new_batch(),
        "kind": "scene",
        "names": names,
        "files": [path.relative_to(home).as_posix() for path in files],
        "targets": [path.relative_to(home).as_posix() for path in targets],
        "item": item,
    }
    clip_history.record_move(project, move)
