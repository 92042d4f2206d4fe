"""A content scan: what a cheap pass over a clip's first seconds finds (frozen, black, cuts, damage), and its signatures.

Each frame is decoded once and shrunk to 60 × 60 grey cells at once. No frame is left out and no loop filter skipped: that
would save 40 % of the time, but make cuts inexact and damage invisible. Every threshold has its measurement beside it.
"""

import base64
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.decode import Reader
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.files import REVALIDATED, Number, checked
from videotune.lazy import av_reformatter

Picture = NDArray[np.float32]

SIDE = 60
"""Rows and columns of the picture that is examined, whatever the clip's aspect."""

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
class ContentScan:
    """What the first ``until`` seconds of a clip contain.

    ``frozen`` is the share of that time in which the picture stands still for a second or longer, ``black`` the share in
    which it has one tone (black, white or flat). ``cuts`` are hard cuts: the timestamp of the first frame after each.
    ``jitter`` is the share of frame intervals more than 20 % off the median. ``damaged_at``: the first frame from there
    on cannot be decoded, and nothing after it was examined.

    ``signatures`` (see ``_signature``) are of the first frame, the one in the middle of what was examined, and the clip's
    very last, also where that comes after ``until`` (where it cannot be decoded: the last examined); a still has one.
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
        """JSON-like, about 700 bytes; ``from_json`` gives an equal object back."""
        return vars(self) | {"cuts": list(self.cuts), "signatures": list(self.signatures)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "ContentScan":
        """What ``to_json`` wrote; KeyError, TypeError or ValueError where the value is something else."""
        lists = {name: tuple(value[name]) for name in ("cuts", "signatures")}
        scan: ContentScan = checked(ContentScan, ContentScan(**(value | lists)))
        if any(
            len(base64.b64decode(text, validate=True)) != GRID * GRID * 3 // 2
            for text in scan.signatures
        ):
            raise ValueError("no signature")
        return scan


def scan_content(
    info: MediaInfo, until: float, cut_ratio: float = CUT_RATIO, threads: int = 1
) -> ContentScan:
    """Scan the clip's first ``until`` seconds; ClipProblem (decode_error) where not even its first frame decodes.

    ``cut_ratio``: how many times as much as the frames around it a cut changes the picture; higher finds fewer cuts.
    """
    with closing(Reader(info, threads)) as reader:
        if info.still:
            return ContentScan(
                until, signatures=(_signature(next(reader.frames([0]))[1], info),)
            )
        count = max(1, bisect_left(info.timestamps, until - 1e-6))
        scan = _Scan(info, count)
        damaged_at = None
        try:
            for index, frame in reader.frames(range(count)):
                if index != scan.count:
                    raise ClipProblem(
                        "decode_error", f"frame {scan.count} of {len(info.ticks)} is not there"
                    )
                scan.add(frame)
        except ClipProblem:
            if scan.count == 0:
                raise
            damaged_at = info.timestamps[scan.count]
        if damaged_at is None and count < len(info.ticks) and not info.counted:
            with suppress(ClipProblem):  # only a likeness is lost
                _, scan.last = next(reader.frames([len(info.ticks) - 1]))
    return ContentScan(
        until=until,
        frozen=round(scan.frozen_share(), 4),
        black=round(scan.blank / scan.seconds, 4),
        cuts=tuple(
            info.timestamps[i]
            for i in find_cuts(scan.changes, scan.alike, scan.durations, cut_ratio)
        ),
        jitter=round(_jitter(info.timestamps[:count]), 4),
        signatures=tuple(
            _signature(frame, info)
            for frame in (scan.first, scan.middle or scan.last, scan.last)
        ),
        damaged_at=damaged_at,
    )


class _Scan:
    """What the frames so far contain, of the first ``total`` of a clip; frames are added in order.

    ``rests`` are the seconds for which one picture stood still; ``changes[i]`` the mean change from frame i to i + 1;
    ``alike[i]`` the greatest ``likeness`` between a frame shortly before frame i and one shortly from it on.
    """

    def __init__(self, info: MediaInfo, total: int) -> None:
        self.count = 0
        self.seconds = 0.0
        self.blank = 0.0
        self.rests: list[float] = []
        self.changes: list[float] = []
        self.alike: dict[int, float] = {}
        self.first: Any = None
        self.middle: Any = None
        self.last: Any = None
        self._stamps = (*info.timestamps, info.seconds)
        self.durations = [max(0.0, b - a) for a, b in pairwise(self._stamps)]
        self._middle = bisect_left(self._stamps, self._stamps[total] / 2)
        self._shrink = av_reformatter.VideoReformatter()
        self._anchor: Picture | None = None
        self._before: Picture | None = None
        self._recent: deque[tuple[int, Picture]] = deque()

    def add(self, frame: Any) -> None:
        """The next frame."""
        picture = _shrunk(self._shrink, frame, "gray").astype(np.float32)
        index = self.count
        duration = self.durations[self.count]
        self.seconds += duration
        if picture.max() - picture.min() <= BLANK_LEVELS:
            self.blank += duration
        if self._anchor is None or np.abs(picture - self._anchor).max() > FROZEN_LEVELS:
            self.rests.append(0.0)
            self._anchor = picture
        self.rests[-1] += duration
        if self._before is not None:
            self.changes.append(float(np.abs(picture - self._before).mean()))
        self._compare(index, picture)
        if index == 0:
            self.first = frame
        if index == self._middle:
            self.middle = frame
        self.count = index + 1
        self.last = frame
        self._before = picture

    def _compare(self, index: int, picture: Picture) -> None:
        """Compare the details of the picture with those shortly before it, over every boundary between them."""
        details = fine_details(picture.reshape(SIDE // 2, 2, SIDE // 2, 2).mean((1, 3)))
        since = bisect_left(self._stamps, self._stamps[index] - CUT_SECONDS)
        reach = min(15, max(2, index - since))  # frames on either side
        self._recent = deque([*self._recent, (index, details)], maxlen=2 * reach)
        for earlier, other in list(self._recent)[:-1]:
            alike = likeness(details, other)
            for boundary in range(
                max(earlier + 1, index - reach + 1), min(index, earlier + reach) + 1
            ):
                self.alike[boundary] = max(self.alike.get(boundary, -1.0), alike)

    def frozen_share(self) -> float:
        """The share of the seconds so far that were part of a rest."""
        least = min(FROZEN_SECONDS, self.seconds) - 1e-6
        return min(1.0, sum(rest for rest in self.rests if rest >= least) / self.seconds)


def fine_details(picture: Picture) -> Picture:
    """What of a picture (30, 30) is finer than five cells, in 25 blocks (25, 36) at unit length; zero where it is flat.

    Independent of the light: a lamp that goes out changes nothing.
    """
    sums = np.pad(np.pad(picture, 2, mode="edge").cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    fine = picture - (sums[5:, 5:] - sums[:-5, 5:] - sums[5:, :-5] + sums[:-5, :-5]) / 25
    blocks = (
        fine.reshape(BLOCKS, 6, BLOCKS, 6).transpose(0, 2, 1, 3).reshape(BLOCKS * BLOCKS, 36)
    )
    blocks -= blocks.mean(1, keepdims=True)
    length = np.linalg.norm(blocks, axis=1, keepdims=True)
    return np.asarray(
        np.where(length > FLAT_DETAILS, blocks / np.maximum(length, 1e-6), 0), np.float32
    )


def likeness(one: Picture, other: Picture) -> float:
    """How much of the details two pictures share, -1 to 1: the correlation that two thirds of their blocks exceed.

    A third may agree by what lies over it: bars, a logo, subtitles. Blocks flat in both do not count; 1 where all are.
    """
    products = (one * other).sum(1)[(one.any(1)) | (other.any(1))]
    return 1.0 if len(products) < 3 else float(np.sort(products)[len(products) // 3])


def find_cuts(
    changes: Sequence[float], alike: dict[int, float], gaps: Sequence[float], ratio: float
) -> list[int]:
    """Indices of frames that begin a new shot.

    ``changes[i]`` is the mean change from frame i to i + 1 and ``gaps[i]`` the seconds between them; ``alike[i]`` the
    greatest likeness of details between a frame shortly before frame i and one shortly from it on.
    """
    found = []
    padded = [0.0, 0.0, *changes, 0.0, 0.0]
    spans = [0.0, 0.0, *gaps[: len(changes)], 0.0, 0.0]
    for i, change in enumerate(changes):
        around = [i, i + 1, i + 3, i + 4]
        usual = sum(padded[k] for k in around) / 4
        known = [spans[k] for k in around if spans[k] > 0]
        if known:  # after a gap in time more has moved
            usual *= max(1.0, gaps[i] / (sum(known) / len(known)))
        if change >= max(CUT_LEVELS, ratio * usual) and alike[i + 1] <= CUT_LIKENESS:
            found.append(i + 1)
    return found


def _jitter(stamps: Sequence[float]) -> float:
    """The share of intervals more than 20 % off their median."""
    gaps = [b - a for a, b in pairwise(stamps)]
    usual = median(gaps or [0.0])
    return sum(abs(gap - usual) > 0.2 * usual for gap in gaps) / max(1, len(gaps))


def _shrunk(reformatter: Any, frame: Any, form: str, **how: Any) -> NDArray[np.uint8]:
    area = av_reformatter.Interpolation.AREA
    return np.asarray(
        reformatter.reformat(
            frame, SIDE, SIDE, form, interpolation=area, threads=1, **how
        ).to_ndarray()
    )


def _signature(frame: Any, info: MediaInfo) -> str:
    """A frame in 200 letters: base64 of 10 × 10 brightnesses, 5 × 5 blues and 5 × 5 reds (Cb, Cr), upright, a byte each."""
    full = av_reformatter.ColorRange.JPEG
    reformatter = av_reformatter.VideoReformatter()
    planes = _shrunk(reformatter, frame, "yuv444p", dst_color_range=full).reshape(3, SIDE, SIDE)
    planes = np.rot90(planes[:, ::-1] if info.mirrored else planes, info.rotation // 90, (1, 2))
    cells = []
    for plane, grid in zip(planes, (GRID, GRID // 2, GRID // 2), strict=True):
        side = SIDE // grid
        cells.append(
            plane.reshape(grid, side, grid, side).astype(np.float32).mean((1, 3)).ravel()
        )
    return base64.b64encode(
        np.concatenate(cells).round().clip(0, 255).astype(np.uint8).tobytes()
    ).decode()
