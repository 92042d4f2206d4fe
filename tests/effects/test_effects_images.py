"""What the keys about first frames, isolated frames and the second expert's guidance do to what is fed and drawn."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.effects.effects_kit import Lab, film, run_steps, trainer_of, watched
from tests.runs import preview
from videotune.commands.sample import SampleOptions, open_sampler, render
from videotune.latent_cache.batches import prepare
from videotune.trainer.trainer import Trainer


@pytest.fixture
def kind(lab: Lab, tiny_bases: Callable[..., Path]) -> Callable[[str], Lab]:
    """The lab with another kind of model, and a cache of its own."""
    return lambda variant: replace(lab, model=tiny_bases("wan", variant), cache=lab.tmp / variant)


@pytest.mark.effect("first_frame_probability")
def test_the_share_has_a_clean_first_frame_at_noise_level_0(kind: Callable[[str], Lab]) -> None:
    for share in (0.0, 1.0, None):
        trainer = trainer_of(kind("ti2v"), {"first_frame_probability": share, "steps": 3})
        with watched(trainer.net) as calls:
            run_steps(trainer)
        for step, call in enumerate(calls, 1):
            x0 = prepare(trainer.source, step).batch.x0
            clean = torch.equal(call["x_t"][:, :, 0], x0[:, :, 0])
            assert clean == (share == 1.0)
            zeros = call["t"].view(1, -1).eq(0)[0].tolist() if call["t"].ndim == 2 else [False]
            assert zeros == ([True, False, False] if share == 1.0 else [False]), "a token a latent frame"


@pytest.mark.effect("first_frame_probability")
def test_an_image_model_is_conditioned_on_its_image_or_zeros(kind: Callable[[str], Lab]) -> None:
    for share, conditioned in ((0.0, False), (1.0, True), (None, True)):
        trainer = trainer_of(kind("i2v"), {"first_frame_probability": share, "steps": 2})
        with watched(trainer.net) as calls:
            run_steps(trainer)
        mask, image = (calls[0]["x_t"][:, part] for part in (slice(4, 8), slice(8, 12)))
        assert mask[:, :, 0].eq(float(conditioned)).all()
        assert bool(image.any()) == conditioned


def sees_other_frames(trainer: Trainer) -> bool:
    """Whether what the network says of the first frame hangs on the last one."""
    one = prepare(trainer.source, 1)
    moved = one.batch.x0.clone()
    moved[:, :, -1] += 1
    with torch.no_grad():
        said = [trainer.family.predict(trainer.net, x_t, one.t, one.batch) for x_t in (one.batch.x0, moved)]
    assert not torch.equal(said[0][:, :, -1], said[1][:, :, -1])
    return not torch.equal(said[0][:, :, 0], said[1][:, :, 0])


@pytest.mark.effect("video_config.use_temporal_attention")
def test_frames_attend_to_each_other_or_to_themselves_alone(lab: Lab) -> None:
    losses = []
    for on in (True, False):
        trainer = trainer_of(lab, {"video_config.use_temporal_attention": on})
        assert sees_other_frames(trainer) == on
        losses.append(run_steps(trainer, 1)[0]["loss"])
    assert losses[0] != losses[1]


@pytest.mark.effect("sample.use_temporal_attention", "video_config.use_temporal_attention")
def test_previews_run_the_model_as_shipped_unless_set_otherwise(lab: Lab) -> None:
    """However the run trains; and afterwards it trains as before."""
    drawn: dict[tuple[bool, bool], np.ndarray] = {}
    for trained in (True, False):
        for sampled in (True, False):
            knobs: dict[str, Any] = {"samples": ["a cat"], "sample.steps": 2}
            knobs |= {"video_config.use_temporal_attention": trained, "sample.use_temporal_attention": sampled}
            trainer = trainer_of(lab, knobs)
            preview(trainer, 0)
            drawn[trained, sampled] = film(next((trainer.run / "samples").glob("*.mp4"))).astype(int)
            assert sees_other_frames(trainer) == trained
    assert np.array_equal(drawn[True, True], drawn[False, True])
    assert np.array_equal(drawn[True, False], drawn[False, False])
    assert np.abs(drawn[True, True] - drawn[True, False]).max() > 0


@pytest.mark.effect("sample.guidance_2")
def test_the_second_expert_has_guidance_of_its_own(lab: Lab, tiny_bases: Callable[..., Path]) -> None:
    """Its first expert alone draws the first half: with one step there is no other, and the key changes nothing."""
    base = str(tiny_bases("wan", "t2v-a14b"))

    def drawn(steps: int, guidance_2: float | None) -> np.ndarray:
        sets = ["sample.frames=5", "sample.resolution=32x32", f"sample.steps={steps}", "sample.guidance=4"]
        sets += [] if guidance_2 is None else [f"sample.guidance_2={guidance_2}"]
        sampler = open_sampler(SampleOptions(("a cat",), 1, base=base, sets=tuple(sets)))
        return render(sampler, ["a cat"], [1])[0].astype(int)

    assert np.array_equal(drawn(8, None), drawn(8, 4))
    assert np.abs(drawn(8, 1) - drawn(8, 4)).max() > 0
    assert np.array_equal(drawn(1, 1), drawn(1, 8))
