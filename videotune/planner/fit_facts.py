"""A fit as a part of plan.json: memory by part and phase, hours, processes."""

from __future__ import annotations

from typing import Any

import psutil

from videotune.job.job import Job
from videotune.planner import memory
from videotune.planner.fit import Fit, cache_seconds, step_seconds
from videotune.planner.gpus import Card, cards_with_memory
from videotune.planner.ledger import CountsByPart
from videotune.planner.processes import copied_bytes, processes_of
from videotune.planner.read_step import step_spec
from videotune.validation.overhead import overhead, total_share

PROGRAM = 3 << 30
"""Bytes on the host of Python, torch and the libraries of a card."""


def to_json(
    result: Fit,
    job: Job,
    dtype: str,
    checkpoint_bytes: int = 0,
    memory_from: str | None = None,
) -> dict[str, Any]:
    """Return the fit as a part of ``plan.json``.

    Args:
        result: The fit.
        job: The run.
        dtype: The dtype of the training.
        checkpoint_bytes: Tensors of a checkpoint, which are copied before they are
            written.
        memory_from: How the memory of the card is known: "card", "vram", "machine" or
            "preset".
    """
    training = result.training
    _, worst = result.phases[result.worst]
    host = {
        "program": PROGRAM,
        **training.host,
        "checkpoint while it is written": copied_bytes(job, checkpoint_bytes),
    }
    phases = {}
    for name, (way, parts) in result.phases.items():
        phases[name] = {"way": way, **bytes_of(parts)}

    return {
        "fits": result.fits,
        "verdict": result.verdict,
        **_times(result, job, dtype),
        "examples": _example_times(result, job, dtype),
        "device": {
            "card": result.card.name if result.card else None,
            "measured": result.card and result.card.measured,
            "vram_bytes": result.vram,
            "memory_from": memory_from,
            "spare_bytes": result.spare,
            "unstreamed_bytes": result.unstreamed,
            **bytes_of(worst),
            "phase": result.worst,
            "parts": {
                name: count
                for name, count in memory.with_overhead(worst).items()
                if count
            },
            "phases": phases,
        },
        "host": {
            "total_bytes": psutil.virtual_memory().total,
            "need_bytes": sum(host.values()),
            "parts": host,
        },
        "chosen": result.chosen,
        "processes": processes_of(
            job,
            step_spec(job, dtype),
            training,
            dtype,
            card=result.card,
            cluster=result.cluster,
            host_bytes=PROGRAM + sum(training.host.values()),
            checkpoint_bytes=checkpoint_bytes,
        ),
        "micro_batch": training.choice.micro_batch,
        "remedies": list(result.remedies),
    }


def _times(result: Fit, job: Job, dtype: str) -> dict[str, float | None]:
    """Return the hours of the run and the seconds of a step; None without rates."""
    if result.card is None or not result.card.timed:
        names = ("hours", "hours_beside", "hours_encoding", "seconds_a_step")
        return dict.fromkeys(names)
    times = _times_on(result.card, result, job, dtype)
    encoding = cache_seconds(job, step_spec(job, dtype), result.card)
    return {**times, "hours_encoding": round(encoding / 3600, 3)}


def _times_on(card: Card, result: Fit, job: Job, dtype: str) -> dict[str, float]:
    """Return the hours of the run and the seconds of a step on a card."""
    spec = step_spec(job, dtype)
    step = step_seconds(job, spec, result.training, card, dtype, result.cluster)
    hours = step * job.steps / 3600
    return {
        "hours": round(hours, 3),
        "hours_beside": round(hours * total_share(overhead(job)), 3),
        "seconds_a_step": round(step, 4),
    }


def _example_times(result: Fit, job: Job, dtype: str) -> list[dict[str, Any]]:
    """Return the times on the fastest and the slowest card of a memory, if only the
    memory is known and the run fits it.
    """
    if result.card is not None or result.vram is None or not result.fits:
        return []
    known_cards = cards_with_memory(round(result.vram / 2**30))
    ends = dict.fromkeys([*known_cards[-1:], *known_cards[:1]])
    return [{"card": card.name, **_times_on(card, result, job, dtype)} for card in ends]


def bytes_of(parts: CountsByPart) -> dict[str, int]:
    """Return the bytes that a card must have for these parts, and those of the parts."""
    return {
        "need_bytes": memory.room(parts),
        "allocated_bytes": sum(parts.values()),
    }
