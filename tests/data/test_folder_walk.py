"""Links of a dataset's folders are followed, but neither in circles nor for ever."""

import os
import time
from pathlib import Path

import pytest

from tests.support.clips import noise, write_clip
from tests.support.datasets import scanned
from videotune.data.clip_file import has_clip_files
from videotune.data.folder_walk import MOST_VISITS, walk_folders
from videotune.data.layouts import read_folder
from videotune.data.library_snapshot import has_many_files
from videotune.errors import VideotuneError


def ladder(folder: Path, rungs: int) -> None:
    """Folders that have two links each to the next one: 2 ** rungs ways to the last."""
    for rung in range(rungs):
        (folder / str(rung)).mkdir(parents=True)
    for rung in range(rungs - 1):
        for name in ("a", "b"):
            (folder / str(rung) / name).symlink_to(folder / str(rung + 1))


def test_linked_and_hidden_folders(tmp_path: Path) -> None:
    (tmp_path / "set" / ".hidden").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    for folder in ("set", "set/.hidden", "elsewhere/deep"):
        (tmp_path / folder / "a.txt").touch()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "elsewhere")

    files = {
        os.path.relpath(folder, tmp_path): names
        for folder, names in walk_folders(tmp_path / "set")
    }
    assert files == {"set": ["a.txt"], "set/linked": [], "set/linked/deep": ["a.txt"]}


def test_a_link_in_a_circle_is_not_followed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(tmp_path)
    assert [folder for folder, _ in walk_folders(tmp_path)] == [str(tmp_path)]
    assert not has_many_files([str(tmp_path)], 1)
    assert not has_clip_files(tmp_path)


@pytest.mark.parametrize("rungs", [5, 40])
def test_links_that_lead_to_a_folder_in_ever_more_ways_are_refused(
    tmp_path: Path, rungs: int
) -> None:
    """Five rungs give 16 ways to the last folder, 40 would take years."""
    folder = tmp_path / "set"
    ladder(folder, rungs)
    write_clip(folder / "0" / "a.mp4", noise(24), fps=16)
    root = folder / "0"
    begun = time.process_time()
    if rungs == 5:
        assert 2 ** (rungs - 1) < MOST_VISITS
        assert len(scanned(root).clips) == 1
        return
    for walk in (
        lambda: has_many_files([str(root)], 1_000_000),
        lambda: read_folder(root),
        lambda: scanned(root),
    ):
        with pytest.raises(VideotuneError, match="links lead to the folder"):
            walk()
    assert time.process_time() - begun < 20


def test_clips_behind_a_linked_folder_are_seen(tmp_path: Path) -> None:
    write_clip(tmp_path / "elsewhere" / "a.mp4", noise(24), fps=16)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "elsewhere")
    assert has_clip_files(tmp_path / "set")
