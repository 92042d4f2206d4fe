"""What files beside the clips do: masks weigh the loss, start images take the place of
first frames.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.trainers import (
    Lab,
    job_of,
    run_steps,
    source_of,
    trainer_of,
)
from videotune.diffusion.loss import denoising_loss
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import draws_of, make_step_batch
from videotune.models.registry import find
from videotune.trainer.build import open_models, plain_batch

OUTSIDE_0 = {"loss_mask.outside": 0.0}


@pytest.fixture
def masked(lab: Lab) -> Path:
    """A dataset of one clip whose mask is white in the left half."""
    folder = write_dataset(lab.tmp / "masked", {"a.mp4": noise(9, 32, 32)}, {}, fps=16)
    write_image(folder / "masks" / "a.png", half_white(64))
    return folder


def half_white(side: int) -> np.ndarray:
    pixels = np.zeros((side, side, 3), np.uint8)
    pixels[:, : side // 2] = 255
    return pixels


def loss_mask(lab: Lab, folder: Path, **knobs: Any) -> torch.Tensor:
    """The weights of the cells of the first step's sample, (F,H,W) or (F,1,1)."""
    batch = make_step_batch(source_of(lab, knobs, folder), 1).batch
    assert batch is not None
    return batch.loss_mask[0, 0]


@pytest.mark.effect("loss_mask.inside", "loss_mask.outside")
def test_cells_weigh_as_their_mask_says(lab: Lab, masked: Path) -> None:
    assert (loss_mask(lab, masked) == 1).all()

    weights_of_cells = loss_mask(lab, masked, **OUTSIDE_0)
    frames, rows, columns = weights_of_cells.shape
    assert (frames, rows, columns) == (3, 4, 4)
    assert (weights_of_cells[..., :2] == 1).all()
    assert (weights_of_cells[..., 2:] == 0).all()

    knobs = {"loss_mask.inside": 3.0, "loss_mask.outside": 0.5}
    weights_of_cells = loss_mask(lab, masked, **knobs)
    assert (weights_of_cells[..., :2] == 3).all()
    assert (weights_of_cells[..., 2:] == 0.5).all()

    with pytest.raises(VideotuneError, match="loss_mask"):
        job_of(lab, {"loss_mask.inside": 0.0, "loss_mask.outside": 0.0}, masked)


def test_the_gradient_is_zero_where_the_weight_is(lab: Lab, masked: Path) -> None:
    source = source_of(lab, OUTSIDE_0, masked)
    step = make_step_batch(source, 1)
    assert step.batch is not None
    job = job_of(lab, OUTSIDE_0, masked)
    family = open_models(job.spec, job.base, job.config)

    def gradient_of_prediction(weight: torch.Tensor) -> torch.Tensor:
        prediction = torch.zeros_like(step.batch.x0).requires_grad_()
        family.predict = lambda *_: prediction
        batch = step.batch.map(lambda x: x)
        object.__setattr__(batch, "loss_mask", weight)
        output = denoising_loss(
            family, torch.nn.Identity(), source.objective, batch, step.t, step.noise
        )
        output.loss.backward()
        return prediction.grad

    masked_gradient = gradient_of_prediction(step.batch.loss_mask)
    assert (masked_gradient[..., 2:] == 0).all()
    assert (masked_gradient[..., :2] != 0).any()
    plain = gradient_of_prediction(torch.ones_like(step.batch.loss_mask))
    assert (plain[..., 2:] != 0).any()


def test_hidden_pixels_only_reach_the_input(lab: Lab, masked: Path) -> None:
    """Two clips that differ outside the mask have equal masks; training differs."""
    lines = run_steps(trainer_of(lab, OUTSIDE_0, masked), 2)
    plain_lines = run_steps(trainer_of(lab, {}, masked), 2)
    assert lines[0]["loss"] != plain_lines[0]["loss"]


@pytest.mark.effect("datasets.loss_masks")
def test_masks_may_lie_elsewhere(lab: Lab, masked: Path) -> None:
    elsewhere = lab.tmp / "elsewhere"
    write_image(elsewhere / "a.png", half_white(32)[:, ::-1])
    for folder, white in ((None, slice(0, 2)), (str(elsewhere), slice(2, 4))):
        rows = [{"path": str(masked), "loss_masks": folder}]
        weights_of_cells = loss_mask(lab, masked, datasets=rows, **OUTSIDE_0)
        expected = torch.zeros_like(weights_of_cells)
        expected[..., white] = 1
        assert torch.equal(weights_of_cells, expected)


def test_a_moving_mask_is_read_at_the_times_of_the_window(lab: Lab) -> None:
    """White in the second half of the time, as a compressed video."""
    folder = write_dataset(lab.tmp / "moving", {"a.mp4": noise(17, 32, 32)}, {}, fps=16)
    frames = np.zeros((17, 32, 32, 3), np.uint8)
    frames[9:] = 255
    write_clip(folder / "masks" / "a.mp4", frames, fps=16)
    weights_of_cells = loss_mask(
        lab, folder, **OUTSIDE_0, **{"video_config.frames": 17}
    )
    assert weights_of_cells[:, 0, 0].tolist() == [0, 0, 0, 1, 1]


def test_a_mask_is_cropped_and_mirrored_with_its_clip(lab: Lab, masked: Path) -> None:
    rows = [{"path": str(masked), "flip": "always"}]
    seen = set()
    for variants in (2, 0):
        knobs = {"datasets": rows, "video_config.variants": variants, **OUTSIDE_0}
        source = source_of(lab, knobs, masked)
        for step in range(1, 9):
            batch = make_step_batch(source, step).batch
            assert batch is not None
            columns = batch.loss_mask[0, 0, 0, 0].tolist()
            [(window, variant)] = draws_of(source, step).samples
            is_flipped = source.keys.frame_sample(window, variant).flipped
            assert columns == ([0, 0, 1, 1] if is_flipped else [1, 1, 0, 0])
            seen.add(is_flipped)
    assert seen == {True, False}


def test_alpha_is_the_mask_of_a_clip_without_a_mask_file(lab: Lab) -> None:
    pixels = np.full((32, 32, 4), 128, np.uint8)
    pixels[:, :16, 3] = 255
    pixels[:, 16:, 3] = 0
    still = lab.tmp / "still" / "a.png"
    still.parent.mkdir()
    from PIL import Image

    Image.fromarray(pixels, "RGBA").save(still)
    knobs = {"video_config.frames": 1, "missing_caption": "empty"}
    weights_of_cells = loss_mask(lab, still.parent, **OUTSIDE_0, **knobs)
    assert weights_of_cells[0, 0].tolist() == [1, 1, 0, 0]


def test_a_mask_is_cached_and_another_one_read_again(lab: Lab, masked: Path) -> None:
    def entries() -> set[str]:
        store = source_of(lab, OUTSIDE_0, masked).store
        return {key for kind, key in store.names() if kind == "masks"}

    job_before = job_of(lab, OUTSIDE_0, masked)
    before = entries()
    assert entries() == before

    pixels = half_white(64)[:, ::-1]
    write_image(masked / "masks" / "a.png", np.ascontiguousarray(pixels))
    assert len(entries() - before) == 1
    assert (loss_mask(lab, masked, **OUTSIDE_0)[..., :2] == 0).all()
    assert job_of(lab, OUTSIDE_0, masked).data_digest() != job_before.data_digest()


@pytest.fixture(params=["wan i2v", "wan ti2v", "ltx_video 0.9", "cogvideox 1.5-5b-i2v"])
def image_lab(request: pytest.FixtureRequest, lab: Lab) -> Lab:
    """A tiny model that takes a start image."""
    name, variant = request.param.split()
    family = find(name)
    variant = next(known for known in family.variants if variant in known)
    model = family.tiny(lab.tmp / "model", variant=variant)
    return replace(lab, model=model, cache=lab.tmp / "cache")


def test_a_start_image_takes_the_place_of_the_first_frame(image_lab: Lab) -> None:
    lab = image_lab
    clips = {"a.mp4": noise(17, 64, 64), "b.mp4": noise(17, 64, 64, seed=1)}
    folder = write_dataset(lab.tmp / "pair", clips, {}, fps=16)
    knobs = {
        "first_frame_probability": 1.0,
        "resolution": "64x64",
        "video_config.variants": 1,
        "video_config.frames": 17,
    }

    def conditioned() -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        source = source_of(lab, knobs, folder)
        batches = {}
        for bucket in source.buckets:
            for window in bucket:
                batch = plain_batch(source, window)
                name = Path(source.clips[window.clip_id].path).name
                extras = dict(batch.conditioning.extras)
                batches[name] = (batch.x0[0], extras)
        return batches

    before = conditioned()
    picture = noise(1, 64, 64, seed=7)[0]
    write_image(folder / "images" / "a.png", picture)
    after = conditioned()
    assert set(after) == {"a.mp4", "b.mp4"}, "the image is no clip"

    # The other clip is as before, to the bit.
    assert torch.equal(after["b.mp4"][0], before["b.mp4"][0])
    x0, extras = after["a.mp4"]
    x0_before, extras_before = before["a.mp4"]
    assert torch.equal(x0[:, 1:], x0_before[:, 1:])

    job = job_of(lab, knobs, folder)
    family = open_models(job.spec, job.base, job.config)
    frames = torch.from_numpy(picture).permute(2, 0, 1)[:, None].float() / 127.5 - 1
    if job.spec.image_conditioning == "replace":
        expected = family.encode_video(frames).mean
        torch.testing.assert_close(x0[:, :1], expected, atol=1e-5, rtol=0)
        assert not torch.equal(x0[:, :1], x0_before[:, :1])
    else:
        assert torch.equal(x0, x0_before)
        long = frames.expand(-1, 17, -1, -1).contiguous()
        expected = family.encode_video(long).extras["image"]
        torch.testing.assert_close(extras["image"][0], expected, atol=1e-5, rtol=0)
        assert not torch.equal(extras["image"], extras_before["image"])
