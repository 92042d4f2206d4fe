"""A studio as its own process, and a real browser in front of it."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "no Chromium on PATH: `apt-get install chromium` (or your system's own), and the studio's tests run in it"
WAIT = 240_000
"""Milliseconds that anything may take on a machine that others use."""


def browser_path() -> str:
    """Where the browser is; without one the tests are skipped, or fail where
    VIDEOTUNE_BROWSER says that it is required.
    """
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
        self.root, self.address, self.password = (
            root,
            f"http://127.0.0.1:{self.port}",
            password,
        )
        self.begin()

    def begin(self) -> None:
        """Start the process and wait until it answers."""
        words = [
            sys.executable,
            "-m",
            "videotune",
            "studio",
            "--root",
            str(self.root),
            "--port",
            str(self.port),
        ]
        locked = {"VIDEOTUNE_STUDIO_PASSWORD": self.password} if self.password else {}
        self.process = subprocess.Popen(
            words, env={**os.environ, "OMP_NUM_THREADS": "1", **locked}
        )
        end = time.monotonic() + WAIT / 1000
        while True:
            try:
                urllib.request.urlopen(
                    f"{self.address}/static/studio.js", timeout=5
                ).read()
                return
            except OSError:
                assert time.monotonic() < end, "the studio did not begin"
                assert self.process.poll() is None, "the studio ended at once"
                time.sleep(0.1)

    def end(self) -> None:
        """End the process as a Ctrl-C would."""
        self.process.terminate()
        assert self.process.wait(60) == 0


NewPage = Callable[[], AbstractContextManager[Any]]


@contextmanager
def started_studio(
    root: Path, password: str | None = None
) -> Iterator[tuple[Studio, NewPage]]:
    """A studio, and pages in one browser.

    Each page has a profile of its own and is 1280 pixels wide. A test fails if its page
    has reported an error.
    """
    from playwright.sync_api import sync_playwright

    path = browser_path()
    studio = Studio(root, password)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=path, args=["--no-sandbox"], timeout=WAIT
            )
            yield studio, lambda: page_of(browser)
            browser.close()
    finally:
        studio.end()


@contextmanager
def page_of(browser: Any) -> Iterator[Any]:
    """A page in a profile of its own; the test fails if the page reports an error."""
    errors: list[str] = []
    outside: list[str] = []
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, reduced_motion="reduce"
    )
    context.on(
        "request",
        lambda asked: (
            outside.append(asked.url) if is_foreign_address(asked.url) else None
        ),
    )
    context.on("page", lambda page: watched(page, errors))
    yield context.new_page()
    context.close()
    assert errors == [], str(errors)
    assert outside == [], "the page asks nobody else for anything"


@contextmanager
def open_studio(
    root: Path, password: str | None = None
) -> Iterator[tuple[Studio, Any]]:
    """A studio and one page in a browser."""
    with started_studio(root, password) as (studio, new_page), new_page() as page:
        yield studio, page


def watched(page: Any, errors: list[str]) -> None:
    """Collect the errors of a page, those of its Content-Security-Policy too."""
    page.set_default_timeout(WAIT)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda line: (
            errors.append(line.text) if "Content Security Policy" in line.text else None
        ),
    )


def is_foreign_address(url: str) -> bool:
    """Whether an address is neither this computer's nor one that stands for data of the
    page itself.
    """
    return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))


def open_page(page: Any, name: str) -> None:
    """Open a page of the studio by its link."""
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name).click()
    page.wait_for_load_state()


def make_project(page: Any, address: str, title: str, preset: str = "toy") -> None:
    """A new project of a preset, as a person makes one."""
    page.goto(address)
    page.locator("[data-open=new]").first.click()
    page.locator("#new-title").fill(title)
    page.locator(f'#new-models input[value="{preset}"]').check()
    page.locator("#new-make").click()
    page.wait_for_url("**/data")


def violations(page: Any) -> list[str]:
    """What axe-core finds wrong with the page as it stands, in both themes."""
    from axe_playwright_python.base import AXE_FILE_PATH

    if not page.evaluate("'axe' in window"):
        page.evaluate(
            Path(AXE_FILE_PATH).read_text(encoding="utf-8")
        )  # by the debugger, which no policy of the page stops
    found = []
    for theme in ("light", "dark"):
        page.evaluate(
            "(theme) => { document.documentElement.dataset.theme = theme; }", theme
        )
        for one in page.evaluate("axe.run().then((found) => found.violations)"):
            places = [str(node["target"]) for node in one["nodes"][:4]]
            found.append(
                f"{theme} {page.url}: {one['id']}: {one['help']}: {', '.join(places)}"
            )
    return found


class HeldRequests:
    """The page's requests to an address, which do not arrive before they are released."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.waiting: list[Any] = []
        page.route(address, self._take)

    def _take(self, route: Any) -> None:
        self.waiting.append(route)

    def wait(self) -> None:
        """Wait until a request is held."""
        while not self.waiting:
            self.page.wait_for_timeout(50)

    def release(self) -> None:
        """Let the held requests arrive, and those that come later.

        Later ones must not need this process: a test that waits for a file answers no
        request of the browser meanwhile.
        """
        while self.waiting:
            self.waiting.pop(0).continue_()
        self.page.unroute(self.address, self._take)
