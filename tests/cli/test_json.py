"""All commands but a server and what prints JSON anyway take --json, and print one JSON
object or list then.
"""

import json
import tracemalloc
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command_line import run
from videotune import console, files
from videotune.cli.main import GROUPS, app
from videotune.data.clip_table import MappedRows
from videotune.errors import DONE, SKIPPED
from videotune.latent_cache.store import LatentCache


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
    row = found["tables"]["presets"][0]
    assert set(row) == {"preset", "model", "card", "download"}
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


@pytest.mark.parametrize("to", ["the screen", "a file"])
def test_rows_that_are_made_one_by_one_are_never_all_in_memory(
    to: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The account of a large set has a row for each clip, on the disk."""
    rows = MappedRows(range(4000), lambda number: f"{number} é " * 500)
    value = {"none": MappedRows([], str), "clips": rows, "notes": ["a"]}
    tracemalloc.start()
    if to == "a file":
        files.write_json(tmp_path / "check.json", value)
    else:
        console.print_json(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    expected = json.dumps(
        value | {"none": [], "clips": list(rows)}, indent=2, ensure_ascii=False
    )
    written = capfd.readouterr().out
    if to == "a file":
        written = (tmp_path / "check.json").read_text(encoding="utf-8")
    assert written == f"{expected}\n"
    assert len(expected) > 1e7
    assert peak < 3e6


def setting(**values: Any) -> list[str]:
    return [f"--set={key.replace('__', '.')}={value}" for key, value in values.items()]


COMMANDS = {
    "doctor": lambda _: ["doctor"],
    "presets list": lambda _: ["presets", "list"],
    "presets keys": lambda _: ["presets", "keys"],
    "config explain": lambda _: ["config", "explain", "lora.rank"],
    "check": lambda one: ["check", str(one.clips), *setting(resolution="32x32")],
    "plan": lambda one: ["plan", str(one.clips), "--base", str(one.base), *one.settings],
    "cache ls": lambda one: ["cache", "ls", str(one.tmp)],
    "queue add": lambda one: [
        "queue", "add", "--queue", str(one.tmp / "q"), "--name", "a",
        "--data", str(one.clips), "--base", str(one.base), *one.settings,
    ],
    "queue ls": lambda one: ["queue", "ls", "--queue", str(one.tmp / "q")],
    "tiny": lambda one: ["tiny", "wan", str(one.tmp / "tiny")],
    "lora inspect": lambda one: ["lora", "inspect", str(one.lora)],
    "train": lambda one: [
        "train", "--data", str(one.clips), "--base", str(one.base),
        "--out", str(one.tmp / "run"), *one.settings,
    ],
}  # fmt: skip
"""Commands with what they need."""


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_is_one_json_value(
    name: str,
    capfd: pytest.CaptureFixture[str],
    small_clips: Path,
    tiny_bases: Any,
    tmp_path: Path,
) -> None:
    settings = setting(
        resolution="32x32", video_config__frames=5, steps=1, samples=0,
        sample_metrics__budget=0, validate_every=0,
    )  # fmt: skip
    lora = tmp_path / "lora.safetensors"
    module = "transformer.blocks.0.attn1.to_q"
    save_file(
        {
            f"{module}.lora_A.weight": torch.ones(2, 24),
            f"{module}.lora_B.weight": torch.ones(24, 2),
        },
        lora,
    )
    things = SimpleNamespace(
        clips=small_clips, base=tiny_bases("wan"), tmp=tmp_path, lora=lora, settings=settings
    )  # fmt: skip
    store = LatentCache(tmp_path)
    with store.write_lock():
        store.put("text", "k", {"text": torch.zeros(1)}, {"caption": "a"})
    assert run(*COMMANDS[name](things), as_json=True) in (DONE, SKIPPED)
    printed = capfd.readouterr().out
    assert isinstance(json.loads(printed), dict | list)
