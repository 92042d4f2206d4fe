"""Adding folders and datasets outside a project to it, and leaving them out again."""

import os
import re
from pathlib import Path

from fastapi import APIRouter, Response

from videotune.data.file_checks import ARCHIVES, type_of_file
from videotune.data.object_store import is_object_url, parse_url
from videotune.data.row_files import ROW_SUFFIXES
from videotune.errors import VideotuneError
from videotune.studio import clips, projects
from videotune.studio.field_errors import at_field
from videotune.studio.left_sources import without_added
from videotune.studio.records import SourceFacts
from videotune.studio.web import CurrentPage, PageContext, PostedForm, reply

HUB_DATASET = re.compile(r"(hf://datasets/)?[\w.-]+/[\w.-]+(@.+)?")

routes = APIRouter()


@routes.post("/data/source")
def source(page: CurrentPage, form: PostedForm) -> Response:
    """Add or remove a dataset outside the project: a folder, an archive, or a Hub
    dataset.
    """
    path = form["path"].strip()
    if form["drop"]:
        result = "left out; its files stay"
    else:
        with at_field("path"):
            path = checked_source(page, path)
        result = "used; its files stay where they are"

    new_row: SourceFacts = {"path": path}
    if form["kind"] not in ("", "train"):
        new_row["kind"] = form["kind"][:40]

    with projects.editing(page.current_project) as project:
        sources = project.facts.get("sources", [])
        rows = [row for row in sources if row["path"] != path]
        left = project.facts.get("left_sources")
        if not form["drop"]:
            rows.append(new_row)
            left = without_added(project, path)
        projects.update(project, sources=rows, left_sources=left)
    return reply(f"{path} is {result}")


@routes.post("/data/check")
def check(page: CurrentPage) -> Response:
    """Check the clips again: changes in folders outside the project are not watched."""
    clips.check_again(page.current_project)
    return reply()


def checked_source(page: PageContext, path: str) -> str:
    """Return a dataset as the config takes it: an absolute path or the name of a Hub
    dataset.

    Raises:
        VideotuneError: if it does not exist, or this user may not name it.
    """
    page.path_rule.check_path(path, "the dataset")
    if is_object_url(path):
        return str(parse_url(path))
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise VideotuneError(f"{path!r}: there is no such user") from error
    is_local_path = expanded.is_absolute() or path.startswith((".", "~"))
    if not is_local_path:
        if not HUB_DATASET.fullmatch(path):
            raise VideotuneError(
                f"{path!r} is neither an absolute path (/home/me/clips) "
                "nor a dataset (user/name or s3://bucket/folder)"
            )
        return path

    is_other_file = (
        os.path.isfile(expanded)
        and type_of_file(expanded) not in ARCHIVES
        and expanded.suffix.lower() not in ROW_SUFFIXES
    )
    # os.path.exists is False for a name that is too long or holds a NUL.
    if not os.path.exists(expanded) or is_other_file:
        raise VideotuneError(
            f"there is no folder, archive or file of rows {path} on the computer that runs the studio"
        )
    return str(expanded.resolve())
