"""The gradients of a step between backward and update: moved from FSDP's shards to this
process's rows and from bf16 weights to their masters, summed over processes, and clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from videotune.adapters.adapter_types import parse_param_name
from videotune.trainer.optimizers import clip_grad_norm, norm_of
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import Clock


def forget_gradients(trainable: TrainableState) -> None:
    """Remove all gradients of passes that are not followed by an update, also those that
    are still in the network and have not been moved to what the optimizer updates.
    """
    trainable.optimizer.zero_grad(set_to_none=True)
    if trainable.shards is not None:
        trainable.shards.forget_gradients()
    if trainable.masters is not None:
        trainable.masters.forget_gradients()


def sum_and_clip(
    trainable: TrainableState,
    context: StepContext,
    values: Tensor,
    clock: Clock,
    *,
    one_modality_only: bool,
) -> Tensor:
    """Sum gradients and ``values`` over processes, clip the gradient, and return its
    norm before clipping, a scalar.

    Args:
        trainable: whose gradients the passes have left.
        context: what all steps of the run share.
        values: of the step.
        clock: measures the phases of the step.
        one_modality_only: the model has video and sound, and the step learns only one of
            them. Weights that only the other one reads must have no gradient, or the
            optimizer would move them.
    """
    shards = trainable.shards
    if shards is not None:
        shards.take_gradients()  # FSDP has summed them: nothing is sent
        if one_modality_only:
            shards.drop_zero_gradients(context.dist.all_reduce)
    # FSDP's hooks and compiled blocks give zeros where nothing reads a module's output.
    gives_zeros = shards is not None or context.compiled is not None
    if one_modality_only and gives_zeros:
        _drop_zeros_of_whole(trainable)
    if trainable.masters is not None:
        trainable.masters.grads_to_masters()

    parameters = list(trainable.parameters.values())
    local_shards, replicated = _by_sharding(trainable)
    if context.dist.size > 1:
        # The time since the backward pass is booked under "optimizer".
        clock.end_phase("optimizer")
        # In a model with sound, a gradient may be missing in all processes, and must stay
        # missing: the step learns video alone, or sound alone.
        reads_sound = context.family.spec.reads_sound
        context.dist.all_reduce_gradients(replicated, keep_missing=reads_sound)
        # Of the processes that share a sample only one counts its loss.
        context.dist.sum_over_groups(values)
        clock.end_phase("waiting")

    # In textual inversion it may be that no caption of the step has the new token. The
    # optimizer updates the same tensors in every step, so gradients of zeros are made.
    if all(parameter.grad is None for parameter in parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    if trainable.loss_scale is not None:
        trainable.loss_scale.unscale(parameters)

    norm = None
    if shards is not None and shards.layout:
        norm = _norm_of_shards(context, local_shards, replicated, parameters[0].device)
    return clip_grad_norm(parameters, context.max_grad_norm, norm)


@torch.no_grad()
def _drop_zeros_of_whole(trainable: TrainableState) -> None:
    """Remove the gradients that are zero, of parameters that this process has whole;
    ``Shards.drop_zero_gradients`` does so for those that are sharded.

    An adapter's are removed only if all of the module's are zero: the first factor of a
    new LoRA has a gradient of zero although the module was used.
    """
    shards = trainable.shards
    sharded_names = () if shards is None else shards.local_parameters
    by_module: dict[str, list[nn.Parameter]] = {}
    gradients: dict[str, list[Tensor]] = {}
    own_parameters = trainable.module_params or trainable.parameters
    for name, parameter in own_parameters.items():
        if parameter.grad is None or name in sharded_names:
            continue
        adapter_part = parse_param_name(name)
        module = name if adapter_part is None else adapter_part[0]
        by_module.setdefault(module, []).append(parameter)
        gradients.setdefault(module, []).append(parameter.grad)
    if not by_module:
        return

    norms = [nn.utils.get_total_norm(tensors).float() for tensors in gradients.values()]
    for module, norm in zip(by_module, torch.stack(norms).tolist(), strict=True):
        if norm == 0:
            for parameter in by_module[module]:
                parameter.grad = None


def _by_sharding(
    trainable: TrainableState,
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of which this process has some rows, and those that every
    process has whole.

    With an adapter only frozen weights are sharded, so that all are of the second kind.
    """
    names = (
        set() if trainable.shards is None else set(trainable.shards.local_parameters)
    )
    local_shards: list[nn.Parameter] = []
    replicated: list[nn.Parameter] = []
    for name, parameter in trainable.parameters.items():
        kind = local_shards if name in names else replicated
        kind.append(parameter)
    return local_shards, replicated


def _norm_of_shards(
    context: StepContext,
    local_shards: Sequence[nn.Parameter],
    replicated: Sequence[nn.Parameter],
    device: torch.device,
) -> Tensor:
    """Return the norm of the whole gradient, a scalar, of which other processes have rows.

    Every process sums on the same device, also one without a row.
    """
    squared_norm = norm_of(local_shards).float().to(device) ** 2
    squared_norm = context.dist.all_reduce(squared_norm)
    squared_norm = squared_norm + norm_of(replicated).to(device) ** 2
    return squared_norm.sqrt()
