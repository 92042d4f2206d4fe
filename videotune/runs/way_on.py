"""How the user continues the run in a folder: a sentence with the command."""

from pathlib import Path
from shlex import quote

from videotune.config.config_changes import drift
from videotune.errors import VideotuneError
from videotune.files import read_lines
from videotune.runs.schemas import read_record


def describe_way_on(run: Path) -> str:
    """Return how to continue a run; of a finished one, that it is, and how to train on.

    A run whose files cannot be read is continued: the resume says what is wrong.
    """
    try:
        steps = int(read_record(run / "config.json")["steps"])
    except VideotuneError:
        steps = 0
    if steps and _is_finished(run, steps):
        return (
            f"It is finished ({steps} of {steps} steps). To train on: "
            f"{command_to_train_on(run, steps)}"
        )
    return f"Continue it with: videotune resume {quote(str(run))}"


def _is_finished(run: Path, steps: int) -> bool:
    """Return whether the last end in a run's journal is that of all its steps."""
    reason = None
    for line in read_lines(run / "journal.jsonl"):
        if line.get("kind") == "end":
            is_last_step = line.get("step") == steps
            reason = line.get("why") if is_last_step else None
    return reason == "done"


def command_to_train_on(run: Path, steps: int) -> str:
    """Return the command that trains a finished run for twice its steps."""
    settings = read_record(run / "config.json")["settings"]
    changes = drift(settings, {**settings, "steps": 2 * steps})
    command = f"videotune resume {quote(str(run))} --set steps={2 * steps}"
    if any(change.kind == "override" for change in changes):
        command += " --override"
    return command
