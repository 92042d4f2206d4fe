"""The exports and samples of a run that are queued: a page says so where they were asked
for, and none of them is queued twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.queue.entries import QueueEntry
from videotune.studio import queue_page, train_page
from videotune.studio.run_states import BUSY_STATUSES, entries_ahead, run_state
from videotune.studio.status import checkpoints
from videotune.studio.web import FormData, PageContext

ACTIVE_STATES = ("waiting", "running", "paused")
"""States of an entry of the queue that has not ended."""

MERGED = "merge"
"""Stands among the formats for a merged model."""


@dataclass(frozen=True)
class RunExport:
    """An export of a run in the queue."""

    entry: QueueEntry

    ahead: Sequence[str]
    """What it waits for; empty unless it waits."""

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.entry.state in ACTIVE_STATES

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None for the newest one when it begins."""
        steps = _values_of("--step", self.entry.arguments)
        return int(steps[0]) if steps else None

    @property
    def formats(self) -> set[str]:
        """The formats that it writes."""
        formats = set(_values_of("--format", self.entry.arguments))
        if "--merge" in self.entry.arguments:
            formats.add(MERGED)
        return formats


def _values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the values that a command gives for an option."""
    return [value for name, value in pairwise(arguments) if name == option]


def exports_of(page: PageContext, run: str) -> list[RunExport]:
    """Return the exports of a run in the queue, the newest first, also those that have
    ended.
    """
    entries = queue_page.shown_entries(page.root, page.current_project, run)
    exports = [entry for entry in entries if entry.kind == "export"]
    exports.sort(key=lambda entry: -entry.added)
    return [RunExport(entry, ahead_of(page, entry)) for entry in exports]


def ahead_of(page: PageContext, entry: QueueEntry | None) -> list[str]:
    """Return what an entry of the queue waits for; empty unless it waits."""
    if entry is None or entry.state != "waiting":
        return []
    return entries_ahead(page.root, entry)


def export_at(exports: Sequence[RunExport], step: int | None) -> RunExport | None:
    """Return the export of a checkpoint that waits or runs, else the newest one of it that
    has ended; None if there is none.
    """
    of_step = [export for export in exports if export.step == step]
    active = [export for export in of_step if export.is_active]
    return next(iter([*active, *of_step]), None)


def formats_to_come(exports: Sequence[RunExport], step: int | None) -> set[str]:
    """Return the formats of a checkpoint that are queued or being written."""
    formats: set[str] = set()
    for export in exports:
        if export.is_active and export.step == step:
            formats |= export.formats
    return formats


def is_queued_already(page: PageContext, run: str, arguments: Sequence[str]) -> bool:
    """Return whether a command about a run waits or runs that differs from this one at
    most in the folder that it writes.
    """
    entries = queue_page.project_entries(page.root, page.current_project, run)
    command = _without_folder(arguments)
    return any(
        entry.state in ACTIVE_STATES and _without_folder(entry.arguments) == command
        for entry in entries
    )


def _without_folder(arguments: Sequence[str]) -> list[str]:
    """Return a command without the folder that it writes."""
    command = list(arguments)
    if "--out" in command:
        position = command.index("--out")
        del command[position : position + 2]
    return command


def export(page: PageContext, run: Path, form: FormData) -> str:
    """Queue the export of a checkpoint for other programs, without the formats that are
    queued already.

    A merged model is an export of its own.
    """
    formats = list(form.all("format"))
    if form["merge"]:
        formats.append(MERGED)
    if not formats:
        raise VideotuneError("choose at least one format")

    train_page.check_run_paths(page, run)
    step = _step_to_export(page, run, form)
    with queue_page.queue_lock:
        queued_formats = formats_to_come(exports_of(page, run.name), step)
        new_formats = [name for name in formats if name not in queued_formats]
        for arguments in _export_commands(run, step, new_formats):
            queue_page.submit(
                page.root, page.current_project, run.name, arguments, "export"
            )
    if new_formats:
        return ""
    of_step = "" if step is None else f" of step {step}"
    return f"The export{of_step} is queued already"


def _step_to_export(page: PageContext, run: Path, form: FormData) -> int | None:
    """Return the step of a form, or that of the newest checkpoint; None while the run
    trains, which may remove that one before the export begins.
    """
    step = form.number("step")
    if step:
        return int(step)
    code = run_state(page, run.name)[3]
    if code in BUSY_STATUSES:
        return None
    return max((saved for saved, _ in checkpoints(run)), default=None)


def _export_commands(
    run: Path, step: int | None, formats: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the commands that export a checkpoint."""
    command = ["export", str(run)]
    if step is not None:
        command += ["--step", str(step)]

    format_options = []
    for name in formats:
        if name != MERGED:
            format_options += ["--format", name]
    if format_options:
        yield command + format_options
    if MERGED in formats:
        yield [*command, "--merge"]
