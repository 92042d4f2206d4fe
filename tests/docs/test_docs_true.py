"""What the pages name is there: files, tests, commands, keys, presets, packages."""

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from scripts.site_hooks import COMMANDS
from videotune.cli.main import app
from videotune.config.schema import leaves
from videotune.model_spec import ModelSpec
from videotune.planner.gpus import find_card, memory_and_name
from videotune.presets.shipped import preset_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
]
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
PAGE_OF = {
    "trainer": "train",
    "job": "run",
    "runs": "run",
    "latent_cache": "cache",
    "exporter": "export",
    "reporter": "report",
    "cli": "run",
    "commands": "run",
    "presets": "config",
    "assets": "toy",
    "planner": "planning",
    "validation": "monitor",
    "models": "families",
}
"""Packages whose page has another name."""

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OURS = ("videotune/", "tests/", "docs/", "scripts/", "benchmarks/", "research/")


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """What stands in backticks within a sentence or a table."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def blocks(page: Path) -> list[str]:
    """Lines of the blocks of code."""
    return [
        line
        for block in FENCE.findall(page.read_text(encoding="utf-8"))
        for line in block.splitlines()
    ]


def missing_paths(spans: list[str]) -> list[str]:
    """Words that begin with a folder of ours and name nothing; a star stands for
    anything.
    """
    words = [
        word.strip("().,;:")
        for span in spans
        for word in span.split()
        if word.startswith(OURS)
    ]
    return [
        word
        for word in words
        if not list(ROOT.glob(word.partition("::")[0].rstrip("/")))
    ]


def commands() -> dict[str, set[str]]:
    """Each command of the command line, "presets keys" among them, with its options."""

    def walk(command: Any, name: str) -> dict[str, set[str]]:
        options = {
            option for part in command.params for option in getattr(part, "opts", ())
        } | {"--help"}
        found = {name: options}
        for inner in getattr(command, "commands", {}).values():
            found |= walk(inner, f"{name} {inner.name}".strip())
        return found

    return walk(typer.main.get_command(app), "")


def wrong_command(code: str) -> str | None:
    """What is wrong about ``videotune …`` in a piece of code, or None; ``python -m
    videotune.room`` is none of ours.
    """
    known = commands()
    for said in re.findall(
        r"(?:^|(?<=[\s/]))videotune((?: +[^#\n]*)?)$", code, re.MULTILINE
    ):
        words = said.split()
        name = next(
            (
                " ".join(words[:size])
                for size in (2, 1)
                if " ".join(words[:size]) in known
            ),
            "",
        )
        if words and not name and not words[0].startswith("-"):
            return f"there is no command {words[0]!r}"
        if words and name == words[0] and wrong_inner_command(words):
            return f"{name} has no command {words[1]!r}"
        unknown = {
            word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)
        } - known[name]
        if unknown:
            return f"{name or 'videotune'} has no {', '.join(sorted(unknown))}"
    return None


def wrong_inner_command(words: list[str]) -> bool:
    """Whether the second word names no command of the group that is the first word."""
    inner_names = {
        name.split()[1] for name in commands() if name.startswith(f"{words[0]} ")
    }
    if not inner_names or len(words) < 2:
        return False
    is_word = re.fullmatch("[a-z][a-z-]*", words[1]) is not None
    return is_word and words[1] not in inner_names


@EACH
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    relative = [
        link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)
    ]
    missing = [link for link in relative if link and not (page.parent / link).exists()]
    assert set(missing) <= {COMMANDS}


@EACH
def test_files_that_are_named_exist(page: Path) -> None:
    assert missing_paths(spans(page)) == []


@EACH
def test_fields_of_a_checkpoint_s_spec_exist(page: Path) -> None:
    fields = {field.name for field in dataclasses.fields(ModelSpec)} | set(
        dir(ModelSpec)
    )
    named = set(re.findall(r"`spec\.(\w+)", page.read_text()))
    assert named <= fields


@EACH
def test_commands_and_their_options_exist(page: Path) -> None:
    code = [
        *(span for span in spans(page) if span.startswith("videotune ")),
        *blocks(page),
    ]
    assert {piece: wrong for piece in code if (wrong := wrong_command(piece))} == {}

    # Within a sentence the program's name is often left out: `presets list`.
    short = [span for span in spans(page) if len(span.split()) > 1]
    wrong_names = [span for span in short if wrong_inner_command(span.split())]
    assert wrong_names == []


@cache
def names_in(file: str) -> set[str]:
    """The names of a file's tests, without parameters."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_guarantee_names_a_test_that_exists() -> None:
    rows = [
        line
        for line in (DOCS / "guarantees.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and line != "| promise | test and command |"
    ]
    commands = [
        re.search(r"\| `pytest (tests/\S+\.py)::(test_\w+)` \|$", row) for row in rows
    ]
    assert [
        row for row, found in zip(rows, commands, strict=True) if found is None
    ] == []
    named = [(found[1], found[2]) for found in commands if found]
    assert len(named) >= 40
    assert len(set(named)) == len(named)
    assert [(file, name) for file, name in named if not (ROOT / file).is_file()] == []
    assert [(file, name) for file, name in named if name not in names_in(file)] == []


@EACH
def test_tests_are_listed_on_the_page_of_guarantees_only(page: Path) -> None:
    rows = [line for line in prose(page).splitlines() if line.startswith("|")]
    of_tests = [row for row in rows if re.search(r"(?<![\w/])test_\w+`", row)]
    assert page.name == "guarantees.md" or of_tests == []


@EACH
def test_keys_that_are_named_exist(page: Path) -> None:
    """A word such as `lora.rank` or `lora.rank=8`, whose first part is a section of the
    config.
    """
    known = leaves()
    sections = "|".join(
        sorted({name.partition(".")[0] for name in known if "." in name})
    )
    words = {
        word.strip("'\",").partition("=")[0]
        for code in [*spans(page), *blocks(page)]
        for word in code.split()
    }
    named = {
        word for word in words if re.fullmatch(rf"(?:{sections})\.[a-z_]\w*", word)
    }
    assert {
        word
        for word in named - set(known)
        if not word.endswith((".json", ".safetensors"))
    } == set()


def test_every_package_has_a_page_that_the_map_links_to() -> None:
    folders = (path.name for path in (ROOT / "videotune").iterdir() if path.is_dir())
    packages = sorted(name for name in folders if name[0] not in "._")
    links = re.findall(r"\]\((\w+)\.md\)", prose(DOCS / "architecture.md"))
    for package in packages:
        page = PAGE_OF.get(package, package)
        assert (DOCS / f"{page}.md").is_file(), f"{package} has no page"
        assert page in links, f"docs/architecture.md does not lead to {page}.md"


def test_every_preset_and_schema_is_named() -> None:
    assert [
        name for name in preset_names() if name not in spans(DOCS / "config.md")
    ] == []
    index = prose(DOCS / "architecture.md")
    assert [
        path.name
        for path in (DOCS / "schemas").iterdir()
        if f"schemas/{path.name}" not in index
    ] == []


@EACH
def test_each_card_of_a_command_is_one_card(page: Path) -> None:
    code = "\n".join([*blocks(page), *spans(page)])
    for quoted, quoted_once, word in re.findall(
        r"""--card (?:"([^"]+)"|'([^']+)'|([\w-]+))""", code
    ):
        name = quoted or quoted_once or word
        if name != "NAME":
            memory, card = memory_and_name(None, name)
            assert memory or (card and find_card(card))


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("videotune train --out runs/first --resume", None),
        ("videotune presets keys", None),
        ("OMP_NUM_THREADS=1 .venv/bin/videotune --version", None),
        ("videotune presets explain toy", "explain"),
        ("videotune trian --out x", "trian"),
        ("videotune check dataset --out x", "--out"),
    ],
)
def test_a_wrong_command_is_found(code: str, wrong: str | None) -> None:
    found = wrong_command(code)
    assert found is None if wrong is None else wrong in str(found)


def test_a_file_that_is_not_there_is_found() -> None:
    assert (
        missing_paths(
            ["videotune/types.py", "see tests/conftest.py,", "videotune/data/*.py"]
        )
        == []
    )
    nowhere = ["videotune/nowhere.py", "python scripts/none.py"]
    assert missing_paths(nowhere) == ["videotune/nowhere.py", "scripts/none.py"]
