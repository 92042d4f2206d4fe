"""Media info: size, rotation, frame times and keyframes of a video or image, without
pixels.

``probe.py`` reads it from a file.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from videotune.data.file_checks import ClipProblem
from videotune.data.packed_integers import PackedIntegers, pack, unpack
from videotune.data.sound_info import SoundInfo
from videotune.files import REVALIDATED, Count, Number, checked

if TYPE_CHECKING:
    Integers = Sequence[int]
    Counts = Sequence[int]
else:  # ``checked`` reads these: JSON gives tuples, which ``from_json`` then packs
    Integers = tuple[int, ...]
    Counts = tuple[Count, ...]

MAX_FRAMES = 1 << 24
"""Most frames of a clip: 77 hours at 60 fps."""

EARLY_SHARE = 0.1
"""A time that falls this close before a frame shows that frame already
(``MediaInfo.frames_at``): at most this share of the frame before it.
"""

EARLY_SECONDS = EARLY_SHARE * 1001 / 24000
"""The most seconds before a frame that show it already, whatever it follows.

That is a tenth of a frame of film, so about a tenth of the time between two samples at
the rates of models, and above the rounding of containers (Matroska: 1 ms).
"""


@dataclass(frozen=True)
class MediaInfo:
    """Media info of a video or image file; for an image, one frame at 0 s."""

    __pydantic_config__ = REVALIDATED

    path: str
    codec: str

    width: Count
    height: Count
    """Size of the upright picture in square pixels."""

    ticks: Integers
    """Presentation time of each frame in units of ``time_base``, ascending."""

    frame_seconds: Number
    """Duration of the last frame; 0 for an image."""

    fps: Number
    """Average frame rate; 0 for an image."""

    keyframes: Counts
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
    """Displayed frames that nothing can decode, since they depend on a missing keyframe;
    no other field includes them."""

    still: bool = False
    """Whether the file is an image."""

    interlaced: bool = False
    """Whether the file declares that each frame consists of two fields."""

    hdr: Literal["PQ", "HLG"] | None = None
    """The first frame's transfer if it is one of BT.2100: decoding tone-maps its
    frames."""

    gamut: Literal["BT.2020", "P3"] | None = None
    """The primaries of an SDR clip if they exceed BT.709: decoding converts its
    frames."""

    unconverted: str = ""
    """What the file declares of its colours that a player converts and decoding does not;
    empty if there is nothing."""

    transparent: bool = False
    """Whether an image has a pixel that is not opaque, or a video an alpha channel."""

    restarts: Count = 0
    """How often the clock of the stream starts anew, since parts were joined byte by
    byte (see ``clock.StreamClock``)."""

    crop: tuple[Count, Count, Count, Count] = (0, 0, 0, 0)
    """Pixels that the container hides at the left, right, top and bottom of a decoded
    frame."""

    stereo: bool = False
    """Whether each frame has a picture for each eye."""

    spherical: bool = False
    """Whether the picture is a projection of all directions."""

    video_streams: Count = 1
    """Video streams of the file, of which this is one."""

    unread: Number = 0.0
    """Share of the file that follows its last packet: probably another file."""

    form_changes_at: Number | None = None
    """Second at which ``ended_at`` has ended the clip, because from there on its frames have
    another aspect ratio, or HDR begins or ends. None: it has its whole length. A change of
    the rotation flag alone does not count. In JSON it is "turned_at".
    """

    sound: SoundInfo | None = None
    """Its sound track; None if it has none that can be used."""

    unusable_sound: str = ""
    """Why its sound track cannot be used, if it has one."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the names of the fields, which take more bytes than their values.
        names = self.__dataclass_fields__
        return _restore_media_info, tuple(getattr(self, name) for name in names)

    @cached_property
    def timestamps(self) -> tuple[float, ...]:
        """Presentation time of each frame in seconds, counted from the first one."""
        numerator, denominator = self.time_base
        first = self.ticks[0]
        return tuple((tick - first) * numerator / denominator for tick in self.ticks)

    @property
    def colours(self) -> str | None:
        """What decoding converts to SDR of BT.709; None if nothing."""
        return self.hdr or self.gamut

    @property
    def seekable(self) -> bool:
        """Whether decoding may begin at any keyframe."""
        return not self.counted and not self.restarts

    @property
    def seconds(self) -> float:
        """Duration of the clip."""
        numerator, denominator = self.time_base
        last = (self.ticks[-1] - self.ticks[0]) * numerator / denominator
        return last + self.frame_seconds

    def release(self) -> None:
        """Free what is computed again when it is needed."""
        self.__dict__.pop("timestamps", None)

    def frames_at(self, times: Iterable[float]) -> list[int]:
        """Return for each time the index of the frame on display: the latest that has
        begun.

        A frame that begins up to a tenth of its predecessor's duration later, and at
        most ``EARLY_SECONDS``, counts as begun: containers round their timestamps
        (Matroska to 1 ms), and sampling a 24 fps file at 24 fps must give each frame
        once. An image is on display at any time.

        Args:
            times: seconds of the clip, in any order.

        Raises:
            ClipProblem: "decode_error" for a time outside the clip.
        """
        if self.still:
            return [0 for _ in times]
        return [self._frame_at(time) for time in times]

    def frame_indices(self, times: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return what ``frames_at`` does, as an array (T,) for times (T,)."""
        if self.still:
            return np.zeros(len(times), np.intp)
        outside = (times < -1e-6) | (times > self.seconds + 1e-6)
        if outside.any():
            self._frame_at(float(times[outside][0]))  # raises

        stamps = np.array(self.timestamps)
        indices = np.searchsorted(stamps, times + 1e-6, side="right") - 1
        indices = np.maximum(indices, 0)
        following = np.minimum(indices + 1, len(stamps) - 1)
        duration = stamps[following] - stamps[indices]
        tolerance = np.minimum(EARLY_SHARE * duration, EARLY_SECONDS)
        is_early = stamps[following] - times <= tolerance
        return np.where(is_early, following, indices)

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

        # A frame after a long hold must not be taken a tenth of that hold early: hence
        # the second limit.
        duration = stamps[index + 1] - stamps[index]
        tolerance = min(EARLY_SHARE * duration, EARLY_SECONDS)
        if stamps[index + 1] - time <= tolerance:
            return index + 1
        return index

    def ended_at(self, seconds: float) -> "MediaInfo":
        """Return the part of the clip before a frame that begins at ``seconds``.

        Raises:
            ClipProblem: "one_frame" if that is not a video.
        """
        count = bisect_left(self.timestamps, seconds - 1e-9)
        if count < 2:
            raise ClipProblem(
                "one_frame",
                f"its pictures have another shape or other colours from {seconds:.2f} s on, and before "
                f"it has {count} frame; a video needs at least two",
            )

        end = self.timestamps[count]
        return replace(
            self,
            ticks=self.ticks[:count],
            keyframes=tuple(index for index in self.keyframes if index < count),
            frame_seconds=end - self.timestamps[count - 1],
            fps=count / end,
            form_changes_at=seconds,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which ``from_json`` restores an equal one.

        Ticks and keyframes are run-length encoded.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["ticks"] = pack(self.ticks)
        fields["keyframes"] = pack(self.keyframes)
        fields["time_base"] = list(self.time_base)
        fields["crop"] = list(self.crop)
        fields["sound"] = None if self.sound is None else vars(self.sound)
        fields["turned_at"] = fields.pop("form_changes_at")
        return fields

    @staticmethod
    def from_json(value: dict[str, Any]) -> "MediaInfo":
        """Restore what ``to_json`` wrote, with all values checked.

        The index of a dataset, which is untrusted, is read by this too.

        Raises:
            KeyError, TypeError, ValueError: if the value is anything else.
        """
        fields = dict(value)
        fields["ticks"] = tuple(unpack(value["ticks"], MAX_FRAMES))
        fields["keyframes"] = tuple(unpack(value["keyframes"], MAX_FRAMES))
        fields["time_base"] = tuple(value["time_base"])
        fields["crop"] = tuple(value["crop"])
        # An index of an earlier version has no sound.
        sound = value.get("sound")
        fields["sound"] = None if sound is None else SoundInfo(**sound)
        fields["form_changes_at"] = fields.pop("turned_at", None)
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
        # A data set has millions of them.
        for name in ("ticks", "keyframes"):
            packed = PackedIntegers(value[name], getattr(info, name))
            object.__setattr__(info, name, packed)
        return info


def _restore_media_info(*values: Any) -> MediaInfo:
    """Return media info that was pickled."""
    return MediaInfo(*values)
