"""Streams that a player shows right and a plain reader does not: joined files, several
video streams, pictures that change their shape, files cut short beside sound, and what
only the container declares.
"""

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import noise, numbered, read_numbers, write_clip
from tests.support.datasets import filmed, problem_of, scanned, silence
from videotune.data import probe as probe_module
from videotune.data import side_data
from videotune.data.clock import StreamClock
from videotune.data.content_scan import scan_content
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.side_data import StreamSideData, read_side_data

JOINED: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "plain.mpg": ("mpeg2video", {}, {}),
    "b_frames.mpg": ("mpeg2video", {"bf": "2"}, {"bf": "2"}),
    "h264.ts": ("libx264", {"bf": "3"}, {"bf": "3"}),
    "less_delay.ts": ("libx264", {"bf": "3"}, {"bf": "0"}),
    "more_delay.ts": ("libx264", {"bf": "0"}, {"bf": "3"}),
    "a.m2ts": ("mpeg2video", {"bf": "2"}, {"bf": "2"}),
    "a.mkv": ("libx264", {"bf": "3"}, {"bf": "3"}),
    "a.webm": ("libvpx", {}, {}),
}


def join(path: Path, *parts: Path) -> Path:
    """Join files byte by byte, as ``cat`` does."""
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


@pytest.mark.parametrize("name", JOINED)
def test_parts_that_were_joined_play_one_after_the_other(
    tmp_path: Path, name: str
) -> None:
    """Every frame of both parts is there, and every window shows the planned frames."""
    codec, first_options, second_options = JOINED[name]
    suffix = Path(name).suffix
    frames = numbered(70)
    parts = [
        write_clip(
            tmp_path / f"a{suffix}", frames[:30], codec=codec, options=first_options
        ),
        write_clip(
            tmp_path / f"b{suffix}", frames[30:], codec=codec, options=second_options
        ),
    ]
    info = probe(join(tmp_path / name, *parts))
    assert (len(info.ticks), info.restarts, info.unusable) == (70, 1, 0)
    # At a joint, MPEG's demuxer places the last frame of a part one frame too late.
    late = 1 / 24 if name == "b_frames.mpg" else 0
    assert info.timestamps == pytest.approx(np.arange(70) / 24, abs=late + 2e-3)
    assert MediaInfo.from_json(info.to_json()) == info

    for first in (0, 5, 25, 29, 30, 31, 53):
        times = [time + 1e-4 for time in info.timestamps[first : first + 17]]
        shown = read_numbers(decode(info, times, 64, 96))
        assert shown == list(range(first, first + 17))


@pytest.mark.parametrize(("suffix", "codec"), [(".flv", "flv"), (".wmv", "wmv2")])
def test_a_file_that_follows_another_and_is_not_read_is_reported(
    tmp_path: Path, suffix: str, codec: str
) -> None:
    """No player shows it; a file alone has no such end."""
    parts = [
        write_clip(
            tmp_path / f"{i}{suffix}",
            noise(30, 256, 320, seed=i),
            codec=codec,
            options={"qmax": "3"},
        )
        for i in range(2)
    ]
    assert probe(parts[0]).unread == 0
    (tmp_path / "d").mkdir()
    info = probe(join(tmp_path / "d" / f"a{suffix}", *parts))
    assert len(info.ticks) == 30
    assert info.unread == pytest.approx(0.5, abs=0.1)
    (account,) = scanned(tmp_path / "d").accounts
    assert any("follows the end" in warning for warning in account["warnings"])


def test_a_part_that_begins_without_a_keyframe_loses_those_frames(
    tmp_path: Path,
) -> None:
    """Nothing else can decode them, and frames of the part before would be their
    references.
    """
    options = {"bf": "2", "g": "10", "x264-params": "scenecut=0"}
    parts = [
        write_clip(
            tmp_path / f"{i}.ts",
            numbered(60)[30 * i :][:30],
            codec="libx264",
            options=options,
        )
        for i in range(2)
    ]
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[188 * 8 :])  # the first keyframe is in these packets
    info = probe(join(tmp_path / "a.ts", *parts))
    assert (info.restarts, info.unusable > 0) == (1, True)
    shown = read_numbers(decode(info, info.timestamps, 64, 96))
    assert shown == [*range(30), *range(40, 60)]


class Packets:
    """A stream of packets (keyframe, dts in seconds) for a clock."""

    def __init__(self, format_name: str) -> None:
        named = type("Format", (), {"name": format_name})
        self.container = type("Container", (), {"format": named})
        self.stream = type("Stream", (), {"time_base": Fraction(1, 1000)})

    def restarted(self, seconds: Sequence[float]) -> list[float]:
        clock = StreamClock(self.container, self.stream)
        moved = []
        for second in seconds:
            packet = av.Packet(1)
            packet.pts = packet.dts = round(second * 1000)
            packet.duration = 40
            packet.is_keyframe = True
            assert clock.admit(packet)
            moved.append(packet.pts / 1000)
        return moved


@pytest.mark.parametrize(
    ("format_name", "times", "expected"),
    [
        ("mpegts", [5, 5.04, 5.08, 1, 1.04], [5, 5.04, 5.08, 5.12, 5.16]),
        ("mpegts", [5, 5.04, 60, 60.04], [5, 5.04, 5.08, 5.12]),
        ("mpegts", [5, 5.04, 14, 14.04], [5, 5.04, 14, 14.04]),
        ("matroska,webm", [5, 5.04, 60, 60.04], [5, 5.04, 60, 60.04]),
        ("matroska,webm", [5, 5.04, 1, 1.04], [5, 5.04, 5.08, 5.12]),
        ("matroska,webm", [5, 5.08, 5.04, 5.12], [5, 5.08, 5.04, 5.12]),
        ("avi", [5, 5.04, 1], [5, 5.04, 1]),
        ("mpeg", [5, 5.04, 1, 1.04, 0, 0.04], [5, 5.04, 5.08, 5.12, 5.16, 5.2]),
    ],
)
def test_when_a_clock_starts_anew(
    format_name: str, times: list[float], expected: list[float]
) -> None:
    """A fall; in broadcasts a leap over more than 10 s too, as the ffmpeg program
    judges. A silence, and a few frames out of order, are none.
    """
    assert Packets(format_name).restarted(times) == pytest.approx(expected)


def test_a_gap_within_a_transport_stream_is_damage(tmp_path: Path) -> None:
    options = {"g": "12", "crf": "10"}
    path = write_clip(tmp_path / "a.ts", noise(60), codec="libx264", options=options)
    content = path.read_bytes()
    middle = len(content) // 2 // 188 * 188
    path.write_bytes(content[:middle] + content[middle + 3 * 188 :])
    assert problem_of(path).reason == "decode_error"


@pytest.mark.parametrize("hold", [0.5, 7.6, 100.0])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_the_picture_after_a_long_hold_comes_in_its_time(
    tmp_path: Path, hold: float, suffix: str
) -> None:
    """As in recordings of a screen, which are written only on a change."""
    times = [i / 16 for i in range(8)]
    times += [times[-1] + hold + i / 16 for i in range(8)]
    info = filmed(tmp_path / f"a{suffix}", numbered(16), times=times)
    change = info.timestamps[8]
    assert info.frames_at([change - 0.005, change - 0.0001]) == [7, 8]
    assert info.frames_at([change - 0.1 * hold]) == [7]


def two_streams(
    path: Path, sizes: Sequence[tuple[int, int]], default: int | None
) -> Path:
    """A file of several video streams of height × width, of which one is the
    default.
    """
    path.parent.mkdir()
    with av.open(str(path), "w") as container:
        streams = []
        for index, (height, width) in enumerate(sizes):
            stream = container.add_stream("mpeg4", rate=24)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            is_default = default in (None, index)
            stream.disposition = av.stream.Disposition.default if is_default else 0
            streams.append(stream)
        for i in range(20):
            for index, (stream, size) in enumerate(zip(streams, sizes, strict=True)):
                pixels = numbered(100, *size)[50 * index + i]
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = i, Fraction(1, 24)
                container.mux(stream.encode(frame))
        for stream in streams:
            container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("name", "sizes", "default", "shown"),
    [
        ("a.mp4", [(48, 96), (96, 144)], 1, 1),
        ("a.mp4", [(96, 144), (48, 96)], 1, 1),
        ("a.mkv", [(48, 96), (96, 144)], 1, 1),
        ("a.mkv", [(48, 96), (96, 144)], None, 1),
        ("a.ts", [(48, 96), (96, 144)], None, 1),
        ("a.ts", [(96, 144), (48, 96)], None, 0),
        ("a.mp4", [(96, 144), (96, 144)], None, 0),
    ],
)
def test_of_several_video_streams_the_default_one_is_used(
    tmp_path: Path,
    name: str,
    sizes: list[tuple[int, int]],
    default: int | None,
    shown: int,
) -> None:
    """Of several the largest, of equals the first; and a note says so."""
    path = two_streams(tmp_path / "d" / name, sizes, default)
    info = probe(path)
    assert ((info.height, info.width), info.video_streams) == (sizes[shown], 2)
    numbers = read_numbers(decode(info, info.timestamps, 48, 72, resize="stretch"))
    assert numbers == [50 * shown + i for i in range(20)]
    (account,) = scanned(tmp_path / "d").accounts
    assert any("2 video streams" in note for note in account["notes"])


def changing(path: Path, sizes: Sequence[tuple[int, int]]) -> Path:
    """Ten frames of each size (height, width) in one stream of VP8."""
    with av.open(str(path), "w") as container:
        out: Any = None
        for part, (height, width) in enumerate(sizes):
            context: Any = av.CodecContext.create("libvpx", "w")
            context.width, context.height, context.pix_fmt = width, height, "yuv420p"
            context.time_base, context.framerate = Fraction(1, 24), Fraction(24)
            context.options = {"deadline": "realtime", "cpu-used": "8"}
            context.thread_count = 1
            if out is None:
                out = container.add_stream("libvpx", rate=24)
                out.width, out.height, out.pix_fmt = width, height, "yuv420p"

            frames = numbered(10 * len(sizes), height, width)[10 * part :][:10]
            packets = []
            for i, pixels in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = 10 * part + i, Fraction(1, 24)
                packets += context.encode(frame)
            for packet in [*packets, *context.encode()]:
                packet.stream = out
                packet.time_base = Fraction(1, 24)
                container.mux(packet)
    return path


def test_pictures_of_other_sizes_and_one_shape_are_all_used(tmp_path: Path) -> None:
    """As streams that adapt to the network have them; each is resized from its own."""
    (tmp_path / "d").mkdir()
    path = changing(tmp_path / "d" / "a.webm", [(64, 96), (128, 192), (32, 48)])
    info = probe(path)
    shown = decode(info, info.timestamps, 64, 96)
    assert read_numbers(shown) == list(range(30))
    assert scan_content(info, 9.0).sizes == 3
    (account,) = scanned(tmp_path / "d", video_config={"min_frames": 1}).accounts
    assert account["used"]
    assert account["source_frames"] == 30
    assert any("3 sizes" in note for note in account["notes"])


def test_a_clip_ends_where_the_camera_was_turned(tmp_path: Path) -> None:
    """Stretched to the first shape, faces would be; and a warning says where."""
    (tmp_path / "d").mkdir()
    changing(tmp_path / "d" / "a.webm", [(64, 96), (96, 64)])
    index = tmp_path / "index.sqlite"
    for _ in range(2):  # the second time from the index
        library = scanned(tmp_path / "d", index=index, video_config={"min_frames": 1})
        (account,) = library.accounts
        assert (account["source_frames"], account["used"]) == (10, True)
        assert account["source_seconds"] == pytest.approx(10 / 24, abs=1e-3)
        assert any("another shape" in warning for warning in account["warnings"])
        (info,) = library.media.values()
        assert read_numbers(decode(info, info.timestamps, 64, 96)) == list(range(10))


@pytest.mark.parametrize("suffix", [".ts", ".mpg"])
def test_a_clip_ends_where_its_pixels_get_wider(tmp_path: Path, suffix: str) -> None:
    """A broadcast that goes from 4:3 to 16:9 keeps its size in pixels."""
    parts = [
        write_clip(
            tmp_path / f"{i}{suffix}", numbered(20), codec="mpeg2video", aspect=aspect
        )
        for i, aspect in enumerate((Fraction(1), Fraction(4, 3)))
    ]
    (tmp_path / "d").mkdir()
    info = probe(join(tmp_path / "d" / f"a{suffix}", *parts))
    assert len(info.ticks) == 40
    turned_at = scan_content(info, 9.0).form_changes_at
    assert turned_at == pytest.approx(20 / 24, abs=2.5 / 24)
    (account,) = scanned(tmp_path / "d", video_config={"min_frames": 1}).accounts
    assert account["source_frames"] in (18, 19, 20)
    assert (account["width"], account["used"]) == (96, True)


def test_a_clip_that_is_turned_at_once_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.webm"
    info = probe(changing(path, [(64, 96), (96, 64)]))
    with pytest.raises(ClipProblem) as caught:
        info.ended_at(info.timestamps[1])
    assert caught.value.reason == "one_frame"


def mark_sound(path: Path, frames: np.ndarray, video: str, audio: str) -> Path:
    """Frames at 24 fps, with as much silence."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(video, rate=24)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        rate = 48000 if audio == "libopus" else 44100
        sound: Any = container.add_stream(audio, rate=rate, layout="mono")
        samples = 0
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            container.mux(stream.encode(frame))
            while samples < i / 24 * 44100:
                quiet = silence()
                quiet.pts = samples
                container.mux(sound.encode(quiet))
                samples += 1024
        container.mux(stream.encode())
        container.mux(sound.encode())
    return path


@pytest.mark.parametrize(
    ("name", "video", "audio"),
    [
        ("a.mkv", "libx264", "aac"),
        ("a.webm", "libvpx", "libopus"),
        ("a.flv", "flv", "aac"),
    ],
)
def test_a_file_with_sound_that_was_cut_short_is_found(
    tmp_path: Path, name: str, video: str, audio: str
) -> None:
    path = mark_sound(tmp_path / name, noise(96), video, audio)
    assert len(probe(path).ticks) == 96
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert problem_of(path).reason == "decode_error"


def test_sound_that_is_longer_than_the_video_is_no_cut(tmp_path: Path) -> None:
    """Only where every stream ends early is the file cut short."""
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        sound: Any = container.add_stream("aac", rate=44100, layout="mono")
        for i, pixels in enumerate(numbered(24)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        for i in range(200):
            quiet = silence()
            quiet.pts = 1024 * i
            container.mux(sound.encode(quiet))
        container.mux(sound.encode())
    info = probe(path)
    assert (len(info.ticks), info.seconds) == (24, pytest.approx(1.0, abs=1e-3))


def fine_avi(path: Path, frames: np.ndarray, ticks: int) -> Path:
    """An AVI of 16 fps whose clock has so many ticks a second."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mjpeg", rate=ticks)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuvj420p"
        stream.codec_context.time_base = Fraction(1, ticks)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(i * ticks / 16), Fraction(1, ticks)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("ticks", [16, 600, 1000])
def test_an_avi_with_a_fine_clock_is_whole_unless_pictures_are_missing(
    tmp_path: Path, ticks: int
) -> None:
    """Its header counts ticks, of which a picture lasts many."""
    path = fine_avi(tmp_path / "a.avi", numbered(32), ticks)
    info = probe(path)
    assert (len(info.ticks), info.seconds) == (32, pytest.approx(2.0, abs=1 / 16))
    shown = read_numbers(decode(info, info.timestamps, 64, 96))
    assert shown == list(range(32))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3])
    assert problem_of(path).reason == "decode_error"


BOXES = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1")


def with_clean_aperture(path: Path, width: int, height: int, right: int = 0) -> Path:
    """Add a clap box to an MP4 that ends with its index; ``right`` moves the centre."""
    content = bytearray(path.read_bytes())
    clap = struct.pack(">I4sIIIIiIiI", 40, b"clap", width, 1, height, 1, right, 1, 0, 1)
    positions = []
    begin = 0
    for name in BOXES:
        position = begin
        while content[position + 4 : position + 8] != name:
            position += int.from_bytes(content[position : position + 4])
        positions.append(position)
        begin = position + (16 if name == b"stsd" else 8)

    entry = positions[-1]
    entry_end = entry + int.from_bytes(content[entry : entry + 4])
    content[entry_end:entry_end] = clap
    for position in positions:
        size = int.from_bytes(content[position : position + 4])
        content[position : position + 4] = (size + len(clap)).to_bytes(4)
    path.write_bytes(content)
    return path


def columns(height: int = 64, width: int = 96) -> np.ndarray:
    """Three frames that get brighter to the right and, less, downward."""
    ramp = np.linspace(0, 200, width)[None] + np.linspace(0, 50, height)[:, None]
    picture = ramp.round().astype(np.uint8)[..., None].repeat(3, 2)
    return np.stack([picture] * 3)


@pytest.mark.parametrize("rotation", [None, 90])
@pytest.mark.parametrize("right", [0, 8])
def test_what_the_container_hides_is_left_out(
    tmp_path: Path, rotation: int | None, right: int
) -> None:
    """A clean aperture of 64 × 48 in 96 × 64, also of a turned picture."""
    frames = columns()
    options = {"crf": "4", "x264-params": "scenecut=0"}
    path = write_clip(tmp_path / "a.mp4", frames, options=options, rotation=rotation)
    info = probe(with_clean_aperture(path, 64, 48, right))
    assert info.crop == (16 + right, 16 - right, 8, 8)
    expected = frames[0, 8:56, 16 + right : 80 + right].astype(int)
    if rotation:
        expected = np.rot90(expected)
    assert (info.height, info.width) == expected.shape[:2]
    shown = decode(info, [0.0, 1 / 24], *expected.shape[:2])
    assert np.abs(shown[1] - expected).max() <= 4
    assert MediaInfo.from_json(info.to_json()) == info


def test_cropping_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    info = filmed(tmp_path / "a.mp4", columns())
    value = info.to_json() | {"crop": [96, 0, 0, 0]}
    with pytest.raises(ClipProblem) as caught:
        decode(MediaInfo.from_json(value), [0.0], 64, 96)
    assert caught.value.reason == "decode_error"


def test_both_pictures_of_a_stereo_pair_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "d" / "a.mkv"
    path.parent.mkdir()
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.metadata["stereo_mode"] = "left_right"
        for i, pixels in enumerate(numbered(20)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert probe(path).stereo
    (account,) = scanned(tmp_path / "d").accounts
    assert any("stereoscopic" in warning for warning in account["warnings"])


def test_no_tag_of_a_file_looks_like_side_data(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.metadata["title"] = "x\n    Side data:\n      Frame Cropping: 8/8/8/8\n"
        for i, pixels in enumerate(numbered(3)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert probe(path).crop == (0, 0, 0, 0)


DESCRIPTION = """\
Input #0, matroska,webm, from '':
  Stream #0:0: Video: h264 (High), yuv420p, 96x64, 24 fps (default)
    Side data:
      {0}
  Stream #0:1: Video: h264 (High), yuv420p, 96x64, 24 fps
    Side data:
      {1}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Spherical Mapping: equirectangular (0/0/0) ", {"spherical": True}),
        ("Stereo 3D: 2D, view: packed, primary eye: none", {}),
        ("Stereo 3D: top and bottom, view: packed", {"stereo": True}),
        ("Frame Cropping: 1/2/3/4", {"crop": (1, 2, 3, 4)}),
        ("Frame Cropping: 1/2/3/", {}),
        (
            "DOVI configuration record: version: 1.0, profile: 5, level: 6",
            {"dolby_vision_profile": 5},
        ),
        ("Display Matrix: rotation of -90.00 degrees", {}),
    ],
)
def test_side_data_is_that_of_the_stream(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    expected: dict[str, Any],
) -> None:
    """In FFmpeg's own words, for what the encoders here cannot write."""
    path = two_streams(tmp_path / "d" / "a.mkv", [(64, 96), (64, 96)], None)
    with av.open(str(path)) as container:
        for own, lines in ((0, (line, "Other: x")), (1, ("Other: x", line))):
            text = DESCRIPTION.format(*lines)
            monkeypatch.setattr(side_data, "_describe", lambda _, text=text: text)
            streams = container.streams.video
            assert read_side_data(container, streams[own]) == StreamSideData(**expected)
            assert read_side_data(container, streams[1 - own]) == StreamSideData()


def test_dolby_vision_without_a_compatible_picture_is_skipped_in_any_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_clip(tmp_path / "a.mkv", numbered(3))
    found = StreamSideData(dolby_vision_profile=5)
    monkeypatch.setattr(probe_module, "read_side_data", lambda *_: found)
    assert problem_of(path).reason == "unreadable"


def test_fields_that_begin_later_are_reported(tmp_path: Path) -> None:
    """A progressive title before an interlaced film."""
    (tmp_path / "d").mkdir()
    parts = [
        write_clip(
            tmp_path / f"{i}.ts",
            noise(20, seed=i),
            codec="libx264",
            options={"x264-params": params},
        )
        for i, params in enumerate(("interlaced=0", "tff=1"))
    ]
    info = probe(join(tmp_path / "d" / "a.ts", *parts))
    assert not info.interlaced
    assert scan_content(info, 9.0).interlaced == 0.5
    (account,) = scanned(tmp_path / "d").accounts
    assert any("interlaced" in warning for warning in account["warnings"])
