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
from videotune.data.account import totals
from videotune.errors import VideotuneError
from videotune.memory.host import keep_freed_memory
from videotune.monitor.board import Board, refuse_missing
from videotune.monitor.exposure import band
from videotune.monitor.heartbeat import Heartbeat
from videotune.monitor.journal import History, Journal
from videotune.monitor.ruler import Ruler
from videotune.monitor.ruler_plan import read_by_ruler
from videotune.monitor.speed import Pace
from videotune.monitor.verdict import Verdict
from videotune.records import read_record
from videotune.run.begin_from import begin_from
from videotune.run.bench import Bench, make_rota, open_bench, shares
from videotune.run.console import say, warn
from videotune.run.dealt import fill_together, sharded
from videotune.run.experts import prefix
from videotune.run.export import check_formats
from videotune.run.folder import Signals, begin, read_run_config, versions
from videotune.run.job import Job
from videotune.run.models import (
    dtype_name,
    make_objective,
    make_source,
    open_models,
    say_cut_in_loop,
)
from videotune.run.plan import make_plan, what_trains
from videotune.run.previews import prompts_of, sample_settings, usual_shape
from videotune.run.probe_plan import all_prompts
from videotune.run.probes import Probes, open_probes
from videotune.run.text import encoder_of, live_text, refuse_text
from videotune.train.crew import Crew
from videotune.types import Family

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.adapters.text import LiveText
    from videotune.memory.sharding import Rows

KEPT_IN_MEMORY = 256 << 20
"""Bytes of the cache that stay in host memory while a run trains."""


@dataclass
class Trainer:
    """Everything the loop holds. ``first`` is the first step to do; ``saved_at`` when a checkpoint was last written.

    ``paused_at``: since when the run waits for room on its disk; None while it does not. ``ruler_name`` once it is frozen;
    ``ruler_differs``: in what from the one that the run had before, in words. ``verdict``: the latest; ``pace``: how
    fast steps go; ``waits``: it was said that they wait for data.
    """

    run: Path
    job: Job
    family: Family
    bench: Bench
    source: Source
    ruler: Ruler
    prompts: list[str]
    captions: dict[str, tuple[str, ...]]
    journal: Journal
    pulse: Heartbeat
    crew: Crew = field(default_factory=Crew)
    asked: Signals = field(default_factory=Signals)
    first: int = 1
    skipped_in_a_row: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    paused_at: float | None = None
    ruler_name: str | None = None
    ruler_differs: str = ""
    verdict: Verdict | None = None
    pace: Pace = field(default_factory=Pace)
    waits: bool = False
    board: Board | None = None
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
        return self.bench.net

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizers hold, by the names that checkpoints know."""
        return {
            self.prefix(name) + key: parameter
            for name, learner in self.bench.learners.items()
            for key, parameter in learner.parameters.items()
        }

    @property
    def optimizer(self) -> Any:
        """What turns gradients into updates, of the expert that is in memory."""
        return self.bench.learner.optimizer

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
        return sharded(self.job.config, self.crew)

    @property
    def looks(self) -> bool:
        """Whether this process takes part in what the network is asked between steps: readings, previews, probes."""
        return self.crew.first or self.together

    @property
    def rows(self) -> dict[str, Rows]:
        """Of what trains and is cut into rows, those that this process has, by the names of checkpoints."""
        return {
            self.prefix(name) + key: rows
            for name, shards in self.bench.shards.items()
            for key, rows in shards.rows.items()
        }

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What is done in this block all processes do together, where none has the whole network."""
        with self.crew.in_step() if self.together else nullcontext():
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
            for name, learner in self.bench.learners.items()
            if learner.ema is not None
            for key, value in learner.ema.values.items()
        }

    def prefix(self, expert: str) -> str:
        """What the names of an expert's parameters begin with in a checkpoint."""
        return prefix(self.job.spec, expert)


def prepare(
    job: Job,
    run: Path,
    resume: bool,
    crew: Crew | None = None,
    pulse: Heartbeat | None = None,
    first: int = 1,
    history: History | None = None,
) -> Trainer:
    """Fill the cache, load the denoisers, add what trains; ``first`` is the first step to do.

    ``history``: what was read of the run's journal. Whoever resumes puts the saved state back after it.
    """
    config, crew = job.config, crew or Crew()
    pulse = pulse or Heartbeat(run)
    if config.optimizer.step_in_backward and crew.size > 1:
        raise VideotuneError(
            f"optimizer.step_in_backward: gradients of {crew.size} processes have to be summed before they are used; "
            "leave it out, or train in one process"
        )
    family = open_models(job.spec, job.base, config)
    prints = family.fingerprints()
    if resume and read_run_config(run)["base"]["fingerprints"] != prints:
        raise VideotuneError(
            f"the base model of {run} has changed since it started; it cannot be resumed on another one"
        )
    loss = make_objective(job.spec, config)
    rota = make_rota(job.spec, config, loss)
    prompts = prompts_of(job)
    probes = open_probes(job) if crew.first or sharded(config, crew) else None
    check_formats(config, family)
    if config.tensorboard:
        refuse_missing()
    if config.sample_after:
        sample_settings(config, job.spec, usual_shape(job))  # a shape that cannot be drawn is said before any work
    if crew.first:
        for note in job.notes:
            say(f"note: {note}")
        if config.sharding == "FULL" and crew.size == 1:
            say("note: sharding FULL has nothing to share out: this is one process, which has all weights")
    if config.transformer.train:
        what_trains(family.skeleton(), job.spec, config)  # a pattern that matches nothing is said before any work
    refuse_text(family, config)
    pulse.tell("encoding")
    store = fill_together(job, family, all_prompts(job), crew, KEPT_IN_MEMORY, pulse.progress)
    pulse.tell("loading")
    crew.wait()
    bench = open_bench(family, config, rota, job.steps, first, crew)
    if crew.first:
        say_cut_in_loop(job, family, all_prompts(job))
    if next(bench.net.parameters()).device.type == "cpu":
        keep_freed_memory()  # only now: what the encoders took has gone back
    if config.init_from and first == 1:  # also a resume of a run that has saved nothing yet
        begin_from(Path(config.init_from).expanduser(), family, bench, config)
    if not resume and crew.first:
        begin(run, job, prints, make_plan(job), dtype_name(config))
    crew.wait()
    return Trainer(
        run=run,
        job=job,
        family=family,
        bench=bench,
        source=make_source(job, family, store, loss, rota),
        ruler=Ruler(*read_by_ruler(job.library.held_out_windows, job.training_windows), config.seed),
        prompts=prompts,
        captions=captions_by_window(job),
        journal=Journal(run if crew.first else None, history),
        pulse=pulse,
        crew=crew,
        probes=probes,
    )


def captions_by_window(job: Job) -> dict[str, tuple[str, ...]]:
    """Each training window's captions."""
    captions = {clip.id: clip.captions for clip in job.library.clips}
    return {window.id: captions[window.clip_id] for window in job.library.windows}


def announce(trainer: Trainer, changes: list[str] | None) -> None:
    """The journal's first line of this process, and the run in a sentence. ``changes``: of a resume; None: it is none."""
    if trainer.job.config.tensorboard:
        trainer.board = Board(trainer.run, trainer.first, lambda text: warn(trainer.journal, trainer.pulse.step, text))
        trainer.journal.followers.append(trainer.board.tell)
    for line in trainer.journal.history.events:
        trainer.pace.follow(line)
    trainer.journal.followers.append(trainer.pace.follow)
    job, rows = trainer.job, trainer.rows
    count = sum(p.numel() for name, p in trainer.parameters.items() if name not in rows)
    count += sum(prod(own.whole) for own in rows.values())
    if changes is not None:
        more = {"processes": trainer.crew.size} if trainer.crew.size > 1 else {}
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
    if len(trainer.bench.rota.names) > 1:
        dealt = ", ".join(f"{name} {share:.0%}" for name, share in shares(trainer.bench.rota).items())
        say(f"experts: {dealt} of the steps, {trainer.bench.rota.period} in a row")
    if trainer.first > job.steps:
        say(f"all {job.steps} steps are done already: exporting again")
        return
    if job.config.deterministic:
        say(
            "deterministic: kernels that give the same bits every time; what a step takes with them stands in the journal"
        )
    device, several = next(trainer.net.parameters()).device, trainer.crew.size
    where = f"{device}" if several == 1 else f"{several} processes, this one on {device}"
    where += ", which share its weights out" if trainer.together else ""
    modules = {(split(name) or (name.rpartition(".")[0],))[0] for name in {*trainer.parameters, *rows}}
    say(f"training {count:,} parameters in {len(modules)} modules on {where}, into {trainer.run}")
