"""Facts of real files: timestamps, sizes, rotation, and a reason code for everything that is no clip."""

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from clips import noise, numbered, write_clip

from videotune.data.probe import ClipProblem, Facts, probe, shown_at


def reason_of(path: Path) -> str:
    with pytest.raises(ClipProblem) as caught:
        probe(path)
    return caught.value.reason


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".webm", ".avi"])
@pytest.mark.parametrize("fps", [24, 23.976])
def test_constant_rate_plays_frames_over_rate(tmp_path: Path, suffix: str, fps: float) -> None:
    facts = probe(write_clip(tmp_path / f"a{suffix}", numbered(60), fps))
    rate = Fraction(24000, 1001) if fps == 23.976 else fps
    assert len(facts.timestamps) == 60
    assert facts.seconds == pytest.approx(float(60 / rate), abs=1e-9)
    assert facts.fps == pytest.approx(float(rate), rel=1e-9)
    # Matroska rounds to a millisecond, and no more
    assert np.abs(np.array(facts.timestamps) - np.arange(60) / float(rate)).max() <= 5.1e-4
    assert (facts.width, facts.height, facts.rotation, facts.unusable) == (96, 64, 0, 0)
    assert facts.keyframes[0] == 0


def test_variable_rate_keeps_every_timestamp(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.15, 0.4, 0.41, 0.9]
    facts = probe(write_clip(tmp_path / "a.mp4", numbered(6), 24, times=times))
    assert facts.timestamps == pytest.approx(times, abs=1e-4)
    assert facts.seconds > 0.9


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
def test_facts_survive_json(tmp_path: Path, suffix: str) -> None:
    facts = probe(write_clip(tmp_path / f"a{suffix}", numbered(50), 23.976, options={"g": "7"}))
    text = json.dumps(facts.to_json())
    assert Facts.from_json(json.loads(text)) == facts
    assert len(text) < 700


def test_facts_made_by_hand_survive_json() -> None:
    facts = Facts("a", "h264", 8, 8, 0, (0.0, 1 / 3, 0.5), 0.1, 5.0, (0, 2), "mov")
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_times_start_at_the_first_frame(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mkv", numbered(6), 24, times=[3 + i / 24 for i in range(6)]))
    assert facts.timestamps[0] == 0
    assert facts.timestamps[-1] == pytest.approx(5 / 24, abs=1e-3)


@pytest.mark.parametrize(("rotation", "size"), [(90, (64, 96)), (180, (96, 64)), (-90, (64, 96))])
def test_size_is_that_of_the_upright_picture(tmp_path: Path, rotation: int, size: tuple[int, int]) -> None:
    facts = probe(write_clip(tmp_path / "a.mp4", numbered(3), rotation=rotation))
    assert (facts.width, facts.height) == size
    assert facts.rotation == rotation % 360


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
    assert reason_of(tmp_path / "absent.mp4") == "unreadable"
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
    facts = probe(tmp_path / "b.webm")
    with av.open(str(tmp_path / "b.webm")) as container:
        assert len(facts.timestamps) == len(list(container.decode(video=0))) == 11


def test_frames_before_the_first_keyframe_are_left_out(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mkv", numbered(20), options={"g": "8", "bf": "0", "sc_threshold": "0"})
    with av.open(str(tmp_path / "a.mkv")) as source, av.open(str(tmp_path / "b.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for i, packet in enumerate(p for p in source.demux(video=0) if p.size):
            if i >= 5:
                packet.stream = stream
                target.mux(packet)
    facts = probe(tmp_path / "b.mkv")
    assert (len(facts.timestamps), facts.unusable, facts.keyframes) == (12, 3, (0, 8))


def test_odd_names(tmp_path: Path) -> None:
    for name in ("a clip with spaces.mp4", "Übung №1 – 猫.mp4", "a:b%03d.mp4", "clip.final.MP4"):
        assert len(probe(write_clip(tmp_path / name, numbered(3))).timestamps) == 3


def test_the_frame_on_screen() -> None:
    facts = Facts("a", "h264", 8, 8, 0, (0.0, 0.042, 0.083, 0.125), 0.042, 24.0, (0,), "matroska")
    assert shown_at(facts, [0, 0.02, 1 / 24, 2 / 24, 0.11, 0.16]) == [0, 0, 1, 2, 2, 3]
    assert shown_at(facts, [0.0375, 0.039]) == [0, 1]  # a tenth of the frame's 42 ms before the next one begins
    for outside in (-0.01, 0.2):
        with pytest.raises(ClipProblem, match="outside the clip"):
            shown_at(facts, [outside])
