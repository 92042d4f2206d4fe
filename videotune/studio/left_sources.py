"""Folders of clips and datasets that an imported project used on another computer.

An exported project does not hold their files. The page Data names them until they are added
again, or until the user decides to train without them.
"""

import re
from collections.abc import Sequence

from fastapi import APIRouter, Response

from videotune.errors import printable
from videotune.studio import projects
from videotune.studio.projects import Project
from videotune.studio.records import MOST_LEFT_SOURCES, SourceFacts
from videotune.studio.web import CurrentPage, reply

routes = APIRouter()

MOST_LETTERS = 80
"""Letters of the name of one."""


def names_of_sources(sources: Sequence[SourceFacts]) -> list[str]:
    """Return the names of folders and datasets, without the folders that they are in."""
    names = [_name_of(source["path"]) for source in sources[:MOST_LEFT_SOURCES]]
    return list(dict.fromkeys(filter(None, names)))


def _name_of(path: str) -> str:
    """Return the last part of a path, which may be one of Windows."""
    last_part = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return printable(last_part)[:MOST_LETTERS]


def without_added(project: Project, path: str) -> list[str] | None:
    """Return the names that are left once a folder is added; None if none is."""
    added_name = _name_of(path)
    left_names = project.facts.get("left_sources", [])
    return [name for name in left_names if name != added_name] or None


@routes.post("/data/without-sources")
def train_without(page: CurrentPage) -> Response:
    """Train without the folders that the project used on another computer."""
    projects.update(page.current_project, left_sources=None)
    return reply("It trains without them")
