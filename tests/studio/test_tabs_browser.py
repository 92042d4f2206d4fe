"""Two tabs of one browser write the same value: what one of them has saved is never
written over by the other one unseen, in no kind of field.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.browser import NewPage, Studio
from tests.support.clips import write_clip
from tests.support.waiting import wait_until
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


@dataclass(frozen=True)
class Tabs:
    """Two tabs of one window, with a project that both show."""

    first: Any
    second: Any
    project: projects.Project
    address: str

    def open(self, page_name: str) -> None:
        """Open a page of the project in both."""
        for tab in (self.first, self.second):
            tab.goto(f"{self.address}/p/{self.project.name}/{page_name}")

    def unfold_settings(self) -> None:
        """Open all groups of the page Setup in both."""
        for tab in (self.first, self.second):
            tab.evaluate(
                "for (const one of document.querySelectorAll('details.keys')) one.open = true"
            )

    def fields(self, selector: str) -> tuple[Any, Any]:
        """Return the same element of each tab."""
        return self.first.locator(selector), self.second.locator(selector)

    def save_in_second(self, text: str) -> None:
        """Write the caption in the second tab, and wait until it is saved."""
        field = self.second.locator("#tiles textarea")
        field.fill(text)
        field.press("Tab")
        wait_until(lambda: self.caption == text)

    def type_in_first(self, text: str) -> None:
        """Type at the cursor of the first tab, and leave the field."""
        self.first.keyboard.type(text)
        self.first.keyboard.press("Tab")

    def wait_for_stream(self) -> None:
        """Wait until the stream has brought the first tab what the second has saved."""
        self.first.wait_for_timeout(4 * SENDING_TIME)

    @property
    def caption(self) -> str:
        """The caption on the disk."""
        return (self.project.folder / "clips" / "ant.txt").read_text().strip()


@pytest.fixture
def tabs(
    browser_studio: tuple[Studio, NewPage], home: projects.Project
) -> Iterator[Tabs]:
    """Two tabs of one window."""
    studio, new_page = browser_studio
    with new_page() as page:
        other_page = page.context.new_page()
        for tab in (page, other_page):
            tab.set_default_timeout(30_000)
        yield Tabs(page, other_page, home, studio.address)


def test_a_caption_that_another_tab_has_replaced_stays(tabs: Tabs) -> None:
    """The cursor stays in the field of the first tab, as it does when one goes to another
    tab.
    """
    tabs.open("data")
    field, other_field = tabs.fields("#tiles textarea")
    field.fill("a toy ship")
    field.press("Control+Enter")
    other_field.and_(tabs.second.locator('[data-was="a toy ship"]')).wait_for()
    tabs.save_in_second("a whole new caption")
    assert tabs.caption == "a whole new caption"

    tabs.wait_for_stream()
    assert field.input_value() == "a whole new caption", "the first tab shows it"
    tabs.type_in_first(" x")
    wait_until(lambda: tabs.caption == "a whole new caption x")


def test_a_caption_that_is_typed_in_two_tabs_is_asked_about(tabs: Tabs) -> None:
    tabs.open("data")
    field, _ = tabs.fields("#tiles textarea")
    field.fill("half of a capt")
    tabs.save_in_second("theirs")
    tabs.wait_for_stream()
    tabs.type_in_first("ion")
    conflict = tabs.first.locator("#tiles .conflict:visible")
    conflict.wait_for()
    assert conflict.locator("blockquote").inner_text() == "theirs"
    assert field.input_value() == "half of a caption"
    assert tabs.caption == "theirs"


def test_the_player_shows_a_caption_that_another_tab_has_replaced(tabs: Tabs) -> None:
    tabs.open("data")
    tabs.first.locator("#tiles .clip-open").click()
    field, _ = tabs.fields("#player-text")
    field.fill("a toy ship")
    field.dispatch_event("change")  # as the browser does when the window is left
    tabs.second.locator('#tiles textarea[data-was="a toy ship"]').wait_for()
    tabs.save_in_second("theirs")
    field.and_(tabs.first.locator('[data-was="theirs"]')).wait_for()
    assert field.input_value() == "theirs", "the first tab shows it"

    tabs.type_in_first(" x")
    tabs.first.locator("#player .saved-mark:text-is('saved')").wait_for()
    assert tabs.caption == "theirs x"


def test_a_caption_that_is_typed_in_the_player_and_in_another_tab_is_asked_about(
    tabs: Tabs,
) -> None:
    tabs.open("data")
    tabs.first.locator("#tiles .clip-open").click()
    field, _ = tabs.fields("#player-text")
    field.fill("half of a capt")
    tabs.save_in_second("theirs")
    tabs.wait_for_stream()
    assert field.input_value() == "half of a capt"
    tabs.type_in_first("ion")
    conflict = tabs.first.locator("#player .conflict:visible")
    conflict.wait_for()
    assert conflict.locator("blockquote").inner_text() == "theirs"
    assert tabs.caption == "theirs"


@pytest.mark.parametrize(
    ("key", "saved", "theirs", "typed"),
    [
        ("steps", "60", "70", "5"),
        ("datasets.trigger", "cat", "dog", "s"),
    ],
)
def test_a_setting_that_another_tab_has_changed_stays(
    tabs: Tabs,
    key: str,
    saved: str,
    theirs: str,
    typed: str,
) -> None:
    first, second = tabs.first, tabs.second
    tabs.open("setup")
    tabs.unfold_settings()
    field, other_field = tabs.fields(f'[id="f-{key}"]')
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
    tabs.type_in_first(typed)
    first.locator(f'[id="f-{key}"][data-saved="{theirs}{typed}"]').wait_for()
    value = flatten(projects.draft(tabs.project))[key]
    assert str(value) == f"{theirs}{typed}"


def test_a_setting_that_is_typed_in_two_tabs_is_asked_about(
    tabs: Tabs,
) -> None:
    first, second = tabs.first, tabs.second
    tabs.open("setup")
    field, other_field = tabs.fields("#f-steps")
    field.fill("6")
    other_field.fill("70")
    other_field.press("Tab")
    second.locator('.setting.own [id="f-steps"][data-saved="70"]').wait_for()
    tabs.wait_for_stream()
    assert field.input_value() == "6"
    field.dispatch_event("focusin", {"bubbles": True})  # the window is entered again
    tabs.type_in_first("5")
    first.locator("#e-steps button").last.wait_for()
    assert projects.draft(tabs.project) == {"steps": 70}, "nothing is written over"


def test_a_card_that_another_tab_has_typed_is_not_written_over(
    tabs: Tabs,
) -> None:
    first, second = tabs.first, tabs.second
    tabs.open("setup")
    for tab in (first, second):
        tab.locator(".preset-card [data-open=presets]").click()
    field, other_field = tabs.fields("#f-fact-vram")
    field.fill("1")
    other_field.fill("24")
    other_field.press("Tab")
    second.locator('#f-fact-vram[data-saved="24"]').wait_for()
    tabs.wait_for_stream()
    field.press("6")
    field.press("Tab")
    first.locator("#e-fact-vram", has_text="Changed elsewhere").wait_for()
    project = projects.find_project(tabs.project.folder.parent, tabs.project.name)
    assert project.facts["vram"] == 24


def test_conditions_that_another_tab_has_changed_are_not_written_over(
    tabs: Tabs,
) -> None:
    """The check boxes of the conditions are one value."""
    first, second = tabs.first, tabs.second
    tabs.open("setup")
    tabs.unfold_settings()
    boxes, other_boxes = tabs.fields(".condition [type=checkbox]")
    assert boxes.count() > 1
    boxes.nth(0).check()
    second.locator(".setting.own #f-conditions").wait_for()
    other_boxes.nth(0).uncheck()
    first.locator(".setting:not(.own) #f-conditions").wait_for()
    # The first tab shows it, under its cursor too.
    wait_until(lambda: not boxes.nth(0).is_checked())
    boxes.nth(1).check()
    first.locator(".setting.own #f-conditions").wait_for()
    (condition,) = projects.draft(tabs.project)["conditions"]
    assert condition["type"] == first.locator(".condition").nth(1).get_attribute(
        "data-condition"
    )
