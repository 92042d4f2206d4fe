"""High dynamic range to BT.709, for standard screens: by FFmpeg's own tone mapping (swscale, perceptual intent)."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from .facts import ClipProblem

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
"""Raised when other pixels come of the same ones, so that older latents are made anew."""

TRANSFERS = {"PQ": 16, "HLG": 18}
"""FFmpeg's numbers of the transfers: SMPTE ST 2084 and ARIB STD-B67, both of BT.2100."""

HIGH, WIDE = 128, 512
"""Tone mapping looks at each pixel by itself, so pixels of any picture go through one graph of this size: to build the
graph's table takes seconds."""


def to_sdr(pixels: NDArray[np.uint16], transfer: str) -> NDArray[np.uint8]:
    """R'G'B' of BT.2020 in 10 bits, full range, as ``transfer`` says, (..., 3) -> R'G'B' of BT.709 in 8 bits, (..., 3).

    ClipProblem (decode_error) where this build of FFmpeg has no tone mapping.
    """
    flat = pixels.reshape(-1, 3)
    out = np.empty(flat.shape, np.uint8)
    graph = _graph(transfer)
    for begin in range(0, len(flat), HIGH * WIDE):
        part = flat[begin : begin + HIGH * WIDE]
        tile = np.zeros((HIGH * WIDE, 3), np.uint16)
        tile[: len(part)] = part
        out[begin : begin + len(part)] = graph(tile.reshape(HIGH, WIDE, 3)).reshape(-1, 3)[: len(part)]
    return out.reshape(pixels.shape)


@lru_cache(maxsize=2)
def _graph(transfer: str) -> _Graph:
    return _Graph(TRANSFERS[transfer])


class _Graph:
    """FFmpeg's scale filter for pictures of one size; one thread at a time."""

    def __init__(self, transfer: int) -> None:
        import av

        self._lock, self._transfer = Lock(), transfer
        self._graph = av.filter.Graph()
        words = f"video_size={WIDE}x{HIGH}:pix_fmt=gbrp10le:time_base=1/1:pixel_aspect=1/1:colorspace=0:range=2"
        try:
            links = [
                self._graph.add("buffer", words),
                self._graph.add("scale", "out_transfer=bt709:out_primaries=bt709:intent=perceptual"),
                self._graph.add("format", "pix_fmts=gbrp"),
                self._graph.add("buffersink"),
            ]
            self._graph.link_nodes(*links).configure()
        except (av.FFmpegError, ValueError) as error:
            detail = f"this build of FFmpeg has no tone mapping ({error}): make it SDR first, or take a newer PyAV"
            raise ClipProblem("decode_error", detail) from error

    def __call__(self, tile: NDArray[np.uint16]) -> Any:
        import av

        frame = av.VideoFrame.from_ndarray(tile, format="gbrp10le")
        frame.color_trc, frame.color_primaries, frame.colorspace, frame.color_range = self._transfer, 9, 0, 2
        with self._lock:
            self._graph.push(frame)
            return self._graph.pull().to_ndarray()
