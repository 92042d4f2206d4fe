"""Damaged files below the studio's pages: each page and each other project is there,
and what is wrong is said in words.

More of them: ``VIDEOTUNE_FUZZ=4000 pytest tests/fuzz``.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.damaged_files import limited
from tests.support.studio_fuzz import (
    COUNT,
    EACH,
    EXPORTED,
    OWN,
    PRESET,
    QUEUE,
    damaged_file,
    damaged_texts,
    encode_file,
)
from videotune import files
from videotune.studio import projects, web

SECONDS = 10.0
"""Time that all pages together may take; a hundred times of what they should."""

FACTS = "project.json"

FILES = {
    name: EXPORTED[name] for name in EXPORTED if not name.endswith((".mp4", ".txt"))
}
FILES |= OWN
FILES |= {f".queue/{name}": value for name, value in QUEUE.items()}
FILES["presets/p.json"] = PRESET
PAGES = settings(EACH, max_examples=COUNT // 3)
"""Each of them is looked at on eight pages."""

CHOICES = [name for name in FILES if not name.endswith(".jsonl")]


class Pages:
    """A studio whose pages are looked at, each time with a project of another name: the
    server remembers what it has read by the path.
    """

    def __init__(self, root: Path, client: Any, unexpected: list[Exception]) -> None:
        self.root, self.client, self.unexpected = root, client, unexpected
        self.number = 0
        for file, value in (FILES | {"clips/a.mp4": EXPORTED["clips/a.mp4"]}).items():
            self._path(file).parent.mkdir(parents=True, exist_ok=True)
            self._path(file).write_bytes(encode_file(file, value))

    @property
    def name(self) -> str:
        """The name of the project."""
        return f"cats-{self.number}"

    def _path(self, file: str) -> Path:
        is_shared = file.startswith((".queue/", "presets/"))
        return (self.root if is_shared else self.root / self.name) / file

    @contextlib.contextmanager
    def project(self, files: dict[str, bytes]) -> Iterator[str]:
        """The name of the project, with these contents in place of some files."""
        old = self.root / self.name
        self.number += 1
        home = self.root / self.name
        old.rename(home)
        for marker in home.glob("jobs/*/settled"):
            marker.unlink()

        files = {
            ".queue/queue.json": encode_file("", FILES[".queue/queue.json"])
        } | files
        for file, content in files.items():
            content = content.replace(b"/root/cats", str(home).encode())
            self._path(file).write_bytes(content)
        os.utime(self._path(".queue/jobs/000001-train/rc.json"))
        try:
            yield self.name
        finally:
            for file in files:
                self._path(file).write_bytes(encode_file(file, FILES[file]))

    def look(self, name: str, *, is_readable: bool) -> None:
        """Look at everything; AssertionError if anything else than the one is closed."""
        for page in ("data", "setup", "train", "results"):
            code = self.get(f"/p/{name}/{page}")
            assert code == 200 or (code == 404 and not is_readable)
        for address in ("/", "/queue", "/p/dogs/data"):
            assert self.get(address) == 200
        if is_readable:
            answer = self.client.get(f"/p/{name}/series?run=run-1")
            assert answer.status_code == 200, answer.text
            json.loads(answer.text, parse_constant=pytest.fail)
        assert not self.unexpected, repr(self.unexpected)

    def get(self, address: str) -> int:
        """The status of an address, as a browser gets it."""
        headers = {"accept": "text/html", "hx-request": ""}
        return int(self.client.get(address, headers=headers).status_code)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    from starlette.testclient import TestClient

    from videotune.studio import clips, plan_server, queue_page
    from videotune.studio.app import make_app

    root = tmp_path_factory.mktemp("studio")
    projects.create(root, "Dogs", preset="toy")
    unexpected: list[Exception] = []

    def note(error: Exception) -> str:
        unexpected.append(error)
        return "?"

    def answer(out: Path, question: Any) -> dict[str, Any]:
        state = {"current": True, "measuring": False, "computing": False}
        return {**plan_server.read_answer(out), **state}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_page, "ensure_worker", lambda root: None)
        patch.setattr(clips, "start_check", lambda project: False)
        patch.setattr(plan_server, "request_answer", answer)
        patch.setattr(web, "describe_unexpected", note)
        patch.setattr(files, "sync_file", lambda *_: None)
        app = make_app(root, "127.0.0.1", None)
        home = "http://127.0.0.1:7860"
        with TestClient(app, base_url=home, raise_server_exceptions=True) as client:
            yield Pages(root, client, unexpected)


def is_readable(pages: Pages, name: str) -> bool:
    """Whether the file that makes the folder a project can be read."""
    try:
        projects.find_project(pages.root, name)
    except (ValueError, OSError):
        return False
    return True


def try_files(pages: Pages, files: dict[str, bytes]) -> None:
    pages.unexpected.clear()
    with (
        pages.project(files) as name,
        limited(SECONDS),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        pages.look(name, is_readable=is_readable(pages, name))


def test_whole_files_are_shown(pages: Pages) -> None:
    try_files(pages, {})
    with pages.project({}) as name:
        for page, words in (
            ("data", "a.mp4"),
            ("setup", "Your presets"),
            ("train", "run-1"),
            ("results", "a cat"),
        ):
            text = pages.client.get(f"/p/{name}/{page}").text
            assert words in text


@PAGES
@given(data=st.data())
def test_one_damaged_file_closes_no_page(pages: Pages, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(CHOICES))
    content = data.draw(damaged_file(FILES[name]))
    try_files(pages, {name: content})


@PAGES
@given(data=st.data())
def test_one_damaged_line_of_a_journal_closes_no_page(
    pages: Pages, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(("runs/run-1/journal.jsonl", "history.jsonl")))
    lines = [encode_file("", line) for line in FILES[name]]
    number = data.draw(st.integers(0, len(lines) - 1))
    lines[number] = data.draw(damaged_texts(FILES[name][number]))
    try_files(pages, {name: b"\n".join(lines) + b"\n"})
