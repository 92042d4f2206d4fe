"""Wan's own facts: an image's states, timesteps a token, the shift, adapters on the image's projections."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.models.models_kit import batch_of, clip_of, noisy_lora, small_shape
from videotune.exporter.lora import export_lora

Open = Callable[..., Any]


def test_only_the_first_frame_is_told(tiny_family: Open) -> None:
    family = tiny_family("wan", variant="i2v")
    clip = clip_of(family, small_shape(family), 0)
    other = clip.clone()
    other[:, 1:] = 0.5
    for name, value in family.encode_video(clip).extras.items():
        assert torch.equal(value, family.encode_video(other).extras[name])
        assert not torch.equal(value, family.encode_video(clip.flip(1)).extras[name])


def test_one_timestep_a_sample_is_one_a_token(tiny_family: Open) -> None:
    """From text TI2V's pipeline tells every token the same; one a sample, as we train then, is the same number."""
    family = tiny_family("wan", variant="ti2v")
    batch = batch_of(family, ["a"])
    net, x_t, t = family.denoiser(), torch.randn_like(batch.x0), torch.tensor([0.37])
    told: list[int] = []
    net.register_forward_hook(lambda m, w, named, out: told.append(named["timestep"].ndim), with_kwargs=True)
    with torch.no_grad():
        one, each = (family.predict(net, x_t, t, replace(batch, any_given=given)) for given in (False, True))
    assert told == [1, 2]
    torch.testing.assert_close(one, each, rtol=0, atol=3e-6)


def test_the_images_projections_may_be_trained_by_name(tiny_family: Open, tmp_path: Path) -> None:
    """Not by the named sets; as patterns they are exported and read back, in both layouts."""
    family = tiny_family("wan", variant="i2v")
    targets = ["attn2.add_k_proj", "attn2.add_v_proj", "attn2.to_k", "attn2.to_v"]
    state = noisy_lora(family, family.denoiser(), targets=targets)
    for format in family.key_maps():
        done = export_lora(family, format, state, 1.0, tmp_path / f"{format}.safetensors", {})
        assert (done.modules, done.max_error <= 1e-6) == (8, True)
