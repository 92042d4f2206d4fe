"""Control clips: the frames, times and size of their clips, the option of each kind, and
no file lost.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clips import noise, write_clip, write_image
from tests.support.command_line import run
from videotune.bounds import RECORD_BYTES
from videotune.data.control_clips import JOURNAL
from videotune.data.decode import decode, decode_all
from videotune.data.probe import probe
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.files import hash_file

Printed = pytest.CaptureFixture[str]


def derive(source: Path, kind: str = "grey", **options: Any) -> int:
    every = options.pop("every", None)  # ``run`` takes it for --all
    words = [] if every is None else ["--every", every]
    return run("dataset", "derive", source, *words, kind=kind, **options)


def frames_of(path: Path) -> np.ndarray:
    """All frames as the trainer decodes them. float (T, H, W, 3)."""
    info = probe(path)
    return decode(info, info.timestamps, info.height, info.width).astype(float)


def hashes(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hash_file(path) for path in paths}


def stamps(folder: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_mtime_ns
        for path in folder.rglob("*.*")
        if path.name != JOURNAL
    }


def test_controls_have_the_place_the_size_and_the_times_of_their_clips(
    tmp_path: Path, capsys: Printed
) -> None:
    """Nested, not ASCII, at a variable rate, turned, with odd sides; an image. Masks and
    start images are no clips.
    """
    data = tmp_path / "data"
    times = [0.0, 0.03, 0.11, 0.2, 0.21, 0.4]
    clips = {
        "videos/a.mp4": write_clip(data / "videos/a.mp4", noise(6), times=times),
        "videos/日本/hoch.mov": write_clip(
            data / "videos/日本/hoch.mov", noise(5, seed=1), 29.97, rotation=90
        ),
        "videos/odd.mkv": write_clip(
            data / "videos/odd.mkv",
            noise(4, 63, 95, seed=2),
            codec="ffv1",
            pix_fmt="yuv444p",
        ),
        "images/still.jpg": write_image(data / "images/still.jpg", noise(1, seed=3)[0]),
    }
    write_image(data / "masks/a.png", noise(1)[0])
    write_image(data / "images/a.png", noise(1)[0])
    before = hashes(data)

    assert derive(data) == DONE
    assert f"4 control clips are in {data / 'controls'}" in capsys.readouterr().out
    after = hashes(data)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        "controls/a.mp4",
        "controls/日本/hoch.mp4",
        "controls/odd.mp4",
        "controls/still.png",
        f"controls/{JOURNAL}",
    }

    for name, path in clips.items():
        suffix = ".png" if name.startswith("images") else ".mp4"
        control = (data / "controls" / Path(*Path(name).parts[1:])).with_suffix(suffix)
        clip_info, info = probe(path), probe(control)
        assert (info.width, info.height) == (clip_info.width, clip_info.height)
        assert info.timestamps == pytest.approx(clip_info.timestamps, abs=1e-4)
        assert info.seconds == pytest.approx(clip_info.seconds, abs=1e-3)

        wanted = decode(clip_info, clip_info.timestamps, info.height, info.width)
        assert np.array_equal(np.stack(list(decode_all(clip_info))), wanted)
        frames = frames_of(control)
        assert np.ptp(frames, axis=3).max() == 0
        luma = wanted @ np.array([0.2126, 0.7152, 0.0722])
        assert np.abs(frames[..., 0] - luma).mean() < 1


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Nine frames of two bands of stripes on a flat background; each frame is brighter
    than the last.
    """
    frames = np.full((9, 64, 96, 3), 40, np.uint8)
    frames[:, 16:48, ::2] = (200, 120, 40)
    frames[:, 16:32] //= 2
    frames += np.arange(9, dtype=np.uint8)[:, None, None, None] * 5
    how = {"codec": "ffv1", "pix_fmt": "yuv444p"}
    return write_clip(tmp_path / "clips" / "clip.mkv", frames, **how)


def derived(clip: Path, kind: str, **options: Any) -> np.ndarray:
    out = clip.parent.parent / f"{kind}-{len(os.listdir(clip.parent.parent))}"
    assert derive(clip, kind, out=out, **options) == DONE
    return frames_of(out / "clip.mp4")


def steepest(frames: np.ndarray) -> float:
    """The largest difference between a pixel and the one below it."""
    return float(np.abs(np.diff(frames, axis=1)).max())


def test_edges_are_bright_where_colours_change_and_black_elsewhere(clip: Path) -> None:
    weak = derived(clip, "edges", strength=0.5)
    usual = derived(clip, "edges")
    assert weak[:, :12].max() == usual[:, :12].max() == 0
    border = usual[:, 15:17].mean()
    assert border > 30
    assert border == pytest.approx(4 * weak[:, 15:17].mean(), rel=0.1)
    assert np.ptp(usual, axis=3).max() == 0


def test_a_blur_and_a_low_resolution_lose_detail_by_their_option(clip: Path) -> None:
    def detail(kind: str, **options: Any) -> float:
        return steepest(derived(clip, kind, **options))

    original = steepest(frames_of(clip))
    assert original > detail("blur", amount=0.01)
    assert detail("blur", amount=0.01) > 1.5 * detail("blur")
    assert detail("blur") > 2 * detail("blur", amount=0.2)
    assert original > 1.5 * detail("lowres", factor=2)
    assert detail("lowres", factor=2) > 1.3 * detail("lowres")


def test_every_nth_frame_is_held(clip: Path) -> None:
    original = frames_of(clip)
    for options, sources in (
        ({}, [0, 0, 0, 0, 4, 4, 4, 4, 8]),
        ({"every": 3}, [0, 0, 0, 3, 3, 3, 6, 6, 6]),
    ):
        frames = derived(clip, "every-nth", **options)
        flat = frames[:, :12].mean((1, 2, 3))
        assert flat == pytest.approx(original[sources][:, :12].mean((1, 2, 3)), abs=1)


def test_a_second_run_leaves_what_is_complete_and_writes_the_rest(
    tmp_path: Path, capsys: Printed
) -> None:
    """In a flat folder, whose controls are in it; a killed run left half a line and half
    a file.
    """
    for seed, name in enumerate("abc"):
        write_clip(tmp_path / f"{name}.mp4", noise(4, seed=seed))
    controls = tmp_path / "controls"
    assert derive(tmp_path) == DONE
    before = hashes(controls)
    del before[JOURNAL]
    (controls / "b.mp4").unlink()
    part = controls / ".part-4000000000-0-b.mp4"
    part.write_bytes(b"half")
    with (controls / JOURNAL).open("a") as journal:
        journal.write('\n{"key": "c.mp4", "id')
    times = stamps(controls)
    capsys.readouterr()

    assert derive(tmp_path) == DONE
    assert "3 control clips" in (said := capsys.readouterr().out)
    assert "2 from an earlier run" in said
    assert before.items() <= hashes(controls).items()
    assert not part.exists()
    del times[part.name]
    assert times.items() <= stamps(controls).items()


def test_files_that_it_did_not_make_so_stop_it(tmp_path: Path) -> None:
    """Of the user, of other options, of another content of the clip."""
    clip = write_clip(tmp_path / "videos" / "a.mp4", noise(4))
    controls = tmp_path / "controls"
    controls.mkdir()
    for name in ("a.mp4", "a.webm"):
        (controls / name).write_text("mine")
        with pytest.raises(VideotuneError, match=name):
            derive(tmp_path)
        assert {path.name for path in controls.iterdir()} == {name}
        (controls / name).unlink()

    assert derive(tmp_path / "videos", "blur", amount=0.1) == DONE
    before = hashes(controls)
    for options in ({"kind": "grey"}, {"kind": "blur"}):
        with pytest.raises(VideotuneError, match=r"a\.mp4"):
            derive(clip, **options)
    write_clip(clip, noise(4, seed=1))
    with pytest.raises(VideotuneError, match=r"a\.mp4"):
        derive(tmp_path, "blur", amount=0.1)
    assert hashes(controls) == before


def test_a_clip_that_cannot_be_read_is_named_and_the_others_are_made(
    tmp_path: Path, capsys: Printed
) -> None:
    write_clip(tmp_path / "videos" / "good.mp4", noise(4))
    (tmp_path / "videos" / "bad.mp4").write_bytes(b"no video")
    out = tmp_path / "references"
    assert derive(tmp_path, out=out, as_json=True) == SKIPPED
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == SKIPPED
    assert answer["lines"][0].startswith("skipped: videos/bad.mp4: not_a_video")
    assert {path.name for path in out.iterdir()} == {"good.mp4", JOURNAL}

    # A folder of one kind of control is no source of another.
    (tmp_path / "videos" / "bad.mp4").unlink()
    assert derive(tmp_path, "edges") == DONE
    assert {path.name for path in (tmp_path / "controls").iterdir()} == {
        "good.mp4",
        JOURNAL,
    }


def test_a_file_that_cannot_be_written_ends_it(tmp_path: Path) -> None:
    write_clip(tmp_path / "in" / "sub" / "a.mp4", noise(4))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        derive(tmp_path / "in", out=tmp_path / "out")
    assert (tmp_path / "out" / "sub").read_text() == "a file"


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("grey", {"strength": 1}, "--strength"),
        ("edges", {"amount": 0.1}, "--amount"),
        ("blur", {"factor": 2}, "--factor"),
        ("lowres", {"every": 2}, "--every"),
        ("edges", {"strength": "nan"}, "--strength"),
        ("blur", {"amount": 0}, "--amount"),
        ("lowres", {"factor": 1}, "--factor"),
        ("every-nth", {"every": 1}, "--every"),
    ],
)
def test_options_of_another_kind_or_out_of_range_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], names: str
) -> None:
    write_image(tmp_path / "a.png", noise(1)[0])
    with pytest.raises(VideotuneError, match=names):
        derive(tmp_path, kind, **options)
    assert os.listdir(tmp_path) == ["a.png"]


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """Nothing is written. Links of a stranger's dataset may not lead out of it."""
    data = tmp_path / "data"
    write_image(data / "videos" / "a.png", noise(1)[0])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "text.txt").write_text("text")
    for source, out, says in [
        (tmp_path / "nowhere", None, "does not exist"),
        (tmp_path / "text.txt", None, "neither a video nor an image"),
        (data, tmp_path / "text.txt", "is a file"),
        (data, data / "edges", "would be clips"),
        (data / "videos", data, "would be clips"),
    ]:
        with pytest.raises(VideotuneError, match=says):
            derive(source, out=out)

    (data / "controls").symlink_to(elsewhere)
    with pytest.raises(VideotuneError, match="leads out"):
        derive(data)
    (data / "controls").unlink()
    (data / "controls").mkdir()
    (data / "controls" / JOURNAL).symlink_to(tmp_path / "text.txt")
    with pytest.raises(VideotuneError, match="is a link"):
        derive(data)
    (data / "controls" / JOURNAL).unlink()
    with (data / "controls" / JOURNAL).open("wb") as journal:
        journal.truncate(RECORD_BYTES + 1)
    with pytest.raises(VideotuneError, match="bytes"):
        derive(data)
    (data / "controls" / JOURNAL).unlink()
    write_image(data / "videos" / "A.jpg", noise(1)[0])
    with pytest.raises(VideotuneError, match="Rename one"):
        derive(data)

    assert (tmp_path / "text.txt").read_text() == "text"
    assert hashes(data).keys() == {"videos/a.png", "videos/A.jpg"}
    assert os.listdir(elsewhere) == []
