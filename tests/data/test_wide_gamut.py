"""Clips of SDR in a gamut beyond BT.709 are shown in BT.709, as a player shows them."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.support.datasets import scanned
from videotune.data.decode import decode
from videotune.data.probe import probe

# Linear BT.709 to linear BT.2020 (ITU-R BT.2087) and to linear P3 with D65.
TO_2020 = [
    [0.6274, 0.3293, 0.0433],
    [0.0691, 0.9195, 0.0114],
    [0.0164, 0.0880, 0.8956],
]
TO_P3 = [[0.8225, 0.1774, 0.0], [0.0332, 0.9669, 0.0], [0.0171, 0.0724, 0.9108]]

LINEAR = np.array(
    [
        [0.5, 0.5, 0.5],
        [0.8, 0.05, 0.05],
        [0.05, 0.6, 0.05],
        [0.05, 0.05, 0.7],
        [0.5, 0.4, 0.02],
        [1.0, 1.0, 1.0],
    ]
)

DISPLAY_GAMMA = 2.4
"""ITU-R BT.1886."""


def write_patches(path: Path, colours: np.ndarray, parameters: str) -> Path:
    """Five frames of patches 32 wide, of R'G'B' (N, 3); the matrix's luma is in it."""
    red_share, blue_share = (
        (0.2627, 0.0593) if "bt2020nc" in parameters else (0.2126, 0.0722)
    )
    luma = colours @ [red_share, 1 - red_share - blue_share, blue_share]
    blue = (colours[:, 2] - luma) / (2 * (1 - blue_share))
    red = (colours[:, 0] - luma) / (2 * (1 - red_share))
    width = 32 * len(colours)

    planes = []
    levels = (64 + 876 * luma, 512 + 896 * blue, 512 + 896 * red)
    for level, side in zip(levels, (32, 16, 16), strict=True):
        row = np.round(level).astype(np.uint16).repeat(side)
        planes.append(row[None].repeat(2 * side, 0).ravel())
    pixels = np.concatenate(planes).reshape(-1, width)

    with av.open(str(path), "w") as container:
        options = {"x265-params": f"lossless=1:log-level=none:{parameters}"}
        stream: Any = container.add_stream("libx265", rate=16, options=options)
        stream.width, stream.height, stream.pix_fmt = width, 64, "yuv420p10le"
        stream.codec_context.codec_tag = "hvc1"
        for i in range(5):
            frame = av.VideoFrame.from_ndarray(pixels, format="yuv420p10le")
            frame.pts, frame.time_base = i, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("gamut", "matrix", "parameters"),
    [
        (
            "BT.2020",
            TO_2020,
            "colorprim=bt2020:colormatrix=bt2020nc:transfer=bt2020-10",
        ),
        ("P3", TO_P3, "colorprim=smpte432:colormatrix=bt709:transfer=bt709"),
    ],
)
def test_colours_of_bt709_come_back(
    tmp_path: Path, gamut: str, matrix: list[list[float]], parameters: str
) -> None:
    colours = (LINEAR @ np.array(matrix).T) ** (1 / DISPLAY_GAMMA)
    (tmp_path / "d").mkdir()
    path = write_patches(tmp_path / "d" / "a.mp4", colours, parameters)
    info = probe(path)
    assert (info.gamut, info.hdr) == (gamut, None)

    shown = decode(info, [0.0], info.height, info.width)[0, 32, 16::32]
    expected = 255 * LINEAR ** (1 / DISPLAY_GAMMA)
    assert np.abs(shown.astype(float) - expected).max() <= 2
    assert np.abs(255 * colours - expected).max() > 20, "as stored they are paler"
    (account,) = scanned(tmp_path / "d", video_config={"min_frames": 1}).accounts
    assert any(gamut in note for note in account["notes"])


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ("colorprim=bt709:colormatrix=bt709:transfer=linear", "linear light"),
        ("colorprim=bt709:colormatrix=bt709:transfer=log100", "logarithmic"),
        ("colorprim=bt709:colormatrix=bt709:transfer=bt470bg", "gamma 2.8"),
        ("colorprim=smpte431:colormatrix=bt709:transfer=bt709", "DCI-P3"),
        (
            "colorprim=smpte428:colormatrix=bt709:transfer=smpte428",
            "SMPTE ST 428, XYZ",
        ),
        ("colorprim=smpte170m:colormatrix=smpte170m:transfer=smpte170m", ""),
        ("colorprim=bt709:colormatrix=bt709:transfer=iec61966-2-1", ""),
        ("colorprim=bt2020:colormatrix=bt2020nc:transfer=smpte2084", ""),
    ],
)
def test_colours_that_only_a_player_converts_are_said(
    tmp_path: Path, parameters: str, named: str
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    path = write_patches(folder / "a.mp4", LINEAR, parameters)
    assert probe(path).unconverted == named

    (account,) = scanned(folder, video_config={"min_frames": 1}).accounts
    codes = [getattr(warning, "code", "") for warning in account["warnings"]]
    assert ("unconverted_colours" in codes) is bool(named)
