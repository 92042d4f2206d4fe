"""Build the trainable state of a network: its parameters, their optimizer, learning rates and
average.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from videotune.adapters.adapter_types import parse_param_name
from videotune.adapters.layers import Parameters, add_full
from videotune.adapters.lora import add_lora, rule_of
from videotune.config.optimizers import default_decay, default_warmup
from videotune.config.schema import Config
from videotune.config.sections import Lora
from videotune.errors import VideotuneError
from videotune.job.experts import TEXT
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.trainer.build import dtype_name
from videotune.trainer.ema import EmaWeights
from videotune.trainer.loss_scale import LossScale
from videotune.trainer.low_precision import BackwardOptimizer, MasterWeights
from videotune.trainer.lr_schedule import LRSchedule
from videotune.trainer.optimizers import (
    AnyOptimizer,
    make_optimizer,
    parts_of,
)
from videotune.trainer.schedule_free import ScheduleFreeWeights
from videotune.trainer.step_context import TrainableState
from videotune.trainer.text_encoders import live_text


def attach(net: nn.Module, spec: ModelSpec, config: Config) -> dict[str, nn.Parameter]:
    """Make trainable what the training method trains and return it by name: an adapter
    in float32, the network's own weights in their dtypes.
    """
    if not config.transformer.train:
        return {}
    if config.training_method == "FINE_TUNE":
        return add_full(net, spec, config.transformer.layers)
    return add_lora(net, spec, config.lora, config.seed)


def make_trainable(
    parameters: Parameters,
    text_groups: Mapping[str, Parameters],
    family: DiffusersModel,
    config: Config,
    expert: str,
    steps: int,
) -> TrainableState:
    """Build the optimizer, learning rates and weight average for trainable parameters.

    Args:
        parameters: of the denoiser, by their names in it.
        text_groups: of text encoders, by group and by their names in checkpoints.
        expert: name of the expert, or ``TEXT`` if only text encoders train.
        steps: how many steps of the run train it.
    """
    settings = config.optimizer
    is_one_of_two_experts = len(family.spec.experts) > 1 and expert != TEXT
    denoiser_group = expert if is_one_of_two_experts else "transformer"

    lr_schedules = make_lr_schedules(config, family.spec, expert, steps)
    groups, lr_schedules = rate_groups(
        parameters, config.lora, denoiser_group, lr_schedules
    )
    groups |= {name: dict(group) for name, group in text_groups.items()}
    module_params: dict[str, nn.Parameter] = {}
    for group in groups.values():
        module_params.update(group)

    # The optimizer updates float32 masters, unless updates of bf16 weights are rounded
    # stochastically. Parameters in float32, as an adapter's, are their own masters.
    rounds_stochastically = settings.masters == "STOCHASTIC_ROUNDING"
    if rounds_stochastically:
        _refuse_rounding(dtype_name(config))
    masters = MasterWeights({} if rounds_stochastically else module_params)
    updated: Parameters = module_params if rounds_stochastically else masters.parameters

    optimized = {}
    for name, group in groups.items():
        if group:
            optimized[name] = [updated[key] for key in group]
    optimizer = make_optimizer(
        optimized,
        settings,
        one_per_parameter=rounds_stochastically or settings.step_in_backward,
        rates={name: lr_schedules[name].learning_rate for name in optimized},
    )

    has_master_copies = masters.has_copies
    rounding_seed = config.seed if rounds_stochastically else None
    backward_optimizer = None
    if settings.step_in_backward:
        backward_optimizer = BackwardOptimizer(
            config.max_grad_norm, rounding_seed, masters if has_master_copies else None
        )
        backward_optimizer.attach(module_params, optimizer)

    return TrainableState(
        parameters=updated,
        optimizer=optimizer,
        lr_schedules=lr_schedules,
        masters=masters if has_master_copies else None,
        ema=_make_average(config, updated, optimizer),
        module_params=module_params if has_master_copies else None,
        expert=expert if is_one_of_two_experts else None,
        text=live_text(config),
        rounding_seed=rounding_seed,
        backward_optimizer=backward_optimizer,
        loss_scale=_make_loss_scale(config, family),
    )


def _refuse_rounding(dtype: str) -> None:
    """Raise VideotuneError unless updates of weights of this dtype can be rounded."""
    if dtype != "BFLOAT_16":
        raise VideotuneError(
            f"optimizer.masters: STOCHASTIC_ROUNDING needs train_dtype BFLOAT_16, and here it is {dtype}. "
            "Set train_dtype or another value of optimizer.masters"
        )


def _make_loss_scale(config: Config, family: DiffusersModel) -> LossScale | None:
    """Return the factor of the loss of a run in float16."""
    if dtype_name(config) != "FLOAT_16":
        return None
    return LossScale(family.device)


def _make_average(
    config: Config, parameters: Parameters, optimizer: AnyOptimizer
) -> EmaWeights | ScheduleFreeWeights | None:
    """Return the average of the weights that is sampled, validated and exported in
    their place, if there is one.
    """
    if config.optimizer.name == "SCHEDULE_FREE":
        return ScheduleFreeWeights(parameters, parts_of(optimizer))
    if config.ema.decay is not None:
        return EmaWeights(parameters, config.ema.decay, config.ema.device == "host")
    return None


def rate_groups(
    parameters: Parameters,
    settings: Lora,
    name: str,
    lr_schedules: Mapping[str, LRSchedule],
) -> tuple[dict[str, dict[str, nn.Parameter]], dict[str, LRSchedule]]:
    """Sort a denoiser's parameters, an adapter's or its own, into groups, one for each
    learning rate.

    LoRA+ (Hayou et al. 2024, arXiv 2402.12354): lora_B learns at
    ``learning_rate_ratio`` times the rate of lora_A.

    Args:
        parameters: by their names in the denoiser.
        settings: the adapter's settings.
        name: the denoiser's own group.
        lr_schedules: by group.

    Returns:
        The parameters by group and name, and ``lr_schedules`` with each
        group's schedule.
    """
    groups: dict[str, dict[str, nn.Parameter]] = {}
    schedules = dict(lr_schedules)
    for key, parameter in parameters.items():
        module_path, part = parse_param_name(key) or (key, "")
        rule = rule_of(settings, module_path)
        is_boosted_b = part == "lora_B" and settings.learning_rate_ratio != 1

        group = name
        peak = lr_schedules[name].learning_rate
        if rule is not None and rule.learning_rate:
            group += f" {rule.pattern}"
            peak = rule.learning_rate
        if is_boosted_b:
            group += " lora_B"
            peak *= settings.learning_rate_ratio

        schedules[group] = replace(lr_schedules[name], learning_rate=peak)
        groups.setdefault(group, {})[key] = parameter
    return groups, schedules


def make_lr_schedules(
    config: Config, spec: ModelSpec, expert: str, steps: int
) -> dict[str, LRSchedule]:
    """Return the learning-rate schedule of each group that trains with an expert for
    ``steps`` steps.
    """
    has_two_experts = len(spec.experts) > 1
    is_low_noise = has_two_experts and expert == spec.experts[-1].name

    denoiser_rate = config.learning_rate
    if is_low_noise and config.learning_rate_low is not None:
        denoiser_rate = float(config.learning_rate_low)
    embedding_rate = config.embedding_learning_rate
    if embedding_rate is None:
        embedding_rate = config.learning_rate
    text_rate = config.text_encoder.learning_rate
    if text_rate is None:
        text_rate = config.learning_rate

    warmup_steps = config.warmup_steps
    if warmup_steps is None:
        warmup_steps = default_warmup(steps)
    decay_steps = config.learning_rate_decay_steps
    if decay_steps is None:
        decay_steps = default_decay(steps)
    schedule = LRSchedule(
        learning_rate=denoiser_rate,
        scheduler=config.learning_rate_scheduler,
        warmup_steps=warmup_steps,
        steps=steps,
        cycles=config.learning_rate_cycles,
        power=config.learning_rate_power,
        floor=config.learning_rate_min / config.learning_rate,
        decay_steps=decay_steps,
        timescale=config.learning_rate_timescale,
    )
    # By the names of the parameter groups that ``make_trainable`` makes.
    return {
        expert if has_two_experts else "transformer": schedule,
        "embedding": replace(schedule, learning_rate=embedding_rate),
        "text_encoder": replace(schedule, learning_rate=text_rate),
    }
