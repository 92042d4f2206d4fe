"""The hours of all presets on the card of a project, which the list of models shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from videotune.errors import VideotuneError
from videotune.studio import model_choices, plan_server, projects
from videotune.studio.project_plan import plan_question
from videotune.studio.projects import Project
from videotune.studio.whole_settings import studio_file

TIMEOUT = 9000.0
"""Seconds that all hours may take."""


@dataclass(frozen=True)
class HoursProgress:
    """How far the hours are calculated."""

    done: int
    total: int
    is_computing: bool


def progress(
    project: Project, card: model_choices.ChosenCard, answer: Mapping[str, Any]
) -> HoursProgress:
    """Return how far the hours are for the present settings.

    Args:
        project: the project.
        card: its card.
        answer: the answer of the plan server so far, perhaps to an older question.
    """
    current_question = question(project, card)
    is_same_question = answer.get("key") == plan_server.key_of(current_question)
    return HoursProgress(
        done=len(answer.get("presets", {})) if is_same_question else 0,
        total=len(current_question["presets"]),
        is_computing=plan_server.is_computing(studio_file(project, "hours")),
    )


def request(project: Project) -> None:
    """Start computing the hours, those of presets that are made for the card first."""
    card = model_choices.chosen_card(project.facts)
    if not card.gigabytes:
        raise VideotuneError("name your card first: hours depend on it")
    plan_server.request_answer(studio_file(project, "hours"), question(project, card))


def question(project: Project, card: model_choices.ChosenCard) -> Mapping[str, Any]:
    """Return the question to the plan server for the hours on a card."""
    return plan_question(
        project,
        "hours",
        presets=model_choices.sizes_to_time(card, project.preset),
        config={"datasets": projects.datasets(project), "missing_caption": "empty"},
        card_name=card.name,
        longest=TIMEOUT,
    )
