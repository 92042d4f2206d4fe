"""Two tabs of one browser write the same value: what one of them has saved is never
written over by the other one unseen, in no kind of field.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.browser import NewPage, Studio
from tests.support.clips import write_clip
from videotune.config.nested_keys import flatten
from videotune.studio import projects

pytestmark = pytest.mark.slow

SENDING_TIME = 400
"""Milliseconds that are enough for the stream to bring a change into another tab."""


@pytest.fixture
def home(browser_studio: tuple[Studio, NewPage]) -> projects.Project:
    """A project with one captioned clip."""
    studio, _ = browser_studio
    project = projects.create(studio.root, "Tabs", preset="toy")
    frames = np.random.default_rng(0).integers(0, 255, (24, 64, 96, 3), dtype=np.uint8)
    write_clip(project.folder / "clips" / "ant.mp4", frames, 12)
    (project.folder / "clips" / "ant.txt").write_text("an ant\n")
    return project


@pytest.fixture
def tabs(
    browser_studio: tuple[Studio, NewPage], home: projects.Project
) -> Iterator[tuple[Any, Any]]:
    """Two tabs of one window."""
    _, new_page = browser_studio
    with new_page() as page:
        both = (page, page.context.new_page())
        for tab in both:
            tab.set_default_timeout(30_000)
        yield both


def open_both(
    tabs: tuple[Any, Any], studio: Studio, home: projects.Project, page_name: str
) -> None:
    for tab in tabs:
        tab.goto(f"{studio.address}/p/{home.name}/{page_name}")


def caption_of(home: projects.Project) -> str:
    return (home.folder / "clips" / "ant.txt").read_text().strip()


def test_a_caption_that_another_tab_has_replaced_stays(
    browser_studio: tuple[Studio, NewPage],
    home: projects.Project,
    tabs: tuple[Any, Any],
) -> None:
    """The cursor stays in the field of the first tab, as it does when one goes to another
    tab.
    """
    first, second = tabs
    open_both(tabs, browser_studio[0], home, "data")
    field, other_field = (tab.locator("#tiles textarea") for tab in tabs)
    field.fill("a toy ship")
    field.press("Control+Enter")
    other_field.and_(second.locator('[data-was="a toy ship"]')).wait_for()
    other_field.fill("a whole new caption")
    other_field.press("Tab")
    second.locator(".saved-mark", has_text="saved").wait_for()
    assert caption_of(home) == "a whole new caption"

    first.wait_for_timeout(4 * SENDING_TIME)
    assert field.input_value() == "a whole new caption", "the first tab shows it"
    first.keyboard.type(" x")
    first.keyboard.press("Tab")
    first.locator(".saved-mark", has_text="saved").wait_for()
    assert caption_of(home) == "a whole new caption x"


def test_a_caption_that_is_typed_in_two_tabs_is_asked_about(
    browser_studio: tuple[Studio, NewPage],
    home: projects.Project,
    tabs: tuple[Any, Any],
) -> None:
    first, second = tabs
    open_both(tabs, browser_studio[0], home, "data")
    first.locator("#tiles textarea").fill("half of a capt")
    second.locator("#tiles textarea").fill("theirs")
    second.locator("#tiles textarea").press("Tab")
    second.locator(".saved-mark", has_text="saved").wait_for()
    first.wait_for_timeout(4 * SENDING_TIME)
    first.keyboard.type("ion")
    first.keyboard.press("Tab")
    conflict = first.locator("#tiles .conflict:visible")
    conflict.wait_for()
    assert conflict.locator("blockquote").inner_text() == "theirs"
    assert first.locator("#tiles textarea").input_value() == "half of a caption"
    assert caption_of(home) == "theirs"


def test_a_caption_of_the_player_that_another_tab_has_replaced_stays(
    browser_studio: tuple[Studio, NewPage],
    home: projects.Project,
    tabs: tuple[Any, Any],
) -> None:
    first, second = tabs
    open_both(tabs, browser_studio[0], home, "data")
    first.locator("#tiles .clip-open").click()
    field = first.locator("#player-text")
    field.fill("a toy ship")
    field.dispatch_event("change")  # as the browser does when the window is left
    second.locator('#tiles textarea[data-was="a toy ship"]').fill("theirs")
    second.locator("#tiles textarea").press("Tab")
    second.locator(".saved-mark", has_text="saved").wait_for()
    first.wait_for_timeout(4 * SENDING_TIME)
    seen = field.input_value()
    first.keyboard.type(" x")
    first.keyboard.press("Tab")
    first.locator(
        "#player .conflict:visible, #player .saved-mark:text-is('saved')"
    ).wait_for()
    if first.locator("#player .conflict:visible").count():
        assert caption_of(home) == "theirs"
    else:
        assert seen == "theirs"
        assert caption_of(home) == "theirs x"


@pytest.mark.parametrize(
    ("key", "saved", "theirs", "typed"),
    [
        ("steps", "60", "70", "5"),
        ("datasets.trigger", "cat", "dog", "s"),
    ],
)
def test_a_setting_that_another_tab_has_changed_stays(
    browser_studio: tuple[Studio, NewPage],
    home: projects.Project,
    tabs: tuple[Any, Any],
    key: str,
    saved: str,
    theirs: str,
    typed: str,
) -> None:
    first, second = tabs
    open_both(tabs, browser_studio[0], home, "setup")
    for tab in tabs:
        tab.evaluate(
            "for (const one of document.querySelectorAll('details.keys')) one.open = true"
        )
    field, other_field = (tab.locator(f'[id="f-{key}"]') for tab in tabs)
    field.fill(saved)
    field.press("Enter")
    other_field.and_(second.locator(f'[data-saved="{saved}"]')).wait_for()
    other_field.fill(theirs)
    other_field.press("Tab")
    other_field.and_(second.locator(f'[data-saved="{theirs}"]')).wait_for()
    first.locator(f'[id="f-{key}"][data-saved="{theirs}"]').wait_for()
    assert field.input_value() == theirs, "the first tab shows it"

    first.bring_to_front()
    field.dispatch_event("focusin", {"bubbles": True})  # the window is entered again
    first.keyboard.press("End")
    first.keyboard.type(typed)
    first.keyboard.press("Tab")
    first.locator(f'[id="f-{key}"][data-saved="{theirs}{typed}"]').wait_for()
    value = flatten(projects.draft(home))[key]
    assert str(value) == f"{theirs}{typed}"


def test_a_setting_that_is_typed_in_two_tabs_is_asked_about(
    browser_studio: tuple[Studio, NewPage],
    home: projects.Project,
    tabs: tuple[Any, Any],
) -> None:
    first, second = tabs
    open_both(tabs, browser_studio[0], home, "setup")
    field, other_field = (tab.locator("#f-steps") for tab in tabs)
    field.fill("6")
    other_field.fill("70")
    other_field.press("Tab")
    second.locator('.setting.own [id="f-steps"][data-saved="70"]').wait_for()
    first.wait_for_timeout(4 * SENDING_TIME)
    assert field.input_value() == "6"
    field.dispatch_event("focusin", {"bubbles": True})  # the window is entered again
    first.keyboard.type("5")
    first.keyboard.press("Tab")
    first.locator("#e-steps button").last.wait_for()
    assert projects.draft(home) == {"steps": 70}, "nothing is written over"


def test_a_card_that_another_tab_has_typed_is_not_written_over(
    browser_studio: tuple[Studio, NewPage],
    home: projects.Project,
    tabs: tuple[Any, Any],
) -> None:
    first, second = tabs
    open_both(tabs, browser_studio[0], home, "setup")
    for tab in tabs:
        tab.locator(".preset-card [data-open=presets]").click()
    field, other_field = (tab.locator("#f-fact-vram") for tab in tabs)
    field.fill("1")
    other_field.fill("24")
    other_field.press("Tab")
    second.locator('#f-fact-vram[data-saved="24"]').wait_for()
    first.wait_for_timeout(4 * SENDING_TIME)
    field.press("6")
    field.press("Tab")
    first.locator("#e-fact-vram", has_text="Changed elsewhere").wait_for()
    project = projects.find_project(home.folder.parent, home.name)
    assert project.facts["vram"] == 24


def test_conditions_that_another_tab_has_changed_are_not_written_over(
    browser_studio: tuple[Studio, NewPage],
    home: projects.Project,
    tabs: tuple[Any, Any],
) -> None:
    """The check boxes of the conditions are one value."""
    first, second = tabs
    open_both(tabs, browser_studio[0], home, "setup")
    for tab in tabs:
        tab.evaluate(
            "for (const one of document.querySelectorAll('details.keys')) one.open = true"
        )
    boxes, other_boxes = (tab.locator(".condition [type=checkbox]") for tab in tabs)
    assert boxes.count() > 1
    boxes.nth(0).check()
    second.locator(".setting.own #f-conditions").wait_for()
    other_boxes.nth(0).uncheck()
    first.locator(".setting:not(.own) #f-conditions").wait_for()
    assert not boxes.nth(0).is_checked(), "the first tab shows it, under its cursor too"
    boxes.nth(1).check()
    first.locator(".setting.own #f-conditions").wait_for()
    (condition,) = projects.draft(home)["conditions"]
    assert condition["type"] == first.locator(".condition").nth(1).get_attribute(
        "data-condition"
    )
