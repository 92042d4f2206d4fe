"""The studio in a real browser: a folder of clips becomes a downloaded LoRA, and nothing is lost on the way."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("gradio")

from studio.browser_kit import go, make_project, opened, put, upload

from videotune.files import life


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory, small_clips: Path) -> list[Path]:
    """Six clips with captions, one that is cut short, and a text that is named like a clip."""
    folder = tmp_path_factory.mktemp("sent")
    for video in sorted((small_clips / "videos").iterdir()):
        (folder / video.name).write_bytes(video.read_bytes())
        (folder / f"{video.stem}.txt").write_text((small_clips / "captions" / f"{video.stem}.txt").read_text())
    (folder / "broken.mp4").write_bytes(video.read_bytes()[:700])
    (folder / "broken.txt").write_text("a clip that is cut short")
    (folder / "notes.mp4").write_text("these are notes")
    return sorted(folder.iterdir())


def state(page: Any, name: str) -> Any:
    return page.locator(f'.clip[data-path="clips/{name}"] .badge')


def test_clips_come_in_a_broken_one_is_explained_and_a_caption_mended(tmp_path: Path, sent: list[Path]) -> None:
    with opened(tmp_path) as (studio, page):
        make_project(page, studio.address, "Shapes <b>of</b> mine")
        told = upload(page, sent)
        assert "14 files added" in told
        assert "notes.mp4: it is named like a clip, but its content is text" in told
        state(page, "broken.mp4").filter(has_text="skipped").wait_for()
        why = page.locator('.clip[data-path="clips/broken.mp4"] .why').inner_text()
        assert re.search("cannot be read|damaged|no video", why), why
        first = sent[2].name
        caption = page.locator(f'.clip[data-path="clips/{first}"] textarea')
        caption.fill("a shape <i>that</i> moves")
        caption.press("Control+Enter")
        page.locator("#vt-told p").filter(has_text="caption saved").first.wait_for()
        assert (tmp_path / "shapes-b-of-b-mine/clips" / first).with_suffix(
            ".txt"
        ).read_text() == "a shape <i>that</i> moves\n"
        page.locator("[data-clips] input[type=search]").fill("that</i> moves")
        page.locator(".filters .count").filter(has_text="1 of 7").wait_for()
        page.reload()
        page.locator(f'.clip[data-path="clips/{first}"] textarea').wait_for()
        assert page.locator(f'.clip[data-path="clips/{first}"] textarea').input_value() == "a shape <i>that</i> moves"
        assert page.locator("h1").inner_text() == "Shapes <b>of</b> mine"
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a phone scrolls down, not sideways"


SETTINGS = (("steps", "150"), ("batch_size", "1"), ("save_every", "25"), ("sample_after", "75"))


def plan(page: Any) -> None:
    go(page, "Setup")
    page.locator('[id="f-steps"]').wait_for()
    page.locator("#f-allow_skips").check()
    for key, value in SETTINGS:
        put(page, key, value)
    put(page, "card", "rtx 4090")
    page.locator(".side .badge").filter(has_text="fits").first.wait_for()
    page.locator(".side .facts b").filter(has_text="150").first.wait_for()


def step_reached(run: Path, step: int, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not (run / "journal.jsonl").is_file() or f'"step": {step},' not in (run / "journal.jsonl").read_text():
        assert time.monotonic() < end, f"step {step} was not reached"
        time.sleep(0.2)


@pytest.mark.long
def test_from_a_folder_of_clips_to_a_downloaded_lora(tmp_path: Path, sent: list[Path]) -> None:
    with opened(tmp_path) as (studio, page):
        make_project(page, studio.address, "Shapes")
        upload(page, sent)
        state(page, "broken.mp4").filter(has_text="skipped").wait_for()
        plan(page)
        go(page, "Train")
        page.locator("#run-start").click()
        page.wait_for_url("**run=run-1**")
        run = tmp_path / "shapes/runs/run-1"
        badge = page.locator(".state .badge").filter(visible=True)
        badge.filter(has_text="running").first.wait_for()
        step_reached(run, 30)
        page.reload()
        badge.filter(has_text="running").first.wait_for()
        os.kill(life(run)["pid"], signal.SIGKILL)  # type: ignore[index]
        badge.filter(has_text="dead").first.wait_for()
        assert "killed" in page.locator(".state").filter(visible=True).first.inner_text()
        page.get_by_role("button", name="Resume").click()
        badge.filter(has_text="running").first.wait_for()
        studio.end()
        studio.begin()
        page.goto(f"{studio.address}/?project=shapes&tab=train&run=run-1")
        badge.filter(has_text="done").first.wait_for()
        assert page.locator(".facts b").filter(has_text="150 of 150").count() == 1
        go(page, "Samples")
        page.locator(".samples video").first.wait_for()
        assert page.locator(".samples figcaption").filter(has_text="before (base model)").count() == 2
        page.get_by_role("button", name="Play all in step").click()
        page.wait_for_function("[...document.querySelectorAll('.samples video')].every((one) => !one.paused)")
        go(page, "Export")
        page.locator("[data-form] input[name=comfyui]").wait_for()
        page.get_by_role("button", name="Export", exact=True).click()
        link = page.get_by_role("link", name=re.compile("Download .*comfyui", re.I))
        link.first.wait_for()
        with page.expect_download() as got:
            link.first.click()
        content = Path(got.value.path()).read_bytes()
        assert content[8:9] == b"{", "a safetensors file"
        exported = json.loads((run / "exports.json").read_text())
        assert {one["format"] for one in exported} >= {"comfyui"}
