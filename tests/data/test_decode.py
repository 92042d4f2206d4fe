"""Decoded frames are exactly the ones asked for, upright, in the asked size, in the
colours that were filmed.
"""

import json
import random
import struct
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import noise, numbered, read_numbers, write_clip
from tests.support.datasets import filmed, silence
from videotune.data.content_scan import scan_content
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_reader import FrameReader
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe

RARER = {"a.m4v": "libx264", "a.MPG": "mpeg2video", "a.mpeg": "mpeg1video", "a.ts": "libx264", "a.mts": "mpeg2video",
         "a.m2ts": "libx264", "a.3gp": "libx264", "a.wmv": "wmv2", "a.flv": "flv"}  # fmt: skip
UNEVEN = [i / 24 + (0.02 if i % 3 == 0 else 0) for i in range(60)]
FILES: dict[str, dict[str, Any]] = {
    "bframes.mp4": {"options": {"bf": "3", "g": "12"}},
    "short_gop.mp4": {"options": {"bf": "3", "g": "2"}},
    "open_gop.mp4": {"options": {"bf": "3", "g": "10", "x264-params": "open-gop=1"}},
    "fragmented.mp4": {
        "options": {"g": "12"},
        "container_options": {"movflags": "frag_keyframe+empty_moov"},
    },
    "hevc.mp4": {
        "codec": "libx265",
        "options": {"x265-params": "log-level=none:keyint=12"},
    },
    "ten_bit.mp4": {"pix_fmt": "yuv420p10le"},
    "a.mov": {"options": {"bf": "2", "g": "10"}},
    "a.mkv": {"options": {"bf": "3", "g": "12"}},
    "vp9.webm": {"options": {"g": "15", "cpu-used": "8", "deadline": "realtime"}},
    "mpeg4.avi": {"options": {"g": "12"}},
    "h264.avi": {"codec": "libx264", "options": {"bf": "2"}},
    "mpeg4_bframes.avi": {"options": {"bf": "2", "g": "12"}},
    "variable.mp4": {"times": UNEVEN, "options": {"bf": "2"}},
} | {
    name: {"fps": 25, "codec": codec, "options": {"g": "12"}}
    for name, codec in RARER.items()
}


@pytest.mark.parametrize("name", FILES)
def test_exactly_the_frames_asked_for(tmp_path: Path, name: str) -> None:
    """Of every container and codec, at their own times, in any order, whatever the
    count of threads.
    """
    info = filmed(tmp_path / name, numbered(60), **FILES[name])
    how = FILES[name]
    times = how.get("times", [i / how.get("fps", 24) for i in range(60)])
    assert info.timestamps == pytest.approx(
        [time - times[0] for time in times], abs=1e-3
    )
    assert (info.width, info.height, info.unusable, info.counted) == (
        96,
        64,
        0,
        name.endswith(".avi"),
    )
    assert MediaInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
    rng = random.Random(0)
    wishes = [
        list(range(60)),
        [59],
        [0],
        [17, 17, 18, 40],
        [40, 3, 3, 59, 0, 17, 40, 16, 3],
        [],
    ]
    wishes += [sorted(rng.sample(range(60), 3)) for _ in range(6)]
    for wish in wishes:
        frames = decode(info, [info.timestamps[i] + 0.001 for i in wish], 64, 96)
        assert (frames.dtype, frames.shape) == (np.uint8, (len(wish), 64, 96, 3))
        assert read_numbers(frames) == wish
    one, two, four = (
        decode(info, info.timestamps[34:], 48, 80, threads=threads)
        for threads in (1, 2, 4)
    )
    assert np.array_equal(one, two)
    assert np.array_equal(one, four)


def test_sound_between_the_frames_changes_nothing(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", numbered(48), options={"g": "12"})
    with av.open(str(path)) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        sound = target.add_stream("aac", rate=44100)
        video = target.add_stream_from_template(source.streams.video[0])
        frame = silence()
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = video
                target.mux(packet)
                frame.pts = None
                target.mux(sound.encode(frame))
        target.mux(sound.encode())
    info = probe(tmp_path / "b.mp4")
    assert info.seconds == pytest.approx(2.0)
    assert read_numbers(decode(info, info.timestamps, 64, 96)) == list(range(48))


@pytest.mark.parametrize("aspect", [Fraction(2, 1), Fraction(4, 3)])
def test_wide_pixels_are_made_square(tmp_path: Path, aspect: Fraction) -> None:
    """A circle stored squeezed is round again, and one that was turned stands upright."""
    rows, columns = np.mgrid[:64, :64]
    disc = ((rows - 32) ** 2 + ((columns - 32) * aspect) ** 2 < 24**2)[
        ..., None
    ].repeat(3, 2) * np.uint8(255)
    info = filmed(tmp_path / "a.mp4", np.stack([disc] * 3), aspect=aspect)
    wide = round(64 * aspect)
    assert (info.width, info.height) == (wide, 64)
    light = decode(info, [0.0], 64, wide)[0].mean(2) > 127
    assert abs(int(light.any(1).sum()) - int(light.any(0).sum())) <= 3
    turned = filmed(
        tmp_path / "b.mp4", np.stack([disc] * 3), aspect=aspect, rotation=90
    )
    assert (turned.width, turned.height) == (64, wide)


def test_downscaling_is_antialiased(tmp_path: Path) -> None:
    """One-pixel stripes become grey at a quarter of the size, and not a moiré of black
    and white.
    """
    frames = np.zeros((3, 128, 256, 3), np.uint8)
    frames[:, :, ::2] = 255
    info = filmed(tmp_path / "a.mp4", frames, options={"crf": "1"})
    small = decode(info, [0.0], 32, 64)[0].astype(float)
    assert small.mean() == pytest.approx(127, abs=6)
    assert small.std() < 8


COLOUR = np.array([200, 60, 30], np.uint8)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plain.mp4", {}),
        ("bt709.mp4", {"colorspace": 1}),
        ("bt2020.mp4", {"colorspace": 9, "pix_fmt": "yuv420p10le"}),
        ("full_range.mp4", {"pix_fmt": "yuvj420p"}),
        ("full_444.mp4", {"pix_fmt": "yuvj444p"}),
        ("444.mp4", {"pix_fmt": "yuv444p"}),
        ("nv12.mp4", {"pix_fmt": "nv12"}),
        ("422.mov", {"codec": "prores_ks", "pix_fmt": "yuv422p10le"}),
        ("rgb.mp4", {"codec": "libx264rgb", "pix_fmt": "rgb24"}),
        ("rgba.mov", {"codec": "png", "pix_fmt": "rgba"}),
        ("rgb16.mov", {"codec": "png", "pix_fmt": "rgb48be"}),
        ("qtrle.mov", {"codec": "qtrle", "pix_fmt": "rgb24"}),
        ("mjpeg.mov", {"codec": "mjpeg", "pix_fmt": "yuvj422p"}),
        ("alpha.mkv", {"codec": "ffv1", "pix_fmt": "yuva420p"}),
        ("twelve_bit.mkv", {"codec": "ffv1", "pix_fmt": "yuv444p12le"}),
        ("sixteen.mkv", {"codec": "ffv1", "pix_fmt": "yuv422p16le"}),
        ("grey.mkv", {"codec": "ffv1", "pix_fmt": "gray"}),
        ("grey_ten.mkv", {"codec": "ffv1", "pix_fmt": "gray10le"}),
        ("grey_sixteen.mkv", {"codec": "ffv1", "pix_fmt": "gray16le"}),
        (
            "alpha_vp9.webm",
            {
                "codec": "libvpx-vp9",
                "pix_fmt": "yuva420p",
                "options": {"cpu-used": "8"},
            },
        ),
        (
            "hevc.mp4",
            {
                "codec": "libx265",
                "pix_fmt": "yuv420p12le",
                "options": {"x265-params": "log-level=none"},
            },
        ),
        (
            "av1.mp4",
            {
                "codec": "libsvtav1",
                "options": {"preset": "12", "svtav1-params": "lp=1"},
            },
        ),
        ("raw.avi", {"codec": "rawvideo", "pix_fmt": "bgr24"}),
    ],
)
def test_colours_of_every_pixel_format(
    tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    colour = np.full(3, 100, np.uint8) if "grey" in name else COLOUR
    info = filmed(tmp_path / name, np.broadcast_to(colour, (3, 64, 64, 3)), **how)
    assert np.abs(decode(info, [0.0], 64, 64)[0].astype(int) - colour).max() <= 4


def test_hd_without_a_declared_matrix_is_bt709(tmp_path: Path) -> None:
    frames = np.broadcast_to(COLOUR, (2, 720, 1280, 3))
    declared = filmed(tmp_path / "a.mkv", frames, codec="ffv1", colorspace=1)
    silent = filmed(
        tmp_path / "b.mkv", frames, codec="ffv1"
    )  # swscale writes BT.601 and says nothing
    assert np.abs(decode(declared, [0.0], 48, 64)[0].astype(int) - COLOUR).max() <= 3
    assert np.abs(decode(silent, [0.0], 48, 64)[0].astype(int) - COLOUR).max() > 8


@pytest.mark.parametrize(("first", "count"), [(0, 24), (12, 24), (15, 24), (16, 12)])
def test_a_trimmed_clip_shows_what_its_edit_list_leaves(
    tmp_path: Path, first: int, count: int
) -> None:
    """Phones trim by an edit list: the frames cut away are still in the file, and are
    neither counted nor decoded.
    """
    path = write_clip(
        tmp_path / "a.mp4",
        numbered(48),
        options={"bf": "2", "g": "12", "sc_threshold": "0"},
    )
    data = bytearray(path.read_bytes())
    entry = (
        data.find(b"elst") + 12
    )  # the entry's duration in ms, and where it starts in ticks of 1/12288 s
    start = struct.unpack_from(">i", data, entry + 4)[0] + first * 512
    struct.pack_into(">Ii", data, entry, count * 1000 // 24, start)
    path.write_bytes(data)
    info = probe(path)
    assert (len(info.timestamps), info.unusable, info.seconds) == (
        count,
        0,
        pytest.approx(count / 24, abs=0.002),
    )
    assert read_numbers(decode(info, info.timestamps, 64, 96)) == list(
        range(first, first + count)
    )
    assert read_numbers(decode(info, info.timestamps[-3:], 64, 96)) == list(
        range(first + count - 3, first + count)
    )


def test_damage_inside_is_an_error_that_names_the_frame(tmp_path: Path) -> None:
    path = write_clip(
        tmp_path / "a.mp4",
        noise(40),
        options={"g": "40", "bf": "0", "sc_threshold": "0"},
    )
    info = probe(path)
    raw = bytearray(path.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 400] = bytes(400)
    path.write_bytes(raw)
    with pytest.raises(ClipProblem, match=r"frame \d+ of 40") as caught:
        decode(info, info.timestamps, 64, 96)
    assert caught.value.reason == "decode_error"


def test_frames_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    info = filmed(tmp_path / "a.mp4", numbered(30), options={"g": "10"})
    write_clip(tmp_path / "a.mp4", numbered(20), options={"g": "10"})
    with closing(FrameReader(info)) as reader:
        with pytest.raises(ClipProblem, match="frame 20 of 30 is not there"):
            list(reader.frames(range(10, 30)))
        assert [index for index, _ in reader.frames(range(5, 15))] == list(
            range(5, 15)
        ), "the reader survives it"
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(ClipProblem, match="No such file"):
        decode(info, [0.0], 64, 96)
    with pytest.raises(ClipProblem, match="outside the clip"):
        decode(info, [2.0], 64, 96)


def gradient(height: int, width: int) -> np.ndarray:
    """Red grows to the right, green downward: a pixel says where it comes from."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return pixels


LOSSLESS: dict[str, Any] = {"codec": "png", "pix_fmt": "rgb24"}


@pytest.mark.parametrize("resize", ["center", "random"])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 96), (64, 128), (63, 51)])
@pytest.mark.parametrize("place", [(0.5, 0.5), (0.0, 0.0), (1.0, 1.0), (0.25, 0.8)])
def test_a_crop_lies_at_its_place(
    tmp_path: Path, resize: str, height: int, width: int, place: tuple
) -> None:
    whole = gradient(64, 128)
    info = filmed(tmp_path / "a.mov", np.stack([whole] * 2), **LOSSLESS)
    shown = decode(info, [0.0], height, width, resize=resize, crop_position=place)[
        0
    ].astype(float)
    scale = max(height / 64, width / 128)
    room = round(64 * scale) - height, round(128 * scale) - width
    left, top = shown[height // 2, :4, 0].mean(), shown[:4, width // 2, 1].mean()
    assert left == pytest.approx(
        255 * (place[1] * room[1] + 1.5) / (128 * scale - 1), abs=3
    )
    assert top == pytest.approx(
        255 * (place[0] * room[0] + 1.5) / (64 * scale - 1), abs=4.5
    )


@pytest.mark.parametrize(
    ("height", "width"), [(64, 64), (96, 128), (32, 96), (50, 71), (64, 128)]
)
def test_pad_shows_all_of_it_on_black(tmp_path: Path, height: int, width: int) -> None:
    white = np.full((2, 64, 128, 3), 255, np.uint8)
    info = filmed(tmp_path / "a.mov", white, **LOSSLESS)
    shown = decode(info, [0.0, 0.01], height, width, resize="pad")
    scale = min(height / 64, width / 128)
    high, wide = round(64 * scale), round(128 * scale)
    light = shown[1, :, :, 0] == 255
    assert (shown[1, :, :, 0][~light] == 0).all()
    assert (light.any(1).sum(), light.any(0).sum(), light.sum()) == (
        high,
        wide,
        high * wide,
    )
    assert np.argmax(light.any(1)) == (height - high) // 2
    assert np.argmax(light.any(0)) == (width - wide) // 2


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
def test_a_turned_picture_is_shown_upright(
    tmp_path: Path, rotation: int, hflip: bool, suffix: str
) -> None:
    upright, how = (
        gradient(64, 128),
        LOSSLESS
        if suffix == ".mov"
        else {"options": {"crf": "4"}, "pix_fmt": "yuv444p"},
    )
    stored = np.stack(
        [np.rot90(np.fliplr(upright) if hflip else upright, -rotation // 90)] * 2
    )
    plain = filmed(tmp_path / f"plain{suffix}", np.stack([upright] * 2), **how)
    turned = filmed(
        tmp_path / f"turned{suffix}", stored, rotation=rotation, hflip=hflip, **how
    )
    assert (turned.width, turned.height) == (128, 64)
    for resize in ("center", "pad", "stretch"):
        both = (
            decode(info, [0.0], 48, 64, resize=resize, crop_position=(0.1, 0.9))[0]
            for info in (plain, turned)
        )
        expected, shown = (one.astype(int) for one in both)
        assert np.abs(shown - expected).max() <= 3
    assert np.abs(shown - gradient(48, 64)).max() <= 12, "stretched"


class Counting:
    """Stands between the reader and the decoder and counts the frames that are decoded;
    the frames are real.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames, self.starts = 0, []
        from_here, start = FrameReader._decode_stream, FrameReader._start

        def counted(reader: FrameReader, stream: Any) -> Any:
            for one in from_here(reader, stream):
                self.frames += 1
                yield one

        def started(reader: FrameReader, key: int) -> None:
            self.starts.append(key)
            start(reader, key)

        monkeypatch.setattr(FrameReader, "_decode_stream", counted)
        monkeypatch.setattr(FrameReader, "_start", started)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.mov", "vp9.webm", "a.avi"])
def test_frames_far_apart_are_reached_by_seeking(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = (
        {"cpu-used": "8", "deadline": "realtime"}
        if name.endswith("webm")
        else {"bf": "2", "sc_threshold": "0"}
    )
    info = filmed(tmp_path / name, numbered(400, 32, 48), options={"g": "20", **fast})
    count = Counting(monkeypatch)
    wish = [395, 2, 121, 128, 250]
    assert (
        read_numbers(decode(info, [info.timestamps[i] for i in wish], 32, 48)) == wish
    )
    if info.counted:  # nothing else tells its frames apart
        assert (count.starts, count.frames) == ([0], 396)
        return
    assert count.starts == [
        max(k for k in info.keyframes if k <= i) for i in (2, 121, 250, 395)
    ]
    assert count.frames < 80


@pytest.mark.parametrize("name", ["a.mp4", "a.avi", "a.webm"])
def test_a_reader_goes_on_from_the_last_window(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows one after the other cost one pass, also where the next begins with the
    frame that the last ended with.
    """
    info = filmed(tmp_path / name, numbered(90, 32, 48), options={"g": "90"})
    count = Counting(monkeypatch)
    reader = FrameReader(info, threads=1)
    for first, last in [(0, 20), (20, 40), (39, 60), (62, 90)]:
        assert [index for index, _ in reader.frames(range(first, last))] == list(
            range(first, last)
        )
    assert (count.starts, count.frames) == ([0], 90)
    for again in ([5, 6, 7], [0, 1]):
        frames = np.stack(
            [frame.to_ndarray(format="rgb24") for _, frame in reader.frames(again)]
        )
        assert read_numbers(frames) == again
        reader.close()


def test_an_index_that_leads_past_the_keyframe_is_no_obstacle(tmp_path: Path) -> None:
    """Facts that call every frame a keyframe: decoding from there shows nothing or
    rubbish, the whole way is right.
    """
    info = filmed(tmp_path / "a.mp4", numbered(60), options={"g": "60", "bf": "0"})
    misled = replace(info, keyframes=tuple(range(60)))
    assert read_numbers(decode(misled, info.timestamps[40:45], 64, 96)) == list(
        range(40, 45)
    )


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv420p10le", "yuv444p12le"])
def test_a_declared_range_is_followed(
    tmp_path: Path, pix_fmt: str, limited: bool
) -> None:
    """The levels of a grey picture, written as they are and declared as limited or
    full.
    """
    bits = 12 if "12" in pix_fmt else 10 if "10" in pix_fmt else 8
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pix_fmt
        stream.codec_context.color_range = 1 if limited else 2
        for i in range(2):
            frame = av.VideoFrame(64, 48, pix_fmt)
            for plane, level in zip(frame.planes, (126, 128, 128), strict=True):
                words = np.full(
                    plane.buffer_size // (1 if bits == 8 else 2), level << (bits - 8)
                )
                plane.update(
                    words.astype(np.uint8 if bits == 8 else np.uint16).tobytes()
                )
            frame.pts, frame.color_range = i, 1 if limited else 2
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    expected = (
        (126 - 16) * 255 / 219 if limited else 126 * (256 / 255 if bits > 8 else 1)
    )
    shown = decode(probe(tmp_path / "a.mkv"), [0.0], 48, 64)
    assert np.abs(shown.astype(float) - expected).max() <= 1.5


def test_colour_is_interpolated_between_its_samples(tmp_path: Path) -> None:
    """A slow ramp of colour in 4:2:0 comes back as a ramp at its own size, and not as
    pairs of equal columns.
    """
    ramp = np.zeros((2, 64, 128, 3), np.uint8)
    ramp[..., 0], ramp[..., 2] = np.linspace(40, 220, 128), np.linspace(220, 40, 128)
    info = filmed(tmp_path / "a.mkv", ramp, codec="ffv1")
    shown = decode(info, [0.0], 64, 128)[0].astype(float)
    assert np.abs(shown - ramp[0])[:, 4:-4].max() <= 3


def test_a_frame_that_the_decoder_calls_corrupt_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No matter in which window it is; the frames before it are sound."""
    info = filmed(tmp_path / "a.mp4", numbered(12), options={"g": "6", "bf": "0"})

    class Flagged:
        """A frame with the decoder's flag."""

        is_corrupt = True

        def __init__(self, frame: Any) -> None:
            self._frame = frame

        def __getattr__(self, name: str) -> Any:
            return getattr(self._frame, name)

    from_here = FrameReader._decode_stream

    def damaged(reader: FrameReader, stream: Any) -> Any:
        for position, frame in from_here(reader, stream):
            is_flagged = position == info.ticks[8]
            yield position, Flagged(frame) if is_flagged else frame

    monkeypatch.setattr(FrameReader, "_decode_stream", damaged)
    with pytest.raises(ClipProblem, match="frame 8 of 12 is damaged") as caught:
        decode(info, info.timestamps, 64, 96)
    assert caught.value.reason == "decode_error"
    sound = info.timestamps[:8]
    assert read_numbers(decode(info, sound, 64, 96)) == list(range(8))
    assert scan_content(info, 9.0).damaged_at == info.timestamps[8]
