"""Takes pictures of the studio's pages, in both themes and at three widths.

Use: python scripts/studio_pictures.py ROOT PROJECT [OUT]. ROOT is a folder of projects,
PROJECT one with a run that has ended. The pictures go to docs/pictures/studio. It needs
Chromium.
"""

import shutil
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

WIDTHS = (390, 1280, 2560)
THEMES = ("light", "dark")
HEIGHT = 900

PAGES = {
    "projects": ("/", ""),
    "data": ("/p/{project}/data", ""),
    "clip": ("/p/{project}/data", ".clip-open"),
    "captions": ("/p/{project}/data", "[data-open=edit-captions]"),
    "setup": ("/p/{project}/setup", ""),
    "presets": ("/p/{project}/setup", "[data-open=presets]"),
    "train": ("/p/{project}/train", ""),
    "results": ("/p/{project}/results", ""),
    "queue": ("/queue", ""),
    "settings": ("/settings", ""),
    "design": ("/design", ""),
}
"""Each picture by its name: the address, and what is clicked there."""


def take_pictures(
    page: Any, address: str, project: str, out: Path, widths: tuple[int, ...] = WIDTHS
) -> list[Path]:
    """Pictures of every page; returns their files."""
    out.mkdir(parents=True, exist_ok=True)
    taken = []
    for name, (path, button) in PAGES.items():
        for width in widths:
            page.set_viewport_size(
                {"width": width, "height": HEIGHT if width < 2000 else 1440}
            )
            page.goto(address + path.format(project=project))
            if button:
                page.locator(button).first.click()
            page.wait_for_timeout(1500)
            for theme in THEMES:
                page.evaluate(
                    "(theme) => { document.documentElement.dataset.theme = theme; }",
                    theme,
                )
                page.evaluate("document.dispatchEvent(new CustomEvent('vt:theme'))")
                page.wait_for_timeout(300)
                picture = Image.open(BytesIO(page.screenshot()))
                taken.append(out / f"{name}-{theme}-{width}.webp")
                picture.save(taken[-1], quality=72, method=6)
    return taken


def main() -> None:
    """Start a studio and take the pictures."""
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.browser import Studio

    root, project, *out = sys.argv[1:]
    studio = Studio(Path(root))
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            page = browser.new_page(reduced_motion="reduce")
            place = (
                Path(out[0])
                if out
                else Path(__file__).parents[1] / "docs" / "pictures" / "studio"
            )
            for path in take_pictures(page, studio.address, project, place):
                print(path)
    finally:
        studio.end()


if __name__ == "__main__":
    main()
