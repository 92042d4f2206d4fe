"""Sound of files that are written: its samples are where they were, in the same bytes."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.clips import numbered
from tests.support.sounds import clicks, tone
from videotune.data.probe import probe
from videotune.data.sound import read_sound
from videotune.data.video_writer import read_video, video_bytes, write_video


def stereo(samples: np.ndarray) -> np.ndarray:
    return np.stack([samples, 0.5 * samples]).astype(np.float32)


@pytest.mark.parametrize("rate", [16000, 24000, 44100, 48000, 16123])
@pytest.mark.parametrize(
    ("suffix", "codec"), [(".mp4", "libx264"), (".webm", "libvpx-vp9")]
)
def test_a_click_is_read_where_it_was_written(
    tmp_path: Path, suffix: str, codec: str, rate: int
) -> None:
    seconds = [0.2, 1.0, 1.75]
    path = tmp_path / f"a{suffix}"
    options = {"deadline": "realtime", "cpu-used": "8"} if suffix == ".webm" else {}
    write_video(
        path,
        numbered(48),
        24.0,
        codec=codec,
        options=options,
        sound=stereo(clicks(rate, 2.0, seconds)),
        sound_rate=rate,
    )
    info = probe(path)
    assert info.sound is not None
    assert info.sound.codec == ("aac" if suffix == ".mp4" else "opus")
    assert info.sound.channels == 2
    assert info.sound.missing_seconds(info.seconds) < 0.03
    assert info.seconds == pytest.approx(2.0, abs=1e-3)

    left, right = np.abs(read_sound(info, 0.0, 2.0, 48000))
    for second in seconds:
        near = slice(round((second - 0.02) * 48000), round((second + 0.02) * 48000))
        heard_at = (near.start + int(np.argmax(left[near] > 0.2))) / 48000
        assert heard_at == pytest.approx(second, abs=0.005)
        assert left[near].max() > 1.3 * right[near].max()


def test_the_same_sound_gives_the_same_bytes_and_the_pictures_stay(
    tmp_path: Path,
) -> None:
    frames = numbered(24)
    sound = stereo(tone(24000, 1.0, 440))
    for kind, codec in (("mp4", "libx264"), ("webm", "libvpx-vp9")):
        contents = {
            video_bytes(
                frames, 24.0, kind=kind, codec=codec, sound=sound, sound_rate=24000
            )
            for _ in range(3)
        }
        assert len(contents) == 1

    mark_sound = tmp_path / "a.mp4"
    without = tmp_path / "b.mp4"
    write_video(mark_sound, frames, 24.0, sound=sound, sound_rate=24000)
    write_video(without, frames, 24.0)
    pictures, rate = read_video(mark_sound, widest=1000)
    assert rate == 24
    assert np.array_equal(pictures, read_video(without, widest=1000)[0])
    assert probe(without).sound is None


@pytest.mark.parametrize("seconds", [0.0, 0.4, 3.0])
def test_sound_may_be_shorter_and_longer_than_the_pictures(
    tmp_path: Path, seconds: float
) -> None:
    path = tmp_path / "a.mp4"
    sound = stereo(tone(48000, seconds, 440))
    write_video(path, numbered(24), 24.0, sound=sound, sound_rate=48000)
    info = probe(path)
    assert len(info.ticks) == 24
    if seconds:
        assert info.sound is not None
        assert info.sound.seconds == pytest.approx(seconds, abs=0.03)


def test_sound_is_not_shifted_by_a_sample(tmp_path: Path) -> None:
    times = np.arange(2 * 48000) / 48000
    chirp = 0.5 * np.sin(2 * np.pi * (200 * times + 2000 * times**2))
    path = tmp_path / "a.mp4"
    write_video(path, numbered(48), 24.0, sound=stereo(chirp), sound_rate=48000)
    samples = read_sound(probe(path), 0.5, 1.0, 48000)[0]
    errors = {}
    for shift in range(-4, 5):
        expected = chirp[24000 + shift : 72000 + shift]
        errors[shift] = float(np.square(samples - expected).mean())
    assert min(errors, key=lambda shift: errors[shift]) == 0
    assert errors[0] < 1e-3
