"""Times of a clip -> its frames as uint8 RGB, upright, resized and cropped, by PyAV; HDR tone-mapped by FFmpeg's swscale
(perceptual intent)."""

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
from videotune.data.media_info import (
    HDR_TRANSFERS,
    OPEN_OPTIONS,
    MediaInfo,
    limit_pixels,
    video_stream,
)
from videotune.lazy import av, av_reformatter

Frames = NDArray[np.uint8]

LEAP = 12
"""Seek only where it spares more frames than this: a seek empties the decoder, whose threads then begin anew."""

TONE_MAPPING_VERSION = 1
"""Raised when other pixels come of the same ones, so that older latents are made anew."""

TILE_HEIGHT = 128
TILE_WIDTH = 512
"""Tone mapping treats each pixel by itself, so pixels of any picture go through one graph of this size: to build the
graph's table takes seconds."""


def decode(
    info: MediaInfo,
    times: Sequence[float],
    height: int,
    width: int,
    resize: str = "center",
    place: tuple[float, float] = (0.5, 0.5),
    threads: int = 0,
) -> Frames:
    """The frame on display at each time, uint8 (len(times), height, width, 3): exactly so many, or an error.

    ``times`` are seconds of the clip in any order (``MediaInfo.frames_at`` tells the frames, and the tolerance).
    A frame is turned upright, its pixels made square, and resized (antialiased bicubic): "center" and "random" until it
    covers height × width, cropped at ``place``, fractions of the margins that the crop has, down and right; "pad" until all
    of it fits, centred on black; "stretch" to the size, its aspect given up. Colours follow the matrix and the range
    that the frame declares; undeclared, BT.709 for HD and BT.601 below, as players do. An alpha channel is left out,
    the two fields of an interlaced frame stay woven, and HDR (PQ, HLG) is tone-mapped to BT.709.

    ``threads`` decode, 0: as many as serve frames of this size. ClipProblem (decode_error) where a frame cannot be had.
    """
    indices = info.frames_at(times)
    out = np.empty((len(indices), height, width, 3), np.uint8)
    if indices:
        reshape = _reshaper(info, height, width, resize, place)
        with closing(Reader(info, threads)) as reader:
            for index, frame in reader.frames(sorted(set(indices))):
                first, *others = np.flatnonzero(np.equal(indices, index))
                reshape(frame, out[first])
                out[others] = out[first]
    return out


class Reader:
    """A clip held open between calls of ``frames``, each of which continues where the last one stopped.

    Holds no frame but the last. Close it, also after an error.
    """

    def __init__(self, info: MediaInfo, threads: int = 0) -> None:
        self.info = info
        small = info.width * info.height < 320 * 240  # threads cost more than they give there
        self.threads = threads or (1 if small else min(4, os.cpu_count() or 1))
        self._container: Any = None
        self._decoded: Iterator[tuple[int, Any]] = iter(())
        self._last: tuple[int, Any] | None = (
            None  # the last frame that was decoded, and its place
        )
        self._reached = -1  # the index up to which the current pass has come
        self._may_seek = (
            not info.counted
        )  # in counted files only the way from the beginning tells a frame's number
        self._sought = False

    def close(self) -> None:
        """Give the file back; the reader opens it anew if it is asked again."""
        if self._container is not None:
            self._container.close()
        self._container = None
        self._decoded = iter(())
        self._last = None
        self._reached = -1

    def frames(self, needed: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """(index, decoded frame) for each of the ascending indices, in order of presentation.

        ClipProblem (decode_error) that names the frame which cannot be had.
        """
        if self.info.still:
            yield 0, _still_frame(self.info)
            return
        missing = list(needed)
        while missing:
            try:
                for index, frame in self._walk(self._run(missing)):
                    missing.remove(index)
                    yield index, frame
            except ClipProblem:
                if not self._sought:
                    raise
                self.close()  # some files' indices lead past the keyframe: the whole way always works
                self._may_seek = False

    def _run(self, needed: Sequence[int]) -> list[int]:
        """The first of the needed frames, up to where seeking again is the shorter way."""
        steps = enumerate(pairwise(needed), 1) if self._may_seek else ()
        end = next(
            (i for i, (before, after) in steps if self._keyframe(after) > before + LEAP), None
        )
        return list(needed[:end])

    def _keyframe(self, index: int) -> int:
        """Where decoding must start for this frame."""
        at = bisect_right(self.info.keyframes, index) - 1
        return self.info.keyframes[at] if at >= 0 else 0

    def _walk(self, run: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The frames of one run, on from where the reader is, or from a keyframe, or from the beginning.

        A frame is identified by its pts, or in counted files by its number.
        """
        wanted = {
            index if self.info.counted else self.info.ticks[index]: index for index in run
        }
        end = max(wanted)
        key = self._keyframe(run[0])
        behind = self._last is None or min(wanted) < self._last[0]
        try:
            if behind or (self._may_seek and key > self._reached + LEAP):
                self._start(key if self._may_seek else 0)
            for place, frame in chain(filter(None, (self._last,)), self._decoded):
                self._last = place, frame
                if place in wanted:
                    self._reached = index = wanted.pop(place)
                    if frame.is_corrupt:
                        raise self._problem(index, " is damaged")
                    yield index, frame
                if not wanted or place > end:
                    break
        except (av.FFmpegError, OSError, ValueError, ArithmeticError) as error:
            detail = getattr(error, "strerror", None) or str(error)
            raise self._problem(min(wanted.values(), default=run[-1]), f": {detail}") from error
        if wanted:
            self._last = None
            raise self._problem(min(wanted.values()), " is not there")

    def _problem(self, index: int, what: str) -> ClipProblem:
        return ClipProblem(
            "decode_error", f"frame {index} of {len(self.info.timestamps)}{what}"
        )

    def _start(self, key: int) -> None:
        """Begin a pass at a keyframe; 0 is the beginning."""
        if self._container is None or key == 0:
            self.close()
            path = os.path.abspath(self.info.path)
            self._container = av.open(path, options=OPEN_OPTIONS, metadata_errors="replace")
            codec = video_stream(self._container).codec_context
            limit_pixels(codec)
            codec.thread_count = self.threads
            codec.thread_type = "NONE" if self.threads == 1 else "AUTO"
        stream = video_stream(self._container)
        self._sought = key > 0
        if self._sought:
            self._container.seek(self.info.ticks[key], stream=stream, backward=True)
        self._decoded = self._from_here(stream)
        self._last = None
        self._reached = key - 1

    def _from_here(self, stream: Any) -> Iterator[tuple[int, Any]]:
        """Decoded frames with their places, from where the container stands; those without a place are left out."""
        counter = 0
        started = not self.info.keyframes
        for packet in self._container.demux(stream):
            started = started or packet.is_keyframe
            at_end = packet.size == 0 and packet.dts is None
            if not started or (
                packet.size == 0 and not at_end
            ):  # an empty packet would end the decoding
                continue
            for frame in packet.decode():
                place = counter if self.info.counted else frame.pts
                counter += 1
                if place is not None:
                    yield place, frame


def _still_frame(info: MediaInfo) -> Any:
    """The picture of a still clip as a PyAV frame (rgb24), upright; ClipProblem (decode_error) where it has changed."""
    try:
        pixels, _, _ = read_image(Path(info.path))
    except ClipProblem as problem:
        raise ClipProblem("decode_error", f"frame 0 of 1: {problem.detail}") from problem
    if pixels.shape[:2] != (info.height, info.width):
        now = f"{pixels.shape[1]} × {pixels.shape[0]}"
        raise ClipProblem(
            "decode_error", f"frame 0 of 1 is {now} now, not {info.width} × {info.height}"
        )
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")


def _reshaper(
    info: MediaInfo, height: int, width: int, resize: str, place: tuple[float, float]
) -> Callable[[Any, Frames], None]:
    """What writes a decoded frame into uint8 (height, width, 3): upright, square pixels, sized and cropped."""
    size = _size(info, height, width, resize)
    if math.prod(size) > MAX_PIXELS:
        shape = f"a picture of {info.width} × {info.height} cannot be cut to {width} × {height}"
        raise ClipProblem("decode_error", f"{shape}: it is far too long and narrow")
    margins = [have - want for have, want in zip(size, (height, width), strict=True)]
    top, left, down, right = 0, 0, *(-free // 2 for free in margins)
    if resize in ("center", "random"):  # the nearest whole pixel, ties up and left
        top, left = (
            math.ceil(part * free - 0.5) for part, free in zip(place, margins, strict=True)
        )
        down = right = 0
    turns = info.rotation // 90
    reformatter = av_reformatter.VideoReformatter()
    flags = av_reformatter.Interpolation
    high, wide = size if turns % 2 == 0 else size[::-1]
    # colour at every pixel, in and out; where nothing is scaled, colour alone is spread to every pixel: linearly, as
    # players do, in half the time
    how = flags.ACCURATE_RND | flags.FULL_CHR_H_INT | flags.FULL_CHR_H_INP
    how |= flags.BILINEAR if size == (info.height, info.width) else flags.BICUBIC
    # swscale writes planes with vector instructions and packed RGB without: the same values in a third of the time
    form, dtype = ("gbrp10le", np.uint16) if info.hdr else ("gbrp", np.uint8)

    def reshape(frame: Any, out: Frames) -> None:
        matrix = None
        if not frame.format.is_rgb and frame.colorspace not in (1, 4, 5, 6, 7, 9):
            hd = frame.height > 576 or frame.width >= 1280
            matrix = (
                av_reformatter.Colorspace.ITU709 if hd else av_reformatter.Colorspace.ITU601
            )
        sized: Any = reformatter.reformat(
            frame, wide, high, form, src_colorspace=matrix, interpolation=how, threads=1
        )
        planes = sized.planes
        if resize == "pad" and any(margins):
            out[...] = 0
        shown = out[down : down + size[0], right : right + size[1]]
        cropped: Any = np.empty(shown.shape, np.uint16) if info.hdr else shown
        for channel, plane in enumerate((planes[2], planes[0], planes[1])):
            pixels: Any = np.frombuffer(memoryview(plane), dtype).reshape(high, -1)[:, :wide]
            upright = np.rot90(np.flipud(pixels) if info.mirrored else pixels, turns)
            cropped[..., channel] = upright[top : top + height, left : left + width]
        if info.hdr:
            shown[...] = to_sdr(cropped, info.hdr)

    return reshape


def _size(info: MediaInfo, height: int, width: int, resize: str) -> tuple[int, int]:
    """(height, width) of the whole picture, upright, before it is cropped or padded."""
    if resize == "stretch":
        return height, width
    ratios = height / info.height, width / info.width
    scale = min(ratios) if resize == "pad" else max(ratios)
    high = round(info.height * scale)
    wide = round(info.width * scale)
    if resize == "pad":
        return max(1, min(height, high)), max(1, min(width, wide))
    return max(height, high), max(width, wide)


def to_sdr(pixels: NDArray[np.uint16], transfer: str) -> NDArray[np.uint8]:
    """R'G'B' of BT.2020 in 10 bits, full range, as ``transfer`` says, (..., 3) -> R'G'B' of BT.709 in 8 bits, (..., 3).

    ClipProblem (decode_error) where this build of FFmpeg has no tone mapping.
    """
    flat = pixels.reshape(-1, 3)
    out = np.empty(flat.shape, np.uint8)
    convert = _tone_mapping(transfer)
    for begin in range(0, len(flat), TILE_HEIGHT * TILE_WIDTH):
        part = flat[begin : begin + TILE_HEIGHT * TILE_WIDTH]
        tile = np.zeros((TILE_HEIGHT * TILE_WIDTH, 3), np.uint16)
        tile[: len(part)] = part
        out[begin : begin + len(part)] = convert(
            tile.reshape(TILE_HEIGHT, TILE_WIDTH, 3)
        ).reshape(-1, 3)[: len(part)]
    return out.reshape(pixels.shape)


@lru_cache(maxsize=2)
def _tone_mapping(transfer: str) -> Callable[[NDArray[np.uint16]], NDArray[np.uint8]]:
    """FFmpeg's scale filter for pictures of one size; one thread at a time."""
    graph = av.filter.Graph()
    lock = Lock()
    size = f"video_size={TILE_WIDTH}x{TILE_HEIGHT}"
    try:
        links = [
            graph.add(
                "buffer",
                f"{size}:pix_fmt=gbrp10le:time_base=1/1:pixel_aspect=1/1:colorspace=0:range=2",
            ),
            graph.add("scale", "out_transfer=bt709:out_primaries=bt709:intent=perceptual"),
            graph.add("format", "pix_fmts=gbrp"),
            graph.add("buffersink"),
        ]
        graph.link_nodes(*links).configure()
    except (av.FFmpegError, ValueError) as error:
        detail = f"this build of FFmpeg has no tone mapping ({error}): make it SDR first, or take a newer PyAV"
        raise ClipProblem("decode_error", detail) from error

    def convert(tile: NDArray[np.uint16]) -> Any:
        frame = av.VideoFrame.from_ndarray(tile, format="gbrp10le")
        frame.color_trc = HDR_TRANSFERS[transfer]
        frame.color_primaries = 9
        frame.colorspace = 0
        frame.color_range = 2
        with lock:
            graph.push(frame)
            return graph.pull().to_ndarray()

    return convert
