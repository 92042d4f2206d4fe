"""MediaInfo of real files: timestamps, sizes, rotation, and a reason code for everything that is no clip."""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.clips import RATES, noise, numbered, read_numbers, write_clip, write_image
from videotune.data import media_info as probe_module
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import VIDEO_SUFFIXES, MediaInfo, probe


def reason_of(path: Path) -> str:
    with pytest.raises(ClipProblem) as caught:
        probe(path)
    return caught.value.reason


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".webm", ".avi"])
@pytest.mark.parametrize("fps", [24, 23.976])
def test_constant_rate_plays_frames_over_rate(tmp_path: Path, suffix: str, fps: float) -> None:
    info = probe(write_clip(tmp_path / f"a{suffix}", numbered(60), fps))
    rate = Fraction(24000, 1001) if fps == 23.976 else fps
    assert len(info.timestamps) == 60
    assert info.seconds == pytest.approx(float(60 / rate), abs=1e-9)
    assert info.fps == pytest.approx(float(rate), rel=1e-9)
    # Matroska rounds to a millisecond, and no more
    assert np.abs(np.array(info.timestamps) - np.arange(60) / float(rate)).max() <= 5.1e-4
    assert (info.width, info.height, info.rotation, info.unusable) == (96, 64, 0, 0)
    assert info.keyframes[0] == 0


def test_variable_rate_keeps_every_timestamp(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.15, 0.4, 0.41, 0.9]
    info = probe(write_clip(tmp_path / "a.mp4", numbered(6), 24, times=times))
    assert info.timestamps == pytest.approx(times, abs=1e-4)
    assert info.seconds > 0.9


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
def test_media_info_survives_json(tmp_path: Path, suffix: str) -> None:
    info = probe(write_clip(tmp_path / f"a{suffix}", numbered(50), 23.976, options={"g": "7"}))
    text = json.dumps(info.to_json())
    assert MediaInfo.from_json(json.loads(text)) == info
    assert len(text) < 700


def test_times_start_at_the_first_frame(tmp_path: Path) -> None:
    info = probe(write_clip(tmp_path / "a.mkv", numbered(6), 24, times=[3 + i / 24 for i in range(6)]))
    assert info.timestamps[0] == 0
    assert info.timestamps[-1] == pytest.approx(5 / 24, abs=1e-3)


@pytest.mark.parametrize(("rotation", "size"), [(90, (64, 96)), (180, (96, 64)), (-90, (64, 96))])
def test_size_is_that_of_the_upright_picture(tmp_path: Path, rotation: int, size: tuple[int, int]) -> None:
    info = probe(write_clip(tmp_path / "a.mp4", numbered(3), rotation=rotation))
    assert (info.width, info.height) == size
    assert info.rotation == rotation % 360


def test_size_has_square_pixels(tmp_path: Path) -> None:
    wide = probe(write_clip(tmp_path / "a.mp4", numbered(3), aspect=Fraction(4, 3)))
    turned = probe(write_clip(tmp_path / "b.mp4", numbered(3), aspect=Fraction(4, 3), rotation=90))
    assert (wide.width, wide.height) == (128, 64)
    assert (turned.width, turned.height) == (64, 128)


def test_junk_has_reason_codes(tmp_path: Path) -> None:
    whole = write_clip(tmp_path / "whole.mp4", noise(30)).read_bytes()
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("not a video at all\n" * 50)
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\n{tmp_path / 'whole.mp4'}\n")
    (tmp_path / "no_header.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "short.mkv").write_bytes(write_clip(tmp_path / "m.mkv", noise(30)).read_bytes()[:60])
    write_clip(tmp_path / "one.mp4", numbered(1))
    assert reason_of(tmp_path / "empty.mp4") == "empty"
    assert reason_of(tmp_path / "text.mp4") == "not_a_video"
    assert reason_of(tmp_path / "list.mp4") == "not_a_video"
    assert reason_of(tmp_path / "no_header.mp4") == "unreadable"
    assert reason_of(tmp_path / "short.mkv") == "unreadable"
    assert reason_of(tmp_path / "one.mp4") == "one_frame"
    assert reason_of(tmp_path / "absent.mp4") == "missing_file"
    assert reason_of(tmp_path) == "unreadable"


def test_audio_alone_is_no_video(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert reason_of(tmp_path / "a.mp4") == "no_video_stream"


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
def test_a_file_cut_short_says_so(tmp_path: Path, suffix: str) -> None:
    whole = write_clip(tmp_path / f"w{suffix}", noise(40), container_options={"movflags": "faststart"}).read_bytes()
    cut = tmp_path / f"cut{suffix}"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ClipProblem, match="cut short"):
        probe(cut)


def test_hidden_vp8_frames_are_not_counted(tmp_path: Path) -> None:
    """A VP8 packet whose show bit is off (an "alternate reference") is decoded and never shown."""
    write_clip(tmp_path / "a.webm", numbered(12), codec="libvpx")
    with av.open(str(tmp_path / "a.webm")) as source, av.open(str(tmp_path / "b.webm"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for i, packet in enumerate(p for p in source.demux(video=0) if p.size):
            data = bytearray(bytes(packet))
            data[0] &= 0xEF if i == 5 else 0xFF
            copy = av.Packet(bytes(data))
            copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
            copy.is_keyframe, copy.stream = packet.is_keyframe, stream
            target.mux(copy)
    info = probe(tmp_path / "b.webm")
    with av.open(str(tmp_path / "b.webm")) as container:
        assert len(info.timestamps) == len(list(container.decode(video=0))) == 11


def test_frames_before_the_first_keyframe_are_left_out(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mkv", numbered(20), options={"g": "8", "bf": "0", "sc_threshold": "0"})
    with av.open(str(tmp_path / "a.mkv")) as source, av.open(str(tmp_path / "b.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for i, packet in enumerate(p for p in source.demux(video=0) if p.size):
            if i >= 5:
                packet.stream = stream
                target.mux(packet)
    info = probe(tmp_path / "b.mkv")
    assert (len(info.timestamps), info.unusable, info.keyframes) == (12, 3, (0, 8))


def test_odd_names(tmp_path: Path) -> None:
    for name in ("a clip with spaces.mp4", "Übung №1 – 猫.mp4", "a:b%03d.mp4", "clip.final.MP4"):
        assert len(probe(write_clip(tmp_path / name, numbered(3))).timestamps) == 3


def test_the_frame_on_screen() -> None:
    info = MediaInfo("a", "h264", 8, 8, (0, 42, 83, 125), 0.042, 24.0, (0,), "matroska", (1, 1000))
    assert info.frames_at([0, 0.02, 1 / 24, 2 / 24, 0.11, 0.16]) == [0, 0, 1, 2, 2, 3]
    assert info.frames_at([0.0375, 0.039]) == [0, 1]  # a tenth of the frame's 42 ms before the next one begins
    for outside in (-0.01, 0.2):
        with pytest.raises(ClipProblem, match="outside the clip"):
            info.frames_at([outside])


def remux(source: Path, target: Path, change: Callable[[int, av.Packet], None]) -> Path:
    """The same packets in another file, each changed."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for i, packet in enumerate(p for p in old.demux(video=0) if p.size):
            packet.stream = stream
            change(i, packet)
            new.mux(packet)
    return target


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("fps", [8, 12, 15, 25, 29.97, 30, 50, 59.94, 60])
def test_every_usual_rate(tmp_path: Path, suffix: str, fps: float) -> None:
    rate = float(RATES.get(fps, Fraction(fps)))
    info = probe(write_clip(tmp_path / f"a{suffix}", numbered(40, 32, 48), fps, options={"bf": "2"}))
    assert len(info.timestamps) == 40
    assert np.abs(np.array(info.timestamps) - np.arange(40) / rate).max() <= 5.1e-4
    assert info.seconds == pytest.approx(40 / rate, abs=1e-6)


@pytest.mark.parametrize("offset", [-7, -1, 5, 1000])
def test_times_count_from_the_first_frame_wherever_the_clock_starts(tmp_path: Path, offset: int) -> None:
    """Cuts that copy the stream begin below zero or far above it."""
    write_clip(tmp_path / "a.mp4", numbered(30), options={"bf": "0", "g": "10"})

    def shift(index: int, packet: av.Packet) -> None:
        step = round(1 / 24 / packet.time_base)
        packet.pts += offset * step
        packet.dts += offset * step

    info = probe(remux(tmp_path / "a.mp4", tmp_path / "b.mkv", shift))
    assert info.timestamps[0] == 0
    assert np.abs(np.array(info.timestamps) - np.arange(30) / 24).max() < 2e-3
    assert read_numbers(decode(info, [i / 24 for i in (0, 7, 15, 29)], 64, 96)) == [0, 7, 15, 29]


def test_a_stream_without_timestamps_is_counted(tmp_path: Path) -> None:
    """MPEG-4 with B-frames in an AVI carries no times of presentation at all."""
    info = probe(write_clip(tmp_path / "a.avi", numbered(30), options={"bf": "2", "g": "10"}))
    assert info.counted
    assert info.timestamps == pytest.approx([i / 24 for i in range(30)])
    assert read_numbers(decode(info, [i / 24 for i in (0, 7, 15, 29)], 64, 96)) == [0, 7, 15, 29]


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv420p10le", "yuv444p12le", "gray", "yuva420p", "bgra"])
@pytest.mark.parametrize("size", [(63, 97), (64, 96), (2, 3), (1, 1)])
def test_any_size_and_depth(tmp_path: Path, pix_fmt: str, size: tuple[int, int]) -> None:
    path = write_clip(tmp_path / "a.mkv", np.full((2, *size, 3), 90, np.uint8), codec="ffv1", pix_fmt=pix_fmt)
    info = probe(path)
    assert (info.height, info.width) == size
    assert np.abs(decode(info, [0.0], 16, 16).astype(int) - 90).max() <= 3


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("a.m4v", "libx264"), ("a.MPG", "mpeg2video"), ("a.mpeg", "mpeg1video"), ("a.ts", "libx264")),
        *(("a.mts", "mpeg2video"), ("a.m2ts", "libx264"), ("a.3gp", "libx264"), ("a.wmv", "wmv2"), ("a.flv", "flv")),
    ],
)
def test_rarer_containers_give_exact_frames(tmp_path: Path, name: str, codec: str) -> None:
    assert Path(name).suffix.lower() in VIDEO_SUFFIXES
    info = probe(write_clip(tmp_path / name, numbered(60), 25, codec=codec, options={"g": "12"}))
    assert (len(info.timestamps), info.unusable, info.seconds) == (60, 0, pytest.approx(2.4, abs=0.002))
    wanted = [*range(60), 55, 3, 30, 30, 59, 0, 20]
    assert read_numbers(decode(info, [info.timestamps[i] for i in wanted], 64, 96)) == wanted
    assert read_numbers(decode(info, [info.timestamps[57]], 64, 96)) == [57]


def test_text_that_begins_like_a_transport_stream_is_no_video(tmp_path: Path) -> None:
    for name, text in {"a.ts": "Get the G of it\n", "b.m2ts": "The Great\n"}.items():
        (tmp_path / name).write_text(text * 40)
        assert reason_of(tmp_path / name) == "not_a_video"
    whole = write_clip(tmp_path / "c.m2ts", numbered(30), codec="libx264").read_bytes()
    (tmp_path / "c.m2ts").write_bytes(whole[:400])
    assert reason_of(tmp_path / "c.m2ts") in ("unreadable", "no_video_stream", "one_frame", "decode_error")


@pytest.mark.parametrize(
    ("transfer", "hdr"), [("smpte2084", "PQ"), ("arib-std-b67", "HLG"), ("bt709", None), ("bt2020-10", None)]
)
def test_high_dynamic_range_is_said(tmp_path: Path, transfer: str, hdr: str | None) -> None:
    parameters = f"colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc"
    how: dict[str, Any] = {"pix_fmt": "yuv420p10le", "options": {"x264-params": parameters}}
    for name in ("a.mp4", "a.mkv", "a.ts"):
        info = probe(write_clip(tmp_path / name, noise(20), codec="libx264", **how))
        assert info.hdr == hdr
        assert MediaInfo.from_json(info.to_json()) == info


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt", "transparent"),
    [
        ("a.mov", "prores_ks", "yuva444p10le", True),
        ("a.mov", "qtrle", "argb", True),
        ("a.mkv", "ffv1", "bgra", True),
        ("a.webm", "libvpx-vp9", "yuva420p", True),
        ("a.mov", "qtrle", "rgb24", False),
        ("a.mkv", "ffv1", "gray", False),
        ("a.webm", "libvpx-vp9", "yuv420p", False),
    ],
)
def test_an_alpha_channel_is_said(tmp_path: Path, name: str, codec: str, pix_fmt: str, transparent: bool) -> None:
    info = probe(write_clip(tmp_path / name, numbered(3), codec=codec, pix_fmt=pix_fmt))
    assert info.transparent is transparent
    assert MediaInfo.from_json(info.to_json()) == info


@pytest.mark.parametrize("name", ["h264.mp4", "prores.mov", "mpeg4.avi", "raw.mov"])
@pytest.mark.parametrize("interlaced", [False, True])
def test_two_fields_in_a_frame_are_said_and_stay_woven(tmp_path: Path, name: str, interlaced: bool) -> None:
    """Odd lines white, even ones black, as two fields of a flashing light: the frame is shown as it is stored."""
    frames = np.zeros((4, 64, 96, 3), np.uint8)
    frames[:, 1::2] = 255
    how: dict[str, Any] = {
        "h264.mp4": {"options": {"x264-params": "tff=1" if interlaced else "interlaced=0", "crf": "1"}},
        "prores.mov": {
            "codec": "prores",
            "pix_fmt": "yuv422p10le",
            "options": {"flags": "+ildct"} if interlaced else {},
        },
        "mpeg4.avi": {"codec": "mpeg4", "options": {"flags": "+ildct+ilme"} if interlaced else {}},
        "raw.mov": {"codec": "rawvideo", "pix_fmt": "uyvy422"},
    }[name]
    path = write_clip(tmp_path / name, frames, 25, **how, field_order=2 if interlaced else None)
    info = probe(path)
    assert info.interlaced is interlaced
    assert MediaInfo.from_json(info.to_json()).interlaced is interlaced
    shown = decode(info, [0.0], 64, 96)[0].astype(int)
    assert shown[1::2].mean() - shown[::2].mean() > 150


@pytest.mark.parametrize("suffix", [".png", ".mp4", ".mov", ".webm"])
def test_what_the_name_says_is_not_believed(tmp_path: Path, suffix: str) -> None:
    """A video under an image's name and an image under a video's are refused, and said to be so."""
    if suffix == ".png":
        (tmp_path / "a.png").write_bytes(write_clip(tmp_path / "a.mp4", numbered(3)).read_bytes())
    else:
        (tmp_path / f"a{suffix}").write_bytes(write_image(tmp_path / "b.png", numbered(1)[0]).read_bytes())
    assert reason_of(tmp_path / f"a{suffix}") == "not_a_video"


def test_a_picture_far_too_long_and_narrow_is_refused(tmp_path: Path) -> None:
    """Covering 512 × 512 with it would take half a gigapixel."""
    info = probe(write_clip(tmp_path / "a.mkv", np.zeros((2, 2, 4000, 3), np.uint8), codec="ffv1"))
    with pytest.raises(ClipProblem, match="4000 × 2 cannot be cut to 512 × 512"):
        decode(info, [0.0], 512, 512)
    assert decode(info, [0.0], 512, 512, resize="pad").shape == (1, 512, 512, 3)


def test_frames_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_clip(tmp_path / "a.mp4", numbered(3))
    info = probe(path)
    monkeypatch.setattr(probe_module, "MAX_PIXELS", 64 * 96 - 1)
    with pytest.raises(ClipProblem) as caught:
        probe(path)
    assert caught.value.reason == "decode_error"
    with pytest.raises(ClipProblem, match="frame 0 of 3"):
        decode(info, [0.0], 64, 96)
