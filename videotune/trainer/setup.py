"""Put a training together: fill the cache, load the models, attach what trains, begin
the run folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.config.schema import Config
from videotune.console import echo
from videotune.distributed import DistributedContext, must_run_together
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.job.shown_notes import remember, unseen
from videotune.latent_cache.store import LatentCache
from videotune.memory.host_memory import keep_freed_memory
from videotune.models.base import DiffusersModel
from videotune.runs.heartbeat import Heartbeat
from videotune.runs.journal import Journal
from videotune.runs.run_dir import begin, read_run_config
from videotune.runs.trackers import refuse_missing
from videotune.text import counted
from videotune.trainer.build import dtype_name, make_objective, make_source, open_models
from videotune.trainer.cache_filling import (
    echo_truncated_live,
    fill_cache_of_run,
    reads_of,
)
from videotune.trainer.expert_pool import make_expert_schedule, open_pool
from videotune.trainer.init_from import check_source, init_from
from videotune.trainer.resume import OpenedRun
from videotune.trainer.text_encoders import refuse_text
from videotune.trainer.trainer import Callback, Trainer
from videotune.types import Window

FLOAT_16_NOTE = (
    "trains in FLOAT_16 with a loss scale; text encoders and VAE compute in float32"
)

CACHE_BYTES_IN_MEMORY = 256 << 20
"""How much of the cache stays in host memory while a run trains."""


def build_trainer(
    opened: OpenedRun,
    run: Path,
    plan: Mapping[str, Any],
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    dist: DistributedContext | None = None,
    heartbeat: Heartbeat | None = None,
) -> Trainer:
    """Fill the cache, load the denoisers and attach what trains.

    A resume restores the saved state afterwards.

    Raises:
        VideotuneError: The settings cannot run; no work is done.
    """
    job = opened.job
    config = job.config
    first = opened.first_step
    dist = dist or DistributedContext()
    heartbeat = heartbeat or Heartbeat(run)

    # 1. Refuse what cannot work before anything is encoded or loaded.
    _refuse_step_in_backward(config, dist)
    family = open_models(job.spec, job.base, config)
    fingerprints = family.fingerprints()
    if resume:
        _refuse_other_base(run, fingerprints)
    objective = make_objective(job.spec, config)
    expert_schedule = make_expert_schedule(job.spec, config, objective)
    refuse_missing(config.trackers)
    if dist.is_main:
        _print_notes(job, dist)
    refuse_text(family, config)

    initial_weights = _initial_weights(config, first, family)
    _check_callbacks(callbacks, family, takes_part=_takes_part(config, dist))

    # 2. Encode what the run reads.
    store = _encode(job, family, callbacks, dist, heartbeat)

    # 3. Load the denoisers.
    heartbeat.set("loading")
    dist.barrier()  # the cache is whole
    pool = open_pool(family, config, expert_schedule, job.steps, first, dist)
    if dist.is_main:
        echo_truncated_live(job, family, _prompts(callbacks))
    _keep_memory_on_cpu(family)
    if initial_weights is not None:
        init_from(initial_weights, family, pool, config)

    # 4. Begin the run folder.
    if dist.is_main and not resume:
        begin(run, job, fingerprints, plan, dtype_name(config))
    dist.barrier()

    trainer = Trainer(
        run=run,
        job=job,
        family=family,
        pool=pool,
        source=make_source(job, family, store, objective, expert_schedule),
        plan=plan,
        journal=Journal(run if dist.is_main else None, opened.history),
        heartbeat=heartbeat,
        dist=dist,
        callbacks=tuple(callbacks),
        first_step=first,
    )
    return notify_built(trainer)


def _check_callbacks(
    callbacks: Sequence[Callback], family: DiffusersModel, *, takes_part: bool
) -> None:
    for callback in callbacks:
        callback.check(family, takes_part=takes_part)


def notify_built(trainer: Trainer) -> Trainer:
    """Run the callbacks' ``built`` on the processes that take part in them."""
    if trainer.participates:
        for callback in trainer.callbacks:
            callback.built(trainer)
    return trainer


def _keep_memory_on_cpu(family: DiffusersModel) -> None:
    """Let the allocator keep freed memory for the next step instead of returning it to
    the system.

    Only once the denoisers are loaded: they need the memory that the encoders return.
    """
    if family.device.type == "cpu":
        keep_freed_memory()


def _initial_weights(config: Config, first: int, family: DiffusersModel) -> Path | None:
    """Return the checked file of the initial weights, if the run begins with some.

    A resume of a run that has saved nothing yet begins with these weights, too.
    """
    if not config.init_from or first != 1:
        return None
    source = Path(config.init_from).expanduser()
    check_source(source, family, config)
    return source


def _prompts(callbacks: Sequence[Callback]) -> list[str]:
    prompts: list[str] = []
    for callback in callbacks:
        prompts += callback.prompts()
    return prompts


def _encode(
    job: Job,
    family: DiffusersModel,
    callbacks: Sequence[Callback],
    dist: DistributedContext,
    heartbeat: Heartbeat,
) -> LatentCache:
    """Fill the cache with what the run and its callbacks read, and let the callbacks
    encode what it does not keep.
    """
    windows: list[Window] = []
    for callback in callbacks:
        windows += callback.windows()

    heartbeat.set("encoding")
    store = fill_cache_of_run(
        job,
        family,
        reads_of(job, _prompts(callbacks), windows),
        dist,
        keep_bytes=CACHE_BYTES_IN_MEMORY,
        on_progress=heartbeat.progress,
    )
    if _takes_part(job.config, dist):
        for callback in callbacks:
            callback.encode(family)
    return store


def _takes_part(config: Config, dist: DistributedContext) -> bool:
    """Whether this process takes part in validation and previews."""
    return dist.is_main or must_run_together(config, dist)


def _refuse_other_base(run: Path, fingerprints: Mapping[str, str]) -> None:
    if read_run_config(run)["base"]["fingerprints"] != fingerprints:
        raise VideotuneError(
            f"{run}: the base model has changed since the run began, so it cannot be resumed. "
            "Restore the base model, or start a new run"
        )


def _refuse_step_in_backward(config: Config, dist: DistributedContext) -> None:
    if config.optimizer.step_in_backward and dist.size > 1:
        raise VideotuneError(
            f"optimizer.step_in_backward: {dist.size} processes must sum their gradients before an update. "
            "Leave it out, or train in one process"
        )


def _print_notes(job: Job, dist: DistributedContext) -> None:
    """Print the notes on the data that `plan` or `check` has not shown lately."""
    new_notes = unseen(job.cache, job.notes)
    for note in new_notes:
        echo(f"note: {note}")
    repeated = len(job.notes) - len(new_notes)
    if repeated:
        echo(
            f"{counted(repeated, 'note')} as `check` or `plan` has shown; the report has all"
        )

    remember(job.cache, new_notes)
    if dtype_name(job.config) == "FLOAT_16":
        echo(f"note: {FLOAT_16_NOTE}")
    if job.config.sharding == "FULL" and dist.size == 1:
        echo(
            "note: sharding FULL has no effect in a single process, which holds all weights"
        )
