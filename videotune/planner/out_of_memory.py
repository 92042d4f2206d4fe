"""Describe a step that did not fit into memory, and settings that need less."""

from videotune.config import fields, schema, validators
from videotune.config.optimizers import updates_apart
from videotune.config.part_checks import cannot_compute_in_parts
from videotune.errors import DoesNotFit
from videotune.memory.accelerator import has_streams
from videotune.text import counted
from videotune.trainer.saving import rescue_message, save_before_error
from videotune.trainer.step import OutOfMemory
from videotune.trainer.trainer import Trainer
from videotune.types import ClipShape


class DeviceFull(DoesNotFit):
    """A step that did not fit into memory."""

    def __init__(self, text: str, remedy: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.remedy = remedy
        """Settings with which the run continues; empty: it ends."""


def retry_settings(trainer: Trainer) -> tuple[str, ...]:
    """Return the settings of another try, if the config allows one."""
    config = trainer.job.config
    if config.out_of_memory == "stop" or trainer.dist.size > 1:
        return ()
    settings = [
        setting for setting, _ in same_result_settings(config, _on_gpu(trainer))
    ]
    return tuple(settings[:1])


def save_before_failed_step(trainer: Trainer, error: OutOfMemory) -> str:
    """Save the state before a step that did not fit, if it is intact, write a warning
    into the journal, and return what is saved, as a sentence.
    """
    is_intact = error.intact and trainer.dist.size == 1
    if is_intact:
        rescue = save_before_error(trainer, error.step - 1)
    else:
        rescue = rescue_message(trainer.run)

    # At the step before, so that a resume keeps the warning.
    text = f"out of memory in step {error.step}: bucket {_bucket_of(trainer, error)}"
    trainer.journal.event("warning", step=error.step - 1, text=text)
    return rescue


def _bucket_of(trainer: Trainer, error: OutOfMemory) -> ClipShape:
    """Return the shape of the samples of a failed step."""
    windows = {window.id: window for window in trainer.job.library.windows}
    return windows[error.window_ids[0]].shape


def device_full_message(trainer: Trainer, error: OutOfMemory, rescue: str) -> str:
    """Return a message with the bucket that did not fit, its tokens, and remedies.

    Args:
        trainer: the run.
        error: of the step.
        rescue: what is saved, as a sentence.
    """
    shape = _bucket_of(trainer, error)
    tokens = trainer.job.spec.tokens(shape)
    samples = len(error.window_ids)

    advice = remedies(trainer.job.config, _on_gpu(trainer))
    lines = "".join(f"\n  {line}" for line in advice)
    return (
        f"out of memory in step {error.step}: {counted(samples, 'sample')} of {shape} pixels, "
        f"{tokens:,} tokens each. {rescue}\n"
        f"What would help, the first ones without changing what is learnt:{lines}"
    )


def _on_gpu(trainer: Trainer) -> bool:
    return has_streams(trainer.device)


def same_result_settings(config: schema.Config, gpu: bool) -> list[tuple[str, str]]:
    """Return (setting, effect) of settings that need less memory and train the same."""
    settings = []
    samples = min(config.batch_size, config.micro_batch_size or config.batch_size)
    if samples > 1 and not config.optimizer.step_in_backward:
        effect = f"the same steps, one sample at a time, about 1/{samples} of the activations"
        settings.append(("micro_batch_size=1", effect))

    can_offload = gpu and config.sharding == "OFF"
    if config.gradient_checkpointing == "OFF":
        effect = "blocks are computed twice, activations of one block at a time"
        settings.append(("gradient_checkpointing=ON", effect))
    elif config.gradient_checkpointing == "ATTENTION_SAVED":
        effect = "attention is computed twice, too"
        settings.append(("gradient_checkpointing=ON", effect))
    elif config.gradient_checkpointing == "ON" and can_offload:
        effect = "the inputs of blocks wait in host memory"
        settings.append(("gradient_checkpointing=CPU_OFFLOADED", effect))
    elif (
        config.gradient_checkpointing == "CPU_OFFLOADED"
        and not cannot_compute_in_parts(config)
    ):
        effect = "a block is computed again part by part"
        settings.append(("gradient_checkpointing=IN_PARTS", effect))

    fraction = config.layer_offload_fraction or 0.0
    saves_attention = config.gradient_checkpointing == "ATTENTION_SAVED"
    can_stream = can_offload and not saves_attention
    if fraction < 1 and can_stream and not validators.cannot_wait(config):
        effect = "the weights of that share of the blocks wait in host memory"
        new_fraction = min(1.0, fraction + 0.5)
        settings.append((f"layer_offload_fraction={new_fraction:g}", effect))
    return settings


def rounding_saves_nothing(config: schema.Config) -> bool:
    """Whether the frozen weights of blocks are on the host, or rounded already."""
    weight_dtype = config.transformer.weight_dtype
    if weight_dtype == "auto":
        weight_dtype = config.weight_dtype
    is_rounded = (
        weight_dtype in fields.ROUNDED or config.transformer.matmul_dtype != "auto"
    )
    return is_rounded or (config.layer_offload_fraction or 0.0) == 1


def remedies(config: schema.Config, gpu: bool = True) -> list[str]:
    """Return settings that need less memory; those that a resume takes come first.

    Args:
        config: The config of the run.
        gpu: The device's memory was short, so what waits on the host helps.
    """
    lines = []
    for setting, effect in same_result_settings(config, gpu):
        lines.append(f"--resume --set {setting}: {effect}")
    if config.ema.decay is not None and config.ema.device == "device":
        lines.append("--resume --set ema.device=host: the average waits in host memory")
    if config.optimizer.name == "ADAMW":
        lines.append(
            "a new run with optimizer=ADAMW_8BIT: a quarter of the optimizer's memory"
        )
    if config.training_method == "FINE_TUNE":
        lines += _full_training_remedies(config)
    elif not rounding_saves_nothing(config):
        lines.append(
            "a new run with weight_dtype=FLOAT_8: frozen weights in a half of "
            "bfloat16's memory, or a quarter (NFLOAT_4); another base"
        )

    lines.append(
        "a new run with a smaller resolution: activations fall with its square"
    )
    lines.append("a new run with fewer video_config.frames: activations fall with them")
    if config.training_method == "LORA" and config.lora.rank > 8:
        lines.append(
            "a new run with a smaller lora.rank: adapter, gradients and moments fall with it"
        )
    return lines


def _full_training_remedies(config: schema.Config) -> list[str]:
    """Return settings that need less memory if all weights train."""
    if config.gradient_accumulation_steps != 1:
        return []
    optimizer = config.optimizer
    lines = []
    if not optimizer.step_in_backward and updates_apart(optimizer.name):
        lines.append(
            "--resume --override --set optimizer.step_in_backward=true: "
            "gradients go as they come; each tensor is then clipped by itself"
        )
    if optimizer.masters == "FLOAT_32" and config.train_dtype == "BFLOAT_16":
        lines.append(
            "a new run with optimizer.masters=STOCHASTIC_ROUNDING: "
            "no float32 copies of the weights"
        )
    return lines
