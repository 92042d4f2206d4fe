"""Pages that everybody can use: axe-core finds nothing, the keyboard reaches
everything, nothing scrolls sideways.
"""

from pathlib import Path

import pytest

from tests.support.browser import make_project, open_studio, violations


def test_pages_without_anything_yet(tmp_path: Path) -> None:
    with open_studio(tmp_path) as (studio, page):
        page.goto(studio.address)
        assert violations(page) == []
        page.goto(f"{studio.address}/design")
        assert violations(page) == []
        page.locator("[data-open=sheet]").click()
        assert violations(page) == []
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        make_project(page, studio.address, "Empty")
        for path in ("data", "setup", "train", "results"):
            page.goto(f"{studio.address}/p/empty/{path}")
            assert violations(page) == []
        page.goto(f"{studio.address}/queue")
        assert violations(page) == []
        page.goto(f"{studio.address}/p/nothing/data")
        assert violations(page) == []


WIDTHS = (390, 768, 1280, 2560)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways(tmp_path: Path, width: int) -> None:
    with open_studio(tmp_path) as (studio, page):
        make_project(
            page,
            studio.address,
            "A project with quite a long name that says what it is about and more",
        )
        (name,) = (
            path.name for path in tmp_path.iterdir() if not path.name.startswith(".")
        )
        page.set_viewport_size({"width": width, "height": 900})
        for path in (
            "/",
            "/queue",
            "/design",
            *(f"/p/{name}/{part}" for part in ("data", "setup", "train", "results")),
        ):
            page.goto(studio.address + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
