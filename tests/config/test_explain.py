"""What is said of a key, and the JSON Schema that editors read."""

import json
import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from videotune.cli.main import main
from videotune.config.explain import advice, explain, json_schema
from videotune.config.resolve import resolve
from videotune.config.schema import leaves
from videotune.errors import VideotuneError
from videotune.models.registry import find, names
from videotune.presets.shipped import preset_names, read_preset

LORA: dict[str, Any] = {
    "training_method": "LORA",
    "batch_size": 2,
    "learning_rate": 0.0003,
    "transformer": {"train": True},
    "text_encoder": {"train": False},
}
"""The guide's first example."""

VIDEO_KEYS = (
    "max_frames", "frame_sample_strategy", "target_fps", "max_duration", "temporal_consistency_weight",
    "use_temporal_attention", "spatial_compression_ratio", "temporal_compression_ratio", "video_batch_size_multiplier",
    "frame_dropout_probability", "temporal_augmentation",
)  # fmt: skip


def test_what_is_said_is_said_of_keys_that_there_are() -> None:
    assert set().union(*advice().values()) - set(leaves()) == set()


def test_every_key_is_explained_with_its_values_and_default() -> None:
    for key in leaves():
        facts = dict(explain(key))
        assert all(text.strip() for text in facts.values())
        assert {"meaning", "values", "default", "on a resume"} <= set(facts)


@pytest.mark.parametrize("key", VIDEO_KEYS)
def test_advice_is_given_on_each_key_of_the_video_settings(key: str) -> None:
    facts = dict(explain(f"video_config.{key}"))
    assert facts["advice"].endswith(".")
    assert not any("guide" in text for text in facts.values())


def test_a_key_is_told_with_its_unit_bounds_and_the_reason_of_its_default() -> None:
    facts = dict(explain("video_config.max_duration"))
    assert facts["unit"] == "seconds"
    assert facts["values"] == "number, > 0"
    assert facts["default"] == "10.0: what lies beyond ten seconds is not read"
    assert dict(explain("timestep_alpha"))["applies when"].startswith(
        "timestep_distribution is BETA"
    )
    assert "may not change" in dict(explain("lora.rank"))["on a resume"]


def test_every_named_set_of_modules_is_named() -> None:
    named = {key for name in names() for key in find(name).spec.lora_targets}
    assert all(name in dict(explain("lora.targets"))["meaning"] for name in named)


def test_a_section_lists_its_keys_and_a_wrong_one_the_nearest() -> None:
    assert [name for name, _ in explain("ema")] == ["ema.decay", "ema.device"]
    with pytest.raises(
        VideotuneError, match=r"no key 'rank'; did you mean 'lora\.rank'"
    ):
        explain("rank")
    with pytest.raises(VideotuneError, match="did you mean 'learning_rate'"):
        explain("learning_rat")


def test_presets_and_the_guide_s_example_fit_the_schema_and_nonsense_does_not() -> None:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    fits = Draft202012Validator(schema)
    for name in preset_names():
        assert list(fits.iter_errors(read_preset(name))) == [], name
    assert fits.is_valid(LORA)
    assert fits.is_valid(
        {"optimizer": "ADAMW", "ema": 0.99, "timestep_shift": "resolution"}
    )
    assert fits.is_valid(
        json.loads(
            json.dumps(
                resolve({"family": "wan"}, {}, None).config.model_dump(mode="json")
            )
        )
    )
    nonsense = (
        {"step": 1},
        {"lora": {"rang": 4}},
        {"steps": 0},
        {"optimizer": {"name": "SGD"}},
        {"ema": {"decay": 1}},
    )
    for wrong in nonsense:
        assert not fits.is_valid(wrong), wrong


def test_the_commands_print_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for words in (
        ("explain", "lora.rank", "--json"),
        ("explain", "lora.rank"),
        ("schema",),
    ):
        monkeypatch.setattr(sys, "argv", ["videotune", "config", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
        said[words] = capsys.readouterr().out
    assert (
        json.loads(said["explain", "lora.rank", "--json"])["values"]
        == "integer, ≥ 1, ≤ 8192"
    )
    assert "  meaning       rank of the low-rank update" in said["explain", "lora.rank"]
    assert json.loads(said["schema",]) == json_schema()


def test_the_help_of_a_key_is_one_line_however_its_docstring_is_wrapped() -> None:
    described = {name: str(field.description) for name, field in leaves().items()}
    assert all("\n" not in text and "  " not in text for text in described.values())
    assert any(len(text) > 88 for text in described.values()), "some are wrapped"
    assert "\\n" not in json.dumps(json_schema()["properties"])
