"""Journal, exposure, validation loss, and the time that is left."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.journal_lines import step_line
from videotune.diffusion.loss import objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.latent_cache.exposure import Exposure, exposure, most_views, steps_for
from videotune.latent_cache.sampler import (
    Schedule,
    bucket_of,
    bucket_steps_until,
    times_seen,
)
from videotune.latent_cache.view_bands import ADVICE, advice, band
from videotune.runs.journal import Journal
from videotune.trainer.throughput import RECENT, Throughput, time_left
from videotune.types import Batch, ClipShape, Conditioning, Window
from videotune.validation.selection import (
    quantiles_by_window,
    spread_evenly,
    spread_over_clips,
)
from videotune.validation.validation_loss import (
    ValidationLoss,
    average_over_clips,
    read_validation,
    relative_to_first,
)

SHAPE = ClipShape(5, 32, 32, 16.0)


def windows(count: int) -> tuple[Window, ...]:
    return tuple(
        Window(f"{i:012x}".ljust(32, "0"), 0.0, 0.3, SHAPE) for i in range(count)
    )


def test_bands_are_total_and_half_open() -> None:
    names = [band(seen) for seen in (0, 9.99, 10, 49, 50, 99, 100)]
    assert names == ["conservative"] * 2 + ["moderate"] * 2 + ["high"] * 2 + ["risky"]


def test_a_windows_views_are_those_of_all_its_entries() -> None:
    """Two windows shown twice a pass and two shown once, two samples a step: ten
    passes.
    """
    once, twice = windows(4)[:2], windows(4)[2:]
    entries = (*once, *twice, *twice)
    counted = exposure(times_seen(Schedule(0, (6,), (2,)), 30), [entries])
    assert counted.windows == {window.id: 10 for window in once} | {
        window.id: 20 for window in twice
    }
    assert counted.clips == {
        window.clip_id: counted.windows[window.id] for window in (*once, *twice)
    }
    facts = counted.to_json(1e-4)
    assert facts["per_window"] == {
        "min": 10,
        "mean": 15.0,
        "max": 20,
        "band": "moderate",
    }
    assert "regularization" not in facts


def test_regularization_is_counted_and_decides_no_band() -> None:
    """Eight training windows and one that keeps the model as it is, shown 60 times a
    pass, in a bucket of its own.
    """
    every = windows(9)
    buckets = [every[:8], every[8:] * 60]
    counts = times_seen(Schedule(0, (8, 60), (1, 1)), 68 * 3)
    counted = exposure(counts, buckets, [every[8].clip_id])
    facts = counted.to_json(1e-4)
    assert facts["per_window"] == {
        "min": 3,
        "mean": 3.0,
        "max": 3,
        "band": "conservative",
    }
    assert facts["per_clip"] == {"min": 3, "mean": 3.0, "max": 3}
    assert facts["regularization"] == {"min": 180, "mean": 180.0, "max": 180}
    assert facts["clips"][every[8].clip_id] == 180, "counted all the same"
    assert facts["advice"] == ADVICE["conservative"]
    alone = exposure(counts, buckets).to_json(1e-4)
    assert alone["per_window"]["band"] == "risky", (
        "without the word for it, the band is that of the most shown window"
    )


def test_a_low_rate_changes_the_advice() -> None:
    assert "20-30 views" in advice(25, 4e-5)
    assert "20-30 views" not in advice(25, 4.1e-5)
    assert "only up to 20-30 views" in advice(45, 4e-5)
    assert ADVICE["moderate"] in advice(45, 4.1e-5)


def test_the_journal_is_json_whatever_happens(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(step_line(1, loss=float("nan"), mse=float("inf"), prompt="schön NaN"))
    journal.close()
    line = json.loads(
        (tmp_path / "journal.jsonl").read_text(),
        parse_constant=lambda word: pytest.fail(word),
    )
    assert line == step_line(1, loss=None, mse=None, prompt="schön NaN")


@pytest.fixture
def family(tiny_family: Callable[..., Any]) -> Any:
    return tiny_family("wan")


def batch_of(window: Window) -> Batch:
    generator = torch.Generator().manual_seed(int(window.clip_id[:12], 16))
    x0, text = (
        torch.randn(1, 4, 2, 4, 4, generator=generator),
        torch.randn(1, 4, 16, generator=generator),
    )
    return Batch.of(x0, Conditioning(text), window_ids=(window.id,))


def test_reading_twice_gives_equal_bits_and_moves_nothing(family: Any) -> None:
    net, loss = (
        family.denoiser(),
        objective_for_prediction("flow", {}, TimestepSampler("LOGIT_NORMAL", 3.0)),
    )
    net.train()
    validation = ValidationLoss(windows(3), windows(2), seed=0)
    state = torch.random.get_rng_state()
    first = read_validation(validation, family, {"transformer": net}, loss, batch_of)
    torch.rand(10)
    torch.random.set_rng_state(state)
    second = read_validation(validation, family, {"transformer": net}, loss, batch_of)
    assert first == second
    assert torch.equal(torch.random.get_rng_state(), state)
    assert net.training
    assert len(first["held_out"]["by_quantile"]) == 9
    assert first["held_out"]["mean"] == pytest.approx(
        sum(first["held_out"]["by_quantile"]) / 9
    )
    assert first["held_out"]["by_quantile"] != first["train"]["by_quantile"]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_clips_take_turns_and_together_read_every_level(
    count: int, family: Any
) -> None:
    """Against a reading of each window alone, which is at all levels."""
    nets, loss = (
        {"transformer": family.denoiser()},
        objective_for_prediction("flow", {}, TimestepSampler()),
    )
    some = windows(count)
    whole = read_validation(ValidationLoss(some, (), 0), family, nets, loss, batch_of)[
        "held_out"
    ]
    levels = quantiles_by_window(some)
    assert {level for its in levels for level in its} == set(range(9))
    assert sum(map(len, levels)) == sum(
        value is not None for clip in whole["clips"].values() for value in clip
    )
    alone = [
        read_validation(ValidationLoss((one,), (), 0), family, nets, loss, batch_of)[
            "held_out"
        ]
        for one in some
    ]
    for level, mean in enumerate(whole["by_quantile"]):
        own = [
            alone[place]["by_quantile"][level]
            for place in range(count)
            if level in levels[place]
        ]
        assert mean == pytest.approx(sum(own) / len(own), rel=1e-5)


def test_the_clips_values_average_to_the_whole_and_each_expert_has_its_own() -> None:
    first = {
        "mean": 1.0,
        "by_quantile": [2.0] * 4 + [4.0] * 5,
        "windows": 2,
        "clips": {"a": [1.0] * 9, "b": [3.0] * 9},
    }
    rows = {"a": [1.0] * 4 + [2.0] * 5, "b": [2.0] * 4 + [4.0] * 5}
    means = [(a + b) / 2 for a, b in zip(rows["a"], rows["b"], strict=True)]
    told = relative_to_first(
        {"mean": 1.0, "by_quantile": means, "windows": 2, "clips": rows},
        first,
        ["low"] * 4 + ["high"] * 5,
    )
    assert told["clips"] == {"a": pytest.approx(0.5), "b": pytest.approx(1.0)}
    assert told["normalised"] == pytest.approx(0.75)
    assert told["experts"] == {"low": pytest.approx(0.75), "high": pytest.approx(0.75)}
    assert "experts" not in (relative_to_first(told | {"clips": rows}, first) or {})
    assert relative_to_first(None, first) is None


def test_levels_that_are_read_together_read_as_one_by_one(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets, loss, readings = (
        {"transformer": family.denoiser()},
        objective_for_prediction("flow", {}, TimestepSampler()),
        [],
    )
    # a clip of this size is 8 tokens: one level, three, all nine
    for tokens in (1, 25, 4096):
        monkeypatch.setattr(
            "videotune.validation.validation_loss.TOKENS_PER_PASS", tokens
        )
        readings.append(
            read_validation(
                ValidationLoss(windows(2), windows(1), 0), family, nets, loss, batch_of
            )
        )
    for other in readings[1:]:
        assert other["held_out"]["by_quantile"] == pytest.approx(
            readings[0]["held_out"]["by_quantile"], rel=1e-5
        )
        assert set(other["held_out"]["clips"]) == {
            window.clip_id[:12] for window in windows(2)
        }


@pytest.mark.parametrize(
    ("sizes", "batch", "past"), [((5,), 2, 0), ((3, 40), 4, 0), ((7,), 1, 20)]
)
def test_the_steps_for_so_many_views_are_the_first_that_show_them(
    sizes: tuple[int, ...], batch: int, past: int
) -> None:
    schedule = Schedule(0, sizes, (batch,) * len(sizes))
    every = windows(sum(sizes))
    buckets = [every[: sizes[0]], *([every[sizes[0] :]] if len(sizes) > 1 else [])]

    def after(steps: int) -> Exposure:
        shown = exposure(times_seen(schedule, steps), buckets)
        return shown.plus({every[0].id: past}, every)

    for wanted in (1, 10, 50):
        steps = steps_for(wanted, after, sum(sizes) / batch)
        assert most_views(after(steps)) >= wanted
        assert steps == 0 or most_views(after(steps - 1)) < wanted


def test_views_so_far_are_told_in_few_words() -> None:
    counted = exposure(times_seen(Schedule(0, (4,), (1,)), 10), [windows(4)])
    line = counted.so_far()
    assert line["per_window"] == {
        "min": 2,
        "mean": 2.5,
        "max": 3,
        "band": "conservative",
    }
    assert line["windows"] == {"2": 2, "3": 2}
    assert sum(line["clips"].values()) == 10
    assert all(len(name) == 12 for name in line["clips"])


def test_a_probe_is_spread_over_the_set() -> None:
    assert [
        int(window.clip_id[:12], 16) for window in spread_evenly(windows(20), 4)
    ] == [
        0,
        5,
        10,
        15,
    ]
    assert len(spread_evenly(windows(3), 8)) == 3
    long = [replace(windows(1)[0], start=float(i)) for i in range(100)]
    assert spread_over_clips(long, 1) == (long[50],), "its middle"


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 30))
def test_places_are_dealt_out_clip_by_clip(lengths: list[int], count: int) -> None:
    """Where each clip has a place none has two more than another that has windows left."""
    clips = windows(len(lengths))
    several = [
        replace(clip, start=float(i))
        for clip, length in zip(clips, lengths, strict=True)
        for i in range(length)
    ]
    chosen = spread_over_clips(several, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(several))
    assert list(chosen) == [window for window in several if window in chosen], (
        "in their order"
    )
    each = [sum(window.clip_id == clip.clip_id for window in chosen) for clip in clips]
    if count >= len(clips):
        full = [length == share for length, share in zip(lengths, each, strict=True)]
        open_ = [share for share, whole in zip(each, full, strict=True) if not whole]
        assert not open_ or max(each) <= min(open_) + 1
    else:
        assert sorted(each) == [0] * (len(clips) - count) + [1] * count


def test_a_reading_counts_each_clip_alike() -> None:
    """A clip of three windows that is learnt and one of one window that is not: half
    and half, not three to one.
    """
    long, short = windows(2)
    three = [replace(long, start=float(i)) for i in range(3)]
    errors = torch.tensor([[0.5] * 9] * 3 + [[1.5] * 9], dtype=torch.float64)
    part = average_over_clips(errors, [*three, short])
    assert part["windows"] == 4
    told, itself = (
        relative_to_first(part, {"by_quantile": [1.0] * 9}),
        relative_to_first(part, part),
    )
    assert sorted(told["clips"].values()) == [0.5, 1.5]
    assert (told["normalised"], itself["normalised"]) == (1, 1)


def test_the_time_left_knows_the_buckets_that_are_to_come() -> None:
    """A dear bucket of 9 s a step and a cheap one of 1 s: after any step the rest is
    exactly what is still to come.
    """
    schedule, cost, throughput = (
        Schedule(0, (3, 7), (1, 1)),
        {0: 9.0, 1: 1.0},
        Throughput(),
    )
    for step in range(1, 41):
        bucket = bucket_of(schedule, step)
        throughput.add(bucket, {"data": 0.0, "forward": cost[bucket]})
        left = {
            b: bucket_steps_until(schedule, 40)[b]
            - bucket_steps_until(schedule, step)[b]
            for b in (0, 1)
        }
        truth = sum(cost[bucket_of(schedule, later)] for later in range(step + 1, 41))
        found = time_left(throughput.by_bucket, left, [9.0, 1.0])
        assert found == pytest.approx(truth), step
    plain = (
        40 * sum(cost.values()) / 2
    )  # what a mean over the buckets would say of the whole run
    assert (
        abs(plain - sum(cost[bucket_of(schedule, step)] for step in range(1, 41))) > 50
    )


def test_a_bucket_without_a_step_is_as_dear_for_its_size_as_the_others() -> None:
    assert time_left({1: 2.0}, {0: 3, 1: 5}, [40.0, 10.0]) == pytest.approx(
        3 * 8.0 + 5 * 2.0
    )
    assert time_left({}, {0: 3}, [40.0]) is None


def test_the_first_step_of_a_process_counts_until_there_is_another() -> None:
    throughput = Throughput()
    throughput.add(0, {"forward": 30.0})
    assert throughput.by_bucket == {0: 30.0}
    throughput.add(0, {"forward": 1.0})
    assert throughput.by_bucket == {0: 1.0}


def test_waiting_for_data_is_said_where_it_is_more_than_a_tenth() -> None:
    for waited, steps, said in (
        (0.21, RECENT, pytest.approx(0.21)),
        (0.05, RECENT, None),
        (0.9, RECENT - 1, None),
    ):
        throughput = Throughput()
        throughput.add(0, {"forward": 30.0})  # the first step counts alone
        for _ in range(steps):
            throughput.add(0, {"data": waited, "forward": 1 - waited})
        assert throughput.waiting() == said
    throughput = Throughput()
    for _ in range(RECENT + 1):
        throughput.add(0, {"data": 3.0, "forward": 1.0})
    assert throughput.waiting() == pytest.approx(0.75)
    for _ in range(RECENT):
        throughput.add(0, {"data": 0.0, "forward": 1.0})
    assert throughput.waiting() is None, "it is about the latest steps"
