"""Batches are a pure function of the step: threads, order of asking and process do not matter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from videotune.cache.batches import Prepared, Source, prepare, quiet_pool, stream
from videotune.cache.store import Store, latent_key
from videotune.run.job import Words, open_job, settle
from videotune.run.models import fill_cache, make_objective, make_source

Open = Callable[..., Any]


@pytest.fixture
def source(small_clips: Path, tiny_bases: Callable[[str], Path], tiny_family: Open, tmp_path: Path) -> Source:
    sets = (
        f"base_model_name={tiny_bases('wan')}",
        f"cache_dir={tmp_path}",
        "resolution=32x32",
        "batch_size=3",
        "seed=5",
    )
    job = open_job(*settle(Words(data=str(small_clips), sets=sets)))
    family, store = tiny_family("wan"), Store(tmp_path)
    fill_cache(job, family, store)
    return make_source(job, family, store, make_objective(job.spec, job.config))


def same(a: Prepared, b: Prepared) -> bool:
    tensors = [(a.t, b.t), (a.noise, b.noise), (a.batch.x0, b.batch.x0), (a.batch.cond.text, b.batch.cond.text)]
    names = (a.step, a.batch.captions, a.batch.window_ids) == (b.step, b.batch.captions, b.batch.window_ids)
    return names and all(torch.equal(x, y) for x, y in tensors)


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_threads_change_nothing(threads: int, source: Source) -> None:
    expected = [prepare(source, step) for step in range(4, 13)]
    got = list(stream(source, 4, 12, threads))
    assert [one.step for one in got] == list(range(4, 13))
    assert all(same(one, other) for one, other in zip(got, expected, strict=True))


def test_reading_ahead_takes_no_cores_from_the_training(source: Source) -> None:
    """Torch operations of the reading threads stay in one thread; those of the caller keep theirs, before and after."""
    torch.set_num_threads(2)
    try:
        pool = quiet_pool(2)
        assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
        assert torch.get_num_threads() == 2
        pool.shutdown()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_stream_that_is_left_ends_its_threads(source: Source) -> None:
    import threading

    before = threading.active_count()
    batches = stream(source, 1, 1000, 2)
    next(batches)
    batches.close()
    assert threading.active_count() == before


def test_a_step_holds_one_bucket_and_exactly_the_batch(source: Source) -> None:
    for step in range(1, 20):
        one = prepare(source, step)
        assert len(one.batch) == len(one.t) == len(one.noise) == 3
        assert one.noise.shape == one.batch.x0.shape
    shapes = {tuple(prepare(source, step).batch.x0.shape[2:]) for step in range(1, 20)}
    assert shapes == {(5, 4, 4), (3, 4, 4)}


def test_draws_differ_by_step_sample_and_seed(source: Source) -> None:
    one, two = prepare(source, 1), prepare(source, 2)
    other = prepare(replace(source, schedule=replace(source.schedule, seed=6)), 1)
    draws = [*one.t.tolist(), *two.t.tolist(), *other.t.tolist()]
    assert len(set(draws)) == len(draws)
    assert not torch.equal(one.noise[0], one.noise[1])
    assert one.noise.std().item() == pytest.approx(1, abs=0.1)


def test_the_batch_size_does_not_change_a_samples_noise(source: Source) -> None:
    smaller = replace(source, schedule=replace(source.schedule, batch=2))
    assert torch.equal(prepare(source, 3).t[:2], prepare(smaller, 3).t)


def test_caption_dropout_empties_its_share(source: Source) -> None:
    def empty(share: float) -> float:
        tried = replace(source, caption_dropout=share)
        captions = [caption for step in range(1, 101) for caption in prepare(tried, step).batch.captions]
        return captions.count("") / len(captions)

    assert empty(0.0) == 0
    assert empty(1.0) == 1
    assert empty(0.3) == pytest.approx(0.3, abs=0.08)


def test_caption_variants_take_turns(source: Source) -> None:
    clips = {name: replace(clip, captions=(*clip.captions, "")) for name, clip in source.clips.items()}
    tried = replace(source, clips=clips, caption_dropout=0.0)
    seen = [caption for step in range(1, 41) for caption in prepare(tried, step).batch.captions]
    assert 0.3 < seen.count("") / len(seen) < 0.7


def test_latents_with_a_variance_are_drawn_per_view(source: Source) -> None:
    """x0 = mean + exp(logvar / 2) ε, a new ε for each view, the same one when asked again."""
    window = source.buckets[0][0]
    key = latent_key(window, source.prints["vae"])
    mean = source.store.get("latents", key)["mean"]
    source.store.put("latents", key, {"mean": mean, "logvar": torch.full_like(mean, 2 * 0.693147)}, {})
    one, again, other = (source.latents(window, *name) for name in ((1, 0), (1, 0), (2, 0)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert (one - mean).std().item() == pytest.approx(2.0, rel=0.15)
