"""What a run does beside its steps is planned as it happens, and the time left counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.safety_kit import Make
from tests.runs import callback, measure, open_run, prepare, preview
from videotune.cli.plan import overhead_text
from videotune.latent_cache.exposure import band, most
from videotune.planner.plan import make_plan
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.logging.speed import time_left
from videotune.trainer.loop import train_loop
from videotune.trainer.progress import progress_parts, seconds_left, steps_left, tokens_of_buckets
from videotune.trainer.setup import announce
from videotune.trainer.trainer import Trainer, due, times
from videotune.validation.overhead import share_of_all, share_of_run
from videotune.validation.sample_metrics import SampleMetricsCallback
from videotune.validation.sample_plan import sample_metrics_plan

OFTEN = (
    "steps=5",
    "validate_every=2",
    "sample_after=3",
    "samples=1",
    "sample.steps=2",
    "save_every=2",
    "sample_metrics.budget=0",
)


@contextmanager
def counted(trainer: Trainer) -> Iterator[list[int]]:
    """The samples of each pass through the network, taken from its calls."""
    seen: list[int] = []

    def count(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *given.values()) if isinstance(value, torch.Tensor) and value.dim() == 5]
        seen.append(tensors[0].shape[0])

    handle = trainer.net.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@given(st.integers(0, 12), st.integers(1, 60), st.integers(-1, 60))
def test_it_is_counted_as_often_as_it_is_due(every: int, last: int, after: int) -> None:
    assert times(every, last, after) == sum(due(step, every, last) for step in range(after + 1, last + 1))


@pytest.mark.parametrize(
    ("family", "more"),
    [("wan", ()), ("wan", ("ema.decay=0.5", "sample.guidance=1")), ("hunyuan_video", ("sample.guidance=6",))],
    ids=["guided", "averaged", "told its guidance"],
)
def test_the_plan_knows_how_often_and_how_many_passes(
    family: str, more: tuple[str, ...], overrides: Make, tiny_bases: Callable[[str], Path], tmp_path: Path
) -> None:
    """Against the calls of the network: what passes through it in a reading and in a preview, and how many there were."""
    words = overrides(f"base_model_name={tiny_bases(family)}", f"cache_dir={tmp_path / 'cache'}", *OFTEN, *more)
    job = open_run(words, tmp_path / "run").job
    trainer, planned = prepare(job, tmp_path / "run", False), make_plan(job)["beside"]
    announce(trainer, None)
    for look, part in ((measure, "readings"), (preview, "previews")):
        with counted(trainer) as seen:
            look(trainer, 0)
        assert sum(seen) == planned[part]["passes"], part
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    journal = read_journal(tmp_path / "run")
    assert len({line["step"] for line in journal if line["kind"] == "ruler"}) == planned["readings"]["count"] == 4
    assert len({line["step"] for line in journal if line["kind"] == "sample"}) == planned["previews"]["count"] == 3


def test_the_share_is_that_of_the_tokens(overrides: Make, tmp_path: Path) -> None:
    """By hand: 4 readings of 9 passes a window, beside 5 steps of 2 samples that count threefold; all of one shape."""
    words = overrides(*OFTEN, "batch_size=2", "video_config.frames=5")
    facts = make_plan(open_run(words, tmp_path / "run").job)["beside"]
    windows = facts["readings"]["held_out_windows"] + facts["readings"]["training_windows"]
    assert facts["readings"]["share"] == pytest.approx(4 * 9 * windows / (3 * 2 * 5), rel=0.01)
    assert facts["previews"]["share"] == pytest.approx(3 * facts["previews"]["passes"] / (3 * 2 * 5), rel=0.01)
    assert share_of_all(facts) == facts["readings"]["share"] + facts["previews"]["share"]
    told = overhead_text(facts)
    assert f"4 readings of {windows} windows" in told
    assert "3 × 1 previews" in told
    quiet = overrides("validate_every=0", "sample_after=0", "sample_metrics.budget=0")
    nothing = make_plan(open_run(quiet, tmp_path / "other").job)["beside"]
    assert nothing == {"readings": None, "previews": None, "probes": None}
    assert overhead_text(nothing) == ""


def test_processes_share_the_steps_and_not_what_is_done_between(overrides: Make, tmp_path: Path) -> None:
    """With twice the processes as many steps have twice the samples in the same time; a reading takes what it took."""
    often = (*OFTEN[:-1], "sample_metrics.budget=1000")
    words = overrides(*often)
    one, two = (make_plan(open_run(words, tmp_path / str(n), None, n).job)["beside"] for n in (1, 2))
    assert one == two


def test_probes_are_planned_up_to_their_budget(overrides: Make, tmp_path: Path) -> None:
    """Three checkpoints and the base: four probes, however large the budget; and none where it cannot pay for two."""

    def planned(budget: float) -> tuple[Any, float]:
        words = overrides(*OFTEN[:-1], f"sample_metrics.budget={budget}", "steps=6")
        job = open_run(words, tmp_path / f"{budget}").job
        plan = sample_metrics_plan(job)
        assert plan is not None
        return make_plan(job)["beside"]["probes"], share_of_run(plan, job)

    found, one = planned(1000)
    assert found == {"share_at_most": pytest.approx(4 * one, rel=0.01)}
    assert planned(3 * one)[0] == {"share_at_most": pytest.approx(3 * one, rel=0.01)}
    assert planned(1.9 * one)[0] is None


def test_the_bar_says_views_with_their_band(overrides: Make, tmp_path: Path) -> None:
    """By the window that is shown most, step by step as the exposure has it."""
    words = overrides(*OFTEN, "steps=200", "batch_size=6")
    trainer = prepare(open_run(words, tmp_path / "run").job, tmp_path / "run", False)
    trainer.journal.close()
    told = {step: band(most(trainer.job.exposure(step))) for step in range(201)}
    assert len(set(told.values())) == 4
    assert {step: trainer.band_at(step) for step in told} == told
    assert progress_parts(trainer, 120, {"loss": 0.1})[-1].endswith(f"views a window, {told[120]}")


def test_the_time_left_counts_what_is_done_between_steps(overrides: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = overrides(*OFTEN)
    trainer = prepare(open_run(words, run).job, run, False)
    announce(trainer, None)
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    took = {one: trainer.throughput.took[one] for one in trainer.callbacks}
    spacing = dict(zip(trainer.callbacks, (2, 2, 3), strict=True))  # saves, validation, previews
    for step in range(1, 6):
        steps = time_left(trainer.throughput.by_bucket, steps_left(trainer.job, step), tokens_of_buckets(trainer.job))
        left = {one: sum(due(later, every, 5) for later in range(step, 6)) for one, every in spacing.items()}
        wanted = (steps or 0) + sum(took[one] * count for one, count in left.items())
        assert seconds_left(trainer, step) == pytest.approx(wanted), "asked before what follows the step"


def test_probes_are_counted_up_to_their_budget(overrides: Make, tmp_path: Path) -> None:
    words = overrides(*OFTEN[:-1], "sample_metrics.budget=0.05")
    trainer = prepare(open_run(words, tmp_path / "run").job, tmp_path / "run", False)
    announce(trainer, None)
    trainer.journal.close()
    metrics = callback(trainer, SampleMetricsCallback)
    assert metrics.seconds_left(trainer, 0, 10.0, 1000.0) == 3 * 10.0, "after steps 2, 4 and 5"
    assert metrics.seconds_left(trainer, 0, 10.0, 100.0) == 0.05 * 100.0
