"""The bar's count of how often the training windows have been seen."""

from videotune.job.job import Job
from videotune.latent_cache.view_bands import views_text

COUNT_INTERVAL = 0.1
"""Mean views of a window after which they are counted anew: to count goes through all
windows, so it is not done at each step.
"""


class ViewsCounted:
    """The views of the training windows, as the plan and the report count them."""

    def __init__(self) -> None:
        self._mean: float | None = None
        """Mean views of a window when they were counted."""

        self._text = ""

    def text_at(self, step: int, job: Job) -> str:
        """Return how often each window has been seen until about ``step``; until exactly
        the last step.
        """
        mean = job.views_at(step)
        is_old = self._mean is None or not 0 <= mean - self._mean < COUNT_INTERVAL
        if is_old or step == job.steps:
            self._mean = mean
            self._text = views_text(job.exposure(step).ranges()["per_window"])
        return self._text
