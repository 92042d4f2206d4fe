"""A look at a clip: what a cheap pass over its first seconds shows (frozen, black, cuts, damage), and how to know it again.

Frames are decoded once, each, and shrunk to 60 × 60 grey cells at once. No frame is left out and no loop filter skipped:
that would save 40 % of the time, but make cuts inexact and damage invisible. Every threshold has its measurement beside it.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from videotune.files import REVALIDATED, Number, checked

from .decode import Reader
from .facts import ClipProblem, Facts

if TYPE_CHECKING:
    Picture = NDArray[np.float32]

SIDE = 60
"""Rows and columns of the picture that is looked at, whatever the clip's aspect."""

GRID = 10
"""Rows and columns of a signature's brightness; its two colours have half of that."""

FROZEN_LEVELS = 3.0
"""No cell of a frozen picture strays further (of 255) from where it was. Stills re-encoded by x264 (CRF 18 to 38), x265,
VP9, MPEG-2 and MJPEG stay within 2; a chest that rises by 1.5 pixels of 720p moves a cell by 6 to 17."""

FROZEN_SECONDS = 1.0
"""A shorter rest is no freeze: a breathing person rests half a second at each turn (at most 0.47 of the time at 1 s)."""

BLANK_LEVELS = 8.0
"""A picture whose cells all lie within so many levels is one tone: black, white or flat."""

CUT_LEVELS = 4.0
"""The mean change (of 255) below which nothing is a cut; of 200 cuts between unrelated clips the least had 30."""

CUT_RATIO = 3.0
"""A cut changes the picture so many times as much as the frames around do. A pan begins with 2.0; cuts have 4.6 and more."""

CUT_LIKENESS = 0.3
"""Shots on both sides of a cut have fewer details in common (``likeness``): at most 0.07, with the same bars and logo over
both 0.27; within a shot 0.56 to 0.94 at 8 fps, 0.31 on a galloping horse."""

BLOCKS = 5
"""Rows and columns of blocks in which details are compared."""

FLAT_DETAILS = 6.0
"""A block (36 cells) whose details are shorter than this is flat: one level a cell."""

CUT_SECONDS = 0.25
"""What comes back after so long was never gone: a flash, a flicker, a knock at the camera."""


@dataclass(frozen=True)
class Look:
    """What the first ``until`` seconds of a clip show.

    ``frozen`` is the share of that time in which the picture stands still for a second or longer, ``black`` the share in
    which it has one tone (black, white or flat). ``cuts`` are hard cuts: seconds of the first frame after each.
    ``jitter`` is the share of frame intervals more than 20 % off the median. ``damaged_at``: the first frame from there
    on cannot be decoded, and nothing after it was looked at.

    ``signatures`` (see ``signature``) are of the first frame, the one in the middle of what was looked at, and the clip's
    very last, also where that comes after ``until`` (where it cannot be had: the last looked at); of a still there is one.
    """

    __pydantic_config__ = REVALIDATED
    until: Number
    frozen: Number = 0.0
    black: Number = 0.0
    cuts: tuple[Number, ...] = ()
    jitter: Number = 0.0
    signatures: tuple[str, ...] = ()
    damaged_at: Number | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-like, about 700 bytes; ``from_json`` gives an equal look back."""
        return vars(self) | {"cuts": list(self.cuts), "signatures": list(self.signatures)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Look:
        """The look that ``to_json`` wrote; KeyError, TypeError or ValueError where the value is something else."""
        look: Look = checked(
            Look, Look(**(value | {"cuts": tuple(value["cuts"]), "signatures": tuple(value["signatures"])}))
        )
        if any(len(base64.b64decode(text, validate=True)) != GRID * GRID * 3 // 2 for text in look.signatures):
            raise ValueError("no signature")
        return look


def look(facts: Facts, until: float) -> Look:
    """Look at the clip's first ``until`` seconds; ClipProblem (decode_error) where not even its first frame decodes."""
    with closing(Reader(facts, threads=1)) as reader:
        if facts.still:
            return Look(until, signatures=(_only_signature(reader),))
        count = max(1, bisect_left(facts.timestamps, until - 1e-6))
        seen = _Seen(facts, count)
        damaged_at = None
        try:
            for index, frame in reader.frames(range(count)):
                if index != seen.count:
                    raise ClipProblem("decode_error", f"frame {seen.count} of {len(facts.timestamps)} is not there")
                seen.add(index, frame)
        except ClipProblem:
            if seen.count == 0:
                raise
            damaged_at = facts.timestamps[seen.count]
        has_more = damaged_at is None and count < len(facts.timestamps) and not facts.counted
        last = _tail_signature(reader) if has_more else None
    return Look(
        until=until,
        frozen=round(seen.frozen_share(), 4),
        black=round(seen.blank / seen.seconds, 4),
        cuts=tuple(round(facts.timestamps[i], 6) for i in find_cuts(seen.changes, seen.boundaries.alike, seen.gaps)),
        jitter=round(_jitter(facts.timestamps[:count]), 4),
        signatures=(*seen.signatures(), last or seen.last_signature()),
        damaged_at=damaged_at,
    )


class Boundaries:
    """Whether the details of the picture outlive the boundary before a frame, for all frames but the first.

    ``alike[i]`` is the greatest ``likeness`` between a frame shortly before frame i and one shortly from it on.
    """

    def __init__(self, stamps: Sequence[float]) -> None:
        self.alike: dict[int, float] = {}
        self._stamps = stamps
        self._recent: deque[tuple[int, Picture]] = deque()

    def add(self, index: int, picture: Picture) -> None:
        """Take in the next frame, as ``shrunk``."""
        details = fine_details(picture.reshape(SIDE // 2, 2, SIDE // 2, 2).mean((1, 3)))
        since = bisect_left(self._stamps, self._stamps[index] - CUT_SECONDS)
        reach = min(15, max(2, index - since))  # frames on either side
        self._recent.append((index, details))
        while len(self._recent) > 2 * reach:
            self._recent.popleft()
        for earlier, other in list(self._recent)[:-1]:
            alike = likeness(details, other)
            for boundary in range(max(earlier + 1, index - reach + 1), min(index, earlier + reach) + 1):
                self.alike[boundary] = max(self.alike.get(boundary, -1.0), alike)


@dataclass
class _Seen:
    """What has been seen so far of the first ``total`` frames, one small picture after the other."""

    facts: Facts
    total: int
    count: int = 0
    seconds: float = 0.0
    blank: float = 0.0
    changes: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        from av.video.reformatter import VideoReformatter

        self._shrink, self._colour = VideoReformatter(), VideoReformatter()
        stamps = (*self.facts.timestamps, self.facts.seconds)
        self._durations = [max(0.0, b - a) for a, b in pairwise(stamps)]
        self._middle = bisect_left(stamps, stamps[self.total] / 2)
        self._anchor: Picture | None = None
        self._rest, self._frozen = 0.0, [0.0]
        self._before: Picture | None = None
        self.boundaries = Boundaries(stamps)
        self._kept: dict[int, str] = {}
        self._last: Any = None

    def add(self, index: int, frame: Any) -> None:
        """Take in the next frame."""
        picture = shrunk(frame, self._shrink)
        duration = self._durations[index]
        self.seconds += duration
        self.count += 1
        if picture.max() - picture.min() <= BLANK_LEVELS:
            self.blank += duration
        self._hold(picture, duration)
        self._compare(index, picture)
        if index in (0, self._middle):
            self._kept[index] = signature(frame, self.facts, self._colour)
        self._last = frame

    def _hold(self, picture: Picture, duration: float) -> None:
        """Go on with a rest of the picture, or end it."""
        if self._anchor is None or np.abs(picture - self._anchor).max() > FROZEN_LEVELS:
            self._frozen.append(self._rest)
            self._anchor, self._rest = picture, 0.0
        self._rest += duration

    def _compare(self, index: int, picture: Picture) -> None:
        """How far the picture has changed since the one before."""
        if self._before is not None:
            self.changes.append(float(np.abs(picture - self._before).mean()))
            self.gaps.append(self._durations[index - 1])
        self._before = picture
        self.boundaries.add(index, picture)

    def frozen_share(self) -> float:
        """The share of the seconds seen that were part of a rest."""
        least = min(FROZEN_SECONDS, self.seconds) - 1e-6
        return min(1.0, sum(rest for rest in (*self._frozen, self._rest) if rest >= least) / self.seconds)

    def signatures(self) -> tuple[str, ...]:
        """Of the first frame and the middle one; of the last seen where damage came before the middle."""
        return tuple(self._kept.get(index) or self.last_signature() for index in (0, self._middle))

    def last_signature(self) -> str:
        """Of the last frame seen."""
        return signature(self._last, self.facts, self._colour)


def shrunk(frame: Any, reformatter: Any) -> Picture:
    """A decoded frame as (60, 60) grey cells in [0, 255], each the mean of its share of the frame; not turned upright."""
    from av.video.reformatter import Interpolation

    grey = reformatter.reformat(frame, SIDE, SIDE, "gray", interpolation=Interpolation.AREA, threads=1)
    return np.asarray(grey.to_ndarray(), np.float32)


def fine_details(picture: Picture) -> Picture:
    """What of a picture (30, 30) is finer than five cells, in 25 blocks (25, 36) at unit length; zero where it is flat.

    Independent of the light: a lamp that goes out changes nothing.
    """
    sums = np.pad(np.pad(picture, 2, mode="edge").cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    fine = picture - (sums[5:, 5:] - sums[:-5, 5:] - sums[5:, :-5] + sums[:-5, :-5]) / 25
    blocks = fine.reshape(BLOCKS, 6, BLOCKS, 6).transpose(0, 2, 1, 3).reshape(BLOCKS * BLOCKS, 36)
    blocks -= blocks.mean(1, keepdims=True)
    length = np.linalg.norm(blocks, axis=1, keepdims=True)
    return np.asarray(np.where(length > FLAT_DETAILS, blocks / np.maximum(length, 1e-6), 0), np.float32)


def likeness(one: Picture, other: Picture) -> float:
    """How much of the details two pictures share, -1 to 1: the correlation that two thirds of their blocks exceed.

    A third may agree by what lies over the film: bars, a logo, subtitles. Blocks flat in both say nothing; 1 where all are.
    """
    products = (one * other).sum(1)[(one.any(1)) | (other.any(1))]
    if len(products) < 3:
        return 1.0
    return float(np.sort(products)[len(products) // 3])


def find_cuts(changes: Sequence[float], alike: dict[int, float], gaps: Sequence[float]) -> list[int]:
    """Indices of frames that begin a new shot.

    ``changes[i]`` is the mean change from frame i to i + 1 and ``gaps[i]`` the seconds between them; ``alike[i]`` the
    greatest likeness of details between a frame shortly before frame i and one shortly from it on.
    """
    found = []
    padded, spans = [0.0, 0.0, *changes, 0.0, 0.0], [0.0, 0.0, *gaps, 0.0, 0.0]
    for i, change in enumerate(changes):
        around = [i, i + 1, i + 3, i + 4]
        usual = sum(padded[k] for k in around) / 4
        known = [spans[k] for k in around if spans[k] > 0]
        if known:  # after a gap in time more has moved
            usual *= max(1.0, gaps[i] / (sum(known) / len(known)))
        if change >= max(CUT_LEVELS, CUT_RATIO * usual) and alike[i + 1] <= CUT_LIKENESS:
            found.append(i + 1)
    return found


def _jitter(stamps: Sequence[float]) -> float:
    """The share of intervals more than 20 % off their median."""
    gaps = [b - a for a, b in pairwise(stamps)]
    if not gaps:
        return 0.0
    usual = median(gaps)
    return sum(abs(gap - usual) > 0.2 * usual for gap in gaps) / len(gaps)


def signature(frame: Any, facts: Facts, reformatter: Any) -> str:
    """A frame's look in 200 letters: base64 of 10 × 10 brightnesses, 5 × 5 blues and 5 × 5 reds (Cb, Cr), upright."""
    from av.video.reformatter import ColorRange, Interpolation

    small = reformatter.reformat(
        frame, SIDE, SIDE, "yuv444p", dst_color_range=ColorRange.JPEG, interpolation=Interpolation.AREA, threads=1
    )
    planes = small.to_ndarray().reshape(3, SIDE, SIDE)
    planes = planes[:, ::-1] if facts.mirrored else planes
    return _pack(np.rot90(planes, facts.rotation // 90, (1, 2)))


def _pack(planes: NDArray[Any]) -> str:
    """(3, 60, 60) brightness, Cb and Cr -> base64 of a byte a cell."""
    cells = []
    for plane, grid in zip(planes, (GRID, GRID // 2, GRID // 2), strict=True):
        side = SIDE // grid
        cells.append(plane.reshape(grid, side, grid, side).astype(np.float32).mean((1, 3)).ravel())
    return base64.b64encode(np.concatenate(cells).round().clip(0, 255).astype(np.uint8).tobytes()).decode()


def _only_signature(reader: Reader) -> str:
    """The signature of an image."""
    from av.video.reformatter import VideoReformatter

    _, frame = next(reader.frames([0]))
    return signature(frame, reader.facts, VideoReformatter())


def _tail_signature(reader: Reader) -> str | None:
    """The signature of the clip's very last frame; None where that cannot be had: only a likeness is lost then."""
    from av.video.reformatter import VideoReformatter

    try:
        _, frame = next(reader.frames([len(reader.facts.timestamps) - 1]))
    except ClipProblem:
        return None
    return signature(frame, reader.facts, VideoReformatter())
