"""The store: what is in it is what its key says, whole, made once, and there after any
kill.

Verify, prune and list: damage is found, what is wanted stays, and a kill in between
costs nothing.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.kill_points import kill_points, killed_at
from videotune.data.frame_sampling import draw_frames
from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.latent_cache.entry import file_of
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.maintenance import listing, prune, verify
from videotune.latent_cache.store import LatentCache
from videotune.types import DETERMINISTIC_VARIANT, ClipShape, Window

WINDOW = Window("c" * 32, 0.5, 1.5625, ClipShape(17, 64, 64, 16.0))


def value(i: int) -> dict[str, torch.Tensor]:
    """Two tensors of two types, as a family that keeps a variance has them."""
    mean = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(i))
    return {"mean": mean, "logvar": (mean * 2).bfloat16()}


def equal(found: dict[str, torch.Tensor], i: int) -> bool:
    wanted = value(i)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def filled(folder: Path, count: int = 8) -> LatentCache:
    """A store of ``count`` latents called k0, k1, …; and one text."""
    store = LatentCache(folder)
    with store.write_lock():
        for i in range(count):
            about = {
                "window": f"w{i}",
                "variant": i % 3 - 1,
                "clip": f"/clips/{i}.mp4",
                "encoder": "vae-print",
            }
            store.put("latents", f"k{i}", value(i), about)
        text = {"text": torch.ones(2, 3, dtype=torch.bfloat16)}
        store.put("text", "t", text, {"caption": "schön", "encoder": "e"})
    return store


def holds(store: LatentCache, numbers: Iterable[int]) -> bool:
    """Whether these latents are there and equal."""
    return all(equal(store.get("latents", f"k{i}"), i) for i in numbers)


def lost(store: LatentCache, count: int = 8) -> list[int]:
    return [i for i in range(count) if not store.has("latents", f"k{i}")]


def after_each_kill(
    work: Callable[[Path], object], folder: Path, least: int
) -> Iterator[Path]:
    """Copies of a folder, in each of which a real SIGKILL ended the work in another
    state that it goes through.
    """
    points = kill_points(work, shutil.copytree(folder, folder.with_name("dry")))
    assert len(points) > least
    for number, point in enumerate(points):
        copy = shutil.copytree(folder, folder.with_name(str(number)))
        assert killed_at(point, work, copy)
        yield copy


def is_sound(folder: Path, count: int) -> None:
    """Every entry is there and equal, and no file that nobody needs is left once the
    folder was tidied.
    """
    store = LatentCache(folder)
    assert lost(store, count) == []
    assert holds(store, range(count))
    with store.write_lock():
        pass
    assert LatentCache(folder).has("text", "t")
    files = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.*")
        if path.name not in ("lock.owner", "CACHEDIR.TAG", ".gitignore")
    }
    store = LatentCache(folder)
    assert files == {store.file(*name) for name in store.names()}


# ---- names


def latent_key(window: Window, variant: int, seed: int = 7) -> str:
    return CacheKeys("vae", "", 0, 0).latents_key(draw_frames(window, variant, seed))


def test_each_draw_of_a_window_has_its_own_name_and_no_draw_the_plain_one() -> None:
    for varying in (
        replace(WINDOW, resize="random"),
        replace(WINDOW, swaps=True),
        replace(WINDOW, sampling="frames"),
    ):
        keys = {latent_key(varying, variant) for variant in range(4)}
        assert len(keys) == 4, varying
        plain = latent_key(varying, DETERMINISTIC_VARIANT)
        assert plain not in keys
        assert plain == latent_key(WINDOW, 0, 0), "the same pixels have the same name"
    assert (
        len(
            {
                latent_key(WINDOW, variant)
                for variant in (DETERMINISTIC_VARIANT, 0, 1, 5)
            }
        )
        == 1
    )


# ---- entries


def test_views_of_one_memory_are_stored_as_what_they_show(tmp_path: Path) -> None:
    both = torch.arange(12.0).reshape(2, 6)
    LatentCache(tmp_path).put(
        "latents", "k", {"mean": both[0], "logvar": both[1].T}, {}
    )
    found = LatentCache(tmp_path).get("latents", "k")
    assert torch.equal(torch.stack([found["mean"], found["logvar"]]), both)


def test_a_store_that_cannot_be_written_says_where_and_what_to_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VideotuneError, match=r"file.*cache_dir"):
        LatentCache(tmp_path / "file").put("latents", "k", value(0), {})


def test_what_stays_in_memory_is_bounded_and_true(tmp_path: Path) -> None:
    writer = LatentCache(tmp_path)
    for i in range(3):
        writer.put("latents", str(i), {"mean": torch.full((256,), float(i))}, {})
    store = LatentCache(tmp_path, keep_bytes=2 * 1024)
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
    assert store.get("latents", "0")["mean"].sum() == 0, (
        "an entry that is written anew is read anew"
    )


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    filled(tmp_path, 40)
    store, order = (
        LatentCache(tmp_path, keep_bytes=500),
        [i for i in range(40) for _ in range(10)],
    )
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: equal(store.get("latents", f"k{i}"), i), order))


def test_files_of_others_and_of_earlier_versions_are_named_and_left_alone(
    tmp_path: Path,
) -> None:
    filled(tmp_path, 2)
    (tmp_path / "latents" / "mine.txt").write_text("a note")
    (tmp_path / "latents" / "shard-0123.safetensors").write_bytes(b"old")
    assert any("2 files" in note for note in LatentCache(tmp_path).notes)
    (tmp_path / "manifest.jsonl").write_text("{}")
    assert any("earlier version" in note for note in LatentCache(tmp_path).notes)
    with LatentCache(tmp_path).write_lock():
        pass
    assert (tmp_path / "latents" / "mine.txt").exists()


def fill_some(folder: Path) -> None:
    store = LatentCache(folder)
    with store.write_lock():
        store.put("latents", "k5", value(5), {})
        store.put("latents", "k0", value(0), {})


def test_killed_anywhere_in_putting_nothing_is_lost(tmp_path: Path) -> None:
    filled(tmp_path / "before", 5)
    made = []
    for folder in after_each_kill(fill_some, tmp_path / "before", 4):
        made.append(LatentCache(folder).has("latents", "k5"))
        is_sound(folder, 5)
        fill_some(folder)
        is_sound(folder, 6)
    assert made == sorted(made), "what was once there stays there"
    assert set(made) == {False, True}


def test_parts_of_killed_writers_are_swept_when_the_next_one_comes(
    tmp_path: Path,
) -> None:
    store = filled(tmp_path, 1)
    part = tmp_path / "latents" / ".part-1-k9.safetensors"
    part.write_bytes(b"x")
    os.utime(part, (1, 1))
    with store.write_lock():
        assert not part.exists()
        part.write_bytes(b"x")
        os.utime(part, (2e10, 2e10))
    assert part.exists(), "what is being written now is nobody's leftover"


def silent(*told: object) -> None:
    """Progress that nobody watches."""


def spoil(folder: Path, *numbers: int) -> None:
    """Change a byte of a tensor where it lies, and nothing else."""
    for i in numbers:
        path = LatentCache(folder).path("latents", f"k{i}")
        data = bytearray(path.read_bytes())
        data[data.rindex(value(i)["mean"].numpy().tobytes())] ^= 1
        path.write_bytes(data)


def test_a_changed_bit_is_found_and_only_its_entry_is_made_anew(tmp_path: Path) -> None:
    filled(tmp_path)
    spoil(tmp_path, 1, 7)
    store = LatentCache(tmp_path)
    assert lost(store) == [], "its size says nothing"
    found = verify(store, silent)
    assert [(row.key, row.of) for row in found] == [
        ("k1", "1.mp4 w1"),
        ("k7", "7.mp4 w7"),
    ]
    assert all("other bytes" in row.why for row in found)
    for again in (store, LatentCache(tmp_path)):
        assert lost(again) == [1, 7]
        assert holds(again, (0, 2, 3, 4, 5, 6))
    assert verify(LatentCache(tmp_path), silent) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "label"])
def test_damage_to_a_whole_file_is_found(tmp_path: Path, damage: str) -> None:
    filled(tmp_path)
    path = LatentCache(tmp_path).path("latents", "k7")
    data = path.read_bytes()
    if damage == "header":
        path.write_bytes(b"\xff" * 16 + data[16:])
    elif damage == "label":
        path.write_bytes(data.replace(b"hash", b"hush", 1))
    else:
        path.write_bytes(data[:-1] if damage == "cut" else b"")
    assert [row.key for row in verify(LatentCache(tmp_path), silent)] == ["k7"]
    store = LatentCache(tmp_path)
    assert lost(store) == [7]
    assert not path.exists()
    assert store.has("text", "t")


def test_pruning_only_says_until_told_and_then_keeps_what_is_wanted(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    (tmp_path / "latents" / "old.safetensors").write_bytes(b"12345")
    part = tmp_path / "latents" / ".part-1-x.safetensors"
    part.write_bytes(b"123")
    os.utime(part, (1, 1))
    wanted = {("latents", "k1"), ("latents", "k5"), ("text", "t")}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    said = prune(LatentCache(tmp_path), wanted, yes=False)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    assert {entry.key for entry in said.entries} == {"k0", "k2", "k3", "k4", "k6", "k7"}
    assert (said.entry_bytes, said.file_bytes, said.kept) == (6 * 288, 8, 3)
    assert said.files == ("latents/.part-1-x.safetensors", "latents/old.safetensors")
    assert prune(LatentCache(tmp_path), wanted, yes=True) == said
    store = LatentCache(tmp_path)
    assert {entry.name for entry in store.entries()} == wanted
    assert holds(store, (1, 5))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")}
    assert left == {store.file(*entry.name) for entry in store.entries()}
    assert verify(store, silent) == []
    assert prune(store, wanted, yes=True).entries == ()


def prune_most(folder: Path) -> None:
    prune(LatentCache(folder), {("latents", "k1"), ("latents", "k5")}, yes=True)


def test_killed_anywhere_in_pruning_what_is_wanted_stays(tmp_path: Path) -> None:
    """Pruning again ends where it should."""
    filled(tmp_path / "before")
    for folder in after_each_kill(prune_most, tmp_path / "before", 4):
        store = LatentCache(folder)
        assert holds(store, (1, 5))
        assert not [entry for entry in store.entries() if not store.has(*entry.name)], (
            "nothing half there"
        )
        assert verify(store, silent) == []
        prune_most(folder)
        assert {entry.key for entry in LatentCache(folder).entries()} == {"k1", "k5"}


def verify_all(folder: Path) -> None:
    verify(LatentCache(folder), silent)


def test_killed_anywhere_in_verifying_no_damaged_entry_comes_back_as_sound(
    tmp_path: Path,
) -> None:
    filled(tmp_path / "before")
    spoil(tmp_path / "before", 1, 7)
    for folder in after_each_kill(verify_all, tmp_path / "before", 2):
        verify_all(folder)
        store = LatentCache(folder)
        assert lost(store) == [1, 7]
        assert holds(store, (0, 2, 3, 4, 5, 6))


def test_nobody_verifies_or_prunes_what_another_fills(tmp_path: Path) -> None:
    store = filled(tmp_path)
    with store.write_lock():
        for work in (verify_all, prune_most):
            with pytest.raises(VideotuneError, match=f"process {os.getpid()} on"):
                work(tmp_path)
        assert len(prune(LatentCache(tmp_path), set(), yes=False).entries) == 9, (
            "looking is free"
        )


# ---- files of an earlier version, and many files


def as_an_earlier_version(store: LatentCache, kind: str, key: str) -> Path:
    """Move an entry's file to where earlier versions wrote it."""
    path = store.path(kind, key)
    old_path = store.folder / kind / path.name
    path.rename(old_path)
    path.parent.rmdir()
    return old_path


def test_entries_of_an_earlier_version_are_read_where_they_are(tmp_path: Path) -> None:
    first = filled(tmp_path)
    old_path = as_an_earlier_version(first, "latents", "k3")

    store = LatentCache(tmp_path)
    assert store.notes == []
    assert store.path("latents", "k3") == old_path
    assert lost(store) == []
    assert holds(store, range(8))
    assert verify(store, silent) == []
    files = {row["key"]: row["file"] for row in listing(store, silent)}
    assert files["k3"] == "latents/k3.safetensors"
    assert files["k4"] == "latents/k4/k4.safetensors"


def test_an_entry_that_is_written_again_has_one_file(tmp_path: Path) -> None:
    """The file of an earlier version goes; one that a kill has left is pruned."""
    store = filled(tmp_path)
    old_path = as_an_earlier_version(store, "latents", "k3")
    old_bytes = old_path.read_bytes()
    store.put("latents", "k3", value(3), {})
    assert not old_path.exists()
    assert holds(LatentCache(tmp_path), [3])

    old_path.write_bytes(old_bytes)
    store = LatentCache(tmp_path)
    assert store.names().count(("latents", "k3")) == 1
    assert store.unknown_files() == {"latents/k3.safetensors"}
    prune(store, {entry.name for entry in store.entries()}, yes=True)
    assert not old_path.exists()
    assert holds(LatentCache(tmp_path), range(8))


def test_an_entry_is_dropped_wherever_its_files_are(tmp_path: Path) -> None:
    store = filled(tmp_path)
    old_path = as_an_earlier_version(store, "latents", "k3")
    path = store.path("latents", "k4")
    store.drop([("latents", "k3"), ("latents", "k4")])
    assert not old_path.exists()
    assert not path.exists()
    assert lost(LatentCache(tmp_path)) == [3, 4]


def test_no_folder_has_many_of_a_large_cache(tmp_path: Path) -> None:
    """Keys are hashes: 20,000 entries are spread over the subfolders."""
    counts = Counter(
        Path(file_of("latents", digest({"entry": i}))).parent for i in range(20_000)
    )
    assert len(counts) > 4000, "nearly all of the 4,096 subfolders"
    # Of 10 million entries a folder would have 500 times as many.
    assert max(counts.values()) * 500 < 10_000


@pytest.mark.parametrize(
    "depth", ["latents", "latents/k3", "latents/k3/k3.safetensors"]
)
def test_a_link_at_any_depth_is_refused(tmp_path: Path, depth: str) -> None:
    folder = tmp_path / "cache"
    filled(folder)
    elsewhere = tmp_path / "elsewhere"
    (folder / depth).rename(elsewhere)
    (folder / depth).symlink_to(elsewhere)
    with pytest.raises(VideotuneError, match="link"):
        LatentCache(folder)


def test_an_unusable_entry_is_noted_once(tmp_path: Path) -> None:
    """Also if a second try of an encoding looks for what is missing."""
    filled(tmp_path, 2)
    store = LatentCache(tmp_path)
    items = {("latents", "k0"): "a window"}
    for _ in range(2):
        store.mark_unusable(items, lambda entry, item: False)
    assert len(store.notes) == 1
    assert not store.has("latents", "k0")
