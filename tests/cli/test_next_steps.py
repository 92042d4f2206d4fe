"""The commands that each command names as the next: they can be run as they are, and
keep the clips, the card and the run folder from one to the next.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from videotune.cli.next_steps import proposed_run
from videotune.presets.shipped import preset_names


def next_words(error: str) -> list[str]:
    """The words of the command that a command names as the next."""
    line = next(line for line in error.splitlines() if line.startswith("next: "))
    return shlex.split(line.removeprefix("next: "))


def init(videotune: Run, work: Path, clips: Path, *words: str) -> tuple[int, str, str]:
    answers = ("--purpose", "style", "--trigger", "")
    return videotune("init", work, "--data", clips, *answers, *words)


def test_check_and_plan_keep_the_card_and_the_run_folder_of_init(
    videotune: Run, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    work = tmp_path / "my work"
    model = ("--model", "wan 2.1 1.3B LoRA", "--card", "rtx 4070 ti super")
    code, _, error = init(videotune, work, clips, *model)
    assert code == 0, error
    proposed = [shlex.split(line) for line in error.partition("next:")[2].splitlines()]
    check, plan, download, train = filter(None, proposed)

    code, _, error = videotune(*check[1:])
    assert code == 0, error
    assert next_words(error) == plan
    assert plan[-2:] == ["--card", "RTX 4070 Ti Super"]

    code, _, error = videotune(*plan[1:])
    assert code == 0, error
    assert next_words(error) == train
    assert train[-1] == str(work / "my work-1")
    assert download == ["videotune", "download", str(work / "config.yaml")]


def test_init_names_the_size_of_a_base_model_that_is_not_here(
    videotune: Run, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = ("--model", "wan 2.1 1.3B LoRA", "--card", "16")
    _, _, error = init(videotune, tmp_path / "wan", clips, *model)
    assert "(about 28.9 GB) is not on this machine" in error

    _, _, error = init(videotune, tmp_path / "toy", clips, "--model", "toy")
    assert "download" not in error, "it comes with videotune"


def test_init_returns_its_next_commands_as_json(
    videotune: Run, clips: Path, tmp_path: Path
) -> None:
    code, text, error = init(
        videotune, tmp_path / "work", clips, "--model", "toy", "--json"
    )
    assert code == 0, error
    result = json.loads(text)
    assert result["config"] == str(tmp_path / "work" / "config.yaml")
    assert [command.split()[1] for command in result["next"]] == [
        "check",
        "plan",
        "train",
    ]


def test_a_plan_for_several_gpus_is_followed_by_a_training_on_them(
    videotune: Run, clips: Path
) -> None:
    of_card = ("--preset", "wan 2.1 1.3B LoRA 16GB", "--card", "rtx 4090")
    _, _, error = videotune("plan", clips, *of_card, "--gpus", "2")
    words = next_words(error)
    assert words[:6] == [
        "torchrun",
        "--nproc-per-node",
        "2",
        "-m",
        "videotune",
        "train",
    ]
    assert words[-2:] == ["--out", "runs/first"]

    _, _, error = videotune("plan", clips, *of_card, "--gpus", "8", "--nodes", "2")
    assert "next, on each of the 2 machines, with its number from 0 to 1" in error
    line = next(line for line in error.splitlines() if "torchrun" in line)
    assert "--nnodes 2 --node-rank RANK --nproc-per-node 8" in line
    assert "--master-addr ADDRESS" in line

    shared = ("--set", "context_parallel=2")
    _, _, error = videotune("plan", clips, *of_card, "--gpus", "2", *shared)
    assert next_words(error).count("context_parallel=2") == 1


COUNT_PRESETS = """
import sys
from collections import Counter

opened = Counter()

def count(event, arguments):
    if event == "open" and "presets" in str(arguments[0]):
        opened[str(arguments[0])] += 1

sys.addaudithook(count)
from videotune.cli.main import app

app(["init", sys.argv[1]], standalone_mode=False)
print("most", max(count for path, count in opened.items() if path.endswith(".json")))
"""


def test_the_questions_of_init_read_each_preset_once(
    clips: Path, tmp_path: Path
) -> None:
    """Reading them for each row of the table of models took 20 seconds."""
    answers = ["rtx 3060 12gb", "concept", "", str(clips), ""]
    done = subprocess.run(
        [sys.executable, "-c", COUNT_PRESETS, str(tmp_path / "work")],
        input="\n".join([*answers, ""]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(preset_names()) > 20
    assert done.stdout.splitlines()[-1] == "most 1"


def test_a_run_folder_that_exists_is_not_proposed_again(
    videotune: Run, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.yaml"
    name = tmp_path.name
    proposed = []
    for folder in ("runs/first", "runs/second", "runs/third", f"{name}-1"):
        proposed += [proposed_run(None), proposed_run(config)]
        (tmp_path / folder).mkdir(parents=True)
    assert proposed[::2] == ["runs/first", "runs/second", "runs/third", "runs/run-4"]
    assert set(proposed[1::2]) == {str(tmp_path / f"{name}-1")}
    assert proposed_run(config) == str(tmp_path / f"{name}-2")


def test_status_of_a_new_config_says_what_init_said(
    videotune: Run, clips: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    model = ("--model", "wan 2.1 1.3B LoRA", "--card", "rtx 4090")
    _, _, error = init(videotune, work, clips, *model)
    named = [line.strip() for line in error.partition("next:")[2].splitlines()]
    _, text, _ = videotune("status", work)
    commands = [line.strip() for line in text.partition("next:")[2].splitlines()]
    assert [line for line in commands if line] == [
        line for line in named if line.startswith(("videotune plan", "videotune train"))
    ]
