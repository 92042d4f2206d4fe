"""cache and its maintenance, and dataset split, by the command line."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.clips import noise, write_clip
from tests.scenery import shots
from tests.shell import Bases, Printed, cache, list_cache, prune_cache, verify_cache
from tests.shell import run as shell
from videotune.commands.cache import cache_at
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.latent_cache.store import Store
from videotune.trainer.resolve_config import Overrides


@pytest.fixture
def data(small_clips: Path, tmp_path: Path) -> Path:
    """A dataset of six clips and six captions, for one test alone."""
    return shutil.copytree(small_clips, tmp_path / "data", ignore=shutil.ignore_patterns(".videotune-cache"))


@pytest.fixture
def settings(data: Path, tiny_bases: Bases) -> Overrides:
    sets = ("resolution=32x32", "samples=0", "dataloader_threads=1")
    return Overrides(data=str(data), sets=(f"base_model_name={tiny_bases('wan')}", *sets))


def spoil(store: Store, kind: str) -> str:
    """Change a byte of one entry's data in its shard; the entry's key."""
    entry = next(entry for entry in store.entries() if entry.kind == kind)
    path = store.folder / entry.file
    first = next(iter(store.get(kind, entry.key).values()))
    data = bytearray(path.read_bytes())
    data[data.index(first.reshape(-1).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    return entry.key


def test_a_cache_is_filled_listed_verified_and_pruned(data: Path, settings: Overrides, capsys: Printed) -> None:
    assert cache(settings) == DONE
    capsys.readouterr()
    for place in (data, data / ".videotune-cache"):
        assert list_cache(place, as_json=True) == DONE
        listed = json.loads(capsys.readouterr().out)
        assert listed["folder"] == str(data / ".videotune-cache")
        assert [row["kind"] for row in listed["entries"]] == ["latents"] * 6 + ["text"] * 7
    captions = {path.read_text() for path in (data / "captions").iterdir()} | {""}
    assert {row["of"] for row in listed["entries"] if row["kind"] == "text"} == captions
    clips = {str(path) for path in (data / "videos").iterdir()}
    assert {row["clip"] for row in listed["entries"] if row["kind"] == "latents"} == clips
    assert list_cache(data) == DONE
    assert "6 windows of" in (short := capsys.readouterr().out)
    assert len(short.splitlines()) == 3
    assert list_cache(data, every=True) == DONE
    assert "13 entries" in capsys.readouterr().out
    assert verify_cache(data) == DONE
    assert "all 13 entries" in capsys.readouterr().out
    assert prune_cache(settings) == DONE
    assert "nothing to remove" in capsys.readouterr().out


def test_a_damaged_entry_is_listed_with_exit_code_2_and_made_anew(
    data: Path, settings: Overrides, capsys: Printed
) -> None:
    cache(settings)
    folder = data / ".videotune-cache"
    before = {entry.name: entry.hash for entry in Store(folder).entries()}
    key = spoil(Store(folder), "latents")
    capsys.readouterr()
    assert verify_cache(data) == SKIPPED
    printed = capsys.readouterr().out
    assert "holds other bytes than were written" in printed
    assert "1 of 13 entries are damaged" in printed
    assert not Store(folder).has("latents", key)
    assert verify_cache(data) == DONE
    assert cache(settings) == DONE
    assert {entry.name: entry.hash for entry in Store(folder).entries()} == before


def test_pruning_removes_what_the_settings_do_not_need_and_only_with_yes(
    data: Path, settings: Overrides, capsys: Printed
) -> None:
    cache(settings)
    caption = sorted((data / "captions").iterdir())[0]
    old = caption.read_text()
    caption.write_text("something else")
    video = sorted((data / "videos").iterdir())[1]
    video.unlink()
    (data / "captions" / f"{video.stem}.txt").unlink()
    cache(settings)
    capsys.readouterr()
    assert prune_cache(settings) == DONE
    printed = capsys.readouterr().out
    assert "would remove 3 entries" in printed
    assert "11 entries would stay. --yes does it" in printed
    assert f"text of {old!r}" in printed
    assert len(Store(data / ".videotune-cache").entries()) == 14
    assert prune_cache(settings, yes=True) == DONE
    assert "removed 3 entries" in capsys.readouterr().out
    assert len(Store(data / ".videotune-cache").entries()) == 11
    assert verify_cache(data) == DONE
    assert prune_cache(settings) == DONE
    assert "nothing to remove" in capsys.readouterr().out


def test_a_folder_without_a_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match=r"neither a cache nor a dataset.*cache_dir"):
        verify_cache(tmp_path)
    with pytest.raises(VideotuneError, match="there is no such folder"):
        list_cache(tmp_path / "none")
    (tmp_path / "text").mkdir()
    with pytest.raises(VideotuneError, match="neither a cache"):
        verify_cache(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"], "looking leaves nothing behind"
    (tmp_path / "lock").touch()
    assert cache_at(tmp_path) == tmp_path


def run(source: Path, out: Path, min_seconds: float = 1.0) -> int:
    return shell("dataset", "split", source, out=out, min_seconds=min_seconds)


def test_the_table_and_files_of_a_split(tmp_path: Path, capsys: Printed) -> None:
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
