"""Convert pictures of high dynamic range or wide gamut to SDR of BT.709, by FFmpeg's
swscale.
"""

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import HDR_TRANSFERS, WIDE_PRIMARIES
from videotune.files import digest
from videotune.lazy import av

TONE_MAPPING_VERSION = 1
"""Increase it when tone mapping changes pixels, so that older latents are re-encoded.
"""

_NUMBERS: dict[Any, int] = {**HDR_TRANSFERS, **WIDE_PRIMARIES}
_BT709 = 1
_BT2020 = 9

TILE_HEIGHT = 128
TILE_WIDTH = 512
"""Tone mapping treats each pixel by itself, so pictures of any size go through one
filter graph of this size: building the graph's table takes seconds.
"""


def id_of_pixels(content_id: str, info: MediaInfo) -> str:
    """Return the id of a file's decoded pixels: the hash of its bytes, or for a file in HDR
    that with the version of the tone mapping.
    """
    if info.hdr is None:
        return content_id
    return digest([content_id, "tone-mapped", TONE_MAPPING_VERSION])


def to_sdr(pixels: NDArray[np.uint16], colours: str) -> NDArray[np.uint8]:
    """Convert HDR or wide-gamut pixels to SDR of BT.709.

    Args:
        pixels: R'G'B' as declared, 10 bits, full range, (..., 3).
        colours: a transfer of ``HDR_TRANSFERS``, whose primaries are those of BT.2020;
            or primaries of ``WIDE_PRIMARIES``, whose transfer is that of BT.709.

    Returns:
        R'G'B' of BT.709, 8 bits, (..., 3).

    Raises:
        ClipProblem: "decode_error" if this build of FFmpeg has no tone mapping.
    """
    flat = pixels.reshape(-1, 3)
    out = np.empty(flat.shape, np.uint8)
    convert = _conversion(colours)

    tile_pixels = TILE_HEIGHT * TILE_WIDTH
    for begin in range(0, len(flat), tile_pixels):
        part = flat[begin : begin + tile_pixels]
        tile = np.zeros((tile_pixels, 3), np.uint16)
        tile[: len(part)] = part
        converted = convert(tile.reshape(TILE_HEIGHT, TILE_WIDTH, 3)).reshape(-1, 3)
        out[begin : begin + len(part)] = converted[: len(part)]
    return out.reshape(pixels.shape)


class _Conversion:
    """FFmpeg's scale filter for tiles of some colours; one thread at a time uses it."""

    def __init__(self, colours: str) -> None:
        is_hdr = colours in HDR_TRANSFERS
        self._transfer = _NUMBERS[colours] if is_hdr else _BT709
        self._primaries = _BT2020 if is_hdr else _NUMBERS[colours]
        self._graph = av.filter.Graph()
        self._lock = Lock()

        source = (
            f"video_size={TILE_WIDTH}x{TILE_HEIGHT}:pix_fmt=gbrp10le:time_base=1/1:"
            "pixel_aspect=1/1:colorspace=0:range=2"
        )
        # A wide gamut mostly holds colours of BT.709, which must come back exactly.
        intent = "perceptual" if is_hdr else "relative_colorimetric"
        scale = f"out_transfer=bt709:out_primaries=bt709:intent={intent}"
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
        frame.color_primaries = self._primaries
        frame.colorspace = 0
        frame.color_range = 2
        with self._lock:
            self._graph.push(frame)
            return self._graph.pull().to_ndarray()


@lru_cache(maxsize=4)
def _conversion(colours: str) -> Callable[[NDArray[np.uint16]], NDArray[np.uint8]]:
    """Return the filter for colours, built once."""
    return _Conversion(colours)
