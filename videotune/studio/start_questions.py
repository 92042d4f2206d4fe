"""What a training is asked about before it starts: a download of many GB, days on a CPU,
and a plan that does not fit.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import Response
from huggingface_hub import constants

from videotune.files import existing_folder
from videotune.reporter.read import mapping, number
from videotune.studio import model_choices, plan_server, projects
from videotune.studio.project_plan import plan_file, plan_question
from videotune.studio.projects import Project
from videotune.studio.this_computer import pending_download
from videotune.studio.trained_model import replaced_base_model, trains_anywhere
from videotune.studio.verdict import plan_verdict, trains_on_cpu_for_long
from videotune.studio.web import FormData, reply
from videotune.text import about_time_span

LARGE_DOWNLOAD = 5.0
"""GB (10^9 bytes) from which a download is asked about."""

LONG_HOURS = 72.0
"""Hours on a card from which a training is asked about."""

CONFIRMED = "sure"
"""The field of a form that says that the user has read the questions."""


def ask_before_start(project: Project, form: FormData) -> Response | None:
    """Return the answer that opens the dialog with what has to be asked first; None if
    nothing has to be, or the user has confirmed it.
    """
    if form.get(CONFIRMED):
        return None
    lines = list(start_questions(project))
    return reply(status=409, ask={"lines": lines}) if lines else None


def start_questions(project: Project) -> Iterator[str]:
    """Yield what the user should know before a training of the project starts, in
    sentences with figures.
    """
    if not project.has_model or not projects.datasets(project):
        return  # it is refused with a sentence of its own

    base_model = replaced_base_model(project)
    is_another_known_model = model_choices.is_of_a_preset(base_model)
    if project.preset and is_another_known_model:
        yield (
            f"The setting “Base model name” is {base_model}: that is trained, and not the "
            f"model of the preset {project.preset}."
        )

    question = plan_question(project, "plan")
    answer = plan_server.answer_so_far(plan_file(project), question)
    plan = mapping(answer.get("plan") if answer.get("current") else None)
    if not plan and not answer.get("current") and not trains_anywhere(project):
        yield (
            "The plan of these settings is not calculated yet: it is not known whether "
            "the training fits, and how long it takes."
        )
    verdict = plan_verdict(project, plan)
    if verdict is not None:
        yield from verdict.obstacles

    yield from _question_of_download(project)
    yield from _question_of_time(project, plan)


def _question_of_download(project: Project) -> Iterator[str]:
    download = pending_download(project)
    if download is None or (download.gigabytes or LARGE_DOWNLOAD) < LARGE_DOWNLOAD:
        return
    size = "a size that is not known here"
    if download.size is not None:
        size = str(download.size)
    hub_folder = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(existing_folder(hub_folder)).free / 1e9
    yield (
        f"{download.model} is downloaded first: {size}, into {hub_folder}, where "
        f"{free:,.0f} GB are free."
    )


def _question_of_time(project: Project, plan: Mapping[str, Any]) -> Iterator[str]:
    if trains_on_cpu_for_long(project, plan):
        hours = number(plan.get("cpu_hours"))
        time = about_time_span(hours) if hours else "days"
        yield (
            "This computer has no NVIDIA card, so it trains on the CPU, which takes "
            f"{time}."
        )
        return
    hours = (number(plan.get("hours")) or 0.0) + (
        number(plan.get("hours_beside")) or 0.0
    )
    if hours >= LONG_HOURS:
        yield f"The training takes {about_time_span(hours)}."
