"""The state of a training run that the loop and its callbacks share, and the interface
of callbacks.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from videotune.adapters.layers import LiveText
from videotune.distributed import DistributedContext, must_run_together, sharded
from videotune.job.experts import prefix
from videotune.job.job import Job
from videotune.latent_cache.batch_source import BatchSource
from videotune.memory.sharding import Shard
from videotune.models.base import DiffusersModel
from videotune.runs.checkpoint import Checkpoint
from videotune.runs.heartbeat import Heartbeat
from videotune.runs.journal import Journal
from videotune.runs.stop_signals import Signals
from videotune.runs.trackers import Trackers
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.gradient_norms import GradientNorms
from videotune.trainer.rank_meter import RankMeter
from videotune.trainer.text_encoders import live_text
from videotune.trainer.throughput import Throughput
from videotune.trainer.views_counted import ViewsCounted
from videotune.types import Window

T = TypeVar("T")


@dataclass
class PendingSave:
    """A checkpoint that is being written."""

    step: int
    begun: float
    write: Callable[[], Checkpoint]
    """Writes the checkpoint, in whichever thread calls it."""
    written: Future[Checkpoint] | None = None
    """The result of the thread that calls ``write``, on a copy in host memory.

    None: no thread does; ``finish_pending_save`` calls it.
    """
    is_shared: bool = False
    """Whether the processes write it together, each its rows."""
    waited: float = 0.0
    """Seconds for which the steps have waited for it."""

    @property
    def is_being_written(self) -> bool:
        """Whether a thread still writes it."""
        return self.written is not None and not self.written.done()


@dataclass
class Trainer:
    """A run's state: everything that the loop holds. ``loop.py`` trains with it."""

    run: Path
    """The run folder."""
    job: Job
    """The config with its clips and schedule."""
    family: DiffusersModel
    """The base model: its encoders, and how its network is called."""
    pool: ExpertPool
    """The denoiser in memory, with what trains of each expert."""
    source: BatchSource
    """Where the batch of a step comes from."""
    plan: Mapping[str, Any]
    """Content of plan.json."""
    journal: Journal
    heartbeat: Heartbeat
    dist: DistributedContext = field(default_factory=DistributedContext)
    callbacks: "Sequence[Callback]" = ()
    """Run between two steps, in this order."""
    signals: Signals = field(default_factory=Signals)
    first_step: int = 1
    """The first step to do."""
    last_step: int = field(init=False)
    """The last step that is done and recorded. Each process counts it, because only the
    main one has a journal.
    """
    skipped_in_a_row: int = 0
    """Steps that were not finite since the last one that was applied. Those in which only
    float16's loss scale was too large are not counted.
    """
    saved_at: float = field(default_factory=time.monotonic)
    """When a checkpoint was last begun."""
    pending_save: PendingSave | None = None
    """The checkpoint that is being written."""
    paused_at: float | None = None
    """Since when the run has waited for room on its disk."""
    gradient_norms: GradientNorms | None = None
    """Norms of gradients that a callback has asked for."""
    throughput: Throughput = field(default_factory=Throughput)
    rank_meter: RankMeter | None = None
    """Measures this process among others. None: it is the only one."""
    trackers: Trackers | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    """Bytes that the device held at most within a step, by torch's names
    ("allocated_bytes", "reserved_bytes").
    """
    views_counted: ViewsCounted = field(default_factory=ViewsCounted)
    """How often each window has been shown, counted as the journal grows."""

    def __post_init__(self) -> None:
        self.last_step = self.first_step - 1

    @property
    def net(self) -> nn.Module:
        """The denoiser that is in memory."""
        return self.pool.net

    @property
    def device(self) -> torch.device:
        """The device that computes the steps; weights may wait on the host."""
        return self.family.device

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizers update, by their names in checkpoints."""
        trainables = self.pool.trainables.items()
        return self._named(
            {expert: trainable.parameters for expert, trainable in trainables}
        )

    @property
    def averages(self) -> dict[str, Tensor]:
        """Averages of the weights, if the run has them, by their names in checkpoints."""
        averages = {}
        for expert, trainable in self.pool.trainables.items():
            if trainable.ema is not None:
                averages[expert] = trainable.ema.values
        return self._named(averages)

    @property
    def result(self) -> Mapping[str, Tensor]:
        """What is exported, by their names in checkpoints: averages of the weights if the
        run has them, else the weights.
        """
        return self.averages or self.parameters

    @property
    def shard_rows(self) -> dict[str, Shard]:
        """This process's shards of what trains, by their names in checkpoints.

        Empty without sharding.
        """
        return self._named(
            {expert: shards.layout for expert, shards in self.pool.shards.items()}
        )

    def _named(self, by_expert: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
        """Join values of experts under the names of checkpoints."""
        named: dict[str, T] = {}
        for expert, values in by_expert.items():
            prefix = self.prefix(expert)
            named.update((prefix + key, value) for key, value in values.items())
        return named

    @property
    def text(self) -> LiveText | None:
        """How captions are encoded in the step. None: text states are cached."""
        return live_text(self.job.config)

    def text_states(self, prompt: str) -> Mapping[str, Tensor]:
        """Return a prompt's text states: the cached ones, or those of the text encoder
        as it is now.
        """
        if self.text is None:
            return self.source.text_states(prompt)
        return self.family.encode_text([self.text.with_all_tokens(prompt)])[0]

    def prefix(self, expert: str) -> str:
        """Return the prefix of an expert's parameters in a checkpoint."""
        return prefix(self.job.spec, expert)

    @property
    def weights_sharded(self) -> bool:
        """Whether no process has the whole network."""
        return sharded(self.job.config, self.dist)

    @property
    def must_run_together(self) -> bool:
        """Whether all processes must run the network together."""
        return must_run_together(self.job.config, self.dist)

    @property
    def participates(self) -> bool:
        """Whether this process takes part in validation, previews and sample metrics."""
        return self.dist.is_main or self.must_run_together

    def in_lockstep(self) -> AbstractContextManager[None]:
        """Return a context manager of what all processes run together, if they must."""
        return self.dist.together() if self.must_run_together else nullcontext()

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context manager that raises Interrupted when the user asks to stop,
        unless other processes would wait for this one.
        """
        return nullcontext() if self.must_run_together else self.signals.interruptible()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the network compute with the average of its weights, if the run has one,
        and restore it bit for bit.
        """
        # The stack undoes in reverse: first the average is taken out of what the optimizer
        # holds, then the network gets the masters again.
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

    def write_exposure(self, step: int) -> None:
        """Write how often everything has been shown until ``step``, and will be by the
        end, into the journal, once a step.
        """
        lines = self.journal.history.of_kind("views")
        if any(line["step"] == step for line in lines):
            return
        planned = self.plan["views"]
        self.journal.event(
            "views",
            step=step,
            **self.job.exposure(step).so_far(),
            by_the_end=planned["per_window"],
            advice=planned["advice"],
        )


class Callback:
    """Work between two steps. The loop depends only on this interface."""

    every = 0
    """Steps between two runs; it also runs at the last step. 0: never."""
    control_key: str | None = None
    """The key in control.json that asks for it now."""
    saves = False
    """Whether it saves.

    Then it also runs on a stop, and in each process; others run only where it
    ``participates``.
    """

    def prompts(self) -> Sequence[str]:
        """Return the texts that it reads from the cache beside the clips' captions."""
        return ()

    def windows(self) -> Sequence[Window]:
        """Return the windows that it reads from the cache, without random frames, crop or image noise."""
        return ()

    def check(self, family: DiffusersModel, *, takes_part: bool) -> None:
        """Raise VideotuneError for settings that cannot work, before any work is done.

        Args:
            family: the base model, of which nothing is loaded yet.
            takes_part: whether this process will run it.
        """

    def encode(self, family: DiffusersModel) -> None:
        """Encode what it needs and the cache does not have, before a denoiser is
        loaded.
        """

    def built(self, trainer: Trainer) -> None:
        """Called when the networks are built, before a checkpoint is restored."""

    def before(self, trainer: Trainer) -> None:
        """Do the work that is due before the first step; after a resume, what a killed
        process left undone at the checkpoint's step.
        """

    def due(self, trainer: Trainer, step: int, requests: Collection[str]) -> bool:
        """Return whether it runs after ``step``. If one process says yes, all run it.

        Args:
            trainer: the run.
            step: the step that is done.
            requests: the keys of control.json, by which a user asks for something now.
        """
        return due(step, self.every, trainer.job.steps) or self.control_key in requests

    def run(self, trainer: Trainer, step: int) -> None:
        """Do the work of ``step``. It changes nothing of the training."""

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether work of ``step`` is due and not done; only the main process knows."""
        return False

    def stops(self, trainer: Trainer) -> bool:
        """Return whether the run should end early."""
        return False

    def status(self) -> str:
        """Return a few characters for the progress bar."""
        return ""

    def seconds_left(self, trainer: Trainer, step: int, took: float) -> float:
        """Estimate the seconds of its runs from ``step`` + 1 on; the latest took
        ``took``.
        """
        return count_due(self.every, trainer.job.steps, step) * took

    def on_end(self, trainer: Trainer, step: int) -> None:
        """Do work after the last step of this process. Called on the main process."""


def due(step: int, every: int, last: int) -> bool:
    """Return whether work that is due every ``every`` steps (0: never) and at the last
    one is due at ``step``.
    """
    return every > 0 and (step % every == 0 or step == last)


def count_due(every: int, last: int, after: int = -1) -> int:
    """Return at how many steps from ``after`` + 1 to ``last`` work is due that is due
    every ``every`` steps and at the last one (see ``due``).

    Step 0 counts too, in which the base model is measured, unless ``after`` is 0 or more.
    """
    if every <= 0 or after >= last:
        return 0
    multiples_of_every = last // every - after // every
    is_last_between = last % every != 0
    return multiples_of_every + is_last_between
