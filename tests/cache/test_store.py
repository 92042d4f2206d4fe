"""The store: what is in it is what its key says, whole, made once, and there after any kill."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kills import kill_points, killed_at

from videotune.cache import store as store_module
from videotune.cache.keys import latent_key, text_key
from videotune.cache.store import Store
from videotune.data.frame_sampling import sample_window
from videotune.errors import VideotuneError
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


def filled(folder: Path, count: int, packed: int = 0) -> Store:
    """A store of ``count`` latents called k0, k1, …, the first ``packed`` in shards; and one text."""
    store = Store(folder)
    with store.filling():
        for i in range(count):
            store.put("latents", f"k{i}", value(i), {"window": f"w{i}"})
            if i + 1 == packed:
                store.pack("latents")
        store.put("text", "t", {"text": torch.ones(2, 3, dtype=torch.bfloat16)}, {"caption": "schön"})
    return store


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.safetensors"))


def is_sound(folder: Path, count: int) -> None:
    """Every entry is there and equal, now and after tidying and packing; then no file is left that nobody needs."""
    store = Store(folder)
    for i in range(count):
        assert store.has("latents", f"k{i}"), i
        assert equal(store.get("latents", f"k{i}"), i), i
    with store.filling():
        store.pack("latents")
    last = Store(folder)
    assert all(equal(last.get("latents", f"k{i}"), i) for i in range(count))
    assert last.has("text", "t")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.name != "manifest.jsonl"}
    assert files == {entry.file for entry in last.entries()}
    assert not last.contents().untidy


# ---- names


@pytest.mark.parametrize(
    "other",
    [
        replace(WINDOW, clip_id="d" * 32),
        replace(WINDOW, start=0.5625),
        replace(WINDOW, end=1.6),
        replace(WINDOW, shape=ClipShape(13, 64, 64, 16.0)),
        replace(WINDOW, shape=ClipShape(17, 48, 64, 16.0)),
        replace(WINDOW, shape=ClipShape(17, 64, 48, 16.0)),
        replace(WINDOW, resize="pad"),
        replace(WINDOW, resize="stretch"),
    ],
)
def test_whatever_decides_the_latents_is_in_their_name(other: Window) -> None:
    key = latent_key(sample_window(WINDOW, 0, 1), "vae")
    assert latent_key(sample_window(replace(WINDOW), 0, 2), "vae") == key, "nothing of it is drawn"
    assert latent_key(sample_window(other, 0, 1), "vae") != key
    assert latent_key(sample_window(WINDOW, 0, 1), "another vae") != key


def test_each_draw_of_a_window_has_its_own_name_and_no_draw_the_plain_one() -> None:
    for varying in (replace(WINDOW, resize="random"), replace(WINDOW, swaps=True), replace(WINDOW, sampling="frames")):
        keys = {latent_key(sample_window(varying, variant, 7), "vae") for variant in range(4)}
        assert len(keys) == 4, varying
        plain = latent_key(sample_window(varying, PLAIN, 7), "vae")
        assert plain not in keys
        assert plain == latent_key(sample_window(WINDOW, 0, 0), "vae"), "the same pixels have the same name"
    assert len({latent_key(sample_window(WINDOW, variant, 7), "vae") for variant in (PLAIN, 0, 1, 5)}) == 1


def test_where_nothing_is_cropped_the_place_does_not_matter() -> None:
    padded = replace(WINDOW, resize="pad")
    times = sample_window(padded, 0, 0).times
    assert latent_key(Take(padded, 0, times, (0.1, 0.2)), "v") == latent_key(Take(padded, 0, times), "v")
    assert latent_key(Take(WINDOW, 0, times, (0.1, 0.2)), "v") != latent_key(Take(WINDOW, 0, times), "v")


def test_whatever_decides_the_text_states_is_in_their_name() -> None:
    keys = {text_key("a", "e", 512), text_key("b", "e", 512), text_key("a", "f", 512), text_key("a", "e", 256)}
    assert len(keys) == 4


# ---- entries


@pytest.mark.parametrize("packed", [0, 2, 3])
def test_entries_come_back_bit_for_bit_alone_and_from_shards(tmp_path: Path, packed: int) -> None:
    writer = filled(tmp_path, 3, packed)
    for store in (writer, Store(tmp_path)):
        assert all(equal(store.get("latents", f"k{i}"), i) for i in range(3))
        assert store.get("text", "t")["text"].dtype == torch.bfloat16
        assert store.about("latents", "k1")["about"] == {"window": "w1"}
    assert sum(name.startswith("shard-") for name in files_of(tmp_path)) == (packed > 1)
    assert len(files_of(tmp_path)) == 4 - packed + (packed > 1)


def test_the_same_entries_make_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("videotune.cache.shards.versions", lambda: {"made": "then"})
    for name in ("a", "b"):
        filled(tmp_path / name, 4, 4)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    for name in files_of(tmp_path / "a"):
        one, two = (next((tmp_path / folder).rglob(name)).read_bytes() for folder in "ab")
        assert one == two


def test_views_of_one_memory_are_stored_as_what_they_show(tmp_path: Path) -> None:
    both = torch.arange(24.0).reshape(2, 3, 4)
    Store(tmp_path).put("latents", "k", {"mean": both[0], "logvar": both[1].T}, {})
    found = Store(tmp_path).get("latents", "k")
    assert torch.equal(found["mean"], both[0])
    assert torch.equal(found["logvar"], both[1].T)


def test_a_store_that_cannot_be_written_says_where_and_what_to_do(tmp_path: Path) -> None:
    store = Store(tmp_path / "file")
    (tmp_path / "file").write_text("")
    with pytest.raises(VideotuneError, match=r"cannot be written.*cache_dir"):
        store.put("latents", "k", value(0), {})
    with pytest.raises(VideotuneError, match=r"cannot be read.*cache_dir"):
        Store(tmp_path / "file")


def test_shards_hold_about_as_much_as_they_shall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_ENTRIES", 4)
    store = Store(tmp_path)
    with store.filling():
        for i in range(10):
            store.put("latents", f"k{i}", value(i), {})
            assert store.full("latents") == (i % 4 == 3)
            if store.full("latents"):
                store.pack("latents")
    assert [name[0] for name in files_of(tmp_path)] == ["k", "k", "s", "s"]
    assert sorted(len(json.loads(line)["keys"]) for line in lines(tmp_path) if "shard" in json.loads(line)) == [4, 4]


def lines(folder: Path) -> list[str]:
    return (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines()


def test_what_stays_in_memory_is_bounded_and_true(tmp_path: Path) -> None:
    writer = Store(tmp_path)
    for i in range(4):
        writer.put("latents", str(i), {"mean": torch.full((256,), float(i))}, {})
    store = Store(tmp_path, keep_bytes=2 * 1024)
    first = store.get("latents", "0")["mean"]
    store.get("latents", "1")
    for path in (tmp_path / "latents").iterdir():
        path.unlink()
    assert store.get("latents", "0")["mean"] is first
    writer.put("latents", "2", {"mean": torch.full((256,), 2.0)}, {})
    store.get("latents", "2")  # the third entry: the one asked for longest ago goes
    assert store.get("latents", "0")["mean"] is first
    with pytest.raises(VideotuneError, match="missing"):
        store.get("latents", "1")
    store.put("latents", "0", {"mean": torch.zeros(256)}, {})
    assert store.get("latents", "0")["mean"].sum() == 0, "an entry that is written anew is read anew"


def test_many_threads_read_many_shards_through_few_open_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_ENTRIES", 4)
    monkeypatch.setattr(store_module, "OPEN_SHARDS", 2)
    filled(tmp_path, 40, 40)
    store, order = Store(tmp_path, keep_bytes=500), [i for i in range(40) for _ in range(10)]
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: equal(store.get("latents", f"k{i}"), i), order))


def test_a_reader_goes_on_while_another_packs(tmp_path: Path) -> None:
    writer = filled(tmp_path, 6)
    reader, other = Store(tmp_path), Store(tmp_path)
    with writer.filling():
        writer.pack("latents")
    assert [name for name in files_of(tmp_path) if name.startswith("k")] == []
    assert all(reader.has("latents", f"k{i}") for i in range(6))
    assert all(equal(other.get("latents", f"k{i}"), i) for i in range(6))


# ---- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, empty, Path.unlink])
@pytest.mark.parametrize("packed", [0, 3])
def test_what_is_cut_short_empty_or_gone_does_not_count_and_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], packed: int
) -> None:
    filled(tmp_path, 3, packed)
    store = Store(tmp_path)
    damage(store.path("latents", "k1"))
    lost = range(3) if packed else [1]
    for again in (store, Store(tmp_path)):
        assert [i for i in range(3) if not again.has("latents", f"k{i}")] == list(lost)
        assert again.has("text", "t")
        with pytest.raises(VideotuneError, match="missing or damaged"):
            again.get("latents", "k1")
    with (writer := Store(tmp_path)).filling():
        assert any(f"{len(lost)} entries of the cache were gone or cut short" in note for note in writer.notes)
        for i in lost:
            writer.put("latents", f"k{i}", value(i), {})
    is_sound(tmp_path, 3)


def test_a_truncated_shard_whose_entries_were_made_anew_gives_way_to_them(tmp_path: Path) -> None:
    """Also when the process that made them was killed before it wrote their lines."""
    filled(tmp_path, 3, 3)
    cut(Store(tmp_path).path("latents", "k0"))
    before = (tmp_path / "manifest.jsonl").read_bytes()
    with (writer := Store(tmp_path)).filling():
        for i in range(3):
            writer.put("latents", f"k{i}", value(i), {})
    (tmp_path / "manifest.jsonl").write_bytes(before)
    is_sound(tmp_path, 3)


def test_a_manifest_torn_by_a_kill_loses_nothing(tmp_path: Path) -> None:
    filled(tmp_path, 4, 2)
    manifest = tmp_path / "manifest.jsonl"
    whole = manifest.read_bytes()
    for end in range(0, len(whole), 41):
        manifest.write_bytes(whole[:end])
        store = Store(tmp_path)
        assert all(equal(store.get("latents", f"k{i}"), i) for i in range(4)), end
        assert not any("cannot be read" in note for note in store.notes), "a torn end is no news"
    Store(tmp_path).put("latents", "k4", value(4), {})
    is_sound(tmp_path, 5)


def test_a_tear_inside_a_letter_and_odd_line_ends_lose_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key, caption in (("a", "one\u2028two\u0085three"), ("b", "schön")):
        store.put("text", key, {"text": torch.zeros(1)}, {"caption": caption})
    manifest = tmp_path / "manifest.jsonl"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: whole.rindex("ö".encode()) + 1])
    again = Store(tmp_path)
    assert again.about("text", "b")["about"]["caption"] == "schön"
    assert again.about("text", "a")["about"]["caption"] == "one\u2028two\u0085three"


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b"{}", b"[1]", b'{"entry": {"kind": "latents"}}', b'{"shard": 3}', b"nul"]
)
def test_a_damaged_line_in_the_middle_is_said_and_costs_nothing(tmp_path: Path, bad: bytes) -> None:
    filled(tmp_path, 4, 2)
    manifest = tmp_path / "manifest.jsonl"
    good = manifest.read_bytes().splitlines()
    for i in range(len(good) - 1):
        manifest.write_bytes(b"\n".join([*good[:i], bad, *good[i + 1 :]]) + b"\n")
        store = Store(tmp_path)
        assert any("1 lines of" in note for note in store.notes)
        assert all(equal(store.get("latents", f"k{i}"), i) for i in range(4))
        assert store.about("latents", "k0")["about"] == {"window": "w0"}
    is_sound(tmp_path, 4)


def test_a_lost_manifest_is_made_again_from_the_files(tmp_path: Path) -> None:
    before = filled(tmp_path, 5, 3)
    (tmp_path / "manifest.jsonl").unlink()
    store = Store(tmp_path)
    assert any("no manifest" in note for note in store.notes)
    assert {entry.name: entry for entry in store.entries()} == {entry.name: entry for entry in before.entries()}
    assert store.contents().origins == before.contents().origins
    is_sound(tmp_path, 5)


def test_files_of_others_are_said_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    (tmp_path / "latents" / "old.safetensors").write_bytes(b"not ours")
    store = Store(tmp_path)
    assert any("none of its entries" in note for note in store.notes)
    with store.filling():
        store.pack("latents")
    assert (tmp_path / "latents" / "old.safetensors").is_file()


# ---- kills


def pack_all(folder: Path) -> None:
    store = Store(folder)
    with store.filling():
        store.put("latents", "k5", value(5), {})
        store.pack("latents")


def test_killed_anywhere_in_putting_and_packing_nothing_is_lost(tmp_path: Path) -> None:
    """A real SIGKILL in each state of the folder that putting, packing and tidying go through."""
    filled(tmp_path / "before", 5, 2)
    points = kill_points(pack_all, shutil.copytree(tmp_path / "before", tmp_path / "dry"))
    assert len(points) > 12
    made = []
    for number, point in enumerate(points):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        assert killed_at(point, pack_all, folder)
        made.append(Store(folder).has("latents", "k5"))
        is_sound(folder, 5 + made[-1])
    assert made == sorted(made), "what is there stays"
    assert not made[0]
    assert made[-1]


def test_a_killed_process_leaves_no_lock_and_a_living_one_is_named(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from videotune.cache.lock import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(VideotuneError, match=f"process {holder.pid} on .* Wait until that is done"),
            Store(tmp_path).filling(),
        ):
            raise AssertionError
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    filled(tmp_path, 2)
    is_sound(tmp_path, 2)


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
