"""How a training is put together: the cache filled, the models loaded, what trains attached, the run directory begun."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.console import echo
from videotune.distributed import DistributedContext, sharded
from videotune.errors import VideotuneError
from videotune.memory.host_memory import keep_freed_memory
from videotune.runs.heartbeat import Heartbeat
from videotune.runs.journal import Journal
from videotune.runs.run_dir import begin, read_run_config
from videotune.runs.trackers import refuse_missing
from videotune.trainer.build import dtype_name, make_objective, make_source, open_models
from videotune.trainer.cache_filling import echo_truncated_live, fill_distributed, reads_of
from videotune.trainer.expert_pool import make_expert_schedule, open_pool
from videotune.trainer.init_from import check_source, init_from
from videotune.trainer.resume import OpenedRun
from videotune.trainer.text_encoders import refuse_text
from videotune.trainer.trainer import Callback, Trainer

KEPT_IN_MEMORY = 256 << 20
"""Bytes of the cache that stay in host memory while a run trains."""


def prepare(
    opened: OpenedRun,
    run: Path,
    plan: Mapping[str, Any],
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    dist: DistributedContext | None = None,
    heartbeat: Heartbeat | None = None,
) -> Trainer:
    """Fill the cache, load the denoisers, attach what trains.

    ``plan``: plan.json's content; making it has refused formats and patterns that do not fit. A resume puts the saved state
    back afterwards. Raises VideotuneError for settings that cannot run, before any work.
    """
    job = opened.job
    first = 1 + (opened.checkpoint.step if opened.checkpoint else 0)
    config = job.config
    dist = dist or DistributedContext()
    heartbeat = heartbeat or Heartbeat(run)
    if config.optimizer.step_in_backward and dist.size > 1:
        raise VideotuneError(
            f"optimizer.step_in_backward: gradients of {dist.size} processes have to be summed before they are used; "
            "leave it out, or train in one process"
        )
    family = open_models(job.spec, job.base, config)
    prints = family.fingerprints()
    if resume and read_run_config(run)["base"]["fingerprints"] != prints:
        raise VideotuneError(
            f"the base model of {run} has changed since the start, so the run cannot be resumed"
        )
    loss = make_objective(job.spec, config)
    expert_schedule = make_expert_schedule(job.spec, config, loss)
    refuse_missing(config.trackers)
    if dist.is_main:
        for note in job.notes:
            echo(f"note: {note}")
        if config.sharding == "FULL" and dist.size == 1:
            echo(
                "note: sharding FULL has nothing to share out: this is one process, which has all weights"
            )
    refuse_text(family, config)
    if config.init_from and first == 1:
        check_source(Path(config.init_from).expanduser(), family, config)
    for callback in callbacks:
        callback.check(takes_part=dist.is_main or sharded(config, dist))
    prompts = [prompt for one in callbacks for prompt in one.prompts()]
    reads = reads_of(job, prompts, [window for one in callbacks for window in one.windows()])
    heartbeat.set("encoding")
    store = fill_distributed(job, family, reads, dist, KEPT_IN_MEMORY, heartbeat.progress)
    heartbeat.set("loading")
    dist.barrier()
    pool = open_pool(family, config, expert_schedule, job.steps, first, dist)
    if dist.is_main:
        echo_truncated_live(job, family, prompts)
    if next(pool.net.parameters()).device.type == "cpu":
        keep_freed_memory()  # only now: what the encoders took has gone back
    if config.init_from and first == 1:  # also a resume of a run that has saved nothing yet
        init_from(Path(config.init_from).expanduser(), family, pool, config)
    if not resume and dist.is_main:
        begin(run, job, prints, plan, dtype_name(config))
    dist.barrier()
    source = make_source(job, family, store, loss, expert_schedule)
    journal = Journal(run if dist.is_main else None, opened.history)
    return Trainer(
        run, job, family, pool, source, plan, journal, heartbeat, dist, tuple(callbacks)
    )
