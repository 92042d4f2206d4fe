"""What can be refused from arguments and small files is refused before anything slow
begins.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from videotune.errors import FAILED, VideotuneError
from videotune.job.early_captions import refuse_missing_captions
from videotune.job.overrides import Overrides

PROGRAM = """
import sys
from videotune.cli.main import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""

REFUSED: dict[str, Sequence[str]] = {
    "sample without a prompt": ["sample", "RUN"],
    "sample without a run": ["sample", "--prompt", "x"],
    "sample of no run": ["sample", "nosuch", "--prompt", "x"],
    "sample of a missing LoRA": [
        *("sample", "--base", "asset:toy", "--prompt", "x", "--lora", "no.safetensors"),
    ],
    "sample of a missing image": [
        *("sample", "--base", "asset:toy", "--prompt", "x", "--image", "no.png"),
    ],
    "compare of no run": ["compare", "nosuch"],
    "plan for a card that does not exist": [
        *("plan", "CLIPS", "--preset", "toy", "--card", "rtx 49990"),
    ],
    "plan for a memory that is no number": [
        *("plan", "CLIPS", "--preset", "toy", "--vram", "16 apples"),
    ],
    "plan with a wrong number of skips": [
        *("plan", "CLIPS", "--preset", "toy", "--allow-skips", "many"),
    ],
    "plan without a model": ["plan", "CLIPS"],
    "plan of no folder": ["plan", "./nosuch", "--preset", "toy"],
    "cache of no folder": ["cache", "./nosuch", "--preset", "toy"],
    "cache without a model": ["cache", "CLIPS"],
    "train of no folder": ["train", "./nosuch", "--preset", "toy", "--out", "new"],
    "train into a folder that is taken": [
        *("train", "CLIPS", "--preset", "toy", "--out", "RUN"),
    ],
    "train from weights that do not exist": [
        *("train", "CLIPS", "--preset", "toy", "--out", "new", "--init-from", "no"),
    ],
    "train on a LoRA that does not exist": [
        *("train", "CLIPS", "--preset", "toy", "--out", "new"),
        *("--set", 'base_loras=["no.safetensors"]'),
    ],
    "plan with a LoRA of previews that does not exist": [
        *("plan", "CLIPS", "--preset", "toy"),
        *("--set", 'sample.loras=[{"file": "no.safetensors"}]'),
    ],
    "train with a start image that does not exist": [
        *("train", "CLIPS", "--preset", "toy", "--out", "new"),
        *("--set", 'samples=[{"prompt": "a cat", "image": "no.png"}]'),
    ],
    "train with a wrong number of skips": [
        *("train", "CLIPS", "--preset", "toy", "--out", "new", "--allow-skips", "-1"),
    ],
    "resume of no run": ["resume", "nosuch"],
    "export of no run": ["export", "nosuch"],
    "inspect of no file": ["lora", "inspect", "nosuch"],
    "inspect of a run's folder": ["lora", "inspect", "RUN"],
    "conversion to an unknown form": [
        *("lora", "convert", "FILE", "--to", "nosuch", "--out", "b.safetensors"),
    ],
    "conversion into a file that exists": [
        *("lora", "convert", "FILE", "--to", "kohya", "--out", "FILE"),
    ],
    "merge with too many weights": [
        *("lora", "merge", "FILE", "--out", "b.safetensors"),
        *("--weight", "1", "--weight", "2"),
    ],
    "extraction from no model": [
        *("lora", "extract", "nosuch", "--base", "asset:toy", "--rank", "4"),
        *("--out", "b.safetensors"),
    ],
    "problems of no run": ["doctor", "nosuch"],
    "problems of a folder of clips": ["doctor", "clips"],
    "repair of no run": ["doctor", "nosuch", "--repair-journal"],
    "a test message to no address": ["doctor", "--notify", "no address"],
    "a test message to a variable that is not set": ["doctor", "--notify", "NO_SUCH"],
    "list of no cache": ["cache", "ls", "nosuch"],
    "list of a folder without a cache": ["cache", "ls", "CLIPS"],
    "verification of no cache": ["cache", "verify", "nosuch"],
    "comparison by no config": ["autopsy", "nosuch.toml", "--data", "CLIPS"],
    "comparison by a config of no trainer": [
        "autopsy",
        "RUN/config.json",
        "--data",
        "CLIPS",
    ],
    "comparison of no clips": ["autopsy", "their.toml", "--data", "nosuch"],
    "a run of no repository": ["download", "hf://user", "--data", "CLIPS"],
    "a run without clips": ["resume", "hf://user/run"],
    "a run with clips that are not here": ["resume", "hf://user/run", "--data", "./no"],
    "a run into a folder that is taken": [
        *("resume", "hf://user/run", "--data", "CLIPS", "--out", "RUN"),
    ],
    "a new folder for a run that is here": ["resume", "RUN", "--out", "new"],
    "report of no run": ["report", "nosuch"],
    "publication of no run": ["publish", "nosuch"],
    "card of no run": ["card", "nosuch"],
    "captions by what is no server": [
        *("caption", "CLIPS", "--model", "m", "--endpoint", "localhost"),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with clips, a LoRA file and what a run leaves of itself."""
    root = tmp_path_factory.mktemp("early")
    (root / "clips").mkdir()
    (root / "clips" / "a.mp4").write_bytes(b"never read")
    (root / "run" / "export").mkdir(parents=True)
    (root / "run" / "config.json").write_text("{}")
    (root / "run" / "journal.jsonl").write_text("")
    (root / "their.toml").write_text(
        'network_module = "networks.lora_wan"\ndit = "x"\n'
    )
    save_file({}, root / "run" / "export" / "run-step-1.safetensors")
    save_file({}, root / "a.safetensors")
    return root


def run_program(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_in_the_arguments_is_refused_before_torch_is_imported(
    name: str, folder: Path
) -> None:
    paths = {"CLIPS": "clips", "RUN": "run", "FILE": "a.safetensors"}
    words = [paths.get(word, word).replace("RUN/", "run/") for word in REFUSED[name]]
    done = run_program(words, folder)
    assert done.returncode == FAILED, done.stderr
    assert done.stdout.strip() == "False", "torch is not imported yet"
    assert done.stderr.startswith("videotune: "), "no work was announced"
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "new").exists()


def test_each_command_that_needs_captions_says_first_which_are_missing(
    folder: Path,
) -> None:
    messages = set()
    for command in ("plan", "cache", "train"):
        words = [command, "clips", "--preset", "toy"]
        if command == "train":
            words += ["--out", "new"]
        done = run_program(words, folder)
        assert done.returncode == FAILED, done.stderr
        assert done.stdout.strip() == "False", "torch is not imported yet"
        messages.add(done.stderr)
    assert len(messages) == 1
    assert "a.mp4" in messages.pop()
    assert not (folder / "new").exists()


def test_a_missing_caption_is_refused_early_unless_it_is_allowed_or_a_copy(
    tmp_path: Path, small_clips: Path
) -> None:
    folder = tmp_path / "clips"
    shutil.copytree(small_clips, folder)
    captions = sorted((folder / "captions").iterdir())
    captions[0].unlink()
    missing = Overrides(preset="toy", data=str(folder))
    with pytest.raises(VideotuneError, match="1 clip has no usable caption") as error:
        refuse_missing_captions(missing, None)
    assert f"{captions[0]} does not exist" in str(error.value)
    assert f"a text file such as {captions[0]} with a line" in str(error.value)
    assert "--allow-skips 1. Other clips are not read yet" in str(error.value)
    assert "\nWith --set missing_caption=empty" in str(error.value)

    refuse_missing_captions(missing, "1")
    for value in ("empty", "skip"):
        allowed = replace(missing, sets=(f"missing_caption={value}",))
        refuse_missing_captions(allowed, None)

    first, second = sorted((folder / "videos").iterdir())[:2]
    shutil.copy(second, first)
    refuse_missing_captions(missing, None)

    second.unlink()
    for caption in (folder / "captions").iterdir():
        caption.unlink()
    with pytest.raises(VideotuneError, match="5 clips have no usable caption") as error:
        refuse_missing_captions(missing, None)
    assert "--allow-skips" not in str(error.value), "no clip would be left"


def test_the_early_refusal_says_where_misplaced_captions_belong(
    tmp_path: Path, small_clips: Path
) -> None:
    folder = tmp_path / "clips"
    shutil.copytree(small_clips, folder)
    (folder / "captions").rename(folder / "texts")
    name = min(path.name for path in (folder / "texts").iterdir())
    misplaced = Overrides(preset="toy", data=str(folder))
    with pytest.raises(VideotuneError) as error:
        refuse_missing_captions(misplaced, None)
    assert f"move texts/{name} to captions/{name}" in str(error.value)
