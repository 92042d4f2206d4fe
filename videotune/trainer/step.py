"""One optimizer update: forward and backward over the micro-batches, clip once, step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from videotune.adapters.layers import LiveText
from videotune.adapters.lora import adapter_off
from videotune.diffusion.base_targets import guided_target, prior_target
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory.accelerator import has_streams
from videotune.memory.host_weights import to_host
from videotune.memory.out_of_memory import is_out_of_memory
from videotune.rng import torch_seed
from videotune.trainer.gradient_norms import GradientNorms
from videotune.trainer.gradients import forget_gradients, sum_and_clip
from videotune.trainer.low_precision import (
    update_each_rounded,
)
from videotune.trainer.lr_schedule import lr_at
from videotune.trainer.micro_batches import MicroBatch, micro_batches, pad_for_sharding
from videotune.trainer.network_pass import PassInputs, PassOutput, forward_pass
from videotune.trainer.optimizers import (
    step_if_finite,
)
from videotune.trainer.repeated_passes import run_with_fallbacks
from videotune.trainer.step_context import StepContext, TrainableState
from videotune.trainer.step_record import (
    GRAD_NORM,
    LOSS,
    LOSS_SCALE,
    Clock,
    StepRecord,
    empty_values,
    write_values,
)
from videotune.trainer.text_encoders import encode_live_text
from videotune.types import Batch, Velocity


class OutOfMemory(RuntimeError):
    """The device had no room for a step.

    ``intact``: the weights are as they were before it.
    """

    def __init__(self, step: int, window_ids: tuple[str, ...], intact: bool) -> None:
        super().__init__(f"out of memory in step {step}")
        self.step = step
        self.window_ids = window_ids
        self.intact = intact


def train_step(
    context: StepContext,
    net: nn.Module,
    trainable: TrainableState,
    step_batch: StepBatch,
    clock: Clock,
    expert_step: int | None = None,
) -> StepRecord:
    """Make one update of ``net``.

    If the gradient is not finite, weights, optimizer and average stay as they were. With
    updates during backward, each tensor is updated whose own gradient is finite, and the
    average stays.

    Args:
        context: what all steps of the run share.
        net: the denoiser on the device.
        trainable: its trainable parameters, with their optimizer.
        step_batch: the samples of the step.
        clock: measures the phases of the step.
        expert_step: how many steps this expert has had, this one included: with one
            expert the number of the step, which None stands for.

    Raises:
        OutOfMemory: if the device has no room for the step.
    """
    updates_after_backward = trainable.backward_optimizer is None
    update_number = step_batch.step if expert_step is None else expert_step
    learning_rates = _set_learning_rates(trainable, update_number)
    values = empty_values(step_batch, context.family.device)

    # With updates during backward, some weights may have moved when memory runs out.
    with _raising_out_of_memory(
        context, trainable, step_batch, weights_intact=updates_after_backward
    ):
        if not updates_after_backward:
            _begin_backward_updates(context, trainable, step_batch, update_number)
        _accumulate_with_fallbacks(context, net, trainable, step_batch, clock, values)

        grad_norm = _finish_gradients(context, trainable, step_batch, values, clock)
        if context.gradient_norms is not None:
            _keep_norms(context.gradient_norms, trainable, step_batch.step)
        _write_norm(values, grad_norm)
        step_is_finite = values[LOSS].isfinite() & values[GRAD_NORM].isfinite()

    with _raising_out_of_memory(context, trainable, step_batch, weights_intact=False):
        if updates_after_backward:
            _update(trainable, step_is_finite, update_number, values)
        if trainable.ema is not None:
            trainable.ema.update(update_number, step_is_finite)

    trainable.optimizer.zero_grad(set_to_none=True)
    clock.end_phase("optimizer")
    return _record(step_batch, trainable, values, learning_rates, clock)


def _begin_backward_updates(
    context: StepContext,
    trainable: TrainableState,
    step_batch: StepBatch,
    update_number: int,
) -> None:
    """Let the backward pass update each parameter as soon as its gradient is there."""
    assert trainable.backward_optimizer is not None

    # One process and no accumulation: a config with more is refused.
    samples = len(step_batch.window_ids)
    size = context.samples_per_micro_batch(samples)
    assert size >= samples, "updates during backward: one micro-batch"
    trainable.backward_optimizer.begin(update_number)


def _finish_gradients(
    context: StepContext,
    trainable: TrainableState,
    step_batch: StepBatch,
    values: Tensor,
    clock: Clock,
) -> Tensor:
    """Make the gradient ready for the update, and return its norm before clipping, a
    scalar.

    With updates during backward it is used up, and only the norm is left.
    """
    if trainable.backward_optimizer is not None:
        return trainable.backward_optimizer.norm()
    learns_both = step_batch.sound_t is not None
    one_modality_only = context.family.spec.reads_sound and not learns_both
    return sum_and_clip(
        trainable, context, values, clock, one_modality_only=one_modality_only
    )


def _write_norm(values: Tensor, grad_norm: Tensor) -> None:
    """Write the norm of the gradient into the step's values."""
    if grad_norm.device == values.device:
        values[GRAD_NORM].fill_(grad_norm)
    else:
        # With weights on the host the norm is there too. As a plain number it becomes an
        # argument of fill_'s kernel; copying it as a tensor would wait.
        values[GRAD_NORM].fill_(grad_norm.item())


def _keep_norms(
    gradient_norms: GradientNorms, trainable: TrainableState, step: int
) -> None:
    """Keep the norms of a step's gradients, if they are wanted: after clipping, or with
    updates during backward before it.
    """
    backward_optimizer = trainable.backward_optimizer
    if backward_optimizer is None:
        parameters = list(trainable.parameters.values())
        gradient_norms.keep(step, parameters, trainable.expert)
    else:
        gradient_norms.keep_norms(
            step, backward_optimizer.norms, trainable.parameters, trainable.expert
        )


def _record(
    step_batch: StepBatch,
    trainable: TrainableState,
    values: Tensor,
    learning_rates: dict[str, float],
    clock: Clock,
) -> StepRecord:
    """Return the record of a step, whose values are on their way to the host."""
    arrived = None
    if has_streams(values.device):
        values, arrived = to_host(values)
    return StepRecord(
        step=step_batch.step,
        values=values,
        arrived=arrived,
        t=step_batch.t,
        sound_t=step_batch.sound_t,
        lr=learning_rates,
        window_ids=step_batch.window_ids,
        captions=step_batch.captions,
        clock=clock,
        expert=trainable.expert,
    )


@contextmanager
def _raising_out_of_memory(
    context: StepContext,
    trainable: TrainableState,
    step_batch: StepBatch,
    *,
    weights_intact: bool,
) -> Iterator[None]:
    """Turn an out-of-memory error into OutOfMemory, which names the step, and free the
    gradients.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        forget_gradients(trainable)
        raise OutOfMemory(
            step_batch.step, step_batch.window_ids, weights_intact
        ) from error


def _set_learning_rates(
    trainable: TrainableState, update_number: int
) -> dict[str, float]:
    """Set each parameter group to its rate of an update and return the rates by group."""
    learning_rates = {}
    for group in trainable.optimizer.param_groups:
        name = group["name"]
        learning_rates[name] = lr_at(trainable.lr_schedules[name], update_number)
        group["lr"] = learning_rates[name]
    return learning_rates


def _accumulate_with_fallbacks(
    context: StepContext,
    net: nn.Module,
    trainable: TrainableState,
    step_batch: StepBatch,
    clock: Clock,
    values: Tensor,
) -> None:
    """Do what ``accumulate_gradients`` does, again if compiled blocks or CUDA graphs
    fail.
    """
    all_passes = partial(
        accumulate_gradients, context, net, trainable, step_batch, clock, values
    )
    start_again = partial(_start_again, trainable, values)
    run_with_fallbacks(all_passes, start_again, context.compiled, context.captured)


def _start_again(trainable: TrainableState, values: Tensor) -> None:
    """Forget the passes of a step that failed, so that they can be repeated."""
    forget_gradients(trainable)
    values.zero_()
    if trainable.backward_optimizer is not None:
        trainable.backward_optimizer.repeat()


def accumulate_gradients(
    context: StepContext,
    net: nn.Module,
    trainable: TrainableState,
    step_batch: StepBatch,
    clock: Clock,
    values: Tensor,
) -> None:
    """Run forward and backward over this process's micro-batches.

    Args:
        context: what all steps of the run share.
        net: the denoiser on the device.
        trainable: its trainable parameters, whose gradients grow.
        step_batch: the samples of the step.
        clock: measures the phases of the step.
        values: of the step (``step_record``); loss and mse are filled in.
    """
    samples_in_step = len(step_batch.window_ids)
    is_sharded = trainable.shards is not None and context.dist.size > 1

    size = context.samples_per_micro_batch(samples_in_step)
    parts = micro_batches(step_batch, size)
    if is_sharded:
        parts = pad_for_sharding(parts, step_batch, size, context.dist.data_size)

    for micro_batch in parts:
        counted_samples = 0 if micro_batch.is_padding else len(micro_batch.batch)
        inputs = _pass_inputs(
            context,
            net,
            trainable.text,
            micro_batch,
            weight=counted_samples / samples_in_step,
            device=values.device,
        )
        if is_sharded and trainable.text is not None:
            inputs = replace(inputs, batch=_with_graph_from_text(inputs.batch))

        # Seeded after the base model's passes, which would move the draws.
        if context.network_seed is not None:
            sample = (step_batch.step, micro_batch.first_sample)
            # Processes that share a sample's tokens must not draw alike.
            key = (*sample, *context.dist.context_rank_key)
            torch.manual_seed(torch_seed(context.network_seed, "network", *key))
        if context.captured is None:
            output = _forward_and_backward(context, net, trainable, inputs, clock)
        else:
            # What precedes the pass counts as "forward", the graph as "backward".
            clock.end_phase("forward")
            run_pass = partial(_forward_and_backward, context, net, trainable)
            output = context.captured.run(net, inputs, run_pass)
            clock.end_phase("backward")

        if not micro_batch.is_padding:
            write_values(values, micro_batch, output, samples_in_step)


def _pass_inputs(
    context: StepContext,
    net: nn.Module,
    text: LiveText | None,
    micro_batch: MicroBatch,
    *,
    weight: float,
    device: torch.device,
) -> PassInputs:
    """Return what a pass reads: the micro-batch on the device, with its captions encoded
    if they are not cached, and with the base model's target if it has one.
    """
    t = _to_device(micro_batch.t, device)
    noise = _to_device(micro_batch.noise, device)
    batch = micro_batch.batch.map(lambda x: _to_device(x, device))
    batch = encode_live_text(context.family, text, batch)

    target = None
    if context.base_guidance is not None or micro_batch.needs_base_prediction:
        target = _base_target(context, net, micro_batch, batch, t, noise)
    return PassInputs(batch, t, noise, target, weight)


def _forward_and_backward(
    context: StepContext,
    net: nn.Module,
    trainable: TrainableState,
    inputs: PassInputs,
    clock: Clock | None = None,
) -> PassOutput:
    """Run a micro-batch forward and backward, and return its output without a graph."""
    output = forward_pass(context.family, net, context.objective, inputs)
    if clock is not None:
        clock.end_phase("forward")

    if trainable.backward_optimizer is not None:
        # It updates nothing in backward if the loss is not finite.
        trainable.backward_optimizer.expect_loss(output.weighted_loss)
    # False in textual inversion, if no caption holds the new token.
    if output.weighted_loss.requires_grad:
        loss = output.weighted_loss
        if trainable.loss_scale is not None:
            loss = trainable.loss_scale.scaled(loss)
        loss.backward()
    if clock is not None:
        clock.end_phase("backward")
    return replace(output, weighted_loss=output.weighted_loss.detach())


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, non_blocking=has_streams(device))


def _base_target(
    context: StepContext,
    net: nn.Module,
    micro_batch: MicroBatch,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
) -> Velocity | None:
    """Return the target of samples that learn from the base model's own predictions.

    With ``base_guidance`` it keeps the base model's guidance; samples of prior
    preservation learn to stay with the base model's prediction. None: the target is v of
    the data.

    The base model runs even if this process has no such sample: all processes of a
    sharded network must run it together.
    """
    arguments = (context.family, net, context.objective, batch, t, noise)
    target = None
    with adapter_off(net):
        if context.base_guidance is not None:
            target = guided_target(*arguments, context.base_guidance)
        if micro_batch.needs_base_prediction:
            rows = [i for i, wanted in enumerate(batch.prior_preservation) if wanted]
            # Without such a sample the base model still runs, and its result is dropped.
            with_prior = prior_target(*arguments, rows or [0], target)
            if rows:
                target = with_prior
    return target


def _with_graph_from_text(batch: Batch) -> Batch:
    """Return the batch with text states that require a gradient.

    A sharded network gathers its blocks in the backward pass too, but only where autograd
    runs. Where nothing but text trains, a process whose captions have no new token would
    have no graph and not join.
    """
    if batch.conditioning.text.requires_grad:
        return batch
    text = batch.conditioning.text.detach().requires_grad_()
    return replace(batch, conditioning=replace(batch.conditioning, text=text))


def _update(
    trainable: TrainableState,
    step_is_finite: Tensor,
    update_number: int,
    values: Tensor,
) -> None:
    """Update the loss scale, and the weights if ``step_is_finite`` () is true."""
    if trainable.loss_scale is not None:
        values[LOSS_SCALE].copy_(trainable.loss_scale.factor)
        trainable.loss_scale.update(step_is_finite)
    if trainable.rounding_seed is None:
        step_if_finite(trainable.optimizer, step_is_finite)
        if trainable.masters is not None:
            trainable.masters.masters_to_model()
        return

    # Each process rounds its own rows; their first one names the draw, so that no two
    # processes draw alike.
    first_rows = {}
    if trainable.shards is not None:
        first_rows = {
            name: shard.first for name, shard in trainable.shards.layout.items()
        }
    update_each_rounded(
        trainable.optimizer,
        trainable.parameters,
        step_is_finite,
        trainable.rounding_seed,
        update_number,
        first_rows,
    )
