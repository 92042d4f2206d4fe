"""What somebody who has not seen the studio stumbled over, where only a browser shows it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import NewPage, Studio
from tests.support.clips import moving_dot, write_clip
from videotune.studio import projects


@pytest.fixture
def page(browser_studio: tuple[Studio, NewPage]) -> Iterator[Any]:
    _, new_page = browser_studio
    with new_page() as page:
        page.set_default_timeout(60_000)
        yield page


@pytest.fixture
def home(browser_studio: tuple[Studio, NewPage]) -> projects.Project:
    """A project with a clip that has a caption, and a damaged one."""
    studio, _ = browser_studio
    project = projects.create(studio.root, "Walk", preset="toy", card="RTX 4090")
    clip = project.folder / "clips" / "dot.mp4"
    write_clip(clip, moving_dot([index / 12 for index in range(24)], 60), 12)
    clip.with_suffix(".txt").write_text("a dot\n")
    (project.folder / "clips" / "torn.mp4").write_bytes(clip.read_bytes()[:900])
    return project


def test_the_step_at_a_damaged_clip_leads_to_remove_and_the_message_undoes_it(
    browser_studio: tuple[Studio, NewPage], page: Any, home: projects.Project
) -> None:
    studio, _ = browser_studio
    page.goto(f"{studio.address}/p/{home.name}/data")
    page.locator("#next-step", has_text="Remove 1 clip").click()
    page.locator('#tiles .clip[data-path="clips/torn.mp4"] .btn.led-to').wait_for()
    page.locator(".clip-actions .btn:focus", has_text="Remove").press("Enter")
    page.locator("#undo", has_text="Undo removal of torn.mp4").wait_for()
    assert not (home.folder / "clips/torn.mp4").exists()

    page.locator(".toast .toast-action", has_text="Undo").click()
    page.locator("#redo", has_text="Redo removal of torn.mp4").wait_for()
    assert (home.folder / "clips/torn.mp4").is_file()
    assert (home.folder / "clips/dot.txt").read_text() == "a dot\n"


def test_the_search_of_models_shows_the_sizes_with_all_words(
    browser_studio: tuple[Studio, NewPage], page: Any, home: projects.Project
) -> None:
    studio, _ = browser_studio
    page.goto(f"{studio.address}/p/{home.name}/setup")
    page.locator("[data-open=presets]").first.click()
    page.locator("#preset-find").fill("2.1 1.3B")
    shown = page.locator("#r-gallery .size:visible .size-name:first-child")
    assert shown.all_inner_texts() == [
        "wan 2.1 1.3B LoRA 16GB",
        "wan 2.1 VACE 1.3B LoRA 24GB",
    ]
    page.locator("#preset-find").fill("embedding 2.2")
    assert shown.all_inner_texts() == ["wan 2.2 Embedding"], "in any order"


def test_keys_and_the_toy_button_say_or_do_something_on_pages_without_a_project(
    browser_studio: tuple[Studio, NewPage], page: Any, home: projects.Project
) -> None:
    studio, _ = browser_studio
    page.goto(f"{studio.address}/settings")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.locator(".toast", has_text="No project is open here").wait_for()

    page.goto(f"{studio.address}/p/{home.name}/data")
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.wait_for_url("**/settings?project=*")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_url(f"**/p/{home.name}/train")
