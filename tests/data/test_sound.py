"""The sound of a clip: every sample at its second, in windows that begin anywhere.

The truth is what was written: clicks at known seconds, sines in float64.
"""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from tests.support.clips import numbered, write_clip
from tests.support.sounds import clicks, tone, write_sounding
from videotune.data.file_checks import ClipProblem
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.sound import read_beginning, read_sound
from videotune.data.sound_info import SoundInfo
from videotune.data.sound_scan import scan_sound

CLICKS = [0.1, 0.77, 1.25, 1.9]


def first_loud(samples: np.ndarray, near: float, reach: int) -> int:
    """Return the first sample above half of a click, close to where one should be."""
    first = max(0, round(near) - reach)
    part = np.abs(samples[first : round(near) + reach])
    return first + int(np.argmax(part > 0.3))


@pytest.mark.parametrize(
    ("name", "codec", "rate", "channels", "sound_at", "video_at", "tick"),
    [
        ("a.mov", "pcm_s16le", 48000, 1, 0.0, 0.0, 0.0),
        ("late.mov", "pcm_s16le", 44100, 2, 0.5, 0.0, 0.0),
        ("early.mov", "pcm_s16le", 8000, 6, 0.0, 0.5, 0.0),
        ("a.mkv", "pcm_s16le", 44100, 2, 0.0, 0.0, 1e-3),
        ("late.mkv", "pcm_s16le", 8000, 1, 0.5, 0.0, 1e-3),
        ("early.mkv", "aac", 48000, 6, 0.0, 0.5, 1e-3),
        ("a.mp4", "aac", 44100, 1, 0.0, 0.0, 0.0),
        ("late.mp4", "aac", 48000, 2, 0.5, 0.0, 1e-3),
        ("early.mp4", "aac", 8000, 6, 0.0, 0.5, 0.0),
        ("a.webm", "libopus", 48000, 1, 0.0, 0.0, 1e-3),
        ("late.webm", "libopus", 48000, 2, 0.5, 0.0, 1e-3),
        ("early.webm", "libopus", 48000, 6, 0.0, 0.5, 1e-3),
        ("a.ts", "aac", 44100, 2, 0.2, 0.0, 0.0),
        ("a.avi", "pcm_s16le", 44100, 2, 0.0, 0.0, 0.0),
        ("a.flv", "aac", 44100, 2, 0.2, 0.0, 1e-3),
    ],
)
def test_clicks_are_at_their_seconds_in_windows_that_begin_anywhere(
    tmp_path: Path,
    name: str,
    codec: str,
    rate: int,
    channels: int,
    sound_at: float,
    video_at: float,
    tick: float,
) -> None:
    """To one sample, and to what the container rounds times to (``tick``)."""
    video_codec = {".webm": "libvpx", ".avi": "mpeg4", ".flv": "flv"}
    path = write_sounding(
        tmp_path / name,
        clicks(rate, 2.0, CLICKS),
        rate,
        codec=codec,
        channels=channels,
        video_codec=video_codec.get(Path(name).suffix, "libx264"),
        sound_at=sound_at,
        video_at=video_at,
    )
    info = probe(path)

    found = 0
    for start in (-0.3, 0.0, 0.123456, 0.9):
        samples = read_sound(info, start, 1.0, rate)
        assert samples.shape == (2, rate)
        assert samples.dtype == np.float32
        for second in CLICKS:
            expected = (second + sound_at - video_at - start) * rate
            if not 5 < expected < rate - 100:
                continue
            found += 1
            for side in samples:
                at = first_loud(side, expected, reach=round(0.02 * rate))
                assert abs(at - expected) <= 1 + tick * rate
    assert found >= 4


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_resampling_follows_a_sine_in_float64(tmp_path: Path, rate: int) -> None:
    sine = tone(rate, 3.0, 1000)
    info = probe(write_sounding(tmp_path / "a.mov", sine, rate, codec="pcm_s24le"))
    for result_rate in (16000, 24000, 44100, 48000):
        for start in (0.5, 1.23456789):
            samples = read_sound(info, start, 0.7, result_rate)
            expected = tone(result_rate, 0.7, 1000, start)
            # Half a sample of the coarser rate, of a sine of 1 kHz.
            largest = np.pi * 1000 / max(result_rate, rate) * 0.5 + 1e-5
            assert np.abs(samples - expected).max() < largest
        samples = read_sound(info, 0.5, 0.7, result_rate)
        assert np.abs(samples - tone(result_rate, 0.7, 1000, 0.5)).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "codec", "video_codec", "tolerance"),
    [
        ("a.mov", "pcm_s16le", "libx264", 0.0),
        ("a.mp4", "aac", "libx264", 1e-3),
        ("opus.mp4", "libopus", "libx264", 1e-3),
        ("mp3.mp4", "libmp3lame", "libx264", 1e-3),
        ("a.webm", "libopus", "libvpx", 0.0),
        ("a.ts", "aac", "libx264", 0.0),
    ],
)
def test_a_window_late_in_a_file_has_the_samples_of_one_pass(
    tmp_path: Path, name: str, codec: str, video_codec: str, tolerance: float
) -> None:
    """After a seek too; AAC fills what it hears as noise with other noise."""
    times = np.arange(8 * 48000) / 48000
    chirp = 0.5 * np.sin(2 * np.pi * (100 * times + 120 * times**2))
    path = write_sounding(
        tmp_path / name,
        chirp,
        48000,
        codec=codec,
        video_codec=video_codec,
        frames=192,
    )
    info = probe(path)
    whole = read_sound(info, 0.0, 8.0, 48000)
    assert np.abs(whole).max() > 0.4
    for first in (30001, 160000, 299999):
        part = read_sound(info, first / 48000, 0.5, 48000)
        assert np.abs(part - whole[:, first : first + 24000]).max() <= tolerance


def test_before_a_track_and_after_it_is_silence(tmp_path: Path) -> None:
    sine = tone(48000, 1.0, 500)
    path = write_sounding(
        tmp_path / "a.mov", sine, 48000, codec="pcm_s16le", sound_at=0.5
    )
    info = probe(path)
    assert info.sound == SoundInfo("pcm_s16le", 48000, 1, start=0.5, seconds=1.0)
    assert info.sound.missing_seconds(info.seconds) == pytest.approx(1.0)

    samples = read_sound(info, 0.0, 3.0, 48000)
    assert not samples[:, :24000].any()
    assert np.abs(samples[0, 24000:72000] - sine).max() < 1e-3
    assert not samples[:, 72000:].any()
    assert not read_sound(info, 1.6, 5.0, 16000).any()
    assert not read_sound(info, -3.0, 2.0, 48000).any()


def test_a_gap_in_the_times_is_silence(tmp_path: Path) -> None:
    """Matroska keeps the times of packets; the samples after the gap are at theirs."""
    path = write_sounding(
        tmp_path / "a.mkv",
        tone(48000, 1.0, 500),
        48000,
        codec="pcm_s16le",
        gap=(0.5, 0.3),
    )
    samples = read_sound(probe(path), 0.0, 2.0, 48000)
    assert not samples[:, 24000 : 24000 + 14400].any()
    assert np.abs(samples[0, :24000] - tone(48000, 0.5, 500)).max() < 1e-3
    after = samples[0, 24000 + 14400 : 48000 + 14400]
    assert np.abs(after - tone(48000, 0.5, 500, start=0.5)).max() < 1e-3


def test_left_and_right_keep_their_sides_and_six_channels_stay_within_one(
    tmp_path: Path,
) -> None:
    sides = np.stack([tone(48000, 2.0, 500), np.zeros(96000)])
    path = write_sounding(
        tmp_path / "a.mov", sides, 48000, codec="pcm_s16le", channels=2
    )
    left, right = read_sound(probe(path), 0.2, 1.0, 48000)
    assert np.abs(left).max() > 0.49
    assert not right.any()

    loud = 0.99 * np.ones(96000)
    path = write_sounding(
        tmp_path / "b.mov", loud, 48000, codec="pcm_s16le", channels=6
    )
    samples = read_sound(probe(path), 0.2, 1.0, 48000)
    assert 0.9 < np.abs(samples).max() < 0.999


def test_media_info_keeps_the_sound_and_reads_what_has_none(tmp_path: Path) -> None:
    path = write_sounding(
        tmp_path / "a.mp4", tone(44100, 2.0, 500), 44100, codec="aac", channels=2
    )
    info = probe(path)
    assert info.sound is not None
    value = info.to_json()
    assert MediaInfo.from_json(value) == info

    for key in ("sound", "unusable_sound"):
        del value[key]
    assert MediaInfo.from_json(value) == replace(info, sound=None)
    for wrong in ({"sample_rate": 0}, {"start": float("nan")}, {"channels": 10**6}):
        with pytest.raises(ValueError, match="sound"):
            MediaInfo.from_json(info.to_json() | {"sound": vars(info.sound) | wrong})


def test_a_file_without_sound_has_none(tmp_path: Path) -> None:
    info = probe(write_clip(tmp_path / "a.mp4", numbered(8)))
    assert (info.sound, info.unusable_sound) == (None, "")


def test_parts_that_were_joined_byte_by_byte_count_as_without_sound(
    tmp_path: Path,
) -> None:
    sine = tone(44100, 2.0, 500)
    part = write_sounding(tmp_path / "a.ts", sine, 44100, codec="aac")
    joined = tmp_path / "b.ts"
    joined.write_bytes(part.read_bytes() * 2)
    info = probe(joined)
    assert info.restarts == 1
    assert info.sound is None
    assert info.unusable_sound


def test_a_track_that_is_damaged_all_over_is_a_problem_with_the_files_name(
    tmp_path: Path,
) -> None:
    """Its pictures stay usable."""
    noise = np.random.default_rng(0).standard_normal(96000) * 0.2
    path = write_sounding(tmp_path / "a.mkv", noise, 48000, codec="aac")
    info = probe(path)
    content = bytearray(path.read_bytes())
    for packet in sound_packets(path)[3:]:
        at = content.find(packet)
        content[at : at + len(packet)] = bytes([0xFF]) * len(packet)
    path.write_bytes(content)

    assert len(probe(path).ticks) == 48
    with pytest.raises(ClipProblem, match=r"a\.mkv") as caught:
        read_sound(info, 0.0, 2.0, 48000)
    assert caught.value.reason == "decode_error"


def sound_packets(path: Path) -> list[bytes]:
    with av.open(str(path)) as container:
        return [bytes(packet) for packet in container.demux(audio=0) if packet.size]


def test_a_file_that_is_gone_or_has_another_rate_is_a_problem(tmp_path: Path) -> None:
    sine = tone(44100, 2.0, 500)
    info = probe(write_sounding(tmp_path / "a.mov", sine, 44100, codec="pcm_s16le"))
    assert info.sound is not None
    other = replace(info, sound=replace(info.sound, sample_rate=48000))
    for wrong in (other, replace(info, path=str(tmp_path / "b.mov"))):
        with pytest.raises(ClipProblem) as caught:
            read_sound(wrong, 0.0, 1.0, 16000)
        assert caught.value.reason == "decode_error"


def with_times(source: Path, path: Path, time_of: Callable[[int], int]) -> Path:
    """Copy a file; give each packet of its sound another time, by its number."""
    number = 0
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        tracks = {
            stream.index: new.add_stream_from_template(stream) for stream in old.streams
        }
        for packet in old.demux():
            if not packet.size:
                continue
            if packet.stream.type == "audio":
                packet.pts = packet.dts = time_of(number)
                number += 1
            packet.stream = tracks[packet.stream_index]
            new.mux(packet)
    return path


def test_a_track_whose_time_stands_still_is_a_problem_and_ends(tmp_path: Path) -> None:
    """Else a file could keep a reader busy for as long as it likes."""
    sine = tone(48000, 20.0, 500)
    path = write_sounding(tmp_path / "a.mkv", sine, 48000, codec="pcm_s16le")
    info = probe(with_times(path, tmp_path / "b.mkv", lambda number: 0))
    assert info.sound is not None
    with pytest.raises(ClipProblem) as caught:
        read_sound(info, 1.0, 1.0, 48000)
    assert caught.value.reason == "decode_error"


def test_a_track_whose_time_leaps_ahead_is_silent_from_there_on(tmp_path: Path) -> None:
    sine = tone(48000, 2.0, 500)
    path = write_sounding(tmp_path / "a.mkv", sine, 48000, codec="pcm_s16le")
    leaping = with_times(
        path,
        tmp_path / "b.mkv",
        lambda number: 20 * number + (10**9 if number >= 50 else 0),
    )
    samples = read_sound(probe(leaping), 0.0, 2.0, 48000)
    assert np.abs(samples[0, :48000] - sine[:48000]).max() < 1e-3
    assert not samples[:, 48000:].any()


def test_a_long_clip_with_few_pictures_is_scanned_in_little_memory(
    tmp_path: Path,
) -> None:
    sine = tone(48000, 2.0, 500)
    info = probe(
        write_sounding(tmp_path / "a.mkv", sine, 48000, codec="pcm_s16le", frames=8)
    )
    endless = replace(info, ticks=(*info.ticks, 10**11))
    tracemalloc.start()
    scan = scan_sound(endless, until=1e9)
    _, largest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert scan.peak > 0.4
    assert largest < 100e6


def test_the_beginning_is_read_of_files_with_odd_names_and_titles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name that looks like a protocol, and a title that is no UTF-8."""
    monkeypatch.chdir(tmp_path)
    sine = tone(16000, 1.0, 500)
    write_sounding(tmp_path / "concat:a.mov", sine, 16000, codec="pcm_s16le")
    titled = tmp_path / "titled.mkv"
    write_sounding(titled, sine, 16000, codec="pcm_s16le")
    contents = titled.read_bytes()
    assert contents.count(b"Lavf") >= 1
    titled.write_bytes(contents.replace(b"Lavf", b"\xe9\xff\xfe!"))
    for path in (Path("concat:a.mov"), Path("titled.mkv")):
        samples = read_beginning(path, 0.9, 16000)
        assert np.abs(samples - tone(16000, 0.9, 500)).max() < 1e-3
