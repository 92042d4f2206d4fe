"""Conditions on channels of the network: which a sample is shown, and that they know
nothing of the rest.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.trainers import Lab, job_of, source_of
from videotune.errors import VideotuneError
from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.batches import draws_of, make_step_batch
from videotune.sampling.given_files import GivenFiles, refuse_given
from videotune.sampling.given_latents import encode_given
from videotune.trainer.build import open_models, plain_batch
from videotune.types import ClipShape, ConditionPixels

FRAMES = 9
SIDE = 32


def knobs(*conditions: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "conditions": list(conditions),
        "resolution": f"{SIDE}x{SIDE}",
        "video_config.frames": FRAMES,
        "video_config.variants": 1,
        **settings,
    }


@pytest.fixture
def folder(lab: Lab) -> Path:
    frames = {"a.mkv": noise(FRAMES, SIDE, SIDE), "b.mkv": noise(FRAMES, SIDE, SIDE, 3)}
    return write_dataset(lab.tmp / "clips", frames, {}, fps=16)


def shown(source: BatchSource, step: int) -> list[tuple[frozenset[str], torch.Tensor]]:
    """The conditions of each sample of a step, and its mask channels (4,F)."""
    types = draws_of(source, step).condition_types
    image = make_step_batch(source, step).batch.conditioning.extras["image"]
    return list(zip(types, image[:, :4, :, 0, 0], strict=True))


@pytest.mark.effect("first_frame_probability")
def test_each_sample_is_shown_what_is_drawn_for_it(
    lab: Lab, folder: Path, tiny_bases: Callable[..., Path]
) -> None:
    model = replace(lab, model=tiny_bases("wan", "i2v-a14b"))
    settings = knobs(
        {"type": "last_frame", "probability": 0.5},
        first_frame_probability=0.5,
        batch_size=2,
        experts="both",
    )
    source = source_of(model, settings, folder)
    first = torch.tensor([[1, 0, 0]] * 4)
    last = torch.tensor([[0, 0, 0]] * 3 + [[0, 0, 1]])
    seen = set()
    for step in range(1, 17):
        for types, mask in shown(source, step):
            seen.add(types)
            expected = torch.zeros(4, 3)
            if "first_frame" in types:
                expected += first
            if "last_frame" in types:
                expected += last
            assert torch.equal(mask, expected)
    assert len(seen) == 4

    always = source_of(model, settings | {"first_frame_probability": 1.0}, folder)
    for types, mask in shown(always, 1):
        assert "first_frame" in types
        assert torch.equal(mask[:, 0], torch.ones(4))


def test_what_is_shown_knows_nothing_of_hidden_pixels(
    lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    model = replace(lab, model=tiny_bases("wan", "i2v"))
    frames = noise(FRAMES, SIDE, SIDE)
    other = noise(FRAMES, SIDE, SIDE, seed=5)
    other[-1] = frames[-1]
    other[:5] = frames[:5]
    settings = knobs({"type": "last_frame"}, {"type": "prefix", "latent_frames": 2})
    batches = []
    for number, pixels in enumerate((frames, other)):
        data = model.tmp / f"clips {number}"
        write_clip(data / "videos" / "a.mov", pixels, 16, codec="png", pix_fmt="rgb24")
        (data / "captions").mkdir()
        (data / "captions" / "a.txt").write_text("a clip", encoding="utf-8")
        source = source_of(model, settings, data)
        batches.append(plain_batch(source, source.buckets[0][0]))
    one, two = batches
    assert torch.equal(
        one.conditioning.extras["image"], two.conditioning.extras["image"]
    )
    assert not torch.equal(one.x0, two.x0)
    assert one.loss_mask.min() == 1, "all cells count"


def test_between_two_images_both_are_always_shown(
    lab: Lab, folder: Path, tiny_bases: Callable[..., Path]
) -> None:
    model = replace(lab, model=tiny_bases("wan", "flf2v"))
    settings = knobs()
    del settings["conditions"]
    source = source_of(model, settings, folder)
    assert [item.type for item in source.config.conditions] == ["last_frame"]
    for types, mask in shown(source, 1):
        assert types == {"first_frame", "last_frame"}
        assert mask.sum(0).tolist() == [4, 0, 1]
    job = job_of(model, settings, folder)
    with pytest.raises(VideotuneError, match="last_frame"):
        refuse_given(GivenFiles(image="a.png"), job.spec, job.config, "sample")
    for changes in (
        {"first_frame_probability": 0.5},
        {"conditions": [{"type": "last_frame", "probability": 0.5}]},
        {"conditions": []},
    ):
        with pytest.raises(VideotuneError, match="never runs without"):
            job_of(model, settings | changes, folder)


def test_too_many_sets_are_refused_unless_they_are_encoded_in_the_step(
    lab: Lab, folder: Path, tiny_bases: Callable[..., Path]
) -> None:
    model = replace(lab, model=tiny_bases("wan", "i2v"))
    types = ("last_frame", "prefix", "suffix", "mask")
    settings = knobs(*({"type": name, "probability": 0.5} for name in types))
    with pytest.raises(VideotuneError, match="16 sets"):
        job_of(model, settings, folder)
    job_of(model, settings | {"video_config.variants": 0}, folder)


def test_files_are_shown_where_they_belong(
    lab: Lab, folder: Path, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """From an image, to an image, continued, led to, and painted anew."""
    model = replace(lab, model=tiny_bases("wan", "i2v"))
    types = ("last_frame", "prefix", "suffix", "mask")
    job = job_of(model, knobs(*({"type": name} for name in types)), folder)
    family = open_models(job.spec, job.base, job.config)
    shape = ClipShape(FRAMES, SIDE, SIDE, 16.0)

    pixels = noise(FRAMES, SIDE, SIDE)
    clip = write_clip(tmp_path / "a.mov", pixels, 16, codec="png", pix_fmt="rgb24")
    image = write_image(tmp_path / "a.png", pixels[2])
    hole = np.zeros((SIDE, SIDE, 3), np.uint8)
    hole[8:24, 8:24] = 255
    mask = write_image(tmp_path / "mask.png", hole)

    given = {
        "image": ({"image": image}, {0: 2}),
        "last frame": ({"last_frame": image}, {8: 2}),
        "prefix": ({"prefix": clip}, {0: 8}),
        "suffix": ({"suffix": clip}, {5: 0, 6: 1, 7: 2, 8: 3}),
        "both": ({"prefix": clip, "last_frame": image}, {0: 8, 8: 2}),
        "mask": ({"video": clip, "mask": mask}, {}),
    }
    for files, places in given.values():
        frames = torch.zeros(3, FRAMES, SIDE, SIDE)
        known = torch.zeros(FRAMES, SIDE, SIDE, dtype=torch.bool)
        clean = torch.from_numpy(pixels).permute(3, 0, 1, 2) / 127.5 - 1
        for place, origin in places.items():
            frames[:, place] = clean[:, origin]
            known[place] = True
        if "mask" in files:
            frames = clean
            known[:] = torch.from_numpy(hole[..., 0] == 0)

        request = GivenFiles(**{name: str(path) for name, path in files.items()})
        refuse_given(request, job.spec, job.config, "sample")
        (found,) = encode_given(family, [(request, shape)], job.config, "sample")
        expected = family.channel_states(ConditionPixels(frames, known))
        for name, states in expected.items():
            torch.testing.assert_close(found.extras[name], states, atol=1e-5, rtol=0)
