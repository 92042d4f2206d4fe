"""Samples of runs that learn sound: both from noise, a sound for a video, and a video for
a sound.
"""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command_line import sample
from tests.support.run_parts import open_run
from tests.support.run_processes import Make, Work
from tests.support.run_results import of_kind
from tests.support.sounding_clips import write_sounding_clips
from tests.support.sounds import tone
from videotune.commands.sample_options import SampleOptions
from videotune.data.probe import probe
from videotune.data.sound import read_sound
from videotune.errors import DONE, VideotuneError
from videotune.validation.sample_metrics_plan import sample_metrics_plan

MODES = {"joint": '["video", "sound"]', "foley": '["sound"]', "to video": '["video"]'}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounding") / "clips"
    return write_sounding_clips(folder, sounding=2, silent=0)


def sets(mode: str) -> tuple[str, ...]:
    return (
        "steps=2",
        f"generate={MODES[mode]}",
        "video_config.frames=17",
        "sample_after=2",
        "samples=1",
        "sample.steps=2",
        "sample.guidance=1",
    )


def sets_of_one_step(mode: str) -> tuple[str, ...]:
    return ("steps=1", f"generate={MODES[mode]}", "video_config.frames=17")


def run_of(work: Work, clips: Path, mode: str) -> Path:
    more: Any = {"data": clips, "base": ("ltx2",)}
    return work.finished(*sets(mode), **more)


@pytest.mark.parametrize("mode", MODES)
def test_previews_have_the_length_of_the_video_in_sound(
    work: Work, clips: Path, mode: str
) -> None:
    run = run_of(work, clips, mode)
    lines = of_kind(run, "sample")
    assert [line["step"] for line in lines] == [0, 2]
    for line in lines:
        info = probe(run / line["path"])
        assert info.sound is not None
        assert info.sound.seconds == pytest.approx(17 / 24, abs=0.1)
        assert set(line["sound"]) == {"loudness", "clipped"}
        assert line["sound"]["loudness"] > -100


def test_a_given_sound_is_heard_in_the_sample(work: Work, clips: Path) -> None:
    """A preview of a clip's own sound differs from one of another, and no seed acts on
    it.
    """
    run = run_of(work, clips, "to video")
    music = work.tmp / "music.wav"
    with wave.open(str(music), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(22050)
        samples = tone(22050, 1.0, 700) * 32767
        file.writeframes(samples.astype("<i2").tobytes())

    sounds = {}
    for name, path, seed in (
        ("a", music, 1),
        ("b", music, 2),
        ("c", clips / "videos" / "clip-0.mov", 1),
    ):
        out = work.tmp / name
        options = SampleOptions(("a clip",), seed, run=run, sound=path)
        assert sample(options, out) == DONE
        (video,) = out.glob("*.mp4")
        sounds[name] = read_sound(probe(video), 0.0, 0.6, 16000)
    assert np.allclose(sounds["a"], sounds["b"], atol=1e-6)
    assert not np.allclose(sounds["a"], sounds["c"], atol=1e-3)


def test_foley_is_drawn_for_a_video(work: Work, clips: Path) -> None:
    run = run_of(work, clips, "foley")
    sounds = []
    for index in (0, 1):
        out = work.tmp / str(index)
        video = clips / "videos" / f"clip-{index}.mov"
        options = SampleOptions(("a clip",), 1, run=run, video=video)
        assert sample(options, out) == DONE
        (drawn,) = out.glob("*.mp4")
        sounds.append(read_sound(probe(drawn), 0.0, 0.6, 16000))
    assert not np.allclose(sounds[0], sounds[1], atol=1e-4)


@pytest.mark.parametrize(
    ("mode", "files"),
    [
        ("foley", {}),
        ("foley", {"sound": "videos/clip-0.mov"}),
        ("foley", {"video": "videos/clip-0.mov", "mask": "videos/clip-0.mov"}),
        ("to video", {}),
        ("to video", {"video": "videos/clip-0.mov"}),
        ("joint", {"sound": "videos/clip-0.mov"}),
        ("to video", {"sound": "captions/clip-0.txt"}),
    ],
)
def test_files_that_do_not_fit_what_is_learnt_are_refused(
    work: Work, clips: Path, mode: str, files: dict[str, str]
) -> None:
    run = run_of(work, clips, mode)
    paths: Any = {name: clips / path for name, path in files.items()}
    with pytest.raises(VideotuneError):
        sample(SampleOptions(("a clip",), 1, run=run, **paths), work.tmp / "out")
    assert not list((work.tmp / "out").glob("*"))


@pytest.mark.parametrize("fps", [15, 24])
def test_samples_are_drawn_at_the_rate_of_the_clips(
    work: Work, clips: Path, fps: int
) -> None:
    """Video and sound of a base that is told the rate last as long as the clips do."""
    frames = 9
    more: Any = {"data": clips, "base": ("ltx2",)}
    run = work.finished(
        "steps=1",
        f"generate={MODES['joint']}",
        f"video_config.frames={frames}",
        f"video_config.target_fps={fps}",
        "resolution=32x32",
        "sample_after=1",
        "samples=1",
        "sample.steps=2",
        "sample.guidance=1",
        **more,
    )
    drawn = sample(SampleOptions(("a clip",), 1, run=run), work.tmp / "out")
    assert drawn == DONE
    previews = [run / line["path"] for line in of_kind(run, "sample")]
    for path in (*previews, *(work.tmp / "out").glob("*.mp4")):
        info = probe(path)
        assert info.fps == pytest.approx(fps)
        assert info.sound is not None
        assert info.sound.seconds == pytest.approx(frames / fps, abs=0.1)


@pytest.mark.parametrize("mode", ["to video", "joint"])
def test_measured_samples_are_given_the_sound_of_a_clip_that_has_one(
    overrides: Make, tmp_path: Path, mode: str
) -> None:
    folder = write_sounding_clips(tmp_path / "clips", sounding=3, silent=3)
    sets = ("sample_metrics.budget=1", "sample_metrics.samples=6")
    words = overrides(*sets_of_one_step(mode), *sets, data=folder, base=("ltx2",))
    job = open_run(words, tmp_path / "run").job
    plan = sample_metrics_plan(job)
    assert plan is not None
    assert all(window.shape.sound for window in plan.condition_windows)
    assert bool(plan.condition_windows) == (mode == "to video")
