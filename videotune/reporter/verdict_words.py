"""How a verdict is told: its word, and what its errors are shares of."""

from videotune.reporter.read import Record, Run, items, number
from videotune.validation.overfitting import PLATEAU

UNKNOWN = "cannot be told"
"""The word for a PLATEAU that is one only because too little is known."""

OF_BASE = "the base model's"
"""What errors are shares of, in a run whose clips kept aside have not changed."""


def shown_word(verdict: Record, changed_at: int = 0) -> str:
    """Return the word for a verdict.

    Args:
        verdict: the journal's.
        changed_at: the step at which the clips kept aside changed; 0 if they did not.
    """
    if is_unknown(verdict, changed_at):
        return UNKNOWN
    return str(verdict.get("verdict") or "none")


def is_unknown(verdict: Record, changed_at: int = 0) -> bool:
    """Whether a PLATEAU is one only because too little is known."""
    if verdict.get("verdict") != PLATEAU or verdict.get("turned"):
        return False
    if number(verdict.get("best_step")) in (None, changed_at):
        return False
    return is_unproven(verdict, changed_at) or is_undecided(verdict)


def is_unproven(verdict: Record, changed_at: int = 0) -> bool:
    """Whether the first reading, the base model's unless the clips changed, is as good as
    the best step, by the test of chance: what was learnt is then not shown.
    """
    as_good = items(verdict.get("as_good"))
    begins_with_first = bool(as_good) and as_good[0] == changed_at
    return begins_with_first and number(verdict.get("best_step")) != changed_at


def is_undecided(verdict: Record) -> bool:
    """Whether the latest reading is the lowest although its fall may be chance: whether
    the error still falls is then not known.
    """
    best = number(verdict.get("best_step"))
    is_latest = best == number(verdict.get("step"))
    return bool(best) and is_latest and not verdict.get("turned")


def step_of_change(run: Run) -> int:
    """Return the step at which the clips kept aside changed; 0 if they have not.

    Errors are shares of those at the first reading of the same clips, which is the base
    model's only if they have never changed.
    """
    if not run.validations:
        return 0
    return int(number(run.validations[0].get("step")) or 0)


def share_reference(step: int) -> str:
    """Return what errors are shares of, if the clips kept aside changed at ``step``; 0 if
    they did not.
    """
    return f"that at step {step:,}" if step else OF_BASE
