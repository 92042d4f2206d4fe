"""What ``plan --simulate`` is asked for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.planner.fit import Fit, computing_seconds
from videotune.planner.processes import message_seconds_of, one_machine
from videotune.planner.read_step import step_spec
from videotune.planner.simulation import simulate, simulated_steps


@dataclass(frozen=True)
class Simulation:
    """A simulation of a run of many processes."""

    schedule: Path | None = None
    """File for who trains which samples, a line a step. None: no file."""
    storage: float | None = None
    """GB a second that the disk of the run folder takes. None: assumed."""

    def run(
        self, job: Job, result: Fit, dtype: str, checkpoint_bytes: int
    ) -> dict[str, Any]:
        """Return the simulation as a part of the plan, and write the schedule.

        Args:
            job: the run.
            result: how it fits its cards.
            dtype: of the training.
            checkpoint_bytes: tensors of a checkpoint.

        Raises:
            VideotuneError: if the schedule cannot be written.
        """
        cluster = result.cluster or one_machine(job, result.card)
        card = result.card
        has_rates = card is not None and card.timed

        simulated = simulate(
            job,
            cluster,
            _seconds_by_bucket(job, result, dtype) if has_rates else None,
            checkpoint_bytes,
            staging_rate=card.link if card is not None and has_rates else None,
            storage=None if self.storage is None else self.storage * 1e9,
        )

        if self.schedule is not None:
            groups = cluster.processes // job.config.context_parallel
            _write_schedule(self.schedule, job, groups, simulated["steps"])
        return simulated


def _seconds_by_bucket(job: Job, result: Fit, dtype: str) -> list[float]:
    """Return the seconds of a step of each bucket, with its messages."""
    assert result.card is not None
    spec = step_spec(job, dtype)
    training = result.training
    sent = message_seconds_of(job, spec, training, dtype, result.card, result.cluster)
    by_bucket = computing_seconds(job, spec, training, result.card)
    return [max(seconds + sent.waiting, sent.beside) for seconds in by_bucket]


def _write_schedule(path: Path, job: Job, groups: int, last: int) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            for step in simulated_steps(job, groups, last):
                file.write(f"{json.dumps(step.to_json(job))}\n")
    except OSError as error:
        raise VideotuneError(
            f"--schedule {path}: it cannot be written: {error}. Choose another file"
        ) from error
