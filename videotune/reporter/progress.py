"""How far a run is, and how long it will still take."""

from collections.abc import Sequence
from dataclasses import dataclass

from videotune.reporter.read import Run

MAX_PAUSES = 5
"""Steps among the latest ones that may be longer because the process stood still."""

PAUSE_RATIO = 3.0
"""A step is a pause's if it takes so many times as long as the next shorter one."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run, over its latest steps."""

    done: int
    """Steps done."""

    total: int | None
    """Steps of the full run."""

    left: float | None
    """Seconds left at the pace of the latest steps; None if not known."""

    throughput: float | None
    """Seconds per step."""

    loss: float | None
    """The mean error; of the video if the sound is learnt too."""

    sound_loss: float | None = None
    """The mean error of the sound if both are learnt."""

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.total is not None and self.done >= self.total


def progress(run: Run) -> RunProgress:
    """Return how far the run is and how long it will still take."""
    recent_steps = run.steps.recent
    total = (run.config or {}).get("steps") or (run.plan or {}).get("steps")
    if not recent_steps:
        return RunProgress(done=0, total=total, left=None, throughput=None, loss=None)

    done = run.steps.last
    seconds = without_pauses([sum(step["seconds"].values()) for step in recent_steps])
    losses = []
    sound_losses = []
    for step in recent_steps:
        if step["mse"] is not None:
            losses.append(step["mse"])
        sound = step.get("sound")
        if sound is not None and sound["mse"] is not None:
            sound_losses.append(sound["mse"])

    throughput = sum(seconds) / len(seconds) if any(seconds) else None
    left = None
    if throughput and total:
        left = throughput * (total - done)

    return RunProgress(
        done=done,
        total=total,
        left=left,
        throughput=throughput,
        loss=_mean(losses),
        sound_loss=_mean(sound_losses),
    )


def without_pauses(seconds: Sequence[float]) -> list[float]:
    """Return the times of steps without the few during which the process stood still, as a
    pause and a closed laptop let it.

    Steps of larger samples are longer, too, but there are many of them.
    """
    in_order = sorted(seconds)
    first_to_drop = len(in_order)
    for position in range(max(1, len(in_order) - MAX_PAUSES), len(in_order)):
        if in_order[position] > PAUSE_RATIO * in_order[position - 1]:
            first_to_drop = min(first_to_drop, position)
    return in_order[:first_to_drop]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
