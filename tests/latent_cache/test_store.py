"""The store: what is in it is what its key says, whole, made once, and there after any kill."""

import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kills import kill_points, killed_at
from videotune.data.frame_sampling import sample_window
from videotune.errors import VideotuneError
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import Store
from videotune.types import PLAIN, ClipShape, Take, Window

WINDOW = Window("c" * 32, 0.5, 1.5625, ClipShape(17, 64, 64, 16.0))


def value(i: int) -> dict[str, torch.Tensor]:
    """Two tensors of two types, as a family that keeps a variance has them."""
    random = torch.Generator().manual_seed(i)
    mean = torch.randn(4, 3, 2, 2, generator=random)
    return {"mean": mean, "logvar": (mean * 2).bfloat16()}


def equal(found: dict[str, torch.Tensor], i: int) -> bool:
    wanted = value(i)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def filled(folder: Path, count: int) -> Store:
    """A store of ``count`` latents called k0, k1, …; and one text."""
    store = Store(folder)
    with store.filling():
        for i in range(count):
            store.put("latents", f"k{i}", value(i), {"window": f"w{i}"})
        store.put("text", "t", {"text": torch.ones(2, 3, dtype=torch.bfloat16)}, {"caption": "schön"})
    return store


def is_sound(folder: Path, count: int) -> None:
    """Every entry is there and equal, and no file that nobody needs is left once the folder was tidied."""
    store = Store(folder)
    assert all(store.has("latents", f"k{i}") and equal(store.get("latents", f"k{i}"), i) for i in range(count))
    with store.filling():
        pass
    assert Store(folder).has("text", "t")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.name != "lock.owner"}
    assert files == {entry.file for entry in Store(folder).entries()}


# ---- names


def latent_key(shown: Take, vae: str) -> str:
    return CacheKeys(vae, "", 0, 0).latents(shown)


def test_each_draw_of_a_window_has_its_own_name_and_no_draw_the_plain_one() -> None:
    for varying in (replace(WINDOW, resize="random"), replace(WINDOW, swaps=True), replace(WINDOW, sampling="frames")):
        keys = {latent_key(sample_window(varying, variant, 7), "vae") for variant in range(4)}
        assert len(keys) == 4, varying
        plain = latent_key(sample_window(varying, PLAIN, 7), "vae")
        assert plain not in keys
        assert plain == latent_key(sample_window(WINDOW, 0, 0), "vae"), "the same pixels have the same name"
    assert len({latent_key(sample_window(WINDOW, variant, 7), "vae") for variant in (PLAIN, 0, 1, 5)}) == 1


# ---- entries


def test_views_of_one_memory_are_stored_as_what_they_show(tmp_path: Path) -> None:
    both = torch.arange(12.0).reshape(2, 6)
    Store(tmp_path).put("latents", "k", {"mean": both[0], "logvar": both[1].T}, {})
    found = Store(tmp_path).get("latents", "k")
    assert torch.equal(found["mean"], both[0])
    assert torch.equal(found["logvar"], both[1])


def test_a_store_that_cannot_be_written_says_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VideotuneError, match=r"file.*cache_dir"):
        Store(tmp_path / "file").put("latents", "k", value(0), {})


def test_what_stays_in_memory_is_bounded_and_true(tmp_path: Path) -> None:
    writer = Store(tmp_path)
    for i in range(3):
        writer.put("latents", str(i), {"mean": torch.full((256,), float(i))}, {})
    store = Store(tmp_path, keep_bytes=2 * 1024)
    first = store.get("latents", "0")["mean"]
    store.get("latents", "1")
    for i in range(3):
        store.path("latents", str(i)).rename(tmp_path / f"{i}")
    assert store.get("latents", "0")["mean"] is first
    (tmp_path / "2").rename(store.path("latents", "2"))
    store.get("latents", "2")  # the third entry: the one asked for longest ago goes
    assert store.get("latents", "0")["mean"] is first
    with pytest.raises(VideotuneError):
        store.get("latents", "1")
    store.put("latents", "0", {"mean": torch.zeros(256)}, {})
    assert store.get("latents", "0")["mean"].sum() == 0, "an entry that is written anew is read anew"


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    filled(tmp_path, 40)
    store, order = Store(tmp_path, keep_bytes=500), [i for i in range(40) for _ in range(10)]
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: equal(store.get("latents", f"k{i}"), i), order))


def test_files_of_others_and_of_earlier_versions_are_named_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    (tmp_path / "latents" / "mine.txt").write_text("a note")
    (tmp_path / "latents" / "shard-0123.safetensors").write_bytes(b"old")
    assert any("2 files" in note for note in Store(tmp_path).notes)
    (tmp_path / "manifest.jsonl").write_text("{}")
    assert any("earlier version" in note for note in Store(tmp_path).notes)
    with Store(tmp_path).filling():
        pass
    assert (tmp_path / "latents" / "mine.txt").exists()


def fill_some(folder: Path) -> None:
    store = Store(folder)
    with store.filling():
        store.put("latents", "k5", value(5), {})
        store.put("latents", "k0", value(0), {})


def test_killed_anywhere_in_putting_nothing_is_lost(tmp_path: Path) -> None:
    """A real SIGKILL in each state of the folder that writing goes through."""
    filled(tmp_path / "before", 5)
    points = kill_points(fill_some, shutil.copytree(tmp_path / "before", tmp_path / "dry"))
    assert len(points) > 4
    made = []
    for number, point in enumerate(points):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        assert killed_at(point, fill_some, folder)
        made.append(Store(folder).has("latents", "k5"))
        is_sound(folder, 5)
        fill_some(folder)
        is_sound(folder, 6)
    assert made == sorted(made), "what was once there stays there"
    assert set(made) == {False, True}


def test_parts_of_killed_writers_are_swept_when_the_next_one_comes(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    part = tmp_path / "latents" / ".part-1-k9.safetensors"
    part.write_bytes(b"x")
    os.utime(part, (1, 1))
    with store.filling():
        assert not part.exists()
        part.write_bytes(b"x")
        os.utime(part, (2e10, 2e10))
    assert part.exists(), "what is being written now is nobody's leftover"
