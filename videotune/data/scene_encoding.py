"""Encode a scene of a clip as H.264 in MP4, with every frame at its time and in its
colours.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from videotune.data.media_info import MediaInfo
from videotune.data.video_writer import SAME_BITS
from videotune.lazy import av, av_reformatter

QUALITY = "14"
"""x264's CRF. The loss is below what training at a lower resolution could see."""


def encode_scene(
    path: Path, info: MediaInfo, first: int, frames: Iterator[tuple[int, Any]]
) -> None:
    """Write frames as H.264 in MP4, each at its own time counted from the first.

    Args:
        path: the file to write.
        info: media info of the clip.
        first: index of the first frame.
        frames: index and decoded frame, in presentation order.
    """
    reformatter = av_reformatter.VideoReformatter()
    durations = _durations(info)
    with av.open(str(path), "w") as container:
        stream = _add_stream(container, info)
        duration_by_pts: dict[int, int] = {}

        def mux(packets: list[Any]) -> None:
            for packet in packets:
                packet.duration = duration_by_pts[packet.pts]
                container.mux(packet)

        for index, frame in frames:
            picture = _to_upright_yuv(frame, info, reformatter)
            if index == first:
                _declare_format(stream.codec_context, frame, picture, info)
            picture.pts = info.ticks[index] - info.ticks[first]
            picture.time_base = stream.codec_context.time_base
            # The encoder chooses keyframes itself, not as the source did.
            picture.pict_type = av.video.frame.PictureType.NONE
            duration_by_pts[picture.pts] = durations[index]
            mux(stream.encode(picture))
        mux(stream.encode())


def _durations(info: MediaInfo) -> list[int]:
    """Return the duration of each frame in ticks."""
    numerator, denominator = info.time_base
    last_duration = max(1, round(info.frame_seconds * denominator / numerator))
    ends = (*info.ticks[1:], info.ticks[-1] + last_duration)
    return [end - tick for tick, end in zip(info.ticks, ends, strict=True)]


def _add_stream(container: Any, info: MediaInfo) -> Any:
    """Add an H.264 stream at the clip's average frame rate."""
    x264_params = f"{SAME_BITS}:tff=1" if info.interlaced else SAME_BITS
    # Without B-frames the file has each frame's own duration, including the last one's.
    options = {"crf": QUALITY, "preset": "fast", "bf": "0", "x264-params": x264_params}
    rate = Fraction(info.fps).limit_denominator(1001)
    return container.add_stream("libx264", rate=rate, options=options)


def _declare_format(context: Any, frame: Any, picture: Any, info: MediaInfo) -> None:
    """Set the size, time base and colours of the encoder by its first frame."""
    context.width = picture.width
    context.height = picture.height
    context.pix_fmt = "yuv420p"
    context.time_base = Fraction(*info.time_base)
    context.sample_aspect_ratio = Fraction(1)

    # RGB has been converted to BT.709 in the range of video.
    is_rgb = frame.format.is_rgb
    context.colorspace = 1 if is_rgb else frame.colorspace
    context.color_range = 1 if is_rgb else frame.color_range
    context.color_primaries = frame.color_primaries
    context.color_trc = frame.color_trc


def _to_upright_yuv(frame: Any, info: MediaInfo, reformatter: Any) -> Any:
    """Convert a frame to 8-bit 4:2:0, upright, with square pixels and even sides.

    The colour range stays; an odd side loses its last line.
    """
    width = info.width
    height = info.height
    if info.rotation in (90, 270):
        width, height = height, width

    colours: dict[str, Any] = {
        "src_color_range": frame.color_range,
        "dst_color_range": frame.color_range,
    }
    if frame.format.is_rgb:
        colours = {
            "dst_colorspace": av_reformatter.Colorspace.ITU709,
            "dst_color_range": av_reformatter.ColorRange.MPEG,
        }
    converted = reformatter.reformat(frame, width, height, "yuv420p", **colours)
    has_even_sides = width % 2 == 0 and height % 2 == 0
    if not info.rotation and not info.mirrored and has_even_sides:
        return converted

    planes = []
    for plane, subsampling in zip(converted.planes, (1, 2, 2), strict=True):
        rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
        pixels = rows[: height // 2 * 2 // subsampling, : width // 2 * 2 // subsampling]
        if info.mirrored:
            pixels = pixels[::-1]
        planes.append(np.rot90(pixels, info.rotation // 90))
    flat = np.concatenate([plane.ravel() for plane in planes])
    return av.VideoFrame.from_ndarray(
        flat.reshape(-1, planes[0].shape[1]), format="yuv420p"
    )
