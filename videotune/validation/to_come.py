"""The validations that a run has before it."""

from itertools import islice

from videotune.trainer.trainer import Trainer, due
from videotune.validation.overfitting import MIN_READINGS


def validations_to_come(trainer: Trainer, step: int) -> list[int]:
    """Return the next steps after ``step`` at which a run validates, as many as a verdict
    may need. A run that was stopped has them before it if it is resumed.
    """
    every = trainer.job.config.validate_every or 0
    last = trainer.job.steps
    steps = (later for later in range(step + 1, last + 1) if due(later, every, last))
    return list(islice(steps, MIN_READINGS)) if every else []
