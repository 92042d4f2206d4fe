"""The verdict on the validation losses so far, in the journal and on the screen, and the recommended checkpoint."""

from collections.abc import Mapping
from typing import Any

from videotune.console import echo
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.trainer import Trainer
from videotune.validation.overfitting import Verdict, judge, readings_of, recommend


def write_verdict(trainer: Trainer, step: int, at_the_end: bool = False) -> Verdict | None:
    """The verdict on the readings so far, into the journal once a reading; printed where its word is new, and at the end."""
    lines = trainer.journal.history.events
    found = judge(lines)
    if found is None:
        return None
    verdicts = [line for line in lines if line["kind"] == "verdict"]
    last: Mapping[str, Any] = verdicts[-1] if verdicts else {}
    is_new = found.word != last.get("verdict")
    if is_new or (found.step, found.validation) != (last.get("step"), last.get("validation")):
        trainer.journal.event("verdict", **found.to_json())
    # at the end it is printed again, unless its word became a new one at this very validation
    is_old = [line["verdict"] for line in verdicts if line["step"] < found.step][-1:] == [found.word]
    if (is_new and found.word is not None) or (at_the_end and (is_old or found.word is None)):
        echo(f"{found.word or 'no verdict'} at step {found.step}: {found.reason}")
    return found


def recommended(trainer: Trainer, step: int) -> dict[str, Any]:
    """{"step", "why"}: the recommended checkpoint of a run that is at ``step``.

    The best one by the held-out clips where the run overfits, or has got worse; else the last one, since nothing speaks
    against it.
    """
    lines = trainer.journal.history.events
    found, there = judge(lines), [one.step for one in complete_checkpoints(trainer.run)]
    if found is None or not found.turned or not there:
        why = found.reason if found is not None and found.word is None else "nothing speaks against the last step"
        return {"step": max(there, default=step), "why": why}
    held_out = {int(one["step"]): float(one["held_out"]["normalised"]) for one in readings_of(lines)}
    best, why = recommend(held_out, found.best_step or 0, there)
    return {"step": best, "why": why or "held-out clips were best there"}
