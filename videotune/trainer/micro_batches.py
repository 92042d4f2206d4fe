"""Split a step's samples into the micro-batches that go through the network one after
the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from videotune.latent_cache.step_batch import StepBatch, share_of
from videotune.types import Batch


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the network together."""

    batch: Batch
    t: Tensor
    """Noise levels (b,)."""
    noise: Tensor
    """Noise (b,C,F,H,W)."""
    first_sample: int
    """Number of the first sample among those of the whole step."""
    is_padding: bool = False
    """Whether the samples only keep this process in step with the others and add
    nothing to the update.
    """
    needs_base_prediction: bool = False
    """Whether it has prior-preservation samples, so that the base model runs first. With
    sharded weights, whether any process has some: all run the base model then.
    """


def micro_batches(step_batch: StepBatch, size: int) -> list[MicroBatch]:
    """Return this process's samples of a step in parts of at most ``size`` samples, in
    order.
    """
    if step_batch.batch is None:
        return []

    parts: list[MicroBatch] = []
    first_sample = step_batch.first_sample
    for batch in step_batch.batch.split(size):
        end = first_sample + len(batch)
        # t covers the samples of all processes, noise only those of this one.
        noise_rows = slice(
            first_sample - step_batch.first_sample, end - step_batch.first_sample
        )
        parts.append(
            MicroBatch(
                batch=batch,
                t=step_batch.t[first_sample:end],
                noise=step_batch.noise[noise_rows],
                first_sample=first_sample,
                is_padding=step_batch.is_padding,
                needs_base_prediction=any(batch.prior_preservation),
            )
        )
        first_sample = end
    return parts


def pad_for_sharding(
    parts: list[MicroBatch], step_batch: StepBatch, size: int, processes: int
) -> list[MicroBatch]:
    """Give every process the same number of passes through a sharded network.

    The processes gather each other's weights in every pass, so all must make as many
    passes as the one with the most samples, and all must run the base model in the same
    passes.

    Args:
        parts: this process's own micro-batches, at least one: a process without a sample
            has a spare one (``make_step_batch``).
        step_batch: the step that they belong to.
        size: samples of a micro-batch, at most.
        processes: how many processes share the step.

    Returns:
        The micro-batches of this process, followed by padding.
    """
    samples = len(step_batch.window_ids)
    shares = [share_of((rank, processes), samples) for rank in range(processes)]
    largest_share = max(end - begin for begin, end in shares)
    passes = math.ceil(largest_share / size)

    padded = []
    for index in range(passes):
        samples_of_all_processes: set[int] = set()
        for begin, end in shares:
            pass_begin = begin + index * size
            samples_of_all_processes.update(
                range(pass_begin, min(pass_begin + size, end))
            )

        part = parts[index] if index < len(parts) else _as_padding(parts[-1])
        needs_base = not samples_of_all_processes.isdisjoint(step_batch.prior_samples)
        padded.append(replace(part, needs_base_prediction=needs_base))
    return padded


def _as_padding(part: MicroBatch) -> MicroBatch:
    """Return the first sample of a micro-batch as padding."""
    return replace(
        part,
        batch=part.batch.split(1)[0],
        t=part.t[:1],
        noise=part.noise[:1],
        is_padding=True,
    )
