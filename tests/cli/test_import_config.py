"""`videotune import`, run as a subprocess."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from videotune.errors import DONE, FAILED
from videotune.job.overrides import Overrides, resolve_config

CONFIGS = Path(__file__).parents[1] / "interop" / "configs"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "videotune", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"}
    )


def test_it_writes_a_config_that_a_run_begins_with(tmp_path: Path) -> None:
    done = run(
        "import", CONFIGS / "musubi" / "train.sh", "--out", tmp_path / "ours.json"
    )
    assert done.returncode == DONE, done.stderr
    assert all(
        len(line) <= 80 for line in done.stdout.splitlines() if line[:1] in "┏┃┡│└"
    )
    assert "network_alpha" in done.stdout
    resolved, spec, base = resolve_config(
        Overrides(config=tmp_path / "ours.json"), planning=True
    )
    assert base is not None
    assert (base.name, spec.name) == ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan")
    assert (resolved.config.lora.rank, resolved.config.lora.alpha) == (24, 1)
    assert resolved.origins["lora.alpha"] == "user"
    again = run(
        "import", CONFIGS / "musubi" / "train.sh", "--out", tmp_path / "ours.json"
    )
    assert again.returncode == FAILED
    assert json.loads((tmp_path / "ours.json").read_text())["epochs"] == 6


@pytest.mark.parametrize(
    "content",
    [b'{"model_type": ', pickle.dumps({"network_module": "x"}), b'{"lr": 1e-4}'],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "theirs.json").write_bytes(content)
    done = run("import", tmp_path / "theirs.json", "--out", tmp_path / "ours.json")
    assert done.returncode == FAILED
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.json"]


def test_train_says_that_import_reads_the_config_of_another_trainer(
    tmp_path: Path,
) -> None:
    done = run(
        "train",
        "--config",
        CONFIGS / "onetrainer" / "config.json",
        "--out",
        tmp_path / "run",
    )
    assert done.returncode == FAILED
    assert "videotune import" in done.stderr
    assert not (tmp_path / "run").exists()
