"""The start page leads to every page, errors are found by their words, messages name a
page that their reader has, and commands of the pages run as they are written.
"""

import re
import shlex
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.docs.test_docs_true import PAGES, blocks, wrong_command
from videotune import pages
from videotune.cli.main import app
from videotune.data.file_checks import REASONS
from videotune.files import read_json
from videotune.pages import docs_page
from videotune.text import REASON_WORDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TROUBLES = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = [line for line in TROUBLES.splitlines() if line.startswith("#")]
GROUPS = ("Tutorials", "How-to", "Reference", "Explanation")


def all_pages() -> set[str]:
    """Every page below docs/, by its path there, and that of the commands."""
    return {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | {
        "commands.md"
    }


def links(page: Path) -> list[str]:
    found = re.findall(
        r"\]\(([\w/-]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")
    )
    return list(dict.fromkeys(found))


def navigation() -> dict[str, list[str]]:
    """The pages of each group of mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)

    def flat(entries: list[object]) -> list[str]:
        names: list[str] = []
        for entry in entries:
            if isinstance(entry, dict):
                for value in entry.values():
                    names += flat(value) if isinstance(value, list) else [value]
            else:
                names.append(str(entry))
        return names

    groups: dict[str, list[str]] = {}
    for entry in config["nav"]:
        for name, value in entry.items():
            groups[name] = flat(value) if isinstance(value, list) else [value]
    return groups


def test_the_start_page_leads_to_every_page_the_studio_first() -> None:
    names = links(DOCS / "index.md")
    assert names[0] == "studio.md"
    assert set(names) == all_pages() - {"index.md"}


def test_every_page_is_in_one_of_four_groups() -> None:
    groups = navigation()
    assert tuple(groups) == ("Home", *GROUPS)
    names = [name for group in GROUPS for name in groups[group]]
    assert sorted(names) == sorted(all_pages() - {"index.md"})


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_for_which_a_clip_is_skipped_has_a_section(reason: str) -> None:
    """Under the words that `check` prints, with the code of its JSON."""
    title = f'"{REASON_WORDS[reason]}" (`{reason}`)'
    assert any(title in heading for heading in HEADINGS)


USUAL_WORDS = (
    "does not fit",
    "out of memory",
    "the Hub is not reached",
    "there is no token",
    "was made for another base",
    "unknown key",
    "no such option",
    "is damaged",
    "is not valid JSON",
    "cannot be written",
    "is being written by",
    "already exists",
    "not a run folder",
    "password",
)
MESSAGES = (ROOT / "tests" / "docs" / "messages.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", USUAL_WORDS)
def test_the_words_of_usual_errors_are_headings(words: str) -> None:
    assert any(f'"{words}"' in heading for heading in HEADINGS)


def test_the_words_are_those_of_messages_that_there_are() -> None:
    """ "unknown key", "no such option" and the like are put together or another
    library's.
    """
    elsewhere = {
        "out of memory",
        "unknown key",
        "no such option",
        "the Hub is not reached",
    }
    for words in set(USUAL_WORDS) - elsewhere:
        assert words.lower() in MESSAGES.lower(), words
    folder = ROOT / "videotune"
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    for words in elsewhere - {"no such option"}:
        assert words.removeprefix("the ") in sources, words


def test_the_table_at_the_top_leads_to_sections() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", heading.strip("# ").lower()).replace(" ", "-")
        for heading in HEADINGS
    }
    targets = re.findall(r"\]\(#([^)]+)\)", TROUBLES)
    assert len(targets) > 8
    assert set(targets) <= anchors


def test_a_message_names_the_published_page_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = docs_page("troubleshooting", "memory")
    assert page == f"{DOCS / 'troubleshooting.md'}#memory", "in a clone, the file"
    for path in sorted((ROOT / "videotune").rglob("*.py")):
        for name in re.findall(r"docs_page\(\s*['\"]([\w-]+)['\"]", path.read_text()):
            assert (DOCS / f"{name}.md").is_file(), (path, name)

    class Installed:
        def get_all(self, name: str) -> list[str]:
            assert name == "Project-URL"
            return [
                "Source, https://example.org/code",
                f"{pages.PUBLISHED}, https://example.org/docs/",
            ]

    monkeypatch.setattr(pages, "metadata", lambda name: Installed())
    assert docs_page("data") == "https://example.org/docs/data/"
    assert docs_page("data", "captions") == "https://example.org/docs/data/#captions"


def test_without_a_clone_and_a_site_a_message_names_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nothing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pages, "metadata", nothing)
    monkeypatch.setattr(pages, "__file__", str(tmp_path / "videotune" / "pages.py"))
    assert docs_page("data").startswith("the page 'data' of videotune's documentation")


def test_messages_do_not_point_into_the_docs_of_a_clone() -> None:
    assert not re.search(r"docs/\w+\.md", MESSAGES)
    for path in (ROOT / "videotune").rglob("*.json"):
        if path.parent.name in ("presets", "config"):
            assert "docs/" not in path.read_text(encoding="utf-8"), path


def test_no_page_argues_with_a_guide() -> None:
    files = [*(ROOT / "videotune" / "presets").glob("*.json"), *DOCS.rglob("*.md")]
    files.append(ROOT / "videotune" / "config" / "advice.json")
    for path in files:
        if path.name != "documents.md":  # it compares published recipes
            assert not re.search(r"\bguide'?s?\b", path.read_text(encoding="utf-8")), (
                path
            )
    assert set(read_json(ROOT / "videotune" / "config" / "advice.json")) == {
        "units",
        "reasons",
        "advice",
    }


# ---- commands as they are written

RUN_HERE = (
    "videotune --version",
    "videotune presets list",
    "videotune presets show",
    "videotune config explain",
    "videotune --help",
)
"""Commands that need neither a network nor files of the reader."""


def written_commands() -> list[str]:
    """The lines of blocks that begin with videotune, without comments; joined where a
    line goes on.
    """
    commands = []
    for page in PAGES:
        text = "\n".join(blocks(page)).replace("\\\n", " ")
        for line in text.splitlines():
            # A description may follow, as a comment or in a column of its own.
            command = re.split(r" #|\s{3,}", line.strip().removeprefix("$ "))[0]
            if command.startswith("videotune ") and not re.search(
                r"[|>…&]|\.\.\.", command
            ):
                commands.append(command)
    return list(dict.fromkeys(commands))


def placeholders(command: str) -> bool:
    return bool(re.search(r"\b[A-Z]{2,}\b(?![a-z0-9_])", command.replace("LoRA", "")))


def test_commands_of_the_pages_parse() -> None:
    """Options exist; words that a command does not take are refused by the parser."""
    commands = written_commands()
    assert len(commands) > 40
    for command in commands:
        assert wrong_command(command) is None, command
        shlex.split(command)


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in written_commands()
        if command.startswith(RUN_HERE) and not placeholders(command)
    ],
)
def test_commands_that_need_nothing_run_as_written(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, (command, result.output)
