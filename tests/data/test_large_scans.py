"""A large scan keeps little of each clip in memory, and finds what a small one finds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_clip
from tests.support.datasets import scanned
from tests.support.index_files import read_index
from videotune import files
from videotune.data import dataset, packed_rows
from videotune.data.dataset import to_json
from videotune.data.library import Library

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "large_sets.py"


def mixed_set(root: Path) -> Path:
    """Clips of which some are copies, cuts, look alike, lack a caption or are damaged."""
    captions = {"street-1": "a street", "street-2": "a street", "lake-1": "a lake"}
    captions |= {"lake-2": "two\nlines", "kitten": "a kitten", "blank": ""}
    for number, (stem, caption) in enumerate(captions.items()):
        write_clip(root / "videos" / f"{stem}.mp4", noise(20 + number, seed=number))
        text = root / "captions" / f"{stem}.txt"
        text.parent.mkdir(exist_ok=True)
        text.write_text(caption)

    videos = root / "videos"
    shutil.copy(videos / "kitten.mp4", videos / "a copy of kitten.mp4")
    write_clip(videos / "similar.mp4", noise(24, seed=4), fps=24)
    (videos / "text.mp4").write_text("hello " * 100)
    (videos / "metadata.jsonl").write_text(
        '{"file_name": "gone.mp4", "text": "gone"}\n'
        '{"file_name": "similar.mp4", "text": ["one", "another"]}\n'
    )
    return root


def account(library: Library) -> dict[str, Any]:
    """All that a library holds, as JSON."""
    rows = to_json(library)
    rows["clips"] = list(rows["clips"])
    rows["windows"] = [str(window) for window in library.windows]
    rows["held_out"] = [str(window) for window in library.held_out_windows]
    rows["library"] = [str(clip) for clip in library.clips]
    rows["media"] = {name: library.media[name].to_json() for name in library.media}
    return json.loads(json.dumps(rows))


def test_rows_in_files_and_rows_of_the_index_give_one_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scan in memory, the first scan with each row in a file, and a second one."""
    monkeypatch.setattr(files, "user_cache", lambda: tmp_path / "user")
    folder = mixed_set(tmp_path / "set")

    def scan(index: str) -> dict[str, Any]:
        library = scanned(
            folder,
            index=tmp_path / index / "index.sqlite",
            missing_caption="skip",
            validation_fraction=0.3,
        )
        return account(library)

    in_memory = scan("memory")
    reasons = {row["reason"] for row in in_memory["clips"]} - {None}
    assert reasons == {"duplicate", "empty_caption", "missing_file", "not_a_video"}

    monkeypatch.setattr(packed_rows, "UNWRITTEN_BYTES", 1)
    monkeypatch.setattr(dataset, "FEWEST_CLIPS", 2)
    first = scan("files")
    assert (tmp_path / "user" / "scans").is_dir()
    assert first == in_memory
    indexes = [
        read_index(tmp_path / name / "index.sqlite") for name in ("memory", "files")
    ]
    assert indexes[0]["contents"] == indexes[1]["contents"]

    shutil.rmtree(tmp_path / "user" / "libraries")
    assert scan("files") == first, "from the index, without the library"
    assert scan("files") == first, "from the library"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_first_scan_keeps_little_of_each_clip(tmp_path: Path) -> None:
    """It took 18 kB; what grows is measured between two sizes."""
    result = tmp_path / "result.json"
    sizes = ("5000", "15000")
    options = ["--folder", str(tmp_path / "sets"), "--json", str(result)]
    subprocess.run(
        [sys.executable, BENCHMARK, "--sizes", "--cold", "--first", *sizes, *options],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    slopes = json.loads(result.read_text())["bytes_a_clip"]["first"]
    assert slopes["anonymous_mb"][0] < 2000
    assert slopes["peak_mb"][0] < 3000
