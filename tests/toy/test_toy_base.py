"""The toy base model that is shipped: it rebuilds clips, and draws combinations that no caption of its training had."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from toymaking import finish
from toymaking.autoencoder import held_out_clips, psnr, rebuilt

from videotune.models.base_model import place
from videotune.toy.dataset import CONCEPT
from videotune.toy.detect import detect
from videotune.toy.shapes import HELD_OUT, TEMPLATES, caption


@pytest.fixture(scope="module")
def pipeline() -> Any:
    found = WanPipeline.from_pretrained(place("asset:toy").folder, dtype=torch.float32)
    found.set_progress_bar_config(disable=True)
    return found


def drawn(pipeline: Any, count: int) -> dict[str, float]:
    """What the detector says of so many samples of held-out looks, each look with each template before one comes twice."""
    looks = [HELD_OUT[index * 7 % 24] for index in range(count)]
    captions = [caption(*look, (index + index // 24) % len(TEMPLATES)) for index, look in enumerate(looks)]
    return finish.shares(finish.sample(pipeline, captions, list(range(count))), looks)


def test_the_shipped_autoencoder_rebuilds_clips_that_it_never_saw() -> None:
    vae = AutoencoderKLWan.from_pretrained(place("asset:toy").folder / "vae", torch_dtype=torch.float32)
    clips = held_out_clips("base", 4)
    assert psnr(clips, rebuilt(vae, clips)) >= 32
    concept = finish.to_bytes(rebuilt(vae, held_out_clips("concept", 2)))
    assert [(one.colour, one.shape) for one in map(detect, concept)] == [CONCEPT] * 2


def test_the_shipped_model_draws_what_no_caption_of_its_training_said(pipeline: Any) -> None:
    shares = drawn(pipeline, 8)
    assert min(shares[name] for name in ("colour", "shape", "direction")) >= 0.75  # at most two of eight are wrong


@pytest.mark.long
def test_the_shipped_model_draws_48_held_out_combinations(pipeline: Any) -> None:
    shares = drawn(pipeline, 48)
    assert shares["colour"] >= 0.95
    assert min(shares["shape"], shares["direction"]) >= 0.85


def test_nothing_that_is_shipped_names_a_folder_of_its_making() -> None:
    folder = place("asset:toy").folder
    assert not [path for path in folder.rglob("*.json") if "_name_or_path" in path.read_text()]
