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

from tests.studio.browser_kit import go, make_project, opened, put, upload
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


def check_and_mend(page: Any, home: Path, sent: list[Path]) -> None:
    """Send the clips; the broken one is explained; a caption is written, found and kept."""
    told = upload(page, sent)
    assert "14 files added" in told
    assert "notes.mp4: it is named like a clip, but its content is text" in told
    state(page, "broken.mp4").filter(has_text="skipped").wait_for()
    why = page.locator('.clip[data-path="clips/broken.mp4"] .why').inner_text()
    assert re.search("cannot be read|damaged|no video", why), why
    first = sent[2].name
    area = f'.clip[data-path="clips/{first}"] textarea'
    page.locator(area).fill("a shape <i>that</i> moves")
    page.locator(area).press("Control+Enter")
    page.locator("#vt-told p").filter(has_text="caption saved").first.wait_for()
    assert (home / "clips" / first).with_suffix(".txt").read_text() == "a shape <i>that</i> moves\n"
    page.locator("[data-clips] input[type=search]").fill("that</i> moves")
    page.locator(".filters .count").filter(has_text="1 of 7").wait_for()
    page.reload()
    page.locator(area).wait_for()
    assert page.locator(area).input_value() == "a shape <i>that</i> moves"
    assert page.locator("h1").inner_text() == "Shapes <b>of</b> mine"
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a phone scrolls down, not sideways"
    page.set_viewport_size({"width": 1280, "height": 900})


SETTINGS = (("steps", "40"), ("batch_size", "1"), ("save_every", "10"), ("sample_after", "20"))
RARER = (("validate_every", "0"), ("sample_metrics.budget", "0"), ("sample.steps", "4"))
"""Settings that nearly everyone looks at, and some that have to be found."""


def plan(page: Any) -> None:
    """Type the settings and read the plan."""
    go(page, "Setup")
    page.locator('[id="f-steps"]').wait_for()
    page.locator("#f-allow_skips").check()
    for key, value in SETTINGS:
        put(page, key, value)
    for key, value in RARER:
        page.locator("[data-find]").fill(key.rpartition(".")[2].replace("_", " "))
        put(page, key, value)
    put(page, "card", "rtx 4090")
    page.locator(".side .badge").filter(has_text="fits").first.wait_for()
    page.locator(".side .facts b").filter(has_text="40").first.wait_for()


def step_reached(run: Path, step: int, seconds: float = 240) -> None:
    """Wait until the journal has the step."""
    end = time.monotonic() + seconds
    while not (run / "journal.jsonl").is_file() or f'"step": {step},' not in (run / "journal.jsonl").read_text():
        assert time.monotonic() < end, f"step {step} was not reached"
        time.sleep(0.1)


def badge(page: Any, word: str) -> None:
    """Wait until the page says that the run stands so."""
    page.locator(".state .badge").filter(visible=True).filter(has_text=word).first.wait_for()


def train_and_kill(page: Any, run: Path) -> None:
    """Begin, load the page anew in the midst of it, kill the process, read that it is dead."""
    go(page, "Train")
    page.locator("#run-start").click()
    page.wait_for_url("**run=run-1**")
    badge(page, "running")
    step_reached(run, 12)
    pulse = life(run)
    assert pulse is not None
    os.kill(pulse["pid"], signal.SIGSTOP)  # held, so that it cannot come to its end while the page is loaded
    page.reload()
    badge(page, "running")
    os.kill(pulse["pid"], signal.SIGKILL)
    badge(page, "dead")
    told = page.locator("#page-train").inner_text()
    assert "killed by signal 9" in told
    assert "it can go on from there" in told, "ten steps were saved"


def compare(page: Any) -> None:
    """The samples stand beside the base's, and play in step."""
    go(page, "Samples")
    page.locator(".samples video").first.wait_for()
    assert page.locator(".samples figcaption").filter(has_text="before (base model)").count() == 2
    page.get_by_role("button", name="Play all in step").click()
    page.wait_for_function("[...document.querySelectorAll('.samples video')].every((one) => !one.paused)")


def export(page: Any, run: Path) -> None:
    """Write the file, read how it was verified, download it."""
    go(page, "Export")
    page.locator("[data-form] input[name=comfyui]").wait_for()
    page.get_by_role("button", name="Export", exact=True).click()
    link = page.get_by_role("link", name=re.compile("Download .*comfyui", re.I))
    link.first.wait_for()
    assert page.locator(".badge").filter(has_text="verified").filter(visible=True).count() >= 2
    with page.expect_download() as got:
        link.first.click()
    content = Path(got.value.path()).read_bytes()
    exported = {one["format"]: run / one["path"] for one in json.loads((run / "exports.json").read_text())}
    assert content == exported["comfyui"].read_bytes()
    assert content[8:9] == b"{", "a safetensors file"


def test_from_a_folder_of_clips_to_a_downloaded_lora(tmp_path: Path, sent: list[Path]) -> None:
    with opened(tmp_path) as (studio, page):
        make_project(page, studio.address, "Shapes <b>of</b> mine")
        home = tmp_path / "shapes-b-of-b-mine"
        run = home / "runs/run-1"
        check_and_mend(page, home, sent)
        plan(page)
        train_and_kill(page, run)
        page.get_by_role("button", name="Resume").click()
        badge(page, "running")
        studio.end()  # the training goes on without the server, and the next one finds it
        studio.begin()
        page.goto(f"{studio.address}/?project={home.name}&tab=train&run=run-1")
        badge(page, "done")
        assert page.locator(".facts b").filter(has_text="40 of 40").count() == 1
        compare(page)
        export(page, run)
