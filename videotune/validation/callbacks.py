"""What is looked at between two steps: the ruler and the previews. Neither moves anything of the training."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from videotune.console import bar, echo, warn
from videotune.data.video_writer import write_video
from videotune.sampling.pipeline import decode, draw, file_name
from videotune.train.components import plain_batch
from videotune.train.distributed import RankMismatch
from videotune.train.run_dir import Interrupted
from videotune.train.step import condition, of_memory
from videotune.train.trainer import Trainer
from videotune.validation.overhead import due
from videotune.validation.previews import first_frames_of, sample_settings, usual_shape
from videotune.validation.validation_loss import owners, read_validation, related
from videotune.validation.validation_set import freeze
from videotune.validation.verdict import write_exposure, write_verdict

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FAILED = "the preview at step {} failed"
"""How a warning of that begins; such a preview is not tried again when the run is resumed from its step."""


def before_training(trainer: Trainer) -> None:
    """Readings that belong to the first step, or to the step resumed from if it was killed before they were made.

    What the journal lacks the first process says; where all must run the network in step, it tells the others.
    """
    if not trainer.looks:
        return
    step, dist = trainer.first - 1, trainer.dist
    reads, draws, drawn = lacking(trainer) if dist.is_main else (False, False, set())
    if trainer.together:
        reads, draws, drawn = dist.broadcast((reads, draws, drawn))
    if reads:
        measure(trainer, step)
    elif dist.is_main and trainer.job.config.ruler_after:
        write_verdict(trainer, step)  # of a reading that was made before a kill
    if draws:
        preview(trainer, step, drawn)


def lacking(trainer: Trainer) -> tuple[bool, bool, set[str]]:
    """Whether the ruler is to be read before the first step, whether previews are to be drawn, and those that are there."""
    config, step, last = trainer.job.config, trainer.first - 1, trainer.job.steps
    journal, reads = trainer.journal.history.events, False
    if config.ruler_after:
        name = validation_name(trainer)
        read_at = {line["step"] for line in journal if line["kind"] == "ruler" and line.get("ruler") == name}
        # a ruler that is another one since the resume is read before anything is learnt: later readings compare with it
        reads = step not in read_at and (due(step, config.ruler_after, last) or not read_at)
    here = [line for line in journal if line.get("step") == step]
    drawn = {line["prompt"] for line in here if line["kind"] == "sample"}
    failed = any(line["kind"] == "warning" and line["text"].startswith(FAILED.format(step)) for line in here)
    draws = due(step, config.sample_after, last) and not drawn.issuperset(trainer.prompts) and not failed
    return reads, draws, drawn


@contextmanager
def averaged(trainer: Trainer) -> Iterator[None]:
    """The network computes with the average of its weights, where the run keeps one; after it all is back, bit for bit."""
    with ExitStack() as stack:
        for trainable in trainer.pool.trainables.values():
            if trainable.ema is None:
                continue
            if trainable.masters:
                stack.callback(trainable.masters.spread)
            stack.enter_context(trainable.ema.in_place())
            if trainable.masters:
                trainable.masters.spread()
        yield


def measure(trainer: Trainer, step: int) -> None:
    """Read the ruler; normalised by the first reading of the same ruler. Given up where the person asks to stop."""
    trainer.pulse.tell("measuring", step)
    begun, name = time.perf_counter(), validation_name(trainer) if trainer.dist.is_main else ""
    try:
        with averaged(trainer), trainer.breaking():  # in this order: weights are put back whatever is given up
            reading = read(trainer)
        with trainer.breaking():
            live = read(trainer) if trainer.job.config.ema.decay is not None else None
    except Interrupted:
        return
    if not trainer.dist.is_main:  # it has run the network in step with the first one, which knows the same
        return
    lines = trainer.journal.history.of_kind("ruler")
    before: Mapping[str, Any] = next((line for line in lines if line.get("ruler") == name), reading)
    if lines and before is reading:
        what = f" ({trainer.validation_differs} differ)" if trainer.validation_differs else ""
        text = f"the ruler is another one{what}: readings from step {step} on compare with each other, not with earlier ones"
        warn(trainer.journal, step, text)
    whose = owners(trainer.family, trainer.source.objective)
    told = {part: related(value, before[part], whose) for part, value in reading.items()}
    if live is not None:
        told["live"] = {part: related(value, before[part], whose) for part, value in live.items()}
    trainer.journal.event("ruler", step=step, validation=name, **told, seconds=round(time.perf_counter() - begun, 3))
    write_exposure(trainer, step)
    write_verdict(trainer, step)


def validation_name(trainer: Trainer) -> str:
    """The ruler's name; the first asking freezes it."""
    if trainer.validation_name is None:
        trainer.validation_name = freeze(trainer)
    return trainer.validation_name


def read(trainer: Trainer) -> dict[str, Any]:
    """{"held_out", "train"} of the weights as the network has them now."""
    return read_validation(
        trainer.validation,
        trainer.family,
        trainer.pool,
        trainer.source.objective,
        lambda window: condition(trainer.family, trainer.text, plain_batch(trainer.source, window)),
    )


def decoded(trainer: Trainer, latents: list[Tensor]) -> list[np.ndarray]:
    """The frames of a preview.

    Where the device has no room for the autoencoder, the denoiser is set aside meanwhile; where it has none then either,
    they are decoded in tiles, and that is said.
    """
    try:
        return decode(trainer.family, latents)
    except (MemoryError, RuntimeError) as error:
        if not of_memory(error):
            raise
    name = trainer.pool.current
    echo("note: the device has no room to decode a preview beside the denoiser, which is set aside meanwhile")
    trainer.pool.drop()
    try:
        try:
            return decode(trainer.family, latents)
        except (MemoryError, RuntimeError) as error:
            if not of_memory(error):
                raise
        echo(
            "note: the device has no room to decode a preview whole; it is decoded in tiles, so its pixels differ slightly"
        )
        return decode(trainer.family, latents, tiled=True)
    finally:
        _ = trainer.pool[name]


def preview(trainer: Trainer, step: int, drawn: Collection[str] = ()) -> None:
    """Draw the prompts (but those ``drawn`` already) and write them. One that fails is told and never ends the run."""
    config, begun = trainer.job.config, time.perf_counter()
    all_of_them = [(prompt, config.sample.seed + i) for i, prompt in enumerate(trainer.prompts)]
    wanted = [(prompt, seed) for prompt, seed in all_of_them if prompt not in drawn]
    trainer.pulse.tell("sampling", step)
    try:
        settings = sample_settings(config, trainer.job.spec, usual_shape(trainer.job))
        told = first_frames_of(trainer.job)
        with averaged(trainer), trainer.breaking(), trainer.in_step(), bar(f"previews at step {step}") as progress:
            latents = draw(
                trainer.family,
                trainer.pool,
                settings,
                trainer.states,
                [prompt for prompt, _ in wanted],
                [seed for _, seed in wanted],
                on_done=lambda done: progress.update(done, len(wanted)),
                told=[trainer.source.plain(told[prompt]) for prompt, _ in wanted] if told else None,
                isolated=not config.video_config.use_temporal_attention,
            )
        if not trainer.dist.is_main:
            return
        with trainer.breaking():
            videos = decoded(trainer, latents)
        seconds = round((time.perf_counter() - begun) / max(1, len(videos)), 3)
        for (prompt, seed), frames in zip(wanted, videos, strict=True):
            path = trainer.run / "samples" / file_name(step, prompt, seed)
            write_video(path, frames, settings.shape.fps)
            place = path.relative_to(trainer.run).as_posix()
            trainer.journal.event("sample", step=step, prompt=prompt, seed=seed, path=place, seconds=seconds)
    except Interrupted:
        echo(f"the previews at step {step} are given up")
    except RankMismatch:  # the others wait for this process within the network
        raise
    except Exception as error:  # whatever a preview does wrong, hours of training must not be lost to it
        text = f"{FAILED.format(step)}: {type(error).__name__}: {error}"
        warn(trainer.journal, step, text)
