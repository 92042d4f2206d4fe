"""What a video or image file is without its pixels, read from its container.

No frame is decoded but the first, which alone tells the rotation.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from videotune.data.file_checks import MAX_PIXELS, ClipProblem, head_of, stat_of, type_of
from videotune.data.images import IMAGE_SUFFIXES, is_animated, read_image
from videotune.files import REVALIDATED, Count, Number, checked
from videotune.lazy import av

VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".avi", ".webm", ".mkv", ".m4v", ".3gp"),
    *(".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".wmv", ".flv"),
)
"""What counts as a video in a dataset folder (compared in lower case)."""

OPEN_OPTIONS = {
    "format_whitelist": "mov,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif",
    "protocol_whitelist": "file",
}
"""Only containers that hold the video themselves: a playlist renamed .mp4 must not make the reader open other files."""

MAX_FRAMES = 1 << 24
"""The most that a clip may have: 77 hours at 60 frames a second."""

HDR_TRANSFERS = {"PQ": 16, "HLG": 18}
"""FFmpeg's numbers of the transfers: SMPTE ST 2084 and ARIB STD-B67, both of BT.2100."""

_INTERLACED = (2, 3, 4, 5)
"""FFmpeg's numbers of the field orders in which a frame is two fields; 1 is progressive."""


@dataclass(frozen=True)
class MediaInfo:
    """What a video file is, without its pixels.

    ``width`` and ``height`` are those of the upright picture in square pixels. ``rotation`` is the counter-clockwise
    turn, in degrees (0, 90, 180, 270), that makes a decoded frame upright, after a vertical flip where ``mirrored``.
    ``ticks`` are the frames' presentation times in units of ``time_base``, ascending; ``frame_seconds`` is the last
    frame's duration; ``fps`` the average rate; ``keyframes`` indices of frames at which decoding can start.

    ``counted`` files (AVI, and streams without pts) have no times to find a frame by: their frames are matched by
    counting. ``unusable`` frames precede the first keyframe; nothing can decode them, and no other field counts them.
    ``still``: an image, one frame at 0 s that lasts no time, fps 0. ``interlaced``: its frames are declared to be two
    fields. ``hdr`` is "PQ" or "HLG" where the first frame declares that transfer: its frames are tone-mapped when they
    are decoded. ``transparent``: an image with a pixel that is not opaque, a video whose pixels have an alpha channel.
    """

    __pydantic_config__ = REVALIDATED
    path: str
    codec: str
    width: Count
    height: Count
    ticks: tuple[int, ...]
    frame_seconds: Number
    fps: Number
    keyframes: tuple[Count, ...]
    container: str
    time_base: tuple[int, int] = (1, 1_000_000)
    rotation: int = 0
    mirrored: bool = False
    counted: bool = False
    unusable: Count = 0
    still: bool = False
    interlaced: bool = False
    hdr: str | None = None
    transparent: bool = False

    @cached_property
    def timestamps(self) -> tuple[float, ...]:
        """Presentation time of each frame in seconds, counted from the first one."""
        numerator, denominator = self.time_base
        return tuple((tick - self.ticks[0]) * numerator / denominator for tick in self.ticks)

    @property
    def seconds(self) -> float:
        """How long the clip plays."""
        return self.timestamps[-1] + self.frame_seconds

    def frames_at(self, times: Iterable[float]) -> list[int]:
        """For each time (seconds of the clip) the index of the frame on display: the latest that has begun.

        A frame that begins less than a tenth of its predecessor's duration later counts as begun: containers round
        their timestamps (Matroska to 1 ms), and 24 fps asked of a 24 fps file must give each frame once. An image is on
        display at any time. ClipProblem (decode_error) for a time outside the clip.
        """
        if self.still:
            return [0 for _ in times]
        stamps = self.timestamps
        indices = []
        for time in times:
            if not -1e-6 <= time <= self.seconds + 1e-6:
                detail = f"{time:.3f} s lies outside the clip, which plays {self.seconds:.3f} s"
                raise ClipProblem("decode_error", detail)
            index = max(bisect_right(stamps, time + 1e-6) - 1, 0)
            if index + 1 < len(stamps) and stamps[index + 1] - time <= 0.1 * (
                stamps[index + 1] - stamps[index]
            ):
                index += 1
            indices.append(index)
        return indices

    def to_json(self) -> dict[str, Any]:
        """JSON-like, with ticks and keyframes as run-length encoded steps; ``from_json`` gives an equal object back."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        packed = {"ticks": _pack(self.ticks), "keyframes": _pack(self.keyframes)}
        return fields | packed | {"time_base": list(self.time_base)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "MediaInfo":
        """What ``to_json`` wrote; KeyError, TypeError or ValueError where the value is something else.

        A dataset's own index, which is untrusted, is read by this too.
        """
        lists = {
            "ticks": tuple(_unpack(value["ticks"])),
            "keyframes": tuple(_unpack(value["keyframes"])),
        }
        info: MediaInfo = checked(
            MediaInfo, MediaInfo(**(value | lists | {"time_base": tuple(value["time_base"])}))
        )
        ascend = info.ticks and all(a < b for a, b in pairwise(info.ticks))
        positive = min(info.width, info.height, *info.time_base) > 0
        if not (
            ascend
            and positive
            and math.isfinite(info.seconds)
            and info.rotation in (0, 90, 180, 270)
        ):
            raise ValueError("no clip is like that")
        return info


def _pack(values: Sequence[int]) -> str:
    """Ascending integers as the first and the run-length encoded steps: 0 1001 2002 3003 -> "0 1001x3"."""
    steps = [
        (step, len(list(group))) for step, group in groupby(b - a for a, b in pairwise(values))
    ]
    return " ".join(
        [*map(str, values[:1]), *(f"{step}x{n}" if n > 1 else f"{step}" for step, n in steps)]
    )


def _unpack(text: str) -> list[int]:
    values: list[int] = []
    for word in text.split():
        step, _, repeats = word.partition("x")
        if len(values) + int(repeats or 1) > MAX_FRAMES:
            raise ValueError(f"more than {MAX_FRAMES} frames")
        values += [int(step)] * int(repeats or 1)
    return list(accumulate(values))


def probe(path: str | os.PathLike[str]) -> MediaInfo:
    """Read the media info of a video or, by its suffix, of an image; raises ClipProblem, whatever is in the file."""
    file = Path(path)
    stat_of(file)
    head = head_of(file)
    if file.suffix.lower() in IMAGE_SUFFIXES and not (
        head.startswith(b"GIF8") and is_animated(file)
    ):
        return probe_image(file)
    try:
        # an absolute path, since "a:b.mp4" would be taken for a protocol
        with av.open(
            os.path.abspath(file), options=OPEN_OPTIONS, metadata_errors="replace"
        ) as container:
            return _read(str(path), container)
    except (av.FFmpegError, OSError, ValueError, ArithmeticError) as error:
        if type_of(head) != "video":
            what = "its bytes are not those of a video file, whatever its name says"
            raise ClipProblem("not_a_video", what) from error
        detail = getattr(error, "strerror", None) or str(error)
        raise ClipProblem(
            "unreadable", f"the container is damaged or cut short ({detail})"
        ) from error


def probe_image(path: str | os.PathLike[str]) -> MediaInfo:
    """Read an image's media info; all of it is decoded once, so that a file cut short is found. Raises ClipProblem."""
    pixels, codec, transparent = read_image(Path(path))
    height, width = pixels.shape[:2]
    return MediaInfo(
        str(path),
        codec,
        width,
        height,
        (0,),
        0.0,
        0.0,
        (0,),
        container="image",
        still=True,
        transparent=transparent,
    )


def _read(path: str, container: Any) -> MediaInfo:
    """The media info of an opened container."""
    stream = video_stream(container)
    context = stream.codec_context
    if context is None:
        raise ClipProblem("unreadable", "its codec has no decoder in this build of FFmpeg")
    limit_pixels(context)
    packets, frame, cut_short = _demux(container, stream)
    counted = "avi" in container.format.name.split(",") or any(
        packet.pts is None for packet in packets
    )
    ticks, time_base, keyframes, unusable, last_duration = _presentation_order(
        packets, stream, counted
    )
    if len(ticks) < 2:
        raise ClipProblem("one_frame", f"it has {len(ticks)} frame; a video needs two")
    numerator, denominator = time_base.as_integer_ratio()
    timestamps = [(tick - ticks[0]) * numerator / denominator for tick in ticks]
    frame_seconds = _last_duration(
        timestamps, last_duration * float(time_base), float(time_base), stream
    )
    seconds = timestamps[-1] + frame_seconds
    _check_whole(packets, cut_short, stream, container, float(ticks[0] * time_base) + seconds)
    rotation, mirrored = _orientation(frame)
    width = max(1, round(frame.width * (stream.sample_aspect_ratio or 1)))
    height = frame.height
    transfers = {number: name for name, number in HDR_TRANSFERS.items()}
    hdr = transfers.get(int(frame.color_trc)) or transfers.get(int(context.color_trc))
    if hdr is None and context.codec_tag.startswith(("dvh", "dva")):
        raise ClipProblem(
            "unreadable", "it is Dolby Vision profile 5: export it as HLG, HDR10 or SDR"
        )
    return MediaInfo(
        path=path,
        codec=context.name,
        width=height if rotation % 180 else width,
        height=width if rotation % 180 else height,
        rotation=rotation,
        ticks=tuple(ticks),
        frame_seconds=frame_seconds,
        fps=len(ticks) / seconds,
        keyframes=keyframes,
        container=container.format.name,
        mirrored=mirrored,
        counted=counted,
        time_base=(numerator, denominator),
        unusable=unusable,
        interlaced=frame.interlaced_frame or context.field_order in _INTERLACED,
        hdr=hdr,
        transparent=_is_transparent(frame, context.name)
        or stream.metadata.get("alpha_mode") == "1",
    )


def limit_pixels(codec_context: Any) -> None:
    """Have the decoder refuse frames beyond ``MAX_PIXELS``, before it is opened."""
    codec_context.options = {"max_pixels": str(MAX_PIXELS)}


def video_stream(container: Any) -> Any:
    """The stream that is the video: the first that is no cover picture; ClipProblem where there is none."""
    for stream in container.streams.video:
        if not int(stream.disposition) & int(av.stream.Disposition.attached_pic):
            return stream
    kinds = (
        ", ".join(sorted({stream.type for stream in container.streams})) or "no stream at all"
    )
    raise ClipProblem("no_video_stream", f"it holds {kinds}")


class _Packet(NamedTuple):
    """One frame as the demuxer has it: pts, dts and duration in ticks; decoding can start here; it is displayed."""

    pts: int | None
    dts: int | None
    duration: int
    keyframe: bool
    displayed: bool


def _demux(container: Any, stream: Any) -> tuple[list[_Packet], Any, bool]:
    """All packets in decoding order, the first frame decoded, and whether one was cut short."""
    packets: list[_Packet] = []
    first_frame = None
    cut_short = False
    started = False
    hides = (
        stream.codec_context.codec.canonical_name == "vp8"
    )  # the one codec whose hidden frames are own packets
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                cut_short = True
                continue
            at_end = packet.size == 0 and packet.dts is None
            if (
                packet.size == 0 and not at_end
            ):  # AVI repeats a picture so; decoding it would end the decoder
                continue
            started = started or packet.is_keyframe or at_end
            if started and first_frame is None:
                first_frame = next(iter(packet.decode()), None)
            if at_end:
                break
            displayed = not packet.is_discard and not (hides and not bytes(packet)[0] & 0x10)
            packets.append(
                _Packet(
                    packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, displayed
                )
            )
    except av.FFmpegError as error:
        raise ClipProblem(
            "decode_error", f"after {len(packets)} frames: {error.strerror}"
        ) from error
    if first_frame is None:
        raise ClipProblem("decode_error", "no frame of it can be decoded")
    return packets, first_frame, cut_short


def _presentation_order(
    packets: Sequence[_Packet], stream: Any, counted: bool
) -> tuple[list[int], Fraction, tuple[int, ...], int, int]:
    """Sort the frames by presentation, without those that come before the first keyframe: nothing can decode them.

    Their ticks, the tick's length, the indices of keyframes, how many frames are unusable, and the last one's duration.
    """
    rows = packets[next((i for i, row in enumerate(packets) if row.keyframe), 0) :]
    time_base: Fraction = stream.time_base
    if counted and any(row.dts is None for row in rows):
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise ClipProblem("unreadable", "it has neither timestamps nor a frame rate")
        rows = [row._replace(dts=i, duration=1) for i, row in enumerate(rows)]
        time_base = 1 / rate
    # AVI numbers its packets in decoding order, whatever their pts say; the k-th number is the k-th displayed frame's
    timed = [
        (row, tick) for row in rows if (tick := row.dts if counted else row.pts) is not None
    ]
    earliest = timed[0][1] if timed and timed[0][0].keyframe else None
    usable = [
        (row, tick)
        for row, tick in timed
        if row.displayed and (earliest is None or tick >= earliest)
    ]
    ticks = sorted({tick for _, tick in usable})
    index = {tick: i for i, tick in enumerate(ticks)}
    keyframes = tuple(sorted({index[tick] for row, tick in usable if row.keyframe}))
    last_duration = max((row.duration for row, tick in usable if tick == ticks[-1]), default=0)
    return (
        ticks,
        time_base,
        keyframes,
        sum(row.displayed for row in packets) - len(usable),
        last_duration,
    )


def _last_duration(
    timestamps: Sequence[float], declared: float, unit: float, stream: Any
) -> float:
    """How long the last frame stays, in seconds; ``declared`` by its packet, and ``unit`` a tick.

    Where all timestamps are those of a constant rate but for the container's rounding, the clip plays frames / rate
    exactly: 60 frames at 24 fps are 2.5 s, not the 2.499 s of a Matroska file.
    """
    for rate in filter(None, (stream.guessed_rate, stream.average_rate)):
        even = all(abs(t - i / float(rate)) <= 1.01 * unit for i, t in enumerate(timestamps))
        if even and (declared == 0 or math.isclose(declared, 1 / rate, abs_tol=1.01 * unit)):
            return float(len(timestamps) / rate) - timestamps[-1]
    return declared or median(b - a for a, b in pairwise(timestamps))


def _check_whole(
    packets: Sequence[_Packet], cut_short: bool, stream: Any, container: Any, end: float
) -> None:
    """ClipProblem when the header promises more than the file holds; ``end`` is when the last frame ends."""
    formats = container.format.name.split(",")
    there = len(packets)
    promised = 0
    if (
        "mov" in formats
    ):  # the index as the edit list leaves it; the header's count knows nothing of trimmed clips
        promised = len(stream.index_entries)
    elif "avi" in formats:  # its count includes the frames that are left out to keep time
        there = max((row.dts for row in packets if row.dts is not None), default=there - 1) + 1
        promised = stream.frames
    if cut_short or promised > there:
        of = f" of {promised}" if promised > there else ""
        raise ClipProblem(
            "decode_error", f"the file is cut short: {there}{of} frames are there"
        )
    alone = len(container.streams) == 1 and "matroska" in formats and container.duration
    if alone and end < 0.9 * container.duration / 1e6:
        detail = (
            f"the file is cut short: {end:.2f} of {container.duration / 1e6:.2f} s are there"
        )
        raise ClipProblem("decode_error", detail)


def _orientation(frame: Any) -> tuple[int, bool]:
    """The counter-clockwise turn in degrees, and whether a vertical flip comes before it (display matrix)."""
    kind = av.sidedata.sidedata.Type.DISPLAYMATRIX
    if kind not in frame.side_data:
        return 0, False
    a, b, _, c, d = np.frombuffer(bytes(frame.side_data[kind]), dtype=np.int32)[:5].astype(
        np.float64
    )
    return round(frame.rotation / 90) % 4 * 90, bool(a * d - b * c < 0)


def _is_transparent(frame: Any, codec: str) -> bool:
    """Whether the frame has an alpha channel; of a GIF, which always has one, whether a pixel is not opaque."""
    if codec == "gif":
        return bool(frame.to_ndarray()[..., 3].min() < 255)
    return any(part.is_alpha for part in frame.format.components)
