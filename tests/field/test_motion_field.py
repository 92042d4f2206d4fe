"""Motion and counts, in every container: what other tools play too fast, too slow, or
count one frame short.
"""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import (
    RATES,
    dot_places,
    moving_dot,
    numbered,
    read_numbers,
    write_clip,
)
from tests.support.datasets import RULES
from videotune.config.data_schema import VideoConfig
from videotune.data.decode import decode
from videotune.data.frame_counts import frames_in
from videotune.data.frame_sampling import draw_frames, frame_times
from videotune.data.media_info import MediaInfo
from videotune.data.probe import probe
from videotune.data.window_placement import place_windows
from videotune.types import DETERMINISTIC_VARIANT

SPEED = 100.0  # pixels a second
SECONDS = 2.4

FAST_VP = {"cpu-used": "8", "deadline": "realtime"}

FILES: dict[str, dict[str, Any]] = {
    "h264.mp4": {"options": {"bf": "3", "g": "24", "preset": "ultrafast"}},
    "hevc.mp4": {
        "codec": "libx265",
        "options": {"preset": "ultrafast", "x265-params": "log-level=none"},
    },
    "mpeg4.mp4": {"codec": "mpeg4"},
    "av1.mp4": {
        "codec": "libsvtav1",
        "options": {"preset": "12", "svtav1-params": "lp=1"},
    },
    "prores.mov": {"codec": "prores_ks", "pix_fmt": "yuv422p10le"},
    "h264.mov": {"options": {"bf": "2", "preset": "ultrafast"}},
    "h264.mkv": {"options": {"bf": "3", "preset": "ultrafast"}},
    "vp9.webm": {"options": FAST_VP},
    "vp8.webm": {"codec": "libvpx", "options": FAST_VP},
    "mpeg4.avi": {"options": {"bf": "2"}},
    "mjpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
}
"""Every codec and container, each for one of the rates."""

CONSTANT = list(
    zip([8, 12, 15, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60], FILES, strict=True)
)
TURNED = [
    (fps, name)
    for (fps, _), (_, name) in zip(CONSTANT, CONSTANT[5:] + CONSTANT[:5], strict=True)
]


def check_speed(facts: MediaInfo, target: float, longest: float) -> None:
    """The dot's place in each frame shown at ``target`` fps is that of its time, but
    for the wait for a source frame.
    """
    times = frame_times(0.0, frames_in(facts.seconds, target), target)
    assert len(times) == int(facts.seconds * target + 1e-6)
    video = VideoConfig(frames=len(times) // 4 * 4 - 3, target_fps=target)
    window = place_windows(facts, video, RULES).windows[0]
    assert draw_frames(window, DETERMINISTIC_VARIANT, 0).times == pytest.approx(
        times[: window.shape.frames]
    )
    seen = dot_places(decode(facts, times, 48, 288))
    lag = 12 + SPEED * np.array(times) - seen
    # never ahead by more than the tolerance
    assert lag.min() > -0.1 * longest * SPEED - 1
    assert lag.max() < longest * SPEED + 1  # never behind by more than one source frame
    assert np.polyfit(times, seen, 1)[0] == pytest.approx(SPEED, rel=0.03)
    assert (np.diff(seen) > -0.5).all()  # and never backwards


@pytest.mark.parametrize("target", [8.0, 16.0, 24.0])
@pytest.mark.parametrize(("source", "name"), CONSTANT + TURNED)
def test_ai_toolkit_421_motion_keeps_its_speed(
    tmp_path: Path, source: float, name: str, target: float
) -> None:
    rate = RATES.get(source, Fraction(source))
    times = [float(i / rate) for i in range(int(SECONDS * rate))]
    facts = probe(
        write_clip(
            tmp_path / name, moving_dot(times, SPEED, width=288), source, **FILES[name]
        )
    )
    check_speed(facts, target, 1 / float(rate))


def phone_times() -> list[float]:
    """A phone in the dusk: 30 fps that falls to 15 fps for a while, with a jitter of 2
    ms.
    """
    jitter = np.random.default_rng(1).uniform(0, 0.002, 200)
    times, now = [], 0.0
    for extra in jitter:
        times.append(now if not times else now + float(extra))
        now += 1 / 15 if 0.8 <= now < 1.6 else 1 / 30
    return [time for time in times if time < SECONDS]


def screen_times() -> list[float]:
    """A screen recorder that writes a frame when something changes: gaps from 10 to 90
    ms.
    """
    gaps = np.random.default_rng(0).uniform(0.01, 0.09, 200)
    times = [0.0, *(float(time) for time in np.cumsum(gaps))]
    return [time for time in times if time < SECONDS]


@pytest.mark.parametrize("target", [16.0, 24.0])
@pytest.mark.parametrize("name", ["h264.mp4", "h264.mov", "h264.mkv", "vp9.webm"])
@pytest.mark.parametrize("filmed", [phone_times, screen_times])
def test_ai_toolkit_421_variable_rates_too(
    tmp_path: Path, filmed: Any, name: str, target: float
) -> None:
    times = filmed()
    path = write_clip(
        tmp_path / name,
        moving_dot(times, SPEED, width=288),
        24,
        times=times,
        **FILES[name],
    )
    facts = probe(path)
    assert np.abs(np.array(facts.timestamps) - times).max() <= 1.1e-3
    check_speed(facts, target, 0.09)


@pytest.mark.parametrize("name", FILES)
def test_diffusion_pipe_513_49_frames_at_16_fps_are_49(
    tmp_path: Path, name: str
) -> None:
    """Counts estimated as rate × duration come out one short; here each frame is
    counted, and each is shown once.
    """
    facts = probe(write_clip(tmp_path / name, numbered(49, 64, 96), 16, **FILES[name]))
    assert frames_in(facts.seconds, 16) == 49
    assert read_numbers(decode(facts, frame_times(0.0, 49, 16), 64, 96)) == list(
        range(49)
    )


COUNTS = [
    (113, 23.976, 16, 75),
    (101, 23.976, 16, 67),
    (60, 24, 16, 40),
    (60, 24, 24, 60),
    (89, 16, 16, 89),
]
COUNTS += [(121, 30, 24, 96)]


@pytest.mark.parametrize("name", ["h264.mp4", "h264.mkv", "vp9.webm", "mpeg4.avi"])
@pytest.mark.parametrize(("count", "fps", "target", "expected"), COUNTS)
def test_diffusion_pipe_391_the_count_is_the_same_in_every_container(
    tmp_path: Path, name: str, count: int, fps: float, target: int, expected: int
) -> None:
    """Rounded timestamps (Matroska) and missing ones (AVI) change no count; every frame
    planned is one of the file.
    """
    facts = probe(
        write_clip(tmp_path / name, numbered(count, 32, 48), fps, **FILES[name])
    )
    assert len(facts.timestamps) == count
    assert frames_in(facts.seconds, target) == expected
    shown = facts.frames_at(frame_times(0.0, expected, target))
    rate = float(RATES.get(fps, Fraction(fps)))
    exact = (
        np.arange(expected) / target * rate + 0.1 + 1e-6
    )  # the frame that has begun, or begins within a tenth
    rounded = 0.0011 * rate if name.endswith(("mkv", "webm")) else 0.0
    assert (np.floor(exact - rounded) <= shown).all()
    assert (shown <= np.floor(exact + rounded)).all()
    assert shown[-1] <= count - 1
