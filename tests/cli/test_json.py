"""Every command takes --json, and what it prints then is one JSON object or list."""

import json
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import run
from videotune import console
from videotune.cli.main import GROUPS, app
from videotune.errors import DONE, SKIPPED


def commands() -> Iterator[tuple[str, Any]]:
    for name, group in {"": app, **GROUPS}.items():
        for one in group.registered_commands:
            yield f"{name} {one.name or one.callback.__name__}".strip(), one.callback


def test_every_command_has_json_but_the_server_and_what_prints_json_anyway() -> None:
    without = {
        name
        for name, command in commands()
        if "as_json" not in signature(command).parameters
    }
    assert without == {"studio", "config schema"}


def test_tables_lines_and_exit_code_of_any_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("presets", "list", as_json=True) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == DONE
    assert {"preset", "model", "trains", "card"} == set(found["tables"]["presets"][0])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.mp4").write_bytes(b"no video")
    assert (
        run("dataset", "split", tmp_path / "in", out=tmp_path / "out", as_json=True)
        == SKIPPED
    )
    assert json.loads(capsys.readouterr().out)["exit_code"] == SKIPPED


def test_without_it_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("presets", "list") == DONE
    with pytest.raises(json.JSONDecodeError):
        json.loads(capsys.readouterr().out)


def test_json_has_no_character_that_a_terminal_obeys(capsys: Any) -> None:
    """Names of files may reverse the line, or hold C1 controls and parts of letters."""
    names = ["a\u202egpj.mp4", "b\x9b31m", "c\x7f", "d\u2028", "e\udcff", "f\U000e0041", "g\u061c", "h\x1b[2J"]  # fmt: skip
    console.print_json({name: name for name in names} | {"é": "中 😀"})
    printed = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert json.loads(printed) == {name: name for name in names} | {"é": "中 😀"}
    assert "中 😀" in printed
