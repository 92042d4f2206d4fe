"""A step of LTX-2 beside the authors' trainer: tokens, places, timesteps, noise levels
and the loss of both modalities, by figures that their code gave once.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import families
from tests.support.families import Open
from videotune.diffusion.loss import Objective, denoising_loss
from videotune.diffusion.noise_paths import flow_path
from videotune.diffusion.timesteps import TimestepSampler
from videotune.types import Batch, Sound

GOLDEN = Path(__file__).parents[1] / "golden" / "ltx2_authors_steps.json"
FIGURES = json.loads(GOLDEN.read_text(encoding="utf-8"))
CASES = FIGURES["cases"]
SAMPLES = 2
VIDEO_LEVELS = torch.tensor([0.3, 0.8])
SOUND_LEVELS = torch.tensor([0.6, 0.1])


def wave(*shape: int, phase: float) -> torch.Tensor:
    """The numbers that their code was given."""
    count = torch.arange(math.prod(shape), dtype=torch.float32)
    return torch.sin(count * 0.7 + phase).reshape(shape)


def to_latents(tokens: torch.Tensor, *size: int) -> torch.Tensor:
    return tokens.transpose(1, 2).reshape(len(tokens), -1, *size)


class Half(nn.Module):
    """Predicts half of its inputs, and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, Any] = {}

    def forward(self, **inputs: Any) -> Any:
        self.inputs = inputs
        return 0.5 * inputs["hidden_states"], 0.5 * inputs["audio_hidden_states"]


def batch_of(family: Any, case: str) -> tuple[Batch, torch.Tensor]:
    """The clips that their code was given, and the noise of the video."""
    samples, channels, *size = FIGURES["shapes"]["video"]
    _, sound_channels, length, rows = FIGURES["shapes"]["sound"]
    learnt = case.partition(",")[0].split(" and ")
    is_conditioning = "sound" not in learnt

    encoded = wave(samples, sound_channels, length, rows, phase=0.2)
    x0 = encoded.transpose(1, 2).flatten(2).mT[..., None, None]
    noise = wave(samples, length, sound_channels * rows, phase=2.0)
    sound = Sound(
        x0,
        to_latents(noise, length, 1, 1) * (not is_conditioning),
        SOUND_LEVELS * (not is_conditioning),
        is_conditioning,
    )

    states = families.batch_of(family, ["a"] * samples).conditioning
    video = wave(samples, channels, *size, phase=0.1)
    batch = Batch.of(video, states, fps=torch.full((samples,), 24.0), sound=sound)
    mask = batch.conditioning_mask.clone()
    if case.endswith("first frame"):
        mask[:, :, 0] = True
    if "video" not in learnt:
        mask[:] = True
    batch = replace(
        batch,
        conditioning_mask=mask,
        loss_mask=(~mask).float(),
        has_clean_frames=bool(mask.any()),
        video_is_conditioning="video" not in learnt,
    )
    tokens = wave(samples, math.prod(size), channels, phase=1.0)
    return batch, to_latents(tokens, *size)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_authors_trainer(case: str, tiny_family: Open) -> None:
    family = tiny_family("ltx2")
    batch, noise = batch_of(family, case)
    net = Half()
    objective = Objective(flow_path, TimestepSampler())
    output = denoising_loss(family, net, objective, batch, VIDEO_LEVELS, noise)

    theirs = CASES[case]
    for prefix, name in (("", "video"), ("audio_", "audio")):
        told = net.inputs
        words = {
            "latent": told[f"{prefix}hidden_states"],
            "sigma": told[f"{prefix}sigma"] / 1000,
            "timesteps": told[f"{prefix}timestep"] / 1000,
            "positions": told["video_coords" if name == "video" else "audio_coords"],
        }
        for word, value in words.items():
            wanted = torch.tensor(theirs[name][word])
            # One timestep a sample is that of all its tokens.
            if value.dim() == 1 and word == "timesteps":
                value = value[:, None].expand(-1, wanted.numel() // SAMPLES)
            torch.testing.assert_close(
                value.flatten(), wanted, rtol=1e-5, atol=1e-5, msg=f"{name} {word}"
            )
    torch.testing.assert_close(
        output.per_sample_loss, torch.tensor(theirs["loss"]), rtol=1e-5, atol=1e-5
    )


def test_the_figures_tell_modalities_and_orders_apart(tiny_family: Open) -> None:
    """Noise levels of the other modality, or another order of the sound's rows, would
    not give them.
    """
    family = tiny_family("ltx2")
    batch, noise = batch_of(family, "video and sound")
    assert batch.sound is not None
    objective = Objective(flow_path, TimestepSampler())
    wanted = torch.tensor(CASES["video and sound"]["loss"])
    rows = batch.sound.x0.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)
    for wrong in (
        replace(batch.sound, t=VIDEO_LEVELS),
        replace(batch.sound, x0=rows),
    ):
        other = replace(batch, sound=wrong)
        output = denoising_loss(family, Half(), objective, other, VIDEO_LEVELS, noise)
        assert not torch.allclose(output.per_sample_loss, wanted, atol=1e-2)
