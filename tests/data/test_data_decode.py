"""Decoded frames are exactly the ones asked for, upright, in the asked size, in the colours that were filmed."""

import random
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import noise, numbered, read_numbers, write_clip

from videotune.data.decode import decode
from videotune.data.probe import ClipProblem, probe

FILES = {
    "bframes.mp4": {"options": {"bf": "3", "g": "12"}},
    "short_gop.mp4": {"options": {"bf": "3", "g": "2"}},
    "open_gop.mp4": {"options": {"bf": "3", "g": "10", "x264-params": "open-gop=1"}},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none:keyint=12"}},
    "ten_bit.mp4": {"pix_fmt": "yuv420p10le"},
    "a.mov": {"options": {"bf": "2", "g": "10"}},
    "a.mkv": {"options": {"bf": "3", "g": "12"}},
    "vp9.webm": {"options": {"g": "15", "cpu-used": "8", "deadline": "realtime"}},
    "mpeg4.avi": {"options": {"g": "12"}},
    "h264.avi": {"codec": "libx264", "options": {"bf": "2"}},
    "mpeg4_bframes.avi": {"options": {"bf": "2", "g": "12"}},
    "variable.mp4": {"times": [i / 24 + (0.02 if i % 3 == 0 else 0) for i in range(60)], "options": {"bf": "2"}},
}


@pytest.mark.parametrize("name", FILES)
def test_exactly_the_frames_asked_for(tmp_path: Path, name: str) -> None:
    facts = probe(write_clip(tmp_path / name, numbered(60), **FILES[name]))
    rng = random.Random(0)
    wishes = [
        list(range(60)),
        [59],
        [0],
        [17, 17, 18, 40],
        *(sorted(rng.sample(range(60), 3)) for _ in range(6)),
        [30, 5],
    ]
    for wish in wishes:
        frames = decode(facts, [facts.timestamps[i] + 0.001 for i in wish], 64, 96)
        assert frames.dtype == np.uint8
        assert frames.shape == (len(wish), 64, 96, 3)
        assert read_numbers(frames) == wish


@pytest.mark.parametrize(("height", "width"), [(64, 96), (32, 48), (96, 144), (48, 48), (80, 40)])
def test_size_asked_for(tmp_path: Path, height: int, width: int) -> None:
    facts = probe(write_clip(tmp_path / "a.mp4", numbered(3)))
    assert decode(facts, [0, 0.05], height, width).shape == (2, height, width, 3)
    assert decode(facts, [], height, width).shape == (0, height, width, 3)


def picture(height: int, width: int) -> np.ndarray:
    """Red above, blue below, a white block at the left end of the top."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, :, 0] = 200
    pixels[height // 2 :, :, 2] = 200
    pixels[: height // 3, : width // 3] = 230
    return pixels


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("hflip", [False, True])
def test_rotation_makes_the_picture_upright(tmp_path: Path, suffix: str, rotation: int, hflip: bool) -> None:
    upright = picture(64, 96)
    stored = np.rot90(np.fliplr(upright) if hflip else upright, -rotation // 90)
    path = write_clip(tmp_path / f"a{suffix}", np.stack([stored] * 3), rotation=rotation, hflip=hflip)
    facts = probe(path)
    frames = decode(facts, [0.0], 64, 96)
    assert (facts.width, facts.height) == (96, 64)
    assert np.abs(frames[0].astype(int) - upright).mean() < 12


def test_wide_pixels_are_made_square(tmp_path: Path) -> None:
    """A circle stored squeezed to half its width is round again."""
    rows, columns = np.mgrid[:64, :64]
    disc = ((rows - 32) ** 2 + ((columns - 32) * 2) ** 2 < 24**2)[..., None].repeat(3, 2) * np.uint8(255)
    facts = probe(write_clip(tmp_path / "a.mp4", np.stack([disc] * 3), aspect=Fraction(2, 1)))
    light = decode(facts, [0.0], 64, 128)[0].mean(2) > 127
    high, wide = light.any(1).sum(), light.any(0).sum()
    assert (facts.width, facts.height) == (128, 64)
    assert abs(int(high) - int(wide)) <= 3


def test_crop_is_about_the_centre(tmp_path: Path) -> None:
    frames = np.zeros((3, 64, 128, 3), np.uint8)
    frames[:, :, 60:68] = 255
    facts = probe(write_clip(tmp_path / "a.mp4", frames))
    light = decode(facts, [0.0], 64, 64)[0].mean((0, 2))
    assert (light * np.arange(64)).sum() / light.sum() == pytest.approx(31.5, abs=0.6)


def test_downscaling_is_antialiased(tmp_path: Path) -> None:
    """One-pixel stripes become grey at a quarter of the size, and not a moiré of black and white."""
    frames = np.zeros((3, 128, 256, 3), np.uint8)
    frames[:, :, ::2] = 255
    facts = probe(write_clip(tmp_path / "a.mp4", frames, options={"crf": "1"}))
    small = decode(facts, [0.0], 32, 64)[0].astype(float)
    assert small.mean() == pytest.approx(127, abs=6)
    assert small.std() < 8


COLOUR = np.array([200, 60, 30], np.uint8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain.mp4", {}),
        ("bt709.mp4", {"colorspace": 1}),
        ("bt2020.mp4", {"colorspace": 9, "pix_fmt": "yuv420p10le"}),
        ("full_range.mp4", {"pix_fmt": "yuvj420p"}),
        ("444.mp4", {"pix_fmt": "yuv444p"}),
        ("422.mov", {"codec": "prores_ks", "pix_fmt": "yuv422p10le"}),
        ("rgb.mp4", {"codec": "libx264rgb", "pix_fmt": "rgb24"}),
        ("rgba.mov", {"codec": "png", "pix_fmt": "rgba"}),
        ("alpha.mkv", {"codec": "ffv1", "pix_fmt": "yuva420p"}),
        ("raw.avi", {"codec": "rawvideo", "pix_fmt": "bgr24"}),
    ],
)
def test_colours_of_every_pixel_format(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    frames = np.broadcast_to(COLOUR, (3, 48, 64, 3))
    facts = probe(write_clip(tmp_path / name, frames, **options))
    assert np.abs(decode(facts, [0.0], 48, 64)[0].astype(int) - COLOUR).max() <= 3


def test_hd_without_a_declared_matrix_is_bt709(tmp_path: Path) -> None:
    frames = np.broadcast_to(COLOUR, (2, 720, 1280, 3))
    declared = probe(write_clip(tmp_path / "a.mkv", frames, codec="ffv1", colorspace=1))
    silent = probe(write_clip(tmp_path / "b.mkv", frames, codec="ffv1"))  # swscale writes BT.601 and says nothing
    assert np.abs(decode(declared, [0.0], 48, 64)[0].astype(int) - COLOUR).max() <= 3
    assert np.abs(decode(silent, [0.0], 48, 64)[0].astype(int) - COLOUR).max() > 8


@pytest.mark.parametrize("pix_fmt", ["gray", "gray10le", "gray16le"])
def test_grey_is_grey(tmp_path: Path, pix_fmt: str) -> None:
    frames = np.full((3, 48, 64, 3), 100, np.uint8)
    facts = probe(write_clip(tmp_path / "a.mkv", frames, codec="ffv1", pix_fmt=pix_fmt))
    out = decode(facts, [0.0], 48, 64)[0].astype(int)
    assert np.abs(out - 100).max() <= 3


def test_odd_sizes(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mkv", numbered(12, 63, 97), codec="ffv1", pix_fmt="yuv444p"))
    assert (facts.width, facts.height) == (97, 63)
    assert read_numbers(decode(facts, facts.timestamps, 63, 97)) == list(range(12))
    assert decode(facts, [0.1], 32, 32).shape == (1, 32, 32, 3)


@pytest.mark.parametrize(("first", "count"), [(0, 24), (12, 24), (15, 24), (16, 12)])
def test_a_trimmed_clip_shows_what_its_edit_list_leaves(tmp_path: Path, first: int, count: int) -> None:
    """Phones trim by an edit list: the frames cut away are still in the file, and are neither counted nor decoded."""
    path = write_clip(tmp_path / "a.mp4", numbered(48), options={"bf": "2", "g": "12", "sc_threshold": "0"})
    data = bytearray(path.read_bytes())
    entry = data.find(b"elst") + 12  # the entry's duration in ms, and where it starts in ticks of 1/12288 s
    start = struct.unpack_from(">i", data, entry + 4)[0] + first * 512
    struct.pack_into(">Ii", data, entry, count * 1000 // 24, start)
    path.write_bytes(data)
    facts = probe(path)
    assert (len(facts.timestamps), facts.unusable, facts.seconds) == (count, 0, pytest.approx(count / 24, abs=0.002))
    assert read_numbers(decode(facts, facts.timestamps, 64, 96)) == list(range(first, first + count))
    assert read_numbers(decode(facts, facts.timestamps[-3:], 64, 96)) == list(range(first + count - 3, first + count))


def test_fragmented_files_and_sound(tmp_path: Path) -> None:
    fragmented = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    path = write_clip(tmp_path / "a.mp4", numbered(48), options={"g": "12"}, container_options=fragmented)
    with av.open(str(path)) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        sound = target.add_stream("aac", rate=44100)
        video = target.add_stream_from_template(source.streams.video[0])
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = video
                target.mux(packet)
                frame.pts = None
                target.mux(sound.encode(frame))
        target.mux(sound.encode())
    for name in ("a.mp4", "b.mp4"):
        facts = probe(tmp_path / name)
        assert facts.seconds == pytest.approx(2.0)
        assert read_numbers(decode(facts, facts.timestamps, 64, 96)) == list(range(48))
        assert read_numbers(decode(facts, facts.timestamps[30:33], 64, 96)) == [30, 31, 32]


def test_large_frames_are_decoded_in_threads_to_the_same_pixels(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mp4", numbered(20, 512, 768), options={"preset": "ultrafast"}))
    assert read_numbers(decode(facts, facts.timestamps[3:17], 64, 96)) == list(range(3, 17))


def test_damage_inside_is_an_error_that_names_the_frame(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", noise(40), options={"g": "40", "bf": "0", "sc_threshold": "0"})
    facts = probe(path)
    raw = bytearray(path.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 400] = bytes(400)
    path.write_bytes(raw)
    with pytest.raises(ClipProblem, match=r"frame \d+ of 40") as caught:
        decode(facts, facts.timestamps, 64, 96)
    assert caught.value.reason == "decode_error"


def test_frames_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    facts = probe(write_clip(tmp_path / "a.mp4", numbered(30)))
    write_clip(tmp_path / "a.mp4", numbered(20))
    with pytest.raises(ClipProblem, match="frame 20 of 30 is not there"):
        decode(facts, facts.timestamps, 64, 96)
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(ClipProblem, match="No such file"):
        decode(facts, [0.0], 64, 96)
    with pytest.raises(ClipProblem, match="outside the clip"):
        decode(facts, [2.0], 64, 96)
