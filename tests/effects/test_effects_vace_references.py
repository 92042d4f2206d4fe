"""A reference of Wan VACE: an image on white before the clip, which is denoised with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.clips import noise, write_dataset, write_image
from tests.support.recorder import Recorder
from tests.support.trainers import Lab, job_of, source_of, take_steps, trainer_of
from videotune.diffusion.loss import denoising_loss
from videotune.latent_cache.batches import make_step_batch
from videotune.sampling.given_files import GivenFiles
from videotune.sampling.given_latents import encode_given
from videotune.sampling.pipeline import SampleSettings, draw
from videotune.trainer.build import open_models, plain_batch
from videotune.types import ClipShape, SampleRequest

FRAMES = 9
SIDE = 32
SHAPE = ClipShape(FRAMES, SIDE, SIDE, 16.0)


def knobs(**condition: Any) -> dict[str, Any]:
    return {
        "conditions": [{"type": "reference", **condition}],
        "resolution": f"{SIDE}x{SIDE}",
        "video_config.frames": FRAMES,
        "video_config.variants": 1,
    }


@pytest.fixture
def vace(lab: Lab, tiny_bases: Callable[..., Path]) -> Lab:
    return replace(lab, model=tiny_bases("wan_vace", "vace"))


@pytest.fixture
def picture() -> np.ndarray:
    """A wide image, which leaves white above and below."""
    return noise(1, 24, 64, 11)[0]


@pytest.fixture
def folder(lab: Lab, picture: np.ndarray) -> Path:
    folder = write_dataset(
        lab.tmp / "clips", {"a.mkv": noise(FRAMES, SIDE, SIDE)}, {}, fps=16
    )
    write_image(folder / "references" / "a.png", picture)
    return folder


@pytest.mark.effect("conditions")
@pytest.mark.parametrize("variant", ["vace", "vace-a14b"])
def test_training_calls_the_network_as_the_pipeline_does(
    variant: str,
    lab: Lab,
    tiny_bases: Callable[..., Path],
    folder: Path,
    picture: np.ndarray,
) -> None:
    model = replace(lab, model=tiny_bases("wan_vace", variant))
    job = job_of(model, knobs(), folder)
    family = open_models(job.spec, job.base, job.config)
    source = source_of(model, knobs(), folder)
    batch = plain_batch(source, source.buckets[0][0])

    network = Recorder()
    nets = {expert.name: network for expert in family.spec.experts}
    pipe = family.pipeline(nets, None, diffusers.WanVACEPipeline, vae=family.vae())
    pipe(
        reference_images=Image.fromarray(picture),
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="latent",
        **family.prompt(family.collate_states(family.encode_text(["a clip"]))),
    )
    call = network.calls.pop()
    family.predict(network, batch.x0, torch.full((1,), 0.4), batch)
    (own,) = network.calls
    control = own["control_hidden_states"]
    torch.testing.assert_close(
        control, call["control_hidden_states"], atol=1e-5, rtol=0
    )
    assert own["hidden_states"].shape == call["hidden_states"].shape

    # White above and below the image is in its latents.
    reference = batch.conditioning.extras["reference"]
    assert torch.equal(control[:, : reference.shape[1], :1], reference)
    white = family.encode_reference_image(np.full_like(picture, 255), SHAPE)
    torch.testing.assert_close(reference[0, :, 0, 0], white[:, 0, 0], atol=0.5, rtol=0)


def test_it_is_noised_as_the_clip_and_not_learnt(vace: Lab, folder: Path) -> None:
    """Its noise is not the clip's first frame's; another image is another loss."""
    trainer = trainer_of(vace, knobs() | {"steps": 1}, folder)
    (call,) = take_steps(trainer).calls
    source = trainer.source
    step = make_step_batch(source, 1)
    reference = step.batch.conditioning.extras["reference"]
    level = step.t.view(-1, 1, 1, 1, 1)
    states = call["x_t"]
    assert states.shape[2] == step.batch.x0.shape[2] + 1
    noise_of_reference = (states[:, :, :1] - (1 - level) * reference) / level
    torch.testing.assert_close(
        noise_of_reference.flatten().sort().values,
        step.noise[:, :, :1].flatten().sort().values,
        atol=1e-4,
        rtol=0,
    )
    difference = (noise_of_reference - step.noise[:, :, :1]).abs()
    assert (difference > 1e-3).float().mean() > 0.99
    assert step.batch.loss_mask.min() == 1

    job = job_of(vace, knobs(), folder)
    family = open_models(job.spec, job.base, job.config)
    net = family.denoiser()
    losses = []
    for latents in (reference, reference.flip(-1)):
        extras = {**step.batch.conditioning.extras, "reference": latents}
        conditioning = replace(step.batch.conditioning, extras=extras)
        batch = replace(step.batch, conditioning=conditioning)
        with torch.no_grad():
            output = denoising_loss(
                family, net, source.objective, batch, step.t, step.noise
            )
        losses.append(float(output.loss))
    assert losses[0] != losses[1]


class Perfect(torch.nn.Module):
    """A network that knows the clip and the reference before it."""

    def __init__(self, clean: torch.Tensor) -> None:
        super().__init__()
        self.clean = clean

    def cache_context(self, *_: Any) -> Any:
        return torch.no_grad()

    def forward(self, hidden_states: Any, timestep: Any, **_: Any) -> Any:
        t = timestep.view(-1, 1, 1, 1, 1) / 1000
        return ((hidden_states - self.clean) / t,)


def test_a_perfect_network_ends_at_the_clip_without_the_reference(
    tiny_family: Callable[..., Any],
) -> None:
    family = tiny_family("wan_vace")
    frames, rows, columns = family.spec.rules.latent_size(SHAPE)
    random = torch.Generator().manual_seed(3)
    channels = family.spec.latent_channels
    size = (1, channels, frames + 1, rows, columns)
    clean = torch.randn(size, generator=random)
    states = family.encode_text(["a"])[0] | {"reference": clean[0, :, :1]}
    request = SampleRequest(SHAPE, 12, 1.0, (1,))
    conditioning = family.collate_states([states])
    network = Perfect(clean)
    end = family.sample({"transformer": network}, conditioning, None, request)
    assert torch.allclose(end, clean[:, :, 1:], atol=5e-3)


def test_samples_follow_the_image(vace: Lab, folder: Path) -> None:
    """Also of a base that learnt it before: no run has to."""
    job = job_of(vace, {}, folder)
    family = open_models(job.spec, job.base, job.config)
    nets = {"transformer": family.denoiser()}
    states = dict(zip(("a", ""), family.encode_text(["a", ""]), strict=True))
    other = write_image(vace.tmp / "other.png", noise(1, 64, 24, 5)[0])
    given = [
        GivenFiles(reference=str(path))
        for path in (folder / "references" / "a.png", other)
    ]
    conditions = encode_given(
        family, [(files, SHAPE) for files in given], job.config, "sample"
    )
    settings = SampleSettings(SHAPE, 2, 3.0)
    prompts = [("a", 1)] * 2
    videos = draw(
        family, nets, settings, states.__getitem__, prompts, conditions=conditions
    )
    for video in videos:
        assert video.shape[1:] == job.spec.rules.latent_size(SHAPE)
    assert (videos[0] - videos[1]).abs().max() > 1e-5
