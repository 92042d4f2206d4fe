"""Read decoded frames of a clip by their index, with seeks where these are faster."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from videotune.cpu_threads import available_cores
from videotune.data.clock import BROADCAST_FORMATS, StreamClock
from videotune.data.file_checks import ClipProblem
from videotune.data.images import read_alpha, read_image
from videotune.data.media_info import MediaInfo
from videotune.data.object_files import local_copy
from videotune.data.probe import OPEN_OPTIONS, limit_pixels, packets_of, video_stream
from videotune.data.side_data import Crop
from videotune.errors import VideotuneError
from videotune.lazy import av

LEAP = 12
"""Seek only if it skips more frames than this: a seek empties the decoder and stalls
its threads.
"""


class FrameReader:
    """A clip that stays open between calls of ``frames``; each continues where the last
    stopped.

    It holds only the last frame. Frames come without the pixels that the container
    hides. Close the reader, also after an error.

    Args:
        info: media info of the clip.
        threads: decoding threads; 0 chooses by the size of frames.
        alpha: give a still its alpha channel, which videos always have.
    """

    def __init__(
        self, info: MediaInfo, threads: int = 0, *, alpha: bool = False
    ) -> None:
        self.info = info
        self._alpha = alpha
        self.threads = threads or _default_threads(info)
        self._container: Any = None
        self._decoded: Iterator[tuple[int, Any]] = iter(())
        self._last: tuple[int, Any] | None = None
        """Position and frame that were decoded last.

        A position is the pts, or the frame's number in a file whose frames are found by
        counting.
        """

        self._reached = -1
        """Index of the last frame that the current pass has yielded."""

        # Frames that are counted, and clocks that restart, are followed from the beginning.
        self._may_seek = info.seekable
        self._has_sought = False
        self._local_copy = ExitStack()
        """Holds the file of a clip that is on an object store."""
        self._cropper = _Cropper(info.crop)

    def close(self) -> None:
        """Close the file; the next call of ``frames`` reopens it."""
        if self._container is not None:
            self._container.close()
        self._local_copy.close()
        self._container = None
        self._decoded = iter(())
        self._last = None
        self._reached = -1

    @property
    def pixel_aspect(self) -> float:
        """Width of a pixel over its height, as the pictures decoded last declare it.

        Only broadcast containers may change it within a stream. In others it is 1.0: the
        one that they declare for the whole stream is in ``MediaInfo.width`` already.
        """
        is_broadcast = any(
            name in BROADCAST_FORMATS for name in self.info.container.split(",")
        )
        if self._container is None or not is_broadcast:
            return 1.0
        context = video_stream(self._container).codec_context
        return float(context.sample_aspect_ratio or 1)

    def frames(self, needed: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield (index, decoded frame) for ascending indices, in presentation order.

        Raises:
            ClipProblem: "decode_error", with the frame that cannot be decoded.
        """
        if self.info.still:
            yield 0, _still_frame(self.info, self._alpha)
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
        """Return the first run of the needed frames: those up to the first gap that a seek
        skips faster.
        """
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
        """Yield the frames of one run, which is decoded without a seek. Continue the pass that
        decodes since the last seek, or start another if the run is not ahead of it, or so far
        ahead that a keyframe is nearer.
        """
        missing = {self._position_of(index): index for index in run}
        last_position = max(missing)
        keyframe = self._keyframe_before(run[0])
        is_behind = self._last is None or min(missing) < self._last[0]

        try:
            if is_behind or (self._may_seek and keyframe > self._reached + LEAP):
                self._start(keyframe if self._may_seek else 0)

            # The last frame of the run before may be needed again, so it comes first. Only
            # chain() holds it then, and frees it.
            decoded = chain([] if self._last is None else [self._last], self._decoded)
            for position, frame in decoded:
                self._last = (position, frame)
                if position in missing:
                    index = missing.pop(position)
                    self._reached = index
                    if frame.is_corrupt:
                        raise self._problem(index, " is damaged")
                    yield index, self._cropper.crop(frame)
                if not missing or position > last_position:
                    break
        except VideotuneError:  # of an object store, and no fault of the clip
            raise
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
            local = self._local_copy.enter_context(local_copy(self.info.path))
            path = os.path.abspath(local)
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
        clock = StreamClock(self._container, stream) if self.info.restarts else None
        for packet in packets_of(self._container, stream):
            has_keyframe = has_keyframe or packet.is_keyframe

            # An empty packet that is not the end would end the decoding.
            is_end = packet.size == 0 and packet.dts is None
            is_empty = packet.size == 0 and not is_end
            if not has_keyframe or is_empty:
                continue
            if clock is not None and not is_end and not clock.admit(packet):
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
    return min(4, available_cores())


def _still_frame(info: MediaInfo, alpha: bool) -> Any:
    """Return an image as a PyAV frame, upright: rgb24, or rgba with its alpha channel.

    Raises:
        ClipProblem: "decode_error" if the file has changed.
    """
    path = Path(info.path)
    try:
        pixels, _, _ = read_image(path)
        if alpha:
            pixels = np.dstack([pixels, read_alpha(path)])
    except VideotuneError:
        raise
    except (ClipProblem, ValueError) as problem:
        raise ClipProblem("decode_error", f"frame 0 of 1: {problem}") from problem

    if pixels.shape[:2] != (info.height, info.width):
        size = f"{pixels.shape[1]} × {pixels.shape[0]}"
        raise ClipProblem(
            "decode_error",
            f"frame 0 of 1 is {size} now, not {info.width} × {info.height}",
        )
    pixel_format = "rgba" if alpha else "rgb24"
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=pixel_format)


class _Cropper:
    """Takes off the pixels of frames that a container hides, without a copy."""

    def __init__(self, crop: Crop) -> None:
        self._crop = crop
        self._graph: Any = None
        self._form: tuple[int, int, str] | None = None
        """Width, height and pixel format of the frames that the graph takes."""

    def crop(self, frame: Any) -> Any:
        """Return the visible part of a frame."""
        if not any(self._crop):
            return frame

        form = (frame.width, frame.height, frame.format.name)
        if form != self._form:
            self._graph = _crop_graph(self._crop, form)
            self._form = form
        # The graph has no use for times; without them it takes frames in any order.
        pts = frame.pts
        frame.pts = None
        self._graph.push(frame)
        cropped = self._graph.pull()
        frame.pts = pts
        cropped.pts = pts
        return cropped


def _crop_graph(crop: Crop, form: tuple[int, int, str]) -> Any:
    """Build the filter graph that crops frames of one form.

    Raises:
        ValueError: if nothing would be left.
    """
    left, right, top, bottom = crop
    width, height, pixel_format = form
    visible_width = width - left - right
    visible_height = height - top - bottom
    if visible_width < 1 or visible_height < 1:
        raise ValueError("the cropping leaves nothing of the frame")

    graph = av.filter.Graph()
    source = f"video_size={width}x{height}:pix_fmt={pixel_format}:time_base=1/1"
    filters = [
        graph.add("buffer", source),
        graph.add("crop", f"{visible_width}:{visible_height}:{left}:{top}:exact=1"),
        graph.add("buffersink"),
    ]
    graph.link_nodes(*filters).configure()
    return graph
