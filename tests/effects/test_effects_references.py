"""References: files beside the clips that are appended to them as clean frames."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.trainers import Lab, job_of, source_of, take_steps, trainer_of
from videotune.diffusion.loss import denoising_loss
from videotune.latent_cache.batches import draws_of, make_step_batch
from videotune.latent_cache.conditions import condition_key, condition_samples
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


def write_reference(folder: Path, name: str, frames: np.ndarray) -> Path:
    path = folder / "references" / name
    if len(frames) == 1:
        return write_image(path.with_suffix(".png"), frames[0])
    return write_clip(path, frames, 16, codec="png", pix_fmt="rgb24")


@pytest.fixture
def folder(lab: Lab) -> Path:
    """Two clips with a video and an image as references, and one without."""
    clips = {
        f"{name}.mkv": noise(FRAMES, SIDE, SIDE, seed)
        for seed, name in enumerate("abc")
    }
    folder = write_dataset(lab.tmp / "clips", clips, {}, fps=16)
    write_reference(folder, "a.mov", noise(FRAMES, SIDE, SIDE, 11))
    write_reference(folder, "b.mov", noise(1, SIDE, SIDE, 12))
    return folder


def to_model(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames).permute(3, 0, 1, 2) / 127.5 - 1


@pytest.mark.effect("conditions")
@pytest.mark.parametrize(("latent_frames", "count"), [(None, 3), (1, 1)])
def test_references_are_those_of_the_files(
    latent_frames: int | None, count: int, lab: Lab, folder: Path
) -> None:
    """An image is held. A clip without a reference is left out, and said."""
    settings = knobs(latent_frames=latent_frames)
    job = job_of(lab, settings, folder)
    family = open_models(job.spec, job.base, job.config)
    source = source_of(lab, settings, folder)
    clips = {Path(clip.path).stem: clip for clip in job.library.clips}
    assert set(clips) == {"a", "b"}
    reasons = [account["reason"] for account in job.library.accounts]
    assert reasons.count("no_reference") == 1

    pixel_frames = 4 * (count - 1) + 1
    files = {"a": noise(FRAMES, SIDE, SIDE, 11), "b": noise(1, SIDE, SIDE, 12)}
    for window in source.buckets[0]:
        name = Path(source.clips[window.clip_id].path).stem
        frames = to_model(files[name])[:, :pixel_frames].expand(
            -1, pixel_frames, -1, -1
        )
        expected = family.encode_video(frames.contiguous()).mean
        reference = plain_batch(source, window).conditioning.extras["reference"][0]
        torch.testing.assert_close(reference, expected, atol=1e-5, rtol=0)


def test_all_samples_of_a_step_have_one_or_none(lab: Lab, folder: Path) -> None:
    settings = knobs(probability=0.5) | {"batch_size": 2}
    source = source_of(lab, settings, folder)
    counted = 0
    for step in range(1, 41):
        with_reference = {
            "reference" in types for types in draws_of(source, step).condition_types
        }
        assert len(with_reference) == 1
        extras = make_step_batch(source, step).batch.conditioning.extras
        assert ("reference" in extras) == with_reference.pop()
        counted += "reference" in extras
    assert 12 <= counted <= 28


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v"])
def test_it_is_appended_clean_and_not_learnt(
    variant: str, lab: Lab, folder: Path, tiny_bases: Callable[..., Path]
) -> None:
    """At timestep 0, outside of the loss, and another reference is another loss."""
    model = replace(lab, model=tiny_bases("wan", variant))
    settings = knobs() | {"steps": 1}
    if variant == "ti2v":
        settings |= {"resolution": "64x64", "video_config.target_fps": 16}
    trainer = trainer_of(model, settings, folder)
    calls = take_steps(trainer).calls
    source = trainer.source
    step = make_step_batch(source, 1)
    reference = step.batch.conditioning.extras["reference"]
    channels = reference.shape[1]
    frames = step.batch.x0.shape[2]

    states = calls[0]["x_t"]
    assert torch.equal(states[:, :channels, frames:], reference)
    if variant == "i2v":
        assert torch.equal(states[:, -channels:, frames:], reference)
        assert (states[:, channels:-channels, frames:] == 1).all()
    tokens = calls[0]["t"]
    of_clip = tokens.shape[1] * frames // states.shape[2]
    assert (tokens[:, of_clip:] == 0).all()
    assert (tokens[:, :of_clip] > 0).all()

    job = job_of(model, settings, folder)
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
        losses.append(output.loss)
    assert not torch.equal(*losses)


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v", "t2v-a14b"])
def test_sampling_follows_the_file(
    variant: str, lab: Lab, folder: Path, tiny_bases: Callable[..., Path]
) -> None:
    """The pipeline's steps are those of training: the network's output is that of
    ``predict`` with the same reference.
    """
    model = replace(lab, model=tiny_bases("wan", variant))
    settings = knobs() | ({"experts": "both"} if "a14b" in variant else {})
    shape = SHAPE
    if variant == "ti2v":
        settings |= {"resolution": "64x64", "video_config.target_fps": 16}
        shape = ClipShape(FRAMES, 64, 64, 16.0)
    job = job_of(model, settings, folder)
    family = open_models(job.spec, job.base, job.config)
    nets = {name.name: family.denoiser(name.name) for name in job.spec.experts}
    states = dict(zip(("a", ""), family.encode_text(["a", ""]), strict=True))

    videos = []
    for name in ("a.mov", "b.png"):
        files = {"reference": str(folder / "references" / name)}
        if variant == "i2v":
            files["image"] = str(folder / "references" / "b.png")
        given = GivenFiles(**files)
        conditions = encode_given(family, [(given, shape)], job.config, "sample")
        (video,) = draw(
            family,
            nets,
            SampleSettings(shape, 2, 3.0),
            states.__getitem__,
            [("a", 1)],
            conditions=conditions,
        )
        assert video.shape[1:] == job.spec.rules.latent_size(shape)
        videos.append(video)
    assert not torch.allclose(*videos, atol=1e-3)


def test_a_perfect_network_ends_at_the_clip(tiny_family: Callable[..., Any]) -> None:
    """It sees the reference at timestep 0 behind the clip, in both passes of guidance."""
    family = tiny_family("wan")
    size = family.spec.rules.latent_size(SHAPE)
    random = torch.Generator().manual_seed(3)
    clean = torch.randn(2, family.spec.latent_channels, *size, generator=random)
    reference = torch.randn(2, family.spec.latent_channels, 2, *size[1:])

    class Perfect(torch.nn.Module):
        def cache_context(self, *_: Any, **__: Any) -> Any:
            return torch.no_grad()

        def forward(self, hidden_states: Any, timestep: Any, **_: Any) -> Any:
            assert torch.equal(hidden_states[:, :, size[0] :], reference)
            tokens = timestep.view(2, size[0] + 2, -1)
            assert (tokens[:, size[0] :] == 0).all()
            t = tokens[:, :1, :1, None, None] / 1000
            clip = hidden_states[:, :, : size[0]]
            velocity = (clip - clean) / t
            return (torch.cat([velocity, reference], dim=2),)

    texts = family.encode_text(["a", "b"])
    conditioning = family.collate_states(
        [
            text | {"reference": latents}
            for text, latents in zip(texts, reference, strict=True)
        ]
    )
    request = SampleRequest(SHAPE, 12, 3.0, (1, 2))
    end = family.sample({"transformer": Perfect()}, conditioning, conditioning, request)
    assert torch.allclose(end, clean, atol=5e-3)


@pytest.mark.parametrize("latent_frames", [1, 2])
def test_an_entry_of_another_length_is_encoded_again(
    latent_frames: int, lab: Lab, folder: Path
) -> None:
    """A cache that somebody else made may hold anything under a name."""
    settings = knobs(latent_frames=latent_frames)
    source = source_of(lab, settings, folder)
    window = source.buckets[0][0]
    (sample,) = condition_samples(
        window, 0, source.config.conditions[0], 1, source.spec
    )
    name = condition_key(source.keys, sample)
    right = source.store.get("conditions", name)["latents"]
    with source.store.write_lock():
        longer = {"latents": torch.cat([right, right], dim=1)}
        source.store.put("conditions", name, longer, {})

    again = source_of(lab, settings, folder)
    assert torch.equal(again.store.get("conditions", name)["latents"], right)
