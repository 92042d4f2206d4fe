"""What lies beside the package: container, workflows, recipe and notebook are what
their readers take.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from scripts.site_hooks import command_page

ROOT = Path(__file__).parents[2]


def lint(*words: str) -> None:
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_dockerfile_is_clean_and_copies_what_is_there() -> None:
    lint("hadolint", "Dockerfile")
    text = (ROOT / "Dockerfile").read_text()
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        name
        for line in text.splitlines()
        if line.startswith("COPY ")
        for name in line.split()[1:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    assert "USER 10001" in text


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", ["test.yml", "release.yml"]),
        ("compose-spec", ["compose.yaml"]),
    ],
)
def test_yaml_files_fit_their_schemas(schema: str, files: list[str]) -> None:
    folder = "" if schema == "compose-spec" else ".github/workflows/"
    lint(
        "check-jsonschema",
        "--builtin-schema",
        f"vendor.{schema}",
        *(f"{folder}{name}" for name in files),
    )


def test_the_recipe_calls_options_that_there_are() -> None:
    text = (ROOT / "deploy" / "modal_app.py").read_text()
    ast.parse(text)
    asked = set(re.findall(r'"(--[a-z-]+)"', text))
    assert (
        {"--resume", "--out"} <= asked <= set(re.findall("--[a-z-]+", command_page()))
    )


def test_the_notebook_runs(tmp_path: Path) -> None:
    book = nbformat.read(ROOT / "docs" / "notebooks" / "videotune.ipynb", as_version=4)
    nbformat.validate(book)
    NotebookClient(
        book,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", [])]
    texts = [str(output.get("data", {}).get("text/plain")) for output in shown]
    # a long value is shown in several lines
    assert any("('done', 40" in " ".join(text.split()) for text in texts)
    assert any(
        "<video" in str(output.get("data", {}).get("text/html")) for output in shown
    )
    assert (tmp_path / "videotune-notebook" / "run" / "report.html").is_file()
