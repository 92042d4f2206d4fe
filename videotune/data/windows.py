"""Which frames of a clip become samples: frame counts that the model takes, and windows laid over the clip in time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from videotune.errors import VideotuneError
from videotune.rng import draws
from videotune.types import PLAIN, Take, VideoRules, Window

from .facts import Facts

if TYPE_CHECKING:
    from numpy.random import Generator

SWAP_PROBABILITY = 0.1
"""How likely two neighbouring frames change places under temporal augmentation."""

CHOICES: dict[str, tuple[str | None, ...]] = {
    "windows": ("chunks", "head", "slide"),
    "frame_sample_strategy": ("uniform", "random", "keyframe"),
    "keyframe_source": ("container", "scenes"),
    "pad_short": ("freeze", None),
}
"""The settings that are words, with what each may be."""


@dataclass(frozen=True)
class WindowSettings:
    """How windows are laid; the names are the config's own.

    ``frames`` (else ``max_frames``) is the count a window should have; ``target_fps`` None means the model's own;
    at most ``max_duration`` seconds of each clip are used; ``windows`` is "chunks", "head" or "slide", by ``window_stride``
    frames (None: half a window). ``keep_every`` k keeps every k-th frame, so that windows have a k-th of the frames and of
    the rate. ``pad_short`` is None or "freeze".
    """

    max_frames: int = 16
    frames: int | None = None
    strict_frames: bool = False
    min_frames: int | None = None
    target_fps: float | None = None
    max_duration: float = 10.0
    windows: str = "chunks"
    window_stride: int | None = None
    frame_sample_strategy: str = "uniform"
    keyframe_source: str = "container"
    stretch: bool = False
    pad_short: str | None = None
    temporal_augmentation: bool = False
    keep_every: int = 1


def fps_of(settings: WindowSettings, rules: VideoRules) -> float:
    """The frame rate at which clips are shown to the model."""
    return (rules.fps if settings.target_fps is None else settings.target_fps) / settings.keep_every


def snap_frames(requested: int, rules: VideoRules) -> int:
    """The valid frame count nearest to ``requested``, ties upward (4n+1: 16 -> 17, 19 -> 21)."""
    below = valid_at_most(requested, rules)
    above = valid_at_least(requested, rules)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None
        return nearest
    return below if requested - below < above - requested else above


def valid_at_most(frames: int, rules: VideoRules) -> int | None:
    """The largest valid count up to ``frames``, or None."""
    step, rest = rules.frame_step, rules.frame_rest
    frames = frames if rules.most_frames is None else min(frames, rules.most_frames)
    count = rest if step == 0 else rest + (frames - rest) // step * step
    return count if max(1, rest) <= count <= frames else None


def valid_at_least(frames: int, rules: VideoRules) -> int | None:
    """The smallest valid count from ``frames`` on, or None where the model takes none so large."""
    step, rest = rules.frame_step, rules.frame_rest
    if step == 0:
        return rest if rest >= frames else None
    steps = max(-(-(frames - rest) // step), 0)
    count = rest + steps * step or step
    return count if rules.most_frames is None or count <= rules.most_frames else None


def planned_frames(settings: WindowSettings, rules: VideoRules) -> tuple[int, str | None]:
    """How many frames a window has, and a sentence where that is not what was asked for.

    VideotuneError for counts below 1, and for a changed count under ``strict_frames``.
    """
    _check(settings)
    key = "max_frames" if settings.frames is None else "frames"
    requested = settings.max_frames if settings.frames is None else settings.frames
    frames, keep = snap_frames(requested, rules), settings.keep_every
    if rules.most_frames == 1 and (settings.frames or 1) > 1:
        raise VideotuneError(
            f"video_config.frames is {requested}, but this model draws pictures: it takes images, and of clips single "
            "frames. Set it to 1, or leave it out."
        )
    if keep > 1:
        return _thinned(key, requested, keep, settings.strict_frames, rules)
    if frames != requested and settings.strict_frames:
        pair = (valid_at_most(requested, rules), valid_at_least(requested, rules))
        nearest = " or ".join(str(count) for count in pair if count is not None)
        raise VideotuneError(
            f"video_config.{key} is {requested}, but this model takes {frame_rule(rules)}. "
            f"Set it to {nearest}, or leave out strict_frames to have it changed to {frames}."
        )
    note = None if frames == requested else f"{key} {requested} becomes {frames}: this model takes {frame_rule(rules)}"
    return frames, note


def _thinned(key: str, requested: int, keep: int, strict: bool, rules: VideoRules) -> tuple[int, str]:
    """The frames of a window of which every ``keep``-th is kept: the nearest valid count to (requested - 1) / keep + 1."""
    kept = snap_frames(round((requested - 1) / keep + 1), rules)
    spanned = (kept - 1) * keep + 1
    if strict and spanned != requested:
        raise VideotuneError(
            f"video_config.{key} is {requested}; with every {_nth(keep)} frame kept (temporal_compression_ratio), and a "
            f"model that takes {frame_rule(rules)}, the nearest is {spanned}. Set it to that, or leave out strict_frames."
        )
    changed = "" if spanned == requested else f"{key} {requested} becomes {spanned}: "
    return kept, f"{changed}of {spanned} frames every {_nth(keep)} is kept, so that a window has {kept}"


def frame_rule(rules: VideoRules) -> str:
    """The counts that a model takes, in words."""
    if rules.frame_step:
        most = "" if rules.most_frames is None else f", at most {rules.most_frames}"
        return f"{rules.frame_step}n+{rules.frame_rest} frames{most}"
    return "single frames" if rules.frame_rest == 1 else f"exactly {rules.frame_rest} frames"


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _check(settings: WindowSettings) -> None:
    """VideotuneError for settings outside their range."""
    at_least_one = {"max_frames": settings.max_frames, "frames": settings.frames, "min_frames": settings.min_frames}
    at_least_one["window_stride"] = settings.window_stride
    for name, count in at_least_one.items():
        if count is not None and count < 1:
            raise VideotuneError(f"video_config.{name} is {count}; it must be 1 or more.")
    above_zero = {"target_fps": settings.target_fps, "max_duration": settings.max_duration}
    for name, value in above_zero.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise VideotuneError(f"video_config.{name} is {value}; it must be a number above 0.")
    for name, choices in CHOICES.items():
        if getattr(settings, name) not in choices:
            words = ", ".join(f'"{choice}"' for choice in choices if choice)
            raise VideotuneError(f'video_config.{name} is "{getattr(settings, name)}"; it must be one of {words}.')
    if settings.stretch and settings.frame_sample_strategy == "keyframe":
        raise VideotuneError(
            "video_config.stretch squeezes the whole clip into one window: it has no keyframe to begin at."
        )


def smallest_window(settings: WindowSettings, rules: VideoRules) -> int:
    """The fewest frames that a short clip's window may have: ``min_frames``, or the smallest valid count from 5 on."""
    planned, _ = planned_frames(settings, rules)
    if settings.min_frames is not None:
        if settings.min_frames > planned:
            raise VideotuneError(
                f"video_config.min_frames is {settings.min_frames}, above the {planned} frames of a window. Lower it."
            )
        return valid_at_least(settings.min_frames, rules) or rules.frame_rest
    return min(planned, valid_at_least(5, rules) or rules.frame_rest)


def frames_at(facts: Facts, fps: float, max_duration: float, keep: int = 1) -> int:
    """How many frames the clip, or its first ``max_duration`` seconds, fills at ``fps``, every ``keep``-th of them."""
    return frames_in(min(facts.seconds, max_duration), fps, keep)


def frames_in(seconds: float, fps: float, keep: int = 1) -> int:
    """How many frames so many seconds fill at ``fps``, every ``keep``-th of them."""
    return (math.floor(seconds * fps + 1e-6) - 1) // keep + 1


def frame_times(start: float, frames: int, fps: float) -> tuple[float, ...]:
    """Frame i of a window stands at start + i / fps seconds of the clip."""
    return tuple(start + i / fps for i in range(frames))


def take(window: Window, variant: int, seed: int) -> Take:
    """What variant ``variant`` of a window shows, a pure function of (seed, window, variant); PLAIN draws nothing.

    A window that does not vary shows the same in every variant.
    """
    shape, length = window.shape, window.shape.frames / window.shape.fps
    plain = variant == PLAIN or not window.varies
    random = draws(seed, "take", window.id, f"{window.end:.6f}", variant)
    if window.sampling == "start":
        room = max(0.0, window.end - window.start - length)
        times = frame_times(window.start + room * (0.5 if plain else random.random()), shape.frames, shape.fps)
    elif window.sampling == "hold":
        last = window.end
        times = tuple(min(time, last) for time in frame_times(window.start, shape.frames, shape.fps))
    elif window.sampling == "frames" and not plain:
        times = tuple(sorted(window.start + (window.end - window.start) * random.random(shape.frames)))
    else:
        times = frame_times(window.start, shape.frames, shape.frames / (window.end - window.start))
    if window.swaps and not plain:
        times = _swapped(times, random)
    place = (0.5, 0.5)
    if window.resize == "random" and not plain:
        place = (float(random.random()), float(random.random()))
    return Take(window, 0 if not window.varies else variant, tuple(float(time) for time in times), place)


def _swapped(times: tuple[float, ...], random: Generator) -> tuple[float, ...]:
    """Each frame changes places with its right neighbour with SWAP_PROBABILITY, no frame twice."""
    shown, i = list(times), 0
    while i + 1 < len(shown):
        if random.random() < SWAP_PROBABILITY:
            shown[i], shown[i + 1] = shown[i + 1], shown[i]
            i += 1
        i += 1
    return tuple(shown)
