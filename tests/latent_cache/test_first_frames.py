"""First frames that samples are told, on channels of their own or in place of noise, and noise drawn onto them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data_kit import with_config
from tests.latent_cache.conftest import Make
from tests.runs import fill as fill_cache
from videotune.diffusion.loss import denoising_loss
from videotune.latent_cache.batches import Source, prepare
from videotune.latent_cache.encode import CacheItems, encode_sample, entries_of, missing
from videotune.latent_cache.store import Store
from videotune.rng import draws
from videotune.trainer.components import make_objective, make_source, plain_batch
from videotune.types import PLAIN, Moments, Window

Open = Callable[..., Any]


def told(source: Source, steps: int) -> list[bool]:
    """Which samples of the first steps are told their frame, by what the network would be fed."""
    batches = [prepare(source, step).batch for step in range(1, steps + 1)]
    if source.spec.given == "replace":
        return [bool(one) for batch in batches for one in batch.given[:, 0, 0, 0, 0]]
    return [bool(one.any()) for batch in batches for one in batch.cond.extras["image"]]


def test_an_image_model_is_fed_what_was_encoded_of_its_own_clip(make: Make) -> None:
    job, family, source = make("i2v")
    windows = {window.id: window for window in job.library.windows}
    for step in (1, 2):
        batch = prepare(source, step).batch
        for row, name in enumerate(batch.window_ids):
            moments = encode_sample(family, source.keys, source.keys.sample(windows[name], 0), job.library.media)
            for key in ("image", "clip"):
                assert torch.equal(batch.cond.extras[key][row], moments.extras[key])
            assert torch.equal(batch.x0[row], moments.mean)
        assert not batch.any_given
        assert not batch.given.any()


@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
def test_the_share_that_is_told_is_counted_and_does_not_hang_on_the_batch(variant: str, make: Make) -> None:
    _, _, source = make(variant, "first_frame_probability=0.3")
    found = told(source, 60)
    assert sum(found) / len(found) == pytest.approx(0.3, abs=0.08)
    assert found == told(source, 60)
    smaller = replace(source, schedule=replace(source.schedule, batches=tuple(2 for _ in source.schedule.batches)))
    again = told(replace(source, schedule=smaller.schedule), 60)
    assert [step[0] for step in zip(*[iter(again)] * 2, strict=True)] == [
        step[0] for step in zip(*[iter(found)] * 4, strict=True)
    ]
    assert set(told(with_config(source, first_frame_probability=0.0), 20)) == {False}
    assert set(told(with_config(source, first_frame_probability=1.0), 20)) == {True}


def test_a_frame_that_takes_the_place_of_noise_is_clean_and_counts_nothing(make: Make) -> None:
    job, family, source = make("ti2v", "first_frame_probability=0.5", "video_config.frame_dropout_probability=0.3")
    net, loss = family.denoiser(), make_objective(job.spec, job.config)
    both = 0
    for step in range(1, 9):
        one = prepare(source, step)
        batch = one.batch
        assert batch.any_given == bool(batch.given.any())
        assert not batch.given[:, :, 1:].any()
        assert not (batch.given & batch.dropped).any()
        assert torch.equal(batch.weight == 0, batch.given | batch.dropped)
        with torch.no_grad():
            error = denoising_loss(family, net, loss, batch, one.t, one.noise).mse
            noise = torch.where(batch.given, one.noise + 1, one.noise)
            assert torch.equal(denoising_loss(family, net, loss, batch, one.t, noise).mse, error), "never fed"
            other = replace(batch, given=torch.zeros_like(batch.given))
            both += not torch.equal(denoising_loss(family, net, loss, other, one.t, one.noise).mse, error)
    assert both > 3, "the network sees the clean frame"


def test_of_a_still_nothing_is_given(make: Make) -> None:
    """All of it would be clean, and nothing left to learn."""
    _, _, source = make("ti2v", "first_frame_probability=1", "video_config.frames=1")
    batch = prepare(source, 1).batch
    assert batch.x0.shape[2] == 1
    assert not batch.given.any()
    assert batch.weight.eq(1).all()


def test_validation_is_conditioned_as_most_samples_are(make: Make) -> None:
    for variant in ("i2v", "ti2v"):
        _, _, source = make(variant)
        for share, tells in ((0.0, False), (0.4, False), (0.6, True), (1.0, True)):
            batch = plain_batch(with_config(source, first_frame_probability=share), source.buckets[0][0])
            assert bool(batch.given.any()) == (tells and variant == "ti2v")
            if variant == "i2v":
                assert bool(batch.cond.extras["image"].any()) == tells
    _, _, source = make("t2v")
    assert plain_batch(source, source.buckets[0][0]).cond.extras == {}


def test_an_image_models_latents_have_names_of_their_own(make: Make, tiny_family: Open) -> None:
    """The same VAE's latents of the same clip, without the image beside them, are of no use to it."""
    prints = {variant: tiny_family("wan", variant=variant).fingerprints()["vae"] for variant in ("t2v", "i2v")}
    assert prints["i2v"] != prints["t2v"]
    assert tiny_family("wan", torch.bfloat16, "i2v").fingerprints()["vae"] != prints["i2v"]
    assert tiny_family("wan", torch.bfloat16, "t2v").fingerprints()["vae"] == prints["t2v"]


class Noisy:
    """A family that draws noise onto the image before it is encoded, as some do."""

    def __init__(self, family: Any) -> None:
        self.family, self.spec = family, replace(family.spec, image_noise=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def encode_video(self, frames: torch.Tensor, random: np.random.Generator | None = None) -> Moments:
        moments = self.family.encode_video(frames)
        number = 0.0 if random is None else float(random.standard_normal())
        return replace(moments, extras=dict(moments.extras) | {"image": moments.extras["image"] + number})


def noise_in(source: Source, window: Window, variant: int, plain: torch.Tensor) -> float:
    difference = source.sample(window, variant, 1, 0).extras["image"] - plain
    assert difference.std() < 1e-6
    return float(difference.mean())


def test_image_noise_has_variants_of_every_window(make: Make, tmp_path: Path) -> None:
    """Variant v of a window has the draws of its name, cached or encoded in the loop; the plain view has none."""
    job, own, clean = make("i2v-a14b")
    family: Any = Noisy(own)
    job = replace(job, spec=family.spec)
    store = Store(tmp_path / "noisy")
    fill_cache(job, family, store)
    source = make_source(job, family, store, clean.objective)
    in_the_loop = with_config(source, {"variants": 0})
    for window in job.library.windows[:2]:
        plain = clean.plain(window).extras["image"]
        assert torch.equal(source.plain(window).extras["image"], plain)
        wanted_ = [float(draws(5, "image noise", window.id, v).standard_normal()) for v in range(4)]
        assert len(set(wanted_)) == 4
        for where in (source, in_the_loop):
            assert [noise_in(where, window, v, plain) for v in range(4)] == pytest.approx(wanted_, abs=1e-5)
        assert noise_in(in_the_loop, window, 9, plain) not in wanted_
    bucket = source.buckets[0]
    assert [source.variant(0, 0, epoch) for epoch in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [in_the_loop.variant(0, 0, epoch) for epoch in range(6)] == list(range(6))
    names = {source.keys.latents(source.keys.sample(bucket[0], v)) for v in (PLAIN, 0, 1, 2, 3)}
    assert len(names) == 5
    other = replace(source.keys, seed=6)
    assert other.latents(other.sample(bucket[0], 0)) not in names
    items, few = CacheItems((), tuple((bucket[0], variant) for variant in (PLAIN, 0, 1))), Store(tmp_path / "few")
    assert len(missing(few, source.keys, items).samples) == len(entries_of(source.keys, items)) == 3
    assert len(missing(few, replace(source.keys, image_noise=False), items).samples) == 1
