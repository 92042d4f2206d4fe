"""What is said in the place of previews that are not there yet."""

import sys
from dataclasses import dataclass

from videotune.reporter.previews import reason_without_previews
from videotune.reporter.read import Run
from videotune.studio import clips
from videotune.studio.projects import Project
from videotune.text import counted, plain


@dataclass(frozen=True)
class PreviewOutlook:
    """What the place of the previews says before the first one."""

    title: str
    text: str

    setting: str = ""
    """The setting that decides it."""


def preview_outlook(run: Run, *, is_busy: bool) -> PreviewOutlook:
    """Return what will appear in the place of the previews, and when."""
    interval = run.setting("sample_after")
    if interval == 0:
        text = "“Sample after” is 0. Set it to the number of steps from one preview to the next."
        return PreviewOutlook("This run draws no previews", text, "sample_after")
    if run.config and run.setting("samples") in (0, [], ""):
        text = "It has no prompt. Write one on the page Setup for the next run."
        return PreviewOutlook("This run draws no previews", text, "samples")
    if reason_without_previews(run):
        text = (
            "Its prompts are captions, and no clip that it trains on has one. Write "
            "captions, or prompts on the page Setup, for the next run."
        )
        return PreviewOutlook("This run draws no previews", text, "samples")
    if run.has_finished:
        return PreviewOutlook("No preview was drawn", "The run has ended.")
    if not is_busy:
        text = "It ended before the first one."
        if run.config:  # without one there is nothing to resume
            text += " Resume it, and they appear here."
        return PreviewOutlook("No preview was drawn", text)

    text = f"A video of each prompt by {run.start.name}, before step 1"
    steps = run.setting("steps")
    if isinstance(interval, int) and isinstance(steps, int) and interval >= steps:
        text += (
            f"; then one at the end, because “Sample after” is {counted(interval, 'step')} "
            f"and the run has {plain(steps)}"
        )
    elif isinstance(interval, int):
        text += f"; then a new one every {counted(interval, 'step')}"
    return PreviewOutlook("Previews appear here", f"{text}.")


def count_captions(project: Project) -> int:
    """Return how many captions of clips previews may take; datasets outside of the
    project count as having any number.
    """
    if project.facts.get("sources"):
        return sys.maxsize
    rows = clips.table(project).rows.values()
    return sum(1 for row in rows if row["caption"])
