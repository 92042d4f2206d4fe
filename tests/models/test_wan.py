"""Wan's own facts, against diffusers' pipeline and the published configurations."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file

from tests.models.models_kit import edit, noisy_lora
from videotune.adapters.lora import add_lora
from videotune.config.schema import Lora
from videotune.errors import VideotuneError
from videotune.exporter.lora import export_lora
from videotune.models.base import renamed
from videotune.models.base_model import place, spec_for
from videotune.models.wan import Wan
from videotune.sampling.pipeline import SampleSettings, decode, draw
from videotune.types import ClipShape

SHAPE = ClipShape(5, 32, 32, 16.0)


@pytest.fixture
def pipe(tiny_bases: Callable[[str], Path]) -> WanPipeline:
    pipe = WanPipeline.from_pretrained(tiny_bases("wan"), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("caption", ["a red circle moves left", "", "Ünïcode — and &amp; entities", "long " * 400])
def test_text_is_what_the_pipeline_feeds(caption: str, pipe: WanPipeline, tiny_family: Callable[..., Any]) -> None:
    family = tiny_family("wan")
    ours = family.condition(family.encode_text([caption])).text
    with torch.no_grad():  # attention takes another kernel under grad
        theirs, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
    assert torch.equal(ours, theirs)


def test_latents_are_what_the_pipeline_would_decode(pipe: WanPipeline, tiny_family: Callable[..., Any]) -> None:
    family = tiny_family("wan")
    latents = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    with torch.no_grad():
        theirs = pipe.vae.decode(latents[None] * std + mean, return_dict=False)[0][0].clamp(-1, 1)
    torch.testing.assert_close(family.decode(latents), theirs, rtol=0, atol=1e-6)


def test_normalised_latents_have_the_statistics_undone(tmp_path: Path, tiny_bases: Callable[[str], Path]) -> None:
    """(z - mean) / std, not its inverse: pipelines keep 1 / std, which is easy to turn the wrong way round."""
    from videotune.models.registry import find

    folder = tmp_path / "scaled"
    shutil.copytree(tiny_bases("wan"), folder)
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latents_mean": [0.5] * 4, "latents_std": [2.0] * 4}))
    cpu, module = torch.device("cpu"), find("wan")
    frames = torch.rand(3, 5, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    plain = module(tiny_bases("wan"), cpu, torch.float32).encode_video(frames).mean
    scaled = module(folder, cpu, torch.float32).encode_video(frames).mean
    torch.testing.assert_close(scaled, (plain - 0.5) / 2.0)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_our_frames_are_those_of_the_pipeline_with_the_exported_file(
    guidance: float, pipe: WanPipeline, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    """What `sample` and previews draw is what a person gets who loads the file with plain diffusers."""
    family = tiny_family("wan")
    net = family.denoiser()
    state = noisy_lora(family, net)
    states = dict(zip(["a zorble", ""], family.encode_text(["a zorble", ""]), strict=True))
    settings = SampleSettings(SHAPE, 4, guidance)
    latents = draw(family, {"transformer": net}, settings, states.__getitem__, ["a zorble"], [7])
    ours = family.decode(latents[0])

    def theirs() -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        frames = pipe(
            "a zorble", num_frames=5, height=32, width=32, num_inference_steps=4, guidance_scale=guidance,
            generator=generator, output_type="pt",
        ).frames[0]  # fmt: skip
        return torch.as_tensor(frames).permute(1, 0, 2, 3) * 2 - 1

    without = theirs()
    path = export_lora(family, "diffusers", state, 2.0, tmp_path / "lora.safetensors", {}).path
    pipe.load_lora_weights(str(path))
    torch.testing.assert_close(ours, theirs(), rtol=0, atol=1e-5)
    assert (ours - without).abs().max() > 1e-3, (
        "the adapter must have changed the frames for this test to mean anything"
    )
    assert decode(family, latents)[0].dtype == np.uint8


def test_comfyui_names_are_the_authors(tiny_family: Callable[..., Any], tmp_path: Path) -> None:
    assert renamed("blocks.3.attn1.to_q", Wan.comfyui_names) == "blocks.3.self_attn.q"
    assert renamed("blocks.3.attn2.to_out.0", Wan.comfyui_names) == "blocks.3.cross_attn.o"
    assert renamed("blocks.3.attn2.add_k_proj", Wan.comfyui_names) == "blocks.3.cross_attn.k_img"
    assert renamed("blocks.0.ffn.net.0.proj", Wan.comfyui_names) == "blocks.0.ffn.0"
    assert renamed("blocks.0.ffn.net.2", Wan.comfyui_names) == "blocks.0.ffn.2"
    family = tiny_family("wan")
    net = family.denoiser()
    state = add_lora(net, family.spec, Lora(rank=1), seed=0)
    for parameter in state.values():
        parameter.data.fill_(1.0)
    path = export_lora(family, "comfyui", state, 1.0, tmp_path / "c.safetensors", {}).path
    keys = set(load_file(path))
    assert "diffusion_model.blocks.1.cross_attn.k.lora_A.weight" in keys
    assert not any("alpha" in key for key in keys)


def test_the_toy_base_is_a_true_wan(tiny_bases: Callable[[str], Path]) -> None:
    base = place("asset:toy")
    spec = spec_for(None, base)
    assert spec.rules.latent_size(ClipShape(17, 64, 64, 16.0)) == (5, 8, 8)
    assert spec.tokens(ClipShape(17, 64, 64, 16.0)) == 80
    assert sum(path.stat().st_size for path in base.folder.rglob("*") if path.is_file()) < 12e6


def test_checkpoints_that_are_no_wan_we_know_are_refused(tiny_bases: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(tiny_bases("wan"), folder)
    edit(folder / "model_index.json", boundary_ratio=0.875)
    with pytest.raises(VideotuneError, match="needs transformer_2/"):
        Wan.read_spec(folder)
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    assert len(Wan.read_spec(folder).experts) == 2
    edit(folder / "model_index.json", boundary_ratio=None)
    with pytest.raises(VideotuneError, match="needs boundary_ratio"):
        Wan.read_spec(folder)
    shutil.rmtree(folder / "transformer_2")
    edit(folder / "transformer/config.json", in_channels=16)
    with pytest.raises(VideotuneError, match="reads 16 channels"):
        Wan.read_spec(folder)
    edit(folder / "transformer/config.json", in_channels=12, pos_embed_seq_len=514)
    with pytest.raises(VideotuneError, match="FLF2V"):
        Wan.read_spec(folder)


@pytest.mark.parametrize(
    ("variant", "size", "title", "fps", "side", "shift", "given", "first"),
    [
        ("t2v", (12, 30), "Wan 2.1 T2V 1.3B", 16.0, 16, 3.0, "none", None),
        ("t2v", (40, 40), "Wan 2.1 T2V 14B", 16.0, 16, 3.0, "none", None),
        ("i2v", (40, 40), "Wan 2.1 I2V 14B", 16.0, 16, 3.0, "concat", 1.0),
        ("ti2v", (24, 30), "Wan 2.2 TI2V 5B", 24.0, 32, 5.0, "replace", 0.0),
        ("t2v-a14b", (40, 40), "Wan 2.2 T2V A14B", 16.0, 16, 5.0, "none", None),
        ("i2v-a14b", (40, 40), "Wan 2.2 I2V A14B", 16.0, 16, 5.0, "concat", 1.0),
    ],
)
def test_each_published_checkpoint_is_told_by_its_configs(
    variant: str,
    size: tuple[int, int],
    title: str,
    fps: float,
    side: int,
    shift: float,
    given: str,
    first: float | None,
    tiny_bases: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """The real widths and depths in a tiny checkpoint's config: weights are not read for the spec."""
    folder = tmp_path / "real"
    shutil.copytree(tiny_bases("wan", variant), folder)
    edit(folder / "transformer/config.json", num_attention_heads=size[0], attention_head_dim=128, num_layers=size[1])
    spec = Wan.read_spec(folder)
    assert (spec.title, spec.rules.fps, spec.rules.side_multiple) == (title, fps, side)
    assert (spec.timestep_shift, spec.given, spec.first_frame) == (shift, given, first)
    boundary = {"t2v-a14b": 0.875, "i2v-a14b": 0.9}.get(variant)
    lows = [(expert.name, expert.t_lo, expert.t_hi) for expert in spec.experts]
    assert lows == ([("high", boundary, 1.0), ("low", 0.0, boundary)] if boundary else [("transformer", 0.0, 1.0)])


def test_a_shift_of_ones_own_changes_the_schedule(tiny_family: Callable[..., Any]) -> None:
    family = tiny_family("wan")
    usual, moved = family.pipeline({}), family.pipeline({}, shift=9.0)
    for pipe in (usual, moved):
        pipe.scheduler.set_timesteps(4)
    assert moved.scheduler.timesteps[1] > usual.scheduler.timesteps[1]


def test_large_pictures_are_the_pipelines_too(pipe: WanPipeline, tiny_family: Callable[..., Any]) -> None:
    """Above 256 pixels a tiled VAE would give other latents and other frames than the pipeline, which does not tile."""
    family = tiny_family("wan")
    frames = torch.rand(3, 5, 32, 288, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        theirs = pipe.vae.encode(frames[None]).latent_dist.mode()[0]
        decoded = pipe.vae.decode(theirs[None], return_dict=False)[0][0].clamp(-1, 1)
    torch.testing.assert_close(family.encode_video(frames).mean, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(family.decode(theirs), decoded, rtol=0, atol=1e-5)
