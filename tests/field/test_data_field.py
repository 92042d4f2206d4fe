"""Each test is named after the public thread that it would have prevented."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.clips import dot_places, moving_dot, noise, numbered, read_numbers, write_clip
from tests.data_kit import RULES, scanned
from videotune.config.data_schema import VideoConfig
from videotune.data.dataset import totals
from videotune.data.decode import decode
from videotune.data.frame_sampling import frames_in, sample_frames, sample_window
from videotune.data.media_info import probe
from videotune.types import PLAIN

RATES = {23.976: Fraction(24000, 1001)}
SPEED = 100.0  # pixels a second


def uneven_times(seconds: float) -> list[float]:
    """A screen recorder's timestamps: gaps from 10 to 90 ms."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.uniform(0.01, 0.09, 400)) - 0.01
    return [0.0, *(float(t) for t in times[(times < seconds) & (times > 0.005)])]


@pytest.mark.parametrize("source", [8, 16, 23.976, 25, 30, 60, "variable"])
@pytest.mark.parametrize("target", [8.0, 16.0, 24.0])
def test_ai_toolkit_421_motion_keeps_its_speed(tmp_path: Path, source: float | str, target: float) -> None:
    """A dot that was filmed at 100 px/s moves at 100 px/s in what the model sees, whatever the source's rate."""
    seconds = 2.2
    if source == "variable":
        times = uneven_times(seconds)
        path = write_clip(tmp_path / "a.mp4", moving_dot(times, SPEED), 24, times=times)
        longest = 0.09
    else:
        rate = RATES.get(source, Fraction(source))
        times = [float(i / rate) for i in range(int(seconds * rate))]
        path = write_clip(tmp_path / "a.mp4", moving_dot(times, SPEED), source)
        longest = 1 / float(rate)
    facts = probe(path)
    frames = int(1.9 * target) // 4 * 4 + 1
    video = VideoConfig(frames=frames, target_fps=target)
    times = list(sample_window(sample_frames(facts, video, RULES).windows[0], PLAIN, 0).times)
    seen = dot_places(decode(facts, times, 48, 256))
    true = 12 + SPEED * np.array(times)
    lag = true - seen
    assert lag.min() > -0.1 * longest * SPEED - 1  # never ahead of time by more than the tolerance
    assert lag.max() < longest * SPEED + 1  # never behind by more than a source frame
    slope = np.polyfit(times, seen, 1)[0]
    assert slope == pytest.approx(SPEED, rel=0.03)


def test_diffusion_pipe_391_fps_retiming(tmp_path: Path) -> None:
    """113 frames at 23.976 fps are 75 at 16 fps, 101 are 67, 60 at 24 are 40: said beforehand, and decoded so."""
    for count, fps, expected in [(113, 23.976, 75), (101, 23.976, 67), (60, 24, 40)]:
        facts = probe(write_clip(tmp_path / f"{count}.mp4", numbered(count, 32, 48), fps))
        assert frames_in(facts.seconds, 16) == expected
        rate = float(RATES.get(fps, fps))
        times = [i / 16 for i in range(expected)]
        shown = read_numbers(decode(facts, times, 32, 48))
        assert len(shown) == expected
        assert shown == [int(t * rate + 0.1 + 1e-6) for t in times]


def test_diffusion_pipe_113_no_clip_vanishes(tmp_path: Path) -> None:
    """Clips of one frame count, of an odd size, too short, broken: each is used or has its reason, and planned = decoded."""
    for i, count in enumerate([5, 8, 17, 33, 80]):
        write_clip(tmp_path / f"n{i}.mp4", noise(count, 64 + 2 * i, 96, seed=i), 16)
    (tmp_path / "broken.mp4").write_bytes((tmp_path / "n4.mp4").read_bytes()[:200])
    library = scanned(tmp_path)
    assert totals(library) == {"found": 6, "used": 5, "held_out": 0, "skipped": 1}
    planned = sum(account["frames"] for account in library.accounts)
    shapes = [(w.shape.height, w.shape.width) for w in library.windows]
    decoded = [
        decode(library.media[w.clip_id], sample_window(w, PLAIN, 0).times, *shape)
        for w, shape in zip(library.windows, shapes, strict=True)
    ]
    assert sum(len(frames) for frames in decoded) == planned == 5 + 5 + 17 + 17 + 68


def test_decord_99_rotation_metadata(tmp_path: Path) -> None:
    """A phone's portrait clip, stored lying, goes into a portrait bucket and is decoded upright."""
    upright = numbered(20, 96, 64)
    lying = np.rot90(upright, -1, axes=(1, 2))
    write_clip(tmp_path / "a.mp4", lying, 16, rotation=90)
    library = scanned(tmp_path, resolution="96x64")
    window = library.windows[0]
    assert (window.shape.height, window.shape.width) == (96, 64)
    frames = decode(library.media[window.clip_id], sample_window(window, PLAIN, 0).times, 96, 64)
    assert read_numbers(frames) == list(range(17))


def test_simpletuner_2537_broken_files_have_reasons(tmp_path: Path) -> None:
    """Whatever bytes a file has, the scan ends with a reason for it and the others are used."""
    good = write_clip(tmp_path / "good.mp4", noise(20), 16).read_bytes()
    rng = np.random.default_rng(1)
    for i in range(12):
        data = bytearray(good)
        for place in rng.integers(0, len(data), 40):
            data[place] = rng.integers(256)
        (tmp_path / f"bad{i}.mp4").write_bytes(bytes(data[: rng.integers(1, len(data))]))
    (tmp_path / "random.mp4").write_bytes(rng.bytes(5000))
    library = scanned(tmp_path)
    assert totals(library)["found"] == 14
    assert [clip.path for clip in library.clips][-1].endswith("good.mp4")
