"""What the processes of a run send each other in a step, and how long that takes.

Every figure is of one process and of the bytes that leave it, with rings: of a tensor of
T bytes, all-gather and reduce-scatter send T·(n - 1)/n, all-reduce twice that, and an
all-to-all of a local tensor of L bytes sends L·(n - 1)/n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from videotune.job.job import Job
from videotune.memory.checkpointing import OFF
from videotune.models.model_files import read_config
from videotune.planner.gpus import Card
from videotune.planner.memory import Need
from videotune.planner.network_facts import network_facts
from videotune.planner.step_spec import StepSpec
from videotune.trainer.build import DTYPES

LINK_REACHES = 0.75
"""Share of a link's rate that messages are assumed to reach; not measured."""

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

    @property
    def total(self) -> float:
        """All bytes."""
        return self.attention + self.prediction + self.gradients + self.weights

    def seconds(self, card: Card) -> float:
        """Return the seconds in which a step's messages are sent that it waits for."""
        waited = self.attention + self.prediction + self.gradients
        return waited / (LINK_REACHES * card.peer_link)

    def seconds_beside(self, card: Card) -> float:
        """Return the seconds of the messages that are sent while blocks compute."""
        return self.weights / (LINK_REACHES * card.peer_link)


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

    sent_share = (parts - 1) / parts
    exchanged = exchanged_bytes_per_token(job, dtype) * tokens
    attention = attentions * EXCHANGES * exchanged / parts * sent_share
    numbers_per_token = job.spec.latent_channels * math.prod(job.spec.patch)
    prediction = DTYPES[dtype].itemsize * numbers_per_token * tokens * sent_share
    return attention, prediction


def _summed(
    job: Job, spec: StepSpec, processes: int, passes: float, dtype: str
) -> tuple[float, float]:
    """Return the bytes of gradients that are all-reduced, and of sharded weights."""
    config = job.config
    sent_share = (processes - 1) / processes
    trains_all = config.training_method == "FINE_TUNE" and config.transformer.train
    is_sharded = config.sharding == "FULL"

    facts = network_facts(job)
    numbers = facts.parameters + facts.text[1]
    itemsize = 2 if config.optimizer.masters == "STOCHASTIC_ROUNDING" else 4
    if not is_sharded:
        return 2 * sent_share * itemsize * numbers, 0.0

    reading = next(iter(spec.one_sample.values())).phases["forward"]
    held = reading.get("weights", 0)
    if trains_all:
        held += DTYPES[dtype].itemsize * facts.parameters
    # Weights are gathered forward and backward, gradients are scattered in float32.
    weights = 2 * passes * sent_share * held
    if trains_all:
        gradients = passes * sent_share * 4 * facts.parameters
        return 2 * sent_share * itemsize * facts.text[1], weights + gradients
    return 2 * sent_share * itemsize * numbers, weights
