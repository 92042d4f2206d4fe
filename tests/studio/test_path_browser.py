"""The first minutes of somebody new, in a real browser: a project with its card and
model, captions by keyboard, a plan that is of the settings on the page.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import open_studio, violations
from tests.support.clips import write_clip
from tests.support.reports import full_run
from tests.support.waiting import wait_until
from videotune.studio import gpu, projects

pytestmark = pytest.mark.slow


def write_clips(project: projects.Project, names: str) -> None:
    """Clips of one second, each of another colour."""
    rows, columns = np.mgrid[0:48, 0:64]
    for number, name in enumerate(names):
        frames = np.empty((36, 48, 64, 3), np.uint8)
        for index in range(36):
            frames[index] = (40 * number + 20, 90, 200 - 40 * number)
            disc = (columns - 12 - index) ** 2 + (rows - 24) ** 2 < 90
            frames[index][disc] = (230, 230, 90)
        write_clip(project.folder / f"clips/{name}.mp4", frames, 12)


def test_a_new_project_asks_for_card_and_model(tmp_path: Path) -> None:
    with open_studio(tmp_path) as (studio, page):
        page.set_default_timeout(60_000)
        page.goto(studio.address)
        page.locator("[data-open=new]").first.click()
        page.keyboard.type("My cat")
        assert page.locator("#new-title").input_value() == "My cat"
        assert violations(page) == []
        page.locator("#new-card").select_option("other")
        page.locator("#new-vram").fill("lots")
        page.locator("#new-card-error", has_text="unknown card").wait_for()
        assert page.locator("#new-vram").get_attribute("aria-invalid") == "true"
        page.locator("#new-vram").fill("16 GB")
        page.locator("#new-models .badge.care").first.wait_for()
        page.locator("#new-card").select_option("RTX 4090")
        page.locator("#new-models legend", has_text="RTX 4090").wait_for()
        page.locator('#new-models [value="ltx 2B LoRA 24GB"]').check()
        page.locator("#new-make").click()
        page.wait_for_url("**/p/my-cat/data")
        facts = projects.find_project(tmp_path, "my-cat").facts
        assert (facts["card"], facts["preset"]) == ("RTX 4090", "ltx 2B LoRA 24GB")


def test_captions_are_written_from_clip_to_clip_by_keyboard(tmp_path: Path) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    write_clips(project, "abcd")
    clips = project.folder / "clips"
    (clips / "b.txt").write_text("has one already\n")
    with open_studio(tmp_path) as (studio, page):
        page.set_default_timeout(60_000)
        page.goto(f"{studio.address}/p/cats/data")
        page.locator("#without [data-view]").click()
        field = page.locator("#player-text")
        for name in "acd":
            page.locator("#player-title", has_text=f"{name}.mp4").wait_for()
            wait_until(lambda: field.evaluate("one => one === document.activeElement"))
            page.keyboard.type(f"what {name} shows")
            page.keyboard.press("Control+Enter" if name == "a" else "PageDown")
        page.locator(".toast", has_text="last clip").wait_for()
        for name in "acd":
            caption = clips / f"{name}.txt"
            wait_until(caption.is_file, 20)
            assert caption.read_text() == f"what {name} shows\n"
        assert violations(page) == []
        page.keyboard.press("PageUp")
        page.locator("#player-title", has_text="b.mp4").wait_for(state="detached")
        page.keyboard.press("Escape")
        tile = page.locator('#tiles .clip[data-path="clips/d.mp4"] textarea')
        assert tile.input_value() == "what d shows"
        page.locator("#without").wait_for(state="detached")


NOTE_STEP_TEXTS = """() => {
  window.stepTexts = [];
  const note = () => {
    const text = document.querySelectorAll("#r-path li")[3].querySelector("span").textContent;
    if (window.stepTexts.at(-1) !== text) window.stepTexts.push(text);
  };
  note();
  const whole = { childList: true, subtree: true, characterData: true };
  new MutationObserver(note).observe(document.getElementById("r-path"), whole);
}"""
"""Notes everything that the path says of the plan, however short it is there."""


def step_texts(page: Any, last: str) -> list[str]:
    """Return what the path has said of the plan; first wait until it says ``last``."""
    page.locator("#r-path li:nth-child(4) span", has_text=last).wait_for()
    texts: list[str] = page.evaluate("window.stepTexts")
    return texts


def plan_text(page: Any) -> str:
    return str(page.locator("#plan").inner_text())


def test_the_button_of_the_toy_says_what_it_has_chosen(tmp_path: Path) -> None:
    with open_studio(tmp_path) as (studio, page):
        page.goto(studio.address)
        page.locator("[data-choose=toy]").click()
        said = page.locator("#new-chosen")
        assert "Model: toy" in said.inner_text()
        assert page.locator("#new [name=preset][value=toy]").is_checked()
        assert page.evaluate("document.activeElement.id") == "new-title"
        page.locator('#new [name=preset][value=""]').check()
        assert said.is_hidden()

        page.locator("#new [data-close]").first.click()
        page.locator("[data-open=new]").first.click()
        assert said.is_hidden()


def test_a_plan_is_of_the_settings_on_the_page_and_start_waits_for_it(
    tmp_path: Path,
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy", vram=16.0)
    write_clips(project, "ab")
    for name in "ab":
        (project.folder / f"clips/{name}.txt").write_text(f"a disc {name}\n")
    with open_studio(tmp_path) as (studio, page):
        page.set_default_timeout(120_000)
        page.goto(f"{studio.address}/p/cats/setup")
        page.evaluate(NOTE_STEP_TEXTS)
        page.locator("#plan .badge.good", has_text="fits").wait_for()
        page.locator("#start:enabled").wait_for()
        step_texts(page, last="fits")
        old = plan_text(page)
        assert violations(page) == []

        # what the page shows from the click on is never the plan of the old preset
        page.locator('.preset-card [data-open="presets"]').click()
        page.locator('[aria-label="Use wan 2.1 1.3B LoRA 16GB"]').click()
        page.locator("#presets:not([open])").wait_for(state="attached")
        page.locator(".preset-card h2", has_text="wan 2.1").wait_for()
        steps = "300"
        for _ in range(40):
            text = plan_text(page)
            disabled = page.locator("#start").is_disabled()
            assert text != old
            if "fits" in text:
                break
            assert disabled
            page.wait_for_timeout(250)

        os.kill(studio.process.pid, signal.SIGSTOP)
        page.locator("#f-steps").fill(steps)
        page.locator("#f-steps").press("Tab")
        assert page.locator("#start").is_disabled()
        assert "2,000" not in plan_text(page), "2,000 steps are no longer on the page"
        os.kill(studio.process.pid, signal.SIGCONT)
        page.locator("#plan .stat b", has_text=steps).first.wait_for()
        page.locator("#start:enabled").wait_for()
        verdict = "fits" if gpu.list_gpus() else "not on this computer"
        texts = step_texts(page, last=verdict)
        assert {text.partition(",")[0] for text in texts} == {
            "being calculated",
            "fits",
            verdict,
        }
        draft = json.loads((project.folder / "config.json").read_text())
        assert draft == {"steps": 300}


def test_the_next_step_leads_to_its_button_on_the_same_page(tmp_path: Path) -> None:
    """It would seem to do nothing otherwise: the button takes the focus, for Enter."""
    project = projects.create(tmp_path, "Cats", preset="toy")
    write_clips(project, "a")
    (project.folder / "clips/a.txt").write_text("a disc\n")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    lines = []
    for text in (run / "journal.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "start":
            line["time"] = time.time()  # it began with the project's settings
        if line["kind"] != "end":
            lines.append(f"{json.dumps(line)}\n")
    (run / "journal.jsonl").write_text("".join(lines))
    with open_studio(tmp_path) as (studio, page):
        page.set_default_timeout(60_000)
        for address in ("train", "train?run=run-1"):
            page.goto(f"{studio.address}/p/cats/{address}")
            page.locator("#next-step", has_text="Go to Resume of run-1").wait_for()
            page.keyboard.press("n")
            page.locator("#r-run .btn.primary.led-to").wait_for()
            page.locator("#r-run .btn.primary:focus", has_text="Resume").wait_for()
        assert violations(page) == []
