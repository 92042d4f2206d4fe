"""Times of a clip -> its frames as uint8 RGB, upright, resized and cropped, by PyAV."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .facts import ClipProblem, Facts, shown_at
from .probe import OPEN_OPTIONS, video_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Frames = NDArray[np.uint8]


def decode(facts: Facts, times: Sequence[float], height: int, width: int) -> Frames:
    """The frame on the screen at each time, uint8 (len(times), height, width, 3): exactly so many, or an error.

    ``times`` are seconds of the clip (``shown_at`` says which frame that is, and with what tolerance). A frame is turned
    upright, its pixels made square, resized until it covers height × width (antialiased bicubic) and cropped about its
    centre. Colours follow the matrix and the range that the frame declares; undeclared, BT.709 for HD and BT.601 below,
    as players do. An alpha channel is left out. ClipProblem (decode_error) where a frame cannot be had.
    """
    indices = shown_at(facts, times)
    needed = sorted(set(indices))
    if not needed:
        return np.empty((0, height, width, 3), np.uint8)
    key = max((k for k in facts.keyframes if k <= needed[0]), default=0)
    if facts.counted or key == 0:
        found = _collect(facts, needed, height, width, seek_to=None)
    else:
        try:
            found = _collect(facts, needed, height, width, seek_to=key)
        except ClipProblem:  # some files' indices lead past the keyframe: the whole way always works
            found = _collect(facts, needed, height, width, seek_to=None)
    return np.stack([found[index] for index in indices])


def _collect(facts: Facts, needed: list[int], height: int, width: int, seek_to: int | None) -> dict[int, Frames]:
    """The needed frames by index, decoding on from a keyframe or, for None, from the beginning."""
    import av

    missing = set(needed)
    found: dict[int, Frames] = {}
    shape = _Reshape(facts, height, width)
    try:
        with av.open(os.path.abspath(facts.path), options=OPEN_OPTIONS, metadata_errors="replace") as container:
            for index, frame in _numbered(facts, container, seek_to):
                if index in missing:
                    if frame.is_corrupt:
                        raise ClipProblem("decode_error", f"frame {index} of {len(facts.timestamps)} is damaged")
                    found[index] = shape(frame)
                    missing.discard(index)
                if not missing or index > needed[-1]:
                    break
    except (av.FFmpegError, OSError) as error:
        where = f"frame {min(missing, default=needed[-1])} of {len(facts.timestamps)}"
        raise ClipProblem("decode_error", f"{where}: {getattr(error, 'strerror', None) or error}") from error
    if missing:
        raise ClipProblem("decode_error", f"frame {min(missing)} of {len(facts.timestamps)} is not there")
    return found


def _numbered(facts: Facts, container: Any, seek_to: int | None) -> Iterator[tuple[int, Any]]:
    """Decoded frames with their index among the clip's timestamps, in order of presentation; others are left out."""
    stream = video_stream(container)
    # threads cost more than they give on small frames
    stream.thread_type = "AUTO" if min(facts.width, facts.height) > 480 else "NONE"
    if seek_to is not None:
        container.seek(facts.tick(seek_to), stream=stream, backward=True)
    index_of = {facts.tick(i): i for i in range(len(facts.timestamps))}
    counter = 0
    started = not facts.keyframes
    for packet in container.demux(stream):
        started = started or packet.is_keyframe
        at_end = packet.size == 0 and packet.dts is None
        if not started or (packet.size == 0 and not at_end):  # an empty packet would end the decoding
            continue
        for frame in packet.decode():
            index = counter if facts.counted else index_of.get(frame.pts)
            counter += 1
            if index is not None:
                yield index, frame


class _Reshape:
    """A decoded frame -> uint8 (height, width, 3): upright, square pixels, covering, cropped about the centre."""

    def __init__(self, facts: Facts, height: int, width: int) -> None:
        from av.video.reformatter import VideoReformatter

        scale = max(height / facts.height, width / facts.width)
        self.size = max(height, round(facts.height * scale)), max(width, round(facts.width * scale))
        self.crop = (self.size[0] - height) // 2, (self.size[1] - width) // 2
        self.height, self.width = height, width
        self.turns = facts.rotation // 90
        self.mirrored = facts.mirrored
        self.reformatter = VideoReformatter()

    def __call__(self, frame: Any) -> Frames:
        from av.video.reformatter import Colorspace, Interpolation

        how = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.BITEXACT
        high, wide = self.size if self.turns % 2 == 0 else self.size[::-1]
        matrix = None
        if not frame.format.is_rgb and frame.colorspace not in (1, 4, 5, 6, 7, 9):
            hd = frame.height > 576 or frame.width >= 1280
            matrix = Colorspace.ITU709 if hd else Colorspace.ITU601
        rgb = self.reformatter.reformat(
            frame, wide, high, "rgb24", src_colorspace=matrix, interpolation=how, threads=1
        ).to_ndarray()
        rgb = np.rot90(np.flipud(rgb) if self.mirrored else rgb, self.turns)
        top, left = self.crop
        return np.ascontiguousarray(rgb[top : top + self.height, left : left + self.width])
