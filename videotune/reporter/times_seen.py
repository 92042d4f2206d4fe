"""How often the training has seen each clip."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from videotune.latent_cache.view_bands import band as band_of
from videotune.reporter.read import (
    Record,
    Run,
    at,
    mapping,
    number,
)
from videotune.runs.step_sums import clip_of, regularization
from videotune.text import plain

COLOURS = {"conservative": "calm", "moderate": "good", "high": "care", "risky": "bad"}
"""The colour of each exposure band."""


@dataclass(frozen=True)
class TimesSeen:
    """How often a clip is seen, summed over its windows."""

    path: str

    so_far: int | None
    """None if the journal does not show it."""

    planned: float | None
    """By the end of the run."""

    windows: int

    @property
    def shown(self) -> float:
        """The length of the filled bar: the times so far, else those planned."""
        if self.so_far is not None:
            return float(self.so_far)
        return float(self.planned or 0)

    @property
    def whole(self) -> float:
        """The length of the whole bar."""
        return max(self.shown, self.planned or 0)

    @property
    def amount(self) -> str:
        """The times so far, and those planned if they differ."""
        if self.so_far is None or self.planned in (None, self.so_far):
            return plain(self.shown)
        return f"{plain(self.shown)} of {plain(self.planned)}"

    @property
    def band(self) -> tuple[str, str]:
        """Name and colour of the exposure band."""
        return band(self.shown / self.windows)


def band(times: float) -> tuple[str, str]:
    """Return name and colour of the exposure band of a window."""
    name = band_of(times)
    return name, COLOURS[name]


def times_seen(run: Run) -> list[TimesSeen]:
    """Return how often each training clip is seen, the most seen first.

    Regularization clips are not included. The account of clips gives the paths; if it
    also gives ids, the journal gives the times so far. Without an account, clips are
    named by their id.
    """
    used = [clip for clip in run.clips if clip["used"]]
    clips = _accounted_times(run, used) if used else _times_by_id(run)
    return sorted(clips, key=lambda clip: (-clip.shown, clip.path))


def _accounted_times(run: Run, used: Sequence[Record]) -> list[TimesSeen]:
    preserved = regularization(run.check)
    clips = []
    for clip in used:
        clip_id = str(clip["id"])[:12]
        if clip_id in preserved:
            continue

        so_far = None
        if clip["id"] and run.steps.windows:
            so_far = run.steps.clips[clip_id]
        clips.append(
            TimesSeen(
                path=str(clip["path"]),
                so_far=so_far,
                planned=number(clip["views"]),
                windows=max(1, int(number(clip["windows"]) or 1)),
            )
        )
    return clips


def _times_by_id(run: Run) -> list[TimesSeen]:
    counts = run.steps.clips
    num_windows = Counter(map(clip_of, run.steps.windows))
    planned = {
        str(key)[:12]: number(value)
        for key, value in mapping(at(run.plan, "views", "clips")).items()
    }

    return [
        TimesSeen(
            path=clip_id,
            so_far=counts[clip_id] if run.steps.windows else None,
            planned=planned.get(clip_id),
            windows=num_windows[clip_id] or 1,
        )
        for clip_id in sorted(planned | counts)
    ]
