"""Frame sampling: frame counts that the model takes, windows over a clip in time, and the frames of a sample."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from numpy.random import Generator

from videotune.config.data_schema import VideoConfig
from videotune.data.file_checks import ClipProblem
from videotune.errors import VideotuneError
from videotune.rng import generator_for
from videotune.types import DETERMINISTIC_VARIANT, ClipShape, FrameSample, VideoRules, Window

if (
    TYPE_CHECKING
):  # the module reads files, which a machine that only trains need not be able to do
    from .media_info import MediaInfo

SWAP_PROBABILITY = 0.1
"""How likely two neighbouring frames change places under temporal augmentation."""

MAX_COUNT = 1 << 31
"""No window has more frames."""

EPSILON = 1e-6
"""Seconds, or frames, that rounding may be off."""


def keep_every(video: VideoConfig, rules: VideoRules) -> int:
    """k where the config keeps every k-th frame; VideotuneError for a compression ratio that the VAE cannot have."""
    return _multiple("temporal", video.temporal_compression_ratio, rules.temporal_stride)


def shrink_factor(video: VideoConfig, rules: VideoRules) -> int:
    """k where clips are made k times smaller; VideotuneError for a compression ratio that the VAE cannot have."""
    return _multiple("spatial", video.spatial_compression_ratio, rules.spatial_stride)


def _multiple(kind: str, ratio: int | None, own: int) -> int:
    if ratio is None:
        return 1
    if ratio < own or ratio % own:
        key = f"video_config.{kind}_compression_ratio"
        raise VideotuneError(
            f"{key} is {ratio}, no multiple of this VAE's {own}. Leave it out, or set {2 * own}."
        )
    return ratio // own


def fps_of(video: VideoConfig, rules: VideoRules) -> float:
    """The frame rate of samples."""
    return (rules.fps if video.target_fps is None else video.target_fps) / keep_every(
        video, rules
    )


def snap_frames(requested: int, rules: VideoRules) -> int:
    """The valid frame count nearest to ``requested``, ties upward (4n+1: 16 -> 17, 19 -> 21)."""
    near = (valid_at_least(requested, rules), valid_at_most(requested, rules))
    return min(
        (count for count in near if count is not None), key=lambda count: abs(count - requested)
    )


def _valid_counts(rules: VideoRules) -> range:
    if rules.frame_step == 0:
        return range(rules.frame_rest, rules.frame_rest + 1)
    return range(
        rules.frame_rest or rules.frame_step,
        (rules.most_frames or MAX_COUNT) + 1,
        rules.frame_step,
    )


def valid_at_most(frames: int, rules: VideoRules) -> int | None:
    """The largest valid count up to ``frames``, or None."""
    counts = _valid_counts(rules)
    index = bisect_right(counts, frames)
    return counts[index - 1] if index else None


def valid_at_least(frames: int, rules: VideoRules) -> int | None:
    """The smallest valid count from ``frames`` on, or None where the model takes none so large."""
    counts = _valid_counts(rules)
    index = bisect_left(counts, frames)
    return counts[index] if index < len(counts) else None


def planned_frames(video: VideoConfig, rules: VideoRules) -> tuple[int, str | None]:
    """How many frames a window has, and a sentence where that is not what was asked for.

    VideotuneError for a changed count under ``strict_frames``, and for settings that contradict each other.
    """
    if video.stretch and video.frame_sample_strategy == "keyframe":
        raise VideotuneError(
            "video_config.stretch takes the whole clip: leave it out to begin at keyframes."
        )
    key = "max_frames" if video.frames is None else "frames"
    asked = max(video.frames) if isinstance(video.frames, list) else video.frames
    requested = video.max_frames if asked is None else asked
    if rules.most_frames == 1 and (asked or 1) > 1:
        raise VideotuneError(
            f"video_config.frames is {requested}, but this model takes single frames. Set it to 1."
        )
    keep = keep_every(video, rules)
    frames = snap_frames(round((requested - 1) / keep + 1), rules)
    spanned = (frames - 1) * keep + 1
    takes = f"this model takes {frame_rule(rules)}"
    every = ""
    if keep > 1:
        every = f"of {spanned} frames one in {keep} is kept, so that a window has {frames}"
        takes += f", and one frame in {keep} is kept (temporal_compression_ratio)"
    if spanned != requested and video.strict_frames:
        raise VideotuneError(
            f"video_config.{key} is {requested}, but {takes}. Set it to {spanned}."
        )
    if spanned == requested:
        return frames, every or None
    return frames, f"{key} {requested} becomes {spanned}: {every or takes}"


def frame_rule(rules: VideoRules) -> str:
    """The counts that a model takes, in words."""
    if rules.frame_step:
        most = "" if rules.most_frames is None else f", at most {rules.most_frames}"
        return f"{rules.frame_step}n+{rules.frame_rest} frames{most}"
    return "single frames" if rules.frame_rest == 1 else f"exactly {rules.frame_rest} frames"


def each_count(video: VideoConfig) -> list[VideoConfig]:
    """The settings once for each frame count that they name, the largest first."""
    if not isinstance(video.frames, list):
        return [video]
    return [
        video.model_copy(update={"frames": count})
        for count in sorted(set(video.frames), reverse=True)
    ]


def smallest_window(video: VideoConfig, rules: VideoRules) -> int:
    """The fewest frames that a short clip's window may have: ``min_frames``, or the smallest valid count from 5 on."""
    planned, _ = planned_frames(video, rules)
    if video.min_frames is None:
        return min(planned, valid_at_least(5, rules) or rules.frame_rest)
    if video.min_frames > planned:
        raise VideotuneError(
            f"video_config.min_frames is {video.min_frames}, above the {planned} of a window."
        )
    return valid_at_least(video.min_frames, rules) or rules.frame_rest


def frames_in(seconds: float, fps: float, keep: int = 1) -> int:
    """How many frames so many seconds fill at ``fps``, every ``keep``-th of them."""
    return (math.floor(seconds * fps + 1e-6) - 1) // keep + 1


@dataclass(frozen=True)
class FrameSampling:
    """The windows of one clip.

    ``ends`` are where the windows' last frames end, before ``Window.end`` where frames are left out in between; ``frames``
    at the samples' rate fill the clip, up to the maximal duration; ``seconds_cut`` and ``frames_cut`` of the whole clip are
    in no window (the tail's rest, and what lies beyond that duration); ``repeats_share`` is the share of the windows'
    frames that show the same source frame as the one before; ``speed`` how fast motion plays (1.0: as filmed).
    """

    windows: tuple[Window, ...] = ()
    ends: tuple[float, ...] = ()
    frames: int = 0
    seconds_cut: float = 0.0
    repeats_share: float = 0.0
    speed: float = 1.0
    frames_cut: int = 0


def sample_frames(
    info: MediaInfo, video: VideoConfig, rules: VideoRules, cuts: Sequence[float] = ()
) -> FrameSampling:
    """Lay windows over a clip; ``cuts`` (seconds) are where scenes begin, for ``keyframe_source`` "scenes".

    "uniform": windows of the planned count one after the other ("chunks", the rest at the tail is cut), the first alone
    ("head"), or one every ``window_stride`` frames ("slide"). A clip shorter than that takes one window of the largest
    valid count that it fills, down to ``smallest_window``. "random": as many windows, each with a random start within its
    equal share of the clip. "keyframe": windows begin at keyframes of the container, or scenes are sampled one by one, so
    that no window crosses a cut. ``stretch``: one window over the whole clip. An image is one window of one frame. The
    windows lack the clip's id and size. Of several frame counts each that the clip is long enough for has its windows, and
    a clip that is too short for all is sampled for the smallest. ClipProblem (too_short) where no window has room.
    """
    samplers = [_Sampler(info, one, rules, sorted(cuts)) for one in each_count(video)]
    if len(samplers) == 1 or info.still:
        return samplers[-1].sample()
    whole = [one for one in samplers[:-1] if one.frames_in(one.usable) >= one.planned]
    found = [one.sample() for one in (*whole, samplers[-1])]
    pairs = {
        window: end
        for part in found
        for window, end in zip(part.windows, part.ends, strict=True)
    }
    cut = {
        name: min(getattr(part, name) for part in found)
        for name in ("seconds_cut", "frames_cut")
    }
    repeats = max(part.repeats_share for part in found)
    return replace(
        found[0], windows=tuple(pairs), ends=tuple(pairs.values()), repeats_share=repeats, **cut
    )


def without_randomness(video: VideoConfig) -> VideoConfig:
    """The same settings without anything random: how validation clips are sampled."""
    strategy = (
        "uniform" if video.frame_sample_strategy == "random" else video.frame_sample_strategy
    )
    return video.model_copy(
        update={"frame_sample_strategy": strategy, "temporal_augmentation": False}
    )


@dataclass
class _Sampler:
    """What windows are made of: ``base`` is the rate of which every ``keep``-th frame is shown, ``usable`` the seconds."""

    info: MediaInfo
    video: VideoConfig
    rules: VideoRules
    cuts: list[float]

    def __post_init__(self) -> None:
        self.planned, _ = planned_frames(self.video, self.rules)
        self.smallest = smallest_window(self.video, self.rules)
        self.keep = keep_every(self.video, self.rules)
        self.fps = fps_of(self.video, self.rules)
        self.base = self.fps * self.keep
        self.usable = min(self.info.seconds, self.video.max_duration)

    def sample(self) -> FrameSampling:
        """The clip's windows, and what they leave out."""
        info = self.info
        video = self.video
        fps = self.fps
        if info.still:
            if valid_at_most(1, self.rules) is None:
                raise ClipProblem(
                    "too_short",
                    f"an image is one frame, and this model takes {frame_rule(self.rules)}",
                )
            return FrameSampling((self._window(0.0, 1 / fps, 1),), (0.0,), 1)
        frames = self.frames_in(self.usable)
        if video.pad_short == "freeze" and frames < self.planned:
            windows = [
                self._window(0.0, min(info.timestamps[-1], self.usable), self.planned, "hold")
            ]
        else:
            windows = self._video_windows()
        if not windows:
            detail = (
                f"has {frames} frames at {fps:g} fps; the smallest window is {self.smallest}"
            )
            if self.cuts and frames >= self.smallest:
                detail = f"none of its {len(self.cuts) + 1} scenes has {self.smallest} frames, the smallest window"
            raise ClipProblem("too_short", detail)
        speed = 1.0
        count = windows[0].shape.frames
        slack = count / fps - self._seconds(count)
        if video.stretch and frames > self.planned:
            speed = self.usable * fps / self.planned
            slack = 0.0
        ends = tuple(
            self.usable if window.sampling == "hold" else window.end - slack
            for window in windows
        )
        covered = reached = 0.0
        for window, end in sorted(
            zip(windows, ends, strict=True), key=lambda pair: pair[0].start
        ):
            covered += max(0.0, end - max(window.start, reached))
            reached = max(reached, end)
        indices = [
            info.frames_at(sample_window(window, DETERMINISTIC_VARIANT, 0).times)
            for window in windows
        ]
        return FrameSampling(
            tuple(windows),
            ends,
            frames,
            seconds_cut=max(0.0, info.seconds - covered),
            repeats_share=sum(a == b for row in indices for a, b in pairwise(row))
            / sum(map(len, indices)),
            speed=speed,
            frames_cut=max(0, self.frames_in(info.seconds) - self.frames_in(covered)),
        )

    def frames_in(self, seconds: float) -> int:
        """How many frames so many seconds fill."""
        return frames_in(seconds, self.base, self.keep)

    def _seconds(self, frames: int) -> float:
        """How much of the clip so many frames need: to the end of the last one at the base rate."""
        return ((frames - 1) * self.keep + 1) / self.base

    def _window(
        self, start: float, end: float, frames: int, sampling: str = "even", swaps: bool = False
    ) -> Window:
        return Window("", start, end, ClipShape(frames, 1, 1, self.fps), sampling, swaps)

    def _video_windows(self) -> list[Window]:
        video = self.video
        usable = self.usable
        if video.stretch and self.frames_in(usable) > self.planned:
            how = "frames" if video.frame_sample_strategy == "random" else "even"
            return [self._window(0.0, usable, self.planned, how, video.temporal_augmentation)]
        bounds = [0.0, usable]
        if video.frame_sample_strategy == "keyframe":
            if video.keyframe_source == "container":
                stamps = [self.info.timestamps[k] for k in self.info.keyframes]
                return self._at_keyframes(
                    [stamp for stamp in stamps if stamp < usable] or [0.0]
                )
            bounds[1:1] = [cut for cut in self.cuts if EPSILON < cut < usable - EPSILON]
        return [
            window for low, high in pairwise(bounds) for window in self._side_by_side(low, high)
        ]

    def _count_that_fits(self, seconds: float) -> int | None:
        """The frames of a window within so many seconds; None where not even the smallest one fits."""
        frames = min(self.planned, valid_at_most(self.frames_in(seconds), self.rules) or 0)
        return frames if frames >= self.smallest else None

    def _side_by_side(self, low: float, high: float) -> list[Window]:
        """Windows between two moments, none beyond them."""
        video = self.video
        frames = self._count_that_fits(high - low)
        if frames is None:
            return []
        stride = self._seconds(frames)
        room = max(0.0, high - low - self._seconds(frames))
        if video.windows == "slide":
            stride = (video.window_stride or max(1, frames // 2)) / self.fps
        alone = video.windows == "head" or frames < self.planned
        count = (
            1
            if alone
            else math.floor((high - low - self._seconds(frames)) / stride + EPSILON) + 1
        )
        if video.frame_sample_strategy != "random":
            return self._at([low + k * stride for k in range(count)], frames, low, high)
        # windows share the possible starts evenly among them
        share = room / count
        how, share = ("start", share) if share > EPSILON else ("even", 0.0)
        length = share + frames / self.fps
        starts = [low + k * share for k in range(count)]
        return [
            self._window(start, start + length, frames, how, video.temporal_augmentation)
            for start in starts
        ]

    def _at(
        self, starts: Sequence[float], frames: int, low: float, high: float
    ) -> list[Window]:
        """A window at each start.

        Under temporal augmentation it may begin up to half its length earlier or later, within low … high, and not before
        the middle between it and the one before: no two windows are the same.
        """
        length = frames / self.fps
        if not self.video.temporal_augmentation:
            return [self._window(start, start + length, frames) for start in starts]
        windows = []
        for before, start in zip([None, *starts], starts, strict=False):
            reach = min(length, length if before is None else start - before) / 2
            begin = max(low, start - reach)
            end = max(start + length, min(high, start + length + reach))
            windows.append(self._window(begin, end, frames, "start", swaps=True))
        return windows

    def _at_keyframes(self, starts: Sequence[float]) -> list[Window]:
        """Windows that begin at keyframes: one after the other, at each ("slide"), or the first alone ("head").

        A keyframe too near to the end for a window of the planned count is ignored, unless none has room: then the
        first takes the largest count that it fills.
        """
        full = [
            start for start in starts if self.frames_in(self.usable - start) >= self.planned
        ]
        if not full:
            frames = self._count_that_fits(self.usable - starts[0])
            return [] if frames is None else self._at(starts[:1], frames, 0.0, self.usable)
        if self.video.windows == "head":
            full = full[:1]
        elif self.video.windows == "chunks":
            kept = [full[0]]
            while (
                index := bisect_left(full, kept[-1] + self._seconds(self.planned) - EPSILON)
            ) < len(full):
                kept.append(full[index])
            full = kept
        return self._at(full, self.planned, 0.0, self.usable)


def frame_times(start: float, frames: int, fps: float) -> tuple[float, ...]:
    """Frame i of a window stands at start + i / fps seconds of the clip."""
    return tuple(start + i / fps for i in range(frames))


def sample_window(window: Window, variant: int, seed: int) -> FrameSample:
    """The frames of variant ``variant`` of a window, a pure function of (seed, window, variant); PLAIN: nothing is random.

    A window that does not vary gives the same in every variant.
    """
    shape = window.shape
    length = window.shape.frames / window.shape.fps
    plain = variant == DETERMINISTIC_VARIANT or not window.varies
    random = generator_for(seed, "take", window.id, f"{window.end:.6f}", variant)
    if window.sampling == "start":
        room = max(0.0, window.end - window.start - length)
        times = frame_times(
            window.start + room * (0.5 if plain else random.random()), shape.frames, shape.fps
        )
    elif window.sampling == "hold":
        times = tuple(
            min(time, window.end) for time in frame_times(window.start, shape.frames, shape.fps)
        )
    elif window.sampling == "frames" and not plain:
        times = tuple(
            sorted(window.start + (window.end - window.start) * random.random(shape.frames))
        )
    else:
        times = frame_times(
            window.start, shape.frames, shape.frames / (window.end - window.start)
        )
    if window.swaps and not plain:
        times = _swapped(times, random)
    at_random = window.resize == "random" and not plain
    place = (float(random.random()), float(random.random())) if at_random else (0.5, 0.5)
    return FrameSample(
        window, 0 if not window.varies else variant, tuple(float(time) for time in times), place
    )


def _swapped(times: tuple[float, ...], random: Generator) -> tuple[float, ...]:
    """Each frame changes places with its right neighbour with SWAP_PROBABILITY, no frame twice."""
    order = list(times)
    places = iter(range(len(times) - 1))
    for i in places:
        if random.random() < SWAP_PROBABILITY:
            order[i], order[i + 1] = order[i + 1], order[i]
            next(places, None)
    return tuple(order)
