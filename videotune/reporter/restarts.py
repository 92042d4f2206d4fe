"""How a run went on: by hand, or restarted by its launcher, with how many processes."""

from dataclasses import asdict, dataclass
from typing import Any

from videotune.reporter.read import Run, number
from videotune.text import counted


@dataclass(frozen=True)
class Restart:
    """A process, or several, that went on with a run."""

    step: int
    """The checkpoint from which they went on."""
    processes: int
    processes_before: int
    by_launcher: bool

    @property
    def text(self) -> str:
        """The step, and what was special."""
        details = []
        if self.by_launcher:
            details.append("by the launcher")
        if self.processes != self.processes_before:
            now = counted(self.processes, "process", "processes")
            details.append(f"{now} instead of {self.processes_before}")
        return f"{self.step} ({', '.join(details)})" if details else str(self.step)

    def to_json(self) -> dict[str, Any]:
        """Return the restart as JSON values."""
        return asdict(self)


def restarts_of(run: Run) -> list[Restart]:
    """Return how a run went on, in order."""
    restarts = []
    for record in run.of_kind("resume"):
        processes = int(number(record.get("processes")) or 1)
        before = number(record.get("processes_before"))
        restart = Restart(
            step=int(number(record.get("from_step")) or 0),
            processes=processes,
            processes_before=processes if before is None else int(before),
            by_launcher=record.get("restarted") is True,
        )
        restarts.append(restart)
    return restarts


def launcher_sentence(restarts: list[Restart]) -> str:
    """Return how often the launcher restarted the run, or ""."""
    by_launcher = [restart for restart in restarts if restart.by_launcher]
    if not by_launcher:
        return ""
    times = "once" if len(by_launcher) == 1 else f"{len(by_launcher)} times"
    last = by_launcher[-1]
    processes = counted(last.processes, "process", "processes")
    if last.processes != last.processes_before:
        processes += f" instead of {last.processes_before}"
    return f"restarted {times} by its launcher, last from step {last.step} with {processes}"
