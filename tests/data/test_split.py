"""Splitting into scenes: every frame once and in order, at its time, upright, in its
colours; originals as they were.

And frames written as a video: at the rate that was asked for, and the same bytes for
the same frames.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from tests.support.clips import numbered, read_numbers, write_clip
from tests.support.landscapes import landscape, pan, shots
from tests.support.sounds import clicks, tone, write_sounding
from videotune.data import split as module
from videotune.data.decode import decode
from videotune.data.probe import probe
from videotune.data.sound import read_sound
from videotune.data.split import JOURNAL, split
from videotune.data.video_writer import video_bytes, write_video
from videotune.errors import VideotuneError
from videotune.files import hash_file

SHOT = 30


def video(path: Path, seeds: tuple[int, ...] = (1, 2, 3), **how: Any) -> Path:
    return write_clip(path, shots(seeds, SHOT), **how)


def hashes(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hash_file(path) for path in paths}


def frames_of(path: Path, height: int = 120, width: int = 160) -> np.ndarray:
    info = probe(path)
    return decode(info, info.timestamps, height, width)


def tagged(seeds: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    """Shots whose frames carry their number over all, in the picture's middle, while
    the rest is each shot's landscape.
    """
    frames = np.concatenate(
        [
            np.repeat(landscape(s)[None], n, 0)
            for s, n in zip(seeds, lengths, strict=True)
        ]
    )
    frames[:, 45:75, 60:105] = numbered(len(frames), 30, 45)
    return frames


@pytest.mark.parametrize(
    ("name", "fps"),
    [("film.mp4", 24), ("film.mkv", 29.97), ("film.avi", 25), ("film.webm", 60)],
)
def test_the_scenes_together_are_the_original(
    tmp_path: Path, name: str, fps: float
) -> None:
    whole = tagged((1, 2, 3), (40, 33, 47))
    path = write_clip(tmp_path / "in" / name, whole, fps, options={"crf": "10"})
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    assert [part.path.name for part in result.scenes] == [
        f"film-scene-00{i}.mp4" for i in (1, 2, 3)
    ]
    parts = [frames_of(part.path) for part in result.scenes]
    assert [len(part) for part in parts] == [40, 33, 47]
    together = np.concatenate(parts)
    assert read_numbers(together[:, 45:75, 60:105]) == list(range(120))
    assert np.abs(together.astype(int) - frames_of(path)).mean() < 2.5


def test_frames_keep_their_times_at_a_variable_rate(tmp_path: Path) -> None:
    times = np.cumsum(np.random.default_rng(0).uniform(0.01, 0.1, 3 * SHOT))
    path = video(tmp_path / "in" / "film.mp4", times=list(times - times[0]))
    whole = probe(path)
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    for part in result.scenes:
        info = probe(part.path)
        expected = np.array(whole.timestamps[part.first : part.end]) - part.start
        assert info.timestamps == pytest.approx(expected, abs=2e-4)
        assert info.seconds == pytest.approx(part.seconds, abs=2e-4)
    assert sum(part.seconds for part in result.scenes) == pytest.approx(whole.seconds)


@pytest.mark.parametrize(
    ("name", "how", "size"),
    [
        *(("film.mp4", {"colorspace": matrix}, (160, 120)) for matrix in (1, 6, 9)),
        ("film.mov", {"codec": "mjpeg", "pix_fmt": "yuvj420p"}, (160, 120)),
        ("film.mkv", {"codec": "libx264rgb", "pix_fmt": "rgb24"}, (160, 120)),
        ("film.mkv", {"codec": "ffv1", "pix_fmt": "yuv420p10le"}, (160, 120)),
        ("film.mp4", {"options": {"x264-params": "tff=1"}}, (160, 120)),
        ("odd.mkv", {"codec": "ffv1", "pix_fmt": "yuv444p"}, (158, 118)),
        ("turned.mov", {"rotation": 90}, (160, 118)),
    ],
)
def test_scenes_look_as_the_film_and_declare_it(
    tmp_path: Path, name: str, how: Any, size: tuple[int, int]
) -> None:
    """Colours, range and fields; upright, with even sides: an odd one loses its last
    line.
    """
    frames = shots((1, 2), SHOT)
    frames = frames[:, :119, :159] if "odd" in name else frames
    frames = np.rot90(frames, -1, (1, 2))[:, :, :118] if "turned" in name else frames
    path = write_clip(tmp_path / "in" / name, frames, **how)
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    part = result.scenes[0].path
    before, after = probe(path), probe(part)
    assert (after.width, after.height, after.rotation, after.interlaced) == (
        *size,
        0,
        before.interlaced,
    )
    wanted = frames_of(path, before.height, before.width)[:SHOT, : size[1], : size[0]]
    assert np.abs(frames_of(part, size[1], size[0]).astype(int) - wanted).mean() < 4
    with av.open(str(part)) as container:
        frame = next(container.decode(video=0))
        assert frame.format.name in ("yuv420p", "yuvj420p")
        assert frame.colorspace == how.get("colorspace", frame.colorspace)


def test_a_dataset_is_split_with_its_captions_and_stays_as_it_was(
    tmp_path: Path,
) -> None:
    """Captions beside, apart and listed; a film without cuts, one that is short, one of
    the same stem, a broken one.
    """
    source, told = tmp_path / "in", list[tuple[int, int, str]]()
    video(source / "videos" / "film.mp4", (1, 2))
    video(source / "videos" / "sub" / "play.mp4", (3, 4))
    video(source / "videos" / "sub" / "play.mkv", (5, 6))
    write_clip(
        source / "videos" / "still.webm", pan(5, [float(i) for i in range(SHOT)])
    )
    write_clip(
        source / "cut.mp4",
        np.concatenate([shots((1,), 36), shots((2,), 12), shots((3,), 36)]),
    )
    (source / "bad.mp4").write_bytes(b"no video at all")
    (source / "metadata.csv").write_text(
        "file_name,text\ncut.mp4,listed\n", encoding="utf-8"
    )
    (source / "captions" / "sub").mkdir(parents=True)
    (source / "captions" / "film.txt").write_text(
        "a film\nanother line\n", encoding="utf-8"
    )
    (source / "videos" / "sub" / "play.txt").write_text("a play", encoding="utf-8")
    before, out = hashes(source), tmp_path / "out"
    every = split(
        source, out, min_seconds=0.6, progress=lambda *words: told.append(words)
    )
    results = {result.file.path.name: result for result in every}
    assert hashes(source) == before
    scenes = [
        f"videos/{name}-scene-00{i}"
        for name in ("film", "sub/play-mkv", "sub/play-mp4")
        for i in (1, 2)
    ]
    scenes += [f"cut-scene-00{i}" for i in (1, 2)]
    wanted = {f"{scene}.{kind}" for scene in scenes for kind in ("mp4", "txt")}
    found, still = hashes(out), "videos/still-scene-001.webm"
    assert found.keys() == wanted | {still, JOURNAL}
    assert found[still] == before["videos/still.webm"]
    assert found["videos/film-scene-002.txt"] == before["captions/film.txt"]
    assert (out / "cut-scene-002.txt").read_text(encoding="utf-8") == "listed\n"
    assert (results["film.mp4"].captions, results["still.webm"].captions) == (2, 0)
    short = results["cut.mp4"].scenes[1]
    assert (short.path, short.start, short.seconds) == (
        None,
        pytest.approx(1.5),
        pytest.approx(0.5),
    )
    assert results["bad.mp4"].problem.reason == "not_a_video"
    done = [row[0] for row in told]
    assert done == sorted(done)
    assert {row[1] for row in told} == {done[-1]}
    assert {"film.mp4", "play.mp4"} <= {row[2] for row in told}
    split(source, tmp_path / "again", min_seconds=0.6)
    one, other = hashes(out), hashes(tmp_path / "again")
    assert one | {JOURNAL: ""} == other | {JOURNAL: ""}, (
        "a clip is known by its content: what is cached of it stays"
    )


def test_nothing_is_overwritten_unless_it_is_allowed(tmp_path: Path) -> None:
    """Files of a user's own, and scenes of other settings or of another film."""
    path, out = video(tmp_path / "film.mp4"), tmp_path / "out"
    out.mkdir()
    (out / "film-scene-001.mp4").write_text("mine")
    with pytest.raises(VideotuneError, match="--overwrite"):
        split(path, out, min_seconds=0.5)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "film-scene-001.mp4": "mine"
    }
    split(path, out, min_seconds=0.5, overwrite=True)
    assert len(probe(out / "film-scene-001.mp4").timestamps) == SHOT
    with pytest.raises(VideotuneError, match="--overwrite"):
        split(path, out, min_seconds=0.6)
    video(path, (4, 5))
    with pytest.raises(VideotuneError, match="--overwrite"):
        split(path, out, min_seconds=0.5)
    split(path, out, min_seconds=0.5, overwrite=True)
    assert sorted(hashes(out)) == [
        JOURNAL,
        "film-scene-001.mp4",
        "film-scene-002.mp4",
    ]  # the third is gone


def test_a_stopped_split_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = video(tmp_path / "film.mp4"), tmp_path / "out"
    (path.with_suffix(".txt")).write_text("a film")
    encode, calls = module.encode_scene, []

    def stop_at_the_second(aside: Path, **how: object) -> None:
        calls.append(aside.name)
        encode(aside, **how)  # type: ignore[arg-type]
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "encode_scene", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        split(path, out, min_seconds=0.5)
    assert sorted(hashes(out)) == [JOURNAL, "film-scene-001.mp4"]
    first = (out / "film-scene-001.mp4").stat().st_mtime_ns
    monkeypatch.setattr(
        module, "scan_content", lambda *_, **__: pytest.fail("the cuts were known")
    )
    (result,) = split(path, out, min_seconds=0.5)
    assert (out / "film-scene-001.mp4").stat().st_mtime_ns == first
    assert len(calls) == 4
    assert result.captions == 3
    (out / "film-scene-001.txt").write_text("edited since")
    split(path, out, min_seconds=0.5)
    assert (out / "film-scene-001.txt").read_text() == "edited since"
    assert len(calls) == 4


def test_scenes_of_a_file_called_like_a_scene_stay(tmp_path: Path) -> None:
    """film-scene-002.mp4 is a film of its own: its scenes begin with the same letters
    as those of film.mp4.
    """
    out = tmp_path / "out"
    split(video(tmp_path / "one" / "film-scene-002.mp4", (4, 5)), out, min_seconds=0.5)
    (out / "film-scene-001.notes.txt").write_text("mine")
    (out / "film-scene-1.mp4").write_text("mine")
    before = {name: value for name, value in hashes(out).items() if name != JOURNAL}
    path = video(tmp_path / "two" / "film.mp4", (1, 2))
    split(path, out, min_seconds=0.5)  # what is there is not in its way
    split(path, out, min_seconds=0.6, overwrite=True)
    after = hashes(out)
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() == {
        JOURNAL,
        "film-scene-001.mp4",
        "film-scene-002.mp4",
    }


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    for name in ("film.mp4", "film.mkv", "film-mp4.mp4"):
        (tmp_path / "in").mkdir(exist_ok=True)
        shutil.copy(video(tmp_path / name, (1, 2)), tmp_path / "in")
    out = tmp_path / "out"
    for source, to, how, says in [
        (tmp_path / "in", out, {}, "Rename one"),  # scenes of two would bear one name
        (tmp_path / "in", tmp_path / "in" / "scenes", {}, "elsewhere"),
        (tmp_path / "nowhere", out, {}, "does not exist"),
        (tmp_path / "film.mp4", out, {"min_seconds": -1.0}, "0 or more"),
        (tmp_path / "film.mp4", out, {"threshold": 1.0}, "above 1"),
    ]:
        with pytest.raises(VideotuneError, match=says):
            split(source, to, **how)  # type: ignore[arg-type]
        assert not to.exists()


@pytest.mark.parametrize("fps", [8.0, 16.0, 24.0, 24000 / 1001])
def test_a_sample_is_saved_at_the_familys_rate(fps: float, tmp_path: Path) -> None:
    rows = np.linspace(0, 255, 9).astype("uint8")
    frames = np.broadcast_to(rows[:, None, None, None], (9, 32, 48, 3)).copy()
    write_video(tmp_path / "x.mp4", frames, fps)
    info = probe(tmp_path / "x.mp4")
    assert (len(info.timestamps), info.width, info.height) == (9, 48, 32)
    assert info.fps == pytest.approx(fps, rel=1e-3)
    read = decode(info, info.timestamps, 32, 48)
    assert np.abs(read.astype(int) - frames.astype(int)).max() <= 4
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (192, 192), (240, 416)])
def test_the_same_frames_give_the_same_bytes(size: tuple[int, int]) -> None:
    """Also while the machine is busy.

    As it comes, x264 makes several files of these on a processor with AVX-512.
    """
    coarse = np.random.default_rng(0).integers(
        0, 256, (9, size[0] // 8, size[1] // 8, 3), dtype=np.uint8
    )
    frames = coarse.repeat(8, 1).repeat(8, 2)
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: video_bytes(frames, 16, crf=16), range(12)))
    assert len(files) == 1


def test_an_odd_side_loses_a_pixel(tmp_path: Path) -> None:
    write_video(tmp_path / "x.mp4", np.zeros((2, 33, 49, 3), np.uint8), 16)
    info = probe(tmp_path / "x.mp4")
    assert (info.height, info.width) == (32, 48)


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [("film.mov", "pcm_s16le", 22050), ("film.mkv", "aac", 44100)],
)
def test_scenes_keep_their_sound_at_its_time(
    tmp_path: Path, name: str, codec: str, rate: int
) -> None:
    (tmp_path / "film").mkdir()
    pictures = shots((1, 2, 3), SHOT)
    seconds = len(pictures) / 24
    sound = clicks(rate, seconds, [0.4, 1.6, 2.9]) + 0.01 * tone(rate, seconds, 300)
    write_sounding(
        tmp_path / "film" / name,
        sound,
        rate,
        codec=codec,
        pictures=pictures,
        frames=len(pictures),
    )
    split(tmp_path / "film", tmp_path / "out")

    scenes = sorted((tmp_path / "out").glob("*.mp4"))
    assert len(scenes) == 3
    for number, path in enumerate(scenes):
        info = probe(path)
        assert info.sound is not None
        assert info.sound.missing_seconds(info.seconds) < 0.03
        samples = np.abs(read_sound(info, 0.0, info.seconds, 48000)[0])
        heard_at = np.flatnonzero(samples > 0.3)[0] / 48000
        written_at = [0.4, 1.6, 2.9][number] - number * SHOT / 24
        assert heard_at == pytest.approx(written_at, abs=0.005)


def test_scenes_of_a_silent_film_have_no_track(tmp_path: Path) -> None:
    (tmp_path / "film").mkdir()
    pictures = shots((1, 2), SHOT)
    write_sounding(
        tmp_path / "film" / "a.mov",
        np.zeros(len(pictures) * 2000),
        48000,
        codec="pcm_s16le",
        pictures=pictures,
        frames=len(pictures),
    )
    split(tmp_path / "film", tmp_path / "out")
    scenes = sorted((tmp_path / "out").glob("*.mp4"))
    assert len(scenes) == 2
    assert all(probe(path).sound is None for path in scenes)
