"""The dialog that chooses a folder, by keyboard and mouse, from each field of a path."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import open_studio, violations
from tests.support.waiting import wait_until
from videotune.studio import projects

pytestmark = pytest.mark.slow


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.textContent.trim()"))


def here(page: Any) -> str:
    return str(page.locator("#folder-here").get_attribute("data-path"))


def test_a_folder_is_chosen_by_keyboard(tmp_path: Path) -> None:
    root = (tmp_path / "root").resolve()
    root.mkdir()
    project = projects.create(root, "Cats", preset="toy")
    films = root.parent / "films"
    for name in ("autumn", "winter", "spring"):
        (films / name).mkdir(parents=True)
    (films / "clips.zip").write_bytes(b"PK\3\4" + bytes(40))

    with open_studio(root) as (studio, page):
        page.set_default_timeout(60_000)
        page.goto(f"{studio.address}/p/cats/data")
        page.locator("#data-tools summary").click()
        page.locator("[data-open=sources]").click()
        page.locator("#source-path").fill(str(films))
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.locator("#folder-list [data-folder]").first.wait_for()
        wait_until(lambda: focused(page) == "autumn")
        assert violations(page) == []

        page.keyboard.press("ArrowDown")
        assert focused(page) == "spring"
        page.keyboard.press("End")
        assert focused(page).startswith("clips.zip")
        page.keyboard.type("wint")
        page.locator("#folder-list li").filter(has_text="autumn").wait_for(
            state="detached"
        )
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        wait_until(lambda: here(page) == str(films / "winter"))
        page.locator("#folders-find").press("Tab")
        page.keyboard.press("Backspace")
        wait_until(lambda: here(page) == str(films))
        wait_until(lambda: focused(page) == "winter")

        # An empty folder leaves the focus in the search field, from where it goes up too.
        page.keyboard.press("Enter")
        wait_until(lambda: here(page) == str(films / "winter"))
        wait_until(lambda: page.evaluate("document.activeElement.id") == "folders-find")
        page.keyboard.press("Backspace")
        wait_until(lambda: here(page) == str(films))
        wait_until(lambda: focused(page) == "winter")
        page.keyboard.type("x")
        page.keyboard.press("Backspace")
        assert here(page) == str(films), "a letter is taken back, no more"
        page.keyboard.press("ArrowDown")

        # Enter in the search field opens the first hit of what was typed
        page.keyboard.type("autu")
        page.keyboard.press("Enter")
        wait_until(lambda: here(page) == str(films / "autumn"))
        page.locator("#folder-up").click()
        wait_until(lambda: here(page) == str(films))

        page.keyboard.press("Control+Enter")
        page.locator("#folders").wait_for(state="hidden")
        assert page.locator("#source-path").input_value() == str(films)
        assert page.evaluate("document.activeElement.id") == "source-path"
        assert page.locator("#sources").is_visible(), "the dialog below stays open"

        page.locator("#sources [data-browse]").click()
        page.locator("[data-file]").click()
        page.locator("#folders").wait_for(state="hidden")
        assert page.locator("#source-path").input_value() == str(films / "clips.zip")

        # a field of Setup saves what was chosen; Escape closes the dialog alone
        page.goto(f"{studio.address}/p/cats/setup#f-prior_preservation")
        page.locator('[data-browse="f-prior_preservation"]').click()
        page.locator("#folder-here").wait_for()
        page.keyboard.press("Escape")
        page.locator("#folders").wait_for(state="hidden")
        page.locator('[data-browse="f-prior_preservation"]').click()
        page.locator("#folders [data-folder]", has_text="Projects").click()
        wait_until(lambda: here(page) == str(root))
        page.locator("#folders-choose").click()
        wait_until(
            lambda: projects.draft(project).get("prior_preservation") == str(root)
        )


def test_a_visitor_chooses_below_the_root(tmp_path: Path) -> None:
    projects.create(tmp_path, "Cats", preset="toy")
    with open_studio(tmp_path, "a password") as (studio, page):
        page.set_default_timeout(60_000)
        page.goto(f"{studio.address}/login")
        page.locator("[name=password]").fill("a password")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{studio.address}/")
        page.goto(f"{studio.address}/settings")
        page.locator("#comfyui").fill("/etc")
        page.locator("[data-browse]").click()
        page.locator("#folders-body [role=alert]").wait_for()
        assert page.locator("#folders-choose").is_disabled()
        page.locator("#folders [data-folder]", has_text="Projects").click()
        page.locator(".folder-entry", has_text="cats").wait_for()
        assert page.locator("#folder-up").count() == 0, (
            "there is nothing above the root"
        )
