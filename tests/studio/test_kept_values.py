"""Values of the user's own after a change of the model: the page Setup asks about them."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import visible_text
from videotune.studio import gpu, projects
from videotune.studio.kept_values import kept_values
from videotune.studio.projects import Project, draft

SETUP = "/p/cats/setup"
OTHER_MODEL = "wan 2.1 1.3B LoRA 16GB"


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with values that suit the toy, and a prompt that suits any model."""
    monkeypatch.setattr(gpu, "list_gpus", list)
    project = projects.create(tmp_path, "Cats", preset="toy")
    keys = {"steps": 150, "learning_rate": 0.003, "samples": ["a cat"]}
    projects.save_draft(project, keys)
    return project


def now(project: Project) -> Project:
    return projects.find_project(project.folder.parent, project.name)


def choose(client: Any, preset: str) -> None:
    answer = client.post(f"{SETUP}/fact", data={"key": "preset", "value": preset})
    assert answer.status_code == 200


def kept_keys(project: Project) -> set[str]:
    return {kept.key for kept in kept_values(now(project))}


def question(client: Any) -> str:
    """Return what the page asks about the values; empty if it asks nothing."""
    _, _, rest = client.get(SETUP).text.partition('id="kept-values">')
    return visible_text(rest.partition("</div>")[0])


def test_values_that_the_new_model_sets_otherwise_are_listed(
    client: Any, cats: Project
) -> None:
    assert question(client) == ""
    choose(client, OTHER_MODEL)
    assert kept_keys(cats) == {"steps", "learning_rate"}
    learning_rate, steps = sorted(kept_values(now(cats)), key=lambda row: row.key)
    assert (learning_rate.value, steps.value) == ("0.003", "150")
    assert "times the usual" in learning_rate.note
    asked = question(client)
    assert "2 values of yours were set for another model" in asked
    assert "0.003" in asked
    assert steps.usual in asked

    # with the model that they were set for, and once they are changed, nothing is asked
    choose(client, "toy")
    assert kept_keys(cats) == set()
    choose(client, OTHER_MODEL)
    client.post(f"{SETUP}/set", data={"key": "learning_rate", "value": "0.0002"})
    assert kept_keys(cats) == {"steps"}


def test_a_value_that_is_the_usual_one_is_not_asked_about(
    client: Any, cats: Project
) -> None:
    choose(client, OTHER_MODEL)
    (steps,) = (row for row in kept_values(now(cats)) if row.key == "steps")
    choose(client, "toy")
    projects.save_draft(cats, {"steps": int(steps.usual), "learning_rate": 0.003})
    choose(client, OTHER_MODEL)
    assert kept_keys(cats) == {"learning_rate"}


def test_they_stay_once_the_user_keeps_them(client: Any, cats: Project) -> None:
    choose(client, OTHER_MODEL)
    assert client.post(f"{SETUP}/keep-values").status_code == 204
    assert question(client) == ""
    assert draft(cats)["steps"] == 150


def test_they_make_way_for_the_models(client: Any, cats: Project) -> None:
    choose(client, OTHER_MODEL)
    assert client.post(f"{SETUP}/usual-values").status_code == 204
    assert question(client) == ""
    assert draft(cats) == {"samples": ["a cat"]}
