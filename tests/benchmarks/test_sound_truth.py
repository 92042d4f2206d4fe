"""Video and sound learn from each other: the benchmark's figures, for one seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
def test_each_modality_follows_the_other_and_apart_neither_does(tmp_path: Path) -> None:
    out = tmp_path / "sound.json"
    words = ("--seeds", "0", "--steps", "250", "--batch", "24", "--out", str(out))
    done = subprocess.run(
        [sys.executable, str(HOME / "sound.py"), *words],
        capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOME.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(out.read_text())["runs"]
    together = next(run["agree"] for run in runs if not run["isolated"])
    apart = next(run["agree"] for run in runs if run["isolated"])
    assert min(together.values()) >= 0.9
    assert all(0.3 <= share <= 0.7 for share in apart.values())
