"""Decode frames of a clip as uint8 RGB: upright, resized and cropped, by PyAV.

HDR is tone-mapped by FFmpeg's swscale (perceptual intent).
"""

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.file_checks import MAX_PIXELS, ClipProblem
from videotune.data.images import read_image
from videotune.data.media_info import MediaInfo
from videotune.data.probe import HDR_TRANSFERS, OPEN_OPTIONS, limit_pixels, video_stream
from videotune.lazy import av, av_reformatter

Frames = NDArray[np.uint8]

LEAP = 12
"""Seek only if it skips more frames than this: a seek empties the decoder and stalls
its threads.
"""

DECODE_VERSION = 1
"""Increase it when the pixels of any clip change, so that older latents are re-encoded."""

TONE_MAPPING_VERSION = 1
"""Increase it when tone mapping changes pixels, so that older latents are re-encoded.
"""

TILE_HEIGHT = 128
TILE_WIDTH = 512
"""Tone mapping treats each pixel by itself, so pictures of any size go through one
filter graph of this size: building the graph's table takes seconds.
"""


def decode(
    info: MediaInfo,
    times: Sequence[float],
    height: int,
    width: int,
    resize: str = "center",
    crop_position: tuple[float, float] = (0.5, 0.5),
    threads: int = 0,
) -> Frames:
    """Decode the frame on display at each time.

    A frame is turned upright, its pixels are made square, and it is resized
    (antialiased bicubic). Colours follow the matrix and the range that the frame
    declares; undeclared, BT.709 for HD and BT.601 below, as players do. An alpha
    channel is dropped, the two fields of an interlaced frame stay woven, and HDR (PQ,
    HLG) is tone-mapped to BT.709.

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

    Returns:
        uint8 (len(times), height, width, 3).

    Raises:
        ClipProblem: "decode_error" if any frame cannot be decoded.
    """
    indices = info.frames_at(times)
    out = np.empty((len(indices), height, width, 3), np.uint8)
    if not indices:
        return out

    resizer = _Resizer(info, height, width, resize, crop_position)
    with closing(Reader(info, threads)) as reader:
        for index, frame in reader.frames(sorted(set(indices))):
            first, *repeats = np.flatnonzero(np.equal(indices, index))
            resizer.write(frame, out[first])
            out[repeats] = out[first]
    return out


class Reader:
    """A clip that stays open between calls of ``frames``; each continues where the last
    stopped.

    It holds only the last frame. Close it, also after an error.

    Args:
        info: media info of the clip.
        threads: decoding threads; 0 chooses by the size of frames.
    """

    def __init__(self, info: MediaInfo, threads: int = 0) -> None:
        self.info = info
        self.threads = threads or _default_threads(info)
        self._container: Any = None
        self._decoded: Iterator[tuple[int, Any]] = iter(())
        self._last: tuple[int, Any] | None = None
        """Position and frame that were decoded last.

        A position is the pts, or the frame's number in a file whose frames are found by
        counting.
        """

        self._reached = -1
        """Index of the frame that the current pass has come to."""

        # Counting must start at the first frame.
        self._may_seek = not info.counted
        self._has_sought = False

    def close(self) -> None:
        """Close the file; the next call of ``frames`` reopens it."""
        if self._container is not None:
            self._container.close()
        self._container = None
        self._decoded = iter(())
        self._last = None
        self._reached = -1

    def frames(self, needed: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield (index, decoded frame) for ascending indices, in presentation order.

        Raises:
            ClipProblem: "decode_error", with the frame that cannot be decoded.
        """
        if self.info.still:
            yield 0, _still_frame(self.info)
            return

        missing = list(needed)
        while missing:
            try:
                for index, frame in self._decode_run(self._first_run(missing)):
                    missing.remove(index)
                    yield index, frame
            except ClipProblem:
                if not self._has_sought:
                    raise
                # In some files the index leads past the keyframe; a pass from the
                # beginning always works.
                self.close()
                self._may_seek = False

    def _first_run(self, needed: Sequence[int]) -> list[int]:
        """Return the first needed frames, up to the first gap that a seek skips faster."""
        if not self._may_seek:
            return list(needed)
        for count, (index, following) in enumerate(pairwise(needed), start=1):
            if self._keyframe_before(following) > index + LEAP:
                return list(needed[:count])
        return list(needed)

    def _keyframe_before(self, index: int) -> int:
        """Return the index at which decoding must start for a frame."""
        position = bisect_right(self.info.keyframes, index) - 1
        return self.info.keyframes[position] if position >= 0 else 0

    def _position_of(self, index: int) -> int:
        """Return what identifies a frame in the stream: its pts, or its number."""
        return index if self.info.counted else self.info.ticks[index]

    def _decode_run(self, run: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the frames of one run; continue the current pass or start another."""
        missing = {self._position_of(index): index for index in run}
        last_position = max(missing)
        keyframe = self._keyframe_before(run[0])
        is_behind = self._last is None or min(missing) < self._last[0]

        try:
            if is_behind or (self._may_seek and keyframe > self._reached + LEAP):
                self._start(keyframe if self._may_seek else 0)

            # The last frame of the run before may be needed again; chain() then frees
            # it.
            decoded = chain([] if self._last is None else [self._last], self._decoded)
            for position, frame in decoded:
                self._last = (position, frame)
                if position in missing:
                    index = missing.pop(position)
                    self._reached = index
                    if frame.is_corrupt:
                        raise self._problem(index, " is damaged")
                    yield index, frame
                if not missing or position > last_position:
                    break
        except (av.FFmpegError, OSError, ValueError, ArithmeticError) as error:
            detail = getattr(error, "strerror", None) or str(error)
            index = min(missing.values(), default=run[-1])
            raise self._problem(index, f": {detail}") from error

        if missing:
            self._last = None
            raise self._problem(min(missing.values()), " is not there")

    def _problem(self, index: int, fault: str) -> ClipProblem:
        return ClipProblem(
            "decode_error", f"frame {index} of {len(self.info.timestamps)}{fault}"
        )

    def _start(self, keyframe: int) -> None:
        """Start a pass at the keyframe with this index; 0 is the beginning of the file."""
        if self._container is None or keyframe == 0:
            self.close()
            path = os.path.abspath(self.info.path)
            self._container = av.open(
                path, options=OPEN_OPTIONS, metadata_errors="replace"
            )
            codec = video_stream(self._container).codec_context
            limit_pixels(codec)
            codec.thread_count = self.threads
            codec.thread_type = "NONE" if self.threads == 1 else "AUTO"

        stream = video_stream(self._container)
        self._has_sought = keyframe > 0
        if self._has_sought:
            self._container.seek(
                self.info.ticks[keyframe], stream=stream, backward=True
            )
        self._decoded = self._decode_stream(stream)
        self._last = None
        self._reached = keyframe - 1

    def _decode_stream(self, stream: Any) -> Iterator[tuple[int, Any]]:
        """Yield position and frame from here on; frames without a position are skipped."""
        counter = 0
        has_keyframe = not self.info.keyframes
        for packet in self._container.demux(stream):
            has_keyframe = has_keyframe or packet.is_keyframe

            # An empty packet that is not the end would end the decoding.
            is_end = packet.size == 0 and packet.dts is None
            is_empty = packet.size == 0 and not is_end
            if not has_keyframe or is_empty:
                continue

            for frame in packet.decode():
                position = counter if self.info.counted else frame.pts
                counter += 1
                if position is not None:
                    yield position, frame


def _default_threads(info: MediaInfo) -> int:
    # Below this size threads cost more than they gain.
    if info.width * info.height < 320 * 240:
        return 1
    return min(4, os.cpu_count() or 1)


def _still_frame(info: MediaInfo) -> Any:
    """Return an image as a PyAV frame (rgb24), upright.

    Raises:
        ClipProblem: "decode_error" if the file has changed.
    """
    try:
        pixels, _, _ = read_image(Path(info.path))
    except ClipProblem as problem:
        raise ClipProblem(
            "decode_error", f"frame 0 of 1: {problem.detail}"
        ) from problem

    if pixels.shape[:2] != (info.height, info.width):
        size = f"{pixels.shape[1]} × {pixels.shape[0]}"
        raise ClipProblem(
            "decode_error",
            f"frame 0 of 1 is {size} now, not {info.width} × {info.height}",
        )
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")


class _Resizer:
    """Writes decoded frames into arrays: upright, with square pixels, resized and
    cropped.

    Args:
        info: media info of the clip.
        height: height of the arrays.
        width: width of the arrays.
        resize: "center", "random", "pad" or "stretch".
        crop_position: where a crop is, as fractions of its margins (down, right).
    """

    def __init__(
        self,
        info: MediaInfo,
        height: int,
        width: int,
        resize: str,
        crop_position: tuple[float, float],
    ) -> None:
        self.info = info
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
        # Full chroma resolution on input and output. Without scaling, only chroma is
        # interpolated: bilinear as in players, in half the time.
        self._interpolation = (
            flags.ACCURATE_RND | flags.FULL_CHR_H_INT | flags.FULL_CHR_H_INP
        )
        is_scaled = (self.picture_height, self.picture_width) != (
            info.height,
            info.width,
        )
        self._interpolation |= flags.BICUBIC if is_scaled else flags.BILINEAR

        # swscale writes planar RGB with vector instructions and packed RGB without: the
        # same values in a third of the time.
        self._pixel_format = "gbrp10le" if info.hdr else "gbrp"
        self._dtype: Any = np.uint16 if info.hdr else np.uint8
        self._reformatter = av_reformatter.VideoReformatter()

    def write(self, frame: Any, out: Frames) -> None:
        """Write a decoded frame into uint8 (height, width, 3)."""
        planes = self._scaled_planes(frame)

        if self.has_borders:
            out[...] = 0
        bottom = self.border_top + self.picture_height
        right = self.border_left + self.picture_width
        visible = out[self.border_top : bottom, self.border_left : right]

        cropped: Any = np.empty(visible.shape, np.uint16) if self.info.hdr else visible
        for channel, plane in enumerate(planes):
            if self.info.mirrored:
                plane = np.flipud(plane)
            upright = np.rot90(plane, self.info.rotation // 90)
            cropped[..., channel] = upright[
                self.crop_top : self.crop_top + self.height,
                self.crop_left : self.crop_left + self.width,
            ]
        if self.info.hdr:
            visible[...] = to_sdr(cropped, self.info.hdr)

    def _scaled_planes(self, frame: Any) -> list[Any]:
        """Return red, green and blue of a frame at the picture's size, not yet upright."""
        decoded_height = self.picture_height
        decoded_width = self.picture_width
        if self.info.rotation % 180:
            decoded_height = self.picture_width
            decoded_width = self.picture_height

        scaled: Any = self._reformatter.reformat(
            frame,
            decoded_width,
            decoded_height,
            self._pixel_format,
            src_colorspace=_undeclared_matrix(frame),
            interpolation=self._interpolation,
            threads=1,
        )
        green, blue, red = scaled.planes
        arrays = []
        for plane in (red, green, blue):
            rows = np.frombuffer(memoryview(plane), self._dtype).reshape(
                decoded_height, -1
            )
            arrays.append(rows[:, :decoded_width])
        return arrays


def _undeclared_matrix(frame: Any) -> Any:
    """Return the colour matrix of a frame that declares none; None if it does."""
    if frame.format.is_rgb or frame.colorspace in (1, 4, 5, 6, 7, 9):
        return None
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


def to_sdr(pixels: NDArray[np.uint16], transfer: str) -> NDArray[np.uint8]:
    """Tone-map HDR pixels to SDR.

    Args:
        pixels: R'G'B' of BT.2020, 10 bits, full range, (..., 3).
        transfer: "PQ" or "HLG".

    Returns:
        R'G'B' of BT.709, 8 bits, (..., 3).

    Raises:
        ClipProblem: "decode_error" if this build of FFmpeg has no tone mapping.
    """
    flat = pixels.reshape(-1, 3)
    out = np.empty(flat.shape, np.uint8)
    convert = _tone_mapping(transfer)

    tile_pixels = TILE_HEIGHT * TILE_WIDTH
    for begin in range(0, len(flat), tile_pixels):
        part = flat[begin : begin + tile_pixels]
        tile = np.zeros((tile_pixels, 3), np.uint16)
        tile[: len(part)] = part
        converted = convert(tile.reshape(TILE_HEIGHT, TILE_WIDTH, 3)).reshape(-1, 3)
        out[begin : begin + len(part)] = converted[: len(part)]
    return out.reshape(pixels.shape)


class _ToneMapping:
    """FFmpeg's scale filter for tiles of one transfer; one thread at a time uses it."""

    def __init__(self, transfer: str) -> None:
        self._transfer = HDR_TRANSFERS[transfer]
        self._graph = av.filter.Graph()
        self._lock = Lock()

        source = (
            f"video_size={TILE_WIDTH}x{TILE_HEIGHT}:pix_fmt=gbrp10le:time_base=1/1:"
            "pixel_aspect=1/1:colorspace=0:range=2"
        )
        scale = "out_transfer=bt709:out_primaries=bt709:intent=perceptual"
        try:
            filters = [
                self._graph.add("buffer", source),
                self._graph.add("scale", scale),
                self._graph.add("format", "pix_fmts=gbrp"),
                self._graph.add("buffersink"),
            ]
            self._graph.link_nodes(*filters).configure()
        except (av.FFmpegError, ValueError) as error:
            raise ClipProblem(
                "decode_error",
                f"this build of FFmpeg has no tone mapping ({error}): convert the clip to SDR, "
                "or install a newer PyAV",
            ) from error

    def __call__(self, tile: NDArray[np.uint16]) -> Any:
        frame = av.VideoFrame.from_ndarray(tile, format="gbrp10le")
        frame.color_trc = self._transfer
        frame.color_primaries = 9
        frame.colorspace = 0
        frame.color_range = 2
        with self._lock:
            self._graph.push(frame)
            return self._graph.pull().to_ndarray()


@lru_cache(maxsize=2)
def _tone_mapping(transfer: str) -> Callable[[NDArray[np.uint16]], NDArray[np.uint8]]:
    """Return the filter for a transfer, built once."""
    return _ToneMapping(transfer)
