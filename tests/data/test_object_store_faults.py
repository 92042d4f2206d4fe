"""What goes wrong with object stores: one sentence each, and no wrong file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.clips import noise, write_clip
from tests.support.datasets import scanned
from tests.support.dripping_server import dripping
from tests.support.object_stores import CREDENTIALS, LargestSize, Store, bytes_in
from tests.support.waiting import wait_until
from videotune.data import object_store
from videotune.data.fetch_ahead import local_copies
from videotune.data.locations import open_location
from videotune.data.object_files import (
    local_copy,
    mirrors_folder,
    objects_folder,
    pin_object,
    read_pointer,
    set_bound,
)
from videotune.data.object_store import parse_url
from videotune.errors import VideotuneError

FETCH = """
import sys
from videotune.data.object_files import local_copy
with local_copy(sys.argv[1]) as local:
    print(len(local.read_bytes()), flush=True)
    if len(sys.argv) > 2:
        sys.stdin.read()
"""


@pytest.fixture
def mirrored(objects: Store, tmp_path: Path) -> list[Path]:
    """Twelve objects of 50 kB with the suffix of clips, as pointers."""
    bucket = objects.bucket()
    contents = {f"clips/{i:02}.mp4": bytes([i]) * 50_000 for i in range(12)}
    objects.put(bucket, contents)
    location = open_location(f"s3://{bucket}/clips", tmp_path / "cache")
    return [file.path for file in location.files]


def blobs() -> list[Path]:
    folder = objects_folder() / "blobs"
    return [path for path in folder.glob("*") if not path.name.startswith(".")]


def start(*arguments: object) -> subprocess.Popen[str]:
    words = [str(argument) for argument in arguments]
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_killed_while_it_fetches_leaves_no_wrong_blob(
    objects: Store, mirrored: list[Path]
) -> None:
    objects.latency = 30.0
    process = start(mirrored[0])
    folder = objects_folder() / "blobs"
    wait_until(lambda: any(folder.glob(".part-*")), 60)
    process.kill()
    process.wait()
    objects.latency = 0.0

    assert blobs() == []
    set_bound(120_000 / 1e9)
    for path in mirrored[:3]:
        with local_copy(path) as local:
            assert local.stat().st_size == 50_000
    # Its part took room until that was needed.
    assert not any(folder.glob(".part-*"))
    assert bytes_in(folder) <= 120_000


def test_two_processes_fetch_an_object_once(
    objects: Store, mirrored: list[Path]
) -> None:
    objects.forget()
    objects.latency = 1.0
    processes = [start(mirrored[0]) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["50000\n"] * 3
    assert len(objects.fetched()) == 1


def test_what_another_process_reads_stays_until_that_process_is_dead(
    objects: Store, mirrored: list[Path]
) -> None:
    reader = start(mirrored[0], "wait")
    assert reader.stdout is not None
    assert reader.stdout.readline() == "50000\n"
    (pinned,) = blobs()
    set_bound(120_000 / 1e9)
    for path in mirrored[1:6]:
        with local_copy(path):
            assert pinned.exists()

    os.kill(reader.pid, signal.SIGKILL)
    reader.wait()
    for path in mirrored[6:9]:
        with local_copy(path):
            assert bytes_in(objects_folder() / "blobs") <= 120_000
    assert not pinned.exists()


def test_files_read_ahead_never_take_more_than_the_bound(
    objects: Store, mirrored: list[Path]
) -> None:
    objects.latency = 0.02
    set_bound(210_000 / 1e9)
    folder = objects_folder() / "blobs"
    with LargestSize(folder) as largest:
        copies = local_copies(mirrored)
        contents = [next(copies).read_bytes()[0]]
        # While the first one is read, half of the bound is fetched ahead.
        wait_until(lambda: bytes_in(folder) == 150_000, 60)
        contents += [local.read_bytes()[0] for local in copies]
    assert contents == list(range(12))
    assert largest.most <= 210_000
    assert list((objects_folder() / "pins").iterdir()) == []


def test_an_object_of_several_tasks_holds_up_no_other(
    objects: Store, mirrored: list[Path]
) -> None:
    objects.forget()
    objects.latency = 1.0
    paths = [path for path in mirrored[:4] for _ in range(10)]
    contents = [local.read_bytes()[0] for local in local_copies(paths)]
    assert contents == [number for number in range(4) for _ in range(10)]
    assert len(objects.fetched()) == 4
    assert objects.most_fetches_at_once == 4
    assert list((objects_folder() / "pins").iterdir()) == []


def test_a_clip_too_large_for_the_room_that_is_left_waits_for_it(
    objects: Store, mirrored: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(60_000 / 1e9)
    monkeypatch.setattr("videotune.data.object_blobs.WAIT_SECONDS", 0.3)
    first = read_pointer(mirrored[0])
    assert first is not None
    pin = pin_object(first)
    with (
        pytest.raises(VideotuneError, match="object_cache_gb: the clips that are read"),
        local_copy(mirrored[1]),
    ):
        pass
    pin.release()
    with local_copy(mirrored[1]) as local:
        assert local.read_bytes()[0] == 1


@pytest.mark.parametrize("where", ["headers", "body", "silent"])
def test_a_server_that_hangs_or_drips_is_an_error_in_bounded_time(
    where: str, objects: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "CALL_SECONDS", 2.0)
    with dripping(where) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        begin = time.monotonic()
        with pytest.raises(VideotuneError, match="does not answer, or too slowly"):
            open_location("s3://bucket/clips", tmp_path / "cache")
        assert time.monotonic() - begin < 20


def test_a_fetch_that_hangs_is_an_error_and_one_that_breaks_is_tried_again(
    objects: Store, mirrored: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.01)
    failures = iter(["503 Slow Down"] * 4)
    objects.refuse = lambda method, path: next(failures, None)
    with local_copy(mirrored[0]) as local:
        assert local.stat().st_size == 50_000

    monkeypatch.setattr(object_store, "CALL_SECONDS", 1.0)
    objects.refuse = None
    objects.latency = 6.0
    with (
        pytest.raises(VideotuneError, match="does not answer, or too slowly"),
        local_copy(mirrored[1]),
    ):
        pass
    assert len(blobs()) == 1


def refused(address: str, tmp_path: Path) -> str:
    with pytest.raises(VideotuneError) as caught:
        open_location(address, tmp_path / "cache")
    text = str(caught.value)
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in text
    return text


def test_each_mistake_is_one_sentence(
    objects: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = objects.bucket()
    objects.put(bucket, {"alone.mp4": b"x"})
    assert "no bucket never-there" in refused("s3://never-there/clips", tmp_path)
    assert "no objects below" in refused(f"s3://{bucket}/empty", tmp_path)
    assert "a single object" in refused(f"s3://{bucket}/alone.mp4", tmp_path)
    assert "not the address" in refused("s3://", tmp_path)
    assert "not the address" in refused(f"s3://{bucket}/a/../b", tmp_path)

    objects.refuse = lambda method, path: "403 Forbidden"
    assert "refuses access" in refused(f"s3://{bucket}/clips", tmp_path)
    objects.refuse = None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "does not answer" in refused(f"s3://{bucket}/clips", tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no credentials" in refused(f"s3://{bucket}/clips", tmp_path)


def test_without_s3fs_the_extra_is_named(
    objects: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setenv("AWS_PROFILE_OF_THIS_TEST", "1")
    assert 'pip install "videotune[s3]"' in refused("s3://bucket/clips", tmp_path)


def test_too_many_objects_and_too_much_text(
    objects: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = objects.bucket()
    objects.put(bucket, {f"clips/{i}.txt": b"12345" for i in range(5)})
    address = f"s3://{bucket}/clips"
    monkeypatch.setattr("videotune.data.object_mirror.MAX_OBJECTS", 4)
    assert "more than 4 objects" in refused(address, tmp_path)
    monkeypatch.undo()
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", objects.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("videotune.data.object_mirror.MAX_TEXT_BYTES", 4)
    assert "a text of a dataset may have" in refused(address, tmp_path)
    monkeypatch.setattr("videotune.data.object_mirror.MAX_TEXT_BYTES", 10)
    monkeypatch.setattr("videotune.data.object_mirror.MAX_ALL_TEXT_BYTES", 20)
    assert "of captions and other texts" in refused(address, tmp_path)


def test_a_mirror_cut_short_by_a_kill_is_completed(
    objects: Store, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    clip = write_clip(tmp_path / "a.mp4", noise(9, 32, 32), 16).read_bytes()
    objects.put(bucket, {"clips/a.mp4": clip, "clips/a.txt": b"a caption"})
    address = f"s3://{bucket}/clips"
    index = tmp_path / "index.sqlite"
    scanned({"path": address}, index=index)

    (listing,) = mirrors_folder().glob("*/listing.json")
    (caption,) = mirrors_folder().rglob("a.txt")
    listing.write_text(listing.read_text()[:20])
    caption.unlink()
    caption.with_name(".part-1-abc-b.mp4").write_bytes(b"half")
    library = scanned({"path": address}, index=index)
    assert library.clips[0].captions == ("a caption",)
    assert {path.name for path in caption.parent.iterdir()} == {"a.mp4", "a.txt"}


def test_addresses() -> None:
    url = parse_url("s3://bucket/some/folder/")
    assert (url.bucket, url.key, url.prefix) == (
        "bucket",
        "some/folder",
        "some/folder/",
    )
    assert str(parse_url("s3://bucket")) == "s3://bucket"
