"""How fast a run goes: what its bar says of the time left, and the warning that it waits for data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from videotune.cache.schedule import bucket_of, turns
from videotune.monitor.speed import time_left
from videotune.run.console import say

if TYPE_CHECKING:
    from videotune.run.job import Job
    from videotune.run.trainer import Trainer

WAITS = "the steps wait for data"
"""How the warning of that begins; it comes once a process."""


def tell_pace(trainer: Trainer, step: int, line: Mapping[str, Any]) -> None:
    """Take in a step's seconds; where the steps wait for data, say so once."""
    trainer.pace.tell(bucket_of(trainer.job.schedule, step), line["seconds"])
    share = trainer.pace.waiting()
    if share is None or trainer.waits:
        return
    trainer.waits = True
    text = f"{WAITS}: {share:.0%} of their time; a faster disk, or more dataloader_threads, would help"
    trainer.journal.event("warning", step=step, text=text)
    say(f"warning: {text}")


def seconds_left(trainer: Trainer, step: int) -> float | None:
    """Seconds until the last step, by the buckets that are still to come; readings, previews and saves come on top."""
    job = trainer.job
    return time_left(trainer.pace.by_bucket, turns_left(job, step), sizes_of(job))


def turns_left(job: Job, step: int) -> dict[int, int]:
    """How many steps of each bucket come after a step, exactly."""
    every = range(len(job.buckets))
    return {bucket: turns(job.schedule, bucket, job.steps) - turns(job.schedule, bucket, step) for bucket in every}


def sizes_of(job: Job) -> list[float]:
    """Tokens of a step of each bucket."""
    pairs = zip(job.shapes, job.schedule.batches, strict=True)
    return [float(batch * job.spec.tokens(shape)) for shape, batch in pairs]
