"""The same command begins a run, goes on with it, and leaves what is finished or foreign
alone.
"""

import signal
from pathlib import Path

import pytest

from tests.support.command_line import run as command
from tests.support.run_processes import KILLED, Make, start
from tests.support.run_results import listing, steps_of
from videotune.commands.train import train
from videotune.errors import VideotuneError
from videotune.files import read_json, write_json
from videotune.job.overrides import Overrides
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import read_journal


@pytest.fixture
def settings(overrides: Make) -> Overrides:
    return overrides("steps=6", "save_every=2")


def test_the_same_command_begins_goes_on_and_ends(
    overrides: Make, tmp_path: Path
) -> None:
    settings = overrides("steps=60", "save_every=2")
    run = tmp_path / "run"
    process = start(settings, run, "--auto-resume")
    process.until(lambda: complete_checkpoints(run), "a checkpoint")
    process.send(signal.SIGKILL)
    assert process.ended() == KILLED
    kept = complete_checkpoints(run)[-1].step

    result = train(settings, run, auto_resume=True)
    assert (result.why, result.step) == ("done", 60)
    assert [line["step"] for line in steps_of(run)] == list(range(1, 61))
    (line,) = [line for line in read_journal(run) if line["kind"] == "resume"]
    assert (line["from_step"], line["restarted"]) == (kept, True)

    before = listing(run)
    result = train(settings, run, auto_resume=True)
    assert (result.why, result.step, result.exit_code) == ("done", 60, 0)
    assert listing(run) == before


def test_settings_that_were_changed_by_hand_stay(
    settings: Overrides, tmp_path: Path
) -> None:
    """The first command says nothing of what a resume has changed since."""
    run = tmp_path / "run"
    train(settings, run)
    train(
        Overrides(sets=("steps=8", "save_every=3")),
        run,
        resume=True,
    )
    config = read_json(run / "config.json")
    assert config["settings"]["save_every"] == 3
    result = train(settings, run, auto_resume=True)
    assert (result.why, result.step) == ("done", 8)
    assert read_json(run / "config.json")["command"] == config["command"]


@pytest.mark.parametrize("other", ["learning_rate=0.5", "save_every=3"])
def test_a_run_of_another_command_is_refused(
    other: str, settings: Overrides, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(settings, run)
    before = listing(run)
    foreign = Overrides(data=settings.data, sets=(*settings.sets, other))
    with pytest.raises(VideotuneError, match="another command"):
        train(foreign, run, auto_resume=True)
    with pytest.raises(VideotuneError, match="already holds a run"):
        train(settings, run)
    assert listing(run) == before


def test_a_run_that_names_no_command_is_refused(
    settings: Overrides, tmp_path: Path
) -> None:
    """An earlier version began it."""
    run = tmp_path / "run"
    train(settings, run)
    config = read_json(run / "config.json")
    del config["command"]
    write_json(run / "config.json", config)
    with pytest.raises(VideotuneError, match="another command"):
        train(settings, run, auto_resume=True)


def test_resume_and_auto_resume_exclude_each_other(
    settings: Overrides, tmp_path: Path
) -> None:
    with pytest.raises(VideotuneError, match="--auto-resume"):
        command("train", settings.data, out=tmp_path, resume=True, auto_resume=True)
