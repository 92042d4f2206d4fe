"""The clips, the config or the run come first; and mistakes are found before a library of
models is imported.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import Bases, Printed, run
from tests.support.run_processes import Make, Work
from tests.support.run_results import of_kind
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.queue import entries

PROGRAM = """
import contextlib, io, json, sys
from videotune.cli.main import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["videotune", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    heavy = {"torch", "diffusers", "transformers", "pandas"} & set(sys.modules)
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(heavy)]))
"""


def refusals(folder: Path, commands: list[list[str]]) -> list[str]:
    """What each command says, in one process that imports nothing heavy meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    messages = []
    for line in done.stdout.splitlines():
        code, out, message, heavy = json.loads(line)
        assert (code, out, heavy) == (1, "", []), message
        messages.append(message)
    assert len(messages) == len(commands)
    return messages


def test_a_misspelt_key_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    commands = [
        ["train", "clips", "--out", "run"],
        ["plan", "clips", "--preset", "toy"],
        ["check", "clips"],
        ["queue", "add", "clips", "--preset", "toy"],
        ["sweep", "clips", "--out", "sweep", "--vary", "steps=1,2"],
        ["cache", "clips", "--preset", "toy"],
        ["resume", "run"],
        ["sample", "run", "--prompt", "a cat"],
    ]
    misspelt = [[*command, "--set", "stepz=20"] for command in commands]
    sentence = "videotune: --set: unknown key 'stepz'; did you mean"
    for command, message in zip(commands, refusals(tmp_path, misspelt), strict=True):
        assert message.startswith(sentence), command
    assert list(tmp_path.iterdir()) == []


def test_so_are_values_presets_and_config_files(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("stepz: 20\n")
    clips = ["train", "clips", "--out", "run"]
    sentences = {
        "steps: ": [*clips, "--set", "steps=many"],
        "there is no preset": [*clips, "--preset", "toi"],
        "ours.yaml: unknown key 'stepz'": ["plan", "ours.yaml"],
        "config file not found: gone.json": ["plan", "--config", "gone.json"],
    }
    messages = refusals(tmp_path, list(sentences.values()))
    for sentence, message in zip(sentences, messages, strict=True):
        assert sentence in message


def test_a_warning_of_an_old_name_is_printed_once(
    tmp_path: Path, small_clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although the config is read twice: once to be checked."""
    config = tmp_path / "old.json"
    datasets = [{"path": str(small_clips)}]
    keys = {"datasets": datasets, "family": "wan", "ruler_after": 10}
    config.write_text(json.dumps(keys))
    assert run("check", config, set=["resolution=32x32"]) == DONE
    assert capsys.readouterr().err.count("is now validate_every") == 1


def test_train_and_queue_take_clips_or_a_config_as_check_and_plan_do(
    overrides: Make, tmp_path: Path, small_clips: Path
) -> None:
    keys = [f"--set={setting}" for setting in overrides("steps=1").sets]
    assert run("train", small_clips, *keys, out=tmp_path / "run") == DONE
    assert of_kind(tmp_path / "run", "end")[0]["why"] == "done"

    config = tmp_path / "ours.json"
    config.write_text(json.dumps({"datasets": [{"path": str(small_clips)}]}))
    queue = tmp_path / "queue"
    assert run("queue", "add", config, *keys, queue=queue) == DONE
    assert run("queue", "add", small_clips, *keys, queue=queue, name="b") == DONE
    for entry in entries.entries(queue):
        settings = read_json(queue / f"{entry.name}.json")
        assert settings["datasets"][0]["path"] == str(small_clips)
    assert [entry.name for entry in entries.entries(queue)] == ["ours", "b"]

    assert run("cache", small_clips, *keys) == DONE
    with pytest.raises(VideotuneError, match="both name the clips"):
        run("check", small_clips, data=small_clips)
    with pytest.raises(VideotuneError, match="both name a config"):
        run("check", config, config=config)


def advised_command(folder: Path) -> str:
    """What a resume of a finished run says to do."""
    with pytest.raises(VideotuneError) as refused:
        run("resume", folder)
    return str(refused.value).partition("To train on: ")[2]


@pytest.mark.parametrize(
    "settings",
    [
        ("steps=2", "learning_rate_scheduler=CONSTANT"),
        ("steps=2", "learning_rate_scheduler=COSINE"),
        ("epochs=0.5", "learning_rate_scheduler=LINEAR"),
    ],
)
def test_the_command_that_trains_a_finished_run_on_is_not_refused(
    settings: tuple[str, ...], work: Work
) -> None:
    """Whatever its schedule is, and whether steps or epochs have set its length."""
    folder = work.copy(*settings)
    before = of_kind(folder, "end")[-1]["step"]
    advised = advised_command(folder)
    assert advised.startswith(f"videotune resume {folder} --set steps={2 * before}")
    override = advised.endswith(" --override")
    assert override == ("CONSTANT" not in settings[1])
    assert run("resume", folder, set=[f"steps={2 * before}"], override=override) == DONE
    assert of_kind(folder, "end")[-1]["step"] == 2 * before


def test_resume_continues_a_run_and_refuses_a_finished_one(work: Work) -> None:
    """With the settings that the run itself has."""
    folder = work.copy("steps=2")
    with pytest.raises(VideotuneError, match=r"is finished: 2 of 2 steps are done\."):
        run("resume", folder)
    assert run("resume", folder, set=["steps=3"], override=True) == DONE
    assert of_kind(folder, "end")[-1]["step"] == 3
    assert run("resume", folder, **{"from": 2}, override=True) == DONE
    assert of_kind(folder, "resume")[-1]["from_step"] == 2
    with pytest.raises(VideotuneError, match="does not exist"):
        run("resume", folder.parent / "none")


def test_settings_of_a_resume_are_judged_beside_those_of_the_run(work: Work) -> None:
    """By itself timestep_alpha would be refused: only BETA has it."""
    folder = work.copy("steps=2", "timestep_distribution=BETA", "timestep_alpha=3")
    changes = ["steps=3", "timestep_alpha=2"]
    for command in (["resume", folder], ["train", "--resume", "--out", folder]):
        with pytest.raises(VideotuneError, match="add --override"):
            run(*command, set=changes)
    assert run("resume", folder, set=changes, override=True) == DONE


def test_a_plan_says_within_a_second_what_takes_longer(
    tiny_bases: Bases, small_clips: Path, capsys: Printed
) -> None:
    """On standard error, so that JSON stays JSON."""
    base = tiny_bases("wan")
    sets = "resolution=32x32"
    assert run("plan", small_clips, base=base, set=sets, as_json=True) == DONE
    printed = capsys.readouterr()
    assert "calculating memory" in printed.err.splitlines()[0]
    assert json.loads(printed.out)["steps"] == 2000
