"""How a verdict is told: its word, and what its errors are shares of."""

from collections.abc import Mapping, Sequence
from typing import Any

from videotune.validation.overfitting import PLATEAU

VerdictLine = Mapping[str, Any]
"""The fields of a verdict's line in the journal, which may be damaged."""

UNKNOWN = "cannot be told"
"""The word for a PLATEAU that is one only because too little is known."""

OF_BASE = "the base model's"
"""What errors are shares of, in a run whose clips kept aside have not changed."""


def shown_word(verdict: VerdictLine, changed_at: int = 0) -> str:
    """Return the word for a verdict.

    Args:
        verdict: the journal's.
        changed_at: the step at which the clips kept aside changed; 0 if they did not.
    """
    if is_unknown(verdict, changed_at):
        return UNKNOWN
    return str(verdict.get("verdict") or "none")


def is_unknown(verdict: VerdictLine, changed_at: int = 0) -> bool:
    """Whether a PLATEAU is one only because too little is known."""
    if verdict.get("verdict") != PLATEAU or verdict.get("turned"):
        return False
    best_step = verdict.get("best_step")
    if not isinstance(best_step, int) or best_step == changed_at:
        return False
    return is_unproven(verdict, changed_at) or is_undecided(verdict)


def is_unproven(verdict: VerdictLine, changed_at: int = 0) -> bool:
    """Whether the first reading, the base model's unless the clips changed, is as good as
    the best step, by the test of chance: what was learnt is then not shown.
    """
    if verdict.get("best_step") == changed_at:
        return False
    as_good = verdict.get("as_good")
    return isinstance(as_good, list) and as_good[:1] == [changed_at]


def is_undecided(verdict: VerdictLine) -> bool:
    """Whether the latest reading is the lowest although its fall may be chance: whether
    the error still falls is then not known.
    """
    if verdict.get("turned"):
        return False
    best_step = verdict.get("best_step")
    return bool(best_step) and best_step == verdict.get("step")


def step_of_change(readings: Sequence[Mapping[str, Any]]) -> int:
    """Return the step at which the clips kept aside changed; 0 if they have not.

    Errors are shares of those at the first reading of the same clips, which is the base
    model's only if they have never changed.

    Args:
        readings: the validations of the latest set.
    """
    if not readings:
        return 0
    first_step = readings[0].get("step")
    return first_step if isinstance(first_step, int) else 0


def share_reference(step: int) -> str:
    """Return what errors are shares of, if the clips kept aside changed at ``step``; 0 if
    they did not.
    """
    return f"that at step {step:,}" if step else OF_BASE
