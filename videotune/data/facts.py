"""What is known of a video file without its pixels, and the ways in which a clip can fail."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from videotune.files import REVALIDATED, Count, Number, checked

REASONS = (
    "unreadable",
    "empty",
    "not_a_video",
    "no_video_stream",
    "one_frame",
    "decode_error",
    "too_short",
    "missing_caption",
    "empty_caption",
    "undecodable_caption",
    "duplicate",
    "missing_file",
)
"""Why a clip can be left out: the codes that the account of a dataset uses."""

MOST_PIXELS = 1 << 27
"""The most that one picture may have: 134 million, four frames of 8K. Damaged headers and bombs promise more."""


MOST_FRAMES = 1 << 24
"""The most that a clip may have: 77 hours at 60 frames a second."""


class ClipProblem(Exception):
    """One clip cannot be used: ``reason`` is one of ``REASONS``, ``detail`` says it for the person."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Facts:
    """What a video file is, without its pixels.

    ``width`` and ``height`` are as shown: upright, in square pixels. ``rotation`` is the counter-clockwise turn, in
    degrees (0, 90, 180, 270), that makes a decoded frame upright, after a vertical flip where ``mirrored``.
    ``timestamps`` are presentation seconds from the first frame on, ascending; ``frame_seconds`` is the last frame's
    duration; ``fps`` the average rate; ``keyframes`` indices of frames at which decoding can start.

    ``first_tick`` and ``time_base`` give a frame's pts back: first_tick + timestamp / time_base. ``counted`` files (AVI,
    and streams without pts) have none to go by: their frames are matched by counting. ``unusable`` frames stand before
    the first keyframe; nothing can decode them, and no other field counts them. ``still``: an image, one frame at 0 s
    that lasts no time, fps 0. ``interlaced``: its frames are declared to be two fields. ``hdr`` is "PQ" or "HLG" where the
    first frame declares that transfer: its frames are tone-mapped when they are decoded. ``transparent``: an image
    with a pixel that is not opaque, a video whose pixels have an alpha channel.
    """

    __pydantic_config__ = REVALIDATED
    path: str
    codec: str
    width: Count
    height: Count
    rotation: int
    timestamps: tuple[Number, ...]
    frame_seconds: Number
    fps: Number
    keyframes: tuple[Count, ...]
    container: str
    mirrored: bool = False
    counted: bool = False
    first_tick: int = 0
    time_base: tuple[int, int] = (1, 1_000_000)
    unusable: Count = 0
    still: bool = False
    interlaced: bool = False
    hdr: str | None = None
    transparent: bool = False

    @property
    def seconds(self) -> float:
        """How long the clip plays."""
        return self.timestamps[-1] + self.frame_seconds

    def tick(self, index: int) -> int:
        """Frame ``index``'s pts in units of the time base."""
        numerator, denominator = self.time_base
        return self.first_tick + round(self.timestamps[index] * denominator / numerator)

    def to_json(self) -> dict[str, Any]:
        """JSON-like, with timestamps as run-length encoded differences of ticks; ``from_json`` gives equal facts back."""
        numbers = {k: v for k, v in vars(self).items() if k not in ("timestamps", "keyframes", "time_base")}
        ticks = [self.tick(i) - self.first_tick for i in range(len(self.timestamps))]
        times: Any = _pack(ticks)
        if seconds_of(ticks, self.time_base) != self.timestamps:  # facts made by hand, not on a grid
            times = list(self.timestamps)
        return numbers | {"timestamps": times, "keyframes": _pack(self.keyframes), "time_base": list(self.time_base)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Facts:
        """The facts that ``to_json`` wrote; KeyError, TypeError or ValueError where the value is something else.

        What a dataset's own index says is read by this too.
        """
        numerator, denominator = value["time_base"]
        times = value["timestamps"]
        timestamps = (
            seconds_of(_unpack(times), (numerator, denominator)) if isinstance(times, str) else tuple(map(float, times))
        )
        keyframes = tuple(_unpack(value["keyframes"]))
        exact = {"timestamps": timestamps, "keyframes": keyframes, "time_base": (numerator, denominator)}
        facts: Facts = checked(Facts, Facts(**(value | exact)))
        ascend = timestamps[:1] == (0.0,) and all(a < b for a, b in pairwise(timestamps))
        positive = min(facts.width, facts.height, *facts.time_base) > 0
        if not (ascend and positive and facts.rotation in (0, 90, 180, 270)):
            raise ValueError("no clip is like that")
        return facts


def seconds_of(ticks: Sequence[int], time_base: tuple[int, int]) -> tuple[float, ...]:
    """Ticks of numerator / denominator seconds each, in seconds."""
    return tuple(tick * time_base[0] / time_base[1] for tick in ticks)


def _pack(values: Sequence[int]) -> str:
    """Ascending integers as the first and the run-length encoded steps: 0 1001 2002 3003 -> "0 1001x3"."""
    steps = [b - a for a, b in pairwise(values)]
    runs = [(step, len(list(group))) for step, group in groupby(steps)]
    return " ".join([*map(str, values[:1]), *(f"{step}x{n}" if n > 1 else f"{step}" for step, n in runs)])


def _unpack(text: str) -> list[int]:
    values: list[int] = []
    for word in text.split():
        step, _, repeats = word.partition("x")
        if len(values) + int(repeats or 1) > MOST_FRAMES:
            raise ValueError(f"more than {MOST_FRAMES} frames")
        for _ in range(int(repeats or 1)):
            values.append(int(step) + (values[-1] if values else 0))
    return values


def shown_at(facts: Facts, times: Iterable[float]) -> list[int]:
    """For each time (seconds of the clip) the index of the frame on the screen: the latest that has begun.

    A frame that begins less than a tenth of its predecessor's duration later counts as begun: containers round their
    timestamps (Matroska to 1 ms), and 24 fps asked of a 24 fps file must give each frame once. An image is on the screen
    at any time. ClipProblem (decode_error) for a time outside the clip.
    """
    if facts.still:
        return [0 for _ in times]
    stamps = facts.timestamps
    indices = []
    for time in times:
        if not -1e-6 <= time <= facts.seconds + 1e-6:
            raise ClipProblem("decode_error", f"{time:.3f} s lies outside the clip, which plays {facts.seconds:.3f} s")
        index = max(bisect_right(stamps, time + 1e-6) - 1, 0)
        if index + 1 < len(stamps) and stamps[index + 1] - time <= 0.1 * (stamps[index + 1] - stamps[index]):
            index += 1
        indices.append(index)
    return indices
