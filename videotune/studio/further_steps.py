"""Whether a run that trains on has steps left to train."""

from videotune.errors import VideotuneError
from videotune.reporter.progress import progress
from videotune.reporter.read import Run
from videotune.studio.status import checkpoints


def refuse_no_steps(run: Run, *, is_done: bool, start: str, end: str) -> None:
    """Raise VideotuneError if a run would end where it starts.

    Args:
        run: the run.
        is_done: whether it has trained all its steps and written its files. Another run
            may start at its last step, because its files are still to be written.
        start: the step to start from, as typed; empty for the newest checkpoint.
        end: the last step, as typed; empty for as many steps as before.
    """
    last_step = int(end) if end else None
    if last_step is None and is_done:
        last_step = progress(run).total
    if last_step is None:
        return

    newest_step = max((step for step, _ in checkpoints(run.folder)), default=0)
    first_step = int(start) if start else newest_step
    if last_step <= first_step:
        raise VideotuneError(
            f"steps: step {last_step} is no later than step {first_step}, from which "
            f"{run.folder.name} trains on. Give more than {first_step}."
        )
