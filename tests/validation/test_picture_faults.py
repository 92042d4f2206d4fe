"""Black, flat, frozen and noisy samples are recognised; good samples are not."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import noise
from tests.support.families import open_family
from tests.support.landscapes import pan
from videotune.model_spec import VideoRules
from videotune.sampling.picture_faults import (
    describe_faults,
    describe_sound,
    faults_of,
    faulty_kinds,
    faulty_share,
    remark_at,
    samples_at,
)
from videotune.sampling.picture_measure import measure_picture
from videotune.sampling.pipeline import decode
from videotune.sampling.sample_files import measure_sound
from videotune.toy.shapes import DIRECTIONS, SHAPES, draw_clip

RULES = VideoRules(4, 1, 16, 16.0, spatial_stride=8, temporal_stride=4)


def fault(frames: Any, rules: VideoRules = RULES) -> str | float | None:
    return measure_picture(np.asarray(frames, np.uint8), rules)["fault"]


def still(picture: np.ndarray, count: int = 9) -> np.ndarray:
    return np.repeat(picture[None], count, axis=0)


@pytest.mark.parametrize("level", [0, 9, 20])
def test_a_dark_sample_is_black_whether_or_not_a_coder_left_specks(level: int) -> None:
    dark = np.full((9, 64, 96, 3), level, np.uint8)
    assert fault(dark) == "black"
    dark[:, ::7, ::5] += 3
    assert fault(dark) == "black"
    dark[4] = 255  # one flash
    assert fault(dark) == "black"


@pytest.mark.parametrize("colour", [(128, 128, 128), (255, 255, 255), (200, 30, 30)])
def test_a_sample_of_one_colour_is_flat(colour: Sequence[int]) -> None:
    assert fault(np.full((9, 64, 96, 3), colour)) == "flat"


def test_a_night_scene_with_a_lamp_is_neither_black_nor_flat() -> None:
    night = pan(3, np.arange(9.0) * 4) // 12
    night[:, 40:64, 60:84] = 180
    assert fault(night) is None


def test_a_sample_that_does_not_move_is_frozen_and_a_slow_one_is_not() -> None:
    picture = pan(1, [0.0])[0]
    assert fault(still(picture)) == "frozen"

    grain = np.random.default_rng(0).integers(-4, 5, (9, *picture.shape))
    assert fault(np.clip(still(picture).astype(int) + grain, 0, 255)) == "frozen"
    assert fault(pan(1, np.arange(9.0))) is None


def test_an_image_is_never_frozen() -> None:
    assert fault(pan(1, [0.0])) is None
    assert measure_picture(pan(1, [0.0]), RULES)["change"] is None


def test_noise_is_recognised_as_pixels_as_an_image_and_as_a_still() -> None:
    assert fault(noise(9)) == "noise"
    assert fault(noise(1)) == "noise"
    assert fault(still(noise(1)[0])) == "noise"


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_decoded_noise_is_noise(scale: float) -> None:
    family = open_family(
        "WAN", Path(str(resources.files("videotune"))) / "assets" / "toy"
    )
    generator = torch.Generator().manual_seed(0)
    channels = family.spec.latent_channels
    latents = [
        torch.randn(channels, 5, side, side, generator=generator) * scale
        for side in (8, 16)
    ]
    for frames in decode(family, latents):
        assert fault(frames, family.spec.rules) == "noise"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [32, 64])
def test_toy_clips_have_no_fault(shape: str, side: int) -> None:
    rng = np.random.default_rng(1)
    for colour in ("blue", "red", "white"):
        for direction in DIRECTIONS:
            clip = draw_clip(rng, colour, shape, direction, side=side)
            assert fault(clip) is None, (colour, direction)


def sample(step: int, name: str | None) -> dict[str, Any]:
    return {"kind": "sample", "step": step, "picture": {"fault": name}}


def test_the_remark_counts_the_samples_of_a_step_by_their_fault() -> None:
    measured = {
        "kind": "sample_metrics",
        "step": 200,
        "samples": [{"picture": {"fault": "frozen"}}, {"picture": {"fault": None}}],
    }
    lines = [
        sample(100, "noise"),
        *(sample(200, name) for name in ("black", "black", None)),
        measured,
    ]
    remark = remark_at(lines, 200)
    assert len(samples_at(lines, 200)) == 5
    assert remark == (
        "of 3 previews, 2 are black; "
        "of 2 samples of the sample metrics, 1 is without motion"
    )
    assert remark_at(lines, 100) == "of 1 preview, 1 is noise"
    assert remark_at(lines, 300) == ""
    assert faulty_kinds(lines, 200) == ["sample", "sample_metrics"]
    assert faulty_share(lines, 200) == 0.6


def test_samples_without_a_fault_are_counted_beside_the_others() -> None:
    measured = {"picture": {"fault": "flat"}}
    lines = [
        sample(120, None),
        {"kind": "sample_metrics", "step": 120, "samples": [measured, {}, {}]},
    ]
    assert remark_at(lines, 120) == (
        "of 1 preview, none has a fault; "
        "of 3 samples of the sample metrics, 1 is nearly all of one flat colour"
    )
    assert faulty_kinds(lines, 120) == ["sample_metrics"]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"picture": None},
        {"picture": []},
        {"picture": {"fault": 3}},
        {"picture": {"fault": "burnt"}},
        {"picture": {"fault": ["black"]}},
    ],
)
def test_a_record_of_an_earlier_or_foreign_version_has_no_fault(
    record: dict[str, Any],
) -> None:
    assert faults_of(record) == []
    assert remark_at([{"kind": "sample", "step": 1} | record], 1) == ""


@pytest.mark.parametrize(
    ("sound", "faults", "loudness"),
    [
        ({"loudness": -21.4, "clipped": 0.0}, [], "sound −21 dB"),
        ({"loudness": -60.0, "clipped": 0.001}, [], "sound −60 dB"),
        ({"loudness": -60.1, "clipped": 0.0}, ["silent"], "sound −60 dB"),
        ({"loudness": -120.0, "clipped": 0.0}, ["silent"], "sound −120 dB"),
        ({"loudness": -1.0, "clipped": 0.0011}, ["clipped"], "sound −1 dB"),
        ({"loudness": -0.3, "clipped": 1.0}, ["clipped"], "sound 0 dB"),
        ({"loudness": None}, [], ""),
        ("loud", [], ""),
        (None, [], ""),
    ],
)
def test_silent_and_clipped_sound_are_faults(
    sound: Any, faults: list[str], loudness: str
) -> None:
    record = sample(3, None) | {"sound": sound}
    assert faults_of(record) == faults
    assert describe_sound(record) == loudness


def test_a_sample_has_faults_of_picture_and_sound() -> None:
    record = sample(3, "black") | {"sound": {"loudness": -90.0, "clipped": 0.0}}
    assert faults_of(record) == ["black", "silent"]
    assert describe_faults(record) == "black, silent"
    assert remark_at([record], 3) == "of 1 preview, 1 is black, 1 is silent"


def test_the_sound_of_a_sample_is_measured() -> None:
    """A sine of half the full scale is 9 dB below it; one that is cut off is clipped."""
    seconds = np.arange(16000) / 16000
    sine = np.sin(2 * np.pi * 440 * seconds).astype(np.float32)
    stereo = np.stack([sine, sine])
    assert measure_sound(0.5 * stereo) == {"loudness": -9.0, "clipped": 0.0}
    assert measure_sound(0 * stereo) == {"loudness": -120.0, "clipped": 0.0}
    cut = measure_sound(np.clip(2 * stereo, -1, 1))
    assert cut["clipped"] == pytest.approx(2 / 3, abs=0.01)
