"""What is said of the checkpoint that a run recommends."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.reporter.read import Run, mapping, number
from videotune.runs.start_state import StartState
from videotune.text import plain

NO_VERDICT = "no verdict"
"""How the reason of a recommendation begins that rests on no measurement."""


def is_unmeasured(run: Run, recommended: int | None, reason: str) -> bool:
    """Return whether the recommended checkpoint is only the last one: nothing was
    measured that tells it from the others.

    Args:
        run: the run.
        recommended: its step; None if there is none.
        reason: why it is recommended; empty for the reason that the run has written.
    """
    if recommended is None:
        return False
    why = reason or str(mapping(run.last("end")["take"])["why"] or "")
    return why.startswith(NO_VERDICT)


def describe_best_step(
    verdict: Mapping[str, Any],
    recommended: int | None,
    saves: Sequence[tuple[int, Path]],
    measured: Collection[float],
    start: StartState,
) -> str:
    """Return why the step with the lowest error on held-out clips is not the recommended
    one; empty if it is, or if the recommendation's own reason says so.

    Args:
        verdict: the latest one.
        recommended: the recommended step, if there is one.
        saves: steps and folders of the checkpoints.
        measured: steps at which clips kept aside were measured.
        start: what the run began with.
    """
    best = number(verdict["best_step"])
    if best is None or recommended is None or best == recommended or verdict["turned"]:
        return ""
    lowest = f"the error on clips kept aside was lowest at step {plain(best)}"
    if best == 0:
        return f"{lowest}, {start.emphasised}"
    if best not in [step for step, _ in saves]:
        return f"{lowest}, of which there is no checkpoint"
    if recommended not in measured:
        return f"{lowest}; step {plain(recommended)} itself was not measured"
    return f"{lowest}; the later steps are as good within what chance explains"
