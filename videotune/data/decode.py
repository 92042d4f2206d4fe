"""Decode frames of a clip as uint8 RGB: upright, resized and cropped, by PyAV.

HDR and wide gamuts are converted by FFmpeg's swscale.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.file_checks import MAX_PIXELS, ClipProblem
from videotune.data.frame_reader import FrameReader
from videotune.data.media_info import MediaInfo
from videotune.data.tone_mapping import to_sdr
from videotune.lazy import av_reformatter

Frames = NDArray[np.uint8]

DECODE_VERSION = 2
"""Increase it when the pixels of any clip change, so that older latents are re-encoded."""


def decode(
    info: MediaInfo,
    times: Sequence[float],
    height: int,
    width: int,
    resize: str = "center",
    crop_position: tuple[float, float] = (0.5, 0.5),
    threads: int = 0,
    alpha: bool = False,
) -> Frames:
    """Decode the frame on display at each time.

    A frame is turned upright, its pixels are made square, and it is resized
    (antialiased bicubic). Colours follow the matrix and the range that the frame
    declares; undeclared, BT.709 for HD and BT.601 below, as players do. The alpha
    channel is dropped unless it is asked for, the two fields of an interlaced frame stay woven, HDR (PQ, HLG)
    is tone-mapped to BT.709, and wide gamuts (BT.2020, P3) are converted to it.

    Args:
        info: media info of the clip.
        times: seconds of the clip, in any order (tolerance: see
            ``MediaInfo.frames_at``).
        height: height of the frames.
        width: width of the frames.
        resize: "center" and "random" cover the size and crop; "pad" fits into it,
            centred on black; "stretch" gives up the aspect ratio.
        crop_position: where a crop is, as fractions of its margins (down, right).
        threads: decoding threads; 0 chooses by the size of frames.
        alpha: return the alpha channel, in all three channels.

    Returns:
        uint8 (len(times), height, width, 3).

    Raises:
        ClipProblem: "decode_error" if any frame cannot be decoded.
    """
    indices = info.frames_at(times)
    out = np.empty((len(indices), height, width, 3), np.uint8)
    if not indices:
        return out

    resizer = _Resizer(info, height, width, resize, crop_position, alpha)
    with closing(FrameReader(info, threads, alpha=alpha)) as reader:
        for index, frame in reader.frames(sorted(set(indices))):
            first, *repeats = np.flatnonzero(np.equal(indices, index))
            resizer.write(frame, out[first])
            out[repeats] = out[first]
    return out


def whole_picture(info: MediaInfo, second: float) -> Frames:
    """Decode the frame on display at a time in its own size, upright: uint8 (H,W,3)."""
    return decode(info, [second], info.height, info.width, resize="stretch")[0]


def decode_all(info: MediaInfo, threads: int = 0) -> Iterator[Frames]:
    """Yield each frame of a clip in its own size, upright and in the colours of
    ``decode``.

    Args:
        info: media info of the clip.
        threads: decoding threads; 0 chooses by the size of frames.

    Yields:
        uint8 (height, width, 3) of each frame, in presentation order.

    Raises:
        ClipProblem: "decode_error" if any frame cannot be decoded.
    """
    resizer = _Resizer(
        info, info.height, info.width, resize="stretch", crop_position=(0.5, 0.5)
    )
    with closing(FrameReader(info, threads)) as reader:
        for _, frame in reader.frames(range(len(info.ticks))):
            picture = np.empty((info.height, info.width, 3), np.uint8)
            resizer.write(frame, picture)
            yield picture


class _Resizer:
    """Writes decoded frames into arrays: upright, with square pixels, resized and
    cropped.

    Args:
        info: media info of the clip.
        height: height of the arrays.
        width: width of the arrays.
        resize: "center", "random", "pad" or "stretch".
        crop_position: where a crop is, as fractions of its margins (down, right).
        alpha: write the alpha channel in the place of the colours.
    """

    def __init__(
        self,
        info: MediaInfo,
        height: int,
        width: int,
        resize: str,
        crop_position: tuple[float, float],
        alpha: bool = False,
    ) -> None:
        self.info = info
        self._alpha = alpha
        self.height = height
        self.width = width
        self.picture_height, self.picture_width = _picture_size(
            info, height, width, resize
        )
        if self.picture_height * self.picture_width > MAX_PIXELS:
            raise ClipProblem(
                "decode_error",
                f"a picture of {info.width} × {info.height} cannot be cut to "
                f"{width} × {height}: it is far too long and narrow",
            )

        # Negative margins are black borders.
        margin_down = self.picture_height - height
        margin_right = self.picture_width - width
        self.has_borders = resize == "pad" and (margin_down != 0 or margin_right != 0)
        self.crop_top = 0
        self.crop_left = 0
        self.border_top = 0
        self.border_left = 0
        if resize in ("center", "random"):
            # The nearest whole pixel; ties go up and left.
            self.crop_top = math.ceil(crop_position[0] * margin_down - 0.5)
            self.crop_left = math.ceil(crop_position[1] * margin_right - 0.5)
        else:
            self.border_top = -margin_down // 2
            self.border_left = -margin_right // 2

        flags = av_reformatter.Interpolation
        # Full chroma resolution on input and output.
        self._interpolation = (
            flags.ACCURATE_RND | flags.FULL_CHR_H_INT | flags.FULL_CHR_H_INP
        )

        # swscale writes planar RGB with vector instructions and packed RGB without: the
        # same values in a third of the time.
        self._converts_colours = info.colours is not None and not alpha
        self._pixel_format = "gbrp10le" if self._converts_colours else "gbrp"
        if alpha:
            self._pixel_format = "gbrap"
        self._dtype: Any = np.uint16 if self._converts_colours else np.uint8
        self._reformatter = av_reformatter.VideoReformatter()

    def write(self, frame: Any, out: Frames) -> None:
        """Write a decoded frame into uint8 (height, width, 3)."""
        planes = self._scaled_planes(frame)

        if self.has_borders:
            out[...] = 0
        bottom = self.border_top + self.picture_height
        right = self.border_left + self.picture_width
        visible = out[self.border_top : bottom, self.border_left : right]

        # Written in place, unless colours are converted.
        cropped: Any = visible
        if self._converts_colours:
            cropped = np.empty(visible.shape, np.uint16)
        for channel, plane in enumerate(planes):
            if self.info.mirrored:
                plane = np.flipud(plane)
            upright = np.rot90(plane, self.info.rotation // 90)
            cropped[..., channel] = upright[
                self.crop_top : self.crop_top + self.height,
                self.crop_left : self.crop_left + self.width,
            ]
        if self._converts_colours:
            assert self.info.colours is not None
            visible[...] = to_sdr(cropped, self.info.colours)

    def _scaled_planes(self, frame: Any) -> list[Any]:
        """Return red, green and blue of a frame at the picture's size, not yet upright."""
        decoded_height = self.picture_height
        decoded_width = self.picture_width
        if self.info.rotation % 180:
            decoded_height = self.picture_width
            decoded_width = self.picture_height

        # Frames of one clip may differ in size, so each is compared. Without scaling,
        # only chroma is interpolated: bilinear as in players, in half the time.
        flags = av_reformatter.Interpolation
        is_scaled = (decoded_height, decoded_width) != (frame.height, frame.width)
        scaling = flags.BICUBIC if is_scaled else flags.BILINEAR

        scaled: Any = self._reformatter.reformat(
            frame,
            decoded_width,
            decoded_height,
            self._pixel_format,
            src_colorspace=_undeclared_matrix(frame),
            interpolation=self._interpolation | scaling,
            threads=1,
        )
        green, blue, red, *alpha_plane = scaled.planes
        planes = alpha_plane * 3 if self._alpha else (red, green, blue)
        arrays = []
        for plane in planes:
            rows = np.frombuffer(memoryview(plane), self._dtype).reshape(
                decoded_height, -1
            )
            arrays.append(rows[:, :decoded_width])
        return arrays


def _undeclared_matrix(frame: Any) -> Any:
    """Return the colour matrix of a frame that declares none; None if it does."""
    # ITU-T H.273: BT.709, FCC, BT.470BG, SMPTE 170M, SMPTE 240M and BT.2020.
    if frame.format.is_rgb or frame.colorspace in (1, 4, 5, 6, 7, 9):
        return None
    # As players do: BT.709 for HD, and BT.601 below.
    is_hd = frame.height > 576 or frame.width >= 1280
    return (
        av_reformatter.Colorspace.ITU709 if is_hd else av_reformatter.Colorspace.ITU601
    )


def _picture_size(
    info: MediaInfo, height: int, width: int, resize: str
) -> tuple[int, int]:
    """Return (height, width) of the upright picture before it is cropped or padded."""
    if resize == "stretch":
        return height, width

    ratios = height / info.height, width / info.width
    scale = min(ratios) if resize == "pad" else max(ratios)
    scaled_height = round(info.height * scale)
    scaled_width = round(info.width * scale)
    if resize == "pad":
        return max(1, min(height, scaled_height)), max(1, min(width, scaled_width))
    return max(height, scaled_height), max(width, scaled_width)
