"""A cache on an object store: written there too, fetched when read, copies bounded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.latent_cache.test_store import silent
from tests.support.object_stores import Store, bytes_in
from videotune.data import object_store
from videotune.errors import VideotuneError
from videotune.latent_cache.entry import file_of
from videotune.latent_cache.maintenance import listing, prune, verify
from videotune.latent_cache.remote_entries import LOCAL_ONLY, entries_of
from videotune.latent_cache.store import LatentCache

Open = Callable[..., LatentCache]


@pytest.fixture
def bucket(objects: Store) -> str:
    return objects.bucket()


@pytest.fixture
def opened(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the cache s3://BUCKET/cache on a machine by its name."""

    def open_cache(machine: str, bound: int = 10**9) -> LatentCache:
        monkeypatch.setenv("VIDEOTUNE_OBJECT_CACHE_GB", repr(bound / 1e9))
        folder = tmp_path / machine
        return LatentCache(folder, remote=entries_of(f"s3://{bucket}/cache", folder))

    return open_cache


def put(store: LatentCache, key: str, value: float = 1.0, size: int = 1000) -> None:
    tensors = {"x": torch.full((size,), value)}
    store.put("latents", key, tensors, {"clip": f"{key}.mp4", "window": "0"})


def value_of(store: LatentCache, key: str) -> float:
    return float(store.get("latents", key)["x"][0])


def copies(store: LatentCache) -> int:
    return sum(bytes_in(folder) for folder in (store.folder / "latents").glob("*"))


def test_what_one_machine_writes_another_reads(
    opened: Open, objects: Store, bucket: str
) -> None:
    first = opened("a")
    put(first, "abc1", 1)
    put(first, "abd2", 2)
    first.finish_uploads()
    assert objects.keys(bucket) == {
        f"cache/{file_of('latents', key)}" for key in ("abc1", "abd2")
    }

    second = opened("b")
    assert second.has("latents", "abc1")
    assert not second.has("latents", "abe3")
    assert second.names() == []
    assert [value_of(second, key) for key in ("abc1", "abd2")] == [1, 2]
    objects.forget()
    assert value_of(second, "abc1") == 1
    assert objects.requests == []


def test_copies_beyond_the_bound_are_removed_those_read_longest_ago_first(
    opened: Open, objects: Store
) -> None:
    first = opened("a")
    keys = [f"{number:03}x" for number in range(10)]
    for number, key in enumerate(keys):
        put(first, key, number)
    first.finish_uploads()
    entry_bytes = first.path("latents", keys[0]).stat().st_size

    bound = int(4.5 * entry_bytes)
    second = opened("b", bound)
    for number, key in enumerate(keys):
        assert value_of(second, key) == number
        assert value_of(second, keys[0]) == 0
        assert copies(second) <= bound
    assert second.path("latents", keys[0]).is_file()
    assert not second.path("latents", keys[1]).exists()
    assert value_of(second, keys[1]) == 1


def test_what_is_not_uploaded_yet_stays(
    opened: Open, objects: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    store = opened("a", bound=6000)
    objects.refuse = lambda method, path: "500 Broken" if method == "PUT" else None
    put(store, "abc1")
    with pytest.raises(VideotuneError, match="s3://"):
        store.finish_uploads()

    # A later start uploads what the run reads.
    objects.refuse = None
    again = opened("a", bound=6000)
    assert again.names() == [("latents", "abc1")]
    again.finish_uploads([("latents", "abc1"), ("latents", "abc2")])
    assert opened("b").remote_sizes().keys() == {("latents", "abc1")}


def test_entries_are_dropped_and_pruned_on_both(
    opened: Open, objects: Store, bucket: str
) -> None:
    first = opened("a")
    for key in ("abc1", "abc2", "abc3"):
        put(first, key)
    first.finish_uploads()
    second = opened("b")
    value_of(second, "abc1")
    dry = prune(second, {("latents", "abc2")}, yes=False)
    assert {entry.key for entry in dry.entries} == {"abc1", "abc3"}
    assert dry.entry_bytes > 8000
    assert len(objects.keys(bucket)) == 3
    pruned = prune(second, {("latents", "abc2")}, yes=True)
    assert pruned.kept == 1
    assert objects.keys(bucket) == {f"cache/{file_of('latents', 'abc2')}"}
    assert not second.has("latents", "abc1")


def test_an_entry_that_another_machine_wrote_again_is_read(
    opened: Open, objects: Store
) -> None:
    first = opened("a")
    put(first, "abc1", 1)
    first.finish_uploads()
    reader = opened("b")
    put(first, "abc1", 7)
    first.finish_uploads()
    assert value_of(reader, "abc1") == 7


def test_a_damaged_or_foreign_entry_is_an_error_that_names_the_object(
    opened: Open, objects: Store, bucket: str
) -> None:
    first = opened("a")
    put(first, "abc1")
    put(first, "abc2")
    first.finish_uploads()
    client = objects.client
    key = f"cache/{file_of('latents', 'abc1')}"
    content = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    content[-1] ^= 1
    objects.put(bucket, {key: bytes(content), "cache/latents/../../x": b"x"})

    second = opened("b")
    with pytest.raises(VideotuneError, match=rf"Delete s3://{bucket}/{key}"):
        second.get("latents", "abc1")
    second.mark_unusable({("latents", "abc2"): "item"}, lambda entry, item: False)
    with pytest.raises(VideotuneError, match="not of this model"):
        second.get("latents", "abc2")


def test_an_ordinary_cache_has_nothing_to_do_with_a_store(tmp_path: Path) -> None:
    assert entries_of(None, tmp_path) is LOCAL_ONLY
    assert entries_of(str(tmp_path), tmp_path) is LOCAL_ONLY
    store = LatentCache(tmp_path / "cache")
    put(store, "abc1")
    store.finish_uploads([("latents", "abc1")])
    assert store.remote_sizes() == {}


def test_a_listing_fetches_headers_and_no_entry(opened: Open, objects: Store) -> None:
    first = opened("a")
    put(first, "abc1")
    put(first, "abd2", size=100_000)
    first.finish_uploads()
    rows_there = listing(first, silent)

    second = opened("b")
    objects.forget()
    rows = listing(second, silent)
    assert len(objects.fetched(".safetensors")) == 2
    assert copies(second) == 0
    assert [row["of"] for row in rows] == ["abc1.mp4 0", "abd2.mp4 0"]
    assert rows[1]["tensors"] == {"x": "float32 100000"}
    for row, row_there in zip(rows, rows_there, strict=True):
        assert row["file"].startswith("s3://")
        assert row["file"].endswith(row_there["file"])
        assert row | {"file": ""} == row_there | {"file": ""}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (40_000).to_bytes(8, "little") + b"[" * 40_000,
        (20).to_bytes(8, "little") + b'{"__metadata__": 100}',
    ],
)
def test_what_is_no_entry_is_named_and_removed_by_verify(
    opened: Open, objects: Store, bucket: str, content: bytes
) -> None:
    first = opened("a")
    put(first, "abc1")
    first.finish_uploads()
    key = f"cache/{file_of('latents', 'abd2')}"
    objects.put(bucket, {key: content})

    second = opened("b")
    assert [row["key"] for row in listing(second, silent)] == ["abc1"]
    assert [key in note for note in second.notes] == [True]
    damaged = verify(second, silent)
    assert [entry.file for entry in damaged] == [f"s3://{bucket}/{key}"]
    assert objects.keys(bucket) == {f"cache/{file_of('latents', 'abc1')}"}
    assert verify(opened("b"), silent) == []


def test_the_header_of_an_entry_may_be_long(opened: Open) -> None:
    first = opened("a")
    caption = "a red ball " * 5000
    first.put("text", "abc1", {"x": torch.ones(2)}, {"caption": caption})
    first.finish_uploads()
    assert [row["of"] for row in listing(opened("b"), silent)] == [caption]


def test_a_damaged_copy_is_dropped_and_the_object_stays(
    opened: Open, objects: Store, bucket: str
) -> None:
    first = opened("a")
    put(first, "abc1", 3)
    first.finish_uploads()
    copy = first.path("latents", "abc1")
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    again = opened("a")
    assert [entry.key for entry in verify(again, silent)] == ["abc1"]
    assert objects.keys(bucket) == {f"cache/{file_of('latents', 'abc1')}"}
    assert value_of(opened("a"), "abc1") == 3


def test_a_damaged_object_is_dropped_with_its_copy(
    opened: Open, objects: Store, bucket: str
) -> None:
    first = opened("a")
    put(first, "abc1")
    first.finish_uploads()
    key = f"cache/{file_of('latents', 'abc1')}"
    content = first.path("latents", "abc1").read_bytes()
    objects.put(bucket, {key: content[:-1] + bytes([content[-1] ^ 1])})

    again = opened("a")
    assert [entry.file for entry in verify(again, silent)] == [f"s3://{bucket}/{key}"]
    assert not opened("a").has("latents", "abc1")
