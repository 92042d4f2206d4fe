"""Numbers that belong to one choice of another key: they are refused beside any other choice."""

from __future__ import annotations

from videotune.config.schema import Config
from videotune.errors import VideotuneError

OF = {
    "learning_rate_cycles": ("learning_rate_scheduler", ("COSINE_RESTARTS",)),
    "learning_rate_power": ("learning_rate_scheduler", ("POLYNOMIAL",)),
    "loss_weighting_gamma": ("loss_weighting", ("min_snr",)),
    "timestep_mean": ("timestep_distribution", ("LOGIT_NORMAL",)),
    "timestep_std": ("timestep_distribution", ("LOGIT_NORMAL",)),
    "timestep_scale": ("timestep_distribution", ("SIGMOID", "MODE")),
    "timestep_alpha": ("timestep_distribution", ("BETA",)),
    "timestep_beta": ("timestep_distribution", ("BETA",)),
}
"""For each number the key whose choice it belongs to, and the choices that use it."""

LEAST_OF_PRODIGY = 0.01
"""A rate below it is another optimizer's: PRODIGY multiplies it with the rate that it finds."""


def refuse_numbers_of_others(config: Config) -> None:
    """Raise VideotuneError for a number that the choice beside it does not use.

    A number that is its default says nothing: a run's kept config names every key.
    """
    for key, (of, choices) in OF.items():
        value, choice = getattr(config, key), getattr(config, of)
        if value != Config.model_fields[key].default and choice not in choices:
            raise VideotuneError(
                f"{key}: {of} {choice} does not use it; it is for {' and '.join(choices)}. Leave it out."
            )
    refuse_for_sharding(config)
    _refuse_of_optimizer(config)


def cannot_wait(config: Config) -> str | None:
    """Why weights of this run cannot wait on the host, by the key that stands against it; None: they can.

    Frozen ones always can. Those that train have their masters and updates there, which torch's AdamW alone makes.
    """
    kind = config.optimizer
    if config.training_method != "FINE_TUNE" or not config.transformer.train:
        return None
    if kind.name != "ADAMW":
        return f"optimizer.name: {kind.name} does not update weights that wait on the host"
    if kind.step_in_backward:
        return "optimizer.step_in_backward: weights that wait on the host are updated there, after backward"
    if kind.masters == "STOCHASTIC_ROUNDING":
        return "optimizer.masters: weights that wait on the host have float32 masters there"
    return None


BY_NUMBER = ("ADAMW", "LION")
"""Optimizers whose update of a number needs that number's own gradient and moments alone, and so can be shared out."""


def refuse_for_sharding(config: Config) -> None:
    """Raise VideotuneError for what cannot stand beside weights that several processes share out."""
    if config.sharding == "OFF":
        return
    kind, full = config.optimizer, config.training_method == "FINE_TUNE" and config.transformer.train
    if config.layer_offload_fraction:
        raise VideotuneError(
            "layer_offload_fraction: with sharding FULL the weights lie with the processes, not on the host: set it to 0, "
            "or sharding to OFF"
        )
    if config.gradient_checkpointing == "CPU_OFFLOADED":
        raise VideotuneError(
            "gradient_checkpointing: CPU_OFFLOADED computes a block by itself, and with sharding FULL its weights would not "
            "be there: set it to ON, or sharding to OFF"
        )
    if full and kind.name not in BY_NUMBER:
        raise VideotuneError(
            f"optimizer.name: {kind.name} looks at a matrix, or at blocks of numbers, as a whole, and with sharding FULL a "
            f"process has some rows of each: take {' or '.join(BY_NUMBER)}, or LORA, whose adapter each process has whole"
        )


def _refuse_of_optimizer(config: Config) -> None:
    kind, own = config.optimizer, type(config.optimizer).model_fields
    for key in ("beta1", "beta2"):
        if kind.name == "ADAFACTOR" and getattr(kind, key) != own[key].default:
            raise VideotuneError(f"optimizer.{key}: ADAFACTOR keeps no such mean; leave it out")
    if kind.name == "PRODIGY" and config.learning_rate < LEAST_OF_PRODIGY:
        raise VideotuneError(
            f"learning_rate: PRODIGY multiplies it with the rate that it finds, and {config.learning_rate:g} is a rate for "
            "other optimizers (a preset may have set it): set learning_rate=1"
        )
    full = config.training_method == "FINE_TUNE"
    if kind.masters == "STOCHASTIC_ROUNDING" and (not full or config.train_dtype == "FLOAT_32"):
        raise VideotuneError(
            "optimizer.masters: STOCHASTIC_ROUNDING is for FINE_TUNE in BFLOAT_16, whose weights otherwise have float32 "
            f"copies; here {'they are float32 themselves' if full else 'an adapter trains, in float32'}. Leave it out."
        )
    apart = "optimizer.step_in_backward" if kind.step_in_backward else "optimizer.masters STOCHASTIC_ROUNDING"
    if kind.name == "PRODIGY" and (kind.step_in_backward or kind.masters == "STOCHASTIC_ROUNDING"):
        raise VideotuneError(f"{apart}: PRODIGY finds one rate from all gradients together; choose another optimizer")
    if kind.step_in_backward and config.gradient_accumulation_steps > 1:
        raise VideotuneError(
            "optimizer.step_in_backward: a gradient that is used at once cannot be summed over "
            f"gradient_accumulation_steps {config.gradient_accumulation_steps}; set one of the two back"
        )
    why = cannot_wait(config)
    if config.layer_offload_fraction and why:
        raise VideotuneError(
            f"{why} (FINE_TUNE with layer_offload_fraction): leave it out, or set layer_offload_fraction to 0"
        )
    if kind.step_in_backward and (config.micro_batch_size or config.batch_size) < config.batch_size:
        raise VideotuneError(
            "optimizer.step_in_backward: a gradient that is used at once cannot be summed over the passes of "
            f"micro_batch_size {config.micro_batch_size}; set one of the two back"
        )
