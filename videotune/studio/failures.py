"""Why the last process of a run failed, as long as the user has not reacted to it."""

import re
from pathlib import Path

from videotune.queue.entries import QueueEntry, entries
from videotune.queue.jobs import describe_outcome
from videotune.studio.base_model_problem import plain_reason
from videotune.studio.projects import Project
from videotune.studio.settings_version import settings_version

MAX_REASON = 200
"""Characters of a reason in a line of a bar."""


_END_OF_SENTENCE = re.compile(r"(?<=\w)\.\s+(?=[A-Z])")


def open_failure(project: Project, entry: QueueEntry | None) -> str:
    """Return why a training of the queue has failed, in one sentence; empty if it has not, or
    if the settings were changed since.
    """
    if entry is None or entry.state != "failed":
        return ""
    failed_at = entry.added if entry.job is None else entry.job.started
    if settings_version(project) / 1e6 > failed_at:
        return ""

    reason = entry.refused
    if not reason and entry.job is not None:
        reason = describe_outcome(entry.job)
    reason = plain_reason(reason.replace(f"{project.folder}/", ""))
    return first_sentence(reason).removesuffix(".")


def first_sentence(text: str) -> str:
    """Return the first sentence of a message, cut to what fits a bar."""
    first_line = text.strip().partition("\n")[0]
    sentence = _END_OF_SENTENCE.split(first_line, maxsplit=1)[0]
    if len(sentence) <= MAX_REASON:
        return sentence
    return f"{sentence[: MAX_REASON - 1]}…"


def newest_training(queue: Path, project: Project) -> QueueEntry | None:
    """Return the training of a project that was started last; None if none was."""
    runs = (project.folder / "runs").absolute()
    trainings = [
        entry
        for entry in entries(queue)
        if entry.kind == "train" and entry.run.parent == runs
    ]

    def started_at(entry: QueueEntry) -> float:
        return entry.added if entry.job is None else entry.job.started

    return max(trainings, key=started_at, default=None)
