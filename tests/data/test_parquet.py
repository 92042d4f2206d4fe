"""Parquet files as datasets: rows of paths, and rows with the clips themselves."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support import datasets
from tests.support.clips import noise, write_clip
from videotune.data import parquet_clips, parquet_files
from videotune.data.locations import open_location
from videotune.errors import VideotuneError


def write_table(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, **options)
    return path


@pytest.fixture(scope="module")
def clip_bytes(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("clips")
    return [
        write_clip(
            folder / f"{number}.mp4", noise(9, 32, 32, seed=number), 24
        ).read_bytes()
        for number in range(4)
    ]


def scanned(dataset: Any, **values: Any) -> Any:
    path = Path(dataset["path"] if isinstance(dataset, dict) else dataset)
    index = path.with_name("cache") / "index.sqlite"
    return datasets.scanned(dataset, index=index, **values)


def captions_by_name(library: Any) -> dict[str, tuple[str, ...]]:
    (root,) = library.roots
    return {
        Path(clip.path).relative_to(root).as_posix(): clip.captions
        for clip in library.clips
    }


def test_rows_of_paths(tmp_path: Path, clip_bytes: list[bytes]) -> None:
    root = tmp_path / "data"
    (root / "deep").mkdir(parents=True)
    for number, content in enumerate(clip_bytes):
        (root / "deep" / f"{number}.mp4").write_bytes(content)

    rows = write_table(
        root / "rows.parquet",
        {"video_path": ["deep/0.mp4", "deep/1.mp4"], "caption": ["a", None], "size": [1, 2]},
    )  # fmt: skip
    library = scanned(rows, missing_caption="empty")
    assert captions_by_name(library) == {"deep/0.mp4": ("a",), "deep/1.mp4": ("",)}

    # In a folder of clips the columns that the dataset names make rows of the files.
    write_table(root / "rows.parquet", {"clip": ["deep/2.mp4"], "words": [["b", "c"]]})
    keys = {"file_column": "clip", "caption_column": "words"}
    library = scanned({"path": str(root), **keys})
    assert captions_by_name(library) == {"deep/2.mp4": ("b", "c")}

    # metadata.parquet is a metadata file.
    os.replace(root / "rows.parquet", root / "metadata.parquet")
    write_table(root / "metadata.parquet", {"file_name": ["deep/3.mp4"], "text": ["d"]})
    library = scanned(root, missing_caption="skip")
    assert captions_by_name(library) == {"deep/3.mp4": ("d",)}


def test_rows_that_hold_the_clips(tmp_path: Path, clip_bytes: list[bytes]) -> None:
    first, second, third, fourth = clip_bytes
    root = tmp_path / "data"
    write_table(
        root / "data" / "train-00000-of-00002.parquet",
        {
            "video": [
                {"bytes": first, "path": "/home/me/../a b.MP4"},
                {"bytes": second, "path": "a b.webm"},
                {"bytes": b"#!/bin/sh" * 1000, "path": "run.mp4"},
                {"bytes": None, "path": "gone.mp4"},
            ],
            "text": ["one", "two", "three", "four"],
        },
    )
    write_table(
        root / "data" / "train-00001-of-00002.parquet",
        {"mp4": [third], "text": ["five"]},
    )
    test_split = write_table(
        root / "data" / "test-00000-of-00001.parquet",
        {"mp4": [fourth], "text": ["six"]},
    )
    library = scanned(root)
    assert captions_by_name(library) == {
        "data/train-00000-of-00002.parquet/a_b.mp4": ("one",),
        "data/train-00000-of-00002.parquet/000002.webm": ("two",),
        "data/train-00001-of-00002.parquet/000001.mp4": ("five",),
    }
    assert [reason for _, reason, _ in library.skipped] == ["not_a_video", "empty"]
    assert any("validation splits are not used" in note for note in library.notes)
    (unpacked,) = library.roots
    (script,) = unpacked.rglob("run.mp4")
    assert script.stat().st_size == 1024

    # One file alone, and other columns for its captions, without unpacking it again.
    library = scanned({"path": str(test_split), "caption_column": "text"})
    assert list(captions_by_name(library).values()) == [("six",)]


def test_rows_that_hold_companions_too(
    tmp_path: Path, clip_bytes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, _ = clip_bytes
    columns = {
        "video": [
            {"bytes": first, "path": "a.mp4"},
            {"bytes": second, "path": "b.mp4"},
        ],
        "reference": [{"bytes": third, "path": "../a.mp4"}, None],
        "loss_mask": pa.array([None, third], pa.binary()),
        "mask": ["m.png", None],
        "text": ["one", "two"],
    }
    path = write_table(tmp_path / "data" / "rows.parquet", columns)
    location = open_location(str(path), tmp_path / "cache")
    one, two = location.files
    assert one.path.name == "a.mp4"
    companions = dict(one.companions)
    assert (
        companions.pop("mask") == companions.pop("loss_mask") == path.with_name("m.png")
    )
    (reference,) = companions.values()
    assert reference.parent == one.path.parent
    assert reference.read_bytes() == third
    ((role, loss_mask),) = two.companions
    assert role == "loss_mask"
    assert loss_mask.read_bytes() == third

    # What is missing is written again, and companions count for the limits.
    loss_mask.unlink()
    assert open_location(str(path), tmp_path / "cache").files[1].companions
    assert loss_mask.is_file()
    monkeypatch.setattr(parquet_clips, "MARGIN", len(first) + len(second))
    monkeypatch.setattr(parquet_clips, "RATIO", 0)
    with pytest.raises(VideotuneError, match="unpacks to more than"):
        open_location(str(path), tmp_path / "other-cache")


def test_a_column_of_bytes_is_no_companion_of_clips_that_are_paths(
    tmp_path: Path, clip_bytes: list[bytes]
) -> None:
    (tmp_path / "a.mp4").write_bytes(clip_bytes[0])
    columns = {"file_name": ["a.mp4"], "text": ["a"], "mask": [clip_bytes[1]]}
    write_table(tmp_path / "metadata.parquet", columns)
    location = open_location(str(tmp_path), tmp_path / "cache")
    assert [file.companions for file in location.files] == [()]
    assert any("the column mask is not used" in note for note in location.notes)


def test_they_are_unpacked_once_and_anew_where_something_is_missing(
    tmp_path: Path, clip_bytes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    cache = tmp_path / "cache"
    for number in range(2):
        content = {"video": [clip_bytes[number]], "text": [str(number)]}
        write_table(root / f"{number}.parquet", content)

    # A kill after the first file: the second is unpacked by the next scan.
    unpack = parquet_clips._unpack

    def interrupted(shard: Any, *arguments: Any) -> None:
        if shard.name == "1.parquet":
            raise KeyboardInterrupt
        unpack(shard, *arguments)

    monkeypatch.setattr(parquet_clips, "_unpack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_location(str(root), cache)
    monkeypatch.undo()
    (first,) = cache.rglob("*.mp4")
    written = first.stat().st_mtime_ns
    progress: list[tuple[int, int, str]] = []
    location = open_location(str(root), cache, lambda *step: progress.append(step))
    assert progress == [(1, 1, "unpacking 1.parquet")]
    assert first.stat().st_mtime_ns == written
    assert len(location.files) == 2

    # A clip that was cut short is written again, a changed file is another folder.
    first.write_bytes(b"")
    assert open_location(str(root), cache).root == location.root
    assert first.stat().st_size == len(clip_bytes[0])
    write_table(root / "1.parquet", {"video": [clip_bytes[2]], "text": ["new"]})
    changed = open_location(str(root), cache)
    assert changed.root != location.root
    assert changed.files[1].metadata_texts == ("new",)

    # A list of names that came with the dataset leads nowhere.
    names = changed.root / "1.parquet" / ".rows.json"
    (tmp_path / "secret.mp4").write_bytes(b"12")
    names.write_text('[["../../../../secret.mp4", 2]]')
    clip = open_location(str(root), cache).files[1]
    assert clip.path.parent == names.parent
    assert clip.path.read_bytes() == clip_bytes[2]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"video": [b"x"], "image": [b"x"], "text": ["a"]}, "file_column"),
        ({"video": [b"x"], "words": ["a"]}, "caption_column"),
        ({"video": ["https://x/a.mp4"], "text": ["a"]}, "web address"),
        ({"video": ["../a.mp4"], "text": ["a"]}, "outside"),
        ({"frames": [1], "text": ["a"]}, "file_column"),
        ({"video": pa.array([], pa.string()), "text": pa.array([], pa.string())}, "lists no clips"),
    ],
)  # fmt: skip
def test_files_are_refused_in_one_sentence(
    tmp_path: Path, columns: dict[str, Any], words: str
) -> None:
    path = write_table(tmp_path / "rows.parquet", columns)
    with pytest.raises(VideotuneError, match=words) as caught:
        scanned(path)
    assert "rows.parquet" in str(caught.value)
    assert not list(tmp_path.rglob(".rows.json"))


def test_damaged_files_are_refused(tmp_path: Path, clip_bytes: list[bytes]) -> None:
    path = write_table(tmp_path / "a.parquet", {"video": clip_bytes, "text": ["a"] * 4})
    content = path.read_bytes()
    damaged = [b"", b"PAR1", b"PAR1" + b"\xff" * 64 + b"PAR1", content[:-9]]
    for broken in damaged:
        path.write_bytes(broken)
        with pytest.raises(VideotuneError, match="is damaged"):
            scanned(path)


def test_a_small_file_does_not_become_a_huge_one(
    tmp_path: Path, clip_bytes: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = pa.array([0] * 400, pa.int32())
    clips = pa.DictionaryArray.from_arrays(index, pa.array([clip_bytes[0]]))
    path = write_table(
        tmp_path / "a.parquet",
        {"video": clips, "text": ["a"] * 400},
        store_schema=False,
    )
    monkeypatch.setattr(parquet_clips, "MARGIN", 0)
    monkeypatch.setattr(parquet_clips, "RATIO", 2)
    with pytest.raises(VideotuneError, match="unpacks to more than"):
        scanned(path)
    monkeypatch.undo()
    monkeypatch.setattr(parquet_clips, "MAX_CLIP_BYTES", 10)
    with pytest.raises(VideotuneError, match="Save it as a file"):
        scanned(path)
    monkeypatch.undo()
    monkeypatch.setattr(parquet_files, "MAX_TEXT_LETTERS", 100)
    with pytest.raises(VideotuneError, match="MB of text"):
        scanned(path)


def test_without_pyarrow_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", {"video": [b"x"], "text": ["a"]})
    monkeypatch.setattr(parquet_files, "find_spec", lambda name: None)
    with pytest.raises(VideotuneError, match=r"pip install .*parquet"):
        scanned(path)


def test_a_link_leads_to_other_parquet_files_only(tmp_path: Path) -> None:
    (tmp_path / "secret.db").write_bytes(b"x")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.parquet").symlink_to(tmp_path / "secret.db")
    with pytest.raises(VideotuneError, match="is a link to"):
        scanned(tmp_path / "data")
