"""Samples beside a network in training: how callbacks sample and decode them, and that no failure of theirs ends a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
from torch import Tensor

from videotune.console import bar, echo
from videotune.distributed import RankMismatch
from videotune.memory.out_of_memory import is_out_of_memory
from videotune.runs.stop_signals import Interrupted
from videotune.sampling.pipeline import SampleSettings, decode, draw
from videotune.trainer.trainer import Callback, Trainer
from videotune.types import Window

T = TypeVar("T")

PromptSeeds = Sequence[tuple[str, int]]
"""(prompt, seed) of each."""


def of_main(trainer: Trainer, value: T) -> T:
    """The main process's value where all processes run the network in step; else this process's own."""
    return trainer.dist.broadcast(value) if trainer.weights_sharded else value


class SamplingCallback(Callback):
    """Work that samples. ``what`` it is called, ``state`` of the heartbeat, and how a warning of its ``failure`` begins.

    What failed is not tried again when the run is resumed from its step.
    """

    what = ""
    state = ""
    failure = ""

    def has_failed(self, trainer: Trainer, step: int) -> bool:
        """Whether the journal has a warning of this step."""
        lines = (
            line
            for line in trainer.journal.history.of_kind("warning")
            if line.get("step") == step
        )
        return any(line["text"].startswith(self.failure.format(step)) for line in lines)

    def before(self, trainer: Trainer) -> None:
        """The samples of the first step, or those of the step resumed from that were not made before a kill."""
        step = trainer.first - 1
        if of_main(trainer, trainer.dist.is_main and self.is_lacking(trainer, step)):
            self.run(trainer, step)

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether samples of ``step`` are wanted that are not there."""
        raise NotImplementedError

    @contextmanager
    def contained(self, trainer: Trainer, step: int) -> Iterator[None]:
        """This block may be given up; a failure in it is a warning, and never ends the run."""
        trainer.heartbeat.set(self.state, step)
        try:
            yield
        except Interrupted:
            echo(f"the {self.what} at step {step} are given up")
        except RankMismatch:  # the others wait for this process within the network
            raise
        except (
            Exception
        ) as error:  # whatever goes wrong here, hours of training must not be lost to it
            trainer.journal.warn(
                step, f"{self.failure.format(step)}: {type(error).__name__}: {error}"
            )

    def frames(
        self,
        trainer: Trainer,
        step: int,
        settings: SampleSettings,
        samples: PromptSeeds,
        first: Sequence[Window],
    ) -> list[np.ndarray]:
        """Frames uint8 (T,H,W,3) of each sample, each conditioned on the ``first`` frame of its window, if any.

        All processes that run the network in step take part; the main one alone has the frames.
        """
        # in this order: weights are put back whatever is given up
        title = f"{self.what} at step {step}"
        with trainer.averaged(), trainer.breaking(), trainer.in_step(), bar(title) as progress:
            latents = draw(
                trainer.family,
                trainer.pool,
                settings,
                cache(trainer.states),
                samples,
                on_done=lambda done: progress.update(done, len(samples)),
                first=[trainer.source.plain(window) for window in first],
                isolated=not trainer.job.config.video_config.use_temporal_attention,
            )
        if not trainer.dist.is_main:
            return []
        with trainer.breaking():
            return decoded(trainer, latents)


ATTEMPTS = (
    ("", False),
    (
        "note: the device has no room to decode a preview beside the denoiser, which is offloaded meanwhile",
        False,
    ),
    (
        "note: there is no room to decode a preview whole; it is decoded in tiles, so its pixels differ slightly",
        True,
    ),
)
"""What is printed before an attempt to decode, and whether it is in tiles."""


def decoded(trainer: Trainer, latents: list[Tensor]) -> list[np.ndarray]:
    """The frames of samples.

    Where the device has no room for the autoencoder, the denoiser is set aside meanwhile; where it has none then either,
    they are decoded in tiles, and a note says so.
    """
    name = trainer.pool.current
    try:
        for note, tiled in ATTEMPTS:
            if note:
                echo(note)
                trainer.pool.drop()
            try:
                return decode(trainer.family, latents, tiled)
            except (MemoryError, RuntimeError) as error:
                if tiled or not is_out_of_memory(error):
                    raise
        raise AssertionError
    finally:
        trainer.pool.load(name)
