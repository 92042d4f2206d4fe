"""Control channels of Wan VACE: kept pixels, a control clip and a mask, as diffusers'
pipeline makes them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.trainers import Lab, job_of, source_of, take_steps, trainer_of
from videotune.adapters.lora import add_lora
from videotune.config.sections import Lora
from videotune.sampling.given_files import GivenFiles, refuse_given
from videotune.sampling.given_latents import encode_given
from videotune.sampling.pipeline import SampleSettings, draw
from videotune.trainer.build import open_models, plain_batch
from videotune.types import ClipShape, ConditionPixels

FRAMES = 17
SIDE = 32
SHAPE = ClipShape(FRAMES, SIDE, SIDE, 16.0)


def knobs(*conditions: Any, **settings: Any) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": item} if isinstance(item, str) else item for item in conditions
        ],
        "resolution": f"{SIDE}x{SIDE}",
        "video_config.frames": FRAMES,
        "video_config.variants": 1,
        **settings,
    }


@pytest.fixture
def vace(lab: Lab, tiny_bases: Callable[..., Path]) -> Lab:
    return replace(lab, model=tiny_bases("wan_vace", "vace"))


@pytest.fixture
def folder(lab: Lab) -> Path:
    clips = {f"{name}.mkv": noise(FRAMES, SIDE, SIDE, i) for i, name in enumerate("ab")}
    folder = write_dataset(lab.tmp / "clips", clips, {}, fps=16)
    for seed, name in enumerate("ab", 20):
        frames = noise(FRAMES, SIDE, SIDE, seed)
        path = folder / "controls" / f"{name}.mov"
        write_clip(path, frames, 16, codec="png", pix_fmt="rgb24")
    return folder


def to_model(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames).permute(3, 0, 1, 2) / 127.5 - 1


@pytest.mark.effect("conditions")
@pytest.mark.parametrize("conditions", [(), ("control",), ("control", "first_frame")])
def test_a_batch_shows_what_the_pipeline_would(
    conditions: tuple[str, ...], vace: Lab, folder: Path
) -> None:
    """Also if nothing is shown: grey, which is an entry of its own for all clips."""
    settings = knobs(*conditions)
    source = source_of(vace, settings, folder)
    job = job_of(vace, settings, folder)
    family = open_models(job.spec, job.base, job.config)
    window = source.buckets[0][0]
    name = Path(source.clips[window.clip_id].path).stem

    pipe = diffusers.WanVACEPipeline(
        None, None, vae=family.vae(), scheduler=None, transformer=family.denoiser()
    )
    clip = family_clip(source.clips[window.clip_id].path)
    video = torch.zeros(1, 3, FRAMES, SIDE, SIDE)
    mask = torch.ones_like(video)
    if "control" in conditions:
        video = to_model(noise(FRAMES, SIDE, SIDE, 20 + "ab".index(name)))[None].clone()
    if "first_frame" in conditions:
        video[:, :, 0] = clip[:, 0]
        mask[:, :, 0] = 0
    cpu = torch.device("cpu")
    with torch.no_grad():
        latents = pipe.prepare_video_latents(video, mask, [[]], None, cpu)
        expected = torch.cat([latents, pipe.prepare_masks(mask, [[]])], dim=1)
    shown = plain_batch(source, window).conditioning.extras["control"]
    torch.testing.assert_close(shown, expected, atol=1e-5, rtol=0)


def family_clip(path: str) -> torch.Tensor:
    """The frames of a clip as the trainer decodes them."""
    from videotune.data.decode import decode
    from videotune.data.probe import probe

    times = [frame / 16 for frame in range(FRAMES)]
    return to_model(decode(probe(Path(path)), times, SIDE, SIDE))


def test_the_mask_is_the_pipelines_own_subsampling(
    tiny_family: Callable[..., Any],
) -> None:
    """Of 17 frames the five latent ones show the mask of frames 1, 5, 8, 11 and 15: a
    known first frame is not seen in it.
    """
    family = tiny_family("wan_vace")
    frames = torch.zeros(3, FRAMES, SIDE, SIDE)
    for known_frame, seen in ((0, []), (1, [0]), (8, [2]), (15, [4]), (16, [])):
        known = torch.zeros(FRAMES, SIDE, SIDE, dtype=torch.bool)
        known[known_frame] = True
        states = family.channel_states(ConditionPixels(frames, known))["control"]
        is_zero = (states[2 * family.spec.latent_channels :] == 0).flatten(2).all(2)
        assert is_zero.all(0).nonzero().flatten().tolist() == seen


def test_what_is_hidden_changes_nothing_that_is_shown(vace: Lab) -> None:
    frames = noise(FRAMES, SIDE, SIDE)
    other = frames.copy()
    other[:, :, 16:] = noise(FRAMES, SIDE, 16, 7)
    hole = np.zeros((SIDE, SIDE, 3), np.uint8)
    hole[:, 16:] = 255
    batches = []
    for number, pixels in enumerate((frames, other)):
        data = vace.tmp / f"clips {number}"
        write_clip(data / "videos" / "a.mov", pixels, 16, codec="png", pix_fmt="rgb24")
        write_image(data / "masks" / "a.png", hole)
        (data / "captions").mkdir()
        (data / "captions" / "a.txt").write_text("a clip", encoding="utf-8")
        source = source_of(vace, knobs("mask"), data)
        batches.append(plain_batch(source, source.buckets[0][0]))
    one, two = (batch.conditioning.extras["control"] for batch in batches)
    assert torch.equal(one, two)
    assert not torch.equal(batches[0].x0, batches[1].x0)
    assert batches[0].loss_mask.min() == 1


def test_a_lora_covers_both_lists_of_blocks(vace: Lab, folder: Path) -> None:
    settings = knobs({"type": "control", "probability": 0.5}, steps=2, batch_size=2)
    trainer = trainer_of(vace, settings, folder)
    assert len(take_steps(trainer).calls) == 2

    net = trainer.family.denoiser()
    state = add_lora(net, trainer.family.spec, Lora(rank=2), seed=0)
    for blocks in ("vace_blocks", "blocks"):
        assert any(f".{blocks}.0." in f".{name}" for name in state)


def test_a_base_model_is_given_what_it_is_made_for(vace: Lab, folder: Path) -> None:
    """Without a run that learns it."""
    job = job_of(vace, knobs(), folder)
    for name in ("image", "last_frame", "prefix", "suffix", "control", "reference"):
        refuse_given(GivenFiles(**{name: "a"}), job.spec, job.config, "sample")


@pytest.mark.parametrize("variant", ["vace", "vace-a14b"])
def test_sampling_shows_the_files(
    variant: str, lab: Lab, folder: Path, tiny_bases: Callable[..., Path]
) -> None:
    model = replace(lab, model=tiny_bases("wan_vace", variant))
    settings = knobs("control", "last_frame")
    if variant == "vace-a14b":
        settings["experts"] = "both"
    job = job_of(model, settings, folder)
    family = open_models(job.spec, job.base, job.config)
    nets = {expert.name: family.denoiser(expert.name) for expert in job.spec.experts}
    states = dict(zip(("a", ""), family.encode_text(["a", ""]), strict=True))
    image = write_image(lab.tmp / "end.png", noise(1, SIDE, SIDE)[0])

    files = [
        GivenFiles(control=str(folder / "controls" / "a.mov")),
        GivenFiles(control=str(folder / "controls" / "a.mov"), last_frame=str(image)),
    ]
    requests = [(given, SHAPE) for given in files]
    conditions = [None, *encode_given(family, requests, job.config, "sample")]
    videos = draw(
        family,
        nets,
        SampleSettings(SHAPE, 2, 3.0),
        states.__getitem__,
        [("a", 1)] * 3,
        conditions=conditions,
    )
    for number, video in enumerate(videos):
        for other in videos[number + 1 :]:
            assert not torch.allclose(video, other, atol=1e-4)
