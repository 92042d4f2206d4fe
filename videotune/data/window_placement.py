"""Window placement: where the windows of a clip are, and how much of it they show."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from videotune.config.data_schema import VideoConfig
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_counts import (
    frame_interval,
    frame_rule,
    frames_in,
    planned_frames,
    sample_fps,
    smallest_window,
    split_by_frame_count,
    valid_at_most,
)
from videotune.model_spec import VideoRules
from videotune.types import ClipShape, Window

# media_info needs PyAV, which a machine that only trains may not have.
if TYPE_CHECKING:
    from videotune.data.media_info import MediaInfo

EPSILON = 1e-6
"""Tolerance for rounding, in seconds or frames."""


@dataclass(frozen=True, slots=True)
class WindowPlacement:
    """Where the windows of one clip are, and how much of the clip they show."""

    windows: tuple[Window, ...] = ()
    """All windows; with several frame counts, those of the largest first."""

    shown_until: tuple[float, ...] = ()
    """Second up to which each window shows the clip, at its latest possible start: the end
    of its last frame. 0 for an image.

    ``Window.end`` is another second, the bound for drawing frame times. If frames are
    skipped it is later, since it includes those after the window's last one; with "hold" it
    is earlier.
    """

    frames: int = 0
    """Frames at the rate of samples that fill the clip, up to ``max_duration``."""

    seconds_cut: float = 0.0
    """Seconds of the clip that no window covers: before, between and after the windows.

    What is beyond ``max_duration`` counts too. With several frame counts it is the
    least of any count.
    """

    repeats_share: float = 0.0
    """Share of the windows' frames that show the same source frame as the one before.
    """

    speed: float = 1.0
    """How fast motion plays; 1.0 is as filmed."""

    frames_cut: int = 0
    """Frames of the clip, at the rate of samples, that are in no window; those beyond
    ``max_duration`` count too.
    """


def place_windows(
    info: MediaInfo, video: VideoConfig, rules: VideoRules, cuts: Sequence[float] = ()
) -> WindowPlacement:
    """Place windows on a clip.

    The strategies:

    - "uniform": windows of the planned count one after the other ("chunks"; the tail is
      cut), only the first one ("head"), or one every ``window_stride`` frames
      ("slide").
    - "random": as many windows, each start drawn from an equal share of the possible
      starts; windows may overlap.
    - "keyframe": windows begin at keyframes of the container, or each scene is sampled
      as if it were a clip, so that no window crosses a cut.
    - ``stretch``: one window over the whole clip.

    A clip that is shorter than the planned count takes one window of the largest valid
    count that it fills, down to ``smallest_window``. An image is one window of one
    frame. If the config lists several frame counts, each that the clip is long enough
    for has its windows; a clip that is too short for all of them is sampled for the
    smallest.

    Args:
        info: media info of the clip.
        video: settings of the dataset.
        rules: frame counts that the model accepts.
        cuts: seconds at which scenes begin, for ``keyframe_source`` "scenes".

    Returns:
        The windows, still without the clip's id and size.

    Raises:
        ClipProblem: "too_short" if no window fits.
    """
    placers = [
        _WindowPlacer(info, settings, rules, sorted(cuts))
        for settings in split_by_frame_count(video)
    ]
    if len(placers) == 1 or info.still:
        return placers[-1].place()

    long_enough = [
        placer
        for placer in placers[:-1]
        if placer.fitting_frames(placer.usable_seconds) >= placer.planned
    ]
    return _merge([placer.place() for placer in (*long_enough, placers[-1])])


def _merge(placements: Sequence[WindowPlacement]) -> WindowPlacement:
    """Join the windows of several frame counts.

    The cut seconds are those of the count that shows most of the clip.
    """
    # Two frame counts may become the same valid one, whose windows are equal.
    shown_until: dict[Window, float] = {}
    for placement in placements:
        shown_until.update(zip(placement.windows, placement.shown_until, strict=True))

    return replace(
        placements[0],
        windows=tuple(shown_until),
        shown_until=tuple(shown_until.values()),
        repeats_share=max(placement.repeats_share for placement in placements),
        seconds_cut=min(placement.seconds_cut for placement in placements),
        frames_cut=min(placement.frames_cut for placement in placements),
    )


def without_randomness(video: VideoConfig) -> VideoConfig:
    """Return the settings without anything random: validation clips are sampled so."""
    strategy = video.frame_sample_strategy
    if strategy == "random":
        strategy = "uniform"
    return video.model_copy(
        update={"frame_sample_strategy": strategy, "temporal_augmentation": False}
    )


@dataclass
class _WindowPlacer:
    """Places the windows of one frame count on one clip."""

    info: MediaInfo
    video: VideoConfig
    rules: VideoRules
    cuts: list[float]
    """Seconds at which scenes begin, ascending."""

    planned: int = field(init=False)
    """Frames of a window, if the clip is long enough."""

    smallest: int = field(init=False)
    """Fewest frames that the window of a short clip may have."""

    interval: int = field(init=False)
    """A sample shows every ``interval``-th frame at ``base_fps``."""

    fps: float = field(init=False)
    """Frame rate of samples."""

    base_fps: float = field(init=False)
    """Frame rate before frames are skipped: ``fps`` times ``interval``."""

    usable_seconds: float = field(init=False)
    """Seconds of the clip up to ``max_duration``."""

    def __post_init__(self) -> None:
        self.planned, _ = planned_frames(self.video, self.rules)
        self.smallest = smallest_window(self.video, self.rules)
        self.interval = frame_interval(self.video, self.rules)
        self.fps = sample_fps(self.video, self.rules)
        self.base_fps = self.fps * self.interval
        self.usable_seconds = min(self.info.seconds, self.video.max_duration)

    def place(self) -> WindowPlacement:
        """Return the windows of the clip and how much of it they show."""
        if self.info.still:
            return self._place_on_image()

        frames = self.fitting_frames(self.usable_seconds)
        if self.video.pad_short == "freeze" and frames < self.planned:
            last_frame = min(self.info.timestamps[-1], self.usable_seconds)
            windows = [self._window(0.0, last_frame, self.planned, sampling="hold")]
        else:
            windows = self._video_windows()
        if not windows:
            raise self._too_short(frames)

        is_stretched = self.video.stretch and frames > self.planned
        ends = tuple(
            self._last_frame_end(window, is_stretched=is_stretched)
            for window in windows
        )
        covered_seconds = _covered_seconds(windows, ends)
        all_frames = self.fitting_frames(self.info.seconds)
        return WindowPlacement(
            windows=tuple(windows),
            shown_until=ends,
            frames=frames,
            seconds_cut=max(0.0, self.info.seconds - covered_seconds),
            repeats_share=_repeats_share(self.info, windows),
            speed=self.usable_seconds * self.fps / self.planned
            if is_stretched
            else 1.0,
            frames_cut=max(0, all_frames - self.fitting_frames(covered_seconds)),
        )

    def _place_on_image(self) -> WindowPlacement:
        if valid_at_most(1, self.rules) is None:
            raise ClipProblem(
                "too_short",
                f"an image is one frame, and this model takes {frame_rule(self.rules)}",
            )
        window = self._window(0.0, 1 / self.fps, 1)
        return WindowPlacement(windows=(window,), shown_until=(0.0,), frames=1)

    def _too_short(self, frames: int) -> ClipProblem:
        """Build the problem of a clip (or of all its scenes) without room for a window."""
        detail = f"has {frames} frames at {self.fps:g} fps; the smallest window is {self.smallest}"
        if self.cuts and frames >= self.smallest:
            detail = (
                f"none of its {len(self.cuts) + 1} scenes has {self.smallest} frames, "
                "the smallest window"
            )
        return ClipProblem("too_short", detail)

    def _last_frame_end(self, window: Window, *, is_stretched: bool) -> float:
        """Return the second at which the last frame of a window ends."""
        if window.sampling == "hold":
            return self.usable_seconds
        if is_stretched:
            return window.end

        # Window.end is count / fps after the last possible start. If only every
        # interval-th frame is kept, this includes the skipped frames after the last
        # one.
        count = window.shape.frames
        skipped_seconds = count / self.fps - self._window_seconds(count)
        return window.end - skipped_seconds

    def fitting_frames(self, seconds: float) -> int:
        """Return how many frames of a sample fill ``seconds``."""
        return frames_in(seconds, self.base_fps, self.interval)

    def _window_seconds(self, frames: int) -> float:
        """Return the seconds from the first frame to the end of the last one."""
        return ((frames - 1) * self.interval + 1) / self.base_fps

    def _window(
        self,
        start: float,
        end: float,
        frames: int,
        *,
        sampling: str = "even",
        swaps: bool = False,
    ) -> Window:
        shape = ClipShape(frames=frames, height=1, width=1, fps=self.fps)
        return Window(
            clip_id="",
            start=start,
            end=end,
            shape=shape,
            sampling=sampling,
            swaps=swaps,
        )

    def _video_windows(self) -> list[Window]:
        """Place windows by the configured strategy; empty if none fits."""
        video = self.video
        usable_seconds = self.usable_seconds

        if video.stretch and self.fitting_frames(usable_seconds) > self.planned:
            is_random = video.frame_sample_strategy == "random"
            return [
                self._window(
                    0.0,
                    usable_seconds,
                    self.planned,
                    sampling="frames" if is_random else "even",
                    swaps=video.temporal_augmentation,
                )
            ]

        bounds = [0.0, usable_seconds]
        if video.frame_sample_strategy == "keyframe":
            if video.keyframe_source == "container":
                stamps = [self.info.timestamps[index] for index in self.info.keyframes]
                usable_stamps = [stamp for stamp in stamps if stamp < usable_seconds]
                return self._windows_at_keyframes(usable_stamps or [0.0])
            inner_cuts = [
                c for c in self.cuts if EPSILON < c < usable_seconds - EPSILON
            ]
            bounds = [0.0, *inner_cuts, usable_seconds]

        windows: list[Window] = []
        for low, high in pairwise(bounds):
            windows += self._windows_between(low, high)
        return windows

    def _largest_count(self, seconds: float) -> int | None:
        """Return the frames of a window that fits in ``seconds``; None if none fits."""
        frames = min(
            self.planned, valid_at_most(self.fitting_frames(seconds), self.rules) or 0
        )
        return frames if frames >= self.smallest else None

    def _windows_between(self, low: float, high: float) -> list[Window]:
        """Place windows between two seconds of the clip."""
        video = self.video
        frames = self._largest_count(high - low)
        if frames is None:
            return []

        window_seconds = self._window_seconds(frames)
        stride = window_seconds
        if video.windows == "slide":
            stride = (video.window_stride or max(1, frames // 2)) / self.fps
        count = 1
        if video.windows != "head" and frames == self.planned:
            count = math.floor((high - low - window_seconds) / stride + EPSILON) + 1

        if video.frame_sample_strategy != "random":
            starts = [low + k * stride for k in range(count)]
            return self._windows_at(starts, frames, low, high)

        # Each window draws its start from an equal share of the possible starts.
        sampling = "start"
        share = max(0.0, high - low - window_seconds) / count
        if share <= EPSILON:
            sampling = "even"
            share = 0.0
        length = share + frames / self.fps
        windows = []
        for k in range(count):
            start = low + k * share
            windows.append(
                self._window(
                    start,
                    start + length,
                    frames,
                    sampling=sampling,
                    swaps=video.temporal_augmentation,
                )
            )
        return windows

    def _windows_at(
        self, starts: Sequence[float], frames: int, low: float, high: float
    ) -> list[Window]:
        """Place one window at each start.

        Under temporal augmentation a window may begin earlier or later, within ``low`` to
        ``high``, by up to half its length, or half the distance to the previous start if
        that is less. So no two windows are the same.
        """
        length = frames / self.fps
        if not self.video.temporal_augmentation:
            return [self._window(start, start + length, frames) for start in starts]

        windows = []
        previous_start = None
        for start in starts:
            distance = length if previous_start is None else start - previous_start
            most_shift = min(length, distance) / 2
            begin = max(low, start - most_shift)
            # With skipped frames after the last one, ``length`` may end beyond the clip.
            end = max(start + length, min(high, start + length + most_shift))
            windows.append(
                self._window(begin, end, frames, sampling="start", swaps=True)
            )
            previous_start = start
        return windows

    def _windows_at_keyframes(self, keyframes: Sequence[float]) -> list[Window]:
        """Place windows that begin at keyframes (seconds of the clip, ascending).

        They follow each other ("chunks"), begin at each keyframe ("slide"), or only the
        first is taken ("head"). A keyframe too near to the end for the planned count is
        ignored. If all are, the first takes the largest count that fits.
        """
        starts = [
            keyframe
            for keyframe in keyframes
            if self.fitting_frames(self.usable_seconds - keyframe) >= self.planned
        ]
        if not starts:
            frames = self._largest_count(self.usable_seconds - keyframes[0])
            if frames is None:
                return []
            return self._windows_at(keyframes[:1], frames, 0.0, self.usable_seconds)

        if self.video.windows == "head":
            starts = starts[:1]
        elif self.video.windows == "chunks":
            starts = self._without_overlap(starts)
        return self._windows_at(starts, self.planned, 0.0, self.usable_seconds)

    def _without_overlap(self, starts: Sequence[float]) -> list[float]:
        """Return the first start, then each next one at which the previous window has
        ended.
        """
        window_seconds = self._window_seconds(self.planned)
        chosen = [starts[0]]
        while True:
            index = bisect_left(starts, chosen[-1] + window_seconds - EPSILON)
            if index == len(starts):
                return chosen
            chosen.append(starts[index])


def _covered_seconds(windows: Iterable[Window], ends: Iterable[float]) -> float:
    """Return the seconds of the clip that at least one window covers."""
    spans = sorted(zip(windows, ends, strict=True), key=lambda span: span[0].start)
    covered = 0.0
    reached = 0.0
    for window, end in spans:
        covered += max(0.0, end - max(window.start, reached))
        reached = max(reached, end)
    return covered


def _repeats_share(info: MediaInfo, windows: Sequence[Window]) -> float:
    """Return the share of frames that show the same source frame as the one before."""
    times = [_plain_times(window) for window in windows]
    indices = info.frame_indices(np.concatenate(times))

    # The first frame of a window follows none.
    repeats = indices[1:] == indices[:-1]
    firsts = np.cumsum([len(window_times) for window_times in times[:-1]])
    if len(firsts):
        repeats[firsts - 1] = False
    return int(repeats.sum()) / len(indices)


def _plain_times(window: Window) -> NDArray[np.float64]:
    """Return the frame times of a window in its sample without randomness: exactly those of
    ``draw_frames``, with the same rounding.
    """
    shape = window.shape
    start = window.start
    fps = shape.fps
    if window.sampling == "start":
        latest_delay = max(0.0, window.end - window.start - shape.frames / shape.fps)
        start = window.start + latest_delay * 0.5
    elif window.sampling != "hold":
        fps = shape.frames / (window.end - window.start)
    times = start + np.arange(shape.frames) / fps
    return np.minimum(times, window.end) if window.sampling == "hold" else times
