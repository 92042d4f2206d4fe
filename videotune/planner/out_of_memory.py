"""What to do where a step does not fit into memory, in words, the cheapest first."""

from videotune.config import fields, schema, validators
from videotune.errors import DoesNotFit
from videotune.memory.accelerator import overlaps
from videotune.trainer.saving import rescue_message, save_what_is_good
from videotune.trainer.step import OutOfMemory
from videotune.trainer.trainer import Trainer


class DeviceFull(DoesNotFit):
    """A step that had no room. ``remedy``: settings with which the run is to go on (empty: it ends)."""

    def __init__(self, text: str, remedy: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.remedy = remedy


def retry_settings(trainer: Trainer) -> tuple[str, ...]:
    """The settings of another try, where the config allows one."""
    config = trainer.job.config
    if config.out_of_memory == "stop" or trainer.dist.size > 1:
        return ()
    return tuple(
        setting
        for setting, _ in unchanging(config, overlaps(next(trainer.net.parameters()).device))[
            :1
        ]
    )


def device_full_message(trainer: Trainer, error: OutOfMemory) -> str:
    """The bucket that did not fit, its tokens, and remedies; the state before the step is saved where it is whole."""
    shape = next(
        one.shape for one in trainer.job.library.windows if one.id == error.window_ids[0]
    )
    tokens = trainer.job.spec.tokens(shape)
    samples = len(error.window_ids)
    intact = error.intact and trainer.dist.size == 1
    kept = save_what_is_good(trainer, error.step - 1) if intact else rescue_message(trainer.run)
    text = f"out of memory in step {error.step}: bucket {shape}"
    trainer.journal.event(
        "warning", step=error.step - 1, text=text
    )  # so that a resume does not cut it off
    on_gpu = overlaps(next(trainer.net.parameters()).device)
    lines = "".join(f"\n  {line}" for line in remedies(trainer.job.config, on_gpu))
    full = f"out of memory in step {error.step}: {samples} samples of {shape} pixels, {tokens:,} tokens each."
    return f"{full} {kept}\nWhat would help, the first ones without changing what is learnt:{lines}"


def unchanging(config: schema.Config, gpu: bool) -> list[tuple[str, str]]:
    """(setting, what it does) of what a resume may be told so that a step needs less memory and is the same."""
    found = []
    most = min(config.batch_size, config.micro_batch_size or config.batch_size)
    if most > 1 and not config.optimizer.step_in_backward:
        found.append(
            (
                "micro_batch_size=1",
                f"the same steps, one sample at a time, about 1/{most} of the activations",
            )
        )
    if config.gradient_checkpointing == "OFF":
        found.append(
            (
                "gradient_checkpointing=ON",
                "blocks are computed twice, activations of one block at a time",
            )
        )
    elif config.gradient_checkpointing == "ON" and gpu and config.sharding == "OFF":
        found.append(
            ("gradient_checkpointing=CPU_OFFLOADED", "the inputs of blocks wait in host memory")
        )
    fraction = config.layer_offload_fraction or 0.0
    if fraction < 1 and gpu and config.sharding == "OFF" and not validators.cannot_wait(config):
        setting = f"layer_offload_fraction={min(1.0, fraction + 0.5):g}"
        found.append((setting, "the weights of that share of the blocks wait in host memory"))
    return found


def gone(config: schema.Config) -> bool:
    """Whether frozen weights of blocks take no room that rounding would give back: they wait on the host, or are rounded."""
    kept = (
        config.weight_dtype
        if config.transformer.weight_dtype == "auto"
        else config.transformer.weight_dtype
    )
    return kept in fields.ROUNDED or (config.layer_offload_fraction or 0.0) == 1


def remedies(config: schema.Config, gpu: bool = True) -> list[str]:
    """Settings that need less memory; those that a resume takes come first.

    ``gpu``: the device's memory was short, so what waits on the host helps.
    """
    lines = [f"--resume --set {setting}: {what}" for setting, what in unchanging(config, gpu)]
    if config.ema.decay is not None and config.ema.device == "device":
        lines.append("--resume --set ema.device=host: the average waits in host memory")
    if config.optimizer.name == "ADAMW":
        lines.append("a new run with optimizer=ADAMW_8BIT: a quarter of the optimizer's memory")
    if config.training_method == "FINE_TUNE" and config.gradient_accumulation_steps == 1:
        if not config.optimizer.step_in_backward and config.optimizer.name != "PRODIGY":
            what = "gradients go as they come; each tensor is then clipped by itself"
            lines.append(f"--resume --override --set optimizer.step_in_backward=true: {what}")
        if config.optimizer.masters == "FLOAT_32" and config.train_dtype == "BFLOAT_16":
            lines.append(
                "a new run with optimizer.masters=STOCHASTIC_ROUNDING: no float32 copies of the weights"
            )
    if config.training_method != "FINE_TUNE" and not gone(config):
        what = "frozen weights in a half of bfloat16's memory, or a quarter (NFLOAT_4); another base"
        lines.append(f"a new run with weight_dtype=FLOAT_8: {what}")
    lines.append("a new run with a smaller resolution: activations fall with its square")
    lines.append("a new run with fewer video_config.frames: activations fall with them")
    if config.training_method == "LORA" and config.lora.rank > 8:
        lines.append(
            "a new run with a smaller lora.rank: adapter, gradients and moments fall with it"
        )
    return lines
