"""The form is the schema: every key, its bounds, its default; what is typed is what a
config file would say.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from videotune.config.load import without_epochs_overridden
from videotune.config.nested_keys import merge
from videotune.config.schema import leaves
from videotune.errors import VideotuneError
from videotune.studio import field_kinds, form, projects
from videotune.studio.clip_keys import CLIP_KEYS

WITH_SOUND = "ltx 2.3 LoRA 24GB"
"""A preset of a model that makes sound."""


def test_every_key_of_the_config_has_a_field() -> None:
    own = {key for key in leaves() if not key.startswith("datasets.")}
    own |= {f"datasets.{key}" for key in CLIP_KEYS}
    assert {field.key for field in form.fields()} == own - set(form.MANAGED_KEYS)
    assert all(field.help and field.values and field.default for field in form.fields())


@pytest.mark.parametrize(
    ("key", "typed", "means"),
    [
        ("steps", "40", 40), ("learning_rate", "1e-4", 1e-4), ("shuffle", "false", False), ("resolution", "480", 480),
        ("resolution", "64x64", "64x64"), ("samples", "a cat", ["a cat"]), ("samples", "a cat\na dog", ["a cat", "a dog"]),
        ("datasets.flip", "safe", "safe"), ("datasets.caption_weights", "[2, 1]", [2, 1]),
        ("generate", "video\nsound", ["video", "sound"]), ("generate", "sound", "sound"),
        ("sound.changed_speed", "refuse", "refuse"),
        ("samples", "3", 3), ("lora.targets", '["a", "b"]', ["a", "b"]), ("training_method", "LORA", "LORA"),
    ],
)  # fmt: skip
def test_what_is_typed_is_what_a_config_file_would_say(
    key: str, typed: str, means: object
) -> None:
    kept = form.set_key({}, key, typed, "toy")
    assert form.flatten(kept) == {key: means}
    assert form.set_key(kept, key, "", "toy") == {}, "emptied, the preset holds again"
    field = next(one for one in form.fields() if one.key == key)
    assert form.parse_value(field, form.format_value(means)) == means


@pytest.mark.parametrize(
    ("key", "typed", "words"),
    [
        ("steps", "0", "greater than or equal to 1"), ("steps", "many", "not a whole number"),
        ("learning_rate", "-1", "greater than 0"), ("resize", "bend", "is not one of"),
        ("resolution", "big", "is not a valid size"), ("resolution", "[512, 0]", "is not a valid size"),
        ("nothing", "1", "not a setting"), ("datasets.path", "/tmp", "not a setting"),
        ("datasets.kind", "train", "not a setting"),
        ("datasets.caption_extension", ".mp4", "is not one of"), ("datasets.frame_folder_fps", "0", "greater than 0"),
        ("datasets.flip", "up", "is not one of"),
        ("generate", "music", "is not one of"), ("sound.loss_weight", "0", "greater than 0"),
        ("cache_dir", "/tmp", "not a setting"), ("shuffle", "perhaps", "true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(key: str, typed: str, words: str) -> None:
    with pytest.raises(VideotuneError, match=words):
        form.set_key({}, key, typed, "toy")


def test_main_fields_are_explained_in_plain_words(client: Any, tmp_path: Path) -> None:
    """What it does, when to change it, what it costs: of the fields that are used most."""
    plain = projects.texts()["plain"]
    keys = {field.key for field in form.fields()}
    assert set(plain) <= keys
    front = {"steps", "learning_rate", "lora.rank", "resolution", "video_config.frames"}
    assert front <= set(plain)
    for lines in plain.values():
        assert len(lines) == 3
        assert all(line[0].isupper() and line.endswith(".") for line in lines)

    projects.create(tmp_path, "Cats", preset=WITH_SOUND)
    page = client.get("/p/cats/setup").text
    for does, when, costs in plain.values():
        assert all(str(escape(line)) in page for line in (when, costs))
        assert str(escape(does)) in page


def test_every_setting_has_a_group_with_a_title() -> None:
    """No group is titled by a key, and none is left to "General"."""
    texts = projects.texts()
    keys = {field.key for field in form.fields()}
    in_groups = {key for group in texts["groups"].values() for key in group}
    shown_apart = {"samples", *texts["front"]}
    assert set(texts["names"]) <= keys
    for field in form.fields():
        if field.key not in in_groups | shown_apart:
            assert field.section, f"{field.key} is in no group"
            assert texts["titles"][field.section][0].isupper()


def test_what_has_words_is_chosen_by_them() -> None:
    """Each value of a key is called by its words, and each text is a value."""
    field_by_key = {field.key: field for field in form.fields()}
    for key, words in projects.texts()["choices"].items():
        field = field_by_key[key]
        assert len(set(words.values())) == len(words)
        for text in field.options:
            value = form.parse_value(field, text)
            assert form.set_key({}, key, text, "toy")
            assert form.format_value(value) == text
        if field.kind == "choice":
            assert set(words) == set(field.choices)
    assert set(field_by_key["generate"].options) == {"video\nsound", "video", "sound"}
    assert field_by_key["shuffle"].options == ("true", "false")
    assert field_by_key["lora.targets"].options == ()


@pytest.mark.parametrize(
    ("preset", "own", "shown"),
    [
        (WITH_SOUND, {}, True),
        ("toy", {}, False),
        ("toy", {"base_model_name": "somebody/else"}, True),
        (WITH_SOUND, {"base_model_name": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"}, False),
    ],
)
def test_settings_of_sound_are_shown_if_the_model_may_make_it(
    preset: str, own: dict[str, Any], shown: bool, client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats", preset=preset)
    projects.save_draft(project, own)
    page = client.get("/p/cats/setup").text
    for key in projects.texts()["groups"]["Sound"]:
        assert (f'data-key="{key}"' in page) == shown
    assert ('id="keys-sound"' in page) == shown

    projects.save_draft(project, {**own, "generate": ["video", "sound"]})
    page = client.get("/p/cats/setup").text
    assert 'data-key="generate"' in page, "what is set can be taken back"
    assert re.search(r'value="video\nsound" selected>video and sound<', page)


def test_settings_whose_key_does_not_say_what_they_are_have_a_name(
    client: Any, tmp_path: Path
) -> None:
    projects.create(tmp_path, "Cats", preset="toy")
    page = client.get("/p/cats/setup").text
    for key in ("vae.file", "text_encoder.file", "sample.loras", "base_loras"):
        name = projects.texts()["names"][key]
        assert f'<label for="f-{key}">{escape(name)}' in page
    names = [field.name for field in form.fields() if field.key.endswith(".file")]
    assert len(set(names)) == len(names)


def test_every_path_of_the_form_can_be_chosen(client: Any, tmp_path: Path) -> None:
    assert set(field_kinds.PATH_KEYS) <= {field.key for field in form.fields()}
    projects.create(tmp_path, "Cats", preset="toy")
    page = client.get("/p/cats/setup").text
    for key in field_kinds.PATH_KEYS:
        assert f'data-browse="f-{key}"' in page


def test_a_condition_has_a_row_if_the_model_takes_it_or_the_value_has_it() -> None:
    def rows(value: Any, takes: list[str] | None) -> list[tuple[str, bool, bool]]:
        return [
            (row.type, row.is_on, row.is_taken)
            for row in form.condition_rows(value, takes)
        ]

    assert rows(None, ["first_frame", "mask"]) == [("mask", False, True)]
    assert rows([], []) == []
    suffix = {"type": "suffix", "probability": 0.5, "latent_frames": 3}
    assert rows([suffix], ["mask"]) == [("mask", False, True), ("suffix", True, False)]
    names = [name for name in projects.texts()["conditions"] if name != "first_frame"]
    assert rows([suffix], None) == [(name, name == "suffix", True) for name in names]
    assert rows([3, {"type": ["x"]}, {}], ["mask"]) == [("mask", False, True)]

    (row,) = form.condition_rows([suffix], [])
    assert (row.probability, row.latent_frames, row.has_frames) == ("0.5", "3", True)


@pytest.mark.parametrize("of_preset", [{}, {"epochs": 4, "save_every_epochs": 1}])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"steps": 40},
        {"epochs": 3},
        {"steps": 40, "epochs": 3},
        {"save_every": 5, "save_every_epochs": 0.5},
    ],
)
def test_of_a_length_in_steps_and_in_passes_the_one_without_effect_is_marked(
    own: dict[str, Any], of_preset: dict[str, Any]
) -> None:
    """It is the one that the layers of a config do not use."""
    used = merge(without_epochs_overridden(of_preset, own), own)
    reasons = form.replaced_lengths(own, of_preset)
    for in_steps, in_epochs in (
        ("steps", "epochs"),
        ("save_every", "save_every_epochs"),
    ):
        has_passes = in_epochs in used
        assert (in_steps in reasons) == has_passes
        is_replaced = in_epochs in of_preset and not has_passes
        assert (in_epochs in reasons) == is_replaced


def test_steps_beside_epochs_say_that_they_have_no_effect(
    client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    projects.save_draft(project, {"steps": 40, "epochs": 3.0})
    page = client.get("/p/cats/setup").text
    (reason,) = re.findall(r'id="w-steps">([^<]*)<', page)
    assert "“Epochs” is 3 " in reason
    assert 'id="w-epochs"' not in page

    projects.save_draft(project, {"steps": 40})
    assert 'id="w-steps"' not in client.get("/p/cats/setup").text


@pytest.mark.parametrize("typed", ["0", "16.5"])
def test_what_is_refused_has_the_name_that_its_field_has(typed: str) -> None:
    with pytest.raises(VideotuneError) as caught:
        form.set_key({}, "lora.rank", typed, "toy")
    assert str(caught.value).startswith("Rank: ")
    assert "low-rank update" not in str(caught.value), "the page explains it beside it"


@pytest.mark.parametrize("typed", ["big", "-1", "640x"])
def test_a_size_that_is_refused_has_the_name_of_its_field(typed: str) -> None:
    with pytest.raises(VideotuneError) as caught:
        form.set_key({}, "resolution", typed, "toy")
    assert str(caught.value).startswith("Resolution: ")


def test_each_line_of_what_is_refused_has_the_name_of_its_field() -> None:
    with pytest.raises(VideotuneError) as caught:
        form.set_key({}, "video_config.frames", "x", "toy")
    for line in str(caught.value).split("\n"):
        assert line.startswith("Frames: ")


def test_an_empty_field_that_does_nothing_is_not_called_automatic() -> None:
    empty_fields = {
        field.key: field for field in form.fields() if field.default == "null"
    }
    assert empty_fields["datasets.trigger"].without_value == "not set"
    assert empty_fields["micro_batch_size"].without_value == "automatic"
    assert set(field_kinds.UNUSED_WHEN_EMPTY) <= {field.key for field in form.fields()}


def test_a_message_names_one_setting_of_how_much_time_is_measured() -> None:
    names = {field.key: field.name for field in form.fields()}
    assert names["forgetting.budget"] != names["sample_metrics.budget"]
    assert names["forgetting.prompts"] != names["sample_metrics.prompts"]
