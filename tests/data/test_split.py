"""Splitting into scenes: every frame once and in order, at its time, upright, in its colours; originals as they were."""

import hashlib
from pathlib import Path

import av
import numpy as np
import pytest

from tests.clips import noise, numbered, read_numbers, write_clip
from tests.scenery import pan, scenery, shots
from videotune.data import split as module
from videotune.data.decode import decode
from videotune.data.media_info import probe
from videotune.data.split import JOURNAL, split
from videotune.errors import VideotuneError

SHOT = 30


def video(path: Path, seeds: tuple[int, ...] = (1, 2, 3), fps: float = 24, **how: object) -> Path:
    return write_clip(path, shots(seeds, SHOT), fps, **how)  # type: ignore[arg-type]


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def frames_of(path: Path, height: int = 120, width: int = 160) -> np.ndarray:
    info = probe(path)
    return decode(info, info.timestamps, height, width)


def tagged(seeds: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    """Shots whose frames carry their number over all, in the picture's middle, while the rest is each shot's landscape."""
    frames = np.concatenate([np.repeat(scenery(s)[None], n, 0) for s, n in zip(seeds, lengths, strict=True)])
    frames[:, 45:75, 60:105] = numbered(len(frames), 30, 45)
    return frames


def numbers(frames: np.ndarray) -> list[int]:
    return read_numbers(frames[:, 45:75, 60:105])


@pytest.mark.parametrize(("name", "fps"), [("film.mp4", 24), ("film.mkv", 29.97), ("film.avi", 25), ("film.webm", 60)])
def test_the_scenes_together_are_the_original(tmp_path: Path, name: str, fps: float) -> None:
    whole = tagged((1, 2, 3), (40, 33, 47))
    path = write_clip(tmp_path / "in" / name, whole, fps, options={"crf": "10"})
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    assert [part.path.name for part in result.scenes if part.path] == [f"film-scene-00{i}.mp4" for i in (1, 2, 3)]
    parts = [frames_of(part.path) for part in result.scenes if part.path]
    assert [len(part) for part in parts] == [40, 33, 47]
    assert numbers(np.concatenate(parts)) == list(range(120))
    error = np.abs(np.concatenate(parts).astype(int) - frames_of(path))
    assert error.mean() < 2.5


def test_frames_keep_their_times_at_a_variable_rate(tmp_path: Path) -> None:
    times = np.cumsum(np.random.default_rng(0).uniform(0.01, 0.1, 3 * SHOT))
    path = video(tmp_path / "in" / "film.mp4", times=list(times - times[0]))
    whole = probe(path)
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    for part in result.scenes:
        assert part.path is not None
        info = probe(part.path)
        expected = np.array(whole.timestamps[part.first : part.end]) - part.start
        assert info.timestamps == pytest.approx(expected, abs=2e-4)
        assert info.seconds == pytest.approx(part.seconds, abs=2e-4)
    assert sum(part.seconds for part in result.scenes) == pytest.approx(whole.seconds)


def test_a_turned_file_becomes_upright_with_even_sides(tmp_path: Path) -> None:
    frames = np.rot90(shots((1, 2), SHOT), -1, (1, 2))[:, :, :118]
    path = write_clip(tmp_path / "in" / "film.mov", frames, rotation=90)
    before = probe(path)
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    after = probe(str(result.scenes[0].path))
    assert (after.width, after.height, after.rotation) == (before.width, before.height, 0)
    pixels = decode(before, (0.5,), before.height, before.width)[0].astype(int)
    assert np.abs(decode(after, (0.5,), after.height, after.width)[0] - pixels).mean() < 4


def test_an_odd_side_loses_its_last_line(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "in" / "film.mkv", shots((1, 2), SHOT)[:, :119, :159], codec="ffv1", pix_fmt="yuv444p")
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    assert result.scenes[0].path is not None
    after = probe(result.scenes[0].path)
    assert (after.width, after.height) == (158, 118)
    error = np.abs(
        frames_of(result.scenes[0].path, 118, 158).astype(int) - frames_of(path, 119, 159)[:SHOT, :118, :158]
    )
    assert error.mean() < 4


@pytest.mark.parametrize("matrix", [1, 6, 9])
def test_declared_colours_stay_declared_and_the_same(tmp_path: Path, matrix: int) -> None:
    path = video(tmp_path / "in" / "film.mp4", (1, 2), colorspace=matrix)
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    with av.open(str(result.scenes[0].path)) as container:
        assert next(container.decode(video=0)).colorspace == matrix
    assert result.scenes[0].path is not None
    assert np.abs(frames_of(result.scenes[0].path).astype(int) - frames_of(path)[:SHOT]).mean() < 3


@pytest.mark.parametrize(
    ("codec", "pix_fmt", "name"),
    [("mjpeg", "yuvj420p", "film.mov"), ("libx264rgb", "rgb24", "film.mkv"), ("ffv1", "yuv420p10le", "film.mkv")],
)
def test_full_range_rgb_and_deep_colours_look_the_same(tmp_path: Path, codec: str, pix_fmt: str, name: str) -> None:
    path = video(tmp_path / "in" / name, (1, 2), codec=codec, pix_fmt=pix_fmt)
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    assert result.scenes[0].path is not None
    assert np.abs(frames_of(result.scenes[0].path).astype(int) - frames_of(path)[:SHOT]).mean() < 4
    with av.open(str(result.scenes[0].path)) as container:
        assert next(container.decode(video=0)).format.name in ("yuv420p", "yuvj420p")


def test_an_interlaced_film_stays_declared_interlaced(tmp_path: Path) -> None:
    path = video(tmp_path / "in" / "film.mp4", (1, 2), options={"x264-params": "tff=1"})
    assert probe(path).interlaced
    (result,) = split(path, tmp_path / "out", min_seconds=0.3)
    assert probe(str(result.scenes[0].path)).interlaced


def test_captions_go_along_and_originals_stay(tmp_path: Path) -> None:
    source = tmp_path / "in"
    video(source / "videos" / "film.mp4", (1, 2))
    video(source / "videos" / "sub" / "play.mp4", (3, 4))
    write_clip(source / "videos" / "still.webm", pan(5, [float(i) for i in range(SHOT)]))
    (source / "captions" / "sub").mkdir(parents=True)
    (source / "captions" / "film.txt").write_text("a film\nanother line\n", encoding="utf-8")
    (source / "videos" / "sub" / "play.txt").write_text("a play", encoding="utf-8")
    before = hashes(source)
    results = {result.file.path.name: result for result in split(source, tmp_path / "out", min_seconds=0.5)}
    assert hashes(source) == before
    assert sorted(path for path in hashes(tmp_path / "out") if path != JOURNAL) == [
        "videos/film-scene-001.mp4",
        "videos/film-scene-001.txt",
        "videos/film-scene-002.mp4",
        "videos/film-scene-002.txt",
        "videos/still-scene-001.webm",
        "videos/sub/play-scene-001.mp4",
        "videos/sub/play-scene-001.txt",
        "videos/sub/play-scene-002.mp4",
        "videos/sub/play-scene-002.txt",
    ]
    out = tmp_path / "out" / "videos"
    assert (out / "film-scene-002.txt").read_bytes() == (source / "captions" / "film.txt").read_bytes()
    assert (out / "still-scene-001.webm").read_bytes() == (source / "videos" / "still.webm").read_bytes()
    assert (results["film.mp4"].captions, results["play.mp4"].captions, results["still.webm"].captions) == (2, 2, 0)


def test_a_caption_from_a_metadata_file_goes_along(tmp_path: Path) -> None:
    video(tmp_path / "in" / "film.mp4", (1, 2))
    (tmp_path / "in" / "metadata.csv").write_text("file_name,text\nfilm.mp4,listed\n", encoding="utf-8")
    split(tmp_path / "in", tmp_path / "out", min_seconds=0.5)
    assert (tmp_path / "out" / "film-scene-002.txt").read_text(encoding="utf-8") == "listed\n"


def test_short_scenes_are_left_out_and_listed(tmp_path: Path) -> None:
    whole = np.concatenate([shots((1,), 36), shots((2,), 12), shots((3,), 36)])
    path = write_clip(tmp_path / "film.mp4", whole)
    (result,) = split(path, tmp_path / "out", min_seconds=1.0)
    assert [part.path.name if part.path else None for part in result.scenes] == [
        "film-scene-001.mp4",
        None,
        "film-scene-002.mp4",
    ]
    assert (result.scenes[1].start, result.scenes[1].seconds) == pytest.approx((1.5, 0.5))


def test_nothing_is_overwritten_unless_it_is_allowed(tmp_path: Path) -> None:
    path, out = video(tmp_path / "film.mp4", (1, 2)), tmp_path / "out"
    out.mkdir()
    (out / "film-scene-001.mp4").write_text("mine")
    with pytest.raises(VideotuneError, match="--overwrite"):
        split(path, out, min_seconds=0.5)
    assert hashes(out).keys() == {"film-scene-001.mp4"}
    assert (out / "film-scene-001.mp4").read_text() == "mine"
    split(path, out, min_seconds=0.5, overwrite=True)
    assert len(probe(out / "film-scene-001.mp4").timestamps) == SHOT


def test_other_settings_or_another_film_are_another_split(tmp_path: Path) -> None:
    path, out = video(tmp_path / "film.mp4"), tmp_path / "out"
    split(path, out, min_seconds=0.5)
    with pytest.raises(VideotuneError, match="--overwrite"):
        split(path, out, min_seconds=0.6)
    video(tmp_path / "film.mp4", (4, 5))
    with pytest.raises(VideotuneError, match="--overwrite"):
        split(path, out, min_seconds=0.5)
    split(path, out, min_seconds=0.5, overwrite=True)
    assert sorted(hashes(out)) == [JOURNAL, "film-scene-001.mp4", "film-scene-002.mp4"]  # the third is gone


def test_a_film_that_is_cut_again_gives_the_same_files(tmp_path: Path) -> None:
    """A clip is known by its content: what was encoded of it stays of use."""
    path = video(tmp_path / "film.mp4")
    cut = []
    for index in range(3):
        split(path, tmp_path / str(index), min_seconds=0.3)
        cut.append([value for name, value in hashes(tmp_path / str(index)).items() if name.endswith(".mp4")])
    assert cut[0] == cut[1] == cut[2]
    assert len(cut[0]) == 3


def test_a_stopped_split_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = video(tmp_path / "film.mp4"), tmp_path / "out"
    (path.with_suffix(".txt")).write_text("a film")
    encode, calls = module._encode, []

    def stop_at_the_second(aside: Path, **how: object) -> None:
        calls.append(aside.name)
        encode(aside, **how)  # type: ignore[arg-type]
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_encode", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        split(path, out, min_seconds=0.5)
    assert sorted(hashes(out)) == [JOURNAL, "film-scene-001.mp4"]
    first = (out / "film-scene-001.mp4").stat().st_mtime_ns
    monkeypatch.setattr(module, "scan_content", lambda *_, **__: pytest.fail("the cuts were known"))
    (result,) = split(path, out, min_seconds=0.5)
    assert (out / "film-scene-001.mp4").stat().st_mtime_ns == first
    assert len(calls) == 4
    assert result.captions == 3
    (out / "film-scene-001.txt").write_text("edited since")
    split(path, out, min_seconds=0.5)
    assert (out / "film-scene-001.txt").read_text() == "edited since"
    assert len(calls) == 4


def test_a_broken_file_is_told_and_the_others_are_split(tmp_path: Path) -> None:
    video(tmp_path / "in" / "good.mp4", (1, 2))
    (tmp_path / "in" / "bad.mp4").write_bytes(b"no video at all")
    bad, good = split(tmp_path / "in", tmp_path / "out", min_seconds=0.5)
    assert bad.problem is not None
    assert bad.problem.reason == "not_a_video"
    assert len(good.scenes) == 2


def test_two_files_of_one_stem_do_not_meet(tmp_path: Path) -> None:
    video(tmp_path / "in" / "film.mp4", (1, 2))
    video(tmp_path / "in" / "film.mkv", (3, 4))
    split(tmp_path / "in", tmp_path / "out", min_seconds=0.5)
    assert sorted(hashes(tmp_path / "out"))[1:] == [f"film-{s}-scene-00{i}.mp4" for s in ("mkv", "mp4") for i in (1, 2)]


def test_scenes_of_a_file_called_like_a_scene_stay(tmp_path: Path) -> None:
    """film-scene-002.mp4 is a film of its own: its scenes begin with the same letters as those of film.mp4."""
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
    assert after.keys() - before.keys() == {JOURNAL, "film-scene-001.mp4", "film-scene-002.mp4"}


def test_files_whose_scenes_would_bear_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("film.mp4", "film.mkv", "film-mp4.mp4"):
        video(tmp_path / "in" / name, (1, 2))
    with pytest.raises(VideotuneError, match="Rename one"):
        split(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_scenes_may_not_go_among_the_originals(tmp_path: Path) -> None:
    video(tmp_path / "in" / "film.mp4", (1, 2))
    with pytest.raises(VideotuneError, match="elsewhere"):
        split(tmp_path / "in", tmp_path / "in" / "scenes")


@pytest.mark.parametrize(
    ("how", "says"), [({"min_seconds": -1.0}, "0 or more"), ({"threshold": 1.0}, "above 1"), ({}, "does not exist")]
)
def test_what_cannot_be_asked_is_said(tmp_path: Path, how: dict, says: str) -> None:
    source = tmp_path / "nowhere" if not how else write_clip(tmp_path / "a.mp4", noise(2))
    with pytest.raises(VideotuneError, match=says):
        split(source, tmp_path / "out", **how)


def test_progress_goes_over_the_whole_job(tmp_path: Path) -> None:
    video(tmp_path / "in" / "a.mp4", (1, 2))
    video(tmp_path / "in" / "b.mp4", (3, 4))
    told: list[tuple[int, int, str]] = []
    split(tmp_path / "in", tmp_path / "out", min_seconds=0.5, progress=lambda *words: told.append(words))
    done = [row[0] for row in told]
    assert done == sorted(done)
    assert {row[1] for row in told} == {5}
    assert done[-1] == 5
    assert {"a.mp4", "b.mp4"} <= {row[2] for row in told}
