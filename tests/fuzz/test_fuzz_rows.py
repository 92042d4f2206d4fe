"""Damaged Parquet files: each is read or refused in a sentence, and nothing is written
outside of the cache.
"""

import shutil
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from tests.support.damaged_files import COUNT, try_each
from videotune.data.locations import open_location


def test_parquet_files(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    video = [{"bytes": b"GIF8" * 50, "path": "a.gif"}] * 5
    masks = pa.array([b"GIF8" * 50, None] * 2 + [b""], pa.binary())
    clips = pa.table({"video": video, "text": [["a", "b"]] * 5, "mask": masks})
    references = {"reference": ["c.mp4", None]}
    paths = pa.table({"path": ["a.mp4", "b.mp4"], "text": ["a", "b"], **references})
    parquet.write_table(clips, root / "clips.parquet", compression="zstd")
    parquet.write_table(paths, root / "paths.parquet")

    def read() -> None:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        for name in ("clips", "paths"):
            open_location(str(root / f"{name}.parquet"), tmp_path / "cache")

    outcome = try_each([root / "clips.parquet", root / "paths.parquet"], read)
    assert outcome["refused"] > COUNT / 4
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "cache"}
    assert len(list(root.iterdir())) == 2
