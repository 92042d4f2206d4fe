"""What the processes of a run send each other in a step.

Every figure is of one process and of the bytes that leave it, as rings send them
(``collectives.py``). ``cluster.py`` has how long that takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from videotune.distributed import BUFFER_NUMBERS
from videotune.job.job import Job
from videotune.memory.checkpointing import OFF
from videotune.models.model_files import read_config
from videotune.planner.collectives import (
    all_reduced,
    exchanged,
    gathered,
    rounds_of_all_reduce,
    rounds_of_gather,
    scattered,
)
from videotune.planner.memory import Need
from videotune.planner.network_facts import network_facts
from videotune.planner.step_spec import StepSpec
from videotune.trainer.build import DTYPES

EXCHANGES = 4
"""Tensors that Ulysses exchanges for each attention of a pass: queries, keys, values and
the result; backward their gradients.
"""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a process sends in a step."""

    attention: float = 0.0
    """All-to-all before and after attention."""
    prediction: float = 0.0
    """All-gather of the network's output."""
    gradients: float = 0.0
    """All-reduce of gradients of what every process has whole."""
    weights: float = 0.0
    """All-gather of sharded blocks, and reduce-scatter of their gradients."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of the rings of all processes in a step, one after the other."""

    gradients: int = 0
    weights: int = 0


def process_count(job: Job) -> int:
    """Return how many processes train."""
    return job.processes * job.config.context_parallel


def exchanged_bytes_per_token(job: Job, dtype: str) -> int:
    """Return the bytes of a token's queries, or of its keys, values or results."""
    assert job.base is not None
    part_name = job.spec.part_of(job.spec.experts[0].name)
    config = read_config(job.base.folder / part_name / "config.json")
    width: int = job.spec.attention_heads * config["attention_head_dim"]
    return width * DTYPES[dtype].itemsize


def passes_and_tokens(job: Job, training: Need) -> tuple[float, float]:
    """Return the passes of a process in a step, and the video tokens of all the samples
    that go through them; the means over the buckets.
    """
    accumulated = job.config.gradient_accumulation_steps
    passes = 0.0
    tokens = 0.0
    for shape, batch, share in zip(
        job.shapes, job.schedule.batch_sizes, job.shares, strict=True
    ):
        samples = -(-batch // (accumulated * job.processes))
        micro_batch = min(training.choice.micro_batch, samples)
        passes += share * accumulated * -(-samples // micro_batch)
        tokens += share * accumulated * samples * job.spec.video_tokens(shape)
    return passes, tokens


def traffic(job: Job, spec: StepSpec, training: Need, dtype: str) -> Traffic:
    """Return what a process sends in a step.

    Args:
        job: the run.
        spec: the step of a whole network, that is before it is shared out.
        training: the chosen memory settings.
        dtype: of the training.
    """
    processes = process_count(job)
    if processes == 1 or job.base is None:
        return Traffic()
    passes, tokens = passes_and_tokens(job, training)
    attention, prediction = _exchanged(job, spec, training, dtype, tokens)
    gradients, weights = _summed(job, spec, processes, passes, dtype)
    return Traffic(attention, prediction, gradients, weights)


def rounds_of(job: Job, spec: StepSpec, training: Need) -> Rounds:
    """Return the rounds of the rings of all processes in a step; the mean over the
    buckets.

    Args:
        job: the run.
        spec: the step of a whole network.
        training: the chosen memory settings.
    """
    processes = process_count(job)
    if processes == 1 or job.base is None:
        return Rounds()
    trains_all = _trains_all(job)
    facts = network_facts(job)
    is_sharded = job.config.sharding == "FULL"
    whole_numbers = facts.text[1]
    if is_sharded and trains_all:
        whole_numbers += facts.numbers_below(processes)
    else:
        whole_numbers += facts.parameters
    gradients = -(-whole_numbers // BUFFER_NUMBERS) * rounds_of_all_reduce(processes)
    if not is_sharded:
        return Rounds(gradients)

    passes, _ = passes_and_tokens(job, training)
    collectives = 3 if trains_all else 2  # gathered twice, and gradients scattered
    groups = len(spec.blocks) + 1  # the rest of the network is one, too
    weights = passes * collectives * groups * rounds_of_gather(processes)
    return Rounds(gradients, round(weights))


def _trains_all(job: Job) -> bool:
    return job.config.training_method == "FINE_TUNE" and job.config.transformer.train


def _exchanged(
    job: Job, spec: StepSpec, training: Need, dtype: str, tokens: float
) -> tuple[float, float]:
    """Return the bytes of attention and of the prediction, if samples are shared."""
    parts = job.config.context_parallel
    if parts == 1:
        return 0.0, 0.0
    # A streamed block and one with checkpointing are computed again.
    blocks = len(spec.blocks)
    choice = training.choice
    recomputed = choice.streamed if choice.checkpointing == OFF else blocks
    attentions = 2 * blocks + recomputed

    tensor = exchanged_bytes_per_token(job, dtype) * tokens
    attention = attentions * EXCHANGES * exchanged(tensor / parts, parts)
    numbers_per_token = job.spec.latent_channels * math.prod(job.spec.patch)
    prediction = DTYPES[dtype].itemsize * numbers_per_token * tokens
    return attention, gathered(prediction, parts)


def _summed(
    job: Job, spec: StepSpec, processes: int, passes: float, dtype: str
) -> tuple[float, float]:
    """Return the bytes of gradients that are all-reduced, and of sharded weights."""
    config = job.config
    trains_all = _trains_all(job)
    facts = network_facts(job)
    numbers = facts.parameters + facts.text[1]
    itemsize = 2 if config.optimizer.masters == "STOCHASTIC_ROUNDING" else 4
    if config.sharding != "FULL":
        return all_reduced(itemsize * numbers, processes), 0.0

    # Tensors with fewer rows than processes stay whole in each of them.
    whole_numbers = facts.numbers_below(processes)
    sharded_numbers = facts.parameters - whole_numbers
    reading = next(iter(spec.one_sample.values())).phases["forward"]
    held = reading.get("weights", 0)
    if trains_all:
        held += DTYPES[dtype].itemsize * sharded_numbers
    # Weights are gathered forward and backward, gradients are scattered in float32.
    weights = 2 * passes * gathered(held, processes)
    if not trains_all:
        return all_reduced(itemsize * numbers, processes), weights
    weights += passes * scattered(4 * sharded_numbers, processes)
    whole_numbers += facts.text[1]
    return all_reduced(itemsize * whole_numbers, processes), weights
