"""How far a run is, and how long it will still take."""

from collections.abc import Sequence
from dataclasses import dataclass

from videotune.reporter.read import Run


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
    seconds = [sum(step["seconds"].values()) for step in recent_steps]
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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
