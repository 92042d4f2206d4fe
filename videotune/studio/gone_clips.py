"""What became of a clip that a page still shows and that is no longer where it was."""

from pathlib import PurePosixPath

from fastapi import APIRouter

from videotune.studio import clips, trash
from videotune.studio.film_scenes import files_of_scenes, folder_of_scenes
from videotune.studio.projects import CLIPS, HELD_OUT, Project
from videotune.studio.web import CurrentPage
from videotune.text import counted

routes = APIRouter()


@routes.get("/data/gone")
def tell_where_it_is(page: CurrentPage, path: str) -> dict[str, str]:
    """Send where a clip was moved within the project, and a sentence if it is gone; with
    the folder name of its scenes if it was cut.
    """
    project = page.current_project
    moved_path = _path_in_other_part(project, path)
    scenes = folder_of_scenes(project, PurePosixPath(path).name)
    return {
        "moved": moved_path,
        "text": "" if moved_path else describe_gone(project, path),
        "scenes": scenes.name if files_of_scenes(scenes) else "",
    }


def describe_gone(project: Project, path: str) -> str:
    """Return what became of a clip, as far as the project's folders show it."""
    name = PurePosixPath(path).name
    is_in_bin = any(path in item.lay for item in trash.list_items(project.folder))
    if not is_in_bin:
        return f"{name} no longer exists"

    scenes = files_of_scenes(folder_of_scenes(project, name))
    if scenes:
        verb = "was" if len(scenes) == 1 else "were"
        return (
            f"{counted(len(scenes), 'scene')} of {name} {verb} made; "
            f"{name} is in the bin"
        )
    return f"{name} is in the bin"


def _path_in_other_part(project: Project, path: str) -> str:
    """Return where the clip is if it was kept aside or is trained on again; empty if it
    is in neither folder.
    """
    part, _, path_in_part = path.partition("/")
    other_part = {CLIPS: HELD_OUT, HELD_OUT: CLIPS}.get(part)
    other_path = f"{other_part}/{path_in_part}"
    return other_path if other_path in clips.table(project).rows else ""
