"""What a training holds: the models, what trains, where batches come from, the run folder; and how it is put together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from videotune.adapters.kinds import split
from videotune.cache.batches import Source
from videotune.commands.export import check_formats
from videotune.commands.plan import make_plan, what_trains
from videotune.console import echo, warn
from videotune.data.dataset import totals
from videotune.errors import VideotuneError
from videotune.memory.host_memory import keep_freed_memory
from videotune.records import read_record
from videotune.train.cache_filling import fill_distributed, sharded
from videotune.train.components import (
    dtype_name,
    echo_truncated_live,
    make_objective,
    make_source,
    open_models,
)
from videotune.train.denoisers import DenoiserPool, make_expert_schedule, open_pool, shares
from videotune.train.distributed import DistributedContext
from videotune.train.experts import prefix
from videotune.train.init_from import init_from
from videotune.train.logging.heartbeat import Heartbeat
from videotune.train.logging.journal import History, Journal
from videotune.train.logging.speed import Throughput
from videotune.train.logging.tensorboard import TensorBoardWriter, refuse_missing
from videotune.train.run_dir import Signals, begin, read_run_config, versions
from videotune.train.run_spec import Job
from videotune.train.text_encoders import encoder_of, live_text, refuse_text
from videotune.types import Family
from videotune.validation.exposure import band
from videotune.validation.overfitting import Verdict
from videotune.validation.previews import prompts_of, sample_settings, usual_shape
from videotune.validation.sample_metrics import Probes, open_probes
from videotune.validation.sample_plan import all_prompts
from videotune.validation.selection import validation_windows
from videotune.validation.validation_loss import ValidationLoss

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.adapters.text import LiveText
    from videotune.memory.sharding import Shard

KEPT_IN_MEMORY = 256 << 20
"""Bytes of the cache that stay in host memory while a run trains."""


@dataclass
class Trainer:
    """Everything the loop holds. ``first`` is the first step to do; ``saved_at`` when a checkpoint was last written.

    ``paused_at``: since when the run waits for room on its disk; None while it does not. ``validation_name`` once it is frozen;
    ``validation_differs``: in what from the one that the run had before, in words. ``verdict``: the latest; ``throughput``: how
    fast steps go; ``waits``: it was said that they wait for data.
    """

    run: Path
    job: Job
    family: Family
    pool: DenoiserPool
    source: Source
    validation: ValidationLoss
    prompts: list[str]
    captions: dict[str, tuple[str, ...]]
    journal: Journal
    pulse: Heartbeat
    dist: DistributedContext = field(default_factory=DistributedContext)
    asked: Signals = field(default_factory=Signals)
    first: int = 1
    skipped_in_a_row: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    paused_at: float | None = None
    validation_name: str | None = None
    validation_differs: str = ""
    verdict: Verdict | None = None
    throughput: Throughput = field(default_factory=Throughput)
    waits: bool = False
    board: TensorBoardWriter | None = None
    probes: Probes | None = None

    @cached_property
    def planned_views(self) -> Mapping[str, Any]:
        """The plan's views by the end, and the steps at which each band begins."""
        return dict(read_record(self.run / "plan.json")["views"])

    def band_at(self, step: int) -> str:
        """The band of the training window that has been shown most."""
        reached = [int(views) for views, first in self.planned_views["steps_for"].items() if first <= step]
        return band(max(reached, default=0))

    @property
    def net(self) -> nn.Module:
        """The network that is in memory."""
        return self.pool.net

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizers hold, by the names that checkpoints know."""
        return {
            self.prefix(name) + key: parameter
            for name, trainable in self.pool.trainables.items()
            for key, parameter in trainable.parameters.items()
        }

    @property
    def optimizer(self) -> Any:
        """What turns gradients into updates, of the expert that is in memory."""
        return self.pool.trainable.optimizer

    @property
    def text(self) -> LiveText | None:
        """How captions are read where text is encoded in the step; None where it is cached."""
        return live_text(self.job.config)

    def states(self, prompt: str) -> Mapping[str, Tensor]:
        """A prompt's text states: the cached ones, or by the text encoder as it is now."""
        return self.source.text(prompt) if self.text is None else encoder_of(self.family, self.text)(prompt)

    @property
    def result(self) -> Mapping[str, Tensor]:
        """What is exported, by the names of checkpoints: averages of the weights where they are kept, else the weights."""
        return self.averages or self.parameters

    @property
    def together(self) -> bool:
        """Whether all processes must run the network in step, since none has the whole of it."""
        return sharded(self.job.config, self.dist)

    @property
    def looks(self) -> bool:
        """Whether this process takes part in what the network is asked between steps: readings, previews, probes."""
        return self.dist.is_main or self.together

    @property
    def rows(self) -> dict[str, Shard]:
        """Of what trains and is cut into rows, those that this process has, by the names of checkpoints."""
        return {
            self.prefix(name) + key: rows
            for name, shards in self.pool.shards.items()
            for key, rows in shards.rows.items()
        }

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What is done in this block all processes do together, where none has the whole network."""
        with self.dist.together() if self.together else nullcontext():
            yield

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """What is done in this block is given up when the person asks to stop; not where others would wait for it."""
        with nullcontext() if self.together else self.asked.breaking():
            yield

    @property
    def averages(self) -> dict[str, Tensor]:
        """Averages of the weights, where they are kept, by the names of checkpoints."""
        return {
            self.prefix(name) + key: value
            for name, trainable in self.pool.trainables.items()
            if trainable.ema is not None
            for key, value in trainable.ema.values.items()
        }

    def prefix(self, expert: str) -> str:
        """What the names of an expert's parameters begin with in a checkpoint."""
        return prefix(self.job.spec, expert)


def prepare(
    job: Job,
    run: Path,
    resume: bool,
    dist: DistributedContext | None = None,
    pulse: Heartbeat | None = None,
    first: int = 1,
    history: History | None = None,
) -> Trainer:
    """Fill the cache, load the denoisers, add what trains; ``first`` is the first step to do.

    ``history``: what was read of the run's journal. Whoever resumes puts the saved state back after it.
    """
    config, dist = job.config, dist or DistributedContext()
    pulse = pulse or Heartbeat(run)
    if config.optimizer.step_in_backward and dist.size > 1:
        raise VideotuneError(
            f"optimizer.step_in_backward: gradients of {dist.size} processes have to be summed before they are used; "
            "leave it out, or train in one process"
        )
    family = open_models(job.spec, job.base, config)
    prints = family.fingerprints()
    if resume and read_run_config(run)["base"]["fingerprints"] != prints:
        raise VideotuneError(
            f"the base model of {run} has changed since it started; it cannot be resumed on another one"
        )
    loss = make_objective(job.spec, config)
    expert_schedule = make_expert_schedule(job.spec, config, loss)
    prompts = prompts_of(job)
    probes = open_probes(job) if dist.is_main or sharded(config, dist) else None
    check_formats(config, family)
    if config.tensorboard:
        refuse_missing()
    if config.sample_after:
        sample_settings(config, job.spec, usual_shape(job))  # a shape that cannot be drawn is said before any work
    if dist.is_main:
        for note in job.notes:
            echo(f"note: {note}")
        if config.sharding == "FULL" and dist.size == 1:
            echo("note: sharding FULL has nothing to share out: this is one process, which has all weights")
    if config.transformer.train:
        what_trains(family.skeleton(), job.spec, config)  # a pattern that matches nothing is said before any work
    refuse_text(family, config)
    pulse.tell("encoding")
    store = fill_distributed(job, family, all_prompts(job), dist, KEPT_IN_MEMORY, pulse.progress)
    pulse.tell("loading")
    dist.barrier()
    pool = open_pool(family, config, expert_schedule, job.steps, first, dist)
    if dist.is_main:
        echo_truncated_live(job, family, all_prompts(job))
    if next(pool.net.parameters()).device.type == "cpu":
        keep_freed_memory()  # only now: what the encoders took has gone back
    if config.init_from and first == 1:  # also a resume of a run that has saved nothing yet
        init_from(Path(config.init_from).expanduser(), family, pool, config)
    if not resume and dist.is_main:
        begin(run, job, prints, make_plan(job), dtype_name(config))
    dist.barrier()
    return Trainer(
        run=run,
        job=job,
        family=family,
        pool=pool,
        source=make_source(job, family, store, loss, expert_schedule),
        validation=ValidationLoss(*validation_windows(job.library.held_out_windows, job.training_windows), config.seed),
        prompts=prompts,
        captions=captions_by_window(job),
        journal=Journal(run if dist.is_main else None, history),
        pulse=pulse,
        dist=dist,
        probes=probes,
    )


def captions_by_window(job: Job) -> dict[str, tuple[str, ...]]:
    """Each training window's captions."""
    captions = {clip.id: clip.captions for clip in job.library.clips}
    return {window.id: captions[window.clip_id] for window in job.library.windows}


def announce(trainer: Trainer, changes: list[str] | None) -> None:
    """The journal's first line of this process, and the run in a sentence. ``changes``: of a resume; None: it is none."""
    if trainer.job.config.tensorboard:
        trainer.board = TensorBoardWriter(
            trainer.run, trainer.first, lambda text: warn(trainer.journal, trainer.pulse.step, text)
        )
        trainer.journal.followers.append(trainer.board.tell)
    for line in trainer.journal.history.events:
        trainer.throughput.follow(line)
    trainer.journal.followers.append(trainer.throughput.follow)
    job, rows = trainer.job, trainer.rows
    count = sum(p.numel() for name, p in trainer.parameters.items() if name not in rows)
    count += sum(prod(own.whole) for own in rows.values())
    if changes is not None:
        more = {"processes": trainer.dist.size} if trainer.dist.size > 1 else {}
        trainer.journal.event(
            "resume",
            from_step=trainer.first - 1,
            versions=versions(),
            **({"changes": changes} if changes else {}),
            **more,
        )
    if not trainer.journal.history.of_kind("start"):
        trainer.journal.event(
            "start",
            steps=job.steps,
            effective_batch=job.effective_batch,
            device=str(next(trainer.net.parameters()).device),
            versions=versions(),
            clips=totals(job.library),
            windows=len(job.library.windows),
            buckets=[
                {"shape": str(shape), "windows": len(bucket), "tokens": job.spec.tokens(shape)}
                for shape, bucket in zip(job.shapes, job.buckets, strict=True)
            ],
            trainable_parameters=count,
            notes=list(job.notes),
        )
    if len(trainer.pool.expert_schedule.names) > 1:
        dealt = ", ".join(f"{name} {share:.0%}" for name, share in shares(trainer.pool.expert_schedule).items())
        echo(f"experts: {dealt} of the steps, {trainer.pool.expert_schedule.period} in a row")
    if trainer.first > job.steps:
        echo(f"all {job.steps} steps are done already: exporting again")
        return
    if job.config.deterministic:
        echo(
            "deterministic: kernels that give the same bits every time; what a step takes with them stands in the journal"
        )
    device, several = next(trainer.net.parameters()).device, trainer.dist.size
    where = f"{device}" if several == 1 else f"{several} processes, this one on {device}"
    where += ", which share its weights out" if trainer.together else ""
    modules = {(split(name) or (name.rpartition(".")[0],))[0] for name in {*trainer.parameters, *rows}}
    echo(f"training {count:,} parameters in {len(modules)} modules on {where}, into {trainer.run}")
