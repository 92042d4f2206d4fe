"""How a verdict is told: its word, and what its errors are shares of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from videotune.runs.start_state import StartState
from videotune.validation.overfitting import PLATEAU

VerdictLine = Mapping[str, Any]
"""The fields of a verdict's line in the journal, which may be damaged."""

UNKNOWN = "cannot be told"
"""The word for a PLATEAU that is one only because too little is known."""


GETTING_WORSE = "GETTING WORSE"
"""The word for a PLATEAU at which clips kept aside have risen above their best."""


def shown_word(verdict: VerdictLine, changed_at: int = 0) -> str:
    """Return the word for a verdict.

    Args:
        verdict: the journal's.
        changed_at: the step at which the clips kept aside changed; 0 if they did not.
    """
    if is_unknown(verdict, changed_at):
        return UNKNOWN
    if verdict.get("verdict") == PLATEAU and verdict.get("turned"):
        return GETTING_WORSE
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
    """Whether the first reading, of step 0 unless the clips changed, is as good as the
    best step, by the test of chance: what was learnt is then not shown.
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

    Errors are shares of those at the first reading of the same clips, which is that of
    step 0 only if they have never changed.

    Args:
        readings: the validations of the latest set.
    """
    if not readings:
        return 0
    first_step = readings[0].get("step")
    return first_step if isinstance(first_step, int) else 0


@dataclass(frozen=True)
class ErrorReference:
    """What the errors of a run are shares of."""

    start: StartState = field(default_factory=StartState)

    changed_at: int = 0
    """The step at which the clips kept aside changed; 0 if they did not."""

    @property
    def share(self) -> str:
        """What follows a percentage or "times"."""
        if self.changed_at:
            return f"that at step {self.changed_at:,}"
        return self.start.error_share

    @property
    def error(self) -> str:
        """What the errors are shares of."""
        if self.changed_at:
            return f"the error at step {self.changed_at:,}"
        return self.start.error

    def error_on(self, clips: str) -> str:
        """Return what the errors on some clips are shares of."""
        if self.changed_at:
            return f"the error on {clips} at step {self.changed_at:,}"
        return self.start.error_on(clips)
