"""The pages of docs/ as a site: every link and anchor leads somewhere, every page is in
the navigation.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.site_hooks import command_page

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    pages = sorted(
        path.parent.relative_to(tmp_path).as_posix()
        for path in tmp_path.glob("*/**/index.html")
    )
    sources = {
        page.relative_to(ROOT / "docs").with_suffix("").as_posix(): page.read_text(
            encoding="utf-8"
        )
        for page in (ROOT / "docs").rglob("*.md")
    } | {"commands": command_page()}
    assert pages == sorted(set(sources) - {"index"})
    listed = re.findall(r"\]\(([^)]+)\)", (tmp_path / "llms.txt").read_text())
    assert {f"{name}/index.md" for name in pages} | {"index.md", "AGENTS.md"} == set(
        listed
    )
    for name in pages:  # programs read the same words as people
        assert (tmp_path / name / "index.md").read_text(encoding="utf-8") == sources[
            name
        ]
    for page in tmp_path.rglob("*.html"):
        loads = re.findall(
            r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(https?:[^\" >]+)",
            page.read_text(),
        )
        assert [url for url in loads if "canonical" not in url] == [], page
