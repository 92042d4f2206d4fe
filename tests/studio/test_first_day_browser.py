"""A person's first day in a real browser: a costly start is asked about, a model that
cannot be had has its ways out, each next step leads to its place.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import open_studio, violations
from tests.support.clips import write_clip
from tests.support.waiting import wait_until
from videotune.studio import projects

pytestmark = pytest.mark.slow

BROKEN_NUMBERS = """() => [...document.querySelectorAll(".stat b")].filter((figure) => {
  const range = document.createRange(); range.selectNodeContents(figure);
  return !figure.textContent.trim().includes(" ") && new Set([...range.getClientRects()].map((line) => line.top)).size > 1;
}).map((figure) => figure.textContent)"""
"""The figures that are broken over lines within a number."""


def add_clip(project: projects.Project, small_clips: Path, name: str = "a") -> None:
    clip = sorted(small_clips.rglob("*.mp4"))["ab".index(name)]
    shutil.copy(clip, project.folder / "clips" / f"{name}.mp4")
    (project.folder / "clips" / f"{name}.txt").write_text("a ball\n")


def test_a_costly_start_is_asked_about_and_a_missing_model_has_its_ways_out(
    tmp_path: Path, small_clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub is switched off, so nothing is downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    cats = projects.create(
        tmp_path / "root", "Cats", preset="wan 2.1 1.3B LoRA 16GB", card="RTX 4090"
    )
    add_clip(cats, small_clips)
    projects.save_draft(cats, {"steps": 999_999_999})
    with open_studio(tmp_path / "root") as (studio, page):
        page.goto(f"{studio.address}/p/cats/setup")
        page.locator("#plan-verdict .badge").wait_for()
        assert page.locator("#plan-verdict .badge").count() == 1
        reasons = page.locator(".verdict-reasons").inner_text()
        assert "of disk are missing" in reasons, "said with the verdict"
        page.locator("#u-steps", has_text="of disk").wait_for()
        for width in (390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(BROKEN_NUMBERS) == []
            assert page.locator("#start").bounding_box()["y"] < 860, "always in sight"
        assert page.evaluate("getComputedStyle(document.querySelector('.plan-side')).overflowY") == "visible"  # fmt: skip
        assert violations(page) == []

        page.locator("#start").click()
        asked = page.locator("#start-ask")
        asked.wait_for()
        assert "about 28.9 GB" in asked.inner_text()
        assert violations(page) == []
        asked.locator("[data-close]").click()
        assert not (cats.folder / "runs").exists() or not any(
            (cats.folder / "runs").iterdir()
        )

        page.locator("#start").click()
        page.locator("#start-ask-yes").click()
        page.wait_for_url("**/train?run=run-1")
        problem = page.locator("#model-problem")
        problem.wait_for()
        assert "could not be downloaded" in problem.inner_text()
        assert violations(page) == []
        problem.get_by_role("link", name="Take another model").click()
        page.locator("#presets[open]").wait_for()
        page.keyboard.press("Escape")
        assert page.locator("#r-settings #model-problem").count() == 1


def test_each_next_step_leads_to_its_place_on_the_same_page(
    tmp_path: Path, small_clips: Path
) -> None:
    cats = projects.create(tmp_path, "Cats")
    add_clip(cats, small_clips)
    with open_studio(tmp_path) as (studio, page):
        page.goto(f"{studio.address}/p/cats/setup")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.locator("#next-step", has_text="Choose a model").click()
        page.locator("#presets[open]").wait_for()
        page.keyboard.press("Escape")
        page.goto(f"{studio.address}/p/cats/data")
        page.locator("#next-step", has_text="Choose a model").click()
        page.locator("#presets[open]").wait_for()
        page.keyboard.press("Escape")

        projects.update(cats, preset="toy")
        page.set_viewport_size({"width": 390, "height": 800})
        step = page.locator("#next-step", has_text="See the plan")
        step.wait_for()
        step.click()
        page.locator(".plan-side.open").wait_for()
        assert page.locator("#r-plan").evaluate("one => one.matches('.led-to')")


def test_the_next_step_adds_clips_and_starts_nothing(tmp_path: Path) -> None:
    """What only opens a choice is opened; a training waits for its own button."""
    cats = projects.create(tmp_path, "Cats", preset="toy")
    with open_studio(tmp_path) as (studio, page):
        # With a listener of its own the page catches each choice of files from the start.
        # Between two expectations it would stop, and a key at once opened the system's dialog.
        page.on("filechooser", lambda _chooser: None)
        page.goto(f"{studio.address}/p/cats/data")
        with page.expect_file_chooser() as choice:
            page.locator("#next-step", has_text="Add clips").click()
        assert choice.value.is_multiple()
        with page.expect_file_chooser():
            page.keyboard.press("n")

        # A browser lets no page open the choice of files by itself.
        page.goto(f"{studio.address}/p/cats/setup")
        page.locator("#next-step", has_text="Add clips").click()
        page.locator("#add-clips.led-to:focus").wait_for()
    assert not list((cats.folder / "runs").glob("*"))


def test_an_error_of_a_dialog_stands_in_the_dialog(tmp_path: Path) -> None:
    with open_studio(tmp_path) as (studio, page):
        page.goto(studio.address)
        page.locator("[data-open=new]").first.click()
        page.locator("#new-title").fill("My cat")
        page.locator("#new-card").select_option("other")
        page.locator("#new-make").click()
        error = page.locator("#new .field-error")
        error.wait_for()
        assert "memory of your card" in error.inner_text()
        assert page.locator(".toast").count() == 0
        assert violations(page) == []
        page.keyboard.press("Escape")
        assert error.count() == 0


ON_TOP = """field => {
  const box = field.getBoundingClientRect();
  const above = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  return above !== null && (field === above || field.contains(above));
}"""
"""Whether an element is in sight, and under no other."""


def test_an_error_leads_to_its_field(tmp_path: Path) -> None:
    """Also from the end of a long dialog, and of a form that is in none."""
    with open_studio(tmp_path) as (studio, page):
        page.set_viewport_size({"width": 1280, "height": 757})
        page.goto(studio.address)
        page.locator("[data-open=new]").first.click()
        page.locator("#new-card").select_option("RTX 4090")
        page.locator("#new-make").click()
        error = page.locator("#new .field-error", has_text="needs a name")
        error.wait_for()
        name = page.locator("#new-title")
        assert name.evaluate("field => field === document.activeElement")
        assert name.get_attribute("aria-invalid") == "true"
        assert name.evaluate(ON_TOP)
        assert error.evaluate(ON_TOP)
        assert violations(page) == []
        page.keyboard.type("My cat")
        assert error.count() == 0
        assert name.get_attribute("aria-invalid") is None

        page.goto(f"{studio.address}/settings")
        page.locator("#comfyui").fill("/no/such/folder")
        page.get_by_role("button", name="Save").click()
        page.locator("form .field-error", has_text="/no/such/folder").wait_for()
        assert page.locator(".toast").count() == 0
        assert violations(page) == []


def test_a_clip_is_kept_aside_and_taken_back_by_its_own_button(
    tmp_path: Path, small_clips: Path
) -> None:
    cats = projects.create(tmp_path, "Cats", preset="toy")
    add_clip(cats, small_clips)
    add_clip(cats, small_clips, "b")
    with open_studio(tmp_path) as (studio, page):
        page.goto(f"{studio.address}/p/cats/data")
        page.get_by_role("button", name="Keep a.mp4 aside for checking").first.click()
        wait_until((cats.folder / "held-out/a.mp4").is_file)
        page.locator(".clip .badge", has_text="kept aside").wait_for()
        page.get_by_role("button", name="Train on a.mp4 again").first.click()
        wait_until((cats.folder / "clips/a.mp4").is_file)
        assert violations(page) == []


def covered(page: Any) -> bool:
    """Whether the bar at the top covers the head of the plan."""
    top = page.locator(".top").bounding_box()
    plan = page.locator("#plan").bounding_box()
    return bool(top["y"] + top["height"] > plan["y"] + 1)


def test_the_bar_at_the_top_covers_nothing_that_stays(tmp_path: Path) -> None:
    projects.create(tmp_path, "Cats", preset="toy")
    with open_studio(tmp_path) as (studio, page):
        page.goto(f"{studio.address}/p/cats/setup")
        for width in (960, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("scrollTo(0, document.body.scrollHeight / 2)")
            page.wait_for_timeout(200)
            assert not covered(page), width
        page.set_viewport_size({"width": 390, "height": 800})
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        assert page.locator(".top").bounding_box()["y"] < 0, "it scrolls away"


def test_a_portrait_clip_leaves_each_picture_of_a_cover_its_quarter(
    tmp_path: Path,
) -> None:
    cats = projects.create(tmp_path, "Cats", preset="toy")
    for name, (height, width) in {
        "a": (48, 64),
        "b": (48, 64),
        "c": (160, 64),
        "d": (48, 64),
    }.items():
        frames = np.full((9, height, width, 3), 128, np.uint8)
        write_clip(cats.folder / "clips" / f"{name}.mp4", frames, 8)
    with open_studio(tmp_path) as (studio, page):
        page.goto(studio.address)
        images = page.locator(".cover img")
        wait_until(
            lambda: (
                images.evaluate_all(
                    "images => images.filter(one => one.naturalWidth).length"
                )
                == 4
            )
        )
        heights = images.evaluate_all(
            "images => images.map(one => Math.round(one.getBoundingClientRect().height))"
        )
        cover = page.locator(".cover").evaluate("one => one.clientHeight")
    assert len(set(heights)) == 1
    assert 2 * heights[0] <= cover
