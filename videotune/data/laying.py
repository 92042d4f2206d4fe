"""Windows laid over a clip in time: side by side, sliding, at random, at keyframes or scene cuts, or squeezed."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from videotune.types import PLAIN, ClipShape, VideoRules, Window

from .facts import Facts, shown_at
from .windows import (
    WindowSettings,
    fps_of,
    frame_rule,
    frames_at,
    frames_in,
    planned_frames,
    smallest_window,
    take,
    valid_at_most,
)

EPSILON = 1e-6
"""Seconds, or frames, that rounding may be off."""


@dataclass(frozen=True)
class Laid:
    """A window on a clip, from ``start`` to ``end`` seconds; ``sampling`` and ``swaps`` as in ``types.Window``.

    ``times`` is what it shows when nothing is drawn at random; ``until`` where its last frame ends, which is before ``end``
    where frames are left out in between.
    """

    start: float
    end: float
    frames: int
    times: tuple[float, ...]
    sampling: str = "even"
    swaps: bool = False
    until: float = 0.0


@dataclass(frozen=True)
class LaidClip:
    """The windows of one clip, or the reason why there are none.

    ``there`` frames at ``fps`` fill the clip, up to the maximal duration; ``seconds_cut`` and ``frames_cut`` of the whole
    clip no window shows (the tail's rest, and what lies beyond that duration); ``repeats_share`` is the share of the
    windows' frames that show the same source frame as the one before; ``speed`` how fast motion plays (1.0: as filmed).
    """

    windows: tuple[Laid, ...]
    fps: float
    there: int
    seconds_cut: float
    repeats_share: float
    speed: float = 1.0
    frames_cut: int = 0
    reason: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class _Room:
    """What windows are laid with: their frames, the fewest one may have, and the seconds in use.

    ``base`` is the rate of which every ``keep``-th frame is shown, so that ``fps`` is base / keep.
    """

    base: float
    keep: int
    planned: int
    smallest: int
    usable: float

    @property
    def fps(self) -> float:
        """Frames shown a second."""
        return self.base / self.keep

    def seconds(self, frames: int) -> float:
        """How much of the clip so many frames need: to the end of the last one at the base rate."""
        return ((frames - 1) * self.keep + 1) / self.base

    def fits(self, seconds: float) -> int:
        """How many frames so many seconds hold."""
        return frames_in(seconds, self.base, self.keep)


def lay(facts: Facts, settings: WindowSettings, rules: VideoRules, cuts: Sequence[float] = ()) -> LaidClip:
    """Lay windows over a clip; ``cuts`` (seconds) are where scenes begin, for ``keyframe_source`` "scenes".

    "uniform": windows of the planned count one after the other ("chunks", the rest at the tail is cut), the first alone
    ("head"), or one every ``window_stride`` frames ("slide"). A clip shorter than that takes one window of the largest
    valid count that it fills, down to ``smallest_window``. "random": as many windows, each with a start drawn at random
    from its equal share of the clip. "keyframe": windows begin at keyframes of the container, or scenes are laid one by
    one, so that no window crosses a cut. ``stretch``: one window over the whole clip. An image is one window of one frame.
    """
    planned, _ = planned_frames(settings, rules)
    fps = fps_of(settings, rules)
    if facts.still:
        return _still(fps, rules)
    keep, usable = settings.keep_every, min(facts.seconds, settings.max_duration)
    room = _Room(fps * keep, keep, planned, smallest_window(settings, rules), usable)
    there = frames_at(facts, room.base, settings.max_duration, keep)
    if settings.pad_short == "freeze" and there < planned:
        spans = [_laid(0.0, min(facts.timestamps[-1], room.usable), planned, fps, "hold")]
    else:
        spans = _spans(facts, settings, rules, room, cuts)
    if not spans:
        detail = f"has {there} frames at {fps:g} fps; the smallest window is {room.smallest}"
        if cuts and there >= room.smallest:
            detail = f"none of its {len(cuts) + 1} scenes has the {room.smallest} frames of the smallest window"
        return LaidClip((), fps, there, facts.seconds, 0.0, reason="too_short", detail=detail)
    speed, slack = 1.0, spans[0].frames / fps - room.seconds(spans[0].frames)
    if settings.stretch and there > planned:
        speed, slack = room.usable * fps / planned, 0.0
    windows = tuple(replace(span, until=usable if span.sampling == "hold" else span.end - slack) for span in spans)
    covered = _covered(windows)
    return LaidClip(
        windows,
        fps,
        there,
        seconds_cut=max(0.0, facts.seconds - covered),
        repeats_share=_repeats_share(facts, spans),
        speed=speed,
        frames_cut=max(0, frames_in(facts.seconds, room.base, keep) - frames_in(covered, room.base, keep)),
    )


def _still(fps: float, rules: VideoRules) -> LaidClip:
    """An image's one window."""
    if valid_at_most(1, rules) is None:
        detail = f"an image is one frame, and this model takes {frame_rule(rules)}"
        return LaidClip((), fps, 1, 0.0, 0.0, reason="too_short", detail=detail)
    return LaidClip((Laid(0.0, 1 / fps, 1, (0.0,)),), fps, 1, 0.0, 0.0)


def _laid(start: float, end: float, frames: int, fps: float, sampling: str = "even", swaps: bool = False) -> Laid:
    """A window with the times that it shows where nothing is drawn."""
    window = Window("", start, end, ClipShape(frames, 1, 1, fps), sampling, swaps)
    return Laid(start, end, frames, take(window, PLAIN, 0).times, sampling, swaps)


def _spans(facts: Facts, settings: WindowSettings, rules: VideoRules, room: _Room, cuts: Sequence[float]) -> list[Laid]:
    """The windows of a video."""
    if settings.stretch and room.fits(room.usable) > room.planned:
        random = settings.frame_sample_strategy == "random"
        how = "frames" if random else "even"
        return [_laid(0.0, room.usable, room.planned, room.fps, how, settings.temporal_augmentation)]
    if settings.frame_sample_strategy == "keyframe" and settings.keyframe_source == "container":
        starts = [facts.timestamps[k] for k in facts.keyframes if facts.timestamps[k] < room.usable]
        return _at_keyframes(starts or [0.0], settings, rules, room)
    bounds = [0.0, room.usable]
    if settings.frame_sample_strategy == "keyframe":
        bounds = [0.0, *(cut for cut in sorted(cuts) if EPSILON < cut < room.usable - EPSILON), room.usable]
    return [laid for lo, hi in itertools.pairwise(bounds) for laid in _side_by_side(lo, hi, settings, rules, room)]


def _side_by_side(lo: float, hi: float, settings: WindowSettings, rules: VideoRules, room: _Room) -> list[Laid]:
    """Windows between two moments, none beyond them."""
    there = room.fits(hi - lo)
    frames = room.planned if there >= room.planned else valid_at_most(there, rules)
    if frames is None or frames < room.smallest:
        return []
    stride = room.seconds(frames)
    if settings.windows == "slide":
        stride = (settings.window_stride or max(1, frames // 2)) / room.fps
    alone = settings.windows == "head" or frames < room.planned
    count = 1 if alone else math.floor((hi - lo - room.seconds(frames)) / stride + EPSILON) + 1
    if settings.frame_sample_strategy == "random":
        return _random_starts(lo, hi, count, frames, settings, room)
    starts = [lo + k * stride for k in range(count)]
    return _at(starts, frames, lo, hi, settings, room)


def _at(
    starts: Sequence[float], frames: int, lo: float, hi: float, settings: WindowSettings, room: _Room
) -> list[Laid]:
    """A window at each start.

    Under temporal augmentation it may begin up to half its length earlier or later, within lo … hi, and not before the
    middle between it and the one before: no two windows are the same.
    """
    length = frames / room.fps
    if not settings.temporal_augmentation:
        return [_laid(start, start + length, frames, room.fps) for start in starts]
    windows = []
    for before, start in zip([None, *starts], starts, strict=False):
        reach = min(length, length if before is None else start - before) / 2
        begin, end = max(lo, start - reach), max(start + length, min(hi, start + length + reach))
        windows.append(_laid(begin, end, frames, room.fps, "start", swaps=True))
    return windows


def _random_starts(lo: float, hi: float, count: int, frames: int, settings: WindowSettings, room: _Room) -> list[Laid]:
    """``count`` windows that share the possible starts evenly among them."""
    share = max(0.0, hi - lo - room.seconds(frames)) / count
    how, share = ("start", share) if share > EPSILON else ("even", 0.0)
    length = share + frames / room.fps
    starts = [lo + k * share for k in range(count)]
    return [_laid(start, start + length, frames, room.fps, how, settings.temporal_augmentation) for start in starts]


def _at_keyframes(starts: Sequence[float], settings: WindowSettings, rules: VideoRules, room: _Room) -> list[Laid]:
    """Windows that begin at keyframes: one after the other, at each ("slide"), or the first alone ("head").

    A keyframe too near to the end for a window of the planned count is passed over, unless none has room: then the first
    takes the largest count that it fills.
    """
    length = room.seconds(room.planned)
    full = [start for start in starts if room.fits(room.usable - start) >= room.planned]
    if not full:
        frames = valid_at_most(room.fits(room.usable - starts[0]), rules)
        if frames is None or frames < room.smallest:
            return []
        return _at(starts[:1], frames, 0.0, room.usable, settings, room)
    if settings.windows == "head":
        full = full[:1]
    elif settings.windows == "chunks":
        kept = [full[0]]
        while (index := bisect_left(full, kept[-1] + length - EPSILON)) < len(full):
            kept.append(full[index])
        full = kept
    return _at(full, room.planned, 0.0, room.usable, settings, room)


def _covered(spans: Sequence[Laid]) -> float:
    """Seconds of the clip that some window can show."""
    covered, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda laid: laid.start):
        covered += max(0.0, span.until - max(span.start, reached))
        reached = max(reached, span.until)
    return covered


def _repeats_share(facts: Facts, windows: Sequence[Laid]) -> float:
    repeats = total = 0
    for window in windows:
        shown = shown_at(facts, window.times)
        repeats += sum(a == b for a, b in itertools.pairwise(shown))
        total += len(shown)
    return repeats / total


def plain(settings: WindowSettings) -> WindowSettings:
    """The same without anything drawn at random: how validation clips are laid."""
    strategy = "uniform" if settings.frame_sample_strategy == "random" else settings.frame_sample_strategy
    return replace(settings, frame_sample_strategy=strategy, temporal_augmentation=False)
