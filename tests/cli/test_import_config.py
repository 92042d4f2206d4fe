"""`videotune import`, run as a subprocess."""

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from videotune.cli.interop import import_config
from videotune.errors import DONE, FAILED, VideotuneError
from videotune.job.overrides import Overrides, resolve_config
from videotune.presets.shipped import preset_names

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
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("48 keys of musubi: ")
    text = " ".join(done.stdout.split())
    assert (
        "missing: dit: weights/wan2.1_t2v_1.3B_bf16.safetensors: it is not here, so the weights of Wan-AI/"
        in text
    )
    assert "missing: vae: weights/vae file.safetensors: it is not here" in text
    assert "network_alpha: absent, it is 1" in text
    assert "taken as lora.alpha = 1" in text, "it says what becomes of the key"
    before, names, others = text.split(" none: ")
    count = len(names.split(", ")) + int(others.split()[0])
    assert f" {count} none, " in before
    assert "is not here: change it in" in done.stderr, "it has several datasets"
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


def test_the_next_command_of_a_config_without_a_model_works(
    tmp_path: Path, small_clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "dataset.toml"
    folder = tmp_path / "clips"
    shutil.copytree(small_clips / "videos", folder)
    theirs.write_text(f'[[datasets]]\nvideo_directory = "{folder}"\n')
    import_config([theirs], to=tmp_path / "our config.json")
    printed = capsys.readouterr().err
    command = re.search(r"`(videotune check [^`]+)`", printed)
    assert command is not None, printed
    _, _, config, option, preset = shlex.split(command[1])
    assert (option, preset) == ("--preset", "NAME"), "the person chooses, not we"
    chosen = preset_names()[0]
    assert resolve_config(Overrides(config=Path(config), preset=chosen), planning=True)

    folder.rename(tmp_path / "gone")
    import_config([theirs], to=tmp_path / "b.json")
    assert "b.json --data DIR --preset" in capsys.readouterr().err


def test_all_keys_are_a_list_where_a_table_would_break_their_names() -> None:
    for columns in ("80", "300"):
        env = os.environ | {"COLUMNS": columns}
        words = ["import", str(CONFIGS / "musubi" / "train.sh"), "--all"]
        command = [sys.executable, "-m", "videotune", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, check=True
        )
        assert max(map(len, done.stdout.splitlines())) <= int(columns)
        key = "dataset_config.datasets.0.video_directory"
        assert key in done.stdout, "no name is broken"
        assert ("│" in done.stdout) == (columns == "300")


def test_data_replaces_a_folder_that_is_not_on_this_machine(
    tmp_path: Path, small_clips: Path
) -> None:
    """Of an imported config, with the settings of its dataset."""
    gone = {"path": str(tmp_path / "gone"), "repeats": 3}
    keys = {"datasets": [gone], "base_model_name": "asset:toy"}
    config = tmp_path / "ours.json"
    config.write_text(json.dumps(keys))
    resolved, _, _ = resolve_config(Overrides(config=config, data=str(small_clips)))
    (dataset,) = resolved.config.datasets
    assert (dataset.path, dataset.repeats) == (str(small_clips), 3)

    (tmp_path / "gone").mkdir()
    with pytest.raises(VideotuneError, match="names the clips too"):
        resolve_config(Overrides(config=config, data=str(small_clips)))

    keys["datasets"] = [gone, {"path": str(tmp_path / "b")}]
    config.write_text(json.dumps(keys))
    with pytest.raises(VideotuneError, match="names several datasets"):
        resolve_config(Overrides(config=config, data=str(small_clips)))


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
