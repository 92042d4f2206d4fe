"""Read the media info of a video or image file from its container.

Of a video only the first frame is decoded, since only a frame has the rotation.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from videotune.data.file_checks import (
    MAX_PIXELS,
    ClipProblem,
    head_of,
    stat_of,
    type_of,
)
from videotune.data.images import IMAGE_SUFFIXES, is_animated, read_image
from videotune.data.media_info import MediaInfo
from videotune.lazy import av

VIDEO_SUFFIXES = (
    ".mp4",
    ".mov",
    ".avi",
    ".webm",
    ".mkv",
    ".m4v",
    ".3gp",
    ".mpg",
    ".mpeg",
    ".ts",
    ".mts",
    ".m2ts",
    ".wmv",
    ".flv",
)
"""Suffixes of videos in a dataset folder, in lower case."""

OPEN_OPTIONS = {
    "format_whitelist": "mov,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif",
    "protocol_whitelist": "file",
}
"""Only containers that have the video in themselves: a playlist renamed to .mp4 must
not make the reader open other files.
"""

HDR_TRANSFERS = {"PQ": 16, "HLG": 18}
"""FFmpeg's numbers of the transfers SMPTE ST 2084 and ARIB STD-B67, both in BT.2100."""

_INTERLACED = (2, 3, 4, 5)
"""FFmpeg's numbers of the field orders in which a frame is two fields; 1 is
progressive.
"""


def probe(path: str | os.PathLike[str]) -> MediaInfo:
    """Read the media info of a video or, by its suffix, of an image.

    Raises:
        ClipProblem: if the file cannot be used, whatever its bytes are.
    """
    file = Path(path)
    stat_of(file)
    head = head_of(file)

    if file.suffix.lower() in IMAGE_SUFFIXES:
        is_animated_gif = head.startswith(b"GIF8") and is_animated(file)
        if not is_animated_gif:
            return probe_image(file)

    try:
        # FFmpeg would take the "a" of a relative path "a:b.mp4" for a protocol.
        absolute_path = os.path.abspath(file)
        with av.open(
            absolute_path, options=OPEN_OPTIONS, metadata_errors="replace"
        ) as container:
            return _read_media_info(str(path), container)
    except (av.FFmpegError, OSError, ValueError, ArithmeticError) as error:
        if type_of(head) != "video":
            raise ClipProblem(
                "not_a_video", "despite its suffix its bytes are not those of a video"
            ) from error
        detail = getattr(error, "strerror", None) or str(error)
        raise ClipProblem(
            "unreadable", f"the container is damaged or cut short ({detail})"
        ) from error


def probe_image(path: str | os.PathLike[str]) -> MediaInfo:
    """Read the media info of an image; decode it once, so that a truncated file is
    found.

    Raises:
        ClipProblem: if the file cannot be used, whatever its bytes are.
    """
    pixels, codec, is_transparent = read_image(Path(path))
    height, width = pixels.shape[:2]

    return MediaInfo(
        path=str(path),
        codec=codec,
        width=width,
        height=height,
        ticks=(0,),
        frame_seconds=0.0,
        fps=0.0,
        keyframes=(0,),
        container="image",
        still=True,
        transparent=is_transparent,
    )


def _read_media_info(path: str, container: Any) -> MediaInfo:
    """Read the media info of an open container."""
    stream = video_stream(container)
    context = stream.codec_context
    if context is None:
        raise ClipProblem(
            "unreadable", "its codec has no decoder in this build of FFmpeg"
        )
    limit_pixels(context)

    packets, frame, is_cut_short = _demux(container, stream)
    is_avi = "avi" in container.format.name.split(",")
    is_counted = is_avi or any(packet.pts is None for packet in packets)
    timeline = _build_timeline(packets, stream, is_counted=is_counted)
    if len(timeline.ticks) < 2:
        raise ClipProblem(
            "one_frame",
            f"it has {len(timeline.ticks)} frame; a video needs at least two",
        )

    time_base = timeline.time_base
    numerator, denominator = time_base.as_integer_ratio()
    first_tick = timeline.ticks[0]
    timestamps = [
        (tick - first_tick) * numerator / denominator for tick in timeline.ticks
    ]
    frame_seconds = _last_frame_seconds(
        timestamps,
        declared_seconds=timeline.last_duration * float(time_base),
        tick_seconds=float(time_base),
        stream=stream,
    )
    seconds = timestamps[-1] + frame_seconds
    _check_complete(
        packets,
        stream=stream,
        container=container,
        is_cut_short=is_cut_short,
        end=float(first_tick * time_base) + seconds,
    )

    rotation, is_mirrored = _orientation(frame)
    width = max(1, round(frame.width * (stream.sample_aspect_ratio or 1)))
    height = frame.height
    if rotation % 180:
        width, height = height, width

    has_alpha = (
        _has_alpha(frame, context.name) or stream.metadata.get("alpha_mode") == "1"
    )
    return MediaInfo(
        path=path,
        codec=context.name,
        width=width,
        height=height,
        rotation=rotation,
        ticks=tuple(timeline.ticks),
        frame_seconds=frame_seconds,
        fps=len(timeline.ticks) / seconds,
        keyframes=timeline.keyframes,
        container=container.format.name,
        mirrored=is_mirrored,
        counted=is_counted,
        time_base=(numerator, denominator),
        unusable=timeline.undecodable_frames,
        interlaced=frame.interlaced_frame or context.field_order in _INTERLACED,
        hdr=_hdr_transfer(frame, context),
        transparent=has_alpha,
    )


def limit_pixels(codec_context: Any) -> None:
    """Make the decoder refuse frames beyond ``MAX_PIXELS``; call it before decoding
    starts.
    """
    codec_context.options = {"max_pixels": str(MAX_PIXELS)}


def video_stream(container: Any) -> Any:
    """Return the first video stream that is not a cover picture.

    Raises:
        ClipProblem: "no_video_stream" if there is none.
    """
    for stream in container.streams.video:
        is_cover = int(stream.disposition) & int(av.stream.Disposition.attached_pic)
        if not is_cover:
            return stream

    stream_types = sorted({stream.type for stream in container.streams})
    contents = ", ".join(stream_types) or "no stream at all"
    raise ClipProblem("no_video_stream", f"it contains {contents}")


def _hdr_transfer(frame: Any, context: Any) -> str | None:
    """Return "PQ" or "HLG" if the frame or its stream declares that transfer."""
    transfers = {number: name for name, number in HDR_TRANSFERS.items()}
    hdr = transfers.get(int(frame.color_trc)) or transfers.get(int(context.color_trc))
    if hdr is None and context.codec_tag.startswith(("dvh", "dva")):
        raise ClipProblem(
            "unreadable", "it is Dolby Vision profile 5: export it as HLG, HDR10 or SDR"
        )
    return hdr


class _Packet(NamedTuple):
    """One frame as the demuxer gives it; times in ticks."""

    pts: int | None
    dts: int | None
    duration: int
    is_keyframe: bool
    is_displayed: bool


def _demux(container: Any, stream: Any) -> tuple[list[_Packet], Any, bool]:
    """Read all packets and decode the first frame.

    Returns:
        The packets in decoding order, the decoded frame, and whether a packet was cut
        short.
    """
    packets: list[_Packet] = []
    first_frame = None
    is_cut_short = False
    has_started = False
    # VP8 is the only codec whose hidden frames are packets of their own.
    is_vp8 = stream.codec_context.codec.canonical_name == "vp8"

    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                is_cut_short = True
                continue

            # AVI repeats a picture with an empty packet; decoding it would end the
            # decoder.
            is_end = packet.size == 0 and packet.dts is None
            if packet.size == 0 and not is_end:
                continue

            has_started = has_started or packet.is_keyframe or is_end
            if has_started and first_frame is None:
                first_frame = next(iter(packet.decode()), None)
            if is_end:
                break

            is_hidden = is_vp8 and not bytes(packet)[0] & 0x10
            packets.append(
                _Packet(
                    pts=packet.pts,
                    dts=packet.dts,
                    duration=packet.duration or 0,
                    is_keyframe=packet.is_keyframe,
                    is_displayed=not packet.is_discard and not is_hidden,
                )
            )
    except av.FFmpegError as error:
        raise ClipProblem(
            "decode_error", f"after {len(packets)} frames: {error.strerror}"
        ) from error

    if first_frame is None:
        raise ClipProblem("decode_error", "none of its frames can be decoded")
    return packets, first_frame, is_cut_short


@dataclass(frozen=True)
class _Timeline:
    """The decodable frames of a stream in presentation order."""

    ticks: list[int]
    """Presentation time of each frame, ascending."""

    time_base: Fraction
    """Length of a tick in seconds."""

    keyframes: tuple[int, ...]
    """Indices of frames at which decoding can start."""

    undecodable_frames: int
    """Displayed frames that nothing can decode, since they depend on a missing
    keyframe.
    """

    last_duration: int
    """Duration of the last frame in ticks; 0 if not declared."""


def _build_timeline(
    packets: Sequence[_Packet], stream: Any, *, is_counted: bool
) -> _Timeline:
    """Sort frames by presentation time, without those before the first keyframe.

    Args:
        packets: all packets in decoding order.
        stream: the video stream.
        is_counted: whether the dts number the frames, since the pts are missing or
            wrong.
    """
    keyframe_indices = (
        index for index, packet in enumerate(packets) if packet.is_keyframe
    )
    decodable = packets[next(keyframe_indices, 0) :]
    time_base: Fraction = stream.time_base

    if is_counted and any(packet.dts is None for packet in decodable):
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise ClipProblem(
                "unreadable", "it has neither timestamps nor a frame rate"
            )
        decodable = [
            packet._replace(dts=index, duration=1)
            for index, packet in enumerate(decodable)
        ]
        time_base = 1 / rate

    # AVI numbers its packets in decoding order, whatever their pts are: the k-th number
    # belongs to the k-th displayed frame.
    timed: list[tuple[_Packet, int]] = []
    for packet in decodable:
        tick = packet.dts if is_counted else packet.pts
        if tick is not None:
            timed.append((packet, tick))

    # A frame presented before the first keyframe refers to frames that are not in the
    # file.
    usable = [(packet, tick) for packet, tick in timed if packet.is_displayed]
    if timed and timed[0][0].is_keyframe:
        first_keyframe_tick = timed[0][1]
        usable = [
            (packet, tick) for packet, tick in usable if tick >= first_keyframe_tick
        ]

    ticks = sorted({tick for _, tick in usable})
    index_by_tick = {tick: index for index, tick in enumerate(ticks)}
    keyframes = {index_by_tick[tick] for packet, tick in usable if packet.is_keyframe}
    last_durations = [packet.duration for packet, tick in usable if tick == ticks[-1]]
    displayed_frames = sum(packet.is_displayed for packet in packets)
    return _Timeline(
        ticks=ticks,
        time_base=time_base,
        keyframes=tuple(sorted(keyframes)),
        undecodable_frames=displayed_frames - len(usable),
        last_duration=max(last_durations, default=0),
    )


def _last_frame_seconds(
    timestamps: Sequence[float],
    *,
    declared_seconds: float,
    tick_seconds: float,
    stream: Any,
) -> float:
    """Return the duration of the last frame.

    If the timestamps are those of a constant rate, up to the container's rounding, the
    clip lasts exactly frames / rate: 60 frames at 24 fps are 2.5 s, not the 2.499 s of
    a Matroska file.

    Args:
        timestamps: seconds of each frame, from 0.
        declared_seconds: duration by the last packet; 0 if not declared.
        tick_seconds: length of a tick, the container's precision.
        stream: the video stream, with its average and guessed rates.
    """
    tolerance = 1.01 * tick_seconds
    for rate in (stream.guessed_rate, stream.average_rate):
        if not rate:
            continue
        is_constant = all(
            abs(timestamp - index / float(rate)) <= tolerance
            for index, timestamp in enumerate(timestamps)
        )
        fits_declared = declared_seconds == 0 or math.isclose(
            declared_seconds, 1 / rate, abs_tol=tolerance
        )
        if is_constant and fits_declared:
            return float(len(timestamps) / rate) - timestamps[-1]

    if declared_seconds:
        return declared_seconds
    return median(following - time for time, following in pairwise(timestamps))


def _check_complete(
    packets: Sequence[_Packet],
    *,
    stream: Any,
    container: Any,
    is_cut_short: bool,
    end: float,
) -> None:
    """Check that the file has all frames that its header declares.

    Args:
        packets: all packets in decoding order.
        stream: the video stream.
        container: the open container.
        is_cut_short: whether the demuxer met a packet that was cut short.
        end: second at which the last frame ends, in the container's time.

    Raises:
        ClipProblem: "decode_error" if the file is truncated.
    """
    formats = container.format.name.split(",")
    present_frames = len(packets)
    declared_frames = 0
    if "mov" in formats:
        # The index after the edit list; the header's count ignores trimming.
        declared_frames = len(stream.index_entries)
    elif "avi" in formats:
        # The header's count includes the empty packets that repeat a picture.
        dts = (packet.dts for packet in packets if packet.dts is not None)
        present_frames = max(dts, default=present_frames - 1) + 1
        declared_frames = stream.frames

    if is_cut_short or declared_frames > present_frames:
        total = f" of {declared_frames}" if declared_frames > present_frames else ""
        raise ClipProblem(
            "decode_error",
            f"the file is cut short: it has {present_frames}{total} frames",
        )

    # With other streams, such as audio, the container's duration may not be the
    # video's.
    if len(container.streams) == 1 and "matroska" in formats and container.duration:
        declared_seconds = container.duration / 1e6
        if end < 0.9 * container.duration / 1e6:
            raise ClipProblem(
                "decode_error",
                f"the file is cut short: it has {end:.2f} of {declared_seconds:.2f} s",
            )


def _orientation(frame: Any) -> tuple[int, bool]:
    """Return the frame's orientation by its display matrix.

    Returns:
        The counter-clockwise turn in degrees, and whether a vertical flip comes before
        it.
    """
    matrix_type = av.sidedata.sidedata.Type.DISPLAYMATRIX
    if matrix_type not in frame.side_data:
        return 0, False

    matrix = np.frombuffer(bytes(frame.side_data[matrix_type]), dtype=np.int32)
    a, b, _, c, d = matrix[:5].astype(np.float64)
    rotation = round(frame.rotation / 90) % 4 * 90
    return rotation, bool(a * d - b * c < 0)


def _has_alpha(frame: Any, codec: str) -> bool:
    """Return whether a frame has an alpha channel; for a GIF, whether any pixel uses
    it.
    """
    if codec == "gif":
        return bool(frame.to_ndarray()[..., 3].min() < 255)
    return any(component.is_alpha for component in frame.format.components)
