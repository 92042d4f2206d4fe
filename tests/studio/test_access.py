"""Pages that everybody can use: axe-core finds nothing, the keyboard reaches
everything, nothing scrolls sideways.
"""

from pathlib import Path

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


def test_no_page_scrolls_sideways(tmp_path: Path) -> None:
    with open_studio(tmp_path) as (studio, page):
        make_project(
            page,
            studio.address,
            "A project with quite a long name that says what it is about and more",
        )
        (name,) = (
            path.name for path in tmp_path.iterdir() if not path.name.startswith(".")
        )
        parts = ("data", "setup", "train", "results")
        project_paths = [f"/p/{name}/{part}" for part in parts]
        for path in ("/", "/queue", "/design", *project_paths):
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                page.goto(studio.address + path)
                scrolled = page.evaluate("document.documentElement.scrollWidth")
                assert scrolled <= width, (path, width)
