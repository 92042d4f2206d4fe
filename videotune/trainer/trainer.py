"""The state of a training run that the loop and its callbacks share, and the interface of a callback."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from videotune.adapters.layers import LiveText
from videotune.distributed import DistributedContext, sharded
from videotune.job.experts import prefix
from videotune.job.job import Job
from videotune.latent_cache.batches import BatchSource
from videotune.latent_cache.exposure import band
from videotune.memory.sharding import Shard
from videotune.models.base import DiffusersModel
from videotune.runs.checkpoint import Checkpoint
from videotune.runs.heartbeat import Heartbeat
from videotune.runs.journal import Journal
from videotune.runs.run_dir import Signals
from videotune.runs.trackers import Trackers
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.text_encoders import live_text
from videotune.trainer.throughput import Throughput
from videotune.types import Window

T = TypeVar("T")


@dataclass
class PendingSave:
    """A checkpoint that is being written; ``written``: by a thread, from a copy in host memory (None: by no thread).

    ``write`` does it again, or at all, in the caller's thread.
    """

    step: int
    begun: float
    write: Callable[[], Checkpoint]
    written: Future[Checkpoint] | None = None


@dataclass
class Trainer:
    """Everything the loop holds. ``plan``: plan.json's content; ``first``: the first step to do.

    ``saved_at``: when a checkpoint was last begun, ``saving`` while it is written; ``paused_at``: since when the run waits
    for room on its disk (None while it does not). ``callbacks`` run between two steps, in their order. ``peaks``: bytes that
    a device has held at the most within a step, by torch's names ("allocated_bytes", "reserved_bytes").
    """

    run: Path
    job: Job
    family: DiffusersModel
    pool: ExpertPool
    source: BatchSource
    plan: Mapping[str, Any]
    journal: Journal
    heartbeat: Heartbeat
    dist: DistributedContext = field(default_factory=DistributedContext)
    callbacks: "Sequence[Callback]" = ()
    signals: Signals = field(default_factory=Signals)
    first: int = 1
    skipped_in_a_row: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    saving: PendingSave | None = None
    paused_at: float | None = None
    throughput: Throughput = field(default_factory=Throughput)
    trackers: Trackers | None = None
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def net(self) -> nn.Module:
        """The denoiser that is in memory."""
        return self.pool.net

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizers hold, by the names of checkpoints."""
        return self._named(
            {name: trainable.parameters for name, trainable in self.pool.trainables.items()}
        )

    @property
    def averages(self) -> dict[str, Tensor]:
        """Averages of the weights, where they are kept, by the names of checkpoints."""
        return self._named(
            {
                name: one.ema.values
                for name, one in self.pool.trainables.items()
                if one.ema is not None
            }
        )

    @property
    def result(self) -> Mapping[str, Tensor]:
        """What is exported, by the names of checkpoints: averages of the weights where they are kept, else the weights."""
        return self.averages or self.parameters

    @property
    def rows(self) -> dict[str, Shard]:
        """This process's shards of what trains, by the names of checkpoints; empty without sharding."""
        return self._named({name: shards.rows for name, shards in self.pool.shards.items()})

    def _named(self, by_expert: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
        return {
            self.prefix(name) + key: value
            for name, own in by_expert.items()
            for key, value in own.items()
        }

    @property
    def text(self) -> LiveText | None:
        """How captions are read where text is encoded in the step; None where text states are cached."""
        return live_text(self.job.config)

    def states(self, prompt: str) -> Mapping[str, Tensor]:
        """A prompt's text states: the cached ones, or by the text encoder as it is now."""
        return (
            self.source.text(prompt)
            if self.text is None
            else self.family.encode_text([self.text.spell(prompt)])[0]
        )

    def prefix(self, expert: str) -> str:
        """What the names of an expert's parameters begin with in a checkpoint."""
        return prefix(self.job.spec, expert)

    @property
    def weights_sharded(self) -> bool:
        """Whether all processes must run the network in step, since none has the whole of it."""
        return sharded(self.job.config, self.dist)

    @property
    def participates(self) -> bool:
        """Whether this process takes part in validation, previews and sample metrics."""
        return self.dist.is_main or self.weights_sharded

    def in_step(self) -> AbstractContextManager[None]:
        """All processes run this block together where none has the whole network."""
        return self.dist.together() if self.weights_sharded else nullcontext()

    def breaking(self) -> AbstractContextManager[None]:
        """This block raises Interrupted when the user asks to stop; not where other processes would wait for it."""
        return nullcontext() if self.weights_sharded else self.signals.breaking()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The network computes with the average of its weights, where the run keeps one; restored bit for bit at the end."""
        with ExitStack() as stack:
            for trainable in self.pool.trainables.values():
                if trainable.ema is None:
                    continue
                if trainable.masters:
                    stack.callback(trainable.masters.masters_to_model)
                stack.enter_context(trainable.ema.in_place())
                if trainable.masters:
                    trainable.masters.masters_to_model()
            yield

    def band_at(self, step: int) -> str:
        """The exposure band of the training window that has been shown most."""
        reached = [
            int(views)
            for views, first in self.plan["views"]["steps_for"].items()
            if first <= step
        ]
        return band(max(reached, default=0))

    def write_exposure(self, step: int) -> None:
        """Write how often everything has been shown until ``step``, and by the end, into the journal, once a step."""
        if any(line["step"] == step for line in self.journal.history.of_kind("views")):
            return
        planned = self.plan["views"]
        by_the_end = {"by_the_end": planned["per_window"], "advice": planned["advice"]}
        self.journal.event("views", step=step, **self.job.exposure(step).so_far(), **by_the_end)


class Callback:
    """Work between two steps. The loop knows this interface alone.

    ``every``: it runs each so many steps and at the last one (0: never); ``word``: what in control.json asks for it now;
    ``at_stop``: it saves, so it also runs when the run is asked to stop, and in each process: others only where it
    ``participates``. ``state``: what heartbeat.json says meanwhile.
    """

    every = 0
    word: str | None = None
    at_stop = False

    def prompts(self) -> Sequence[str]:
        """Texts that it reads from the cache beside the clips' captions."""
        return ()

    def windows(self) -> Sequence[Window]:
        """Windows that it reads from the cache with nothing drawn."""
        return ()

    def check(self, takes_part: bool) -> None:
        """Raise VideotuneError for settings that cannot work, before any work; ``takes_part``: this process will run it."""

    def before(self, trainer: Trainer) -> None:
        """Work that belongs before the first step, or to the step of a checkpoint that a killed process did not do."""

    def due(self, trainer: Trainer, step: int, asked: Collection[str]) -> bool:
        """Whether it runs after ``step``; ``asked``: the words of control.json. One process's yes counts for all."""
        return due(step, self.every, trainer.job.steps) or self.word in asked

    def run(self, trainer: Trainer, step: int) -> None:
        """Do the work of ``step``; nothing of the training moves."""

    def stops(self, trainer: Trainer) -> bool:
        """Whether the run should end early."""
        return False

    def status(self) -> str:
        """A word for the progress bar."""
        return ""

    def seconds_left(self, trainer: Trainer, step: int, took: float) -> float:
        """Estimated seconds of its runs from ``step`` + 1 on; the latest took ``took``."""
        return times(self.every, trainer.job.steps, step) * took

    def on_end(self, trainer: Trainer, step: int) -> None:
        """The last step of this process is done; called on the main process."""


def due(step: int, every: int, last: int) -> bool:
    """Whether what happens every ``every`` steps (0: never) and at the last one happens at ``step``."""
    return every > 0 and (step % every == 0 or step == last)


def times(every: int, last: int, after: int = -1) -> int:
    """At how many steps from ``after`` + 1 to ``last`` it is due; step 0, where it is one of them, is the base's."""
    if every <= 0 or after >= last:
        return 0
    return last // every - after // every + bool(last % every)
