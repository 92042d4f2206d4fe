"""Rows in files and packed texts are what went in, and leave nothing behind."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from videotune import files
from videotune.data import packed_rows
from videotune.data.candidate_table import pack_placement, unpack_placement
from videotune.data.clip_file import ClipFile
from videotune.data.file_checks import ClipProblem
from videotune.data.packed_rows import (
    SpilledBytes,
    SpilledRows,
    spill_file,
    write_spilled,
)
from videotune.data.packed_texts import PackedPaths, PackedTexts, TextNumbers
from videotune.data.window_placement import WindowPlacement
from videotune.errors import VideotuneError
from videotune.types import ClipShape, Window


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the user; 1,000 bytes of rows are many."""
    monkeypatch.setattr(files, "user_cache", lambda: tmp_path / "user")
    monkeypatch.setattr(packed_rows, "UNWRITTEN_BYTES", 1000)
    monkeypatch.setattr(packed_rows, "READ_TOGETHER", 300)
    return tmp_path / "user"


def test_rows_come_back_from_memory_and_from_the_file(cache: Path) -> None:
    """Also those that were replaced, in any order."""
    expected = [("row", number, "x" * (number % 70)) for number in range(200)]
    rows = SpilledRows(expected)
    assert (cache / "scans").is_dir(), "a file was needed"
    assert os.listdir(cache / "scans") == [], "it has no name"
    assert list(rows) == expected
    assert [rows[number] for number in range(199, -1, -3)] == expected[::-3]

    for number in range(0, 200, 7):
        rows[number] = expected[number] = ("new", number, "")
    assert rows[:] == expected
    assert rows[-1] == expected[-1]
    assert len(rows) == 200


def test_few_rows_need_no_file(cache: Path) -> None:
    rows = SpilledRows(["a", "b"])
    rows[0] = "c"
    assert list(rows) == ["c", "b"]
    assert not cache.exists()


def test_a_problem_and_a_clip_file_survive_the_file(cache: Path) -> None:
    root = Path("set")
    file = ClipFile(
        path=root / "a.mp4",
        caption_file=None,
        expected_caption=root / "a.txt",
        metadata_texts=("one", "two"),
        frames=(root / "1.png",),
        joined_video=root / "joined.mp4",
        companions=(("mask", root / "mask.png"),),
    )
    rows: SpilledRows[object] = SpilledRows([file, ClipProblem("empty", "no bytes")])
    assert rows[0] == file
    problem = rows[1]
    assert isinstance(problem, ClipProblem)
    assert (problem.reason, problem.detail) == ("empty", "no bytes")


def test_a_placement_is_unpacked_as_it_was() -> None:
    shapes = [ClipShape(frames, 64, 96, 16.0) for frames in (17, 33)]
    windows = [
        Window("id", number / 3, number / 3 + 1, shapes[number % 2], flip=number > 2)
        for number in range(5)
    ]
    placement = WindowPlacement(tuple(windows), (1.0,) * 5, frames=80, speed=1.5)
    assert unpack_placement(pack_placement(placement)) == placement
    assert len(pack_placement(placement).kinds) == 4
    assert unpack_placement(pack_placement(WindowPlacement())) == WindowPlacement()


@pytest.mark.parametrize("count", [0, 3, 200])
def test_bytes_are_taken_and_mapped(cache: Path, count: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, (count, 15), np.uint8)
    spilled = SpilledBytes(15)
    for begin in range(0, count, 40):
        spilled.extend(array[begin : begin + 40])
    order = np.random.default_rng(1).permutation(count)
    assert np.array_equal(spilled.take(order), array[order])

    mapped = spilled.mapped()
    assert np.array_equal(mapped.array, array)
    mapped.release()
    assert np.array_equal(mapped.array, array), "the pages come back"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_ends_the_scan_with_a_sentence(cache: Path) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as file,
        pytest.raises(VideotuneError, match="XDG_CACHE_HOME"),
    ):
        write_spilled(file, b"rows", 0)


def test_a_cache_that_cannot_be_written_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(files, "user_cache", lambda: tmp_path / "file")
    with spill_file() as file:
        write_spilled(file, b"rows", 0)
        file.seek(0)
        assert file.read() == b"rows"


@given(st.lists(st.text(max_size=9)))
def test_texts_are_packed_in_their_order(texts: list[str]) -> None:
    packed = PackedTexts(texts)
    assert packed == texts
    assert packed[1:] == texts[1:]
    by_bytes = sorted(range(len(texts)), key=packed.encoded)
    assert [texts[number] for number in by_bytes] == sorted(texts)
    expected = np.array([text.encode() for text in texts], np.bytes_)
    assert np.array_equal(packed.fixed_width(), expected)


def test_names_that_are_not_utf_8_and_paths_are_packed() -> None:
    name = os.fsdecode(b"caf\xe9.mp4")
    assert PackedTexts([name])[0] == name
    paths = [Path("a") / "b.mp4", Path(name)]
    assert list(PackedPaths(paths)) == paths
    assert PackedPaths(paths)[1:] == paths[1:]


@given(st.lists(st.sampled_from(["a", "b", "", "cc", "é"])))
def test_texts_have_the_numbers_of_a_dict(texts: list[str]) -> None:
    numbers = TextNumbers()
    for text in texts:
        numbers.add(text)
    number_of_each, firsts = numbers.number_all()
    different = list(dict.fromkeys(texts))
    assert [different[number] for number in number_of_each] == texts
    assert firsts.tolist() == [texts.index(text) for text in different]
    assert numbers.count() == len(different)
    assert [numbers.number_of(text) for text in different] == list(
        range(len(different))
    )
    assert numbers.number_of("unknown") is None
