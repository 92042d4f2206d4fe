"""Encode a scene of a clip, or pictures made of its frames, as H.264 in MP4: every frame
at its time and in its colours, a scene with its sound.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.media_info import MediaInfo
from videotune.data.sound import read_sound
from videotune.data.sound_writer import SoundTrack, encodable_rate
from videotune.data.video_writer import SAME_BITS
from videotune.lazy import av, av_reformatter

SCENE_QUALITY = "14"
"""x264's CRF. The loss is below what training at a lower resolution could see."""

PICTURE_QUALITY = "8"
"""x264's CRF of computed pictures. Their thin lines would show more of the loss."""


SOUND_SECONDS = 5.0
"""Sound of a scene that is read at a time."""


def encode_scene(
    path: Path,
    info: MediaInfo,
    first: int,
    frames: Iterator[tuple[int, Any]],
    sound_end: float | None = None,
) -> None:
    """Write frames as H.264 in MP4, each at its own time counted from the first.

    Args:
        path: the file to write.
        info: media info of the clip.
        first: index of the first frame.
        frames: index and decoded frame, in presentation order.
        sound_end: second of the clip up to which the scene's sound is written; None
            writes none.
    """
    reformatter = av_reformatter.VideoReformatter()
    x264_params = f"{SAME_BITS}:tff=1" if info.interlaced else SAME_BITS
    with av.open(str(path), "w") as container:
        encoder = _TimedEncoder(container, info, first, SCENE_QUALITY, x264_params)
        sound = None
        if sound_end is not None:
            sound = _SceneSound(container, info, info.timestamps[first], sound_end)

        for index, frame in frames:
            picture = _to_upright_yuv(frame, info, reformatter)
            if index == first:
                _declare_format(encoder.context, frame, picture, info)
            encoder.write(index, picture)
            if sound is not None:
                sound.write_until(info.timestamps[index])
        encoder.finish()
        if sound is not None:
            sound.finish()


def encode_pictures(
    path: Path, info: MediaInfo, pictures: Iterable[NDArray[np.uint8]]
) -> None:
    """Write a picture for each frame of a clip as H.264 in MP4, at the frame's time.

    An odd side stays as it is: such pictures are encoded without subsampling, since
    4:2:0 has even sides only.

    Args:
        path: the file to write.
        info: media info of the clip.
        pictures: RGB uint8 (H, W, 3) in the size of the clip, upright.
    """
    has_even_sides = info.width % 2 == 0 and info.height % 2 == 0
    pixel_format = "yuv420p" if has_even_sides else "yuv444p"
    reformatter = av_reformatter.VideoReformatter()
    flags = av_reformatter.Interpolation
    exact_chroma = flags.BICUBIC | flags.ACCURATE_RND | flags.FULL_CHR_H_INP

    with av.open(str(path), "w") as container:
        encoder = _TimedEncoder(container, info, 0, PICTURE_QUALITY, SAME_BITS)
        # The bits depend on the number of threads.
        encoder.context.thread_count = 1

        for index, pixels in enumerate(pictures):
            rgb = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            picture = reformatter.reformat(
                rgb,
                format=pixel_format,
                dst_colorspace=av_reformatter.Colorspace.ITU709,
                dst_color_range=av_reformatter.ColorRange.MPEG,
                interpolation=exact_chroma,
            )
            if index == 0:
                _declare_bt709(encoder.context, picture, info)
            encoder.write(index, picture)
        encoder.finish()


class _SceneSound:
    """Writes the sound of a scene beside its pictures, some seconds at a time.

    Args:
        container: the file, open for writing.
        info: media info of the clip, which has a sound track.
        start: second of the clip at which the scene begins.
        end: second of the clip at which it ends.
    """

    def __init__(
        self, container: Any, info: MediaInfo, start: float, end: float
    ) -> None:
        assert info.sound is not None
        self._info = info
        self._start = start
        self._rate = encodable_rate("mp4", info.sound.sample_rate)
        self._count = round((end - start) * self._rate)
        self._track = SoundTrack(container, "mp4", self._rate)

    def write_until(self, second: float) -> None:
        """Write the sound up to a second of the clip, in parts of SOUND_SECONDS."""
        part = round(SOUND_SECONDS * self._rate)
        reached = (second - self._start) * self._rate
        while self._track.written < min(self._count, reached):
            count = min(part, self._count - self._track.written)
            start = self._start + self._track.written / self._rate
            samples = read_sound(self._info, start, count / self._rate, self._rate)
            self._track.write(samples)

    def finish(self) -> None:
        """Write all that is left."""
        self.write_until(self._start + self._count / self._rate)
        self._track.finish()


class _TimedEncoder:
    """Encodes pictures as H.264, each with the time and the duration of its frame.

    Args:
        container: the file, open for writing.
        info: media info of the clip.
        first: index of the frame whose time is 0.
        quality: x264's CRF.
        x264_params: further parameters of x264.
    """

    def __init__(
        self,
        container: Any,
        info: MediaInfo,
        first: int,
        quality: str,
        x264_params: str,
    ) -> None:
        self._container = container
        self._info = info
        self._first = first
        self._durations = _durations(info)
        self._duration_by_pts: dict[int, int] = {}

        # Without B-frames the file has each frame's own duration, including the last one's.
        options = {
            "crf": quality,
            "preset": "fast",
            "bf": "0",
            "x264-params": x264_params,
        }
        # The clip's average frame rate.
        rate = Fraction(info.fps).limit_denominator(1001)
        self._stream = container.add_stream("libx264", rate=rate, options=options)

    @property
    def context(self) -> Any:
        """The encoder, whose format must be set before the first picture."""
        return self._stream.codec_context

    def write(self, index: int, picture: Any) -> None:
        """Encode the picture of the frame with this index."""
        ticks = self._info.ticks
        picture.pts = ticks[index] - ticks[self._first]
        picture.time_base = self.context.time_base
        # The encoder chooses keyframes itself, not as the source did.
        picture.pict_type = av.video.frame.PictureType.NONE
        self._duration_by_pts[picture.pts] = self._durations[index]
        self._mux(self._stream.encode(picture))

    def finish(self) -> None:
        """Write what the encoder holds back."""
        self._mux(self._stream.encode())

    def _mux(self, packets: list[Any]) -> None:
        for packet in packets:
            packet.duration = self._duration_by_pts[packet.pts]
            self._container.mux(packet)


def _durations(info: MediaInfo) -> list[int]:
    """Return the duration of each frame in ticks."""
    numerator, denominator = info.time_base
    last_duration = max(1, round(info.frame_seconds * denominator / numerator))
    ends = (*info.ticks[1:], info.ticks[-1] + last_duration)
    return [end - tick for tick, end in zip(info.ticks, ends, strict=True)]


def _declare_size(context: Any, picture: Any, info: MediaInfo) -> None:
    """Set the size, pixel format and time base of the encoder by its first picture."""
    context.width = picture.width
    context.height = picture.height
    context.pix_fmt = picture.format.name
    context.time_base = Fraction(*info.time_base)
    context.sample_aspect_ratio = Fraction(1)


def _declare_bt709(context: Any, picture: Any, info: MediaInfo) -> None:
    """Set the format of an encoder of pictures in BT.709, in the range of video."""
    _declare_size(context, picture, info)
    context.colorspace = 1
    context.color_range = 1
    context.color_primaries = 1
    context.color_trc = 1


def _declare_format(context: Any, frame: Any, picture: Any, info: MediaInfo) -> None:
    """Set the format of the encoder of a scene by its first frame."""
    _declare_size(context, picture, info)

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
