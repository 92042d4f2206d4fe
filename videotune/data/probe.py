"""Read the media info of a video or image file from its container.

Of a video only the first frame is decoded, since only a frame has the rotation.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from videotune.data.clock import StreamClock
from videotune.data.file_checks import (
    MAX_PIXELS,
    ClipProblem,
    head_of,
    stat_of,
    type_of,
)
from videotune.data.images import IMAGE_SUFFIXES, is_animated, read_image
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import local_copy
from videotune.data.side_data import StreamSideData, read_side_data
from videotune.data.sound_info import SoundProbe
from videotune.data.timeline import (
    Demuxed,
    FramePacket,
    build_timeline,
    check_complete,
    last_frame_seconds,
)
from videotune.lazy import av
from videotune.text import counted

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

HDR_TRANSFERS: dict[Literal["PQ", "HLG"], int] = {"PQ": 16, "HLG": 18}
"""FFmpeg's numbers of the transfers SMPTE ST 2084 and ARIB STD-B67, both in BT.2100."""

WIDE_PRIMARIES: dict[Literal["BT.2020", "P3"], int] = {"BT.2020": 9, "P3": 12}
"""FFmpeg's numbers of primaries that hold colours beyond those of BT.709."""

UNCONVERTED_TRANSFERS = {
    5: "gamma 2.8",
    8: "linear light",
    9: "logarithmic",
    10: "logarithmic",
    17: "SMPTE ST 428",
}
"""FFmpeg's numbers of transfers that differ visibly from that of BT.709 and are not
converted: swscale has no logarithmic ones, and the others are hardly ever filmed.
"""

UNCONVERTED_PRIMARIES = {4: "NTSC of 1953", 8: "film", 10: "XYZ", 11: "DCI-P3"}
"""FFmpeg's numbers of primaries that differ visibly from those of BT.709 and are not
converted.
"""

SMALLEST_UNREAD_SHARE = 0.1
SMALLEST_UNREAD_BYTES = 1 << 17
"""Less than this after the last packet of an FLV or WMV is taken for its index or padding
(packets have 64 KB).
"""

_UNSPECIFIED = 2

_INTERLACED = (2, 3, 4, 5)
"""FFmpeg's numbers of the field orders in which a frame is two fields; 1 is
progressive.
"""


def probe(path: str | os.PathLike[str]) -> MediaInfo:
    """Read the media info of a video or, by its suffix, of an image.

    Raises:
        ClipProblem: if the file cannot be used. Nothing else is raised, whatever its bytes.
    """
    file = Path(path)
    stat_of(file)
    head = head_of(file)

    if file.suffix.lower() in IMAGE_SUFFIXES:
        is_animated_gif = head.startswith(b"GIF8") and is_animated(file)
        if not is_animated_gif:
            return probe_image(file)

    with local_copy(file) as local:
        return _probe_video(str(path), local, head)


def _probe_video(path: str, local: Path, head: bytes) -> MediaInfo:
    """Read the media info of a video.

    Args:
        path: its path in the dataset.
        local: the file that is opened.
        head: its first bytes.
    """
    try:
        # FFmpeg would take the "a" of a relative path "a:b.mp4" for a protocol.
        absolute_path = os.path.abspath(local)
        with av.open(
            absolute_path, options=OPEN_OPTIONS, metadata_errors="replace"
        ) as container:
            return _read_media_info(path, container)
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
    noticed.

    Raises:
        ClipProblem: if the file cannot be used. No bytes make it raise anything else.
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
    side_data = read_side_data(container, stream)

    sound_probe = SoundProbe(container)
    demuxed = _read_packets(container, stream, sound_probe)
    frame = demuxed.first_frame
    is_avi = "avi" in container.format.name.split(",")
    # Without usable timestamps, as in an AVI, frames are found by their number.
    is_counted = is_avi or any(packet.pts is None for packet in demuxed.packets)
    timeline = build_timeline(demuxed, stream, is_counted=is_counted)
    if len(timeline.ticks) < 2:
        raise ClipProblem(
            "one_frame",
            f"it has {len(timeline.ticks)} frame; a video needs at least two",
        )

    frame_seconds = last_frame_seconds(timeline, stream)
    seconds = timeline.timestamps[-1] + frame_seconds
    begin = float(timeline.ticks[0] * timeline.time_base)
    check_complete(demuxed, stream=stream, container=container, end=begin + seconds)

    # An AVI's rate is constant, so the number of a frame is also its time.
    sound, unusable_sound = sound_probe.result(
        begin,
        demuxed.ends.get(sound_probe.index),
        has_times=not demuxed.restarts and (is_avi or not is_counted),
    )
    rotation, is_mirrored = _orientation(frame)
    width, height = _shown_size(frame, stream, side_data)
    if rotation % 180:
        width, height = height, width

    hdr = _hdr_transfer(frame, context, side_data)
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
        time_base=timeline.time_base.as_integer_ratio(),
        unusable=timeline.undecodable_frames,
        interlaced=frame.interlaced_frame or context.field_order in _INTERLACED,
        hdr=hdr,
        gamut=None if hdr else _wide_gamut(frame, context),
        unconverted="" if hdr else _unconverted_colours(frame, context),
        transparent=_has_alpha(frame, stream),
        restarts=demuxed.restarts,
        crop=side_data.crop,
        stereo=side_data.stereo,
        spherical=side_data.spherical,
        video_streams=len(_moving_streams(container)),
        unread=_unread_share(container, demuxed),
        sound=sound,
        unusable_sound=unusable_sound,
    )


def _unread_share(container: Any, demuxed: Demuxed) -> float:
    """Return the share of a file that follows its last packet and probably holds more
    pictures, which FFmpeg does not read.

    Only in FLV and WMV: other containers have indexes and attachments there, or are
    read to their end.
    """
    if not {"flv", "asf"} & set(container.format.name.split(",")):
        return 0.0
    unread_bytes = container.size - demuxed.last_byte
    if unread_bytes < SMALLEST_UNREAD_BYTES:
        return 0.0
    share = unread_bytes / container.size
    return round(share, 4) if share > SMALLEST_UNREAD_SHARE else 0.0


def _shown_size(frame: Any, stream: Any, side_data: StreamSideData) -> tuple[int, int]:
    """Return width and height of a frame that is cropped, in square pixels."""
    left, right, top, bottom = side_data.crop
    width = (frame.width - left - right) * (stream.sample_aspect_ratio or 1)
    return max(1, round(width)), max(1, frame.height - top - bottom)


def limit_pixels(codec_context: Any) -> None:
    """Make the decoder refuse frames beyond ``MAX_PIXELS``; call it before decoding
    starts.
    """
    codec_context.options = {"max_pixels": str(MAX_PIXELS)}


def video_stream(container: Any) -> Any:
    """Return the video stream that a player shows: the default one, else the largest.

    Raises:
        ClipProblem: "no_video_stream" if there are only cover pictures, or nothing.
    """
    streams = _moving_streams(container)
    if not streams:
        stream_types = sorted({stream.type for stream in container.streams})
        contents = ", ".join(stream_types) or "no stream at all"
        raise ClipProblem("no_video_stream", f"it contains {contents}")

    def preference(stream: Any) -> tuple[bool, int]:
        is_default = bool(int(stream.disposition) & int(_dispositions().default))
        context = stream.codec_context
        area = 0 if context is None else context.width * context.height
        return is_default, area

    # max returns the first of equals.
    return max(streams, key=preference)


def packets_of(container: Any, *streams: Any) -> Iterator[Any]:
    """Yield the packets of streams, or of all, and an empty one at the end of each.

    Damage may make a stream begin in the middle of a file. PyAV 18 has no object for it
    and, when all others have ended, fails.
    """
    with suppress(IndexError):
        yield from container.demux(*streams)


def _moving_streams(container: Any) -> list[Any]:
    """Return the video streams that are no cover pictures or thumbnails."""
    no_clips = int(_dispositions().attached_pic) | int(_dispositions().timed_thumbnails)
    return [
        stream
        for stream in container.streams.video
        if not int(stream.disposition) & no_clips
    ]


def _dispositions() -> Any:
    return av.stream.Disposition


def _hdr_transfer(
    frame: Any, context: Any, side_data: StreamSideData
) -> Literal["PQ", "HLG"] | None:
    """Return "PQ" or "HLG" if the frame or its stream declares that transfer.

    Raises:
        ClipProblem: for Dolby Vision profile 5, whose pictures are no HDR10 or HLG.
    """
    transfers = {number: name for name, number in HDR_TRANSFERS.items()}
    hdr = transfers.get(int(frame.color_trc)) or transfers.get(int(context.color_trc))
    has_own_colours = side_data.dolby_vision_profile == 5
    if hdr is None and (
        has_own_colours or context.codec_tag.startswith(("dvh", "dva"))
    ):
        raise ClipProblem(
            "unreadable", "it is Dolby Vision profile 5: export it as HLG, HDR10 or SDR"
        )
    return hdr


def _wide_gamut(frame: Any, context: Any) -> Literal["BT.2020", "P3"] | None:
    """Return the primaries of the frame or its stream if they exceed BT.709."""
    gamuts = {number: name for name, number in WIDE_PRIMARIES.items()}
    return gamuts.get(_declared(frame, context, "color_primaries"))


def _unconverted_colours(frame: Any, context: Any) -> str:
    """Return what of the declared colours decoding does not convert; empty if nothing."""
    transfer = UNCONVERTED_TRANSFERS.get(_declared(frame, context, "color_trc"))
    primaries = UNCONVERTED_PRIMARIES.get(_declared(frame, context, "color_primaries"))
    return ", ".join(name for name in (transfer, primaries) if name)


def _declared(frame: Any, context: Any, name: str) -> int:
    """Return FFmpeg's number of a frame's colours, or of its stream's if it has none."""
    declared = int(getattr(frame, name))
    if declared == _UNSPECIFIED:
        declared = int(getattr(context, name))
    return declared


JOINT_PACKETS = 2
"""How many of a part's last packets may look incomplete because another part follows."""


class _Damage(NamedTuple):
    """A packet that the demuxer calls incomplete.

    Files may be parts that were joined byte by byte. At a joint the last packets of a
    part look incomplete, and nothing is missing. If the same part continues after such
    a packet, data is missing; if the file ends with one, it is cut short.
    """

    frames_up_to: int
    """How many frames the stream has up to the packet, with the packet's own."""

    restarts_before: int
    """Restarts of the clock before it."""

    def check(self, frames: int, restarts: int) -> None:
        """Raise ClipProblem if the part goes on after the packet.

        Args:
            frames: frames of the stream until now.
            restarts: restarts of the clock until now.
        """
        is_same_part = restarts == self.restarts_before
        if is_same_part and frames > self.frames_up_to + JOINT_PACKETS:
            raise ClipProblem(
                "decode_error",
                f"data is missing or damaged after {counted(self.frames_up_to, 'frame')}",
            )


def _read_packets(container: Any, stream: Any, sound_probe: SoundProbe) -> Demuxed:
    """Read all packets of a file and decode the first frame of a stream, and of its
    sound.

    Raises:
        ClipProblem: "decode_error" if a packet is damaged, or no frame can be decoded.
    """
    demuxed = Demuxed()
    clock = StreamClock(container, stream)
    damage: _Damage | None = None

    try:
        for packet in packets_of(container):
            _note_end(demuxed, packet)
            # A stream that begins in the middle of the file has a number, and no object.
            if packet.stream_index == sound_probe.index:
                sound_probe.add(packet)
            if packet.stream_index != stream.index:
                continue

            is_end = packet.size == 0 and packet.dts is None
            if is_end or clock.admit(packet):
                _add_packet(demuxed, packet, stream)
            if damage is not None:
                damage.check(len(demuxed.packets), clock.restarts)
            if packet.is_corrupt:
                damage = _Damage(len(demuxed.packets), clock.restarts)
    except av.FFmpegError as error:
        raise ClipProblem(
            "decode_error",
            f"after {counted(len(demuxed.packets), 'frame')}: {error.strerror}",
        ) from error

    demuxed.restarts = clock.restarts
    demuxed.dropped = clock.dropped
    if damage is not None:
        demuxed.is_cut_short = damage.restarts_before == clock.restarts
    if demuxed.first_frame is None:
        raise ClipProblem("decode_error", "none of its frames can be decoded")
    return demuxed


def _note_end(demuxed: Demuxed, packet: Any) -> None:
    """Note how far a packet's stream reaches, in time and in the file."""
    if packet.pos is not None:
        demuxed.last_byte = max(demuxed.last_byte, packet.pos + packet.size)
    tick = packet.dts if packet.pts is None else packet.pts
    if tick is not None and packet.time_base:
        end = float((tick + (packet.duration or 0)) * packet.time_base)
        index = packet.stream_index
        demuxed.ends[index] = max(end, demuxed.ends.get(index, end))


def _add_packet(demuxed: Demuxed, packet: Any, stream: Any) -> None:
    """Add a packet of the video stream; decode it if no frame has been decoded yet."""
    is_end = packet.size == 0 and packet.dts is None
    demuxed.last_tick = max(demuxed.last_tick, packet.dts or 0)

    # AVI repeats a picture with an empty packet; decoding it would end the decoder.
    if packet.size == 0 and not is_end:
        return

    demuxed.has_started = demuxed.has_started or packet.is_keyframe or is_end
    if demuxed.first_frame is None and demuxed.has_started:
        demuxed.first_frame = next(iter(packet.decode()), None)
    if is_end:
        return

    # VP8 is the only codec whose hidden frames are packets of their own.
    is_vp8 = stream.codec_context.codec.canonical_name == "vp8"
    is_hidden = is_vp8 and not bytes(packet)[0] & 0x10
    demuxed.packets.append(
        FramePacket(
            pts=packet.pts,
            dts=packet.dts,
            duration=packet.duration or 0,
            is_keyframe=packet.is_keyframe,
            is_displayed=not packet.is_discard and not is_hidden,
        )
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


def _has_alpha(frame: Any, stream: Any) -> bool:
    """Return whether a frame or its stream has an alpha channel; for a GIF, whether any
    pixel uses it.
    """
    if stream.metadata.get("alpha_mode") == "1":
        return True
    if stream.codec_context.name == "gif":
        return bool(frame.to_ndarray()[..., 3].min() < 255)
    return any(component.is_alpha for component in frame.format.components)
