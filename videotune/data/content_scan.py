"""Content scan: one cheap pass over a clip that finds frozen and black parts, cuts and
damage.

It also computes signatures, by which clips of one source video are found. Each frame is
decoded once and reduced to 60 × 60 grey cells. No frame is skipped and no loop filter
left out: that would save 40 % of the time, but make cuts inexact and damage invisible.
Each threshold has its measurement next to it.
"""

import base64
import math
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

from videotune.data.cuts import (
    CUT_RATIO,
    Picture,
    find_cuts,
    fine_details,
    likeness,
)
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_reader import FrameReader
from videotune.data.media_info import MediaInfo
from videotune.data.probe import HDR_TRANSFERS
from videotune.files import REVALIDATED, Count, Number, checked
from videotune.lazy import av_reformatter

SIDE = 60
"""Rows and columns of the picture that is examined, whatever the clip's aspect ratio.
"""

GRID = 10
"""Rows and columns of a signature's brightness; its two colours have half of that."""

FROZEN_LEVELS = 3.0
"""Largest change of a cell (of 255) in a frozen picture.

Stills re-encoded by x264 (CRF 18 to 38), x265, VP9, MPEG-2 and MJPEG stay within 2; a
chest that rises by 1.5 pixels of 720p changes a cell by 6 to 17.
"""

FROZEN_SECONDS = 1.0
"""Shortest freeze.

A chest that rises by 1.5 pixels every 3.5 s rests for up to 0.83 s at each turn (24 fps,
x264 at CRF 18 to 38).
"""

BLANK_LEVELS = 8.0
"""Largest range of the cells of a blank picture: black, white or flat."""


ASPECT_TOLERANCE = 0.02
"""Difference (of logarithms) up to which two aspect ratios count as the same.

Streams that adapt to the network round the sides of each size to whole macroblocks.
"""

CUT_SECONDS = 0.25
"""A picture that returns within this time was not cut away: a flash, a flicker, a bump.
"""

JSON_NAMES = {"blank": "black", "form_changes_at": "turned_at"}
"""Fields of a ``ContentScan`` whose keys in JSON are older than their names."""


@dataclass(frozen=True)
class ContentScan:
    """Result of scanning the first seconds of a clip."""

    __pydantic_config__ = REVALIDATED

    until: Number
    """Seconds that were scanned."""

    frozen: Number = 0.0
    """Share of the time in which the picture does not change for at least a second."""

    blank: Number = 0.0
    """Share of the time in which the picture has one tone: black, white or flat. In JSON it
    is "black".
    """

    cuts: tuple[Number, ...] = ()
    """Hard cuts: the timestamp of the first frame after each."""

    jitter: Number = 0.0
    """Share of frame intervals that differ from the median by more than 20 %."""

    signatures: tuple[str, ...] = ()
    """Signatures (see ``_signature``) of the first frame, the one in the middle of the
    scan, and the clip's last frame, even after ``until``; if that cannot be decoded,
    the last scanned one. An image has one.
    """

    damaged_at: Number | None = None
    """Timestamp of the first frame that cannot be decoded; nothing after it was
    scanned.
    """

    form_changes_at: Number | None = None
    """Second from which frames have another aspect ratio than the first one, or HDR begins
    or ends; a rotation flag alone does not count. Nothing after it was scanned. In JSON it
    is "turned_at".
    """

    sizes: Count = 1
    """Different sizes of the frames, all of one aspect ratio."""

    interlaced: Number = 0.0
    """Share of the frames that consist of two fields."""

    def to_json(self) -> dict[str, Any]:
        """Return about 700 bytes of JSON from which ``from_json`` restores an equal
        scan.
        """
        fields = vars(self) | {
            "cuts": list(self.cuts),
            "signatures": list(self.signatures),
        }
        for name, json_name in JSON_NAMES.items():
            fields[json_name] = fields.pop(name)
        return fields

    @staticmethod
    def from_json(value: dict[str, Any]) -> "ContentScan":
        """Restore what ``to_json`` wrote, with all values checked.

        Raises:
            KeyError, TypeError, ValueError: if the value is anything else.
        """
        fields = dict(value)
        for name in ("cuts", "signatures"):
            fields[name] = tuple(value[name])
        for name, json_name in JSON_NAMES.items():
            fields[name] = fields.pop(json_name)
        scan: ContentScan = checked(ContentScan, ContentScan(**fields))

        signature_bytes = GRID * GRID * 3 // 2
        for signature in scan.signatures:
            if len(base64.b64decode(signature, validate=True)) != signature_bytes:
                raise ValueError("a signature has the wrong length")
        return scan


def scan_content(
    info: MediaInfo, until: float, cut_ratio: float = CUT_RATIO, threads: int = 1
) -> ContentScan:
    """Scan the first seconds of a clip.

    Args:
        info: media info of the clip.
        until: seconds to scan.
        cut_ratio: how many times as much as the frames around it a cut changes the
            picture; higher finds fewer cuts.
        threads: decoding threads; 0 chooses by the size of frames.

    Raises:
        ClipProblem: "decode_error" if not even the first frame can be decoded.
    """
    with closing(FrameReader(info, threads)) as reader:
        if info.still:
            _, frame = next(reader.frames([0]))
            return ContentScan(until, signatures=(_signature(frame, info),))

        count = max(1, bisect_left(info.timestamps, until - 1e-6))
        statistics = _ScanStatistics(info, count)
        damaged_at = _scan_frames(reader, statistics, count)

        # The last frame only serves near-duplicates, so failing to decode it is no
        # problem.
        is_whole = damaged_at is None and statistics.form_changes_at is None
        if is_whole and count < len(info.ticks) and info.seekable:
            with suppress(ClipProblem):
                _, statistics.last_frame = next(reader.frames([len(info.ticks) - 1]))

    cuts = find_cuts(
        statistics.changes, statistics.likenesses, statistics.durations, cut_ratio
    )
    signature_frames = (
        statistics.first_frame,
        statistics.middle_frame or statistics.last_frame,
        statistics.last_frame,
    )
    return ContentScan(
        until=until,
        frozen=round(statistics.frozen_share(), 4),
        blank=round(statistics.blank_seconds / statistics.seconds, 4),
        cuts=tuple(info.timestamps[index] for index in cuts),
        jitter=round(_jitter(info.timestamps[:count]), 4),
        signatures=tuple(_signature(frame, info) for frame in signature_frames),
        damaged_at=damaged_at,
        form_changes_at=statistics.form_changes_at,
        sizes=len(statistics.sizes),
        interlaced=round(statistics.interlaced_frames / statistics.count, 4),
    )


def _scan_frames(
    reader: FrameReader, statistics: "_ScanStatistics", count: int
) -> float | None:
    """Add the first ``count`` frames to the statistics.

    Returns:
        Timestamp of the first frame that cannot be decoded, or None.
    """
    info = reader.info
    try:
        for index, frame in reader.frames(range(count)):
            if index != statistics.count:
                raise ClipProblem(
                    "decode_error",
                    f"frame {statistics.count} of {len(info.ticks)} is not there",
                )
            if statistics.has_other_form(frame, reader.pixel_aspect):
                statistics.form_changes_at = info.timestamps[index]
                break
            statistics.add(frame, reader.pixel_aspect)
    except ClipProblem:
        if statistics.count == 0:
            raise
        return info.timestamps[statistics.count]
    return None


class _ScanStatistics:
    """Statistics over the first ``total`` frames of a clip, which are added in order."""

    def __init__(self, info: MediaInfo, total: int) -> None:
        self.count = 0
        self.seconds = 0.0
        self.blank_seconds = 0.0

        self.rests: list[float] = []
        """Seconds for which each picture stays. A frame that differs begins another."""

        self.changes: list[float] = []
        """Mean change from frame i to i + 1."""

        self.likenesses: dict[int, float] = {}
        """By boundary (number i lies before frame i), the largest ``likeness`` of a frame
        shortly before it and one shortly after it. It is high if the picture returns after a
        change, as after a flash.
        """

        self.sizes: set[tuple[int, int]] = set()
        """Width and height of the decoded frames."""

        self.first_aspect = 1.0
        """Aspect ratio of the first frame as it is shown."""

        self.form_changes_at: float | None = None
        self.interlaced_frames = 0

        self.first_frame: Any = None
        self.middle_frame: Any = None
        self.last_frame: Any = None

        self._stamps = (*info.timestamps, info.seconds)
        self.durations = [
            max(0.0, end - start) for start, end in pairwise(self._stamps)
        ]
        self._middle = bisect_left(self._stamps, self._stamps[total] / 2)
        self._reformatter = av_reformatter.VideoReformatter()
        self._rest_picture: Picture | None = None
        """First picture of the current rest."""

        self._previous_picture: Picture | None = None
        self._recent_details: deque[tuple[int, Picture]] = deque()

    def has_other_form(self, frame: Any, pixel_aspect: float) -> bool:
        """Return whether a frame has another aspect ratio than the first, or is HDR where
        the first is not or the other way round.

        Frames of another size and the same aspect ratio are resized like the others.
        """
        if self.first_frame is None:
            return False
        if frame.color_trc != self.first_frame.color_trc:
            hdr = HDR_TRANSFERS.values()
            if frame.color_trc in hdr or self.first_frame.color_trc in hdr:
                return True

        aspect = pixel_aspect * frame.width / frame.height
        return abs(math.log(aspect / self.first_aspect)) > ASPECT_TOLERANCE

    def add(self, frame: Any, pixel_aspect: float) -> None:
        """Add the next frame; ``pixel_aspect`` is the width of its pixels over their height."""
        if self.first_frame is None:
            self.first_aspect = pixel_aspect * frame.width / frame.height
        self.sizes.add((frame.width, frame.height))
        self.interlaced_frames += frame.interlaced_frame
        picture = _reduce(self._reformatter, frame, "gray").astype(np.float32)
        index = self.count
        duration = self.durations[index]

        self.seconds += duration
        if picture.max() - picture.min() <= BLANK_LEVELS:
            self.blank_seconds += duration

        if (
            self._rest_picture is None
            or np.abs(picture - self._rest_picture).max() > FROZEN_LEVELS
        ):
            self.rests.append(0.0)
            self._rest_picture = picture
        self.rests[-1] += duration

        if self._previous_picture is not None:
            self.changes.append(float(np.abs(picture - self._previous_picture).mean()))
        self._previous_picture = picture
        self._compare_details(index, picture)

        if index == 0:
            self.first_frame = frame
        if index == self._middle:
            self.middle_frame = frame
        self.last_frame = frame
        self.count = index + 1

    def _compare_details(self, index: int, picture: Picture) -> None:
        """Compare a picture with those shortly before it, for all boundaries between
        them.

        Boundary b lies before frame b. The pair (earlier, index) counts for every b between
        them that has both frames within ``frames_each_side``.
        """
        half_size = picture.reshape(SIDE // 2, 2, SIDE // 2, 2).mean((1, 3))
        details = fine_details(half_size)

        # As many frames as ``CUT_SECONDS`` have here, within bounds.
        first_recent = bisect_left(self._stamps, self._stamps[index] - CUT_SECONDS)
        frames_each_side = min(15, max(2, index - first_recent))
        self._recent_details = deque(
            [*self._recent_details, (index, details)], maxlen=2 * frames_each_side
        )

        for earlier_index, earlier_details in list(self._recent_details)[:-1]:
            pair_likeness = likeness(details, earlier_details)
            first_boundary = max(earlier_index + 1, index - frames_each_side + 1)
            last_boundary = min(index, earlier_index + frames_each_side)
            for boundary in range(first_boundary, last_boundary + 1):
                largest = self.likenesses.get(boundary, -1.0)
                self.likenesses[boundary] = max(largest, pair_likeness)

    def frozen_share(self) -> float:
        """Return the share of the seconds that belong to a freeze."""
        shortest_freeze = min(FROZEN_SECONDS, self.seconds) - 1e-6
        frozen_seconds = sum(
            seconds for seconds in self.rests if seconds >= shortest_freeze
        )
        return min(1.0, frozen_seconds / self.seconds)


def _jitter(stamps: Sequence[float]) -> float:
    """Return the share of intervals that differ from their median by more than 20 %."""
    gaps = [following - stamp for stamp, following in pairwise(stamps)]
    median_gap = median(gaps or [0.0])
    uneven_gaps = sum(abs(gap - median_gap) > 0.2 * median_gap for gap in gaps)
    return uneven_gaps / max(1, len(gaps))


def _reduce(
    reformatter: Any, frame: Any, pixel_format: str, **options: Any
) -> NDArray[np.uint8]:
    """Reduce a frame to SIDE × SIDE cells by averaging; one array for all planes."""
    reduced = reformatter.reformat(
        frame,
        SIDE,
        SIDE,
        pixel_format,
        interpolation=av_reformatter.Interpolation.AREA,
        threads=1,
        **options,
    )
    return np.asarray(reduced.to_ndarray())


def _signature(frame: Any, info: MediaInfo) -> str:
    """Return a frame's signature: 200 characters, base64 of one byte per cell.

    The cells are 10 × 10 of brightness, 5 × 5 of Cb and 5 × 5 of Cr, upright.
    """
    reduced = _reduce(
        av_reformatter.VideoReformatter(),
        frame,
        "yuv444p",
        dst_color_range=av_reformatter.ColorRange.JPEG,
    )
    planes = reduced.reshape(3, SIDE, SIDE)
    if info.mirrored:
        planes = planes[:, ::-1]
    planes = np.rot90(planes, info.rotation // 90, (1, 2))

    cells = []
    for plane, grid in zip(planes, (GRID, GRID // 2, GRID // 2), strict=True):
        side = SIDE // grid
        blocks = plane.reshape(grid, side, grid, side).astype(np.float32)
        cells.append(blocks.mean((1, 3)).ravel())
    levels = np.concatenate(cells).round().clip(0, 255).astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()
