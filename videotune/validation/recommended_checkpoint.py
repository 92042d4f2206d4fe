"""Which checkpoint of a run is recommended, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import readings_of
from videotune.runs.start_state import start_state
from videotune.trainer.trainer import Trainer
from videotune.validation.frontier import kept_by_step, weigh_kept
from videotune.validation.overfitting import (
    LAST_STEP,
    Verdict,
    judge,
    ranking,
    recommend,
)
from videotune.validation.to_come import validations_to_come
from videotune.validation.verdict_words import ErrorReference, step_of_change


def recommend_checkpoint(trainer: Trainer, step: int) -> dict[str, Any]:
    """Return {"step", "why"} of the recommended checkpoint of a run at ``step``.

    It is the best by the held-out clips if the run overfits or has got worse, else the
    last; unless another one is better by what is left of the abilities before training.
    """
    lines = trainer.journal.history.events
    verdict = judge(lines, validations_to_come(trainer, step))
    saved = [checkpoint.step for checkpoint in complete_checkpoints(trainer.run)]
    held_out = _held_out_errors(lines, verdict)
    if verdict is None or not verdict.turned or not saved:
        choice = max(saved, default=step)
        if verdict is not None and verdict.label is None:
            why = f"no verdict: {verdict.reason}"
        else:
            why = _why_the_last(choice, held_out, _error_reference(trainer))
    else:
        choice, reason = recommend(held_out, verdict.best_step or 0, saved)
        why = reason or "clips kept aside were best there"

    weighed, reason = weigh_kept(choice, held_out, kept_by_step(lines), saved)
    return {"step": weighed, "why": reason or why}


def _error_reference(trainer: Trainer) -> ErrorReference:
    """Return what the errors of a run are shares of."""
    config = trainer.job.config
    return ErrorReference(
        start=start_state(config.init_from, config.training_method),
        changed_at=step_of_change(readings_of(trainer.journal.history.events)),
    )


def _why_the_last(
    last: int, held_out: Mapping[int, float], reference: ErrorReference
) -> str:
    """Return why the last saved step is recommended, though an earlier one may have had
    the lowest error.

    Args:
        last: the last saved step.
        held_out: the error on held-out clips by step.
        reference: what the errors are shares of.
    """
    lowest = min(held_out, key=lambda step: held_out[step], default=last)
    if held_out and last not in held_out and lowest:
        return (
            f"it is the last, and was not measured; of the steps that were, step {lowest} "
            "was the best, and nothing had got worse"
        )
    if last not in held_out or held_out[lowest] >= held_out[last]:
        return LAST_STEP

    return (
        f"it is the last, where the error on clips kept aside was {held_out[last]:.1%} of "
        f"{reference.share}; step {lowest} had {held_out[lowest]:.1%}, which is no clear rise"
    )


def _held_out_errors(
    lines: Sequence[Mapping[str, Any]], verdict: Verdict | None
) -> dict[int, float]:
    """Return the error on held-out clips by step, of the part that decides."""
    if verdict is None or verdict.label is None:
        return {}
    errors: dict[int, float] = {}
    for reading in ranking(readings_of(lines), verdict):
        held_out = reading["held_out"]
        if held_out is not None and held_out["normalised"] is not None:
            errors[int(reading["step"])] = float(held_out["normalised"])
    return errors
