"""Datasets on an object store: a mirror in the user's cache, bytes on demand."""

import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.clips import noise, write_clip, write_dataset, write_image
from tests.support.datasets import RULES, config_of, scanned
from tests.support.object_stores import LargestSize, Store, bytes_in
from videotune.data.dataset import scan
from videotune.data.library import Library
from videotune.data.locations import open_location
from videotune.data.object_files import (
    local_copy,
    mirrors_folder,
    objects_folder,
    read_pointer,
    set_bound,
)
from videotune.errors import VideotuneError


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips of 9 frames with captions, one with a mask, and an image."""
    folder = tmp_path_factory.mktemp("source") / "clips"
    names = [f"{letter}.mp4" for letter in "abcdef"]
    write_dataset(
        folder,
        {name: noise(9, 64, 64, seed) for seed, name in enumerate(names)},
        {},
        fps=16,
    )
    write_image(folder / "videos" / "still.png", noise(1, 64, 64, 9)[0])
    (folder / "captions" / "still.txt").write_text("a still")
    write_image(folder / "masks" / "a.png", np.full((64, 64, 3), 255, np.uint8))
    return folder


def facts(library: Library) -> dict[str, object]:
    """What a run makes of a library, without where it lies."""
    return {
        "clips": [(clip.id, clip.captions, clip.held_out) for clip in library.clips],
        "windows": list(library.windows),
        "skipped": [reason for _, reason, _ in library.skipped],
    }


def open_here(address: str, tmp_path: Path, **options: object) -> object:
    return open_location(address, tmp_path / "cache", **options)  # type: ignore[arg-type]


def test_a_dataset_on_a_store_is_that_of_the_folder(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    address = objects.put_folder(clips, objects.bucket(), "some/clips")
    here = scanned(clips, index=tmp_path / "a.sqlite", video={"frames": 9})
    there = scanned({"path": address}, index=tmp_path / "b.sqlite", video={"frames": 9})

    assert facts(there) == facts(here)
    assert len(there.clips) == 7
    roots = {Path(clip.path).is_relative_to(mirrors_folder()) for clip in there.clips}
    assert roots == {True}
    assert not (clips / "objects").exists()


def test_a_second_scan_fetches_nothing(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    address = objects.put_folder(clips, objects.bucket(), "clips")
    index = tmp_path / "index.sqlite"
    scanned({"path": address}, index=index)
    assert len(objects.fetched(".mp4")) == 6
    objects.forget()
    scanned({"path": address}, index=index)
    assert objects.fetched() == []


def test_what_changes_on_the_store_is_seen_at_the_next_start(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    address = objects.put_folder(clips, bucket, "clips")
    index = tmp_path / "index.sqlite"
    before = scanned({"path": address}, index=index)

    new_clip = write_clip(tmp_path / "new.mp4", noise(9, 64, 64, 50), 16).read_bytes()
    objects.put(
        bucket,
        {
            "clips/videos/a.mp4": new_clip,
            "clips/captions/b.txt": b"another caption",
            "clips/videos/g.mp4": (clips / "videos" / "a.mp4").read_bytes(),
        },
    )
    objects.client.delete_object(Bucket=bucket, Key="clips/videos/c.mp4")
    objects.client.delete_object(Bucket=bucket, Key="clips/captions/c.txt")
    after = scanned({"path": address}, index=index)

    ids = {Path(clip.path).name: clip.id for clip in before.clips}
    new_ids = {Path(clip.path).name: clip.id for clip in after.clips}
    captions = {Path(clip.path).name: clip.captions for clip in after.clips}
    assert "c.mp4" not in new_ids
    assert new_ids["a.mp4"] not in ids.values()
    assert new_ids["g.mp4"] == ids["a.mp4"]
    assert captions["b.mp4"] == ("another caption",)
    names = {path.name for path in mirrors_folder().rglob("*") if path.is_file()}
    assert not names & {"c.mp4", "c.txt"}


def test_two_versions_of_one_second_and_size_are_told_apart(
    objects: Store, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    pictures = [
        write_image(tmp_path / f"{i}.bmp", noise(1, 64, 64, i)[0]) for i in (1, 2)
    ]
    objects.put(bucket, {"clips/a.bmp": pictures[0].read_bytes()})
    address = f"s3://{bucket}/clips"
    first = scanned({"path": address}, index=tmp_path / "index.sqlite")
    objects.put(bucket, {"clips/a.bmp": pictures[1].read_bytes()})
    second = scanned({"path": address}, index=tmp_path / "index.sqlite")
    assert first.clips[0].id != second.clips[0].id


def test_the_bound_holds_while_a_larger_dataset_is_read(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    address = objects.put_folder(clips, objects.bucket(), "clips")
    sizes = [path.stat().st_size for path in (clips / "videos").iterdir()]
    bound = max(sizes) * 3
    assert sum(sizes) > 1.5 * bound
    with LargestSize(objects_folder() / "blobs") as largest:
        set_bound(bound / 1e9)
        library = scanned({"path": address}, index=tmp_path / "index.sqlite")
    assert len(library.clips) == 7
    assert 0 < largest.most <= bound
    assert list((objects_folder() / "pins").iterdir()) == []


def test_a_lower_bound_removes_what_is_beyond_it_and_one_clip_must_fit(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    address = objects.put_folder(clips, objects.bucket(), "clips")
    index = tmp_path / "index.sqlite"
    scanned({"path": address}, index=index)
    blobs = objects_folder() / "blobs"
    largest_clip = max(path.stat().st_size for path in clips.rglob("*.mp4"))
    assert bytes_in(blobs) > 2 * largest_clip

    set_bound(2 * largest_clip / 1e9)
    scanned({"path": address}, index=index)
    assert bytes_in(blobs) <= 2 * largest_clip
    set_bound(largest_clip / 2e9)
    with pytest.raises(VideotuneError, match=r"object_cache_gb: s3://.*\.mp4"):
        scanned({"path": address}, index=index)


def test_an_object_that_changed_since_the_listing_is_an_error(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    address = objects.put_folder(clips, bucket, "clips")
    location = open_here(address, tmp_path)
    path = location.files[0].path  # type: ignore[attr-defined]
    objects.put(bucket, {"clips/videos/a.mp4": b"another"})
    with pytest.raises(VideotuneError, match="has changed"), local_copy(path):
        pass
    objects.client.delete_object(Bucket=bucket, Key="clips/videos/b.mp4")
    with (
        pytest.raises(VideotuneError, match="has changed, or is gone"),
        local_copy(path.with_name("b.mp4")),
    ):
        pass
    assert bytes_in(objects_folder() / "blobs") == 0


@pytest.mark.parametrize("name", ["clips.zip", "shards/0.tar", "rows/list.csv"])
def test_archives_shards_and_rows(
    name: str, objects: Store, clips: Path, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    if name.endswith(".zip"):
        archive = shutil.make_archive(str(tmp_path / "clips"), "zip", clips)
        objects.put(bucket, {f"data/{name}": Path(archive).read_bytes()})
        address = f"s3://{bucket}/data/{name}"
    elif name.endswith(".tar"):
        with tarfile.open(tmp_path / "0.tar", "w") as tar:
            for path in sorted((clips / "videos").iterdir()):
                tar.add(path, path.name)
                tar.add(clips / "captions" / f"{path.stem}.txt", f"{path.stem}.txt")
        objects.put(bucket, {name: (tmp_path / "0.tar").read_bytes()})
        address = f"s3://{bucket}/shards"
    else:
        rows = "".join(f"videos/{c}.mp4,clip {c}\n" for c in "abcdef")
        objects.put_folder(clips, bucket, "rows")
        objects.put(bucket, {name: f"path,caption\n{rows}".encode()})
        address = f"s3://{bucket}/{name}"

    library = scanned({"path": address}, index=tmp_path / "cache" / "index.sqlite")
    ids = {clip.id for clip in scanned(clips).clips if not clip.still}
    assert {clip.id for clip in library.clips if not clip.still} == ids
    assert all(clip.captions for clip in library.clips)


def test_an_archive_in_a_folder_is_the_dataset_and_captions_beside_a_videos_folder(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    archive = shutil.make_archive(str(tmp_path / "clips"), "zip", clips)
    objects.put(bucket, {"packed/clips.zip": Path(archive).read_bytes()})
    library = scanned(
        {"path": f"s3://{bucket}/packed"}, index=tmp_path / "cache" / "index.sqlite"
    )
    assert len(library.clips) == 7

    address = objects.put_folder(clips, bucket, "plain")
    library = scanned({"path": f"{address}/videos"}, index=tmp_path / "i.sqlite")
    assert {clip.captions for clip in library.clips} >= {("a clip called a",)}


HOSTILE = (
    "../escaped.mp4",
    "/absolute.mp4",
    "a//b.mp4",
    "back\\slash.mp4",
    "bell\x07.mp4",
    "A.mp4",
    "folder",
    f"{'x' * 250}.mp4",
    "folder/",
    ".hidden.mp4",
)


def test_hostile_names_are_left_out_and_nothing_is_written_elsewhere(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    content = (clips / "videos" / "a.mp4").read_bytes()
    names = ("a.mp4", "folder/b.mp4", *HOSTILE)
    objects.put(bucket, {f"clips/{name}": content for name in names})
    location = open_here(f"s3://{bucket}/clips", tmp_path)

    files = {path for path in (tmp_path / "home").rglob("*") if path.is_file()}
    media = {path.name for path in files if path.suffix == ".mp4"}
    assert media == {"A.mp4", "b.mp4"}
    assert len(location.files) == 2  # type: ignore[attr-defined]
    assert "8 objects are left out" in location.notes[0]  # type: ignore[attr-defined]
    outside = [path for path in files if not path.is_relative_to(mirrors_folder())]
    assert all(path.parent.parent == objects_folder() for path in outside)


def test_a_pointer_in_a_strangers_folder_fetches_nothing(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    address = objects.put_folder(clips, objects.bucket(), "clips")
    location = open_here(address, tmp_path)
    pointer = location.files[0].path  # type: ignore[attr-defined]
    assert read_pointer(pointer) is not None

    stranger = tmp_path / "stranger"
    stranger.mkdir()
    shutil.copy(pointer, stranger / "copy.mp4")
    os.symlink(pointer, stranger / "link.mp4")
    objects.forget()
    library = scan(config_of(stranger), RULES)
    assert {reason for _, reason, _ in library.skipped} == {"not_a_video"}
    assert objects.fetched() == []


def test_a_text_that_looks_like_a_pointer_leads_nowhere_else(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    bucket = objects.bucket()
    objects.put_folder(clips, bucket, "clips")
    forged = f'videotune object 1\nurl s3://{bucket}/secret\nsize 4\netag "x"\n'
    objects.put(bucket, {"secret": b"1234", "clips/captions/a.txt": forged.encode()})
    location = open_here(f"s3://{bucket}/clips", tmp_path)
    captions = [file.caption_file for file in location.files]  # type: ignore[attr-defined]
    objects.forget()
    with pytest.raises(VideotuneError, match="damaged pointer"):
        read_pointer(captions[0])
    assert objects.fetched() == []


def test_parquet_files_that_hold_the_clips(
    objects: Store, clips: Path, tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet

    names = ("a.mp4", "b.mp4")
    contents = [(clips / "videos" / name).read_bytes() for name in names]
    videos = [
        {"bytes": content, "path": name}
        for name, content in zip(names, contents, strict=True)
    ]
    table = pyarrow.table({"video": videos, "text": ["one", "two"]})
    for name in ("train-0", "test-0"):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    bucket = objects.bucket()
    for name in ("train-0", "test-0"):
        path = tmp_path / f"{name}.parquet"
        objects.put(bucket, {f"rows/data/{path.name}": path.read_bytes()})

    library = scanned(
        {"path": f"s3://{bucket}/rows"}, index=tmp_path / "cache" / "index.sqlite"
    )
    assert {clip.captions for clip in library.clips} == {("one",), ("two",)}
    # Those of another split stay where they are.
    assert objects.fetched() == [f"/{bucket}/rows/data/train-0.parquet"]


def test_folders_of_frames(objects: Store, tmp_path: Path) -> None:
    folder = tmp_path / "frames" / "walk"
    for number, picture in enumerate(noise(9, 64, 64)):
        write_image(folder / f"{number:03}.png", picture)
    (tmp_path / "frames" / "walk.txt").write_text("a walk")
    address = objects.put_folder(tmp_path / "frames", objects.bucket(), "frames")
    settings = {"frame_folder_fps": 16.0}
    (there,) = scanned(
        {"path": address, **settings}, index=tmp_path / "a" / "index.sqlite"
    ).clips
    (here,) = scanned(
        {"path": str(tmp_path / "frames"), **settings},
        index=tmp_path / "b" / "index.sqlite",
    ).clips
    assert (there.id, there.captions) == (here.id, here.captions)
