"""Damaged, hostile and foreign configs and --set words: one sentence, never a hang or a
traceback.
"""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from videotune.config.data_schema import Dataset
from videotune.config.load import parse_sets, parsed, read_config
from videotune.config.resolve import parse
from videotune.config.schema import Config, leaves
from videotune.config.suggestions import nearest_key, nearest_value, others
from videotune.errors import VideotuneError
from videotune.job.overrides import Overrides, to_overrides, user_keys, with_sets

LETTERS = zip("abcdefgh", "bcdefghi", strict=True)
BOMB = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in LETTERS
)

HOSTILE = {
    "bomb.yaml": BOMB,
    "merges.yaml": "a: &a {x: 1}\nb: &b {<<: *a, y: 1}\nc: {<<: [*a, *b]}\n",
    "recursive.yaml": "lora: &a {x: *a}\n",
    "int.yaml": "steps: !!int abc\n",
    "float.yaml": "steps: !!float abc\n",
    "bool.yaml": "steps: !!bool x\n",
    "map.yaml": "steps: !!map x\n",
    "set.yaml": "steps: !!set [a]\n",
    "python.yaml": "steps: !!python/object/apply:os.system ['true']\n",
    "deep.yaml": "a: " + "[" * 20_000,
    "deep.json": "[" * 100_000,
    "deep-and-closed.json": "[" * 500 + "]" * 500,
    "digits.json": '{"steps": ' + "9" * 5000 + "}",
    "wide.json": '{"steps": ' + "9" * 400 + "}",
    "nul.json": '{"cache_dir": "a\\u0000b"}',
    "surrogate.json": '{"cache_dir": "\\ud800"}',
    "long.json": json.dumps({"x" * 500_000: 1}),
    "large.json": json.dumps({"cache_dir": "x" * (2 << 20)}),
    "list.json": "[1]",
    "null.json": "null",
    "half.json": '{"steps": ',
    "utf16.json": '{"steps": 1}'.encode("utf-16"),
    "toml.toml": "steps = 1\n",
    "broken.toml": "steps = = 1\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_config_that_cannot_be_used_is_refused_in_a_short_sentence(
    tmp_path: Path, name: str
) -> None:
    content = HOSTILE[name]
    (tmp_path / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(VideotuneError) as told:
        read_config(tmp_path / name)
    assert name in str(told.value)
    assert len(str(told.value)) < 600


@pytest.mark.parametrize("ending", [".txt", ".caption", ".TAGS"])
def test_the_ending_of_caption_files_is_no_text_behind_each_caption(
    ending: str,
) -> None:
    with pytest.raises(ValidationError, match="caption_extension"):
        Dataset.model_validate({"path": "x", "caption_suffix": ending})
    for suffix in (".", ". A film", "...", ", 4k"):
        assert Dataset.model_validate({"path": "x", "caption_suffix": suffix})


LONG = [
    "steps=" + "9" * 5000,
    ".".join("a" * 2000) + "=1",
    "samples=" + "[" * 100_000,
    "x" * 10_000_000 + "=1",
]


@pytest.mark.parametrize("word", [*LONG, 'cache_dir="\\ud800"'])
def test_a_set_word_that_cannot_be_used_is_refused_in_a_short_sentence(
    word: str,
) -> None:
    with pytest.raises(VideotuneError) as told:
        parse_sets([word])
    assert len(str(told.value)) < 600


@pytest.mark.parametrize(
    "raw",
    [
        {"epochs": 1e308},
        {"steps": 10**18},
        {"lora": {"rank": 10**9}},
        {"batch_size": 10**9},
        {"sample": {"resolution": "0x0"}},
        {"sample": {"steps": 10**9}},
        {"dataloader_threads": 10**6},
        {"datasets": [{"path": "x", "repeats": 10**12}]},
    ],
)
def test_numbers_that_no_run_can_have_are_out_of_bounds(raw: dict[str, object]) -> None:
    with pytest.raises(VideotuneError):
        parse(raw)


def test_the_home_of_a_user_that_there_is_not_is_told() -> None:
    for key in ("cache_dir", "init_from", "base_model_name"):
        with pytest.raises(VideotuneError):
            user_keys(Overrides(sets=(f"{key}=~no-such-user-here/x",)))


def test_every_unknown_key_is_told_with_the_name_that_it_has_here() -> None:
    with pytest.raises(VideotuneError) as told:
        parse_sets(
            [
                "lr=1",
                "network_dim=4",
                "blocks_to_swap=2",
                "max_train_steps=5",
                "gradient_clipping=1",
            ]
        )
    for name in (
        "learning_rate",
        "lora.rank",
        "layer_offload_fraction",
        "'steps'",
        "max_grad_norm",
    ):
        assert name in str(told.value)


def test_the_names_of_other_trainers_lead_to_keys_and_values_that_exist() -> None:
    table = others()
    assert {ours for ours in table["keys"].values() if ours} <= set(leaves())
    assert not set(table["keys"]) & {
        name.rpartition(".")[2] for name in leaves() if "." not in name
    }
    words = json.dumps(Config.model_json_schema())
    assert all(f'"{value}"' in words for value in table["values"].values())
    assert "wandb" not in nearest_key("wandb", set(leaves()))


NEARLY = {
    "adamw8bit": "ADAMW_8BIT",
    "AdamW": "ADAMW",
    "prodgy": "PRODIGY",
    "lion8bit": "LION_8BIT",
}


@pytest.mark.parametrize(("given", "meant"), NEARLY.items())
def test_a_word_that_is_nearly_right_is_suggested(given: str, meant: str) -> None:
    allowed = ["ADAMW", "ADAMW_8BIT", "PRODIGY", "LION", "LION_8BIT"]
    assert repr(meant) in nearest_value(given, allowed)
    assert nearest_value("zzz", allowed) == ""


@pytest.mark.parametrize(
    ("key", "given", "meant"),
    [
        ("train_dtype", "bf16", "BFLOAT_16"),
        ("weight_dtype", "fp8", "FLOAT_8"),
        ("gradient_checkpointing", True, "ON"),
        ("learning_rate_scheduler", "cosine_with_restarts", "COSINE_RESTARTS"),
    ],
)
def test_a_value_of_other_trainers_is_answered_with_ours(
    key: str, given: object, meant: str
) -> None:
    with pytest.raises(VideotuneError, match=f"did you mean '{meant}'"):
        parse({key: given})


OTHERS = {
    "musubi.toml": (
        "musubi",
        '[general]\nresolution = [960, 544]\n[[datasets]]\nvideo_directory = "x"\n',
    ),
    "diffusion-pipe.toml": (
        "diffusion-pipe",
        'epochs = 10\npipeline_stages = 1\ndataset = "x"\n[model]\ntype = "wan"\n',
    ),
    "ai-toolkit.yaml": ("ai-toolkit", "job: extension\nconfig:\n  name: x\n"),
    "kohya.toml": (
        "musubi",
        'network_module = "networks.lora"\nnetwork_dim = 32\nlearning_rate = 1e-4\nseed = 1\noutput_dir = "x"\n',
    ),
    "onetrainer.json": (
        "onetrainer",
        '{"__version": 6, "concept_file_name": "x", "learning_rate": 1e-4}',
    ),
    "multidatabackend.json": (
        "simpletuner",
        '[{"id": "x", "type": "local", "instance_data_dir": "y"}]',
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_config_of_another_trainer_is_recognised(tmp_path: Path, name: str) -> None:
    whose, text = OTHERS[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(VideotuneError, match=whose):
        read_config(tmp_path / name)


def test_a_key_of_the_only_dataset_is_set_by_its_name() -> None:
    user = user_keys(
        Overrides(data="clips", sets=("datasets.trigger=ohwx", "datasets.repeats=3"))
    )
    assert [(row["trigger"], row["repeats"]) for row in user["datasets"]] == [
        ("ohwx", 3)
    ]
    two = {"datasets": [{"path": "a"}, {"path": "b"}]}
    changed = with_sets(two, parse_sets(["datasets.1.trigger=x"]))
    assert changed["datasets"] == [{"path": "a"}, {"path": "b", "trigger": "x"}]
    assert two == {"datasets": [{"path": "a"}, {"path": "b"}]}
    for raw, words in (
        (two, ["datasets.trigger=x"]),
        (two, ["datasets.2.trigger=x"]),
        ({}, ["datasets.trigger=x"]),
    ):
        with pytest.raises(VideotuneError):
            with_sets(raw, parse_sets(words))


def test_keywords_replace_fields_of_overrides() -> None:
    """In Python a caller may have overrides already, and change one of their fields."""
    overrides = Overrides(data="clips", sets=("steps=2",))
    joined = to_overrides(overrides, {"data": "other", "held_out": "apart"})
    assert joined == Overrides(data="other", sets=("steps=2",), held_out="apart")
    assert to_overrides(overrides, {}) == overrides


@pytest.mark.parametrize("name", ["x.json", "x.toml", "x.yaml"])
def test_a_config_has_a_bound_of_values(name: str) -> None:
    """Whatever comes after the parser takes time for each of them."""
    few = {"x.json": '{"a": [1, 2]}', "x.toml": "a = [1, 2]", "x.yaml": "a: [1, 2]"}
    many = few[name].replace("2", "2, " * 20_000 + "2")
    assert parsed(few[name], Path(name)) == {"a": [1, 2]}
    with pytest.raises(VideotuneError):
        parsed(many, Path(name))
