"""A family is one file: written here into a package of its own, it is found, checked,
trained and sampled by the command.

It is registered as every family is, when its class is defined; its module is named by
an entry point, as that of any other package would be.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILY = """
from dataclasses import replace

from videotune.lazy import diffusers
from videotune.models.wan import Wan


class Acme(Wan):
    spec = replace(Wan.spec, name="acme_video", aliases=("WanVideoToVideoPipeline", "acme"), title="Acme Video")
    variants = ("t2v",)

    @classmethod
    def tiny_pipeline(cls, variant):
        parts = Wan.tiny_pipeline("t2v").components
        names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
        return diffusers.WanVideoToVideoPipeline(**{name: parts[name] for name in names})
"""


COMMANDS = """
import json
import sys

from videotune.cli.main import app

for words in json.loads(sys.argv[1]):
    code = app(words, standalone_mode=False) or 0
    assert code == 0, words
"""
"""Commands after one another, in one process."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder as an installed package leaves it: the module, and the entry point that
    names it.
    """
    folder = tmp_path / "installed"
    (folder / "acme-1.0.dist-info").mkdir(parents=True)
    (folder / "acme_video.py").write_text(FAMILY)
    (folder / "acme-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"
    )
    (folder / "acme-1.0.dist-info" / "entry_points.txt").write_text(
        "[videotune.models]\nacme = acme_video\n"
    )
    return folder


def test_a_family_of_one_file_trains_by_the_command(
    package: Path, small_clips: Path, tmp_path: Path
) -> None:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    }

    sets = {
        "base_model_name": tmp_path / "base",
        "cache_dir": tmp_path / "cache",
        "resolution": "32x32",
        "steps": 3,
    }
    sets |= {
        "validate_every": 2,
        "sample_after": 3,
        "samples": 1,
        "sample_metrics.budget": 0,
        "lora.rank": 2,
    }
    words = [
        word for key, value in sets.items() for word in ("--set", f"{key}={value}")
    ]
    clips = ["--data", str(small_clips)]
    commands = [
        ["tiny", "acme", str(tmp_path / "base")],
        ["check", *clips, *words],
        ["train", *clips, *words, "--out", str(tmp_path / "run")],
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [
        json.loads(line)
        for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2, 3]
    assert list((tmp_path / "run").rglob("*.mp4")), "a preview was sampled"
    assert list((tmp_path / "run" / "export").glob("*.safetensors")), (
        "the LoRA was exported"
    )


def test_two_families_of_one_name_are_refused() -> None:
    from videotune.errors import VideotuneError
    from videotune.models.wan import Wan

    with pytest.raises(VideotuneError, match="two families"):

        class Other(Wan):
            spec = Wan.spec
