"""A note on clips that are longer than what a run uses of each."""

import math

from videotune.config.data_schema import VideoConfig
from videotune.data.candidates import Candidate
from videotune.data.remarks import Remark

UNUSED_LIMIT = 0.1
"""Share of all seconds of video beyond ``max_duration`` above which there is a note."""


class LongClips:
    """Videos of which only the first ``max_duration`` seconds are used."""

    def __init__(self) -> None:
        self._clips = 0
        self._seconds = 0.0
        """Seconds of all videos."""
        self._unused_seconds = 0.0
        self._longest = 0.0
        self._max_duration = VideoConfig().max_duration

    def add(self, candidate: Candidate) -> None:
        """Add a usable video."""
        seconds = candidate.media.seconds
        self._seconds += seconds
        max_duration = candidate.video.max_duration
        if seconds <= max_duration:
            return
        self._clips += 1
        self._unused_seconds += seconds - max_duration
        self._longest = max(self._longest, seconds)
        self._max_duration = max_duration

    def notes(self) -> list[str]:
        """Return a note, unless all but a small part of the seconds is used."""
        if self._unused_seconds <= UNUSED_LIMIT * self._seconds:
            return []
        clips = "1 clip is" if self._clips == 1 else f"{self._clips} clips are"
        limit = math.ceil(self._longest)
        text = (
            f"{clips} longer than video_config.max_duration {self._max_duration:g}: "
            f"{self._unused_seconds:.3g} of the {self._seconds:.3g} s of all videos are not used. "
            "videotune dataset split cuts them into clips; "
            f"--set video_config.max_duration={limit} uses them whole"
        )
        return [Remark("long_clips", text)]
