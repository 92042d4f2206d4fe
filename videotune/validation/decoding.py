"""Generate samples with the network that is training; a failure never ends the run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from videotune.adapters.side_update import UpdatesByExpert
from videotune.config.schema import Config
from videotune.config.sections import LoraFile
from videotune.console import bar, echo
from videotune.distributed import RankMismatch
from videotune.exporter.preview_loras import preview_updates
from videotune.memory.out_of_memory import is_out_of_memory
from videotune.models.base import DiffusersModel
from videotune.process_watch import is_lost_connection
from videotune.runs.stop_signals import Interrupted
from videotune.sampling.pipeline import (
    RenderedSample,
    SampleLatents,
    SampleSettings,
    draw_samples,
    render_samples,
)
from videotune.trainer.trainer import Callback, Trainer
from videotune.types import LatentDistribution

T = TypeVar("T")

PromptSeeds = Sequence[tuple[str, int]]
"""(prompt, seed) of each sample."""


def broadcast_from_main(trainer: Trainer, value: T) -> T:
    """Return the main process's value if all processes run the network together.

    Otherwise return the value of this process.
    """
    return trainer.dist.broadcast(value) if trainer.must_run_together else value


def updates_of(
    family: DiffusersModel,
    config: Config,
    settings: SampleSettings,
    *,
    quiet: bool = False,
) -> UpdatesByExpert:
    """Return what the networks of a run add to their outputs in a sample.

    Raises VideotuneError for a LoRA file that cannot be added or taken away. Unless
    ``quiet``, a note says what of a file is left out.
    """
    loras = [
        LoraFile(file=file, strength=strength, expert=expert)
        for file, strength, expert in settings.loras
    ]
    return preview_updates(
        family,
        config.base_loras,
        loras,
        with_base_loras=settings.base_loras,
        quiet=quiet,
    )


class SamplingCallback(Callback):
    """A callback that samples.

    A failed measurement is not repeated when the run is resumed from its step.
    """

    title = ""
    """The name of the work in messages, in the plural."""

    heartbeat_state = ""
    """The state of the heartbeat during the work."""

    failure_prefix = ""
    """The beginning of the warning after a failure, with {} for the step."""

    def has_failed(self, trainer: Trainer, step: int) -> bool:
        """Whether the journal has a warning of a failure at ``step``."""
        prefix = self.failure_prefix.format(step)
        for line in trainer.journal.history.of_kind("warning"):
            if line.get("step") == step and line["text"].startswith(prefix):
                return True
        return False

    def before(self, trainer: Trainer) -> None:
        """Sample at the start, or the samples that a killed process left out."""
        step = trainer.first_step - 1
        is_lacking = trainer.dist.is_main and self.is_lacking(trainer, step)
        if broadcast_from_main(trainer, is_lacking):
            self.run(trainer, step)

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether samples of ``step`` are due and missing."""
        raise NotImplementedError

    @contextmanager
    def failures_as_warnings(self, trainer: Trainer, step: int) -> Iterator[None]:
        """Turn failures of the block into warnings; the user may interrupt it."""
        trainer.heartbeat.set(self.heartbeat_state, step)
        try:
            yield
        except Interrupted:
            echo(
                f"the {self.title} at step {step} were interrupted; they are made on resume"
            )
        except RankMismatch:
            # The processes are no longer at the same point.
            raise
        except Exception as error:
            if is_lost_connection(error):
                raise
            # No failure here is worth hours of training.
            prefix = self.failure_prefix.format(step)
            trainer.journal.warn(step, f"{prefix}: {type(error).__name__}: {error}")

    def samples(
        self,
        trainer: Trainer,
        step: int,
        settings: SampleSettings,
        samples: PromptSeeds,
        conditions: Sequence[LatentDistribution | None],
    ) -> list[RenderedSample]:
        """Generate samples. All processes take part that must run the network together.

        Args:
            trainer: the run.
            step: the step, for the progress bar.
            settings: settings of all samples.
            samples: (prompt, seed) of each.
            conditions: what each is conditioned on, or None, as ``draw_samples`` takes
                them. Empty: none is.

        Returns:
            Each sample; empty on all but the main process.
        """
        config = trainer.job.config
        updates = updates_of(trainer.family, config, settings, quiet=True)
        progress_bar = bar(f"{self.title} at step {step}")

        def report_progress(done: int) -> None:
            progress.update(done, len(samples))
            trainer.heartbeat.progress(self.title, done, len(samples))

        # In this order, the weights are restored even if the sampling is interrupted.
        with (
            trainer.averaged(),
            trainer.interruptible(),
            trainer.in_lockstep(),
            progress_bar as progress,
        ):
            latents = draw_samples(
                trainer.family,
                trainer.pool,
                settings,
                cache(trainer.text_states),
                samples,
                on_done=report_progress,
                conditions=conditions,
                isolated=not config.video_config.use_temporal_attention,
                updates=updates,
            )
        if not trainer.dist.is_main:
            return []
        with trainer.interruptible():
            return decode_samples(trainer, latents)


ATTEMPTS = (
    ("", False),
    (
        "note: not enough device memory to decode a preview beside the denoiser. "
        "The denoiser is offloaded meanwhile.",
        False,
    ),
    (
        "note: not enough memory to decode a preview whole. "
        "It is decoded in tiles, so its pixels differ slightly.",
        True,
    ),
)
"""Attempts to decode: the message before each, and whether it is in tiles."""


def decode_samples(
    trainer: Trainer, latents: list[SampleLatents]
) -> list[RenderedSample]:
    """Decode samples, with less memory after each failed attempt.

    The first retry offloads the denoiser, the second also decodes in tiles.
    """
    expert = trainer.pool.current
    try:
        for message, is_tiled in ATTEMPTS:
            if message:
                echo(message)
                trainer.pool.drop()
            try:
                return render_samples(trainer.family, latents, is_tiled)
            except (MemoryError, RuntimeError) as error:
                if is_tiled or not is_out_of_memory(error):
                    raise
        raise AssertionError
    finally:
        trainer.pool.load(expert)
