"""``cache`` and its maintenance: fill, ls, verify, prune, by the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shell import cache, list_cache, prune_cache, verify_cache
from videotune.commands.cache import cache_at
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.latent_cache.store import Store
from videotune.trainer.resolve_config import Overrides


@pytest.fixture
def data(small_clips: Path, tmp_path: Path) -> Path:
    """A dataset of six clips and six captions, for one test alone."""
    return shutil.copytree(small_clips, tmp_path / "data", ignore=shutil.ignore_patterns(".videotune-cache"))


@pytest.fixture
def settings(data: Path, tiny_bases: Callable[[str], Path]) -> Overrides:
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


def test_a_cache_is_filled_listed_verified_and_pruned(
    data: Path, settings: Overrides, capsys: pytest.CaptureFixture[str]
) -> None:
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
    data: Path, settings: Overrides, capsys: pytest.CaptureFixture[str]
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
    data: Path, settings: Overrides, capsys: pytest.CaptureFixture[str]
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
