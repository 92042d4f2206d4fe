"""Licences whose terms pass to what is trained: they are accepted once, on the page Setup."""

from collections.abc import Mapping
from typing import Any

from videotune.errors import VideotuneError
from videotune.studio import plan_server
from videotune.studio.project_plan import plan_file, plan_question
from videotune.studio.projects import Project, datasets
from videotune.user_settings import accept_terms, has_accepted, settings_file


def open_licence(answer: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the licence whose terms must be accepted before a run can start, or None.

    Args:
        answer: of the plan server; only a plan of the present settings counts.
    """
    is_of_these_settings = answer.get("current") or answer.get("measuring")
    plan = answer.get("plan") if is_of_these_settings else None
    licence = plan.get("licence") if isinstance(plan, dict) else None
    if not isinstance(licence, dict):
        return None

    # The file of a plan may come with an imported project.
    texts = {key: str(licence.get(key, "")) for key in ("model", "name", "terms")}
    is_address = texts["terms"].startswith("https://")
    if not is_address or has_accepted(texts["terms"]):
        return None
    return texts


def licence_of_project(project: Project) -> Mapping[str, str] | None:
    """Return the licence that a run of a project still has to wait for, or None."""
    if not project.has_model or not datasets(project):
        return None
    question = plan_question(project, "plan")
    return open_licence(plan_server.answer_so_far(plan_file(project), question))


def refuse_open_licence(project: Project) -> None:
    """Raise VideotuneError if a licence has to be accepted before a run can start."""
    licence = licence_of_project(project)
    if licence is not None:
        raise VideotuneError(
            f"the licence of {licence['model']} must be accepted once, because its terms "
            "pass to what you train: accept it on the page Setup, beside the plan"
        )


def accept_licence(project: Project, address: str) -> None:
    """Keep that the user has accepted the terms that the plan of a project names.

    Raises:
        VideotuneError: if it names others, or the answer cannot be kept.
    """
    licence = licence_of_project(project)
    if licence is None or licence["terms"] != address:
        raise VideotuneError("the plan has changed: read the licence that it names now")
    try:
        accept_terms(address)
    except OSError as error:
        raise VideotuneError(f"{settings_file()} cannot be written: {error}") from error
