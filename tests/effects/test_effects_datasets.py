"""What the keys of a dataset do: its kind, its repeats, its weight in the loss, its own sizes and windows."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.clips import noise, write_dataset, write_image
from tests.effects.effects_kit import (
    Lab,
    gradients,
    in_cache,
    job_of,
    lines_of,
    pixels,
    run_steps,
    source_of,
    trainer_of,
)
from tests.runs import measure
from videotune.latent_cache.batches import prepare


def folder(lab: Lab, name: str, count: int = 2, frames: int = 9) -> Path:
    """So many clips of 32 x 32 that no other folder has."""
    clips = {f"{name}-{chr(97 + i)}.mp4": noise(frames, 32, 32, seed=100 * ord(name[0]) + i) for i in range(count)}
    return write_dataset(lab.tmp / name, clips, {}, fps=16)


@pytest.mark.effect("datasets.repeats", "datasets.kind")
@pytest.mark.parametrize(
    ("keys", "seen", "held_out"),
    [
        ({}, {"one": 2, "two": 2}, 0),
        ({"repeats": 3}, {"one": 2, "two": 6}, 0),
        ({"kind": "regularization"}, {"one": 2, "two": 2}, 0),
        ({"kind": "validation"}, {"one": 2}, 2),
    ],
)
def test_how_often_the_clips_of_a_dataset_are_trained_and_whether_they_are_measured(
    keys: dict[str, Any], seen: dict[str, int], held_out: int, lab: Lab
) -> None:
    rows = [{"path": str(folder(lab, "one"))}, {"path": str(folder(lab, "two")), **keys}]
    trainer = trainer_of(in_cache(lab, "own"), {"datasets": rows, "epochs": 1})
    names = {clip.id[:12]: Path(clip.path).stem[:3] for clip in trainer.job.library.clips}
    assert Counter(names[name[:12]] for line in run_steps(trainer) for name in line["window_ids"]) == seen
    assert max(trainer.job.exposure(trainer.job.steps).windows.values()) == keys.get("repeats", 1)
    measure(trainer, 0)
    (line,) = lines_of(trainer.run, "validation")
    assert (line["held_out"] or {"windows": 0})["windows"] == held_out


@pytest.mark.effect("datasets.kind", "datasets.prior_preservation")
def test_regularization_holds_the_model_to_what_the_base_predicts(lab: Lab) -> None:
    """Before the first step the adapter is nothing: held to the base the loss is exactly 0, held to the clips it is not."""
    one = folder(lab, "one", 1)

    def first_loss(row: dict[str, Any]) -> float:
        trainer = trainer_of(in_cache(lab, "own"), {"datasets": [{"path": str(one), **row}], "steps": 2})
        return run_steps(trainer, 1)[0]["loss"]

    as_training = first_loss({})
    assert as_training > 0.1
    assert first_loss({"kind": "regularization"}) == 0
    assert first_loss({"kind": "regularization", "prior_preservation": True}) == 0
    assert first_loss({"kind": "regularization", "prior_preservation": False}) == as_training


@pytest.mark.effect("datasets.loss_weight")
def test_a_samples_loss_is_multiplied(lab: Lab) -> None:
    one = folder(lab, "one", 1)

    def first_gradient(weight: float) -> torch.Tensor:
        rows = [{"path": str(one), "loss_weight": weight}]
        trainer = trainer_of(in_cache(lab, "own"), {"datasets": rows, "max_grad_norm": 1e9})
        with gradients(trainer) as seen:
            run_steps(trainer, 1)
        return torch.cat([gradient.flatten() for gradient in seen[0].values()])

    torch.testing.assert_close(first_gradient(2.5), 2.5 * first_gradient(1.0), rtol=1e-3, atol=1e-8)


def test_a_dataset_of_weight_0_is_as_good_as_not_there(lab: Lab) -> None:
    """Bit for bit: it takes no samples from the others."""
    one, other = folder(lab, "one", 2), folder(lab, "other", 4)
    rows: list[dict[str, Any]] = [{"path": str(one)}]
    losses = {}
    for weight in (None, 0, 1):
        more = [] if weight is None else [{"path": str(other), "kind": "regularization", "loss_weight": weight}]
        trainer = trainer_of(in_cache(lab, "own"), {"datasets": rows + more})
        losses[weight] = [(line["loss"], line["window_ids"]) for line in run_steps(trainer, 3)]
        assert any("left out: its loss_weight is 0" in note for note in trainer.job.notes) == (weight == 0)
    assert losses[None] == losses[0]
    assert losses[None] != losses[1]


@pytest.mark.effect("datasets.resolution", "datasets.windows")
@pytest.mark.parametrize(
    ("knob", "sizes", "counts"),
    [
        ({}, [32] * 6, [3, 3]),
        ({"resolution": "16x32"}, [32] * 3 + [16] * 3, [3, 3]),
        ({"windows": "head"}, [32] * 4, [3, 1]),
    ],
)
def test_a_dataset_has_its_own_resolution_and_windows(
    lab: Lab, knob: dict[str, str], sizes: list[int], counts: list[int]
) -> None:
    rows = [{"path": str(folder(lab, "one", 1, 27))}, {"path": str(folder(lab, "two", 1, 27)), **knob}]
    job = job_of(in_cache(lab, "own"), {"datasets": rows})
    assert [frames.shape[1] for frames in pixels(job).values()] == sizes
    assert [account["windows"] for account in job.library.accounts] == counts


@pytest.mark.effect("resize")
def test_frames_are_cropped_padded_or_distorted(lab: Lab) -> None:
    """A wide clip, its left half white, at a square size: what is seen of both halves."""
    frames = np.zeros((9, 32, 64, 3), np.uint8)
    frames[:, :, :32] = 255
    data = write_dataset(lab.tmp / "data", {"a.mp4": frames}, {}, fps=16)

    def seen(resize: str, variant: int = 0) -> np.ndarray:
        job = job_of(in_cache(lab, "own"), {"resize": resize}, data)
        (clip,) = pixels(job, variant).values()
        assert clip.shape == (9, 32, 32, 3)
        return clip[4, :, :, 0] > 127

    assert seen("center").mean() == pytest.approx(0.5, abs=0.04)
    assert seen("stretch").mean() == pytest.approx(0.5, abs=0.04)
    padded = seen("pad")
    assert not padded[:8].any()
    assert not padded[24:].any()
    assert padded[10:22, :15].all()
    shares = {round(seen("random", variant).mean(), 2) for variant in range(4)}
    assert len(shares) > 2, "a crop somewhere else for each variant"


@pytest.mark.effect("video_config.video_batch_size_multiplier")
def test_videos_among_images_come_in_smaller_batches(lab: Lab) -> None:
    data = folder(lab, "one", 3)
    for i in range(6):
        image = write_image(data / f"still{i}.png", np.full((32, 32, 3), 40 * i, np.uint8))
        image.with_suffix(".txt").write_text("a picture", encoding="utf-8")

    def batches(multiplier: float) -> dict[int, set[int]]:
        knobs = {"batch_size": 4, "video_config.video_batch_size_multiplier": multiplier, "epochs": 4}
        source = source_of(in_cache(lab, "own"), knobs, data)
        found: dict[int, set[int]] = {}
        for step in range(1, 13):
            batch = prepare(source, step).batch
            found.setdefault(batch.x0.shape[2], set()).add(len(batch))
        return found

    assert batches(0.5) == {3: {2}, 1: {4}}
    assert batches(0.1) == {3: {1}, 1: {4}}
    assert batches(1.0) == {3: {4}, 1: {4}}
    alone = job_of(lab, {"batch_size": 4, "video_config.video_batch_size_multiplier": 0.25}, folder(lab, "two"))
    assert alone.schedule.batches == (4,)
    assert any("unused" in note for note in alone.notes)
