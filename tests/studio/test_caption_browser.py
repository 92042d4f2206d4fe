"""Captions written one after another in a real browser: a caption that somebody else
has changed is asked about wherever its clip is shown, and the tiles stay where they are.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import HeldRequests, NewPage, Studio
from tests.support.clips import write_clip
from tests.support.waiting import wait_until
from videotune.studio import projects

NAMES = ("ant", "bee", "cat", "dog")


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    generator = np.random.default_rng(0)
    for name in NAMES:
        write_clip(
            folder / f"{name}.mp4",
            generator.integers(0, 255, (24, 64, 96, 3), dtype=np.uint8),
            12,
        )
    return folder


@pytest.fixture
def home(browser_studio: tuple[Studio, NewPage], films: Path) -> projects.Project:
    """A project of four clips; the first two have captions."""
    studio, _ = browser_studio
    project = projects.create(studio.root, "Animals", preset="toy")
    for path in films.iterdir():
        (project.folder / "clips" / path.name).write_bytes(path.read_bytes())
    for name in NAMES[:2]:
        (project.folder / "clips" / f"{name}.txt").write_text(f"the {name} runs\n")
    return project


@pytest.fixture
def page(
    browser_studio: tuple[Studio, NewPage], home: projects.Project
) -> Iterator[Any]:
    studio, new_page = browser_studio
    with new_page() as page:
        page.goto(f"{studio.address}/p/{home.name}/data")
        page.locator("#counts .checked").wait_for()
        yield page


def tile(page: Any, name: str) -> Any:
    return page.locator(f'#tiles .clip[data-path="clips/{name}.mp4"]')


def title(page: Any, name: str) -> Any:
    return page.locator("#player-title", has_text=f"{name}.mp4")


def test_a_conflict_is_asked_about_after_the_player_has_gone_on(
    page: Any, home: projects.Project
) -> None:
    ant = home.folder / "clips/ant.txt"
    tile(page, "ant").locator(".clip-open").click()
    title(page, "ant").wait_for()
    ant.write_text("theirs\n")
    held = HeldRequests(page, "**/data/caption")
    page.locator("#player-text").fill("mine")
    page.locator("#player-text").press("Control+Enter")
    title(page, "bee").wait_for()
    page.locator("#player-text").fill("a bee that sleeps")
    held.wait()
    held.release()

    title(page, "ant").wait_for()
    conflict = page.locator("#player .conflict:visible")
    assert conflict.locator("blockquote").inner_text() == "theirs"
    assert page.locator("#player-text").input_value() == "mine"
    assert ant.read_text() == "theirs\n"
    bee = home.folder / "clips/bee.txt"
    wait_until(lambda: bee.read_text() == "a bee that sleeps\n")

    conflict.locator("button").first.click()
    wait_until(lambda: ant.read_text() == "mine\n")
    page.locator("#player [data-close]").click()
    tile(page, "ant").locator(".conflict").wait_for(state="hidden")
    assert tile(page, "ant").locator("textarea").input_value() == "mine"


def test_the_player_stays_where_a_save_under_way_met_another_caption(
    page: Any, home: projects.Project
) -> None:
    tile(page, "ant").locator(".clip-open").click()
    title(page, "ant").wait_for()
    (home.folder / "clips/ant.txt").write_text("theirs\n")
    page.locator("#player-text").fill("mine")
    held = HeldRequests(page, "**/data/clip?*")
    page.locator("#player-text").press("Control+Enter")
    page.locator("#player .conflict:visible").wait_for()
    held.wait()
    with page.expect_response("**/data/clip?*"):
        held.release()
    page.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert title(page, "ant").count() == 1
    assert page.locator("#player-text").input_value() == "mine"


def test_conflicts_of_hidden_tiles_are_asked_about_one_after_another(
    page: Any, home: projects.Project
) -> None:
    clips = home.folder / "clips"
    for name in ("ant", "bee"):
        (clips / f"{name}.txt").write_text(f"their {name}\n")
    held = HeldRequests(page, "**/data/caption")
    for name in ("ant", "bee"):
        tile(page, name).locator("textarea").fill(f"my {name}")
        tile(page, name).locator("textarea").press("Control+Enter")
    held.wait()
    page.locator("#find").fill("dog")
    tile(page, "ant").wait_for(state="detached")
    held.release()

    for name, choice in (("ant", "Keep mine"), ("bee", "Take theirs")):
        title(page, name).wait_for()
        conflict = page.locator("#player .conflict:visible")
        assert conflict.locator("blockquote").inner_text() == f"their {name}"
        assert page.locator("#player-text").input_value() == f"my {name}"
        conflict.get_by_role("button", name=choice).click()
    wait_until(lambda: (clips / "ant.txt").read_text() == "my ant\n")
    assert page.locator("#player-text").input_value() == "their bee"
    assert (clips / "bee.txt").read_text() == "their bee\n"


WATCH_TILES = """() => {
    window.tops = [];
    window.counts = new Set();
    const measure = () => {
        const tiles = [...document.querySelectorAll("#tiles .clip")];
        tops.push(tiles[0].getBoundingClientRect().top);
        counts.add(tiles.length);
    };
    new ResizeObserver(measure).observe(document.querySelector("#main"));
}"""
"""Notes before each frame is drawn where the first tile is, and how many tiles there
are.
"""


def test_tiles_stay_where_they_are_while_captions_are_written(
    page: Any, home: projects.Project
) -> None:
    page.set_viewport_size({"width": 1280, "height": 500})
    page.locator("#state").select_option("without")
    tile(page, "ant").wait_for(state="detached")
    tile(page, "cat").locator("textarea").focus()
    page.evaluate(WATCH_TILES)

    page.keyboard.type("a cat that sits")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.clip').dataset.path") == (
        "clips/dog.mp4"
    )
    wait_until((home.folder / "clips/cat.txt").is_file)
    page.locator('#tiles .clip[data-path="clips/cat.mp4"][data-state=used]').wait_for()
    assert page.evaluate("[...counts]") == [2]
    page.locator("#r-state .notice.care:not(#without)").first.wait_for()
    tops = page.evaluate("tops")
    assert len(tops) > 1, "a note has come above the tiles"
    assert np.ptp(tops) < 1
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.matches('textarea')") is False

    page.locator("#state").select_option("used")
    tile(page, "ant").wait_for()
    page.locator("#state").select_option("without")
    tile(page, "ant").wait_for(state="detached")
    assert tile(page, "cat").count() == 0
    tile(page, "dog").wait_for()


def test_the_player_goes_back_to_a_clip_that_was_captioned_just_now(
    page: Any, home: projects.Project
) -> None:
    """A caption takes the clip out of “Needs a caption”, and not out of the player's way."""
    page.locator("#without [data-view]").click()
    title(page, "cat").wait_for()
    back = page.get_by_role("button", name="Previous clip")
    assert back.is_disabled(), "it is the first that needs a caption"
    page.keyboard.type("a cat that sits")
    page.keyboard.press("Control+Enter")
    title(page, "dog").wait_for()
    wait_until((home.folder / "clips/cat.txt").is_file)
    page.keyboard.type("a dog")
    page.keyboard.press("Control+Shift+Enter")

    title(page, "cat").wait_for()
    field = page.locator("#player-text")
    assert field.input_value() == "a cat that sits"
    assert field.evaluate("field => field === document.activeElement")
    assert page.locator("#player").get_by_text("1 of 2").count() == 1
    page.keyboard.type(" still")
    page.keyboard.press("PageDown")
    title(page, "dog").wait_for()
    wait_until(
        lambda: (home.folder / "clips/cat.txt").read_text() == "a cat that sits still\n"
    )
    assert field.input_value() == "a dog"

    back.click()
    title(page, "cat").wait_for()
    page.locator("#player [data-close]").click()
    tile(page, "cat").locator(".clip-open").click()
    title(page, "cat").wait_for()
    assert page.locator("#player").get_by_text("3 of 4").count() == 1
