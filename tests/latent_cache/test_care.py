"""Verify, prune and list: damage is found, what is wanted stays, and a kill in between costs nothing."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.kills import kill_points, killed_at
from videotune.errors import VideotuneError
from videotune.latent_cache.maintenance import prune, verify
from videotune.latent_cache.store import Store


def value(i: int) -> dict[str, torch.Tensor]:
    return {"mean": torch.randn(8, 4, generator=torch.Generator().manual_seed(i))}


def filled(folder: Path, count: int = 8) -> Store:
    """Latents k0 … and a text."""
    store = Store(folder)
    with store.filling():
        for i in range(count):
            about = {"window": f"w{i}", "variant": i % 3 - 1, "clip": f"/clips/{i}.mp4", "encoder": "vae-print"}
            store.put("latents", f"k{i}", value(i), about)
        store.put("text", "t", {"text": torch.ones(2, 3, dtype=torch.bfloat16)}, {"caption": "a cat", "encoder": "e"})
    return store


def silent(*told: object) -> None:
    """Progress that nobody watches."""


def spoil(path: Path, what: bytes) -> None:
    """Change a byte of a tensor where it lies, and nothing else."""
    data = bytearray(path.read_bytes())
    at = data.rindex(what)
    data[at] ^= 1
    path.write_bytes(data)


def bytes_of(i: int) -> bytes:
    return value(i)["mean"].numpy().tobytes()


def test_a_changed_bit_is_found_and_only_its_entry_is_made_anew(tmp_path: Path) -> None:
    filled(tmp_path)
    store = Store(tmp_path)
    for i in (1, 7):
        spoil(store.path("latents", f"k{i}"), bytes_of(i))
    assert all(store.has("latents", f"k{i}") for i in range(8)), "its size says nothing"
    found = verify(store, silent)
    assert [(row.key, row.of) for row in found] == [("k1", "1.mp4 w1"), ("k7", "7.mp4 w7")]
    assert all("other bytes" in row.why for row in found)
    for again in (store, Store(tmp_path)):
        assert [i for i in range(8) if not again.has("latents", f"k{i}")] == [1, 7]
        assert all(torch.equal(again.get("latents", f"k{i}")["mean"], value(i)["mean"]) for i in (0, 2, 3, 4, 5, 6))
    assert verify(Store(tmp_path), silent) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "label"])
def test_damage_to_a_whole_file_is_found(tmp_path: Path, damage: str) -> None:
    filled(tmp_path)
    path = Store(tmp_path).path("latents", "k7")
    data = path.read_bytes()
    if damage == "header":
        path.write_bytes(b"\xff" * 16 + data[16:])
    elif damage == "label":
        path.write_bytes(data.replace(b"hash", b"hush", 1))
    else:
        path.write_bytes(data[:-1] if damage == "cut" else b"")
    assert [row.key for row in verify(Store(tmp_path), silent)] == ["k7"]
    store = Store(tmp_path)
    assert [i for i in range(8) if not store.has("latents", f"k{i}")] == [7]
    assert not path.exists()
    assert store.has("text", "t")


def test_pruning_only_says_until_told_and_then_keeps_what_is_wanted(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "latents" / "old.safetensors").write_bytes(b"12345")
    part = tmp_path / "latents" / ".part-1-x.safetensors"
    part.write_bytes(b"123")
    os.utime(part, (1, 1))
    wanted = {("latents", "k1"), ("latents", "k5"), ("text", "t")}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    said = prune(Store(tmp_path), wanted, yes=False)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    assert {entry.key for entry in said.entries} == {"k0", "k2", "k3", "k4", "k6", "k7"}
    assert (said.entry_bytes, said.file_bytes, said.kept) == (6 * 128, 8, 3)
    assert said.files == ("latents/.part-1-x.safetensors", "latents/old.safetensors")
    assert prune(Store(tmp_path), wanted, yes=True) == said
    store = Store(tmp_path)
    assert {entry.name for entry in store.entries()} == wanted
    assert all(torch.equal(store.get("latents", f"k{i}")["mean"], value(i)["mean"]) for i in (1, 5))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")}
    assert left == {entry.file for entry in store.entries()}
    assert verify(store, silent) == []
    assert prune(store, wanted, yes=True).entries == ()


def prune_most(folder: Path) -> None:
    prune(Store(folder), {("latents", "k1"), ("latents", "k5")}, yes=True)


def test_killed_anywhere_in_pruning_what_is_wanted_stays(tmp_path: Path) -> None:
    """A real SIGKILL in each state of the folder that pruning goes through; pruning again ends where it should."""
    filled(tmp_path / "before")
    points = kill_points(prune_most, shutil.copytree(tmp_path / "before", tmp_path / "dry"))
    assert len(points) > 4
    for number, point in enumerate(points):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        assert killed_at(point, prune_most, folder)
        store = Store(folder)
        for i in (1, 5):
            assert torch.equal(store.get("latents", f"k{i}")["mean"], value(i)["mean"])
        assert not [entry for entry in store.entries() if not store.has(*entry.name)], "nothing half there"
        assert verify(store, silent) == []
        prune_most(folder)
        assert {entry.key for entry in Store(folder).entries()} == {"k1", "k5"}


def verify_all(folder: Path) -> None:
    verify(Store(folder), silent)


def test_killed_anywhere_in_verifying_no_damaged_entry_comes_back_as_sound(tmp_path: Path) -> None:
    filled(tmp_path / "before")
    for i in (1, 7):
        spoil(Store(tmp_path / "before").path("latents", f"k{i}"), bytes_of(i))
    points = kill_points(verify_all, shutil.copytree(tmp_path / "before", tmp_path / "dry"))
    assert len(points) > 2
    for number, point in enumerate(points):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        assert killed_at(point, verify_all, folder)
        verify_all(folder)
        store = Store(folder)
        assert [i for i in range(8) if not store.has("latents", f"k{i}")] == [1, 7]
        assert all(torch.equal(store.get("latents", f"k{i}")["mean"], value(i)["mean"]) for i in (0, 2, 3, 4, 5, 6))


def test_nobody_verifies_or_prunes_what_another_fills(tmp_path: Path) -> None:
    store = filled(tmp_path)
    with store.filling():
        with pytest.raises(VideotuneError, match=f"process {os.getpid()} on"):
            verify(Store(tmp_path), silent)
        with pytest.raises(VideotuneError, match=f"process {os.getpid()} on"):
            prune(Store(tmp_path), set(), yes=True)
        assert len(prune(Store(tmp_path), set(), yes=False).entries) == 9, "looking is free"
