"""A family is one file: written here into a package of its own, it is found, checked, trained and sampled by the command.

It is registered as every family is, when its class is defined; its module is named by an entry point, as that of any other
package would be.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILY = r'''
"""Acme Video: the transformer of another family under a name of its own."""

from videotune.lazy import diffusers, torch
from videotune.models.base import DiffusersModel, lora_targets
from videotune.models.model_files import read_config
from videotune.models.tiny_text import tiny_t5
from videotune.types import ModelSpec, VideoRules
from dataclasses import replace


class Acme(DiffusersModel):
    """An Acme checkpoint."""

    spec = ModelSpec(
        name="acme_video",
        aliases=("WanVideoToVideoPipeline", "acme"),
        title="Acme Video",
        path="flow",
        rules=VideoRules(4, 1, 16, 16.0, 8, 4),
        text_tokens=64,
        blocks=("blocks",),
        lora_targets=lora_targets((r"blocks\.\d+\.attn1\.(to_q|to_k)",), (r"blocks\.\d+\.ffn\.net\.2",), r"blocks\..+"),
        default_resolution=32,
        timestep_shift=3.0,
        sample_steps=2,
        sample_guidance=1.0,
        licence="none",
    )
    variants = ("t2v",)
    transformer_class, vae_class = "WanTransformer3DModel", "AutoencoderKLWan"
    text_encoders = {"text_encoder": "UMT5EncoderModel"}
    config_defaults = {"image_dim": None}

    @classmethod
    def read_spec(cls, folder):
        vae = read_config(folder / "vae" / "config.json")
        return replace(cls.spec, latent_channels=vae["z_dim"], text_width=16)

    def latent_statistics(self):
        config = self.vae().config
        return tuple(torch.tensor(x).view(-1, 1, 1, 1) for x in (config.latents_mean, config.latents_std))

    def predict(self, net, x_t, t, batch):
        text = batch.cond.text.to(self.dtype)
        return net(x_t.to(self.dtype), t.float() * 1000, text, return_dict=False)[0].float()

    def isolate_frames(self, net, on):
        assert not on

    def pipeline_class(self):
        return diffusers.WanPipeline

    @classmethod
    def tiny_pipeline(cls, variant):
        vae = diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
        )
        net = diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
            ffn_dim=32, num_layers=2, rope_max_seq_len=128,
        )
        scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
        tokenizer, encoder = tiny_t5("UMT5EncoderModel")
        return diffusers.WanVideoToVideoPipeline(tokenizer, encoder, net, vae, scheduler)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder as an installed package leaves it: the module, and the entry point that names it."""
    folder = tmp_path / "installed"
    (folder / "acme-1.0.dist-info").mkdir(parents=True)
    (folder / "acme_video.py").write_text(FAMILY)
    (folder / "acme-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (folder / "acme-1.0.dist-info" / "entry_points.txt").write_text("[videotune.models]\nacme = acme_video\n")
    return folder


def test_a_family_of_one_file_trains_by_the_command(package: Path, small_clips: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "videotune", *words], capture_output=True, text=True, env=env, cwd=Path.cwd()
        )

    done = run("tiny", "acme", str(tmp_path / "base"))
    assert (done.returncode, done.stderr) == (0, "")
    sets = {"base_model_name": tmp_path / "base", "cache_dir": tmp_path / "cache", "resolution": "32x32", "steps": 3}
    sets |= {"validate_every": 2, "sample_after": 3, "samples": 1, "sample_metrics.budget": 0, "lora.rank": 2}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    for command in (["check"], ["train", "--out", str(tmp_path / "run")]):
        done = run(command[0], "--data", str(small_clips), *words, *command[1:])
        assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2, 3]
    assert list((tmp_path / "run").rglob("*.mp4")), "a preview was sampled"
    assert list((tmp_path / "run" / "export").glob("*.safetensors")), "the LoRA was exported"


def test_two_families_of_one_name_are_refused() -> None:
    from videotune.errors import VideotuneError
    from videotune.models.registry import register
    from videotune.models.wan import Wan

    class Other:
        spec = Wan.spec

    with pytest.raises(VideotuneError, match="two families"):
        register(Other)
