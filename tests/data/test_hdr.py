"""Clips of high dynamic range, as telephones record them: tone-mapped to BT.709, and nothing else changes."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.clips import noise, write_clip
from tests.data_kit import scanned
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import probe
from videotune.files import hash_file

NAMES = {"HLG": "arib-std-b67", "PQ": "smpte2084", None: "undef"}
TO_2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]])
"""Linear BT.709 -> linear BT.2020 (ITU-R BT.2087)."""


def pq(nits: float) -> float:
    """The inverse EOTF of ST 2084."""
    y = (nits / 10000) ** (2610 / 16384)
    return float(((3424 / 4096 + 2413 / 128 * y) / (1 + 2392 / 128 * y)) ** (2523 / 32))


def hlg(scene: np.ndarray) -> np.ndarray:
    """The OETF of BT.2100 HLG."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), a * np.log(np.maximum(12 * scene - b, 1e-9)) + c)


def write_hdr(path: Path, colours: np.ndarray, transfer: str | None, tag: str = "hvc1") -> Path:
    """Five frames of patches 32 wide; ``colours`` (N, 3) are R'G'B' of BT.2020 in 0 … 1."""
    luma = colours @ [0.2627, 0.6780, 0.0593]
    blue, red = (colours[:, 2] - luma) / 1.8814, (colours[:, 0] - luma) / 1.4746
    planes = [np.round(64 + 876 * luma), np.round(512 + 896 * blue), np.round(512 + 896 * red)]
    wide = 32 * len(colours)
    sides = [(64, 32), (32, 16), (32, 16)]  # of a patch, in luma and in chroma
    rows = [plane.repeat(across)[None].repeat(high, 0) for plane, (high, across) in zip(planes, sides, strict=True)]
    flat = np.concatenate([row.ravel() for row in rows]).astype(np.uint16).reshape(-1, wide)
    params = f"lossless=1:log-level=none:colorprim=bt2020:colormatrix=bt2020nc:transfer={NAMES[transfer]}"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx265", rate=16, options={"x265-params": params})
        stream.width, stream.height, stream.pix_fmt = wide, 64, "yuv420p10le"
        stream.codec_context.codec_tag = tag
        for i in range(5):
            frame = av.VideoFrame.from_ndarray(flat, format="yuv420p10le")
            frame.pts, frame.time_base = i, Fraction(1, 16)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def shown(path: Path) -> np.ndarray:
    """The patches as they are trained: (N, 3)."""
    info = probe(path)
    return decode(info, [0.0], info.height, info.width)[0, 32, 16::32].astype(float)


@pytest.mark.parametrize("transfer", ["HLG", "PQ"])
def test_greys_are_tone_mapped(tmp_path: Path, transfer: str) -> None:
    hlg_signals = [0.0, 0.1, 0.25, 0.38, 0.5, 0.75, 0.9, 1.0]
    signals = hlg_signals if transfer == "HLG" else [0.0, *map(pq, (1, 5, 26, 100, 203, 1000, 10000))]
    got = shown(write_hdr(tmp_path / "a.mp4", np.array(signals)[:, None].repeat(3, 1), transfer))
    assert np.ptp(got, axis=1).max() <= 2, "grey stays grey"
    level = got.mean(1)
    assert (np.diff(level) > 5).all(), "brighter stays brighter, up to the peak"
    assert level[0] <= 1
    assert level[-1] >= 254
    grey, white = (level[3], level[5])
    assert 0.7 < grey / (255 * 0.409) < 1.15, "18 % grey (26 cd/m²) is about BT.709's"
    assert 145 < white < 200, "diffuse white (203 cd/m²) leaves room for highlights"
    stored = 255 * signals[3]
    assert abs(grey - stored) > 3, "it is not shown as stored"


def test_colours_of_bt709_come_back_from_bt2020(tmp_path: Path) -> None:
    linear = np.array([[0.10, 0.05, 0.05], [0.05, 0.10, 0.05], [0.05, 0.05, 0.10], [0.09, 0.09, 0.05]])
    got = shown(write_hdr(tmp_path / "a.mp4", hlg(linear @ TO_2020.T / 3), "HLG"))
    light = (got / 255) ** 2.4
    ratio, wanted = light / light.max(1, keepdims=True), linear / linear.max(1, keepdims=True)
    assert np.abs(ratio - wanted).max() < 0.13
    flat = hlg(linear @ TO_2020.T / 3) ** 2.4  # what no change of primaries would show
    assert np.abs(flat / flat.max(1, keepdims=True) - wanted).max() > 0.13


def test_a_turned_and_padded_hdr_clip_is_black_around_and_the_account_says_how_it_is_shown(tmp_path: Path) -> None:
    write_hdr(tmp_path / "a.mp4", np.full((4, 3), 0.5), "HLG").with_suffix(".txt").write_text("a")
    info = probe(tmp_path / "a.mp4")
    frames = decode(info, [0.0, 0.1], 128, 128, "pad")
    assert frames[:, :20].max() == 0
    assert frames[:, 64].min() > 80
    write_clip(tmp_path / "b.mp4", noise(5, 64, 128), 16).with_suffix(".txt").write_text("b")
    library = scanned(tmp_path)
    hdr, sdr = library.clips
    assert [any("tone-mapped" in note for note in account["notes"]) for account in library.accounts] == [True, False]
    assert sdr.id == hash_file(tmp_path / "b.mp4"), "what is cached of others keeps its name"
    assert hdr.id != hash_file(tmp_path / "a.mp4"), "what was cached of its stored values is not taken"
    assert set(library.media) == {hdr.id, sdr.id}


def test_dolby_vision_without_a_compatible_picture_is_refused(tmp_path: Path) -> None:
    path = write_hdr(tmp_path / "a.mp4", np.full((4, 3), 0.5), None)
    path.write_bytes(path.read_bytes().replace(b"hvc1", b"dvh1"))
    with pytest.raises(ClipProblem, match="Dolby Vision"):
        probe(path)
    path = write_hdr(tmp_path / "b.mp4", np.full((4, 3), 0.5), "HLG")
    path.write_bytes(path.read_bytes().replace(b"hvc1", b"dvh1"))
    assert probe(path).hdr == "HLG"
