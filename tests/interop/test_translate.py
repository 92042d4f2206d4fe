"""The rules for configs of other trainers: what becomes of every key, and that
videotune takes the result.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from videotune.cli.interop import ORDER
from videotune.config.nested_keys import flatten
from videotune.config.resolve import resolve
from videotune.config.schema import leaves
from videotune.config.suggestions import flat_leaves, others
from videotune.errors import VideotuneError
from videotune.interop.conversions import CONVERSIONS
from videotune.interop.foreign_config import ForeignConfig, read_foreign_config
from videotune.interop.rule_tables import load_rules
from videotune.interop.translate import Imported, translate
from videotune.interop.translated_key import TranslatedKey
from videotune.models.registry import find

HERE = Path(__file__).parent
CONFIGS = HERE / "configs"
TRAINERS = sorted({kind["trainer"] for kind in others()["files"]})
EXAMPLES = json.loads((HERE / "keys_of_examples.json").read_text(encoding="utf-8"))


def imported(*names: str) -> Imported:
    return translate(read_foreign_config([CONFIGS / name for name in names]))


def row(found: Imported, key: str) -> TranslatedKey:
    return next(row for row in found.rows if row.key == key)


def all_rules(trainer: str) -> list[tuple[str, dict[str, Any]]]:
    known = load_rules(trainer)["rules"]
    several = (
        (key, rule)
        for key, some in known.items()
        for rule in (some if isinstance(some, list) else [some])
    )
    return [
        (key, {"to": rule} if isinstance(rule, str) else rule) for key, rule in several
    ]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rules_name_keys_of_ours_and_say_where_surprises_are_known_from(
    trainer: str,
) -> None:
    table = load_rules(trainer)
    assert table["repository"]
    assert table["read_from"]
    surprises = set()
    for key, rule in all_rules(trainer):
        names = rule.get("to", [])
        assert set([names] if isinstance(names, str) else names) <= set(leaves()), key
        assert isinstance(rule.get("as"), dict) or rule.get("as") in CONVERSIONS, key
        assert not set(rule) - {
            "to",
            "as",
            "when",
            "note",
            "differs",
            "absent",
            "with",
            "source",
            "base",
            "over",
            "empty",
        }, key
        if "differs" in rule or "absent" in rule:
            assert rule["source"], key
            surprises.add(key)
    assert len(surprises) >= 3
    assert all(default["source"] for default in table.get("defaults", {}).values())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["repository"])
def test_every_key_of_the_published_examples_is_known(example: dict[str, Any]) -> None:
    keys = [
        key.replace(".N.", ".0.").replace("N.", "0.", key.startswith("N."))
        for some in example["keys"].values()
        for key in some
    ]
    found = translate(
        ForeignConfig(example["trainer"], dict.fromkeys(keys, 1), (HERE / "x",), ())
    )
    assert not [row.key for row in found.rows if row.verdict == "unknown"]
    assert {row.key.split("(")[0] for row in found.rows if row.given} >= set(keys)


EXPECTED = json.loads((CONFIGS / "expected.json").read_text(encoding="utf-8"))
"""A config -> its files, keys of ours with the values that they come to, and all
datasets.
"""


@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_in_our_keys(name: str) -> None:
    expected = EXPECTED[name]
    found = imported(*expected["files"])
    ours = {
        key: value for key, value in flatten(found.config).items() if key != "datasets"
    }
    assert {key: ours.get(key) for key in expected["ours"]} == expected["ours"]
    folder = CONFIGS / Path(expected["files"][0]).parent
    datasets = expected.get("datasets", [])
    rows = [
        {"path": str(folder / row["path"])} if "/" not in row["path"] else {}
        for row in datasets
    ]
    assert found.config.get("datasets", []) == [
        one | row for one, row in zip(datasets, rows, strict=True)
    ]
    assert {row.verdict for row in found.rows} <= set(ORDER)
    assert all(
        row.ours or row.note
        for row in found.rows
        if row.verdict != "same" and row.theirs not in (None, "", [], {})
    )
    told = {
        key: value
        for row in found.rows
        for key, value in row.ours.items()
        if not key.startswith("datasets.")
    }
    assert told == ours
    spec = find(found.config["family"]).spec if "family" in found.config else None
    resolve(found.config, {}, spec)


def test_verdicts_and_notes() -> None:
    found = imported(*EXPECTED["musubi"]["files"])
    assert row(found, "seed").verdict == "same"
    assert row(found, "network_dim").verdict == "translated"
    assert row(found, "sdpa").verdict == "none"
    assert row(found, "timestep_sampling").verdict == "differs"
    assert row(found, "dataset_config.datasets.1.colour").verdict == "unknown"
    assert not row(found, "network_alpha").given
    assert not row(found, "dataset_config.datasets.0.source_fps").given
    assert row(found, "dataset_config.datasets.1.source_fps").given
    one_for_all = row(found, "dataset_config.datasets.1.target_frames")
    assert not one_for_all.ours
    assert "30" in one_for_all.note
    assert (
        row(
            imported(*EXPECTED["videomodelstudio"]["files"]), "params.model_version"
        ).verdict
        == "differs"
    )
    assert (
        row(imported(*EXPECTED["onetrainer"]["files"]), "timestep_distribution").ours
        == {}
    )


def given(trainer: str, **values: Any) -> Imported:
    """The translation of these keys, of which a point is written as two underlines."""
    keys = {key.replace("__", "."): value for key, value in values.items()}
    return translate(ForeignConfig(trainer, keys, (HERE / "x",), ()))


ALPHAS = {
    "musubi": ("network_alpha", {"network_module": "networks.lora_wan"}),
    "kohya": ("network_alpha", {"network_module": "networks.lora"}),
    "onetrainer": ("lora_alpha", {"training_method": "LORA"}),
}


@pytest.mark.parametrize("trainer", ALPHAS)
def test_what_an_absent_key_means_is_said_of_an_absent_key_only(trainer: str) -> None:
    key, others_of_it = ALPHAS[trainer]
    absent = row(given(trainer, **others_of_it), key)
    assert (absent.given, absent.verdict, absent.ours) == (
        False,
        "differs",
        {"lora.alpha": 1},
    )
    assert absent.note.startswith("absent, it is")
    present = row(given(trainer, **others_of_it, **{key.replace(".", "__"): 32}), key)
    assert (present.given, present.verdict, present.note) == (True, "translated", "")
    assert present.ours == {"lora.alpha": 32}


@pytest.mark.parametrize(
    ("trainer", "key", "value", "verdict"),
    [
        ("ai-toolkit", "config.process.0.datasets.0.resolution", [632], "same"),
        ("ai-toolkit", "config.process.0.datasets.0.resolution", [632, 960], "differs"),
        ("ai-toolkit", "config.process.0.network.linear_alpha", 32, "none"),
        ("ai-toolkit", "config.process.0.network.linear_alpha", 16, "differs"),
        ("ai-toolkit", "config.process.0.datasets.0.shrink_video_to_frames", False, "translated"),
        ("ai-toolkit", "config.process.0.datasets.0.shrink_video_to_frames", True, "differs"),
        ("diffusion-pipe", "dataset.resolutions", [512], "translated"),
        ("diffusion-pipe", "dataset.resolutions", [[640, 352]], "translated"),
        ("diffusion-pipe", "dataset.resolutions", [512, 768], "differs"),
        ("diffusion-pipe", "dataset.resolutions", [[640, 352], [352, 640]], "differs"),
        ("diffusion-pipe", "dataset.skip_empty_caption", False, "translated"),
        ("diffusion-pipe", "model.shift", 3, "translated"),
        ("finetrainers", "lr_scheduler", "linear", "differs"),
    ],
)  # fmt: skip
def test_a_remark_fits_the_value(
    trainer: str, key: str, value: Any, verdict: str
) -> None:
    values: dict[str, Any] = {
        "config.process.0.datasets.0.folder_path": "clips",
        "config.process.0.datasets.0.num_frames": 33,
        "config.process.0.network.linear": 32,
    }
    values[key] = value
    found = translate(ForeignConfig(trainer, values, (HERE / "x",), ()))
    assert (
        row(found, key).verdict in (verdict, "none") if verdict != "differs" else True
    )
    assert (row(found, key).verdict == "differs") == (verdict == "differs")


def test_previews_have_the_size_and_frames_that_the_model_can_sample() -> None:
    found = given(
        "ai-toolkit",
        config__process__0__model__name_or_path="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        config__process__0__sample__width=832,
        config__process__0__sample__height=480,
        config__process__0__sample__num_frames=40,
    )
    assert found.config["sample"] == {"resolution": "480x832", "frames": 41}
    frames = row(found, "config.process.0.sample.num_frames")
    assert frames.verdict == "translated"
    assert "4n" in frames.note
    assert row(found, "config.process.0.sample.height").note == "see width"


@pytest.mark.parametrize(
    ("task", "file", "verdict", "experts"),
    [
        ("t2v-A14B", "wan2.2_t2v_low_noise_14B_fp16.safetensors", "translated", "low"),
        ("t2v-A14B", "wan2.2_t2v_high_noise_14B_fp16.safetensors", "translated", "high"),
        ("t2v-14B", "wan2.2_t2v_low_noise_14B_fp16.safetensors", "differs", "low"),
        ("t2v-14B", "wan2.1_t2v_14B_fp16.safetensors", "translated", None),
    ],
)  # fmt: skip
def test_one_file_of_two_experts_trains_one_and_another_model_is_named(
    task: str, file: str, verdict: str, experts: str | None
) -> None:
    found = given("musubi", network_module="networks.lora_wan", task=task, dit=file)
    assert found.config.get("experts") == experts
    assert row(found, "task").verdict == verdict


def test_a_value_out_of_bounds_is_a_row() -> None:
    theirs = read_foreign_config(
        [CONFIGS / name for name in EXPECTED["musubi"]["files"]]
    )
    odd = {
        "learning_rate": -1.0,
        "network_dim": "many",
        "optimizer_type": "made.up",
        "seed": [],
        "max_train_epochs": {},
    }
    found = translate(
        ForeignConfig(
            theirs.trainer,
            {**theirs.values, **odd},
            theirs.files,
            (("resume", "gone"),),
        )
    )
    assert all(row(found, key).verdict == "none" for key in odd)
    assert found.rows[-1].verdict == "missing"
    assert found.config["lora"]["alpha"] == 1
    assert "learning_rate" not in found.config
    twice = {**theirs.values, "dataset_config.datasets.1.video_directory": "clips"}
    found = translate(ForeignConfig(theirs.trainer, twice, theirs.files, ()))
    assert len(found.config["datasets"]) == 1
    assert row(found, "dataset_config.datasets.1.video_directory").verdict == "none"


ODD = [
    None,
    "",
    "x",
    -1,
    0,
    math.inf,
    math.nan,
    [],
    [1, 2, 3],
    [[1, 2]],
    [[]],
    {},
    "a" * 1000,
    "0x0",
    10**30,
    "/" * 300,
]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_value_of_a_key_ends_it(trainer: str) -> None:
    keys = [key.replace(".N", ".0").replace("*", "x") for key, _ in all_rules(trainer)]
    for value in ODD:
        found = translate(
            ForeignConfig(trainer, dict.fromkeys(keys, value), (HERE / "x",), ())
        )
        assert {row.key for row in found.rows} >= set(keys)


@pytest.mark.parametrize("sampling", ["sigma", "shift", "sigmoid", "uniform"])
def test_what_a_number_means_depends_on_other_keys(sampling: str) -> None:
    theirs = read_foreign_config(
        [CONFIGS / name for name in EXPECTED["musubi"]["files"]]
    )
    found = translate(
        ForeignConfig(
            "musubi", {**theirs.values, "timestep_sampling": sampling}, theirs.files, ()
        )
    )
    assert found.config["timestep_shift"] == (5 if sampling == "shift" else 1)
    assert found.config["timestep_distribution"] == (
        "SIGMOID" if sampling in ("shift", "sigmoid") else "UNIFORM"
    )


def test_a_folder_in_diffusers_layout_and_a_single_file_are_taken_where_they_lie(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "dit.safetensors").write_bytes(b"")
    values = {
        "model.type": "wan",
        "model.diffusers_path": "model",
        "model.transformer_path": "dit.safetensors",
    }
    config = translate(
        ForeignConfig("diffusion-pipe", values, (tmp_path / "main.toml",), ())
    ).config
    assert config["base_model_name"] == str(tmp_path / "model")
    assert config["transformer"]["file"] == str(tmp_path / "dit.safetensors")


A14B = {"task": "t2v-A14B", "network_module": "networks.lora_wan", "script": "wan_train_network.py"}  # fmt: skip
RANGE = {"preserve_distribution_shape": True, "timestep_sampling": "shift"}
ONE_EXPERT: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "by its name, low": ("musubi", A14B | {"dit": "wan2.2_low_noise.safetensors"}, "low"),
    "by its name, high": ("musubi", A14B | {"dit": "wan2.2_t2v_HIGH-noise.safetensors"}, "high"),
    "by its range, low": ("musubi", A14B | RANGE | {"dit": "x", "min_timestep": 0, "max_timestep": 875}, "low"),
    "by its range, high": ("musubi", A14B | {"dit": "x", "min_timestep": 900.0, "max_timestep": 1000}, "high"),
    "both": ("musubi", A14B | {"dit": "x_low_noise", "dit_high_noise": "y"}, None),
    "not said": ("musubi", A14B | {"dit": "x"}, None),
    "diffusion-pipe": ("diffusion-pipe", {"model.type": "wan", "model.ckpt_path": "Wan2.2-T2V-A14B",
                       "model.transformer_path": "Wan2.2-T2V-A14B/low_noise_model"}, "low"),
}  # fmt: skip
"""One file of a model with two experts: the trainer, its keys, which expert trains."""


@pytest.mark.parametrize("name", ONE_EXPERT)
def test_one_expert_alone_is_imported_as_that_expert(name: str) -> None:
    trainer, values, expert = ONE_EXPERT[name]
    found = translate(ForeignConfig(trainer, values, (HERE / "x",), ()))
    assert found.config["base_model_name"] == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert found.config.get("experts") == expert
    assert not {"timestep_min", "timestep_max"} & {
        key for key, value in found.config.items() if value not in (0, 1)
    }
    if name in ("by its name, low", "by its name, high", "not said"):
        assert row(found, "dit").verdict == "differs"


def test_the_file_of_one_expert_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "low_noise.safetensors").write_bytes(b"")
    values = A14B | {"dit": "low_noise.safetensors"}
    config = translate(ForeignConfig("musubi", values, (tmp_path / "x",), ())).config
    assert config["transformer"]["file"] == [None, str(tmp_path / "low_noise.safetensors")]  # fmt: skip


def test_placeholders_and_options_of_prompts() -> None:
    process = "config.process.0."
    prompts = ["a [trigger] --w 640 --h 384 --m 2 --n [name]", "[name] runs", "x --w 640 --ctrl_img y"]  # fmt: skip
    values = {
        process + "trigger_word": "ohwx",
        process + "sample.prompts": prompts,
        process + "sample.neg": "no [trigger]",
    }
    found = translate(ForeignConfig("ai-toolkit", values, (HERE / "x",), ()))
    assert found.config["samples"] == [
        {"prompt": "a ohwx", "resolution": "384x640", "negative": "ohwx"},
        "ohwx runs",
        "x",
    ]
    assert found.config["sample"]["negative"] == "no ohwx"
    assert row(found, process + "sample.prompts").theirs == prompts


OPTIMIZERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "musubi",
        {
            "optimizer_type": "bitsandbytes.optim.AdEMAMix8bit",
            "optimizer_args": ["betas=0.9,0.99,0.999", "weight_decay=0.1"],
        },
        {
            "name": "bitsandbytes.optim:AdEMAMix8bit",
            "args": {"betas": [0.9, 0.99, 0.999], "weight_decay": 0.1},
        },
    ),
    (
        "musubi",
        {"optimizer_type": "prodigyopt.Prodigy", "optimizer_args": "weight_decay=0.1"},
        {"name": "PRODIGY", "weight_decay": 0.1},
    ),
    (
        "kohya",
        {"optimizer_type": "RAdam", "optimizer_args": ["eps=1e-6", "foreach=False"]},
        {"name": "torch.optim:RAdam", "args": {"eps": 1e-6, "foreach": False}},
    ),
    (
        "diffusion-pipe",
        {
            "optimizer": {
                "type": "StableAdamW",
                "lr": 1e-4,
                "betas": [0.8, 0.9],
            }
        },
        {"name": "ADAMW", "beta1": 0.8, "beta2": 0.9},
    ),
    (
        "diffusion-pipe",
        {"optimizer": {"type": "Lamb", "lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-7}},
        {
            "name": "pytorch_optimizer:Lamb",
            "args": {"betas": [0.8, 0.9], "eps": 1e-7},
        },
    ),
    (
        "onetrainer",
        {
            "optimizer": {
                "optimizer": "DADAPT_LION",
                "beta1": 0.9,
                "beta2": 0.95,
                "weight_decay": 0.1,
                "d0": 1e-5,
                "log_every": 0,
            },
            "learning_rate": 1.0,
        },
        {
            "name": "pytorch_optimizer:DAdaptLion",
            "args": {"betas": [0.9, 0.95], "weight_decay": 0.1, "d0": 1e-5},
        },
    ),
    (
        "simpletuner",
        {"optimizer": "bnb-lion8bit-paged"},
        {"name": "bitsandbytes.optim:PagedLion8bit"},
    ),
]


@pytest.mark.parametrize(("trainer", "keys", "ours"), OPTIMIZERS)
def test_an_optimizer_becomes_its_class_with_its_arguments(
    trainer: str, keys: dict[str, Any], ours: dict[str, Any]
) -> None:
    values = flat_leaves(keys)
    found = translate(ForeignConfig(trainer, values, (CONFIGS / "x",), ()))
    assert found.config["optimizer"] == ours


SCHEDULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "musubi",
        {
            "lr_scheduler": "cosine_with_min_lr",
            "lr_scheduler_min_lr_ratio": 0.1,
            "learning_rate": 2e-4,
        },
        {"learning_rate_scheduler": "COSINE", "learning_rate_min": 2e-5},
    ),
    (
        "musubi",
        {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": 50},
        {"learning_rate_scheduler": "WSD", "learning_rate_decay_steps": 50},
    ),
    (
        "musubi",
        {"lr_scheduler": "warmup_stable_decay", "lr_decay_steps": 0.25},
        {"learning_rate_scheduler": "WSD"},
    ),
    (
        "musubi",
        {"lr_scheduler": "inverse_sqrt", "lr_scheduler_timescale": 40},
        {"learning_rate_scheduler": "INVERSE_SQRT", "learning_rate_timescale": 40},
    ),
    (
        "onetrainer",
        {
            "learning_rate_scheduler": "REX",
            "learning_rate_min_factor": 0.5,
            "learning_rate": 1e-3,
        },
        {"learning_rate_scheduler": "REX", "learning_rate_min": 5e-4},
    ),
    (
        "onetrainer",
        {"learning_rate_scheduler": "CONSTANT", "learning_rate_min_factor": 0.5},
        {"learning_rate_scheduler": "CONSTANT"},
    ),
    (
        "ltx-trainer",
        {"optimization": {"scheduler_type": "linear", "learning_rate": 2e-4}},
        {"learning_rate_scheduler": "LINEAR", "learning_rate_min": 2e-5},
    ),
    (
        "ltx-trainer",
        {
            "optimization": {
                "scheduler_type": "polynomial",
                "scheduler_params": {"power": 2.0, "eta_min": 1e-6},
            }
        },
        {"learning_rate_scheduler": "POLYNOMIAL", "learning_rate_power": 2.0},
    ),
    (
        "ai-toolkit",
        {
            "config": {
                "process": [
                    {
                        "train": {
                            "lr_scheduler": "cosine",
                            "lr_scheduler_params": {"eta_min": 1e-6},
                        }
                    }
                ]
            }
        },
        {"learning_rate_scheduler": "COSINE", "learning_rate_min": 1e-6},
    ),
]


@pytest.mark.parametrize(("trainer", "keys", "ours"), SCHEDULES)
def test_a_schedule_keeps_its_floor_and_its_lengths(
    trainer: str, keys: dict[str, Any], ours: dict[str, Any]
) -> None:
    values = flat_leaves(keys)
    found = translate(ForeignConfig(trainer, values, (CONFIGS / "x",), ()))
    kept = {
        key: value
        for key, value in found.config.items()
        if key.startswith("learning_rate_")
    }
    assert kept == pytest.approx(ours)


LORA_FILES = {
    "two with one strength each": (
        {"base_weights": ["a.safetensors", "b.safetensors"], "base_weights_multiplier": [1.0, 0.5]},
        "base_loras",
        [("a.safetensors", 1.0), ("b.safetensors", 0.5)],
    ),
    "one without": ({"base_weights": "a.safetensors"}, "base_loras", [("a.safetensors", 1.0)]),
    "too few strengths": (
        {"base_weights": ["a.safetensors", "b.safetensors"], "base_weights_multiplier": [2]},
        "base_loras",
        [("a.safetensors", 2.0), ("b.safetensors", 1.0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LORA_FILES)
def test_lora_files_under_the_training(name: str, tmp_path: Path) -> None:
    values, key, entries = LORA_FILES[name]
    theirs = ForeignConfig("musubi", values, (tmp_path / "x.toml",), ())
    config = resolve(translate(theirs).config, {}, None).config
    found = [(lora.file, lora.strength) for lora in getattr(config, key)]
    assert found == [(str(tmp_path / file), strength) for file, strength in entries]


@pytest.mark.parametrize(
    ("trainer", "assistant", "preview"),
    [
        ("ai-toolkit", "config.process.0.model.assistant_lora_path", "config.process.0.model.inference_lora_path"),
        ("simpletuner", "assistant_lora_path", "validation_adapter_path"),
    ],
)  # fmt: skip
def test_a_training_adapter_and_a_lora_of_previews(
    trainer: str, assistant: str, preview: str, tmp_path: Path
) -> None:
    values = {assistant: "train.safetensors", preview: "fast.safetensors"}
    theirs = ForeignConfig(trainer, values, (tmp_path / "x.yaml",), ())
    config = resolve(translate(theirs).config, {}, None).config
    (below,) = config.base_loras
    assert below.training_only
    assert below.file == str(tmp_path / "train.safetensors")
    assert [lora.file for lora in config.sample.loras] == [
        str(tmp_path / "fast.safetensors")
    ]


def test_files_of_text_encoders_and_vae(tmp_path: Path) -> None:
    """Files that lie there are taken, folders and missing files are the base's."""
    for name in ("vae.pth", "llama.safetensors", "umt5.safetensors"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    two = {"vae": "vae.pth", "text_encoder1": "llama.safetensors", "text_encoder2": "none.safetensors"}  # fmt: skip
    one = {"vae": "folder", "t5": "umt5.safetensors"}
    results = []
    for values in (two, one):
        theirs = ForeignConfig("musubi", values, (tmp_path / "x.toml",), ())
        results.append(flatten(translate(theirs).config))
    assert results[0]["vae.file"] == str(tmp_path / "vae.pth")
    llama = str(tmp_path / "llama.safetensors")
    assert results[0]["text_encoder.file"] == [llama, None]
    assert results[1]["text_encoder.file"] == str(tmp_path / "umt5.safetensors")
    assert "vae.file" not in results[1]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"push_to_hub": "true"}, "push_to"),
        (
            {"push_to_hub": "true", "push_checkpoints_to_hub": "true"},
            "push_checkpoints_to",
        ),
        ({}, None),
    ],
)
def test_a_repository_of_theirs_is_ours_only_if_they_upload_to_it(
    values: dict[str, str], key: str | None, tmp_path: Path
) -> None:
    theirs = {"--model_family": "wan", "--model_type": "lora", "--hub_model_id": "me/x"}
    theirs |= {f"--{name}": value for name, value in values.items()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(theirs))
    config = translate(read_foreign_config([path])).config
    uploads = {name: config[name] for name in config if name.startswith("push_")}
    assert uploads == ({key: "me/x"} if key else {})


DISCORD = "https://discord.com/api/webhooks/123/Secret-Token?thread_id=9"
WEBHOOKS = [
    {"webhook_type": "discord", "webhook_url": DISCORD, "message_prefix": "wan"},
    {"webhook_type": "raw", "callback_url": "http://host/Secret"},
    {"webhook_type": "discord", "webhook_url": "https://discord.com/api/webhooks/7/b"},
]


@pytest.mark.parametrize("form", ["file", "list", "text"])
def test_webhooks_become_addresses_that_are_printed_nowhere(
    form: str, tmp_path: Path
) -> None:
    (tmp_path / "hooks.json").write_text(json.dumps(WEBHOOKS))
    value = {"file": "hooks.json", "list": WEBHOOKS, "text": json.dumps(WEBHOOKS)}
    theirs = {
        "model_family": "wan",
        "model_type": "lora",
        "webhook_config": value[form],
    }
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    found = translate(read_foreign_config([tmp_path / "config.json"]))
    assert found.config["notify"] == [
        "discord://123/Secret-Token?thread=9",
        "discord://7/b",
    ]
    assert found.shown().config["notify"] == ["discord://(hidden)"] * 2
    assert "Secret" not in str(found.rows)
    for row in found.rows:
        assert row.ours or row.note or "webhook" not in row.key
    in_studio = found.for_studio()
    assert "notify" not in str([in_studio.config, [row.ours for row in in_studio.rows]])
    assert "environment variable" in str(in_studio.rows)


def test_what_is_no_discord_webhook_is_a_note(tmp_path: Path) -> None:
    values = {
        "webhook_config.webhook_type": "discord",
        "webhook_config.webhook_url": "https://example.com/Secret",
    }
    found = translate(ForeignConfig("simpletuner", values, (tmp_path / "x",), ()))
    assert "notify" not in found.config
    notes = [row.note for row in found.rows if row.key.endswith("webhook_url")]
    assert "not the URL of a Discord webhook" in notes[0]
    assert "Secret" not in str(found.rows)


PROMPT_LINES = (
    "# those of the previews\n"
    "a red ball --i ball.png --w 832 --h 480 --f 80 --d 3 --s 20 --l 5 --ci c.png\n\n"
    "a dog's ball --n bad\n"
)


@pytest.mark.parametrize("task", ["t2v-1.3B", "i2v-14B"])
def test_a_file_of_prompts_becomes_prompts(task: str, tmp_path: Path) -> None:
    prompts = tmp_path / "previews.txt"
    prompts.write_text(PROMPT_LINES)
    command = (
        f"accelerate launch wan_train_network.py --task {task} --dit x --network_dim 8"
    )
    (tmp_path / "run.sh").write_text(f"{command} --sample_prompts previews.txt")
    found = translate(read_foreign_config([tmp_path / "run.sh"], within=tmp_path))
    first, second = found.config["samples"]
    assert first.pop("image", None) == (
        str(tmp_path / "ball.png") if task == "i2v-14B" else None
    )
    assert first == {
        "prompt": "a red ball",
        "resolution": "480x832",
        "frames": 81,
        "seed": 3,
        "steps": 20,
        "guidance": 5.0,
    }
    assert second == {"prompt": "a dog's ball", "negative": "bad"}

    # passed with the config, as in the studio
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "run.sh", tmp_path / "config")
    paths = [prompts, tmp_path / "config" / "run.sh"]
    again = translate(read_foreign_config(paths, within=tmp_path / "config"))
    assert [prompt["prompt"] for prompt in again.config["samples"]] == [
        "a red ball",
        "a dog's ball",
    ]


def test_a_restricted_import_says_nothing_of_files_elsewhere(tmp_path: Path) -> None:
    """Whether they exist makes no difference, however they are named."""
    root = tmp_path / "root"
    root.mkdir()
    files = ("dit.safetensors", "vae.safetensors", "t5.pth", "lora.safetensors")
    full = tmp_path / "folder-that-is-full"
    full.mkdir()
    for name in files:
        (full / name).write_bytes(b"")
    (tmp_path / "folder-that-is-void").mkdir()
    for ending in ("full", "void"):
        (root / f"link-that-is-{ending}").symlink_to(
            tmp_path / f"folder-that-is-{ending}"
        )

    def found(folder: str) -> str:
        command = (
            "accelerate launch wan_train_network.py --task t2v-1.3B --network_dim 8 "
            f"--dit {folder}/dit.safetensors --vae {folder}/vae.safetensors "
            f"--t5 {folder}/t5.pth --network_weights {folder}/lora.safetensors"
        )
        (root / "run.sh").write_text(command)
        translated = translate(read_foreign_config([root / "run.sh"], within=root))
        return str(translated)

    for place in (f"{tmp_path}/folder", "../folder", "link"):
        of_full = found(f"{place}-that-is-full")
        assert of_full.replace("-full", "-void") == found(f"{place}-that-is-void")
    assert found(str(tmp_path / ("x" * 300)))


def test_a_file_of_prompts_that_is_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "previews.txt").write_text("a secret\n")
    root = tmp_path / "root"
    root.mkdir()
    command = "accelerate launch wan_train_network.py --task t2v-1.3B --network_dim 8"
    (root / "run.sh").write_text(f"{command} --sample_prompts ../previews.txt")
    found = translate(read_foreign_config([root / "run.sh"], within=root))
    assert "samples" not in found.config
    assert "secret" not in str(found.rows)
    assert "no such text file" in str(found.rows)
    with pytest.raises(VideotuneError, match="lists the trainers"):
        read_foreign_config([root / "run.sh", HERE / "__init__.py"])


LTX_2 = {
    "ltx-trainer": [("model.model_path", "/models/ltx-2.3-22b-dev.safetensors")],
    "ai-toolkit": [
        ("config.process.0.model.arch", "ltx2.3"),
        ("config.process.0.model.name_or_path", "Lightricks/LTX-2.3"),
    ],
    "diffusion-pipe": [
        ("model.type", "ltx2"),
        ("model.diffusion_model", "/models/ltx-2.3-22b-dev.safetensors"),
    ],
    "simpletuner": [("model_family", "ltxvideo2"), ("model_flavour", "2.3-dev")],
}
"""How trainers name LTX-2.3: keys and values."""


@pytest.mark.parametrize("trainer", LTX_2)
def test_ltx_2_as_each_trainer_names_it(trainer: str) -> None:
    def base_of(spelling: str) -> dict[str, Any]:
        values = {key: value.replace("2.3", spelling) for key, value in LTX_2[trainer]}
        config = translate(ForeignConfig(trainer, values, (HERE / "x",), ())).config
        return {
            key: config[key] for key in ("family", "base_model_name") if key in config
        }

    assert base_of("2.3") == {
        "family": "ltx2",
        "base_model_name": "diffusers/LTX-2.3-Diffusers",
    }
    assert base_of("2.5")["base_model_name"] == "Lightricks/LTX-2.5-Diffusers"
    assert base_of("2.3-distilled") == {"family": "ltx2"}


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ltx-video-2b-v0.9.1.safetensors", "Lightricks/LTX-Video"),
        ("ltxv-13b-0.9.7-dev.safetensors", "Lightricks/LTX-Video-0.9.7-dev"),
        ("ltx-2-19b-dev.safetensors", "Lightricks/LTX-2"),
    ],
)
def test_ltx_video_2b_is_not_taken_for_ltx_2(name: str, base: str) -> None:
    found = given("ltx-trainer", model__model_path=f"/models/{name}")
    assert found.config["base_model_name"] == base


def test_conditions_of_ltx_2_that_videotune_does_not_train_are_said() -> None:
    found = imported("ltx-trainer/sound.yaml")
    start = "training_strategy.video.conditions"
    suffix = row(found, f"{start}.1.type")
    assert not suffix.ours
    assert suffix.verdict == "none"
    assert suffix.note
    assert len(row(found, f"{start}.0.type").ours["conditions"]) == 2
    assert "first_frame_probability" not in found.config

    without = given("ltx-trainer", training_strategy__name="flexible")
    assert without.config["first_frame_probability"] == 0
    older = given("ltx-trainer", model__model_path="/models/ltx-2-19b-dev.safetensors")
    assert older.config["first_frame_probability"] == 0.1


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["to_k", "to_q", "to_v", "to_out.0"], "differs"),
        ([f"attn{i}.to_{part}" for i in (1, 2) for part in ("k", "q", "v", "out.0")], "translated"),
    ],
)  # fmt: skip
def test_lora_targets_of_ltx_2_that_reach_sound_are_said(
    names: list[str], verdict: str
) -> None:
    values = {
        "model.model_path": "/models/ltx-2-19b-dev.safetensors",
        "lora.target_modules": names,
    }
    found = translate(ForeignConfig("ltx-trainer", values, (HERE / "x",), ()))
    targets = row(found, "lora.target_modules")
    assert targets.ours == {"lora.targets": "attention"}
    assert targets.verdict == verdict


def test_conditions_of_ltx_2_in_simpletuner() -> None:
    found = given(
        "simpletuner",
        model_family="ltxvideo2",
        ltx2_first_frame_conditioning_probability=0.5,
        ltx2_prefix_conditioning_probability=0.25,
        ltx2_prefix_conditioning_frames=2,
        ltx2_suffix_conditioning_probability=0.5,
    )
    assert found.config["first_frame_probability"] == 0.5
    assert found.config["conditions"] == [
        {"type": "prefix", "probability": 0.25, "latent_frames": 2}
    ]
    assert row(found, "ltx2_suffix_conditioning_probability").note

    never = given(
        "simpletuner", model_family="ltxvideo2", ltx2_prefix_conditioning_probability=0
    )
    assert "conditions" not in never.config


HUNYUAN_15 = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"


@pytest.mark.parametrize(
    ("trainer", "keys", "base", "targets"),
    [
        (
            "musubi",
            {
                "script": "hv_1_5_train_network.py",
                "network_module": "networks.lora_hv_1_5",
                "dit": "hunyuanvideo1.5_720p_i2v_fp16.safetensors",
                "task": "i2v",
            },
            "720p_i2v",
            "all",
        ),
        (
            "musubi",
            {
                "script": "hv_1_5_train_network.py",
                "network_module": "networks.lora_hv_1_5",
                "dit": "transformer/480p_t2v/diffusion_pytorch_model.safetensors",
                "task": "t2v",
            },
            "480p_t2v",
            "all",
        ),
        (
            "musubi",
            {"script": "hv_1_5_train_network.py", "dit": "dit.safetensors"},
            None,
            None,
        ),
        (
            "diffusion-pipe",
            {
                "model.type": "hunyuan_video_15",
                "model.diffusers_path": "/models/HunyuanVideo-1.5-Diffusers-480p_t2v",
                "adapter.type": "lora",
            },
            "480p_t2v",
            "linear",
        ),
    ],
)
def test_hunyuan_video_15_by_what_names_it(
    trainer: str, keys: dict[str, Any], base: str | None, targets: str | None
) -> None:
    """Without a size in a name only the family is known."""
    config = given(trainer, **keys).config
    assert config["family"] == "hunyuan_video15"
    expected = HUNYUAN_15 + base if base else None
    assert config.get("base_model_name") == expected
    assert config.get("lora", {}).get("targets") == targets


@pytest.mark.parametrize(
    ("task", "base", "differs"),
    [
        ("k5-lite-t2v-5s-sd", "Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", ""),
        (
            "k5-lite-t2v-5s-pretrain-sd",
            "Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers",
            "",
        ),
        ("k5-lite-i2v-5s-sd", "Kandinsky-5.0-I2V-Lite-5s-Diffusers", "channels"),
        ("k5-lite-t2v-10s-sd", "", "sparse attention"),
        ("k5-pro-t2v-5s-sd", "", ""),
    ],
)
def test_kandinsky_5_of_musubi_tuner(
    task: str, base: str, differs: str, tmp_path: Path
) -> None:
    """Its example's numbers (docs/kandinsky5.md), with a Lite task."""
    values = {
        "script": "kandinsky5_train_network.py",
        "task": task,
        "dit": "weights/kandinsky5lite.safetensors",
        "text_encoder_qwen": "Qwen/Qwen2.5-VL-7B-Instruct",
        "text_encoder_clip": "openai/clip-vit-large-patch14",
        "learning_rate": 1e-4,
        "network_module": "networks.lora_kandinsky",
        "network_dim": 32,
        "network_alpha": 32,
        "timestep_sampling": "shift",
        "discrete_flow_shift": 5.0,
        "scheduler_scale": 10.0,
        "max_train_epochs": 50,
    }
    found = translate(ForeignConfig("musubi", values, (tmp_path / "x",), ()))
    config = found.config
    assert config["family"] == "kandinsky5"
    expected = f"kandinskylab/{base}" if base else None
    assert config.get("base_model_name") == expected
    assert config["lora"] == {
        "rank": 32, "alpha": 32, "targets": "linear", "variant": "LORA",
    }  # fmt: skip
    assert config["sample"]["shift"] == 10
    assert config["timestep_shift"] == 5
    assert (row(found, "task").verdict == "differs") == bool(differs)
    assert differs in row(found, "task").note
