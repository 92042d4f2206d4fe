"""In a real browser: the page leads to what helps, instead of to a dead end."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import NewPage, Studio, violations
from tests.support.job_folders import steps
from videotune.files import write_json
from videotune.studio import projects, queue_page

pytestmark = pytest.mark.slow

WAN = "wan 2.1 1.3B LoRA 16GB"


@pytest.fixture
def home(browser_studio: tuple[Studio, NewPage], small_clips: Path) -> projects.Project:
    studio, _ = browser_studio
    project = projects.create(studio.root, "Leads", preset="toy")
    clip = sorted(small_clips.rglob("*.mp4"))[0]
    shutil.copy(clip, project.folder / "clips" / "a.mp4")
    (project.folder / "clips" / "a.txt").write_text("a ball\n")
    return project


@pytest.fixture
def page(browser_studio: tuple[Studio, NewPage]) -> Iterator[Any]:
    _, new_page = browser_studio
    with new_page() as page:
        page.set_default_timeout(120_000)
        yield page


def test_a_setting_is_found_by_its_group_and_by_a_link(
    browser_studio: tuple[Studio, NewPage], home: projects.Project, page: Any
) -> None:
    page.goto(f"{browser_studio[0].address}/p/{home.name}/setup")
    page.locator("#find").fill("preview")
    field = page.locator("#f-sample_after")
    field.wait_for()
    assert field.is_visible()

    page.locator("#find").fill("learning")
    field.wait_for(state="hidden")
    page.locator('#plan-previews a[href="#f-sample_after"]').click()
    field.wait_for()
    assert field.evaluate("field => field === document.activeElement")
    assert page.locator("#find").input_value() == ""


def test_the_head_of_a_long_plan_stays_in_sight(
    browser_studio: tuple[Studio, NewPage], home: projects.Project, page: Any
) -> None:
    """Also if it comes, and is longer than the window, after the page has led to it."""
    projects.update(home, preset=WAN, card="RTX 4090")
    page.goto(f"{browser_studio[0].address}/p/{home.name}/setup#r-plan")
    page.locator("#plan-verdict").wait_for()
    plan = page.locator(".plan-side").bounding_box()
    assert plan["height"] > page.viewport_size["height"]
    bar = page.locator(".top").bounding_box()
    head = page.locator("#plan h2").bounding_box()
    assert head["y"] >= bar["y"] + bar["height"]


def test_a_plan_for_a_card_elsewhere_leads_to_the_export(
    browser_studio: tuple[Studio, NewPage], home: projects.Project, page: Any
) -> None:
    projects.update(home, preset=WAN, card="RTX 4090")
    page.goto(f"{browser_studio[0].address}/p/{home.name}/setup")
    start = page.locator("#start")
    page.locator("#elsewhere").wait_for()
    page.locator("#next-step", has_text="Take it to the card").click()
    export = page.locator("#elsewhere .btn")
    assert export.evaluate("button => button === document.activeElement")
    assert "primary" not in (start.get_attribute("class") or "")
    assert violations(page) == []


def test_resume_asks_about_clips_that_have_changed(
    browser_studio: tuple[Studio, NewPage], home: projects.Project, page: Any
) -> None:
    studio, _ = browser_studio
    run = home.folder / "runs" / "run-1"
    steps(run, range(1, 4))
    long_ago = time.time() - 60
    os.utime(run / "journal.jsonl", (long_ago, long_ago))
    clip = home.folder / "clips" / "a.mp4"
    row = {"path": str(clip), "used": True, "held_out": False, "captions": ["other"]}
    write_json(run / "config.json", {"steps": 9, "settings": {}})
    write_json(run / "check.json", {"clips": [row]})
    page.goto(f"{studio.address}/p/{home.name}/train?run=run-1")
    page.get_by_role("button", name="Resume").click()
    dialog = page.locator("#start-ask")
    dialog.locator("li", has_text="1 clip with another caption (a.mp4)").wait_for()
    assert violations(page) == []
    assert queue_page.training_entry(studio.root, home, "run-1") is None

    dialog.get_by_role("button", name="Continue with the changed clips").click()
    page.locator("#state-title").wait_for()
    page.wait_for_function("!document.querySelector('#start-ask').open")
    page.wait_for_timeout(1000)
    entry = queue_page.training_entry(studio.root, home, "run-1")
    assert entry is not None
    assert "--allow-data-change" in entry.arguments
