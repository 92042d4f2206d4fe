"""Sound: what is learnt of a clip, and how much it counts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sounding_clips import write_sounding_clips
from tests.support.trainers import Lab, job_of, source_of, take_steps, trainer_of
from videotune.diffusion.loss import denoising_loss
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.trainer.build import make_objective, open_models, plain_batch
from videotune.trainer.loop import train_steps
from videotune.validation.selection import preview_windows

CHOICES = (None, ["video", "sound"], ["sound"], ["video"])


@pytest.fixture
def sounding(lab: Lab, tiny_bases: Callable[..., Path], tmp_path: Path) -> Lab:
    """A tiny LTX-2, clips of which two have sound and one has none."""
    clips = write_sounding_clips(tmp_path / "sounding", sounding=2, silent=1)
    return replace(lab, model=tiny_bases("ltx2"), clips=clips)


def knobs(generate: Any, **more: Any) -> dict[str, Any]:
    return {
        "generate": generate,
        "video_config.frames": 17,
        "lora.targets": "all",
    } | more


@pytest.mark.effect("generate")
def test_what_is_generated_decides_what_is_noised_and_what_counts(
    sounding: Lab,
) -> None:
    seen = {}
    for generate in CHOICES:
        source = source_of(sounding, knobs(generate))
        window = source.buckets[0][0]
        batches = [make_step_batch(source, step) for step in (1, 2, 3)]
        batch = next(
            each.batch
            for each in batches
            if each.batch and (each.batch.sound or not generate)
        )
        sound = batch.sound
        seen[str(generate)] = (
            window.shape.sound,
            None if sound is None else sound.is_conditioning,
            batch.video_is_conditioning,
        )
        if sound is None:
            continue
        assert bool(sound.noise.any()) is ("sound" in generate)
        assert bool((sound.t > 0).all()) is ("sound" in generate)
        assert bool(batch.conditioning_mask.all()) is ("video" not in generate)
        assert bool(batch.loss_mask.any()) is ("video" in generate)
    assert seen == {
        "None": (False, None, False),
        "['video', 'sound']": (True, False, False),
        "['sound']": (True, False, True),
        "['video']": (True, True, False),
    }


@pytest.mark.parametrize("generate", CHOICES[1:], ids=str)
def test_a_run_moves_what_it_learns_and_its_journal_says_which_part(
    sounding: Lab, generate: list[str]
) -> None:
    trainer = trainer_of(sounding, knobs(generate, steps=3))
    lines = take_steps(trainer, 3).lines
    with_sound = [line for line in lines if "sound" in line]
    assert bool(with_sound) is (generate == ["video", "sound"])
    moved = {name for name, value in trainer.parameters.items() if value.any()}
    of_sound = {name for name in moved if "audio_attn1" in name and "lora_B" in name}
    assert of_sound
    for line in with_sound:
        assert line["loss"] == pytest.approx(
            line["mse"] + line["sound"]["mse"], rel=1e-5
        )


@pytest.mark.effect("sound.loss_weight")
def test_the_weight_of_sound_scales_its_part_of_the_loss(sounding: Lab) -> None:
    losses = {}
    for weight in (1.0, 4.0):
        chosen = knobs(["video", "sound"], **{"sound.loss_weight": weight})
        source = source_of(sounding, chosen)
        job = job_of(sounding, chosen)
        family = open_models(job.spec, job.base, job.config)
        bucket = next(each for each in source.buckets if each[0].shape.sound)
        batch = plain_batch(source, bucket[0])
        assert batch.sound is not None
        t = torch.full((1,), 0.5)
        batch = replace(batch, sound=replace(batch.sound, t=t))
        with torch.no_grad():
            output = denoising_loss(
                family,
                family.denoiser(),
                make_objective(job.spec, job.config),
                batch,
                t,
                torch.zeros_like(batch.x0),
            )
        assert output.sound_mse is not None
        expected = output.mse + weight * output.sound_mse
        torch.testing.assert_close(output.loss, expected.mean())
        losses[weight] = float(output.loss)
    assert losses[4.0] > losses[1.0]


def test_silent_clips_change_no_weight_of_sound(sounding: Lab) -> None:
    """Also with weight decay, and after steps with sound gave the optimizer momentum."""
    chosen = knobs(["video", "sound"], **{"optimizer.weight_decay": 0.1, "steps": 6})
    trainer = trainer_of(sounding, chosen)
    source = trainer.source
    records = train_steps(trainer)
    kinds = set()
    for step in range(1, 7):
        batch = make_step_batch(source, step).batch
        assert batch is not None
        before = {name: value.clone() for name, value in trainer.parameters.items()}
        next(records).read()
        moved = {
            name
            for name, value in trainer.parameters.items()
            if not torch.equal(value, before[name])
        }
        of_sound = {name for name in moved if "audio" in name}
        assert bool(of_sound) is (batch.sound is not None)
        kinds.add(batch.sound is not None)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    "wrong",
    [
        {"conditions": [{"type": "prefix"}]},
        {"first_frame_probability": 0.5},
        {"video_config.frame_dropout_probability": 0.1},
        {"video_config.temporal_consistency_weight": 0.5},
        {"sound.loss_weight": 2.0},
        {"video_config.use_temporal_attention": False},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_cannot_act_beside_foley_is_refused(
    sounding: Lab, wrong: dict[str, Any]
) -> None:
    with pytest.raises(VideotuneError):
        job_of(sounding, knobs(["sound"], **wrong))


def test_a_model_without_sound_is_refused_by_the_key(lab: Lab) -> None:
    with pytest.raises(VideotuneError, match="generate"):
        job_of(lab, {"generate": ["video", "sound"]})


def test_previews_of_a_given_modality_take_it_from_a_clip_with_sound(
    sounding: Lab,
) -> None:
    for generate in (["sound"], ["video"]):
        previews = {"sample_after": 1, "samples": 1, "sample.steps": 2}
        job = job_of(sounding, knobs(generate, **previews))
        windows = list(preview_windows(job).values())
        assert windows
        assert all(window.shape.sound for window in windows)
