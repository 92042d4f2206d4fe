"""MediaInfo of real files: timestamps, sizes, rotation, and a reason code for
everything that is no clip.

And clips of high dynamic range, as telephones record them: tone-mapped to BT.709, and
nothing else changes.
"""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import (
    RATES,
    noise,
    numbered,
    read_numbers,
    write_clip,
    write_image,
)
from tests.support.datasets import filmed, problem_of, scanned, silence
from videotune.data import probe as probe_module
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.timeline import Timeline, last_frame_seconds
from videotune.files import hash_file


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".webm", ".avi"])
def test_every_usual_rate(tmp_path: Path, suffix: str) -> None:
    """The clip plays frames over rate; Matroska rounds times to a millisecond, and no
    more.
    """
    how = {"deadline": "realtime", "cpu-used": "8"} if suffix == ".webm" else {}
    for fps in (8, 12, 15, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60):
        rate = float(RATES.get(fps, Fraction(fps)))
        info = filmed(
            tmp_path / f"{fps}{suffix}",
            numbered(40, 32, 48),
            fps,
            options={"g": "7", **how},
        )
        assert len(info.timestamps) == 40
        assert np.abs(np.array(info.timestamps) - np.arange(40) / rate).max() <= 5.1e-4
        assert info.seconds == pytest.approx(40 / rate, abs=1e-6)
        assert info.fps == pytest.approx(rate, rel=1e-6)
        assert info.keyframes[0] == 0
        assert len(json.dumps(info.to_json())) < 750


def test_junk_has_reason_codes(tmp_path: Path) -> None:
    """Whatever a name says: a video under an image's, an image under a video's, a
    playlist, text, sound, half a file.
    """
    whole = write_clip(tmp_path / "whole.mp4", noise(30)).read_bytes()
    picture = write_image(tmp_path / "b.png", numbered(1)[0]).read_bytes()
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        container.mux(stream.encode(silence()))
        container.mux(stream.encode())
    write_clip(tmp_path / "one.mp4", numbered(1))
    for name, content, reason in [
        ("empty.mp4", b"", "empty"),
        ("text.mp4", b"not a video at all\n" * 50, "not_a_video"),
        (
            "list.mp4",
            f"#EXTM3U\n#EXTINF:1,\n{tmp_path / 'whole.mp4'}\n".encode(),
            "not_a_video",
        ),
        ("a.ts", b"Get the G of it\n" * 40, "not_a_video"),
        ("b.m2ts", b"The Great\n" * 40, "not_a_video"),
        ("a.png", whole, "not_a_video"),
        *(
            (f"a{suffix}", picture, "not_a_video")
            for suffix in (".mp4", ".mov", ".webm")
        ),
        ("no_header.mp4", whole[: len(whole) // 2], "unreadable"),
        (
            "short.mkv",
            write_clip(tmp_path / "m.mkv", noise(30)).read_bytes()[:60],
            "unreadable",
        ),
        ("one.mp4", None, "one_frame"),
        ("sound.mp4", None, "no_video_stream"),
        ("absent.mp4", None, "missing_file"),
        (".", None, "unreadable"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert problem_of(tmp_path / name).reason == reason, name
    for suffix in (".mp4", ".mkv", ".avi"):
        path = write_clip(
            tmp_path / f"w{suffix}",
            noise(40),
            container_options={"movflags": "faststart"},
        )
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
        assert "cut short" in problem_of(path).detail


def remux(
    source: Path, target: Path, change: Callable[[int, av.Packet], av.Packet | None]
) -> MediaInfo:
    """The same packets in another file, each changed or left out."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for i, packet in enumerate(p for p in old.demux(video=0) if p.size):
            if (changed := change(i, packet)) is not None:
                changed.stream = stream
                new.mux(changed)
    return probe(target)


@pytest.mark.parametrize("offset", [-7, -1, 5, 1000])
def test_times_count_from_the_first_frame_wherever_the_clock_starts(
    tmp_path: Path, offset: int
) -> None:
    """Cuts that copy the stream begin below zero or far above it."""

    def shift(index: int, packet: av.Packet) -> av.Packet:
        step = round(1 / 24 / packet.time_base)
        packet.pts, packet.dts = packet.pts + offset * step, packet.dts + offset * step
        return packet

    path = write_clip(tmp_path / "a.mp4", numbered(30), options={"bf": "0", "g": "10"})
    info = remux(path, tmp_path / "b.mkv", shift)
    assert info.timestamps[0] == 0
    assert np.abs(np.array(info.timestamps) - np.arange(30) / 24).max() < 2e-3
    assert read_numbers(decode(info, [i / 24 for i in (0, 7, 15, 29)], 64, 96)) == [
        0,
        7,
        15,
        29,
    ]


def test_frames_that_cannot_be_shown_are_not_counted(tmp_path: Path) -> None:
    """A VP8 packet whose show bit is off (an "alternate reference"); frames before the
    first keyframe.
    """

    def hide(index: int, packet: av.Packet) -> av.Packet:
        data = bytearray(bytes(packet))
        data[0] &= 0xEF if index == 5 else 0xFF
        copy = av.Packet(bytes(data))
        copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
        copy.is_keyframe = packet.is_keyframe
        return copy

    info = remux(
        write_clip(tmp_path / "a.webm", numbered(12), codec="libvpx"),
        tmp_path / "b.webm",
        hide,
    )
    with av.open(info.path) as container:
        assert len(info.timestamps) == len(list(container.decode(video=0))) == 11
    path = write_clip(
        tmp_path / "a.mkv",
        numbered(20),
        options={"g": "8", "bf": "0", "sc_threshold": "0"},
    )
    info = remux(
        path, tmp_path / "b.mkv", lambda index, packet: packet if index >= 5 else None
    )
    assert (len(info.timestamps), info.unusable, info.keyframes) == (12, 3, (0, 8))


def test_odd_names(tmp_path: Path) -> None:
    for name in (
        "a clip with spaces.mp4",
        "Übung №1 – 猫.mp4",
        "a:b%03d.mp4",
        "clip.final.MP4",
    ):
        assert len(probe(write_clip(tmp_path / name, numbered(3))).timestamps) == 3


def test_the_frame_on_screen() -> None:
    info = MediaInfo(
        "a", "h264", 8, 8, (0, 42, 83, 125), 0.042, 24.0, (0,), "matroska", (1, 1000)
    )
    assert info.frames_at([0, 0.02, 1 / 24, 2 / 24, 0.11, 0.16]) == [0, 0, 1, 2, 2, 3]
    assert info.frames_at([0.0375, 0.039]) == [
        0,
        1,
    ]  # a tenth of the frame's 42 ms before the next one begins
    for outside in (-0.01, 0.2):
        with pytest.raises(ClipProblem, match="outside the clip"):
            info.frames_at([outside])


@pytest.mark.parametrize(
    "pix_fmt",
    ["yuv420p", "yuv444p", "yuv420p10le", "yuv444p12le", "gray", "yuva420p", "bgra"],
)
@pytest.mark.parametrize("size", [(63, 97), (64, 96), (2, 3), (1, 1)])
def test_any_size_and_depth(
    tmp_path: Path, pix_fmt: str, size: tuple[int, int]
) -> None:
    info = filmed(
        tmp_path / "a.mkv",
        np.full((2, *size, 3), 90, np.uint8),
        codec="ffv1",
        pix_fmt=pix_fmt,
    )
    assert (info.height, info.width) == size
    assert np.abs(decode(info, [0.0], 16, 16).astype(int) - 90).max() <= 3


def of_bt2020(transfer: str) -> dict[str, Any]:
    parameters = f"colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc"
    return {
        "codec": "libx264",
        "pix_fmt": "yuv420p10le",
        "options": {"x264-params": parameters},
    }


@pytest.mark.parametrize(
    ("suffixes", "how", "hdr", "transparent"),
    [
        (".mp4 .mkv .ts", of_bt2020("smpte2084"), "PQ", False),
        (".mp4 .mkv .ts", of_bt2020("arib-std-b67"), "HLG", False),
        (".mp4 .mkv .ts", of_bt2020("bt709"), None, False),
        (".mp4 .mkv .ts", of_bt2020("bt2020-10"), None, False),
        (".mov", {"codec": "prores_ks", "pix_fmt": "yuva444p10le"}, None, True),
        (".mov", {"codec": "qtrle", "pix_fmt": "argb"}, None, True),
        (".mkv", {"codec": "ffv1", "pix_fmt": "bgra"}, None, True),
        (".webm", {"codec": "libvpx-vp9", "pix_fmt": "yuva420p"}, None, True),
        (".mov", {"codec": "qtrle", "pix_fmt": "rgb24"}, None, False),
        (".mkv", {"codec": "ffv1", "pix_fmt": "gray"}, None, False),
        (".webm", {"codec": "libvpx-vp9", "pix_fmt": "yuv420p"}, None, False),
    ],
)
def test_hdr_and_an_alpha_channel_are_reported(
    tmp_path: Path,
    suffixes: str,
    how: dict[str, Any],
    hdr: str | None,
    transparent: bool,
) -> None:
    for suffix in suffixes.split():
        info = filmed(tmp_path / f"a{suffix}", noise(5), **how)
        assert (info.hdr, info.transparent) == (hdr, transparent)
        assert MediaInfo.from_json(info.to_json()) == info


@pytest.mark.parametrize("name", ["h264.mp4", "prores.mov", "mpeg4.avi", "raw.mov"])
@pytest.mark.parametrize("interlaced", [False, True])
def test_two_fields_in_a_frame_are_said_and_stay_woven(
    tmp_path: Path, name: str, interlaced: bool
) -> None:
    """Odd lines white, even ones black, as two fields of a flashing light: the frame is
    shown as it is stored.
    """
    frames = np.zeros((4, 64, 96, 3), np.uint8)
    frames[:, 1::2] = 255
    how: dict[str, Any] = {
        "h264.mp4": {
            "options": {
                "x264-params": "tff=1" if interlaced else "interlaced=0",
                "crf": "1",
            }
        },
        "prores.mov": {
            "codec": "prores",
            "pix_fmt": "yuv422p10le",
            "options": {"flags": "+ildct" if interlaced else "0"},
        },
        "mpeg4.avi": {
            "codec": "mpeg4",
            "options": {"flags": "+ildct+ilme" if interlaced else "0"},
        },
        "raw.mov": {"codec": "rawvideo", "pix_fmt": "uyvy422"},
    }[name]
    info = filmed(
        tmp_path / name, frames, 25, **how, field_order=2 if interlaced else None
    )
    assert info.interlaced is interlaced
    assert MediaInfo.from_json(info.to_json()).interlaced is interlaced
    shown = decode(info, [0.0], 64, 96)[0].astype(int)
    assert shown[1::2].mean() - shown[::2].mean() > 150


def test_a_picture_far_too_long_and_narrow_is_refused(tmp_path: Path) -> None:
    """Covering 512 × 512 with it would take half a gigapixel."""
    info = filmed(tmp_path / "a.mkv", np.zeros((2, 2, 4000, 3), np.uint8), codec="ffv1")
    with pytest.raises(ClipProblem, match="4000 × 2 cannot be cut to 512 × 512"):
        decode(info, [0.0], 512, 512)
    assert decode(info, [0.0], 512, 512, resize="pad").shape == (1, 512, 512, 3)


def test_frames_that_are_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_clip(tmp_path / "a.mp4", numbered(3))
    info = probe(path)
    monkeypatch.setattr(probe_module, "MAX_PIXELS", 64 * 96 - 1)
    assert problem_of(path).reason == "decode_error"
    with pytest.raises(ClipProblem, match="frame 0 of 3"):
        decode(info, [0.0], 64, 96)


NAMES = {"HLG": "arib-std-b67", "PQ": "smpte2084", None: "undef"}
TO_2020 = np.array(
    [[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]]
)
"""Linear BT.709 -> linear BT.2020 (ITU-R BT.2087)."""


def pq(nits: float) -> float:
    """The inverse EOTF of ST 2084."""
    y = (nits / 10000) ** (2610 / 16384)
    return float(((3424 / 4096 + 2413 / 128 * y) / (1 + 2392 / 128 * y)) ** (2523 / 32))


def hlg(scene: np.ndarray) -> np.ndarray:
    """The OETF of BT.2100 HLG."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(
        scene <= 1 / 12,
        np.sqrt(3 * scene),
        a * np.log(np.maximum(12 * scene - b, 1e-9)) + c,
    )


def write_hdr(path: Path, colours: np.ndarray, transfer: str | None) -> Path:
    """Five frames of patches 32 wide; ``colours`` (N, 3) are R'G'B' of BT.2020 in 0 …
    1.
    """
    luma = colours @ [0.2627, 0.6780, 0.0593]
    blue, red = (colours[:, 2] - luma) / 1.8814, (colours[:, 0] - luma) / 1.4746
    planes = [
        np.round(64 + 876 * luma),
        np.round(512 + 896 * blue),
        np.round(512 + 896 * red),
    ]
    wide = 32 * len(colours)
    sides = [(64, 32), (32, 16), (32, 16)]  # of a patch, in luma and in chroma
    rows = [
        plane.repeat(across)[None].repeat(high, 0)
        for plane, (high, across) in zip(planes, sides, strict=True)
    ]
    flat = (
        np.concatenate([row.ravel() for row in rows])
        .astype(np.uint16)
        .reshape(-1, wide)
    )
    params = f"lossless=1:log-level=none:colorprim=bt2020:colormatrix=bt2020nc:transfer={NAMES[transfer]}"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(
            "libx265", rate=16, options={"x265-params": params}
        )
        stream.width, stream.height, stream.pix_fmt = wide, 64, "yuv420p10le"
        stream.codec_context.codec_tag = "hvc1"
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
    signals = (
        hlg_signals
        if transfer == "HLG"
        else [0.0, *map(pq, (1, 5, 26, 100, 203, 1000, 10000))]
    )
    got = shown(
        write_hdr(tmp_path / "a.mp4", np.array(signals)[:, None].repeat(3, 1), transfer)
    )
    assert np.ptp(got, axis=1).max() <= 2, "grey stays grey"
    level = got.mean(1)
    assert (np.diff(level) > 5).all(), "brighter stays brighter, up to the peak"
    assert level[0] <= 1
    assert level[-1] >= 254
    assert 0.7 < level[3] / (255 * 0.409) < 1.15, (
        "18 % grey (26 cd/m²) is about BT.709's"
    )
    assert 145 < level[5] < 200, "diffuse white (203 cd/m²) leaves room for highlights"
    assert abs(level[3] - 255 * signals[3]) > 3, "it is not shown as stored"


def test_colours_of_bt709_come_back_from_bt2020(tmp_path: Path) -> None:
    linear = np.array(
        [[0.10, 0.05, 0.05], [0.05, 0.10, 0.05], [0.05, 0.05, 0.10], [0.09, 0.09, 0.05]]
    )
    got = shown(write_hdr(tmp_path / "a.mp4", hlg(linear @ TO_2020.T / 3), "HLG"))
    light = (got / 255) ** 2.4
    ratio, wanted = (
        light / light.max(1, keepdims=True),
        linear / linear.max(1, keepdims=True),
    )
    assert np.abs(ratio - wanted).max() < 0.13
    flat = hlg(linear @ TO_2020.T / 3) ** 2.4  # what no change of primaries would show
    assert np.abs(flat / flat.max(1, keepdims=True) - wanted).max() > 0.13


def test_a_turned_and_padded_hdr_clip_is_black_around_and_the_account_says_how_it_is_shown(
    tmp_path: Path,
) -> None:
    write_hdr(tmp_path / "a.mp4", np.full((4, 3), 0.5), "HLG").with_suffix(
        ".txt"
    ).write_text("a")
    info = probe(tmp_path / "a.mp4")
    frames = decode(info, [0.0, 0.1], 128, 128, "pad")
    assert frames[:, :20].max() == 0
    assert frames[:, 64].min() > 80
    write_clip(tmp_path / "b.mp4", noise(5, 64, 128), 16).with_suffix(
        ".txt"
    ).write_text("b")
    library = scanned(tmp_path)
    hdr, sdr = library.clips
    assert [
        any("tone-mapped" in note for note in account["notes"])
        for account in library.accounts
    ] == [True, False]
    assert sdr.id == hash_file(tmp_path / "b.mp4"), (
        "what is cached of others keeps its name"
    )
    assert hdr.id != hash_file(tmp_path / "a.mp4"), (
        "what was cached of its stored values is not taken"
    )
    assert set(library.media) == {hdr.id, sdr.id}


def test_a_mask_in_hdr_has_an_id_of_its_own_pixels(tmp_path: Path) -> None:
    """As an HDR clip has: what was cached with another tone mapping is not taken."""
    for name in ("videos", "masks"):
        (tmp_path / name).mkdir()
    clip = write_clip(tmp_path / "videos" / "a.mp4", noise(5, 64, 128), 16)
    mask = write_hdr(tmp_path / "masks" / "a.mp4", np.full((4, 3), 0.5), "HLG")
    library = scanned(tmp_path, loss_mask={"outside": 0.1}, video={"frames": 5})
    (window,) = library.windows
    mask_id = window.companion("loss_mask")
    assert mask_id not in (None, hash_file(mask))
    assert set(library.media) == {hash_file(clip), mask_id}
    assert library.media[mask_id].hdr == "HLG"


def test_dolby_vision_without_a_compatible_picture_is_refused(tmp_path: Path) -> None:
    for path, transfer in (
        (plain := tmp_path / "a.mp4", None),
        (hlg_too := tmp_path / "b.mp4", "HLG"),
    ):
        write_hdr(path, np.full((4, 3), 0.5), transfer)
        path.write_bytes(path.read_bytes().replace(b"hvc1", b"dvh1"))
    assert "Dolby Vision" in problem_of(plain).detail
    assert probe(hlg_too).hdr == "HLG"


@pytest.mark.parametrize(("last_duration", "seconds"), [(0, 0.04), (1, 0.04)])
def test_a_rate_beyond_coarse_ticks_leaves_the_last_frame_its_time(
    last_duration: int, seconds: float
) -> None:
    """Three frames at 25 a second, in ticks of 1/25, of a stream that declares 50: each is
    within a tick of its place at 50, where the clip would end before the third one.
    """
    timeline = Timeline(
        ticks=[0, 1, 2],
        time_base=Fraction(1, 25),
        keyframes=(0,),
        undecodable_frames=0,
        last_duration=last_duration,
    )
    stream = SimpleNamespace(guessed_rate=Fraction(50), average_rate=None)
    assert last_frame_seconds(timeline, stream) == pytest.approx(seconds)
