"""Batches are a pure function of the step: threads, order of asking and process do not
matter.

And first frames that samples are told, on channels of their own or in place of noise,
and noise drawn onto them.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import write_clip
from tests.support.datasets import config_of, with_config
from tests.support.run_parts import fill as fill_cache
from videotune.data.decode import decode
from videotune.data.frame_sampling import draw_frames
from videotune.data.probe import probe
from videotune.diffusion.loss import denoising_loss, objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.job.job import Job, open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.latent_cache import batches as batch_module
from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.cache_items import CacheItems, items_by_entry, missing_items
from videotune.latent_cache.encode import encode_sample
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.read_ahead import stream
from videotune.latent_cache.sampler import Schedule, sample_indices
from videotune.latent_cache.step_batch import StepBatch, uniforms
from videotune.latent_cache.store import LatentCache
from videotune.latent_cache.thread_pool import pool_without_openmp
from videotune.rng import generator_for
from videotune.trainer.build import make_objective, make_source, plain_batch
from videotune.types import (
    DETERMINISTIC_VARIANT,
    Clip,
    ClipShape,
    Conditioning,
    FrameSample,
    LatentDistribution,
    Window,
)

Open = Callable[..., Any]
Make = Callable[..., tuple[Job, Any, BatchSource]]


@pytest.fixture
def make(
    small_clips: Path, tiny_bases: Open, tiny_family: Open, tmp_path: Path
) -> Make:
    """A job on a kind of Wan, its family, and its filled source."""

    def get(variant: str, *sets: str) -> tuple[Job, Any, BatchSource]:
        words = (
            f"base_model_name={tiny_bases('wan', variant)}",
            f"cache_dir={tmp_path}",
            "resolution=32x32",
        )
        sets = (*words, "batch_size=4", "seed=5", "dataloader_threads=0", *sets)
        job = open_job(*resolve_config(Overrides(data=str(small_clips), sets=sets)))
        family, store = tiny_family("wan", variant=variant), LatentCache(tmp_path)
        fill_cache(job, family, store)
        return (
            job,
            family,
            make_source(job, family, store, make_objective(job.spec, job.config)),
        )

    return get


@pytest.fixture
def source(make: Make) -> BatchSource:
    return make("t2v", "batch_size=3")[2]


def same(a: StepBatch, b: StepBatch) -> bool:
    tensors = [
        (a.t, b.t),
        (a.noise, b.noise),
        (a.batch.x0, b.batch.x0),
        (a.batch.conditioning.text, b.batch.conditioning.text),
    ]
    names = (a.step, a.batch.captions, a.batch.window_ids) == (
        b.step,
        b.batch.captions,
        b.batch.window_ids,
    )
    return names and all(torch.equal(x, y) for x, y in tensors)


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_threads_change_nothing(threads: int, source: BatchSource) -> None:
    expected = [make_step_batch(source, step) for step in range(4, 13)]
    got = list(stream(source, 4, 12, threads))
    assert [one.step for one in got] == list(range(4, 13))
    assert all(same(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_several_processes_share_out_a_step_and_none_has_another_s_samples(
    processes: int, source: BatchSource
) -> None:
    """Together they are the step that one alone has, in order; where there are more of
    them than samples some have none.
    """
    for step in (1, 7):
        whole = make_step_batch(source, step)
        parts = [
            make_step_batch(source, step, (i, processes)) for i in range(processes)
        ]
        own = [
            part.batch.window_ids if part.batch is not None else () for part in parts
        ]
        assert [name for names in own for name in names] == list(whole.batch.window_ids)
        assert max(map(len, own)) - min(map(len, own)) <= 1
        assert [part.first_sample for part in parts] == [
            sum(map(len, own[:i])) for i in range(processes)
        ]
        held = [part for part in parts if part.batch is not None]
        for get in (
            lambda x: x.noise,
            lambda x: x.batch.x0,
            lambda x: x.batch.conditioning.text,
        ):
            assert torch.equal(torch.cat([get(part) for part in held]), get(whole))
        assert all(part.window_ids == whole.batch.window_ids for part in parts), (
            "each knows what the others have"
        )


def test_reading_ahead_takes_no_cores_from_the_training(source: BatchSource) -> None:
    """Torch operations of the reading threads stay in one thread; those of the caller
    keep theirs, before and after.
    """
    torch.set_num_threads(2)
    try:
        pool = pool_without_openmp(2, "threads")
        assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
        assert torch.get_num_threads() == 2
        pool.shutdown()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_stream_that_is_left_ends_its_threads(source: BatchSource) -> None:
    before = threading.active_count()
    batches = stream(source, 1, 1000, 2)
    next(batches)
    batches.close()
    assert threading.active_count() == before


def test_latents_with_a_variance_are_drawn_per_view(source: BatchSource) -> None:
    """x0 = mean + exp(logvar / 2) ε, a new ε for each view, the same one when asked
    again.
    """
    window = source.buckets[0][0]
    key = source.keys.latents_key(draw_frames(window, 0, 5))
    mean = source.store.get("latents", key)["mean"]
    source.store.put(
        "latents",
        key,
        {"mean": mean, "logvar": torch.full_like(mean, 2 * 0.693147)},
        {},
    )
    one, again, other = (
        source.draw_latents(window, 0, name).mean for name in ((1, 0), (1, 0), (2, 0))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert (one - mean).std().item() == pytest.approx(2.0, rel=0.15)


SHAPE = ClipShape(9, 32, 48, 16.0)


def made(
    folder: Path,
    buckets: Sequence[Sequence[Window]],
    clips: Sequence[Clip],
    **words: Any,
) -> BatchSource:
    """A source over latents that no encoder made: all cells of a take's are
    ``number_of`` it.
    """
    store, keys = LatentCache(folder), CacheKeys("v", "t", 8, 0)
    for window in {window for bucket in buckets for window in bucket}:
        for variant in (DETERMINISTIC_VARIANT, *range(3)):
            shown = draw_frames(window, variant, 0)
            frames = (window.shape.frames - 1) // 4 + 1
            latents = torch.full(
                (4, frames, window.shape.height // 8, window.shape.width // 8),
                number_of(shown),
            )
            store.put("latents", keys.latents_key(shown), {"mean": latents}, {})
    for caption in {"", *(caption for clip in clips for caption in clip.captions)}:
        store.put("text", keys.text_key(caption), {"text": torch.zeros(1, 4)}, {})
    sizes = tuple(len(bucket) for bucket in buckets)
    source = BatchSource(
        config=config_of(video={"variants": 3}, caption_dropout=0.1),
        store=store,
        keys=keys,
        collate_states=lambda states: Conditioning(
            torch.stack([state["text"] for state in states])
        ),
        clips={clip.id: clip for clip in clips},
        buckets=tuple(tuple(bucket) for bucket in buckets),
        objective=objective_for_prediction("flow", {}, TimestepSampler()),
        spec=SimpleNamespace(
            is_in_place=lambda condition: False,
            is_on_channels=lambda condition: False,
            need_own_entry=bool,
            patch=(1, 2, 2),
            image_conditioning="none",
            shift_by_tokens=None,
        ),
        schedule=Schedule(0, sizes, (2,) * len(sizes)),
        sizes=dict.fromkeys((clip.id for clip in clips), (64, 64)),
    )
    return replace(source, **words)


def number_of(shown: FrameSample) -> float:
    """Tells which take it is."""
    return float(int(shown.window.clip_id[:2], 16) * 100 + shown.variant)


def some_clips(*repeats: int, **facts: Any) -> list[Clip]:
    """Clips of which each window stands so many times in its bucket."""
    return [
        Clip(f"{i:02x}" * 16, "", "", (f"clip {i}",), repeats=r, **facts)
        for i, r in enumerate(repeats, 1)
    ]


def entries(clips: Sequence[Clip], **facts: Any) -> list[Window]:
    """A window a clip, all of them, then those with a second copy, and so on."""
    windows = [Window(clip.id, 0.0, 2.0, SHAPE, **facts) for clip in clips]
    both, most = (
        list(zip(windows, clips, strict=True)),
        max(clip.repeats for clip in clips),
    )
    return [
        window for copy in range(most) for window, clip in both if copy < clip.repeats
    ]


def test_each_view_of_a_window_shows_its_next_variant(tmp_path: Path) -> None:
    """However many entries a window has: its n-th pass shows views n·r to n·r + r - 1,
    each once.
    """
    clips = some_clips(1, 3, 2, 1)
    source = made(tmp_path, [entries(clips, sampling="start")], clips)
    seen: dict[str, list[int]] = {clip.id: [] for clip in clips}
    for step in range(1, 7 * 6 + 1):  # 7 entries, 2 a step: 12 passes
        bucket, places = sample_indices(source.schedule, step)
        views = [
            (
                source.buckets[bucket][place],
                source.variant_in_epoch(bucket, place, epoch),
            )
            for place, epoch in places
        ]
        takes = [draw_frames(*view, 0) for view in views]
        batch = make_step_batch(source, step).batch
        assert batch.x0[:, 0, 0, 0, 0].tolist() == [number_of(shown) for shown in takes]
        assert batch.window_ids == tuple(shown.window.id for shown in takes)
        for shown in takes:
            seen[shown.window.clip_id].append(shown.variant)
    for clip in clips:
        shown_by_pass = zip(*[iter(seen[clip.id])] * clip.repeats, strict=True)
        for epoch, variants in enumerate(shown_by_pass):
            views = range(epoch * clip.repeats, (epoch + 1) * clip.repeats)
            assert sorted(variants) == sorted(view % 3 for view in views)
        assert Counter(seen[clip.id]) == dict.fromkeys(range(3), 4 * clip.repeats)


def test_without_variants_each_view_is_encoded_anew_one_at_a_time(
    tmp_path: Path,
) -> None:
    clips = some_clips(2, 1, 1)
    windows = entries(clips, sampling="start")
    windows[1] = replace(windows[1], sampling="even")  # this one comes from the store
    asked: list[FrameSample] = []
    busy = threading.Lock()

    def encode(window: Window, variant: int) -> LatentDistribution:
        shown = draw_frames(window, variant, 0)
        assert busy.acquire(blocking=False), "two at once"
        time.sleep(0.002)
        asked.append(shown)
        busy.release()
        return LatentDistribution(torch.full((4, 3, 4, 6), number_of(shown)))

    source = with_config(
        made(tmp_path, [windows], clips, encode=encode), {"variants": 0}
    )
    batches = [
        one.batch for one in stream(source, 1, 20, 3)
    ]  # 40 samples of 4 entries: 10 passes
    wanted = {(clips[0].id, view) for view in range(20)} | {
        (clips[2].id, view) for view in range(10)
    }
    assert {(shown.window.clip_id, shown.variant) for shown in asked} == wanted
    assert len(asked) == len(wanted)
    assert all(shown == draw_frames(shown.window, shown.variant, 0) for shown in asked)
    numbers = Counter(
        number for batch in batches for number in batch.x0[:, 0, 0, 0, 0].tolist()
    )
    assert numbers == Counter(
        [number_of(shown) for shown in asked]
        + [number_of(draw_frames(windows[1], 0, 0))] * 10
    )


def test_encoding_in_the_loop_gives_what_the_cache_holds(make: Make) -> None:
    """Real clips, cropped at random: view v in the loop is variant v of the cache, bit
    for bit.
    """
    video = (
        "video_config.variants=2",
        "video_config.frames=5",
        "video_config.windows=head",
    )
    _, _, cached = make("t2v", "resolution=16x32", "resize=random", *video)
    in_the_loop = with_config(cached, {"variants": 0})
    first = [
        source.draw_latents(source.buckets[0][0], 0, ()).mean
        for source in (cached, in_the_loop)
    ]
    second = [
        source.draw_latents(
            source.buckets[0][0], source.variant_in_epoch(0, 0, 1), ()
        ).mean
        for source in (cached, in_the_loop)
    ]
    assert torch.equal(*first)
    assert torch.equal(*second)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], cached.plain_latents(cached.buckets[0][0]).mean)


@pytest.mark.parametrize("patch_frames", [1, 2])
def test_frame_dropout_drops_its_share_and_never_the_first(
    patch_frames: int, tmp_path: Path
) -> None:
    clips = some_clips(1, 1)
    long = ClipShape(33, 32, 32, 16.0)  # 9 latent frames
    windows = [replace(window, shape=long) for window in entries(clips)]
    without = made(tmp_path, [windows], clips)
    without = replace(
        without,
        spec=SimpleNamespace(**vars(without.spec) | {"patch": (patch_frames, 2, 2)}),
    )
    source = with_config(without, {"frame_dropout_probability": 0.3})
    dropped = []
    for step in range(1, 151):
        one, plain = make_step_batch(source, step), make_step_batch(without, step)
        assert torch.equal(
            one.batch.loss_mask, (~one.batch.dropped_frames_mask).float()
        )
        assert not plain.batch.dropped_frames_mask.any()
        assert torch.equal(one.noise, plain.noise), "other draws are as without"
        assert torch.equal(one.t, plain.t)
        dropped.append(one.batch.dropped_frames_mask[:, 0, :, 0, 0])
    mask = torch.cat(dropped)
    assert not mask[:, 0].any(), "of 9 frames in twos the first stands alone"
    groups = mask[:, 1:][:, ::patch_frames].float()
    assert groups.mean().item() == pytest.approx(0.3, abs=0.04)  # 1,200 or 2,400 draws
    if patch_frames == 2:
        assert torch.equal(mask[:, 1::2], mask[:, 2::2]), "a token's frames go together"
    assert len(mask.unique(dim=0)) > 10
    alone = replace(source, schedule=replace(source.schedule, batch_sizes=(1,)))
    assert torch.equal(
        make_step_batch(alone, 1).batch.dropped_frames_mask,
        make_step_batch(source, 1).batch.dropped_frames_mask[:1],
    )


def test_the_border_is_where_the_decoder_puts_it(tmp_path: Path) -> None:
    """A white film of 64x24 pixels, shown in 32x32: latent cells without a white pixel
    are those without weight.
    """
    path = write_clip(
        tmp_path / "white.mp4", np.full((9, 24, 64, 3), 255, np.uint8), 16
    )
    facts = probe(path)
    shape = ClipShape(5, 32, 32, 16.0)
    clips = some_clips(1)
    window = Window(clips[0].id, 0.0, 5 / 16, shape, resize="pad")
    shown = draw_frames(window, 0, 0)
    frames = decode(facts, shown.times, 32, 32, "pad", shown.crop_position)
    sizes = {clips[0].id: (facts.width, facts.height)}
    source = made(
        tmp_path, [[window]], clips, sizes=sizes, schedule=Schedule(0, (1,), (1,))
    )
    weight = make_step_batch(source, 1).batch.loss_mask[0, 0]
    white = torch.from_numpy(frames).amax(-1).view(5, 4, 8, 4, 8).amax((0, 2, 4)) > 30
    assert torch.equal(weight, white.float().expand(2, 4, 4))
    assert 0 < weight.mean() < 1


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [
        ((64, 32), [1, 2], [0, 1, 2, 3]),  # rows 8 to 24: edges of cells
        ((32, 64), [0, 1, 2, 3], [1, 2]),
        ((64, 36), [0, 1, 2, 3], [0, 1, 2, 3]),  # rows 7 to 25
        ((128, 32), [1, 2], [0, 1, 2, 3]),  # rows 12 to 20
    ],
)
def test_a_cell_that_only_touches_the_picture_has_no_weight(
    tmp_path: Path, size: tuple[int, int], rows: list[int], columns: list[int]
) -> None:
    """A film of a size (width, height) in 32 × 32 pixels, four cells of eight."""
    clips = some_clips(1)
    shape = ClipShape(5, 32, 32, 16.0)
    window = Window(clips[0].id, 0.0, 5 / 16, shape, resize="pad")
    source = made(
        tmp_path,
        [[window]],
        clips,
        sizes={clips[0].id: size},
        schedule=Schedule(0, (1,), (1,)),
    )
    weight = make_step_batch(source, 1).batch.loss_mask[0, 0, 0]
    assert weight.any(1).nonzero().flatten().tolist() == rows
    assert weight.any(0).nonzero().flatten().tolist() == columns


def test_stratified_levels_are_each_uniform_and_together_even() -> None:
    """The marginal of every sample is exactly uniform; a step's samples are one in each
    equal part.
    """
    whole = torch.stack([uniforms(3, step, 4, True) for step in range(1, 4001)])
    assert ((whole * 4).long().sort(1).values == torch.arange(4)).all()
    for column in whole.T:
        share = column.sort().values
        even = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
        assert (share - even).abs().max() < 1.63 / 4000**0.5, (
            "Kolmogorov and Smirnov, at the level of 1 %"
        )
    assert torch.equal(uniforms(3, 7, 4, True), whole[6])
    assert uniforms(3, 7, 1, True).item() == uniforms(3, 7, 1, False).item()


def told(source: BatchSource, steps: int) -> list[bool]:
    """Which samples of the first steps are told their frame, by what the network would
    be fed.
    """
    batches = [make_step_batch(source, step).batch for step in range(1, steps + 1)]
    if source.spec.image_conditioning == "replace":
        return [
            bool(one)
            for batch in batches
            for one in batch.conditioning_mask[:, 0, 0, 0, 0]
        ]
    return [
        bool(one.any())
        for batch in batches
        for one in batch.conditioning.extras["image"]
    ]


def test_an_image_model_is_fed_what_was_encoded_of_its_own_clip(make: Make) -> None:
    job, family, source = make("i2v")
    windows = {window.id: window for window in job.library.windows}
    for step in (1, 2):
        batch = make_step_batch(source, step).batch
        for row, name in enumerate(batch.window_ids):
            moments = encode_sample(
                family,
                source.keys,
                source.keys.frame_sample(windows[name], 0),
                job.library.media,
            )
            for key in ("image", "clip"):
                assert torch.equal(
                    batch.conditioning.extras[key][row], moments.extras[key]
                )
            assert torch.equal(batch.x0[row], moments.mean)
        assert not batch.has_clean_frames
        assert not batch.conditioning_mask.any()


@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
def test_the_share_that_is_told_is_counted_and_does_not_hang_on_the_batch(
    variant: str, make: Make
) -> None:
    _, _, source = make(variant, "first_frame_probability=0.3")
    found = told(source, 60)
    assert sum(found) / len(found) == pytest.approx(0.3, abs=0.08)
    assert found == told(source, 60)
    smaller = replace(
        source.schedule, batch_sizes=tuple(2 for _ in source.schedule.batch_sizes)
    )
    assert told(replace(source, schedule=smaller), 60)[::2] == found[::4]
    for share in (0.0, 1.0):
        assert set(told(with_config(source, first_frame_probability=share), 20)) == {
            bool(share)
        }


def test_a_frame_that_takes_the_place_of_noise_is_clean_and_counts_nothing(
    make: Make,
) -> None:
    job, family, source = make(
        "ti2v",
        "first_frame_probability=0.5",
        "video_config.frame_dropout_probability=0.3",
    )
    net, loss = family.denoiser(), make_objective(job.spec, job.config)
    both = 0
    for step in range(1, 9):
        one = make_step_batch(source, step)
        batch = one.batch
        assert batch.has_clean_frames == bool(batch.conditioning_mask.any())
        assert not batch.conditioning_mask[:, :, 1:].any()
        assert not (batch.conditioning_mask & batch.dropped_frames_mask).any()
        assert torch.equal(
            batch.loss_mask == 0, batch.conditioning_mask | batch.dropped_frames_mask
        )
        with torch.no_grad():
            error = denoising_loss(family, net, loss, batch, one.t, one.noise).mse
            noise = torch.where(batch.conditioning_mask, one.noise + 1, one.noise)
            assert torch.equal(
                denoising_loss(family, net, loss, batch, one.t, noise).mse, error
            ), "never fed"
            other = replace(
                batch, conditioning_mask=torch.zeros_like(batch.conditioning_mask)
            )
            both += not torch.equal(
                denoising_loss(family, net, loss, other, one.t, one.noise).mse, error
            )
    assert both > 3, "the network sees the clean frame"


def test_of_a_still_nothing_is_given(make: Make) -> None:
    """All of it would be clean, and nothing left to learn."""
    _, _, source = make("ti2v", "first_frame_probability=1", "video_config.frames=1")
    batch = make_step_batch(source, 1).batch
    assert batch.x0.shape[2] == 1
    assert not batch.conditioning_mask.any()
    assert batch.loss_mask.eq(1).all()


def test_validation_is_conditioned_as_most_samples_are(make: Make) -> None:
    for variant in ("i2v", "ti2v"):
        _, _, source = make(variant)
        for share, tells in ((0.0, False), (0.4, False), (0.6, True), (1.0, True)):
            batch = plain_batch(
                with_config(source, first_frame_probability=share), source.buckets[0][0]
            )
            assert bool(batch.conditioning_mask.any()) == (tells and variant == "ti2v")
            if variant == "i2v":
                assert bool(batch.conditioning.extras["image"].any()) == tells
    _, _, source = make("t2v")
    assert plain_batch(source, source.buckets[0][0]).conditioning.extras == {}


def test_an_image_models_latents_have_names_of_their_own(
    make: Make, tiny_family: Open
) -> None:
    """The same VAE's latents of the same clip, without the image beside them, are of no
    use to it.
    """
    prints = {
        variant: tiny_family("wan", variant=variant).fingerprints()["vae"]
        for variant in ("t2v", "i2v")
    }
    assert prints["i2v"] != prints["t2v"]
    assert (
        tiny_family("wan", torch.bfloat16, "i2v").fingerprints()["vae"] != prints["i2v"]
    )
    assert (
        tiny_family("wan", torch.bfloat16, "t2v").fingerprints()["vae"] == prints["t2v"]
    )


class Noisy:
    """A family that draws noise onto the image before it is encoded, as some do."""

    def __init__(self, family: Any) -> None:
        self.family, self.spec = family, replace(family.spec, image_noise=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def encode_video(
        self, frames: torch.Tensor, random: np.random.Generator | None = None
    ) -> LatentDistribution:
        moments = self.family.encode_video(frames)
        number = 0.0 if random is None else float(random.standard_normal())
        return replace(
            moments,
            extras=dict(moments.extras) | {"image": moments.extras["image"] + number},
        )


def noise_in(
    source: BatchSource, window: Window, variant: int, plain: torch.Tensor
) -> float:
    difference = source.draw_latents(window, variant, (1, 0)).extras["image"] - plain
    assert difference.std() < 1e-6
    return float(difference.mean())


def test_image_noise_has_variants_of_every_window(make: Make, tmp_path: Path) -> None:
    """Variant v of a window has the draws of its name, cached or encoded in the loop;
    the plain view has none.
    """
    job, own, clean = make("i2v-a14b")
    family: Any = Noisy(own)
    job = replace(job, spec=family.spec)
    store = LatentCache(tmp_path / "noisy")
    fill_cache(job, family, store)
    source = make_source(job, family, store, clean.objective)
    in_the_loop = with_config(source, {"variants": 0})
    for window in job.library.windows[:2]:
        plain = clean.plain_latents(window).extras["image"]
        assert torch.equal(source.plain_latents(window).extras["image"], plain)
        wanted_ = [
            float(generator_for(5, "image noise", window.id, v).standard_normal())
            for v in range(4)
        ]
        assert len(set(wanted_)) == 4
        for where in (source, in_the_loop):
            assert [
                noise_in(where, window, v, plain) for v in range(4)
            ] == pytest.approx(wanted_, abs=1e-5)
        assert noise_in(in_the_loop, window, 9, plain) not in wanted_
    bucket = source.buckets[0]
    assert [source.variant_in_epoch(0, 0, epoch) for epoch in range(6)] == [
        0,
        1,
        2,
        3,
        0,
        1,
    ]
    assert [in_the_loop.variant_in_epoch(0, 0, epoch) for epoch in range(6)] == list(
        range(6)
    )
    names = {
        source.keys.latents_key(source.keys.frame_sample(bucket[0], v))
        for v in (DETERMINISTIC_VARIANT, 0, 1, 2, 3)
    }
    assert len(names) == 5
    other = replace(source.keys, seed=6)
    assert other.latents_key(other.frame_sample(bucket[0], 0)) not in names
    items, few = (
        CacheItems(
            (), tuple((bucket[0], variant) for variant in (DETERMINISTIC_VARIANT, 0, 1))
        ),
        LatentCache(tmp_path / "few"),
    )
    assert (
        len(missing_items(few, source.keys, items).samples)
        == len(items_by_entry(source.keys, items))
        == 3
    )
    assert (
        len(missing_items(few, replace(source.keys, image_noise=False), items).samples)
        == 1
    )


def test_a_step_draws_within_the_range_of_its_own_expert() -> None:
    ranges = {"high_noise": (0.875, 1.0), "low_noise": (0.0, 0.875)}
    experts = [
        SimpleNamespace(name=name, t_lo=t_lo, t_hi=t_hi)
        for name, (t_lo, t_hi) in ranges.items()
    ]
    turns = ["low_noise", "high_noise", "low_noise"]
    source: Any = SimpleNamespace(
        objective=SimpleNamespace(timesteps=TimestepSampler()),
        spec=SimpleNamespace(shift_by_tokens=None, experts=experts),
        config=SimpleNamespace(timestep_shift=1.0),
        expert_schedule=SimpleNamespace(at=lambda step: turns[step]),
    )
    for step, name in enumerate(turns):
        sampler = BatchSource.timesteps_of(source, step)
        assert (sampler.lo, sampler.hi) == ranges[name]


def test_stratified_numbers_are_spread_in_an_order_of_the_seed_and_the_step() -> None:
    orders = set()
    for seed, step in ((1, 1), (2, 1), (1, 2)):
        u = uniforms(seed, step, 32, stratified=True)
        cells = tuple((u * 32).floor().int().tolist())
        assert sorted(cells) == list(range(32))
        assert torch.equal(u, uniforms(seed, step, 32, stratified=True))
        orders.add(cells)
    assert len(orders) == 3


def test_text_that_is_encoded_in_the_step_leaves_the_clips_own_states() -> None:
    source: Any = SimpleNamespace(text_in_step=True)
    images = [torch.full((2, 3), float(index)) for index in range(2)]
    extras = [{"image": image} for image in images]
    conditioning = batch_module._conditioning(source, ["a cat", "a dog"], extras)
    assert conditioning.text.shape == (2, 0, 0)
    assert torch.equal(conditioning.extras["image"], torch.stack(images))
