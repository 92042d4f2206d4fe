"""What ``check`` prints of sound: for a run that reads it, for one that could, and for
one that cannot.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.sounds import write_sounding_folder
from videotune.cli.data import show_account
from videotune.commands.check import CheckResult, check

PAGE = Path(__file__).parents[2] / "docs" / "schemas" / "check.schema.json"
SOUND_MODEL = "ltx 2.3 LoRA 24GB"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sounding_folder(tmp_path_factory.mktemp("data") / "clips")
    for path in list(folder.iterdir()):
        path.with_suffix(".txt").write_text(f"a thing, {path.stem}")
    return folder


def checked(clips: Path, *settings: str, preset: str = SOUND_MODEL) -> CheckResult:
    sets = ("video_config.frames=25", "resolution=64", *settings)
    return check(preset=preset, data=str(clips), sets=sets)


def printed(result: CheckResult, capsys: Any) -> str:
    capsys.readouterr()
    show_account(result, verbose=True)
    shown = capsys.readouterr()
    return str(shown.out + shown.err)


def test_a_run_that_reads_sound_is_told_how_many_clips_have_it(
    clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = checked(clips, 'generate=["video", "sound"]')
    account = result.account
    assert {"no_sound", "silent_sound"} < set(account["note_codes"])
    assert "unused_sound" not in account["note_codes"]
    assert sorted(bucket["sound"] for bucket in account["buckets"]) == [
        False,
        False,
        True,
    ]
    schema = json.loads(PAGE.read_text())
    assert not list(Draft202012Validator(schema).iter_errors(account))

    text = printed(result, capsys)
    assert "sound: 1 of 4 clips has it" in text
    assert "none.mov" in text
    assert text.count("with sound") == 1


def test_a_run_that_could_read_sound_gets_one_note(
    clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = checked(clips)
    codes = result.account["note_codes"]
    assert [code for code in codes if "sound" in code] == ["unused_sound"]
    text = printed(result, capsys)
    assert text.count("sound") == 2, "the note with its remedy, and nothing else"
    assert "sound: " not in text


def test_a_model_without_sound_says_nothing_of_it(
    clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = checked(clips, preset="toy")
    assert not any("sound" in code for code in result.account["note_codes"])
    assert "sound" not in printed(result, capsys)


def test_only_sound_skips_what_has_none(clips: Path) -> None:
    result = checked(clips, "generate=sound")
    reasons = [clip["reason"] for clip in result.account["clips"]]
    assert sorted(filter(None, reasons)) == ["no_sound"] * 3
    assert result.exit_code == 2
