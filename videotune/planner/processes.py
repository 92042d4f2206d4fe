"""How the processes of a run share a step, and what each sends in it."""

from __future__ import annotations

from typing import Any

from videotune.job.job import Job
from videotune.planner.cluster import (
    Cluster,
    MessageSeconds,
    cluster_of,
    machines_json,
    message_seconds,
    rounded_bytes,
)
from videotune.planner.gpus import Card
from videotune.planner.memory import Need
from videotune.planner.step_spec import StepSpec
from videotune.planner.traffic import process_count, rounds_of, traffic


def one_machine(job: Job, card: Card | None) -> Cluster:
    """Return a machine with all processes of a job."""
    return cluster_of(card, machines=1, gpus=process_count(job))


def message_seconds_of(
    job: Job,
    spec: StepSpec,
    training: Need,
    dtype: str,
    card: Card,
    cluster: Cluster | None,
) -> MessageSeconds:
    """Return how long the messages of a step take.

    Args:
        job: The run.
        spec: The step of a whole network.
        training: The chosen memory settings.
        dtype: The dtype of the training.
        card: The cards.
        cluster: The machines. None: one, with all processes.
    """
    return message_seconds(
        traffic(job, spec, training, dtype),
        rounds_of(job, spec, training),
        card,
        cluster or one_machine(job, card),
        job.config.context_parallel,
    )


def saves_together(job: Job) -> bool:
    """Whether each process saves its rows; otherwise the main process saves all."""
    config = job.config
    return config.sharding == "FULL" and config.training_method == "FINE_TUNE"


def copied_bytes(job: Job, checkpoint_bytes: int) -> int:
    """Return the bytes of a checkpoint that a process copies before they are written."""
    if saves_together(job):
        return round(checkpoint_bytes / process_count(job))
    return checkpoint_bytes


def processes_of(
    job: Job,
    spec: StepSpec,
    training: Need,
    dtype: str,
    *,
    card: Card | None,
    cluster: Cluster | None,
    host_bytes: int,
    checkpoint_bytes: int,
) -> dict[str, Any] | None:
    """Return how several processes share a step, and what each sends in it.

    None for one process. Seconds are those of a named card.

    Args:
        job: The run.
        spec: The step of a whole network.
        training: The chosen memory settings.
        dtype: The dtype of the training.
        card: The cards, if they are known.
        cluster: The machines. None: one, with all processes.
        host_bytes: What a process needs of its host, without copies of a checkpoint.
        checkpoint_bytes: Tensors of a checkpoint.
    """
    if process_count(job) == 1:
        return None
    cluster = cluster or one_machine(job, card)
    parts = job.config.context_parallel
    sent = traffic(job, spec, training, dtype)
    seconds = None
    if card is not None:
        seconds = message_seconds_of(job, spec, training, dtype, card, cluster)

    copies = copied_bytes(job, checkpoint_bytes)
    if saves_together(job):
        copies *= cluster.gpus
    machines = None
    if cluster.machines > 1:
        machines = machines_json(sent, cluster, parts)
    return {
        "count": process_count(job),
        "context_parallel": parts,
        "groups": job.processes,
        "sharding": job.config.sharding,
        "sent_bytes": rounded_bytes(sent),
        "link_bytes_a_second": card and round(card.peer_link),
        "seconds_waiting": seconds and round(seconds.waiting, 4),
        "seconds_beside": seconds and round(seconds.beside, 4),
        "host_bytes_a_machine": cluster.gpus * host_bytes + copies,
        "machines": machines,
    }
