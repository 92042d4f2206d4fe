"""A video file's facts, read from its container: no frame is decoded but the first, which alone tells the rotation."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .facts import MOST_PIXELS, REASONS, ClipProblem, Facts, seconds_of, shown_at
from .hdr import TRANSFERS
from .images import IMAGE_SUFFIXES, is_animated, probe_image

__all__ = [
    "IMAGE_SUFFIXES",
    "OPEN_OPTIONS",
    "REASONS",
    "VIDEO_SUFFIXES",
    "ClipProblem",
    "Facts",
    "limit_pixels",
    "probe",
    "shown_at",
    "stat_of",
    "video_stream",
]

VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".avi", ".webm", ".mkv", ".m4v", ".3gp"),
    *(".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".wmv", ".flv"),
)
"""What counts as a video in a dataset folder (compared in lower case)."""

OPEN_OPTIONS = {"format_whitelist": "mov,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif", "protocol_whitelist": "file"}
"""Only containers that hold the video themselves: a playlist renamed .mp4 must not make the reader open other files."""

_WOVEN = (2, 3, 4, 5)
"""FFmpeg's numbers of the field orders in which a frame is two fields; 1 is progressive."""


_HDR = {number: name for name, number in TRANSFERS.items()}


class _Row(NamedTuple):
    """A packet, that is one frame: pts and dts in ticks, duration in ticks, can decoding start here, is it shown."""

    pts: int | None
    dts: int | None
    duration: int
    key: bool
    shown: bool


@dataclass
class _Packets:
    """What the demuxer says, in decoding order, and the first frame decoded."""

    rows: list[_Row] = field(default_factory=list)
    first_frame: Any = None
    cut_short: bool = False


def probe(path: str | os.PathLike[str]) -> Facts:
    """Read the facts of a video or, by its suffix, of an image; raises ClipProblem, whatever is in the file."""
    import av

    file = Path(path)
    stat_of(file)
    head = _head(file)
    if file.suffix.lower() in IMAGE_SUFFIXES and not (head.startswith(b"GIF8") and is_animated(file)):
        return probe_image(file)
    try:
        # an absolute path, since "a:b.mp4" would be taken for a protocol
        with av.open(os.path.abspath(file), options=OPEN_OPTIONS, metadata_errors="replace") as container:
            return _read(str(path), container)
    except (av.FFmpegError, OSError, ValueError, ArithmeticError) as error:
        if not _has_video_magic(head):
            raise ClipProblem("not_a_video", "its bytes are no video container, whatever its name says") from error
        detail = getattr(error, "strerror", None) or str(error)
        raise ClipProblem("unreadable", f"the container is damaged or cut short ({detail})") from error


def stat_of(file: Path) -> os.stat_result:
    """The file's stat, without opening it; ClipProblem where it is not there, and for a pipe, a socket or a device, whose
    reader might wait for ever."""
    try:
        found = file.stat()
    except FileNotFoundError as error:
        detail = f"link to {os.readlink(file)}, which is missing" if file.is_symlink() else "there is no such file"
        raise ClipProblem("missing_file", detail) from error
    except OSError as error:
        raise ClipProblem("unreadable", error.strerror or str(error)) from error
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise ClipProblem("not_a_video", "is no regular file")
    return found


def _head(file: Path) -> bytes:
    """The first bytes; ClipProblem when there are none or they cannot be read."""
    try:
        with file.open("rb") as stream:
            head = stream.read(200)
    except OSError as error:
        raise ClipProblem("unreadable", error.strerror or str(error)) from error
    if not head:
        raise ClipProblem("empty", "the file has 0 bytes")
    return head


def _has_video_magic(head: bytes) -> bool:
    boxes = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
    starts = (b"\x1a\x45\xdf\xa3", b"FLV\x01", b"OggS", b"\x00\x00\x01\xba", b"\x30\x26\xb2\x75")
    avi = head[:4] == b"RIFF" and head[8:12] == b"AVI "
    # MPEG transport: each packet begins with a G, every 188 bytes, or every 192 with four bytes before it
    stream = head[0:189:188] == b"GG" or head[4:197:192] == b"GG"
    return head[4:8] in boxes or avi or stream or head.startswith(starts)


def _read(path: str, container: Any) -> Facts:
    """The facts of an opened container."""
    stream = video_stream(container)
    if stream.codec_context is None:
        raise ClipProblem("unreadable", "its codec has no decoder in this build of FFmpeg")
    limit_pixels(stream.codec_context)
    packets = _demux(container, stream)
    counted = "avi" in container.format.name.split(",") or any(row.pts is None for row in packets.rows)
    placed = _place(packets, stream, counted)
    ticks, time_base = placed.ticks, placed.time_base.as_integer_ratio()
    if len(ticks) < 2:
        raise ClipProblem("one_frame", f"it has {len(ticks)} frame; a video needs two")
    timestamps = seconds_of([tick - ticks[0] for tick in ticks], time_base)
    frame_seconds = _last_duration(timestamps, placed, stream)
    seconds = timestamps[-1] + frame_seconds
    _check_whole(packets, stream, container, float(ticks[0] * placed.time_base) + seconds)
    rotation, mirrored = _orientation(packets.first_frame)
    frame, context = packets.first_frame, stream.codec_context
    width, height = _shown_size(packets.first_frame, stream.sample_aspect_ratio, rotation)
    hdr = _HDR.get(int(frame.color_trc)) or _HDR.get(int(context.color_trc))
    if hdr is None and context.codec_tag.startswith(("dvh", "dva")):
        raise ClipProblem(
            "unreadable",
            "it is Dolby Vision whose colours no other player reads (profile 5): export it as HLG, HDR10 or SDR",
        )
    return Facts(
        path=path,
        codec=stream.codec_context.name,
        width=width,
        height=height,
        rotation=rotation,
        timestamps=timestamps,
        frame_seconds=frame_seconds,
        fps=len(ticks) / seconds,
        keyframes=placed.keyframes,
        container=container.format.name,
        mirrored=mirrored,
        counted=counted,
        first_tick=ticks[0],
        time_base=time_base,
        unusable=placed.unusable,
        interlaced=frame.interlaced_frame or context.field_order in _WOVEN,
        hdr=hdr,
        transparent=_is_transparent(frame, context.name) or stream.metadata.get("alpha_mode") == "1",
    )


def limit_pixels(codec_context: Any) -> None:
    """Have the decoder refuse frames beyond ``MOST_PIXELS``, before it is opened."""
    codec_context.options = {"max_pixels": str(MOST_PIXELS)}


def video_stream(container: Any) -> Any:
    """The stream that is the video: the first that is no cover picture; ClipProblem where there is none."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not int(stream.disposition) & int(Disposition.attached_pic):
            return stream
    kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "no stream at all"
    raise ClipProblem("no_video_stream", f"it holds {kinds}")


def _demux(container: Any, stream: Any) -> _Packets:
    """Walk over all packets, and decode until the first frame is there."""
    import av

    packets = _Packets()
    hides = stream.codec_context.codec.canonical_name == "vp8"  # the one codec whose hidden frames are own packets
    started = False
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                packets.cut_short = True
                continue
            at_end = packet.size == 0 and packet.dts is None
            if (
                packet.size == 0 and not at_end
            ):  # AVI's way to say "the same picture once more"; it would end the decoding
                continue
            started = started or packet.is_keyframe or at_end
            if started and packets.first_frame is None:
                packets.first_frame = next(iter(packet.decode()), None)
            if at_end:
                break
            shown = not packet.is_discard and not (hides and not bytes(packet)[0] & 0x10)
            packets.rows.append(_Row(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, shown))
    except av.FFmpegError as error:
        raise ClipProblem("decode_error", f"after {len(packets.rows)} frames: {error.strerror}") from error
    if packets.first_frame is None:
        raise ClipProblem("decode_error", "no frame of it can be decoded")
    return packets


class _Placed(NamedTuple):
    """Frames in order of presentation: their ticks, the tick's length, and what ``Facts`` says of them."""

    ticks: list[int]
    time_base: Fraction
    keyframes: tuple[int, ...]
    unusable: int
    last_duration: int


def _place(packets: _Packets, stream: Any, counted: bool) -> _Placed:
    """Sort the frames by presentation, without those that come before the first keyframe: nothing can decode them."""
    begin = next((i for i, row in enumerate(packets.rows) if row.key), 0)
    rows = packets.rows[begin:]
    time_base: Fraction = stream.time_base
    if counted and any(row.dts is None for row in rows):
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise ClipProblem("unreadable", "it has neither timestamps nor a frame rate")
        rows = [row._replace(dts=i, duration=1) for i, row in enumerate(rows)]
        time_base = 1 / rate
    # AVI numbers its packets in decoding order, whatever their pts say; the k-th number is the k-th frame's on screen
    timed = [(row, tick) for row in rows if (tick := row.dts if counted else row.pts) is not None]
    earliest = timed[0][1] if timed and timed[0][0].key else None
    usable = [(row, tick) for row, tick in timed if row.shown and (earliest is None or tick >= earliest)]
    ticks = sorted({tick for _, tick in usable})
    index = {tick: i for i, tick in enumerate(ticks)}
    return _Placed(
        ticks=ticks,
        time_base=time_base,
        keyframes=tuple(sorted({index[tick] for row, tick in usable if row.key})),
        unusable=sum(row.shown for row in packets.rows) - len(usable),
        last_duration=max((row.duration for row, tick in usable if tick == ticks[-1]), default=0),
    )


def _last_duration(timestamps: tuple[float, ...], placed: _Placed, stream: Any) -> float:
    """How long the last frame stays, in seconds.

    Where all timestamps are those of a constant rate but for the container's rounding, the clip plays frames / rate
    exactly: 60 frames at 24 fps are 2.5 s, not the 2.499 s of a Matroska file.
    """
    unit = float(placed.time_base)
    declared = placed.last_duration * unit
    for rate in (stream.guessed_rate, stream.average_rate):
        if not rate:
            continue
        even = all(abs(t - i / float(rate)) <= 1.01 * unit for i, t in enumerate(timestamps))
        if even and (declared == 0 or math.isclose(declared, 1 / rate, abs_tol=1.01 * unit)):
            return float(len(timestamps) / rate) - timestamps[-1]
    return declared or median(b - a for a, b in pairwise(timestamps))


def _check_whole(packets: _Packets, stream: Any, container: Any, end: float) -> None:
    """ClipProblem when the header promises more than the file holds; ``end`` is when the last frame ends."""
    formats = container.format.name.split(",")
    there, promised = len(packets.rows), 0
    if "mov" in formats:  # the index as the edit list leaves it; the header's count knows nothing of trimmed clips
        promised = len(stream.index_entries)
    elif "avi" in formats:  # its count includes the frames that are left out to keep time
        there = max((row.dts for row in packets.rows if row.dts is not None), default=there - 1) + 1
        promised = stream.frames
    if packets.cut_short or promised > there:
        of = f" of {promised}" if promised > there else ""
        raise ClipProblem("decode_error", f"the file is cut short: {there}{of} frames are there")
    alone = len(container.streams) == 1 and "matroska" in formats and container.duration
    if alone and end < 0.9 * container.duration / 1e6:
        detail = f"the file is cut short: {end:.2f} of {container.duration / 1e6:.2f} s are there"
        raise ClipProblem("decode_error", detail)


def _orientation(frame: Any) -> tuple[int, bool]:
    """The counter-clockwise turn in degrees, and whether a vertical flip comes before it (display matrix)."""
    import av
    import numpy as np

    kind = av.sidedata.sidedata.Type.DISPLAYMATRIX
    if kind not in frame.side_data:
        return 0, False
    a, b, _, c, d = np.frombuffer(bytes(frame.side_data[kind]), dtype=np.int32)[:5].astype(np.float64)
    return round(frame.rotation / 90) % 4 * 90, bool(a * d - b * c < 0)


def _is_transparent(frame: Any, codec: str) -> bool:
    """Whether the frame has an alpha channel; of a GIF, which always has one, whether a pixel is not opaque."""
    if codec == "gif":
        return bool(frame.to_ndarray()[..., 3].min() < 255)
    return any(part.is_alpha for part in frame.format.components)


def _shown_size(frame: Any, aspect: Fraction | None, rotation: int) -> tuple[int, int]:
    """Width and height as shown: pixels made square by stretching the width, then turned."""
    width, height = frame.width, frame.height
    if aspect and aspect > 0:
        width = max(1, round(width * aspect))
    return (height, width) if rotation in (90, 270) else (width, height)
