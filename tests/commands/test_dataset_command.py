"""``dataset split``: its table, files and exit codes."""

from pathlib import Path

import pytest
from PIL import Image

from tests.clips import noise, write_clip
from tests.scenery import shots
from tests.shell import run as shell
from videotune.errors import DONE, SKIPPED, VideotuneError


def run(source: Path, out: Path, min_seconds: float = 1.0) -> int:
    return shell("dataset", "split", source, out=out, min_seconds=min_seconds)


def test_the_table_and_files_of_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scenes, a whole file, images that are listed and not split, a broken file."""
    write_clip(tmp_path / "in" / "film.mp4", shots([1, 2, 3], 30)[:-12])
    write_clip(tmp_path / "in" / "whole.mp4", shots([4], 30))
    pages = [Image.fromarray(frame) for frame in shots([5, 6], 30)]
    pages[0].save(tmp_path / "in" / "a.gif", save_all=True, append_images=pages[1:], duration=40)
    for name in ("b.gif", "c.png", "d.jpg"):
        pages[0].save(tmp_path / "in" / name)
    assert run(tmp_path / "in", tmp_path / "out") == DONE
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "left out: 2.50 to 3.25 s",
        "no cut: copied as it is",
        "1 scene is shorter than 1 s",
        "3 images were not split",
    ):
        assert part in printed
    assert printed.count("image: not split") == 3
    assert f"videotune check {tmp_path / 'out'}" in printed
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {name for name in made if name.startswith("a-scene-")}
    assert not {name for name in made if name.endswith((".png", ".jpg"))}
    (tmp_path / "in" / "bad.mp4").write_bytes(b"")
    assert run(tmp_path / "in", tmp_path / "again") == SKIPPED
    printed = capsys.readouterr()
    assert "empty: the file has 0 bytes" in " ".join(printed.out.split())
    assert "exit code 2" in printed.err
    assert (tmp_path / "again" / "film-scene-002.mp4").exists()


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
