"""Which frames of a clip become samples: frame counts that the model takes, and windows laid over the clip in time."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from videotune.errors import VideotuneError
from videotune.types import VideoRules, Window

from .facts import Facts, shown_at


@dataclass(frozen=True)
class WindowSettings:
    """How windows are laid; the names are the config's own.

    ``frames`` (else ``max_frames``) is the count a window should have; ``target_fps`` None means the model's own;
    at most ``max_duration`` seconds of each clip are used; ``windows`` is "chunks" or "head".
    """

    max_frames: int = 16
    frames: int | None = None
    strict_frames: bool = False
    min_frames: int | None = None
    target_fps: float | None = None
    max_duration: float = 10.0
    windows: str = "chunks"


@dataclass(frozen=True)
class Laid:
    """A window on a clip: its start and the time of each frame, in seconds of the clip."""

    start: float
    times: tuple[float, ...]
    frames: int


@dataclass(frozen=True)
class LaidClip:
    """The windows of one clip, or the reason why there are none.

    ``seconds_cut`` no window shows (the tail's rest, and what lies beyond the maximal duration); ``repeats_share`` is the
    share of the windows' frames that show the same source frame as the one before.
    """

    windows: tuple[Laid, ...]
    fps: float
    seconds_cut: float
    repeats_share: float
    reason: str | None = None
    detail: str | None = None


def fps_of(settings: WindowSettings, rules: VideoRules) -> float:
    """The frame rate at which clips are shown to the model."""
    return rules.fps if settings.target_fps is None else settings.target_fps


def snap_frames(requested: int, rules: VideoRules) -> int:
    """The valid frame count nearest to ``requested``, ties upward (4n+1: 16 -> 17, 19 -> 21)."""
    below = _valid_at_most(requested, rules)
    above = _valid_at_least(requested, rules)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None
        return nearest
    return below if requested - below < above - requested else above


def _valid_at_most(frames: int, rules: VideoRules) -> int | None:
    """The largest valid count up to ``frames``, or None."""
    step, rest = rules.frame_step, rules.frame_rest
    count = rest if step == 0 else rest + (frames - rest) // step * step
    return count if max(1, rest) <= count <= frames else None


def _valid_at_least(frames: int, rules: VideoRules) -> int | None:
    """The smallest valid count from ``frames`` on, or None where the model takes one count only."""
    step, rest = rules.frame_step, rules.frame_rest
    if step == 0:
        return rest if rest >= frames else None
    steps = max(-(-(frames - rest) // step), 0)
    return rest + steps * step or step


def planned_frames(settings: WindowSettings, rules: VideoRules) -> tuple[int, str | None]:
    """How many frames a window has, and a sentence where that is not what was asked for.

    VideotuneError for counts below 1, and for a changed count under ``strict_frames``.
    """
    _check(settings)
    key = "max_frames" if settings.frames is None else "frames"
    requested = settings.max_frames if settings.frames is None else settings.frames
    frames = snap_frames(requested, rules)
    if frames == requested:
        return frames, None
    if rules.frame_step:
        rule = f"{rules.frame_step}n+{rules.frame_rest} frames"
    else:
        rule = "single frames" if rules.frame_rest == 1 else f"exactly {rules.frame_rest} frames"
    if settings.strict_frames:
        pair = (_valid_at_most(requested, rules), _valid_at_least(requested, rules))
        nearest = " or ".join(str(count) for count in pair if count is not None)
        raise VideotuneError(
            f"video_config.{key} is {requested}, but this model takes {rule}. "
            f"Set it to {nearest}, or leave out strict_frames to have it changed to {frames}."
        )
    return frames, f"{key} {requested} becomes {frames}: this model takes {rule}"


def _check(settings: WindowSettings) -> None:
    """VideotuneError for settings outside their range."""
    at_least_one = {"max_frames": settings.max_frames, "frames": settings.frames, "min_frames": settings.min_frames}
    for name, count in at_least_one.items():
        if count is not None and count < 1:
            raise VideotuneError(f"video_config.{name} is {count}; it must be 1 or more.")
    above_zero = {"target_fps": settings.target_fps, "max_duration": settings.max_duration}
    for name, value in above_zero.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise VideotuneError(f"video_config.{name} is {value}; it must be a number above 0.")
    if settings.windows not in ("chunks", "head"):
        raise VideotuneError(f'video_config.windows is "{settings.windows}"; it must be "chunks" or "head".')


def smallest_window(settings: WindowSettings, rules: VideoRules) -> int:
    """The fewest frames that a short clip's window may have: ``min_frames``, or the smallest valid count from 5 on."""
    planned, _ = planned_frames(settings, rules)
    if settings.min_frames is not None:
        if settings.min_frames > planned:
            raise VideotuneError(
                f"video_config.min_frames is {settings.min_frames}, above the {planned} frames of a window. Lower it."
            )
        return _valid_at_least(settings.min_frames, rules) or rules.frame_rest
    return min(planned, _valid_at_least(5, rules) or rules.frame_rest)


def frames_at(facts: Facts, fps: float, max_duration: float) -> int:
    """How many frames the clip, or its first ``max_duration`` seconds, fills at ``fps``."""
    return math.floor(min(facts.seconds, max_duration) * fps + 1e-6)


def frame_times(start: float, frames: int, fps: float) -> tuple[float, ...]:
    """Frame i of a window stands at start + i / fps seconds of the clip."""
    return tuple(start + i / fps for i in range(frames))


def window_times(window: Window) -> tuple[float, ...]:
    """The times to decode for a window of the library."""
    return frame_times(window.start, window.shape.frames, window.shape.fps)


def lay(facts: Facts, settings: WindowSettings, rules: VideoRules) -> LaidClip:
    """Lay windows over a clip.

    "chunks": windows of the planned count one after the other, and the rest at the tail is cut; "head": the first alone.
    A clip shorter than that takes one window of the largest valid count that it fills, down to ``smallest_window``.
    """
    planned, _ = planned_frames(settings, rules)
    smallest = smallest_window(settings, rules)
    fps = fps_of(settings, rules)
    there = frames_at(facts, fps, settings.max_duration)
    frames = planned if there >= planned else _valid_at_most(there, rules)
    if frames is None or frames < smallest:
        detail = f"has {there} frames at {fps:g} fps; the smallest window is {smallest}"
        return LaidClip((), fps, facts.seconds, 0.0, "too_short", detail)
    count = there // frames if settings.windows == "chunks" and there >= planned else 1
    starts = [k * frames / fps for k in range(count)]
    windows = tuple(Laid(start, frame_times(start, frames, fps), frames) for start in starts)
    cut = max(0.0, facts.seconds - count * frames / fps)
    return LaidClip(windows, fps, cut, _repeats_share(facts, windows))


def _repeats_share(facts: Facts, windows: tuple[Laid, ...]) -> float:
    repeats = total = 0
    for window in windows:
        shown = shown_at(facts, window.times)
        repeats += sum(a == b for a, b in itertools.pairwise(shown))
        total += len(shown)
    return repeats / total
