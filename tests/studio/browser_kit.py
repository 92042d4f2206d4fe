"""A studio as its own process, and a real browser in front of it."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "no Chromium on PATH: `apt-get install chromium` (or your system's own), and the studio's tests run in it"
WAIT = 240_000
"""Milliseconds that anything may take on a machine that others use."""


def browser_path() -> str:
    """Where the browser is; without one the tests are skipped, or fail where VIDEOTUNE_BROWSER says that it is required."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("VIDEOTUNE_BROWSER") == "required":
            pytest.fail(INSTALL)
        pytest.skip(INSTALL)
    return found


class Studio:
    """A server that can be ended and begun again at the same address."""

    def __init__(self, root: Path, password: str | None = None) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.root, self.address, self.password = root, f"http://127.0.0.1:{self.port}", password
        self.begin()

    def begin(self) -> None:
        """Start the process and wait until it answers."""
        words = [sys.executable, "-m", "videotune", "studio", "--root", str(self.root), "--port", str(self.port)]
        locked = {"VIDEOTUNE_STUDIO_PASSWORD": self.password} if self.password else {}
        self.process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1", **locked})
        end = time.monotonic() + WAIT / 1000
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/static/studio.js", timeout=5).read()
                return
            except OSError:
                assert time.monotonic() < end, "the studio did not begin"
                assert self.process.poll() is None, "the studio ended at once"
                time.sleep(0.3)

    def end(self) -> None:
        """End the process as a Ctrl-C would."""
        self.process.terminate()
        assert self.process.wait(60) == 0


@contextmanager
def opened(root: Path) -> Iterator[tuple[Studio, Any]]:
    """A studio and a page in a browser of 1280 pixels, whose errors fail the test and whose questions are agreed to."""
    from playwright.sync_api import sync_playwright

    path = browser_path()
    errors: list[str] = []
    outside: list[str] = []
    studio = Studio(root)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=WAIT)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(WAIT)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("dialog", lambda dialog: dialog.accept())
            page.on("request", lambda asked: outside.append(asked.url) if foreign(asked.url) else None)
            yield studio, page
            browser.close()
        assert errors == []
        assert outside == [], "the page asks nobody else for anything"
    finally:
        studio.end()


def foreign(url: str) -> bool:
    """Whether an address is neither this computer's nor one that stands for data of the page itself."""
    return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))


def go(page: Any, name: str) -> None:
    """Open a page of the studio by its tab."""
    page.get_by_role("tab", name=name).click()


def make_project(page: Any, address: str, title: str) -> None:
    """A new project, as a person makes one."""
    page.goto(address)
    page.locator("#new-title").fill(title)
    page.locator("#new-make").click()
    page.wait_for_url("**tab=data**")
    page.locator("#upload input[type=file]").wait_for(state="attached")


def upload(page: Any, files: list[Path]) -> str:
    """Send files; returns what the page says of them."""
    page.locator("#upload input[type=file]").set_input_files([str(path) for path in files])
    page.locator("#upload-told p.done").wait_for()
    return str(page.locator("#upload-told").inner_text())


def put(page: Any, key: str, value: str) -> None:
    """Type into a field of the form and leave it; it has been saved when this returns."""
    field = page.locator(f'[id="f-{key}"]')
    field.fill(value)
    field.press("Tab")
    page.locator(f'.field:has([id="f-{key}"]) .said').filter(has_text="saved").wait_for()
