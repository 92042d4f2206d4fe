"""A project of the studio begins with the same values for its model as ``videotune init``
writes.
"""

from typing import Any

import pytest
import yaml

from videotune.config.base_models import starting_keys
from videotune.config.nested_keys import flatten
from videotune.files import read_json
from videotune.models.base_model import comfyui_reads_otherwise
from videotune.models.model_files import CONFIGS
from videotune.presets.recipes import config_of
from videotune.presets.shipped import preset_names, read_preset
from videotune.studio import projects

CONVENTION = "text_encoder.convention"
AUTHORS = {"text_encoder": {"convention": "authors"}}
FACT = "/p/cats/setup/fact"


def test_the_table_of_base_models_agrees_with_their_networks() -> None:
    for model in read_json(CONFIGS / "index.json"):
        keys = flatten(starting_keys(model))
        assert (keys.get(CONVENTION) == "authors") == comfyui_reads_otherwise(model), (
            model
        )


@pytest.mark.parametrize("preset", preset_names())
def test_a_new_project_has_the_values_that_init_writes(
    client: Any, tmp_path: Any, preset: str
) -> None:
    form = {"title": "Cats", "preset": preset, "card": "none", "vram": ""}
    assert client.post("/create", data=form).status_code in (200, 204)
    draft = projects.draft(projects.find_project(tmp_path, "cats"))
    written = yaml.safe_load(config_of("style", preset, "clips", clips=10))
    of_preset = flatten(read_preset(preset))
    value = flatten(draft).get(CONVENTION, of_preset.get(CONVENTION))
    assert value == flatten(written).get(CONVENTION)


def test_a_model_chosen_later_brings_its_values_and_takes_them_along(
    client: Any, tmp_path: Any
) -> None:
    project = projects.create(tmp_path, "Cats")
    assert projects.draft(project) == {}

    def choose(preset: str) -> dict[str, Any]:
        answer = client.post(FACT, data={"key": "preset", "value": preset})
        assert answer.status_code == 200
        return projects.draft(project)

    assert choose("ltx 2B LoRA 12GB") == AUTHORS
    assert choose("wan 2.1 1.3B LoRA 16GB") == {}
    assert choose("ltx 2B LoRA 12GB") == AUTHORS


def test_a_reading_that_the_user_has_chosen_stays(client: Any, tmp_path: Any) -> None:
    project = projects.create(tmp_path, "Cats", preset="ltx 2B LoRA 12GB")
    projects.save_draft(project, {})
    client.post(FACT, data={"key": "preset", "value": "ltx 2B LoRA 24GB"})
    assert projects.draft(project) == {}, "another size of the same model"
