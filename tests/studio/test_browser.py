"""The studio in a real browser: a folder of clips becomes a downloaded LoRA, and
nothing is lost on the way.
"""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.studio_pictures import take_pictures
from tests.support.browser import make_project, open_page, open_studio, violations
from tests.support.waiting import wait_until
from videotune.config.nested_keys import flatten
from videotune.runs.run_life import life
from videotune.studio import projects

AROUND = 90.0
"""Seconds that everything but the training itself may take on two idle cores; other
work on the machine may cost as much again, so a test fails at three times as many.
"""


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory, small_clips: Path) -> list[Path]:
    """Six clips with captions, one that is cut short, and a text that is named like a
    clip.
    """
    folder = tmp_path_factory.mktemp("sent")
    for video in sorted((small_clips / "videos").iterdir()):
        (folder / video.name).write_bytes(video.read_bytes())
        (folder / f"{video.stem}.txt").write_text(
            (small_clips / "captions" / f"{video.stem}.txt").read_text()
        )
    (folder / "broken.mp4").write_bytes(video.read_bytes()[:700])
    (folder / "broken.txt").write_text("a clip that is cut short")
    (folder / "notes.mp4").write_text("these are notes")
    return sorted(folder.iterdir())


def tile(page: Any, name: str) -> Any:
    return page.locator(f'#tiles .clip[data-path="clips/{name}"]')


def check_and_mend(page: Any, home: Path, sent: list[Path]) -> None:
    """Send the clips; the broken one is explained; a caption is written, found and
    kept.
    """
    page.locator("#files").set_input_files([str(path) for path in sent])
    page.locator("#sent-refused li").filter(has_text="notes.mp4").wait_for()
    assert "its content is text" in page.locator("#sent-refused").inner_text()
    tile(page, "broken.mp4").locator(".badge").filter(
        has_text="cannot be used"
    ).wait_for()
    assert re.search(
        "cannot be read|damaged|no video",
        tile(page, "broken.mp4").locator(".clip-why").first.inner_text(),
    )
    first = sent[2].name
    area = tile(page, first).locator("textarea")
    area.fill("a shape <i>that</i> moves")
    area.press("Tab")
    caption = (home / "clips" / first).with_suffix(".txt")
    expected = "a shape <i>that</i> moves\n"
    wait_until(lambda: caption.read_text() == expected, seconds=240)
    page.locator("#find").fill("that</i> moves")
    page.locator("#tiles-found[data-found='1']").wait_for(state="attached")
    page.reload()
    assert area.input_value() == "a shape <i>that</i> moves"
    page.locator("#find").fill("")
    assert page.locator("h1").inner_text() == "Shapes <b>of</b> mine"
    assert violations(page) == []


SETTINGS = (
    ("steps", "40"),
    ("batch_size", "1"),
    ("save_every", "10"),
    ("sample_after", "20"),
)
RARER = (("validate_every", "0"), ("sample_metrics.budget", "0"), ("sample.steps", "4"))
"""Settings that nearly everyone looks at, and some that have to be found."""


def plan(page: Any, home: Path) -> None:
    """Type the settings and read the plan."""
    open_page(page, "Setup")
    named = projects.find_project(home.parent, home.name)
    for key, value in (*SETTINGS, *RARER):
        if key not in ("steps", "learning_rate"):
            page.locator("#find").fill(key)
        field = page.locator(f'[id="f-{key}"]')
        field.fill(value)
        field.press("Tab")
        wait_until(
            lambda key=key, value=value: (
                flatten(projects.draft(named)).get(key) == float(value)
            ),
            seconds=240,
        )
    page.locator("#find").fill("")
    page.locator("#unusable .btn", has_text="Leave it out").click()  # the broken clip
    page.locator("#f-fact-allow_skips").wait_for()
    page.locator("#r-plan .stat b").filter(has_text=re.compile("^40$")).first.wait_for()
    assert violations(page) == []


def step_reached(run: Path, step: int, seconds: float = 240) -> None:
    """Wait until the journal has the step."""
    end = time.monotonic() + seconds
    while (
        not (run / "journal.jsonl").is_file()
        or f'"step": {step},' not in (run / "journal.jsonl").read_text()
    ):
        assert time.monotonic() < end, f"step {step} was not reached"
        time.sleep(0.1)


def resumed_steps(run: Path) -> list[int]:
    """The steps from which the journal says that the run was resumed."""
    lines = (run / "journal.jsonl").read_text().splitlines()
    return [
        json.loads(line)["from_step"]
        for line in lines
        if line.endswith("}") and json.loads(line)["kind"] == "resume"
    ]


def badge(page: Any, word: str) -> None:
    """Wait until the page says that the run stands so."""
    page.locator(".state .badge").filter(
        has_text=re.compile(f"^{word}")
    ).first.wait_for()


def train_and_kill(page: Any, run: Path) -> None:
    """Begin, load the page anew in the midst of it, pause, go on, kill the process: the
    queue goes on from what is saved.
    """
    page.locator("#start").click()
    page.wait_for_url("**run=run-1**")
    badge(page, "running")
    step_reached(run, 12)
    page.get_by_role("button", name="Pause", exact=True).click()
    badge(page, "paused")
    pulse = life(run)
    assert pulse is not None
    page.reload()
    badge(page, "paused")
    assert violations(page) == []
    page.get_by_role("button", name="Continue").click()
    os.kill(pulse["pid"], signal.SIGKILL)
    saved = max(
        int(path.parent.name[5:]) for path in run.glob("checkpoints/*/COMPLETE")
    )
    resumed = wait_until(lambda: resumed_steps(run), seconds=240)
    assert resumed == [saved], "the worker resumed what had died"


def export(page: Any, run: Path) -> None:
    """Take the file for ComfyUI, which the run has written, and copy it there too."""
    open_page(page, "Results")
    with page.expect_download() as got:
        page.locator("#take-comfyui").click()
    content = Path(got.value.path()).read_bytes()
    exported = {
        one["format"]: run / one["path"]
        for one in json.loads((run / "exports.json").read_text())
    }
    assert content == exported["comfyui"].read_bytes()
    assert content[8:9] == b"{", "a safetensors file"
    assert page.locator("#take-diffusers").is_visible()
    assert "acts as trained" in page.locator("#r-result").inner_text()
    assert violations(page) == []

    loras = run.parents[3] / "ComfyUI" / "models" / "loras"
    loras.mkdir(parents=True, exist_ok=True)
    page.get_by_role("button", name="Copy into ComfyUI").click()
    page.locator("#comfyui-folder").fill(str(loras.parents[1]))
    page.get_by_role("button", name="Copy", exact=True).click()
    page.locator("#comfyui").wait_for(state="hidden")
    (copy,) = loras.iterdir()
    assert copy.read_bytes() == content


def test_from_a_folder_of_clips_to_a_downloaded_lora(
    tmp_path: Path, sent: list[Path]
) -> None:
    with open_studio(tmp_path / "root") as (studio, page):
        make_project(page, studio.address, "Shapes <b>of</b> mine")
        home = studio.root / "shapes-b-of-b-mine"
        run = home / "runs/run-1"
        check_and_mend(page, home, sent)
        plan(page, home)
        train_and_kill(page, run)
        # the training goes on without the server, and the next one finds it
        studio.end()
        studio.begin()
        page.goto(f"{studio.address}/p/{home.name}/train?run=run-1")
        badge(page, "done")
        assert "40 of 40" in page.locator("#r-run").inner_text()
        page.locator("#shot-right video").wait_for()
        assert violations(page) == []
        export(page, run)
        for path in ("/", "/queue"):
            page.goto(studio.address + path)
            assert violations(page) == []
        pictures = take_pictures(
            page,
            studio.address,
            home.name,
            tmp_path / "pictures",
            widths=(390,),
        )
        assert {path.name.rpartition("-")[2] for path in pictures} == {"390.webp"}
        assert len(pictures) == 2 * len({path.name.split("-")[0] for path in pictures})


def test_the_time_around_a_training(tmp_path: Path, sent: list[Path]) -> None:
    """From an empty root to a file on the disk, without the seconds of the steps."""
    begun = time.monotonic()
    with open_studio(tmp_path / "root") as (studio, page):
        make_project(page, studio.address, "Quick")
        home = studio.root / "quick"
        page.locator("#files").set_input_files(
            [
                str(path)
                for path in sent
                if not path.stem.startswith(("broken", "notes"))
            ]
        )
        page.locator("#counts .badge.good").filter(has_text="6 used").wait_for()
        open_page(page, "Setup")
        page.locator("#f-steps").fill("20")
        page.locator("#f-steps").press("Tab")
        page.locator("#r-plan .stat b").filter(
            has_text=re.compile("^20$")
        ).first.wait_for()
        page.locator("#start").click()
        page.wait_for_url("**run=run-1**")
        badge(page, "done")
        export(page, home / "runs/run-1")
    whole = time.monotonic() - begun
    lines = [
        json.loads(line)
        for line in (home / "runs/run-1/journal.jsonl").read_text().splitlines()
    ]
    steps = sum(
        sum(line["seconds"].values()) for line in lines if line["kind"] == "step"
    )
    print(
        f"from an empty root to a file: {whole - steps:.0f} s beside {steps:.0f} s of steps (bound {AROUND:.0f} s)"
    )
    assert whole - steps < 3 * AROUND
