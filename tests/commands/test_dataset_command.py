"""``dataset split`` as a person meets it: a table, sentences, exit codes."""

from pathlib import Path

import pytest
from PIL import Image

from tests.clips import noise, write_clip
from tests.scenery import shots
from tests.shell import run as shell
from videotune.errors import DONE, SKIPPED, VideotuneError


def run(source: Path, out: Path, min_seconds: float = 1.0) -> int:
    return shell("dataset", "split", source, out=out, min_seconds=min_seconds)


def test_the_table_says_what_became_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clip(tmp_path / "in" / "film.mp4", shots([1, 2, 3], 30)[:-12])
    write_clip(tmp_path / "in" / "whole.mp4", shots([4], 30))
    assert run(tmp_path / "in", tmp_path / "out") == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "left out: 2.50 to 3.25 s" in printed
    assert "no cut: copied as it is" in printed
    assert "3 scenes of 2 files" in printed
    assert "1 scene is shorter than 1 s" in printed


def test_an_animated_gif_is_split_and_a_still_one_is_an_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    pages = [Image.fromarray(frame) for frame in shots([1, 2], 30)]
    pages[0].save(tmp_path / "in" / "a.gif", save_all=True, append_images=pages[1:], duration=40)
    pages[0].save(tmp_path / "in" / "b.gif")
    assert run(tmp_path / "in", tmp_path / "out", 0.5) == DONE
    printed = capsys.readouterr().out
    assert "1 image was not split" in printed
    assert f"videotune check {tmp_path / 'out'}" in printed
    assert len([*(tmp_path / "out").glob("a-scene-*")]) == 2


def test_a_broken_file_ends_in_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clip(tmp_path / "in" / "film.mp4", shots([1, 2], 30))
    (tmp_path / "in" / "bad.mp4").write_bytes(b"")
    assert run(tmp_path / "in", tmp_path / "out") == SKIPPED
    told = capsys.readouterr()
    assert "empty: the file has 0 bytes" in " ".join(told.out.split())
    assert "exit code 2" in told.err
    assert (tmp_path / "out" / "film-scene-002.mp4").exists()


def test_images_are_listed_and_not_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clip(tmp_path / "in" / "film.mp4", shots([1, 2], 30))
    for name in ("a.png", "b.jpg"):
        Image.fromarray(noise(1)[0]).save(tmp_path / "in" / name)
    assert run(tmp_path / "in", tmp_path / "out") == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("image: not split") == 2
    assert "2 scenes of 1 file are in" in printed
    assert "2 images were not split or copied" in printed
    assert not [*(tmp_path / "out").glob("*.png"), *(tmp_path / "out").glob("*.jpg")]


def test_a_folder_without_videos_has_nothing_to_split(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("no clip")
    with pytest.raises(VideotuneError, match="No video files"):
        run(tmp_path / "in", tmp_path / "out")
    Image.fromarray(noise(1)[0]).save(tmp_path / "in" / "a.png")
    with pytest.raises(VideotuneError, match=r"No video files.*Images, of which it has 1, have no scenes to split"):
        run(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "metadata.csv").write_text("nonsense\nx\n")
    with pytest.raises(VideotuneError, match=r"metadata\.csv"):
        run(tmp_path / "in", tmp_path / "out")
