"""Wan from an image: what training feeds is what WanImageToVideoPipeline itself makes of the same frame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from videotune.adapters.lora import add_lora
from videotune.config.schema import Lora
from videotune.exporter.lora import export_lora
from videotune.types import Batch

Open = Callable[..., Any]


def a_clip(frames: int, height: int, width: int) -> torch.Tensor:
    levels = torch.randint(256, (3, frames, height, width), generator=torch.Generator().manual_seed(0))
    return levels.float() / 127.5 - 1


def test_only_the_first_frame_is_told(tiny_family: Open) -> None:
    family, clip = tiny_family("wan", variant="i2v"), a_clip(9, 32, 32)
    other = clip.clone()
    other[:, 1:] = 0.5
    for name, value in family.encode_video(clip).extras.items():
        assert torch.equal(value, family.encode_video(other).extras[name])
        assert not torch.equal(value, family.encode_video(clip.flip(1)).extras[name])


def batch_like(family: Any, clip: torch.Tensor, caption: str, given: bool) -> Batch:
    moments = family.encode_video(clip)
    x0 = moments.mean[None]
    clean = torch.zeros(1, 1, x0.shape[2], 1, 1, dtype=torch.bool)
    clean[:, :, 0] = given
    text = family.encode_text([caption])[0]
    return Batch(
        x0, clean, torch.zeros_like(clean), (~clean).float(), torch.ones(1), torch.zeros(1, dtype=torch.bool),
        family.condition([text | moments.extras]), (caption,), ("w",), torch.ones(1), given,
    )  # fmt: skip


def test_one_timestep_a_sample_is_one_a_token(tiny_family: Open) -> None:
    """From text TI2V's pipeline tells every token the same; one a sample, as we train then, is the same number."""
    family = tiny_family("wan", variant="ti2v")
    batch = batch_like(family, a_clip(9, 64, 64), "a", given=False)
    net, x_t, t = family.denoiser(), torch.randn_like(batch.x0), torch.tensor([0.37])
    told: list[int] = []
    net.register_forward_hook(lambda m, w, named, out: told.append(named["timestep"].ndim), with_kwargs=True)
    from dataclasses import replace

    with torch.no_grad():
        one = family.predict(net, x_t, t, batch)
        each = family.predict(net, x_t, t, replace(batch, any_given=True))
    assert told == [1, 2]
    torch.testing.assert_close(one, each, rtol=0, atol=3e-6)


def test_the_images_projections_may_be_trained_by_name(tiny_family: Open, tmp_path: Path) -> None:
    """Not by the named sets; as patterns they are exported and read back, in both layouts."""
    family = tiny_family("wan", variant="i2v")
    targets = ["attn2.add_k_proj", "attn2.add_v_proj", "attn2.to_k", "attn2.to_v"]
    state = add_lora(family.denoiser(), family.spec, Lora(rank=2, targets=targets), seed=0)
    for parameter in state.values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    for format in family.key_maps():
        done = export_lora(family, format, state, 1.0, tmp_path / f"{format}.safetensors", {})
        assert (done.modules, done.max_error <= 1e-6) == (8, True)


def test_a_sample_that_is_not_told_its_frame_has_zeros(tiny_family: Open) -> None:
    """Its mask too: nothing says that a frame is given."""
    family = tiny_family("wan", variant="i2v")
    extras = {name: value * False for name, value in family.encode_video(a_clip(5, 32, 32)).extras.items()}
    text = family.encode_text(["a"])[0]
    cond = family.condition([text | extras])
    assert all(value.eq(0).all() for value in cond.extras.values())
