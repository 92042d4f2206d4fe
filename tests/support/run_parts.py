"""Runs as ``videotune train`` composes them, a part at a time."""

from pathlib import Path
from typing import Any, TypeVar

from videotune.job.job import Job
from videotune.job.overrides import Overrides
from videotune.latent_cache.store import LatentCache
from videotune.models.base import DiffusersModel
from videotune.planner.plan import make_plan
from videotune.planner.settings import chosen_for_run
from videotune.trainer.cache_filling import fill_cache
from videotune.trainer.resume import OpenedRun, Resume
from videotune.trainer.resume import open_run as open_with
from videotune.trainer.setup import build_trainer as build_with
from videotune.trainer.trainer import Callback, Trainer
from videotune.validation.callbacks import (
    Previews,
    Validation,
    cache_items_of,
    callbacks_of,
)
from videotune.validation.sample_metrics import SampleMetricsCallback

C = TypeVar("C", bound=Callback)


def open_run(
    overrides: Overrides, run: Path, resume: Resume | None = None, processes: int = 1
) -> OpenedRun:
    """The run that the command would open."""
    return open_with(overrides, run, resume, chosen_for_run, processes)


def build_trainer(job: Job, run: Path, resume: bool = False, **more: Any) -> Trainer:
    """The trainer that the command would make."""
    return build_with(
        OpenedRun(job), run, make_plan(job), callbacks_of(job), resume, **more
    )


def fill(job: Job, family: DiffusersModel, store: LatentCache) -> None:
    """Everything that such a run reads is in the cache afterwards."""
    fill_cache(job, family, store, cache_items_of(job))


def callback(trainer: Trainer, kind: type[C]) -> C:
    """The trainer's callback of a class."""
    (found,) = (one for one in trainer.callbacks if isinstance(one, kind))
    return found


def measure(trainer: Trainer, step: int) -> None:
    """The validation loss of a step."""
    callback(trainer, Validation).run(trainer, step)


def preview(trainer: Trainer, step: int) -> None:
    """The previews of a step."""
    callback(trainer, Previews).run(trainer, step)


def probe(trainer: Trainer, step: int) -> None:
    """The sample metrics of a step."""
    callback(trainer, SampleMetricsCallback).run(trainer, step)
