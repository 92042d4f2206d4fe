"""Settings that are taken again from a run come with its model, and a project says what
it really trains.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import full_run, visible_text, write_file
from videotune.config.nested_keys import flatten, unflatten
from videotune.presets.shipped import read_preset
from videotune.studio import gpu, projects, start_questions
from videotune.studio.form import inherited_values
from videotune.studio.kept_values import kept_values
from videotune.studio.projects import Project, draft
from videotune.studio.run_settings import settings_of_run

SETUP = "/p/cats/setup"
LTX = "ltx 2B LoRA 24GB"
SMALLER_LTX = "ltx 2B LoRA 12GB"
WAN = "wan 2.1 1.3B LoRA 16GB"


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(gpu, "list_gpus", list)
    return projects.create(tmp_path, "Cats", preset="toy", card="RTX 3090")


def now(project: Project) -> Project:
    return projects.find_project(project.folder.parent, project.name)


def add_run(
    project: Project,
    preset: str,
    keys: Mapping[str, Any],
    planned: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Path:
    """Make a run as a training with a preset and the user's keys leaves it; without
    ``name``, one of an earlier version, which does not name the preset.
    """
    run = project.folder / "runs" / "rank-4"
    full_run(run)
    planned = planned or {}
    settings = {**inherited_values(preset), **keys, **planned}
    settings = {
        key: value for key, value in settings.items() if not key.startswith("datasets.")
    }
    origins = {
        **dict.fromkeys(settings, "default"),
        **dict.fromkeys(flatten(read_preset(preset)), "preset"),
        **dict.fromkeys(keys, "user"),
        **dict.fromkeys(planned, "plan"),
    }
    config = {"settings": unflatten(settings), "origins": origins, "steps": 120}
    if name is not None:
        config["preset"] = name
    write_file(run, "config.json", config)
    return run


def choose(client: Any, preset: str) -> None:
    answer = client.post(f"{SETUP}/fact", data={"key": "preset", "value": preset})
    assert answer.status_code == 200


def heading(client: Any) -> str:
    """Return the name of the model that the page Setup shows."""
    _, _, rest = client.get(SETUP).text.partition('id="model"')
    return visible_text(rest.partition("<h2>")[2].partition("</h2>")[0]).strip()


def test_the_settings_of_a_run_come_with_its_model(client: Any, cats: Project) -> None:
    add_run(cats, "toy", {"lora.rank": 4, "steps": 40}, {"micro_batch_size": 2})
    choose(client, LTX)
    page = client.get("/p/cats/results?run=rank-4").text
    assert "Setup by those of rank-4, and its model, toy?" in page

    answer = client.post("/p/cats/run/use", data={"run": "rank-4"})
    assert answer.status_code == 204
    assert "settings of rank-4, and its model, toy" in str(answer.headers)
    assert now(cats).preset == "toy"
    assert draft(cats) == {"lora": {"rank": 4}, "steps": 40}, "none of the preset's"
    assert heading(client) == "toy"
    page = client.get("/p/cats/train?run=rank-4").text
    assert "Setup by those of rank-4?" in page, "the project has its model already"

    # the next change of the model asks about all of them, and takes them all back
    choose(client, WAN)
    assert {row.key for row in kept_values(now(cats))} == {"lora.rank", "steps"}
    client.post(f"{SETUP}/usual-values")
    assert draft(cats) == {}


def test_a_run_of_another_size_of_the_model_has_the_preset_of_that_size(
    client: Any, cats: Project
) -> None:
    choose(client, LTX)
    run = add_run(cats, SMALLER_LTX, {"steps": 40})
    assert settings_of_run(now(cats), run).preset == SMALLER_LTX
    assert settings_of_run(now(cats), run).keys == {"steps": 40}


def test_a_run_names_the_preset_that_its_values_do_not_show(
    client: Any, cats: Project
) -> None:
    choose(client, LTX)
    keys = flatten(read_preset(LTX))
    run = add_run(cats, SMALLER_LTX, keys)
    assert settings_of_run(now(cats), run).preset == LTX, "the likest"

    config = projects.read_record(run / "config.json", dict[str, Any], "")
    write_file(run, "config.json", {**config, "preset": SMALLER_LTX})
    settings = settings_of_run(now(cats), run)
    assert settings.preset == SMALLER_LTX
    smaller = inherited_values(SMALLER_LTX)
    changed = {key: value for key, value in keys.items() if value != smaller[key]}
    assert flatten(settings.keys) == changed


@pytest.mark.parametrize("name", ["a preset of a later version", "", 7])
def test_of_a_name_that_is_no_preset_the_values_decide(
    cats: Project, name: Any
) -> None:
    run = add_run(cats, SMALLER_LTX, {"steps": 40}, name=name)
    assert settings_of_run(now(cats), run).preset == SMALLER_LTX


def test_values_that_an_earlier_studio_wrote_as_the_users_are_the_presets_again(
    cats: Project,
) -> None:
    """It copied the whole preset of a run, with its base model, over another preset."""
    run = add_run(cats, "toy", {**flatten(read_preset("toy")), "steps": 40})
    cats = projects.update(cats, preset=LTX)
    settings = settings_of_run(cats, run)
    assert (settings.preset, settings.keys) == ("toy", {"steps": 40})


def test_a_run_of_weights_of_the_users_own_keeps_them(cats: Project) -> None:
    cats = projects.update(cats, preset=LTX)
    run = add_run(cats, LTX, {"base_model_name": "/models/mine"})
    settings = settings_of_run(cats, run)
    assert (settings.preset, settings.model) == (LTX, "/models/mine")
    assert settings.keys == {"base_model_name": "/models/mine"}


def test_a_length_in_passes_is_taken_as_the_user_gave_it(cats: Project) -> None:
    run = add_run(cats, "toy", {"epochs": None}, {"steps": 90})
    config = {**projects.read_record(run / "config.json", dict[str, Any], "")}
    write_file(run, "config.json", {**config, "asked": {"epochs": 3}})
    assert settings_of_run(cats, run).keys == {"epochs": 3}


def test_what_is_trained_is_named_where_the_base_model_is_replaced(
    client: Any, cats: Project
) -> None:
    choose(client, LTX)
    data = {"key": "base_model_name", "value": "asset:toy"}
    assert client.post(f"{SETUP}/set", data=data).status_code == 200
    page = client.get(SETUP).text
    assert heading(client) == "asset:toy"
    assert f"not the model of the preset {LTX}" in page
    path = page.split('<nav class="path"')[1].split("</nav>")[0]
    assert "asset:toy, RTX 3090" in path
    assert LTX not in path

    clip = cats.folder / "clips" / "a.mp4"
    clip.write_bytes(b"a clip")
    questions = list(start_questions.start_questions(now(cats)))
    assert any("asset:toy: that is trained" in question for question in questions)


def test_a_starting_value_of_the_model_is_not_one_of_the_users(
    client: Any, cats: Project
) -> None:
    choose(client, LTX)
    assert draft(cats)["text_encoder"] == {"convention": "authors"}
    page = client.get(SETUP).text
    assert "set by you" not in page
    assert "Begins so for this model" in page
    client.post(f"{SETUP}/set", data={"key": "steps", "value": "7"})
    assert "1 set by you" in client.get(SETUP).text

    assert client.post(f"{SETUP}/reset").status_code == 204
    assert draft(cats) == {"text_encoder": {"convention": "authors"}}
