"""A command that videotune prints can be copied: what it inserts is quoted for a shell."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import videotune
from videotune.text import as_argument

PACKAGE = Path(videotune.__file__).parent

COMMANDS = (
    "autopsy|cache|caption|check|compare|config|dataset|doctor|download|export|import|init"
    "|lora|plan|presets|publish|queue|report|resume|sample|status|studio|sweep|tiny|train"
    "|wait"
)
BEGIN = re.compile(rf"videotune (?:{COMMANDS})\b")

END = re.compile(r"[`;]|\. |[:] |\)|, (?![A-Z-])| shows| says| writes| lists| reads")
"""What ends a command within a sentence."""

QUOTING = ("as_argument", "quote", "join")

NO_PATHS = {
    "name",  # a format or a name of a job, checked when it is given
    "subcommand",
    "options",
    "run_options",
    "step",
    "best['step']",
    "2 * steps",
    "third",
    "repo",
}
"""Inserted values that are numbers, names of ours, or options."""


def strings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.JoinedStr]]:
    """Each f-string with the function that it is in."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.JoinedStr):
                    yield function, node


def inserted(text: ast.JoinedStr) -> Iterator[ast.expr]:
    """The values that an f-string inserts into a command."""
    is_command = False
    for value in text.values:
        if isinstance(value, ast.Constant):
            *_, rest = BEGIN.split(str(value.value))
            begins = BEGIN.search(str(value.value)) is not None
            is_command = (begins or is_command) and END.search(rest) is None
        elif isinstance(value, ast.FormattedValue) and is_command:
            yield value.value


def is_quoted(value: ast.AST) -> bool:
    """Whether an expression is a call that quotes for a shell."""
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else value.func
    return (name if isinstance(name, str) else ast.unparse(name)) in QUOTING


def quoted_names(function: ast.AST) -> set[str]:
    """The names to which a function assigns only what is quoted."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_quoted(node.value):
            names |= {ast.unparse(target) for target in node.targets}
    return names


def unquoted(source: str) -> list[str]:
    """The values in commands of a module that a space would break."""
    found = []
    for function, text in strings(ast.parse(source)):
        quoted = quoted_names(function)
        for value in inserted(text):
            name = ast.unparse(value)
            if not (is_quoted(value) or name in quoted or name in NO_PATHS):
                found.append(f"{name} in {ast.unparse(text)}")
    return found


def test_every_path_in_a_printed_command_is_quoted() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for fault in unquoted(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(PACKAGE)}: {fault}")
    assert found == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ('f"do: videotune check {folder} --verbose"', 1),
        ('f"{x}: videotune doctor {run.folder} --repair and {y}"', 2),
        ('f"videotune resume {as_argument(run)}; see {report}"', 0),
        ('f"`videotune resume` of {run}"', 0),
    ],
)
def test_the_search_finds_what_a_space_breaks(line: str, count: int) -> None:
    source = f"def text(run):\n    return {line}\n"
    assert len(unquoted(source)) == count


def test_an_argument_is_quoted_only_if_it_has_to_be() -> None:
    assert as_argument(Path("runs/first")) == "runs/first"
    assert as_argument(Path("odd clips")) == "'odd clips'"
