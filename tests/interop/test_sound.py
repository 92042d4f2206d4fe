"""Sound in configs of other trainers: what a run learns of video and sound, and the files
that its previews are given.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from videotune.config.resolve import resolve
from videotune.config.suggestions import flat_leaves
from videotune.interop.foreign_config import ForeignConfig
from videotune.interop.translate import Imported, translate
from videotune.interop.translated_key import TranslatedKey
from videotune.models.registry import find

HERE = Path(__file__).parent
LTX = {"model_path": "/models/ltx-2.3-22b-dev.safetensors"}
BOTH = ["video", "sound"]
ATTENTION = ["to_k", "to_q", "to_v", "to_out.0"]


def translated(trainer: str, keys: Mapping[str, Any], folder: Path = HERE) -> Imported:
    """Translate a config, and check that what it becomes resolves."""
    values = flat_leaves(keys)
    found = translate(ForeignConfig(trainer, values, (folder / "config",), ()))
    assert not [row.key for row in found.rows if row.verdict == "unknown"]
    family = found.config.get("family")
    resolve(found.config, {}, find(family).spec if family else None)
    return found


def row(found: Imported, key: str) -> TranslatedKey:
    return next(row for row in found.rows if row.key == key)


def flexible(**modalities: Any) -> dict[str, Any]:
    return {"model": LTX, "training_strategy": {"name": "flexible", **modalities}}


def modality(*, is_generated: bool, **keys: Any) -> dict[str, Any]:
    return {"is_generated": is_generated, "latents_dir": "latents", **keys}


LEARNT = modality(is_generated=True)
GIVEN = modality(is_generated=False)


@pytest.mark.parametrize(
    ("modalities", "generate"),
    [
        ({"video": LEARNT}, None),
        ({"video": LEARNT, "audio": LEARNT}, BOTH),
        ({"video": LEARNT, "audio": GIVEN}, ["video"]),
        ({"video": GIVEN, "audio": LEARNT}, ["sound"]),
        ({"audio": LEARNT}, None),
        ({"video": GIVEN, "audio": GIVEN}, None),
        ({"video": GIVEN}, None),
        ({"audio": GIVEN}, None),
    ],
)
def test_what_the_strategy_flexible_generates_is_what_is_learnt(
    modalities: dict[str, Any], generate: list[str] | None
) -> None:
    found = translated("ltx-trainer", flexible(**modalities))
    assert found.config.get("generate") == generate
    assert "sound" not in found.config, "both losses count alike, as here"
    for name in modalities:
        assert row(found, f"training_strategy.{name}.is_generated").note
    if modalities == {"audio": LEARNT}:
        only_sound = row(found, "training_strategy.audio.is_generated")
        assert only_sound.verdict == "differs"
        assert "generate [sound]" in only_sound.note


@pytest.mark.parametrize("name", ["text_to_video", None])
@pytest.mark.parametrize("with_audio", [True, False])
def test_the_older_strategy_has_sound_if_it_says_so(
    name: str | None, with_audio: bool
) -> None:
    strategy = {"with_audio": with_audio, "audio_latents_dir": "audio"}
    if name:
        strategy["name"] = name
    found = translated("ltx-trainer", {"model": LTX, "training_strategy": strategy})
    assert found.config.get("generate") == (BOTH if with_audio else None)
    said = row(found, "training_strategy.with_audio").verdict
    assert said == ("differs" if with_audio else "none")
    assert row(found, "training_strategy.audio_latents_dir").note


SOUND_ENDS = ["audio_attn1.to_k", "audio_ff.net.2", "video_to_audio_attn.to_q"]


@pytest.mark.parametrize(
    ("modalities", "names", "targets"),
    [
        ({"video": LEARNT, "audio": LEARNT}, ATTENTION, "attention"),
        ({"video": GIVEN, "audio": LEARNT}, SOUND_ENDS, SOUND_ENDS),
        ({"video": LEARNT, "audio": GIVEN}, [*ATTENTION, "ff.net.2"], [*ATTENTION, "ff.net.2"]),
        ({"video": LEARNT}, ATTENTION, "attention"),
        ({"video": LEARNT}, SOUND_ENDS, None),
        ({"audio": LEARNT}, SOUND_ENDS, None),
    ],
)  # fmt: skip
def test_with_sound_the_ends_of_paths_name_the_same_modules_here(
    modalities: dict[str, Any], names: list[str], targets: Any
) -> None:
    keys = flexible(**modalities) | {"lora": {"rank": 8, "target_modules": names}}
    found = translated("ltx-trainer", keys)
    assert found.config["lora"].get("targets") == targets
    reads_sound = "generate" in found.config
    differs = row(found, "lora.target_modules").verdict == "differs"
    assert differs == (targets == "attention" and not reads_sound)


def test_conditions_of_a_sound_or_of_a_given_video_are_left_out_and_said() -> None:
    prefix = {"type": "prefix", "temporal_boundary": 3, "probability": 0.5}
    sound = modality(is_generated=True, conditions=[prefix])
    found = translated("ltx-trainer", flexible(video=LEARNT, audio=sound))
    assert "conditions" not in found.config
    assert row(found, "training_strategy.audio.conditions.0.type").verdict == "differs"
    assert row(found, "training_strategy.audio.conditions.0.probability").note

    video = modality(is_generated=False, conditions=[prefix])
    found = translated("ltx-trainer", flexible(video=video, audio=LEARNT))
    assert found.config["generate"] == ["sound"]
    assert "conditions" not in found.config
    assert row(found, "training_strategy.video.conditions.0.type").note


@pytest.mark.parametrize(
    ("modalities", "samples"),
    [
        ({"video": LEARNT, "audio": LEARNT}, ["a", "b", "c"]),
        ({"video": LEARNT}, ["a", "b", "c"]),
        ({"video": GIVEN, "audio": LEARNT}, [{"prompt": "b", "video": "clip.mp4"}]),
        ({"video": LEARNT, "audio": GIVEN}, [{"prompt": "c", "sound": "song.wav"}]),
    ],
)
def test_previews_are_given_the_files_that_are_here(
    modalities: dict[str, Any], samples: list[Any], tmp_path: Path
) -> None:
    for name in ("clip.mp4", "song.wav"):
        (tmp_path / name).write_bytes(b"")
    prompts = [
        {"prompt": "a", "conditions": [{"type": "video_to_audio", "video": "gone.mp4"}]},
        {"prompt": "b", "conditions": [{"type": "video_to_audio", "video": "clip.mp4"}]},
        {"prompt": "c", "conditions": [{"type": "audio_to_video", "audio": "song.wav"}]},
    ]  # fmt: skip
    keys = {**flexible(**modalities), "validation": {"samples": prompts}}
    found = translated("ltx-trainer", keys, tmp_path)
    expected = [
        {**one, **{k: str(tmp_path / v) for k, v in one.items() if k != "prompt"}}
        if isinstance(one, dict)
        else one
        for one in samples
    ]
    assert found.config["samples"] == expected
    is_less = len(samples) < len(prompts)
    assert ("left out" in row(found, "validation.samples.0.prompt").note) == is_less


def test_without_any_file_the_previews_are_of_the_clips_captions() -> None:
    prompts = {"validation": {"prompts": ["a", "b"], "video_dims": [64, 64, 9]}}
    keys = flexible(video=GIVEN, audio=LEARNT) | prompts
    found = translated("ltx-trainer", keys)
    assert "samples" not in found.config
    said = row(found, "validation.prompts")
    assert said.verdict == "none"
    assert said.note


def test_the_guidance_of_previews_is_that_of_what_they_make() -> None:
    scales = {"validation": {"video_cfg_scale": 3.0, "audio_cfg_scale": 7.0}}
    for video, guidance in ((LEARNT, 3), (GIVEN, 7)):
        keys = flexible(video=video, audio=LEARNT) | scales
        found = translated("ltx-trainer", keys)
        assert found.config["sample"]["guidance"] == guidance


def ai_toolkit(arch: str, *datasets: dict[str, Any], **train: Any) -> dict[str, Any]:
    process: dict[str, Any] = {"model": {"arch": arch, "name_or_path": "x"}}
    process["train"] = {"batch_size": 1, **train}
    process["datasets"] = [
        {"folder_path": f"clips-{i}", "num_frames": 33, **keys}
        for i, keys in enumerate(datasets)
    ]
    return {"config": {"process": [process]}}


DATASET = "config.process.0.datasets.0."


@pytest.mark.parametrize("arch", ["ltx2", "ltx2.3"])
def test_ai_toolkits_sound(arch: str) -> None:
    keys = ai_toolkit(
        arch, {"audio_normalize": True}, {"do_audio": True}, audio_loss_multiplier=0.5
    )
    found = translated("ai-toolkit", keys)
    assert found.config["generate"] == BOTH
    assert found.config["sound"] == {"loss_weight": 0.5}
    said = row(found, "config.process.0.datasets.1.do_audio")
    assert said.verdict == "differs"
    assert row(found, f"{DATASET}audio_normalize").note

    silent = translated("ai-toolkit", ai_toolkit(arch, {}, audio_loss_multiplier=0.5))
    assert {"generate", "sound"}.isdisjoint(silent.config)


def test_sound_of_ai_toolkit_is_of_models_that_make_it() -> None:
    keys = ai_toolkit("wan21:1b", {"do_audio": True}, audio_loss_multiplier=2)
    found = translated("ai-toolkit", keys)
    assert {"generate", "sound"}.isdisjoint(found.config)
    assert row(found, f"{DATASET}do_audio").verdict == "none"


def test_a_weight_of_0_is_no_weight_here() -> None:
    keys = ai_toolkit("ltx2", {"do_audio": True}, audio_loss_multiplier=0.0)
    found = translated("ai-toolkit", keys)
    assert "sound" not in found.config
    said = row(found, "config.process.0.train.audio_loss_multiplier")
    assert said.verdict == "differs"


@pytest.mark.parametrize(
    ("do_audio", "shrink", "stretch"),
    [(True, None, False), (True, True, False), (True, False, False), (False, True, True)],
)  # fmt: skip
def test_clips_with_sound_are_not_squeezed(
    do_audio: bool, shrink: bool | None, stretch: bool
) -> None:
    """A window at another speed would train without its sound."""
    dataset = {"do_audio": do_audio}
    if shrink is not None:
        dataset["shrink_video_to_frames"] = shrink
    found = translated("ai-toolkit", ai_toolkit("ltx2", dataset))
    assert found.config["video_config"]["stretch"] == stretch
    said = row(found, f"{DATASET}shrink_video_to_frames")
    assert (said.verdict == "differs") == (shrink is not False)


def simpletuner(*backends: dict[str, Any]) -> dict[str, Any]:
    entries = [
        {"id": str(i), "dataset_type": "video", "instance_data_dir": f"clips-{i}", **keys}
        for i, keys in enumerate(backends)
    ]  # fmt: skip
    return {"model_family": "ltxvideo2", "data_backend_config": entries}


@pytest.mark.parametrize(
    ("backend", "generate"),
    [
        ({}, None),
        ({"audio": {"auto_split": True, "channels": 2}}, BOTH),
        ({"audio": {"sample_rate": 16000}}, BOTH),
        ({"audio": {"allow_zero_audio": True}}, BOTH),
        ({"audio": {}}, BOTH),
        ({"audio": {"auto_split": False, "channels": 2}}, None),
        ({"audio": {"channels": 2}, "s2v_datasets": ["sounds"]}, None),
    ],
)
def test_simpletuners_section_audio_of_a_dataset_of_videos(
    backend: dict[str, Any], generate: list[str] | None
) -> None:
    found = translated("simpletuner", simpletuner(backend))
    assert found.config.get("generate") == generate
    if generate:
        said = row(found, "data_backend_config.0.audio.auto_split")
        assert said.verdict == "differs"
        assert said.given == ("auto_split" in backend["audio"])


def test_a_dataset_of_sounds_without_videos_is_left_out_and_said() -> None:
    sounds = {"dataset_type": "audio", "audio": {"audio_only": True, "channels": 2}}
    found = translated("simpletuner", simpletuner({}, sounds))
    assert len(found.config["datasets"]) == 1
    assert "generate" not in found.config
    for key in ("instance_data_dir", "audio.audio_only"):
        assert row(found, f"data_backend_config.1.{key}").verdict == "differs"


def musubi(**keys: Any) -> dict[str, Any]:
    return {
        "script": "ltx2_train_network.py",
        "network_module": "networks.lora_ltx2",
        "ltx2_checkpoint": "/models/ltx-2.3-22b-dev.safetensors",
        **keys,
    }


@pytest.mark.parametrize("key", ["ltx2_mode", "ltx_mode"])
@pytest.mark.parametrize(
    ("mode", "generate"), [("av", BOTH), ("va", BOTH), ("video", None), ("audio", None)]
)
def test_the_mode_of_musubis_fork(
    key: str, mode: str, generate: list[str] | None
) -> None:
    found = translated("musubi", musubi(**{key: mode, "audio_loss_weight": 2.0}))
    assert found.config["base_model_name"] == "diffusers/LTX-2.3-Diffusers"
    assert found.config.get("generate") == generate
    weight = {"loss_weight": 2} if generate else None
    assert found.config.get("sound") == weight
    assert (row(found, key).verdict == "differs") == (mode == "audio")


@pytest.mark.parametrize(
    ("keys", "targets"),
    [
        ({}, "attention"),
        ({"lora_target_preset": "v2v"}, "linear"),
        ({"network_args": ["lora_target_preset=audio"]}, "sound"),
        ({"network_module": "networks.lora_wan"}, "linear"),
    ],
)
def test_the_targets_of_musubis_fork(keys: dict[str, Any], targets: str) -> None:
    found = translated("musubi", musubi(ltx2_mode="av", **keys))
    assert found.config["lora"]["targets"] == targets
