"""Previews: the video written is the video drawn, and the training is left as it was."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from videotune.sampling.pipeline import SampleSettings, decode, draw, file_name, to_frames
from videotune.types import ClipShape


def test_pixels_are_rounded_as_diffusers_does() -> None:
    from diffusers.video_processor import VideoProcessor

    pixels = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 2.4 - 1.2
    theirs = VideoProcessor().postprocess_video(pixels[None], output_type="pil")[0]
    ours = to_frames(pixels)
    assert all(np.array_equal(ours[i], np.asarray(image)) for i, image in enumerate(theirs))


def test_drawing_moves_nothing_of_the_training(tiny_family: Callable[..., Any]) -> None:
    family = tiny_family("wan")
    net = family.denoiser()
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.random.get_rng_state()
    states = dict(zip(["a", ""], family.encode_text(["a", ""]), strict=True))
    family.free("text_encoder")
    settings = SampleSettings(ClipShape(5, 32, 32, 16.0), 2, 3.0)
    latents = draw(family, {"transformer": net}, settings, states.__getitem__, [("a", 1)])
    frames = decode(family, latents)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not family._loaded, "the VAE is freed"
    assert frames[0].shape == (5, 32, 32, 3)


def test_file_names_say_step_prompt_and_seed() -> None:
    names = {file_name(5, "a", 1), file_name(6, "a", 1), file_name(5, "b", 1), file_name(5, "a", 2)}
    assert len(names) == 4
    assert file_name(250, "a", 42).startswith("step-000250-")
    assert file_name(250, "a", 42).endswith("-seed42.mp4")
