"""Media info: size, rotation, frame times and keyframes of a video or image, without
pixels.

``probe.py`` reads it from a file.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

from videotune.data.file_checks import ClipProblem
from videotune.files import REVALIDATED, Count, Number, checked

MAX_FRAMES = 1 << 24
"""Most frames of a clip: 77 hours at 60 fps."""


@dataclass(frozen=True)
class MediaInfo:
    """Media info of a video or image file; for an image, one frame at 0 s."""

    __pydantic_config__ = REVALIDATED

    path: str
    codec: str

    width: Count
    height: Count
    """Size of the upright picture in square pixels."""

    ticks: tuple[int, ...]
    """Presentation time of each frame in units of ``time_base``, ascending."""

    frame_seconds: Number
    """Duration of the last frame; 0 for an image."""

    fps: Number
    """Average frame rate; 0 for an image."""

    keyframes: tuple[Count, ...]
    """Indices of frames at which decoding can start."""

    container: str
    time_base: tuple[int, int] = (1, 1_000_000)
    """Length of a tick in seconds, as numerator and denominator."""

    rotation: int = 0
    """Counter-clockwise turn in degrees (0, 90, 180, 270) that makes a decoded frame
    upright."""

    mirrored: bool = False
    """Whether a vertical flip comes before the rotation."""

    counted: bool = False
    """Whether frames must be found by counting, since the file has no presentation
    times (AVI, and streams without pts).
    """

    unusable: Count = 0
    """Frames before the first keyframe. They cannot be decoded; no other field includes
    them."""

    still: bool = False
    """Whether the file is an image."""

    interlaced: bool = False
    """Whether the file declares that each frame consists of two fields."""

    hdr: str | None = None
    """"PQ" or "HLG" if the first frame declares that transfer: decoding tone-maps its
    frames."""

    transparent: bool = False
    """Whether an image has a pixel that is not opaque, or a video an alpha channel."""

    @cached_property
    def timestamps(self) -> tuple[float, ...]:
        """Presentation time of each frame in seconds, counted from the first one."""
        numerator, denominator = self.time_base
        return tuple(
            (tick - self.ticks[0]) * numerator / denominator for tick in self.ticks
        )

    @property
    def seconds(self) -> float:
        """Duration of the clip."""
        return self.timestamps[-1] + self.frame_seconds

    def frames_at(self, times: Iterable[float]) -> list[int]:
        """Return for each time the index of the frame on display: the latest that has
        begun.

        A frame that begins up to a tenth of its predecessor's duration later counts as
        begun: containers round their timestamps (Matroska to 1 ms), and sampling a 24
        fps file at 24 fps must give each frame once. An image is on display at any
        time.

        Args:
            times: seconds of the clip, in any order.

        Raises:
            ClipProblem: "decode_error" for a time outside the clip.
        """
        if self.still:
            return [0 for _ in times]
        return [self._frame_at(time) for time in times]

    def _frame_at(self, time: float) -> int:
        if not -1e-6 <= time <= self.seconds + 1e-6:
            detail = (
                f"{time:.3f} s is outside the clip, which lasts {self.seconds:.3f} s"
            )
            raise ClipProblem("decode_error", detail)

        stamps = self.timestamps
        index = max(bisect_right(stamps, time + 1e-6) - 1, 0)
        if index + 1 == len(stamps):
            return index

        tolerance = 0.1 * (stamps[index + 1] - stamps[index])
        if stamps[index + 1] - time <= tolerance:
            return index + 1
        return index

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which ``from_json`` restores an equal one.

        Ticks and keyframes are run-length encoded.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["ticks"] = _pack(self.ticks)
        fields["keyframes"] = _pack(self.keyframes)
        fields["time_base"] = list(self.time_base)
        return fields

    @staticmethod
    def from_json(value: dict[str, Any]) -> "MediaInfo":
        """Restore what ``to_json`` wrote, with all values checked.

        The index of a dataset, which is untrusted, is read by this too.

        Raises:
            KeyError, TypeError, ValueError: if the value is anything else.
        """
        fields = dict(value)
        fields["ticks"] = tuple(_unpack(value["ticks"]))
        fields["keyframes"] = tuple(_unpack(value["keyframes"]))
        fields["time_base"] = tuple(value["time_base"])
        info: MediaInfo = checked(MediaInfo, MediaInfo(**fields))

        is_ascending = bool(info.ticks) and all(a < b for a, b in pairwise(info.ticks))
        is_positive = min(info.width, info.height, *info.time_base) > 0
        # The duration is defined only for a clip that passed the first two checks.
        if not (is_ascending and is_positive and math.isfinite(info.seconds)):
            raise ValueError(
                "the media info has an impossible size or impossible frame times"
            )
        if info.rotation not in (0, 90, 180, 270):
            raise ValueError(
                f"the media info has an impossible rotation: {info.rotation}"
            )
        return info


def _pack(values: Sequence[int]) -> str:
    """Encode ascending integers as the first one and their steps: 0 1001 2002 -> "0
    1001x2".
    """
    parts = [str(value) for value in values[:1]]
    steps = (following - value for value, following in pairwise(values))
    for step, group in groupby(steps):
        repeats = len(list(group))
        parts.append(f"{step}x{repeats}" if repeats > 1 else f"{step}")
    return " ".join(parts)


def _unpack(text: str) -> list[int]:
    """Decode what ``_pack`` wrote."""
    steps: list[int] = []
    for part in text.split():
        step, _, repeats_text = part.partition("x")
        repeats = int(repeats_text or 1)
        if len(steps) + repeats > MAX_FRAMES:
            raise ValueError(f"more than {MAX_FRAMES} frames")
        steps += [int(step)] * repeats
    return list(accumulate(steps))
