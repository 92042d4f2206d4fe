"""mkdocs hooks: the page of commands, each page's Markdown beside its HTML, and
llms.txt, the list of them for programs.
"""

import html
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from videotune.pages import PUBLISHED

ROOT = Path(__file__).parents[1]
COMMANDS = "commands.md"
"""The page that is made from the command line and is not kept in docs/."""


def on_config(config: Any) -> Any:
    """Take the site's address from pyproject.toml, where messages have it from too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config.site_url = project["project"].get("urls", {}).get(PUBLISHED)
    return config


@cache
def command_page() -> str:
    """Return the Markdown of all commands with their options, as typer writes it."""
    words = ["utils", "docs", "--name", "videotune", "--title", "Commands"]
    printed = subprocess.run(
        [sys.executable, "-m", "typer", "videotune.cli.main", *words],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    # typer escapes texts as for HTML, also those that Markdown shows as they are.
    return html.unescape(printed).strip() + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands."""
    files.append(File.generated(config, COMMANDS, content=command_page()))
    return files


def on_post_build(config: Any) -> None:
    """Write each page's source to PAGE/index.md, and llms.txt."""
    site = Path(config["site_dir"])
    docs = Path(config["docs_dir"])
    sources = {
        page.relative_to(docs).with_suffix("").as_posix(): page.read_text("utf-8")
        for page in docs.rglob("*.md")
    }
    sources[Path(COMMANDS).stem] = command_page()

    lines = [
        f"# {config['site_name']}",
        "",
        f"> {config['site_description']}",
        "",
        "## Docs",
        "",
    ]
    for name, text in sorted(sources.items()):
        target = site / "index.md" if name == "index" else site / name / "index.md"
        if target.parent.is_dir():
            target.write_text(text, encoding="utf-8")
            title = next(
                line[2:] for line in text.splitlines() if line.startswith("# ")
            )
            lines.append(f"- [{title}]({target.relative_to(site).as_posix()})")

    agents = docs.parent / "AGENTS.md"
    (site / "AGENTS.md").write_text(
        agents.read_text(encoding="utf-8"), encoding="utf-8"
    )
    lines.append("- [For programs that drive videotune](AGENTS.md)")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
