"""The pages that programs write (options, commands, families, error texts) are current
and complete.
"""

import re
import subprocess
import sys
from pathlib import Path

import typer

from scripts.site_hooks import command_page
from videotune.cli.main import app
from videotune.config.schema import leaves

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "options.md"


def test_the_page_is_what_its_script_prints() -> None:
    script = ROOT / "scripts" / "write_options.py"
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, check=True, cwd=ROOT
    )
    printed = ran.stdout.decode("utf-8").replace("\r\n", "\n")
    assert PAGE.read_text(encoding="utf-8") == printed, (
        "run: python scripts/write_options.py > docs/options.md"
    )


def test_the_page_of_commands_has_each_command_in_plain_text() -> None:
    page = command_page()
    assert page.startswith("# Commands\n")
    assert re.search(r"&#?\w+;", page) is None
    app_commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in app_commands if f"## `videotune {name}`" not in page] == []
    assert "--allow-skips" in page


def test_error_texts_are_those_of_the_snapshot(tmp_path: Path) -> None:
    """The one place that holds wording; other tests hold classes, codes and the keys
    that an error names.
    """
    written = ROOT / "tests" / "docs" / "messages.txt"
    script = ROOT / "scripts" / "write_messages.py"
    ran = subprocess.run(
        [sys.executable, script, tmp_path / "now.txt"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert written.read_text(encoding="utf-8") == (tmp_path / "now.txt").read_text(
        encoding="utf-8"
    ), ran.stdout


def test_every_key_has_a_row_with_a_meaning() -> None:
    rows = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    assert {len(row) for row in cells} == {4}
    assert [row[0].strip().strip("`") for row in cells] == list(leaves())
    assert all(cell.strip() for row in cells for cell in row)


def test_the_families_of_the_docs_are_those_of_the_specs() -> None:
    script = ROOT / "scripts" / "write_families.py"
    printed = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert printed in page, "run: python scripts/write_families.py"
