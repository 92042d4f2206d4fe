"""``dataset split`` as a person meets it: a table, sentences, exit codes."""

from pathlib import Path

import pytest
from clips import write_clip
from scenery import shots

from videotune.errors import DONE, SKIPPED
from videotune.run.dataset import split_dataset


def run(source: Path, out: Path, min_seconds: float = 1.0) -> int:
    return split_dataset(source, out, min_seconds=min_seconds, threshold=None, overwrite=False)


def test_the_table_says_what_became_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clip(tmp_path / "in" / "film.mp4", shots([1, 2, 3], 30)[:-12])
    write_clip(tmp_path / "in" / "whole.mp4", shots([4], 30))
    assert run(tmp_path / "in", tmp_path / "out") == DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "left out: 2.50 to 3.25 s" in said
    assert "no cut: copied as it is" in said
    assert "3 scenes of 2 files" in said
    assert "1 scenes are shorter than 1 s" in said


def test_a_broken_file_ends_in_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clip(tmp_path / "in" / "film.mp4", shots([1, 2], 30))
    (tmp_path / "in" / "bad.mp4").write_bytes(b"")
    assert run(tmp_path / "in", tmp_path / "out") == SKIPPED
    told = capsys.readouterr()
    assert "empty: the file has 0 bytes" in " ".join(told.out.split())
    assert "exit code 2" in told.err
    assert (tmp_path / "out" / "film-scene-002.mp4").exists()
