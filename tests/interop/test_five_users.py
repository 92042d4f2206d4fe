"""The config that a user of each of five trainers has for Wan, with the files that it
names: imported, and trained for two steps on a tiny base. What is lost is listed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from tests.support.clips import noise, write_dataset
from tests.support.command_line import Bases, Patch, run
from tests.support.lora_files import peft_file
from tests.support.part_files import authors_umt5, stored
from videotune.commands.import_config import import_config
from videotune.exporter.single_file_export import in_one_layout
from videotune.files import read_json
from videotune.models.wan import Wan

pytestmark = pytest.mark.slow

SMALL = (
    "steps=2", "epochs=null", "resolution=32x32", "video_config.frames=5", "train_dtype=FLOAT_32", "weight_dtype=auto",
    "transformer.weight_dtype=auto", "text_encoder.weight_dtype=auto", "layer_offload_fraction=0", "optimizer=ADAMW",
    "save_every=0", "validate_every=0", "sample.steps=1", "sample.frames=5", "sample.resolution=32x32",
    "sample.guidance=1", "sample_metrics.budget=0", "warmup_steps=0", "dataloader_threads=0", "compile=false",
    "batch_size=1", "gradient_accumulation_steps=1",
)  # fmt: skip
"""What makes a run of minutes one of seconds; everything else is as imported."""


@pytest.fixture
def home(tmp_path: Path, tiny_bases: Bases, tiny_family: Callable[..., Any]) -> Path:
    """A user's folder: clips, a base, its parts as single files, LoRA files, an image."""
    folder = tmp_path / "home"
    folder.mkdir()
    clips = {f"clip {letter}.mp4": noise(9, 32, 32, seed=i) for i, letter in enumerate("abcd")}  # fmt: skip
    captions = {name: f"ohwx, a road {name[5]}" for name in clips}
    data = write_dataset(tmp_path / "data", clips, captions, fps=16)
    (folder / "clips").mkdir()
    for path in (*(data / "videos").glob("*"), *(data / "captions").glob("*")):
        path.rename(folder / "clips" / path.name)

    base = tiny_bases("wan")
    (folder / "Wan2.1-T2V-1.3B-Diffusers").symlink_to(base)
    other = Wan.tiny(tmp_path / "other", seed=4)
    transformer = in_one_layout(stored(other / "transformer"), Wan.original_names)
    save_file(transformer, folder / "wan2.1_t2v_1.3B.safetensors")
    encoder = stored(other / "text_encoder")
    encoder.pop("encoder.embed_tokens.weight", None)
    torch.save(authors_umt5(encoder), folder / "models_t5_umt5-xxl-enc.pth")
    save_file(stored(other / "vae"), folder / "wan_2.1_vae.safetensors")
    for name in ("style", "turbo", "fast"):
        peft_file(tiny_family("wan"), folder / f"{name}.safetensors", alpha=0.1)
    Image.new("RGB", (32, 32)).save(folder / "first.png")
    return folder


def musubi(home: Path) -> list[Path]:
    (home / "dataset.toml").write_text(
        "[general]\nresolution = [32, 32]\nbatch_size = 1\nenable_bucket = true\ncaption_extension = '.txt'\n"
        "[[datasets]]\nvideo_directory = 'clips'\ncache_directory = 'cache'\ntarget_frames = [1, 5]\n"
        "frame_extraction = 'head'\nnum_repeats = 2\n"
    )
    script = home / "train.sh"
    script.write_text(
        "accelerate launch src/musubi_tuner/wan_train_network.py --task t2v-1.3B "
        "--dit wan2.1_t2v_1.3B.safetensors --vae wan_2.1_vae.safetensors --t5 models_t5_umt5-xxl-enc.pth "
        "--base_weights style.safetensors --base_weights_multiplier 0.5 --dataset_config dataset.toml --sdpa "
        "--mixed_precision bf16 --fp8_base --network_module networks.lora_wan --network_dim 8 --network_alpha 4 "
        "--optimizer_type pytorch_optimizer.Lion --optimizer_args weight_decay=0.02 --learning_rate 2e-4 "
        "--lr_scheduler cosine_with_min_lr --lr_scheduler_min_lr_ratio 0.1 --timestep_sampling shift "
        "--discrete_flow_shift 3.0 --max_train_epochs 16 --seed 42 --gradient_checkpointing --output_dir out\n"
    )
    return [script]


def ai_toolkit(home: Path) -> list[Path]:
    process = {
        "type": "sd_trainer", "training_folder": "out", "trigger_word": "ohwx",
        "network": {"type": "lora", "linear": 8, "linear_alpha": 8},
        "datasets": [{"folder_path": "clips", "caption_ext": "txt", "num_frames": 5, "resolution": [32], "fps": 16}],
        "train": {"batch_size": 1, "steps": 2000, "noise_scheduler": "flowmatch", "optimizer": "adamw8bit", "lr": 1e-4,
                  "ema_config": {"use_ema": True, "ema_decay": 0.99}, "dtype": "bf16"},
        "model": {"name_or_path": "Wan2.1-T2V-1.3B-Diffusers", "arch": "wan21", "quantize": True,
                  "vae_path": "wan_2.1_vae.safetensors", "assistant_lora_path": "turbo.safetensors",
                  "inference_lora_path": "fast.safetensors"},
        "sample": {"sample_every": 250, "prompts": ["[trigger] on a road"], "seed": 7, "sample_steps": 20},
    }  # fmt: skip
    job = {"job": "extension", "config": {"name": "roads", "process": [process]}}
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return [path]


def diffusion_pipe(home: Path) -> list[Path]:
    (home / "data.toml").write_text(
        "resolutions = [[32, 32]]\nenable_ar_bucket = false\nframe_buckets = [1, 5]\n"
        "[[directory]]\npath = 'clips'\nnum_repeats = 2\n"
    )
    path = home / "main.toml"
    path.write_text(
        "output_dir = 'runs'\ndataset = 'data.toml'\nepochs = 100\nmicro_batch_size_per_gpu = 1\n"
        "gradient_clipping = 1.0\nwarmup_steps = 10\nsave_every_n_epochs = 10\nactivation_checkpointing = true\n"
        "[model]\ntype = 'wan'\nckpt_path = 'Wan2.1-T2V-1.3B-Diffusers'\ndtype = 'bfloat16'\n"
        "transformer_path = 'wan2.1_t2v_1.3B.safetensors'\n"
        "timestep_sample_method = 'logit_normal'\n[adapter]\ntype = 'lora'\nrank = 8\ndtype = 'bfloat16'\n"
        "[optimizer]\ntype = 'adamw_optimi'\nlr = 2e-5\nbetas = [0.9, 0.99]\nweight_decay = 0.01\n"
    )
    return [path]


def simpletuner(home: Path) -> list[Path]:
    backend = [
        {"id": "clips", "type": "local", "dataset_type": "video", "instance_data_dir": "clips", "repeats": 1,
         "caption_strategy": "textfile", "resolution": 32, "resolution_type": "pixel", "video": {"num_frames": 5}},
    ]  # fmt: skip
    (home / "multidatabackend.json").write_text(json.dumps(backend))
    path = home / "config.json"
    keys = {
        "--model_family": "wan", "--model_type": "lora", "--pretrained_model_name_or_path": "Wan2.1-T2V-1.3B-Diffusers",
        "--data_backend_config": "multidatabackend.json", "--lora_rank": 8, "--learning_rate": "1e-4",
        "--max_train_steps": 500, "--train_batch_size": 1, "--optimizer": "adamw_bf16", "--lr_scheduler": "cosine",
        "--validation_prompt": "a road", "--validation_steps": 100, "--framerate": 16, "--resolution": 32,
        "--validation_adapter_path": "fast.safetensors", "--validation_adapter_strength": 0.5,
    }  # fmt: skip
    path.write_text(json.dumps(keys))
    return [path]


def onetrainer(home: Path) -> list[Path]:
    concepts = [
        {"name": "roads", "path": "clips", "balancing": 2.0, "type": "STANDARD"}
    ]
    (home / "concepts.json").write_text(json.dumps(concepts))
    path = home / "onetrainer.json"
    keys = {
        "model_type": "WAN_2_1", "training_method": "LORA", "base_model_name": "Wan2.1-T2V-1.3B-Diffusers",
        "concept_file_name": "concepts.json", "learning_rate": 3e-4, "batch_size": 1, "epochs": 10, "lora_rank": 8,
        "lora_alpha": 4.0, "timestep_distribution": "LOGIT_NORMAL", "resolution": "32", "frames": "5",
        "learning_rate_scheduler": "COSINE", "optimizer": {"optimizer": "ADAMW_8BIT", "weight_decay": 0.01},
        "lora_model_name": "style.safetensors", "train_dtype": "BFLOAT_16",
    }  # fmt: skip
    path.write_text(json.dumps(keys))
    return [path]


USERS: dict[str, tuple[Callable[[Path], list[Path]], dict[str, Any]]] = {
    "musubi": (musubi, {
        "lora.rank": 8, "lora.alpha": 4, "learning_rate": 2e-4, "learning_rate_scheduler": "COSINE",
        "transformer.file": "wan2.1_t2v_1.3B.safetensors", "vae.file": "wan_2.1_vae.safetensors",
        "text_encoder.file": "models_t5_umt5-xxl-enc.pth", "base_loras.0.strength": 0.5, "epochs": 16, "seed": 42,
        "timestep_shift": 3, "optimizer.args.weight_decay": 0.02, "learning_rate_min": 2e-5,
    }),
    "ai-toolkit": (ai_toolkit, {
        "lora.rank": 8, "learning_rate": 1e-4, "steps": 2000, "vae.file": "wan_2.1_vae.safetensors",
        "base_loras.0.training_only": True, "sample.seed": 7, "sample_after": 250,
    }),
    "diffusion-pipe": (diffusion_pipe, {
        "lora.rank": 8, "learning_rate": 2e-5, "transformer.file": "wan2.1_t2v_1.3B.safetensors", "warmup_steps": 10,
        "epochs": 100,
    }),
    "simpletuner": (simpletuner, {
        "lora.rank": 8, "learning_rate": 1e-4, "steps": 500, "sample.loras.0.strength": 0.5,
        "learning_rate_scheduler": "COSINE",
    }),
    "onetrainer": (onetrainer, {
        "lora.rank": 8, "lora.alpha": 4, "learning_rate": 3e-4, "learning_rate_scheduler": "COSINE", "epochs": 10,
        "init_from": "style.safetensors",
    }),
}  # fmt: skip
"""What of each config must come through, and its value there."""

LOST = {
    "musubi": {"base_weights_multiplier", "dataset_config", "sdpa", "dataset_config.general.enable_bucket"},
    "ai-toolkit": {
        "job", "config.name", "config.process.0.type", "config.process.0.network.linear_alpha",
        "config.process.0.train.noise_scheduler", "config.process.0.train.ema_config.use_ema",
    },
    "diffusion-pipe": {"dataset"},
    "simpletuner": {
        "data_backend_config", "validation_adapter_strength", "data_backend_config.0.id", "data_backend_config.0.type",
        "data_backend_config.0.dataset_type", "data_backend_config.0.resolution_type",
    },
    "onetrainer": {"concept_file_name", "concept_file_name.0.name"},
}  # fmt: skip
"""Keys without a counterpart: names, and what another key says already."""


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if part.isdecimal() else config[part]
    return config


@pytest.mark.parametrize("trainer", USERS)
def test_a_user_of_another_trainer_goes_on_here(
    trainer: str, home: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write, expected = USERS[trainer]
    files = write(home)
    ours = tmp_path / "ours.json"
    result = import_config(files, out=ours)
    assert result.trainer == trainer
    config = read_json(ours)
    for key, value in expected.items():
        found = value_of(config, key)
        assert found == value or str(found) == str(home / str(value)), (key, found)

    lost = {row.key for row in result.rows if row.given and row.verdict == "none"}
    assert lost == LOST[trainer]
    unknown = [row.key for row in result.rows if row.verdict in ("unknown", "missing")]
    assert not unknown

    out = tmp_path / "run"
    # bitsandbytes' optimizers need a GPU; a class of Python runs anywhere
    is_class = "args" in config.get("optimizer", {})
    sets = [key for key in SMALL if not (is_class and key.startswith("optimizer="))]
    options = {"set": [*sets, "samples=1"]}
    if Path(str(config.get("base_model_name"))).name == "Wan2.1-T2V-1.3B-Diffusers":
        options["set"].append(f"base_model_name={home / 'Wan2.1-T2V-1.3B-Diffusers'}")
    assert run("train", config=ours, out=out, **options) == 0
    state = read_json(out / "checkpoints" / "step-2" / "state.json")
    assert state["step"] == 2
    exports = read_json(out / "exports.json")
    assert exports
    assert all((out / entry["path"]).is_file() for entry in exports)
