"""How fast a run goes: what its bar says of the time left, and the warning that it waits for data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from videotune.cache.sampler import bucket_of, turns
from videotune.console import warn
from videotune.train.logging.speed import time_left
from videotune.validation.overhead import times

if TYPE_CHECKING:
    from videotune.train.run_spec import Job
    from videotune.train.trainer import Trainer

WAITS = "the steps wait for data"
"""How the warning of that begins; it comes once a process."""


def report_throughput(trainer: Trainer, step: int, line: Mapping[str, Any]) -> None:
    """Take in a step's seconds; where the steps wait for data, say so once."""
    trainer.throughput.tell(bucket_of(trainer.job.schedule, step), line["seconds"])
    share = trainer.throughput.waiting()
    if share is None or trainer.waits:
        return
    trainer.waits = True
    text = f"{WAITS}: {share:.0%} of their time; a faster disk, or more dataloader_threads, would help"
    warn(trainer.journal, step, text)


def seconds_left(trainer: Trainer, step: int) -> float | None:
    """Seconds to the end, by the buckets that are still to come, and by what readings, previews and saves took so far.

    Asked when ``step`` is done, and before what is done after it.
    """
    job = trainer.job
    steps = time_left(trainer.throughput.by_bucket, turns_left(job, step), sizes_of(job))
    return None if steps is None else steps + looks_left(trainer, step - 1, steps)


def looks_left(trainer: Trainer, step: int, steps: float) -> float:
    """Seconds of what is done after the steps that follow ``step``: each look as long as the latest of its kind.

    Of a kind that was not met yet nothing is known, and nothing is counted. Probes take at most their budget of ``steps``,
    the seconds of the steps that are left.
    """
    config, last, took = trainer.job.config, trainer.job.steps, trainer.throughput.looks
    saves = times(config.save_every, last, step) if config.save_every else int(step < last)
    count = {
        "ruler": times(config.ruler_after, last, step),
        "sample": times(config.sample_after, last, step) * len(trainer.prompts),
        "save": saves,
    }
    probes = min(saves * took.get("probe", 0.0), config.probe_budget * steps)
    return sum(number * took.get(kind, 0.0) for kind, number in count.items()) + probes


def turns_left(job: Job, step: int) -> dict[int, int]:
    """How many steps of each bucket come after a step, exactly."""
    every = range(len(job.buckets))
    return {bucket: turns(job.schedule, bucket, job.steps) - turns(job.schedule, bucket, step) for bucket in every}


def sizes_of(job: Job) -> list[float]:
    """Tokens of a step of each bucket."""
    pairs = zip(job.shapes, job.schedule.batches, strict=True)
    return [float(batch * job.spec.tokens(shape)) for shape, batch in pairs]
