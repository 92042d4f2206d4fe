"""The plan of a project: the question that its settings ask, and the answer that all
parts of a page show.
"""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from videotune.studio import clips, gpu, plan_server, projects
from videotune.studio.outside_clips import is_outside, missing_sources
from videotune.studio.projects import CLIPS, HELD_OUT, Project, draft
from videotune.studio.web import PageContext

PLANNING_PAGE = "setup"
"""The page that has a plan calculated; the others show it if it is there."""

SHARED_NAME = "plan"
"""The name of the answer among what the parts of a page share."""


def plan_question(project: Project, what: str, **extra: Any) -> dict[str, Any]:
    """Return a question for the plan server: settings, clips and GPU of a project.

    Clips that cannot be used are left out of the calculation; the page says so.
    """
    facts = project.facts
    card = facts.get("card")
    vram = facts.get("vram")

    gpus = gpu.list_gpus()
    own_gpu = None
    if gpus and not card and not vram:
        own_gpu = [gpus[0].name, gpus[0].memory_total]

    clip_folders = [project.folder / name for name in (CLIPS, HELD_OUT)]
    config = {**draft(project), "datasets": projects.datasets(project)}
    if config.get("missing_caption", "error") == "error":
        config["missing_caption"] = "empty"  # as if each had one: it is still written
    return {
        "what": what,
        "preset": project.preset or None,
        "config": config,
        "allow_skips": "all",
        "card": card,
        "vram": vram,
        "gpu": own_gpu,
        # Times of change, so a change of the clips gives another question.
        "seen": [folder.stat().st_mtime for folder in clip_folders if folder.is_dir()],
        **_outside_question(project),
        **extra,
    }


def _outside_question(project: Project) -> dict[str, Any]:
    """Return what the last check has found in other folders, and which of these are
    missing: so that another content of them gives another question.
    """
    if not project.facts.get("sources"):
        return {}
    rows = [row for row in clips.table(project).rows.values() if is_outside(row)]
    digest = blake2b(repr(rows).encode(errors="replace"), digest_size=8)
    return {"outside": digest.hexdigest(), "missing": missing_sources(project)}


def plan_answer(page: PageContext) -> dict[str, Any]:
    """Return the answer of the plan server for the present settings and clips.

    All parts of a page get the same answer, and the page Setup sends the question
    whichever part comes first: so no part lacks a plan that another one shows.

    Returns:
        The answer as ``plan_server.answer_so_far`` gives it; empty if the project has
        no model or no clips yet.
    """
    if SHARED_NAME not in page.shared:
        page.shared[SHARED_NAME] = _read_or_request(page)
    answer: dict[str, Any] = page.shared[SHARED_NAME]
    return answer


def _read_or_request(page: PageContext) -> dict[str, Any]:
    project = page.current_project
    if not project.has_model or not projects.datasets(project):
        return {}

    question = plan_question(project, "plan")
    if page.name == PLANNING_PAGE:
        return plan_server.request_answer(plan_file(project), question)
    return plan_server.answer_so_far(plan_file(project), question)


def plan_file(project: Project) -> Path:
    """Return the file of the plan's answer."""
    return project.folder / ".studio" / "plan.json"
