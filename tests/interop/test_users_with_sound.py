"""The config that a user of each of four trainers has for a model that makes sound:
imported, and trained for two steps on a tiny base with clips that have sound.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_line import Bases, Patch, run
from tests.support.sounding_clips import write_sounding_clips
from videotune.commands.import_config import import_config
from videotune.files import read_json
from videotune.runs.journal import read_journal

pytestmark = pytest.mark.slow

SMALL = (
    "steps=2", "epochs=null", "resolution=32x32", "video_config.frames=17", "train_dtype=FLOAT_32", "weight_dtype=auto",
    "transformer.weight_dtype=auto", "text_encoder.weight_dtype=auto", "layer_offload_fraction=0", "optimizer=ADAMW",
    "save_every=0", "validate_every=0", "sample.steps=2", "sample.frames=17", "sample.resolution=32x32",
    "sample_metrics.budget=0", "warmup_steps=0", "dataloader_threads=0", "batch_size=1",
    "gradient_accumulation_steps=1", "sample_after=2",
)  # fmt: skip
"""What makes a run of minutes one of seconds; everything else is as imported."""


@pytest.fixture
def home(tmp_path: Path, tiny_bases: Bases) -> Path:
    """A user's folder: clips with their captions beside them, and a base."""
    folder = tmp_path / "home"
    data = write_sounding_clips(tmp_path / "data", sounding=3, silent=1)
    (folder / "clips").mkdir(parents=True)
    for path in (*(data / "videos").glob("*"), *(data / "captions").glob("*")):
        path.rename(folder / "clips" / path.name)
    (folder / "LTX-2.3-Diffusers").symlink_to(tiny_bases("ltx2", "2.3"))
    return folder


def ltx_trainer(home: Path, *, video: bool, audio: bool) -> list[Path]:
    condition = {
        (True, False): {"type": "audio_to_video", "audio": "clips/clip-0.mov"},
        (False, True): {"type": "video_to_audio", "video": "clips/clip-0.mov"},
    }.get((video, audio))
    prompt = {"prompt": "a clip", "conditions": [condition] if condition else []}
    attention = ["to_k", "to_q", "to_v", "to_out.0"]
    sound = [f"audio_attn{i}.{name}" for i in (1, 2) for name in attention]
    config = {
        "model": {"model_path": "ltx-2.3-22b-dev.safetensors", "training_mode": "lora"},
        "lora": {"rank": 8, "alpha": 8, "target_modules": attention if video else sound},
        "training_strategy": {
            "name": "flexible",
            "video": {"is_generated": video, "latents_dir": "latents"},
            "audio": {"is_generated": audio, "latents_dir": "audio_latents"},
        },
        "optimization": {"learning_rate": 1e-4, "steps": 2000},
        "data": {"preprocessed_data_root": "prepared"},
        "validation": {"samples": [prompt], "interval": 100, "audio_cfg_scale": 7.0},
        "flow_matching": {"timestep_sampling_mode": "shifted_logit_normal"},
    }  # fmt: skip
    path = home / "ltx.yaml"
    path.write_text(yaml.safe_dump(config))
    return [path]


def joint(home: Path) -> list[Path]:
    return ltx_trainer(home, video=True, audio=True)


def foley(home: Path) -> list[Path]:
    return ltx_trainer(home, video=False, audio=True)


def given_sound(home: Path) -> list[Path]:
    return ltx_trainer(home, video=True, audio=False)


def ai_toolkit(home: Path) -> list[Path]:
    dataset = {
        "folder_path": "clips", "caption_ext": "txt", "num_frames": 17, "resolution": [32], "fps": 24,
        "do_audio": True, "audio_normalize": True, "audio_preserve_pitch": True,
    }  # fmt: skip
    process = {
        "type": "sd_trainer", "training_folder": "out", "network": {"type": "lora", "linear": 8, "linear_alpha": 8},
        "datasets": [dataset],
        "train": {"batch_size": 1, "steps": 2000, "noise_scheduler": "flowmatch", "optimizer": "adamw8bit", "lr": 1e-4,
                  "timestep_type": "weighted", "audio_loss_multiplier": 0.5, "dtype": "bf16"},
        "model": {"name_or_path": "LTX-2.3-Diffusers", "arch": "ltx2.3", "quantize": True},
        "sample": {"sample_every": 250, "prompts": ["a clip"], "num_frames": 121, "fps": 24},
    }  # fmt: skip
    path = home / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {"job": "extension", "config": {"name": "x", "process": [process]}}
        )
    )
    return [path]


def simpletuner(home: Path) -> list[Path]:
    audio = {"auto_split": True, "sample_rate": 16000, "channels": 2, "duration_interval": 3.0}  # fmt: skip
    backend = {
        "id": "clips", "type": "local", "dataset_type": "video", "instance_data_dir": "clips", "repeats": 0,
        "caption_strategy": "textfile", "resolution": 32, "resolution_type": "pixel_area",
        "video": {"num_frames": 17}, "audio": audio,
    }  # fmt: skip
    (home / "multidatabackend.json").write_text(json.dumps([backend]))
    keys = {
        "--model_family": "ltxvideo2", "--model_flavour": "2.3-dev", "--model_type": "lora", "--lora_rank": 8,
        "--pretrained_model_name_or_path": "LTX-2.3-Diffusers", "--data_backend_config": "multidatabackend.json",
        "--learning_rate": "1e-4", "--max_train_steps": 500, "--train_batch_size": 1, "--optimizer": "adamw_bf16",
        "--ltx2_validation_audio_guidance": 7.0,
    }  # fmt: skip
    path = home / "config.json"
    path.write_text(json.dumps(keys))
    return [path]


def musubi(home: Path) -> list[Path]:
    (home / "dataset.toml").write_text(
        "[general]\nresolution = [32, 32]\nbatch_size = 1\nenable_bucket = true\ncaption_extension = '.txt'\n"
        "[[datasets]]\nvideo_directory = 'clips'\ncache_directory = 'cache'\ntarget_frames = [17]\n"
    )
    path = home / "train.sh"
    path.write_text(
        "accelerate launch src/musubi_tuner/ltx2_train_network.py --dataset_config dataset.toml --ltx2_mode av "
        "--ltx2_checkpoint ltx-2.3-22b-dev.safetensors --gemma_root gemma --gemma_load_in_8bit --fp8_base "
        "--separate_audio_buckets --audio_loss_weight 0.5 --network_module networks.lora_ltx2 --network_dim 8 "
        "--network_alpha 8 --learning_rate 1e-4 --timestep_sampling shifted_logit_normal --max_train_steps 500\n"
    )
    return [path]


BOTH = ["video", "sound"]
USERS: dict[str, tuple[Callable[[Path], list[Path]], list[str], dict[str, Any]]] = {
    "ltx-trainer, both": (joint, BOTH, {}),
    "ltx-trainer, sound": (foley, ["sound"], {}),
    "ltx-trainer, video": (given_sound, ["video"], {}),
    "ai-toolkit": (ai_toolkit, BOTH, {"loss_weight": 0.5}),
    "simpletuner": (simpletuner, BOTH, {}),
    "musubi": (musubi, BOTH, {"loss_weight": 0.5}),
}
"""How a user writes the config, what it learns, and the keys of sound."""


@pytest.mark.parametrize("user", USERS)
def test_a_user_with_sound_goes_on_here(
    user: str, home: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write, generate, sound = USERS[user]
    ours = tmp_path / "ours.json"
    result = import_config(write(home), out=ours)
    assert not [row.key for row in result.rows if row.verdict == "unknown"]
    config = read_json(ours)
    assert config["generate"] == generate
    assert config.get("sound", {}) == sound
    assert config["lora"]["rank"] == 8

    out = tmp_path / "run"
    base = f"base_model_name={home / 'LTX-2.3-Diffusers'}"
    options: dict[str, Any] = {"set": [*SMALL, base]}
    if "datasets" not in config:  # latents there, which the trainer made before
        options["data"] = home / "clips"
    if generate == ["sound"]:
        options["allow_skips"] = 1  # a clip has no sound
    assert run("train", config=ours, out=out, **options) == 0

    steps = [line for line in read_journal(out) if line["kind"] == "step"]
    assert len(steps) == 2
    assert any("sound" in line for line in steps) == (generate == BOTH)
    assert read_json(out / "exports.json")
    assert list((out / "samples").rglob("*.mp4"))
