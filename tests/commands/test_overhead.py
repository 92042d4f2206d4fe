"""What a run does between its steps: by default it takes 8 % of their time; it is planned as it happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.safety_kit import Work
from tests.read_runs import of_kind
from tests.runs import measure, open_run, prepare, preview
from videotune.cli.plan import overhead_text
from videotune.latent_cache.exposure import band, most
from videotune.planner.plan import make_plan
from videotune.toy.dataset import write_dataset
from videotune.trainer.logging.speed import time_left
from videotune.trainer.loop import train_loop
from videotune.trainer.progress import announce, progress_parts, seconds_left, steps_left, tokens_of_buckets
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.resume import Resume
from videotune.trainer.run_dir import begin, run_settings
from videotune.trainer.run_spec import Job, open_job
from videotune.trainer.trainer import Trainer, due, times
from videotune.validation.overhead import overhead, planned, share_of_all

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
    [("wan", ("ema.decay=0.5",)), ("hunyuan_video", ("sample.guidance=6",))],
    ids=["guided", "guidance embedded"],
)
def test_the_plan_knows_how_often_and_how_many_passes(family: str, more: tuple[str, ...], work: Work) -> None:
    """Against the calls of the network: what passes through it in a validation and a preview, and how many there were."""
    run = work.run
    job = open_run(work.overrides(*OFTEN, *more, base=(family,)), run).job
    trainer, planned = prepare(job, run, False), make_plan(job)["beside"]
    announce(trainer, None)
    for act, part in ((measure, "readings"), (preview, "previews")):
        with counted(trainer) as seen:
            act(trainer, 0)
        assert sum(seen) == planned[part]["passes"], part
    assert train_loop(trainer) == "done"
    trainer.journal.close()
    assert len({line["step"] for line in of_kind(run, "validation")}) == planned["readings"]["count"] == 4
    assert len({line["step"] for line in of_kind(run, "sample")}) == planned["previews"]["count"] == 3


def test_the_share_is_that_of_the_tokens(work: Work) -> None:
    """By hand: 4 validations of 9 passes, beside 5 steps of 2 samples that count threefold; all of one shape. With twice the
    processes the same: as many steps have twice the samples in the same time."""

    def found(*sets: str, processes: int = 1) -> dict[str, Any]:
        settings = work.overrides("batch_size=2", "video_config.frames=5", *sets)
        return make_plan(open_run(settings, work.run, None, processes).job)["beside"]

    facts = found(*OFTEN)
    windows = facts["readings"]["held_out_windows"] + facts["readings"]["training_windows"]
    assert facts["readings"]["passes"] == 9
    assert facts["readings"]["share"] == pytest.approx(4 * 9 / (3 * 2 * 5), rel=0.01)
    assert facts["previews"]["share"] == pytest.approx(3 * facts["previews"]["passes"] / (3 * 2 * 5), rel=0.01)
    assert share_of_all(facts) == facts["readings"]["share"] + facts["previews"]["share"]
    printed = overhead_text(facts)
    assert f"4 validations of {windows} windows" in printed
    assert "3 × 1 previews" in printed
    assert found() == {"readings": None, "previews": None, "probes": None}
    assert overhead_text(found()) == ""
    often = (*OFTEN[:-1], "sample_metrics.budget=1000")
    assert found(*often) == found(*often, processes=2)


def test_the_progress_bar_has_times_seen_with_their_band(work: Work) -> None:
    """By the window that is seen most, step by step as the exposure has it."""
    trainer = prepare(open_run(work.overrides("steps=200", "batch_size=6"), work.run).job, work.run, False)
    trainer.journal.close()
    bands = {step: band(most(trainer.job.exposure(step))) for step in range(201)}
    assert len(set(bands.values())) == 4
    assert {step: trainer.band_at(step) for step in bands} == bands
    assert progress_parts(trainer, 120, {"loss": 0.1})[-1].endswith(f"views a window, {bands[120]}")


def test_the_time_left_counts_what_is_done_between_steps(work: Work) -> None:
    run = work.run
    settings = work.overrides(*OFTEN)
    trainer = prepare(open_run(settings, run).job, run, False)
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


BIG = ("family=wan", "resolution=480x832", "allow_crop=true")


def open_planned(clips: Path, *sets: str) -> Job:
    return planned(open_job(*resolve_config(Overrides(data=str(clips), sets=sets))))


@pytest.fixture(scope="module")
def forty_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forty")
    write_dataset(folder, concept_clips=40, reminder_clips=0, seed=1)
    return folder


@pytest.mark.parametrize(
    "sets", [(), ("batch_size=4",), ("ema.decay=0.99",), ("sample.guidance=1",), ("save_every=100",)]
)
@pytest.mark.parametrize("family", ["wan", "ltx_video"])
def test_from_500_steps_on_all_of_it_takes_8_percent(family: str, sets: tuple[str, ...], forty_clips: Path) -> None:
    for steps in (500, 1100, 4000):
        job = open_planned(
            forty_clips, f"family={family}", "resolution=480x832", "allow_crop=true", f"steps={steps}", *sets
        )
        found = overhead(job)
        assert 0.02 < share_of_all(found) <= 0.08, (steps, found)
        assert found["readings"]["count"] >= 2
        assert found["previews"]["count"] >= 2
        if "ema.decay=0.99" not in sets:
            assert found["readings"]["count"] >= 3, "a verdict takes three"


def test_a_number_that_is_named_stays_and_a_longer_run_looks_oftener(forty_clips: Path) -> None:
    named = ("validate_every=10", "sample_after=20", "validation_windows=9")
    job = open_planned(forty_clips, *BIG, "steps=500", *named)
    assert (job.config.validate_every, job.config.sample_after, job.config.validation_windows) == (10, 20, 9)
    assert job.config.samples == 2
    assert job.config.sample.steps == job.spec.sample_steps
    short, long = (open_planned(forty_clips, *BIG, f"steps={steps}") for steps in (500, 8000))
    assert short.resolved.origins["validate_every"] == short.resolved.origins["sample.steps"] == "plan"
    counts = [overhead(job)["readings"]["count"] for job in (short, long)]
    assert counts[0] < counts[1]
    assert short.config.sample.steps < long.config.sample.steps == long.spec.sample_steps
    assert short.config.samples == 1


def test_a_run_keeps_its_spacing_when_it_is_prolonged(work: Work) -> None:
    """The spacing stands in config.json; a resume to more steps reads it there."""
    run = work.run
    first = open_run(work.overrides("steps=4", "validate_every=null", "sample_after=null"), run).job
    begin(run, first, {}, make_plan(first), "FLOAT_32")
    later = open_run(Overrides(sets=("steps=400",)), run, Resume()).job
    for key in ("validate_every", "sample_after", "validation_windows"):
        assert getattr(later.config, key) == getattr(first.config, key)
        assert later.resolved.origins[key] == "plan"
    assert overhead(later)["readings"]["count"] > overhead(first)["readings"]["count"]
    assert first.resolved.origins["sample.steps"] == "plan"
    assert first.config.sample.steps < first.spec.sample_steps
    assert run_settings(run)["sample"]["steps"] is None, "what `videotune sample` takes is the family's own"
