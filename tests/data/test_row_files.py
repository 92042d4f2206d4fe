"""Files of rows as datasets."""

import json
from pathlib import Path

import pytest

from tests.support.clips import noise, write_clip
from tests.support.datasets import scanned
from videotune.data.metadata_files import MAX_BYTES
from videotune.errors import VideotuneError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for number in range(3):
        path = root / "deep" / f"{number}.mp4"
        write_clip(path, noise(9, 32, 32, seed=number), 24)
    return root


def rows_of(root: Path, name: str, content: str) -> Path:
    path = root / name
    path.write_text(content, encoding="utf-8")
    return path


def test_json_and_csv_rows_list_the_clips(root: Path) -> None:
    absolute = json.dumps(str(root / "deep" / "1.mp4"))
    jsonl = rows_of(
        root,
        "train.jsonl",
        '{"video_path": "deep/0.mp4", "caption": "a\\nb"}\n'
        f'{{"video_path": {absolute}, "caption": ["c", "d"]}}\n',
    )
    library = scanned(jsonl)
    assert [Path(clip.path).name for clip in library.clips] == ["0.mp4", "1.mp4"]
    assert [clip.captions for clip in library.clips] == [("a", "b"), ("c", "d")]

    table = rows_of(root, "rows.CSV", "media_path;text\ndeep/2.mp4;e\ngone.mp4;f\n")
    library = scanned(table)
    assert [clip.captions for clip in library.clips] == [("e",)]
    ((path, reason, detail),) = library.skipped
    assert (Path(path).name, reason) == ("gone.mp4", "missing_file")
    assert "rows.CSV:3" in detail


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"video": "../other.mp4", "text": "a"}', "outside"),
        ('{"video": "/etc/passwd", "text": "a"}', "outside"),
        ('{"video": "a\\u0000.mp4", "text": "a"}', "outside"),
        ('{"video": "link.mp4", "text": "a"}', "outside"),
        ('{"video": "deep/0.mp4", "text": "a"}\n{"video": "./deep/0.mp4", "text": "b"}', "already"),
        ('{"video": "deep/0.mp4", "path": "x", "text": "a"}', "file_column"),
        ('{"clip": "deep/0.mp4", "text": "a"}', "file_column"),
        ('{"video": "deep/0.mp4", "words": "a"}', "caption_column"),
        ('{"video": "deep/0.mp4", "text": 1}', "must be a text"),
        ("[1]", "not an object"),
        ("", "lists no clips"),
    ],
)  # fmt: skip
def test_rows_are_refused_in_one_sentence(root: Path, content: str, words: str) -> None:
    outside = write_clip(root.parent / "other.mp4", noise(9, 32, 32, seed=9), 24)
    (root / "link.mp4").symlink_to(outside)
    with pytest.raises(VideotuneError, match=words) as caught:
        scanned(rows_of(root, "rows.jsonl", content))
    assert "rows.jsonl" in str(caught.value)


def test_a_huge_file_of_rows_is_not_read(root: Path) -> None:
    path = rows_of(root, "rows.jsonl", "")
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(VideotuneError, match="Split it"):
        scanned(path)


def test_columns_that_the_dataset_names_hold_for_metadata_files_too(root: Path) -> None:
    rows_of(root, "metadata.csv", "clip,long,text\ndeep/0.mp4,one,two\n")
    keys = {"file_column": "clip", "caption_column": "long"}
    library = scanned({"path": str(root), **keys})
    captions = {Path(clip.path).name: clip.captions for clip in library.clips}
    assert captions["0.mp4"] == ("one",)
    with pytest.raises(VideotuneError, match="nothing"):
        scanned({"path": str(root), "file_column": "clip", "caption_column": "nothing"})
