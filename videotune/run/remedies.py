"""What to do where a step does not fit into memory, in words, the cheapest first."""

from __future__ import annotations

from videotune.config.schema import Config
from videotune.run.keeping import save_what_is_good
from videotune.run.trainer import Trainer
from videotune.train.step import OutOfMemory


def no_room(trainer: Trainer, error: OutOfMemory) -> str:
    """The bucket that did not fit, its tokens, and remedies; the state before the step is saved where it is whole."""
    windows = {window.id: window for window in trainer.job.library.windows}
    shape = windows[error.window_ids[0]].shape
    tokens, samples = trainer.job.spec.tokens(shape), len(error.window_ids)
    if error.intact and trainer.crew.size == 1:
        kept = save_what_is_good(trainer, error.step - 1)
    else:
        from videotune.run.keeping import last_words

        kept = last_words(trainer.run)
    trainer.journal.event("warning", step=error.step, text=f"out of memory in step {error.step}: bucket {shape}")
    lines = "".join(f"\n  {line}" for line in remedies(trainer.job.config, len(set(trainer.job.schedule.batches)) == 1))
    return (
        f"out of memory in step {error.step}: {samples} samples of {shape} pixels, {tokens:,} tokens each. {kept}\n"
        f"What would help, the first ones without changing what is learnt:{lines}"
    )


def remedies(config: Config, any_split: bool = True) -> list[str]:
    """Settings that need less memory; those that a resume takes come first.

    ``any_split``: another batch_size shows the same samples; it does not where videos among images take fewer of them.
    """
    lines = []
    if config.batch_size > 1 and any_split:
        count = config.batch_size * config.gradient_accumulation_steps
        lines.append(
            f"--resume --set batch_size=1 --set gradient_accumulation_steps={count}: the same steps, one sample at a time, "
            f"about 1/{config.batch_size} of the activations"
        )
    if config.gradient_checkpointing == "OFF":
        lines.append(
            "--resume --set gradient_checkpointing=ON: blocks are computed twice, activations of one block at a time"
        )
    if config.ema.decay is not None and config.ema.device == "device":
        lines.append("--resume --set ema.device=host: the average waits in host memory")
    if config.optimizer.name == "ADAMW":
        lines.append("a new run with optimizer=ADAMW_8BIT: a quarter of the optimizer's memory")
    if config.training_method == "FINE_TUNE" and config.gradient_accumulation_steps == 1:
        if not config.optimizer.step_in_backward and config.optimizer.name != "PRODIGY":
            lines.append(
                "--resume --override --set optimizer.step_in_backward=true: gradients go as they come; each tensor is then "
                "clipped by itself"
            )
        if config.optimizer.masters == "FLOAT_32" and config.train_dtype == "BFLOAT_16":
            lines.append("a new run with optimizer.masters=STOCHASTIC_ROUNDING: no float32 copies of the weights")
    lines.append("a new run with a smaller resolution: activations fall with its square")
    lines.append("a new run with fewer video_config.frames: activations fall with them")
    if config.training_method == "LORA" and config.lora.rank > 8:
        lines.append("a new run with a smaller lora.rank: adapter, gradients and moments fall with it")
    return lines
