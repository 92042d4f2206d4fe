"""The gradients of a step between backward and update: brought together from shards,
copies and processes, then clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videotune.trainer.optimizers import clip_grad_norm, norm_of
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import Clock


def finish_gradients(
    trainable: TrainableState,
    context: StepContext,
    values: Tensor,
    clock: Clock,
    *,
    may_lack_some: bool,
) -> Tensor:
    """Sum gradients and ``values`` over processes, clip the gradient, and return its
    norm () before clipping.

    Args:
        trainable: whose gradients the passes have left.
        context: what all steps of the run share.
        values: of the step.
        clock: measures the phases of the step.
        may_lack_some: the model has video and sound, and the step learns only one of them.
            Weights that only the other one reads must have no gradient, or the optimizer
            would move them.
    """
    if trainable.shards is not None:
        trainable.shards.collect()
        if may_lack_some:
            trainable.shards.drop_zero_gradients(context.dist.all_reduce)
    _complete_gradients(trainable)
    if context.dist.size > 1:
        return _finish_gradients_across_processes(trainable, context, values, clock)

    parameters = list(trainable.parameters.values())
    if trainable.loss_scale is not None:
        trainable.loss_scale.unscale(parameters)
    return clip_grad_norm(parameters, context.max_grad_norm)


def _complete_gradients(trainable: TrainableState) -> None:
    """Bring the gradients to the float32 copies of weights that the optimizer updates.

    If no micro-batch reached a trained weight (no caption has a new token), gradients
    become zero, so that every process joins the sum and the optimizer updates the same
    tensors.
    """
    if trainable.masters is not None:
        trainable.masters.grads_to_masters()

    parameters = list(trainable.parameters.values())
    if all(parameter.grad is None for parameter in parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)


def _finish_gradients_across_processes(
    trainable: TrainableState, context: StepContext, values: Tensor, clock: Clock
) -> Tensor:
    """Do what ``finish_gradients`` does, where several processes share the step."""
    dist = context.dist
    shards = trainable.shards
    parameters = list(trainable.parameters.values())
    sharded = []
    if shards is not None:
        sharded = [trainable.parameters[name] for name in shards.parameters]
    sharded_ids = {id(parameter) for parameter in sharded}
    replicated = [
        parameter for parameter in parameters if id(parameter) not in sharded_ids
    ]

    clock.end_phase("optimizer")
    dist.all_reduce_gradients(replicated, keep_missing=context.family.spec.reads_sound)
    dist.sum_over_groups(values)
    clock.end_phase("waiting")
    if trainable.loss_scale is not None:
        trainable.loss_scale.unscale(parameters)
    # With an adapter only frozen weights are sharded: there are no rows, and each process
    # has the whole gradient.
    if shards is None or not shards.rows:
        return clip_grad_norm(parameters, context.max_grad_norm)

    # Sum on the same device on every process, also on one without a row of the network.
    device = parameters[0].device
    squared_norm = dist.all_reduce(norm_of(sharded).float().to(device) ** 2)
    squared_norm = squared_norm + norm_of(replicated).to(device) ** 2
    return clip_grad_norm(parameters, context.max_grad_norm, squared_norm.sqrt())
