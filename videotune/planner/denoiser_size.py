"""Bounds on a run's memory that need no reading of a step."""

from __future__ import annotations

import psutil

from videotune.job.job import Job
from videotune.memory.checkpointing import OFF, ON
from videotune.planner.network_facts import linear_sizes

FULL_BYTES = 24
LORA_BYTES = 4
"""Bytes a parameter, at most, of weights with what trains them: all, or an adapter."""


def activations_at_most(job: Job, bytes_a_number: int) -> int:
    """Return a bound on the activations of a step that recomputes nothing.

    It is three times what the linear layers read and write. Wan's model of 14 billion
    parameters keeps 1.2 times that.
    """
    tokens = max(
        job.spec.tokens(shape) * batch
        for shape, batch in zip(job.shapes, job.schedule.batch_sizes, strict=True)
    )
    tokens += job.spec.text_tokens * max(job.schedule.batch_sizes)
    return 3 * bytes_a_number * tokens * linear_sizes(job).in_and_out


def surely_fits(job: Job, vram: int) -> bool:
    """Whether a bound shows that the run fits; a training text encoder has no bound."""
    if job.config.text_in_step:
        return False
    is_full = job.config.training_method == "FINE_TUNE"
    parameter_bytes = FULL_BYTES if is_full else LORA_BYTES
    weights = parameter_bytes * linear_sizes(job).parameters
    # The bound is rough, so it is taken twice, and half of the card must hold it.
    return 2 * (weights + activations_at_most(job, 4)) <= vram // 2


def host_checkpointing(job: Job) -> str:
    """Return ON or OFF for a CPU or MPS: OFF if the host has twice the memory for it."""
    # Twice: other programs of the host need memory too.
    has_room = 2 * activations_at_most(job, 4) <= psutil.virtual_memory().available
    return OFF if has_room else ON
