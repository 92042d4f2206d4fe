"""Frames that LTX-Video is given at any place: in the place of the clip's own at its
beginning, and as tokens beside the clip's at its end.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

from tests.support.clips import noise, write_clip, write_image
from tests.support.recorder import Recorder
from tests.support.trainers import Lab, job_of, source_of, take_steps, trainer_of
from videotune.diffusion.loss import denoising_loss
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.sampling.given_files import GivenFiles
from videotune.sampling.given_latents import encode_given
from videotune.sampling.pipeline import SampleSettings, draw
from videotune.trainer.build import open_models, plain_batch
from videotune.types import Batch, ClipShape, SampleRequest

FRAMES = 33
"""Pixel frames of a clip: five latent frames."""

SIDE = 64
SHAPE = ClipShape(FRAMES, SIDE, SIDE, 16.0)


@pytest.fixture
def ltx(lab: Lab, tiny_bases: Callable[..., Path]) -> Lab:
    return replace(lab, model=tiny_bases("ltx_video", "0.9.7"))


def knobs(*conditions: dict[str, Any]) -> dict[str, Any]:
    return {
        "conditions": list(conditions),
        "resolution": f"{SIDE}x{SIDE}",
        "video_config.frames": FRAMES,
        "video_config.target_fps": 16,
        "first_frame_probability": 0.0,
    }


LAST_FRAME = {"type": "last_frame"}
SUFFIX = {"type": "suffix", "latent_frames": 2}
PREFIX = {"type": "prefix", "latent_frames": 2}


def write_folder(folder: Path, frames: np.ndarray) -> Path:
    """A dataset of one clip without loss of a bit."""
    path = folder / "videos" / "a.mov"
    write_clip(path, frames, 16, codec="png", pix_fmt="rgb24")
    (folder / "captions").mkdir()
    (folder / "captions" / "a.txt").write_text("a clip", encoding="utf-8")
    return folder


def to_model(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames).permute(3, 0, 1, 2) / 127.5 - 1


@pytest.fixture
def certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder whose latents vary by nothing, so that draws are their mean."""
    distribution = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    original = distribution.__init__

    def without_variance(
        self: Any, parameters: Any, deterministic: bool = False
    ) -> None:
        original(self, parameters, deterministic)
        self.logvar = torch.full_like(self.mean, -80.0)
        self.var = self.logvar.exp()
        self.std = (0.5 * self.logvar).exp()

    monkeypatch.setattr(distribution, "__init__", without_variance)


CASES = [
    [LAST_FRAME],
    [{"type": "suffix"}],
    [SUFFIX, PREFIX],
    [SUFFIX, LAST_FRAME],
]


def call_of_pipeline(family: Any, frames: torch.Tensor, types: dict[str, int]) -> Any:
    """The first call of a network by diffusers' pipeline that is given these pixels."""
    pictures = ((frames + 1) / 2).permute(1, 0, 2, 3)
    conditions = []
    if "prefix" in types:
        count = 8 * (types["prefix"] - 1) + 1
        conditions.append(LTXVideoCondition(video=pictures[:count], frame_index=0))
    if "suffix" in types:
        count = 8 * types["suffix"] + 1
        conditions.append(
            LTXVideoCondition(video=pictures[-count:], frame_index=FRAMES - count)
        )
    if "last_frame" in types:
        last = LTXVideoCondition(image=pictures[-1:], frame_index=FRAMES - 1)
        conditions.append(last)

    network = Recorder()
    pipe = family.pipeline({"transformer": network}, vae=family.vae())
    conditioning = family.collate_states(family.encode_text(["a clip"]))
    pipe(
        conditions=conditions,
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        frame_rate=16,
        num_inference_steps=1,
        guidance_scale=1.0,
        image_cond_noise_scale=0.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **family.prompt(conditioning),
    )
    return network.calls[0]


@pytest.mark.effect("conditions")
@pytest.mark.parametrize(
    "conditions", CASES, ids=lambda case: "-".join(c["type"] for c in case)
)
def test_training_calls_the_network_as_the_pipeline_does(
    conditions: list[dict[str, Any]], ltx: Lab, certain: None
) -> None:
    """The same tokens in the same order, at the same places and times, clean or not."""
    settings = knobs(*conditions)
    folder = write_folder(ltx.tmp / "clips", noise(FRAMES, SIDE, SIDE, seed=3))
    job = job_of(ltx, settings, folder)
    family = open_models(job.spec, job.base, job.config)
    source = source_of(ltx, settings, folder)
    batch = plain_batch(source, source.buckets[0][0])

    types = {item["type"]: item.get("latent_frames", 1) for item in conditions}
    frames = to_model(noise(FRAMES, SIDE, SIDE, seed=3))
    call = call_of_pipeline(family, frames, types)

    # The pipeline begins with noise; its last tokens are the clip's.
    of_clip = batch.x0[0].numel() // len(batch.x0[0])
    x_t = call["hidden_states"][:, -of_clip:].transpose(1, 2).reshape(batch.x0.shape)
    cells = batch.conditioning_mask.expand_as(x_t)
    torch.testing.assert_close(x_t[cells], batch.x0[cells], atol=1e-5, rtol=0)

    network = Recorder()
    family.predict(network, x_t, torch.ones(1), batch)
    (own,) = network.calls
    for name in ("hidden_states", "timestep", "video_coords"):
        expected = call[name].expand_as(own[name])
        torch.testing.assert_close(own[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("condition", [LAST_FRAME, SUFFIX])
def test_what_is_appended_knows_nothing_of_the_rest(
    condition: dict[str, Any], ltx: Lab
) -> None:
    """And of the frames that are noised, none is left out of the loss."""
    frames = noise(FRAMES, SIDE, SIDE)
    shown = 1 if condition is LAST_FRAME else 17
    moved = frames.copy()
    moved[:-shown] = noise(FRAMES - shown, SIDE, SIDE, seed=9)
    batches = []
    for number, pixels in enumerate((frames, moved)):
        folder = write_folder(ltx.tmp / str(number), pixels)
        source = source_of(ltx, knobs(condition), folder)
        batches.append(plain_batch(source, source.buckets[0][0]))

    name = condition["type"]
    first, second = (batch.conditioning.extras[name] for batch in batches)
    assert torch.equal(first, second)
    assert first.shape[2] == (1 if condition is LAST_FRAME else 3)
    mask = batches[0].conditioning_mask[0, 0].flatten()
    assert mask.tolist() == [False] * 4 + [condition is SUFFIX]
    in_loss = batches[0].loss_mask[0, 0].flatten(1).amax(1) > 0
    assert torch.equal(in_loss, ~mask)


@pytest.mark.parametrize("condition", [LAST_FRAME, SUFFIX])
def test_it_moves_the_loss(condition: dict[str, Any], ltx: Lab) -> None:
    folder = write_folder(ltx.tmp / "clips", noise(FRAMES, SIDE, SIDE))
    trainer = trainer_of(ltx, knobs(condition) | {"steps": 1}, folder)
    assert take_steps(trainer).calls
    step = make_step_batch(trainer.source, 1)
    job = job_of(ltx, knobs(condition), folder)
    family = open_models(job.spec, job.base, job.config)
    net = family.denoiser()
    name = condition["type"]
    latents = step.batch.conditioning.extras[name]

    def loss_with(states: dict[str, torch.Tensor]) -> float:
        conditioning = replace(step.batch.conditioning, extras=states)
        batch: Batch = replace(step.batch, conditioning=conditioning)
        with torch.no_grad():
            output = denoising_loss(
                family, net, trainer.source.objective, batch, step.t, step.noise
            )
        return float(output.loss)

    losses = {loss_with({name: latents}), loss_with({name: -latents}), loss_with({})}
    assert len(losses) == 3


def test_all_samples_of_a_step_have_one_or_none(ltx: Lab) -> None:
    settings = knobs(LAST_FRAME | {"probability": 0.5}) | {"batch_size": 2}
    folder = write_folder(ltx.tmp / "clips", noise(FRAMES, SIDE, SIDE))
    source = source_of(ltx, settings, folder)
    counted = 0
    for step in range(1, 41):
        extras = make_step_batch(source, step).batch.conditioning.extras
        counted += "last_frame" in extras
    assert 12 <= counted <= 28


class Perfect(torch.nn.Module):
    """A network that knows the clip (1,C,F,H,W); what is given is clean or nearly so."""

    def __init__(self, clean: torch.Tensor) -> None:
        super().__init__()
        self.clean = clean.flatten(2).transpose(1, 2)
        self.counts: set[int] = set()

    def cache_context(self, *_: Any) -> Any:
        return torch.no_grad()

    def forward(self, hidden_states: Any, timestep: Any, **_: Any) -> Any:
        of_clip = self.clean.shape[1]
        if timestep.shape[1] == 1:
            timestep = timestep.expand(-1, of_clip)
        self.counts.add(hidden_states.shape[1])
        in_front = hidden_states.shape[1] - of_clip
        assert (timestep[:, :in_front] == 0).all()
        t = timestep[:, in_front:, None] / 1000
        velocity = (hidden_states[:, in_front:] - self.clean) / t.clamp(min=1e-6)
        velocity = velocity.where(t > 0, torch.zeros(()))
        return (torch.cat([hidden_states[:, :in_front] * 0, velocity], dim=1),)


@pytest.mark.parametrize(
    ("given", "tokens"), [({"last_frame": 1}, 1), ({"suffix": 3}, 2), ({}, 0)]
)
def test_a_perfect_network_ends_at_the_clip(
    given: dict[str, int], tokens: int, tiny_family: Callable[..., Any]
) -> None:
    family = tiny_family("ltx_video", variant="0.9.7")
    frames, rows, columns = size = family.spec.rules.latent_size(SHAPE)
    random = torch.Generator().manual_seed(3)
    channels = family.spec.latent_channels
    clean = torch.randn(1, channels, *size, generator=random)
    extras = {
        name: torch.randn(1, channels, count, rows, columns, generator=random)
        for name, count in given.items()
    }
    known = clean + 0.5
    known_mask = torch.zeros(1, 1, *size, dtype=torch.bool)
    known_mask[:, :, :2] = True
    if "suffix" in given:
        known[:, :, -1] = extras["suffix"][:, :, -1]
        known_mask[:, :, -1] = True

    text = family.encode_text(["a"])[0]
    states = text | {name: latents[0] for name, latents in extras.items()}
    request = SampleRequest(SHAPE, 12, 1.0, (1,), known=known, known_mask=known_mask)
    network = Perfect(clean)
    conditioning = family.collate_states([states])
    end = family.sample({"transformer": network}, conditioning, None, request)
    cells = known_mask.expand_as(end)
    assert network.counts == {(frames + tokens) * rows * columns}
    assert torch.equal(end[cells], known[cells])
    assert torch.allclose(end[~cells], clean[~cells], atol=5e-3)


def test_samples_follow_files(ltx: Lab) -> None:
    """Each kind of file, alone and together; another file is another video."""
    folder = write_folder(ltx.tmp / "clips", noise(FRAMES, SIDE, SIDE))
    job = job_of(ltx, knobs(SUFFIX, PREFIX, LAST_FRAME), folder)
    family = open_models(job.spec, job.base, job.config)
    nets = {"transformer": family.denoiser()}
    states = dict(zip(("a", ""), family.encode_text(["a", ""]), strict=True))
    image = str(write_image(ltx.tmp / "end.png", noise(1, SIDE, SIDE, 5)[0]))
    clip = ltx.tmp / "clip.mov"
    write_clip(clip, noise(FRAMES, SIDE, SIDE, 6), 16, codec="png", pix_fmt="rgb24")

    given = [
        GivenFiles(),
        GivenFiles(image=image),
        GivenFiles(last_frame=image),
        GivenFiles(prefix=str(clip)),
        GivenFiles(suffix=str(clip)),
        GivenFiles(image=image, suffix=str(clip)),
    ]
    conditions = encode_given(
        family, [(files, SHAPE) for files in given], job.config, "sample"
    )
    settings = SampleSettings(SHAPE, 2, 3.0)
    videos = draw(
        family,
        nets,
        settings,
        states.__getitem__,
        [("a", 1)] * len(given),
        conditions=[None, *conditions[1:]],
    )
    for number, video in enumerate(videos):
        assert video.shape[1:] == job.spec.rules.latent_size(SHAPE)
        for other in videos[:number]:
            assert not torch.allclose(video, other, atol=1e-3)
    prefix = conditions[3]
    assert prefix.known is not None
    assert prefix.known[:, 0, 0].tolist() == [True, True, False, False, False]
    assert torch.equal(videos[3][:, :2], prefix.mean[:, :2])


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("ltx_video", "0.9.0"),
        ("ltx_video", "0.9.1"),
        ("ltx_video", "0.9.7"),
        ("ltx2", "2.3"),
    ],
)
def test_the_vae_is_causal_so_a_prefix_may_be_cut_out_of_a_clip(
    name: str, variant: str, tiny_family: Callable[..., Any]
) -> None:
    family = tiny_family(name, variant=variant)
    clip = torch.rand(3, FRAMES, SIDE, SIDE) * 2 - 1
    other_end = clip.clone()
    other_end[:, 17:] = torch.rand(3, FRAMES - 17, SIDE, SIDE)
    latents, others = (family.encode_video(frames).mean for frames in (clip, other_end))
    torch.testing.assert_close(latents[:, :3], others[:, :3], atol=1e-5, rtol=0)
    assert not torch.allclose(latents[:, 3:], others[:, 3:], atol=1e-3)


def test_older_versions_take_a_first_frame_only(
    lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    older = replace(lab, model=tiny_bases("ltx_video", "0.9.1"))
    with pytest.raises(VideotuneError, match="it takes first_frame"):
        job_of(older, {"conditions": [LAST_FRAME]})
