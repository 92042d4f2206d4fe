"""How the clips of a project and their captions stand."""

from videotune.studio import clip_row, clip_words, projects
from videotune.studio.clip_row import ClipRow
from videotune.studio.film_scenes import list_films
from videotune.studio.outside_clips import (
    is_outside,
    lacks_caption,
    missing_sources,
    stopping_clips,
)
from videotune.studio.projects import Project
from videotune.studio.stage import Stage
from videotune.text import counted

MISSING = "missing-sources"
"""The part of the page Data on folders that are not there."""

LEFT = "left-sources"
"""The part of the page Data on folders that an imported project used elsewhere."""

OUTSIDE = "outside"
"""The part of the page Data on clips of other folders that cannot be used."""


def clips_stage(project: Project, rows: list[ClipRow]) -> Stage:
    """Return how the clips stand."""
    if left := project.facts.get("left_sources"):
        text = f"{counted(len(rows), 'clip')}, {counted(len(left), 'folder')} not in the file"
        action = f"Add {counted(len(left), 'folder')}, or train without"
        return Stage("clips", "blocked", text, "data", action, part=LEFT)

    sources = project.facts.get("sources", [])
    scene_count = sum(len(names) for _, names in list_films(project))
    if not rows and not sources and not scene_count:
        return Stage(
            "clips", "open", "no clips yet", "data", "Add clips", part="add-clips"
        )

    text = counted(len(rows), "clip") if rows else counted(len(sources), "dataset")
    if missing := missing_sources(project):
        folders = counted(len(missing), "folder")
        text += f", {folders} not there"
        action = f"Find {folders}, or leave out"
        return Stage("clips", "blocked", text, "data", action, part=MISSING)
    if scene_count:
        scenes = counted(scene_count, "scene")
        action = f"Keep {scenes}, or remove some"
        text += f", {scenes} to look at"
        return Stage("clips", "open", text, "data", action, part="r-scenes")

    unusable = [row for row in rows if clip_row.state_of(row) == "unusable"]
    if unusable and not project.facts.get("allow_skips"):
        text += f", {len(unusable)} cannot be used"
        own = [row for row in unusable if not is_outside(row)]
        if not own:
            action = f"Leave out {counted(len(unusable), 'clip')}"
            return Stage("clips", "blocked", text, "data", action, part=OUTSIDE)
        action = f"{_verb_for(own)} {counted(len(own), 'clip')}"
        return Stage(
            "clips", "blocked", text, "data", action, clips="unusable", part="tiles"
        )
    return Stage("clips", "done", text, "data")


def _verb_for(unusable: list[ClipRow]) -> str:
    """Return what the buttons of the clips' cards do: "Remove", or "Mend or remove"."""
    actions: set[str] = set()
    settings: list[str] = []
    for row in unusable:
        actions.update(clip_words.clip_actions(row))
        settings += clip_words.clip_settings(row)

    if actions <= {"bin"} and not settings:
        return "Remove"
    return "Mend or remove" if "bin" in actions else "Mend"


def captions_stage(project: Project, rows: list[ClipRow]) -> Stage:
    """Return how the captions stand."""
    own_rows = [row for row in rows if not is_outside(row)]
    missing = [row for row in own_rows if clip_row.needs_caption(row)]
    if not rows and not project.facts.get("sources"):
        return Stage("captions", "open", "after the clips", "data")
    uncaptioned = [row for row in stopping_clips(project, rows) if lacks_caption(row)]
    if uncaptioned and not missing:
        text = f"{len(uncaptioned)} of {len(rows)} missing, in other folders"
        action = f"Leave out {counted(len(uncaptioned), 'clip')}"
        return Stage("captions", "blocked", text, "data", action, part=OUTSIDE)
    if not own_rows:
        return Stage("captions", "done", "come with the datasets", "data")
    if not missing:
        has_all = all(row["caption"] for row in own_rows)
        text = "each clip has one" if has_all else "each usable clip has one"
        return Stage("captions", "done", text, "data")

    text = f"{len(missing)} of {len(own_rows)} missing"
    if projects.draft(project).get("missing_caption") == "skip":
        return Stage("captions", "done", f"{text}, left out", "data")
    action = f"Caption {counted(len(missing), 'clip')}"
    return Stage(
        "captions", "open", text, "data", action, clips="without", part="tiles"
    )
