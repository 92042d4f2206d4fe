"""Every page at four widths and in both themes: nothing scrolls sideways, overlaps or
is cut off, and the console has no error. Keys and previews work without a mouse.
"""

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import open_studio, violations
from tests.support.clips import write_clip
from tests.support.reports import full_run, write_file
from videotune.studio import projects

pytestmark = pytest.mark.slow

WIDTHS = (390, 768, 1280, 1920)
THEMES = ("light", "dark")

VIEWS = {
    "projects": ("/", ""),
    "new project": ("/", "[data-open=new]"),
    "data": ("/p/animals/data", ""),
    "clip": ("/p/animals/data", ".clip-open"),
    "auto-caption": ("/p/animals/data", "[data-open=auto-caption]"),
    "setup": ("/p/animals/setup", ""),
    "presets": ("/p/animals/setup", "[data-open=presets]"),
    "train": ("/p/animals/train?run=run-1", ""),
    "new run": ("/p/animals/train?run=run-1", "[data-open=new-run]"),
    "go on": ("/p/animals/train?run=run-1", "[data-open=go-on]"),
    "results": ("/p/animals/results?run=run-1", ""),
    "all steps": ("/p/animals/results?run=run-1", "#viewer-all"),
    "copy into ComfyUI": ("/p/animals/results?run=run-1", "[data-open=comfyui]"),
    "empty data": ("/p/empty/data", ""),
    "empty setup": ("/p/empty/setup", ""),
    "empty train": ("/p/empty/train", ""),
    "empty results": ("/p/empty/results", ""),
    "queue": ("/queue", ""),
    "settings": ("/settings", ""),
    "choose a folder": ("/settings", "[data-browse]"),
    "keys": ("/queue", "[data-open=shortcuts]"),
}
"""The address of each view, and what is clicked there."""

FAULTS = (Path(__file__).parents[1] / "support" / "layout_faults.js").read_text()
"""JavaScript that returns what is wrong with the layout of the page as it stands."""


REASON = (
    "only 67% of the prompts' effect is left on prompts that have nothing to do with "
    "the clips: the model no longer follows them as the base model did"
)
JUDGED = [
    {
        "kind": "verdict",
        "step": 120,
        "verdict": "LEARNING",
        "reason": "since step 60 clips kept aside went from 0.713 to 0.452",
        "best_step": 120,
        "best": 0.452,
        "as_good": [120],
        "turned": False,
        "quantile": None,
    },
    *(
        {
            "kind": "forgetting",
            "step": step,
            "forgetting": "12345678",
            "guidance": {"mean": share, "by_level": [share]},
            "verdict": verdict,
            "reason": REASON,
        }
        for step, share, verdict in ((0, 1.0, None), (120, 0.67, "FORGETTING"))
    ),
]
"""What a run has learnt, and what it cost the base model."""


def moving_disc(seed: int) -> np.ndarray:
    """A disc that moves over a plain ground."""
    rows, columns = np.mgrid[0:64, 0:96]
    ground, disc = np.random.default_rng(seed).integers(40, 215, (2, 3))
    frames = np.empty((36, 64, 96, 3), np.uint8)
    for index, frame in enumerate(frames):
        frame[:] = ground
        across = columns - 48 - 25 * np.sin(index / 8)
        frame[across**2 + (rows - 32) ** 2 < 200] = disc
    return frames


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty project, and one with clips, two runs with previews, and a long title."""
    root = tmp_path_factory.mktemp("layout") / "root"
    root.mkdir()
    projects.create(root, "Empty")
    project = projects.create(root, "Animals")
    projects.update(
        project,
        preset="toy",
        title="Animals of the garden, filmed from the window in two long summers",
    )
    clips = project.folder / "clips"
    for seed, name in enumerate(
        ("cat", "dog", "a_bird_with_a_very_long_name_of_its_own")
    ):
        write_clip(clips / f"{name}.mp4", moving_disc(seed), 12)
    (clips / "cat.txt").write_text("a cat that runs through the high grass " * 6)

    for name in ("run-1", "run-2"):
        run = project.folder / "runs" / name
        full_run(run)
        write_file(run, "config.json", {"steps": 120, "settings": {}})
        for path in (run / "samples").glob("*.mp4"):
            shutil.copy(clips / "cat.mp4", path)
        exports = []
        for step, kind in product((60, 120), ("comfyui", "diffusers")):
            path = run / "export" / f"{name}-step-{step}-{kind}.safetensors"
            path.write_bytes(bytes(1000))
            verified = {"max_error": 0.0, "modules": 60, "reader": kind}
            relative = path.relative_to(run).as_posix()
            exports.append({"format": kind, "path": relative, "verified": verified})
        write_file(run, "exports.json", exports)
    with (project.folder / "runs" / "run-1" / "journal.jsonl").open("a") as journal:
        journal.writelines(json.dumps(line) + "\n" for line in JUDGED)
    return root


@pytest.fixture(scope="module")
def opened(root: Path) -> Iterator[tuple[Any, Any]]:
    with open_studio(root) as (studio, page):
        page.on(
            "console",
            lambda line: (
                console.append(f"{line.text} {line.location}")
                if line.type == "error"
                else None
            ),
        )
        page.set_default_timeout(60_000)
        yield studio, page


console: list[str] = []
"""Errors that the console of the browser has shown."""


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_every_width(opened: tuple[Any, Any], view: str) -> None:
    studio, page = opened
    address, button = VIEWS[view]
    console.clear()
    faults = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(studio.address + address)
        if button:
            page.locator(f"{button}:visible").first.click()
        page.wait_for_timeout(400)
        for theme in THEMES:
            page.evaluate(
                "(theme) => { document.documentElement.dataset.theme = theme; }", theme
            )
            found = page.evaluate(FAULTS)
            if found:  # a part of the page may still have been on its way
                page.wait_for_timeout(2000)
                found = page.evaluate(FAULTS)
            faults += [f"{width} {theme}: {fault}" for fault in found]
    assert faults == []
    assert console == []


def test_keys_open_pages_and_move_through_previews(opened: tuple[Any, Any]) -> None:
    studio, page = opened
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{studio.address}/p/animals/results?run=run-1")
    page.locator("#viewer").wait_for()
    page.keyboard.press("?")
    assert page.locator("#shortcut-list kbd").first.is_visible()
    page.keyboard.press("Escape")

    assert page.locator("#viewer-at").inner_text() == "step 120"
    page.keyboard.press("j")
    assert page.locator("#viewer-at").inner_text() == "step 60"
    page.keyboard.press("a")
    cells = page.locator("#viewer-matrix td button")
    assert cells.count() == 6, "three steps of two prompts"
    cells.first.click()
    assert page.locator("#viewer-at").inner_text() == "base model"
    assert violations(page) == []

    # in a field, a letter is a letter
    page.locator("#try-prompt").fill("")
    page.locator("#try-prompt").press_sequentially("gd?a")
    assert page.locator("#try-prompt").input_value() == "gd?a"
    assert page.locator("#viewer-matrix").is_visible()
    page.locator("h2").first.click()
    page.keyboard.press("g")
    page.keyboard.press("d")
    page.wait_for_url("**/p/animals/data")


def test_previews_of_two_runs_stand_beside_each_other(opened: tuple[Any, Any]) -> None:
    studio, page = opened
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{studio.address}/p/animals/train?run=run-1")
    page.locator("#viewer-beside").select_option("run-2")
    page.locator("#shot-left figcaption").filter(has_text="run-2, step 120").wait_for()
    assert "run-1, step 120" in page.locator("#shot-right figcaption").inner_text()
    choice = page.locator("#viewer-left")
    choice.select_option(label="run-2, step 60")
    page.locator("#shot-left figcaption").filter(has_text="run-2, step 60").wait_for()
    assert "run-1, step 120" in page.locator("#shot-right figcaption").inner_text()
    page.locator("#viewer-all").click()
    assert page.locator("#viewer-matrix tbody tr").count() == 4
    page.locator("#viewer-beside").select_option("")
    assert "run-2" not in choice.inner_text()
    page.locator("#shot-left figcaption").filter(has_text="before").wait_for()
    assert page.locator("#viewer-matrix tbody tr").count() == 2


def test_lists_of_checkpoints_follow_the_run(
    opened: tuple[Any, Any], root: Path
) -> None:
    """A choice of the user's own stays."""
    studio, page = opened
    run = root / "animals" / "runs" / "run-3"
    shutil.copytree(root / "animals" / "runs" / "run-2", run)
    for step in (60, 120):
        (run / f"checkpoints/step-{step}" / "COMPLETE").touch()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{studio.address}/p/animals/results?run=run-3")
    tried, exported = page.locator("#try-step"), page.locator("#export-step")
    exported.select_option("60")

    (run / "checkpoints/step-130").mkdir()
    (run / "checkpoints/step-130/COMPLETE").touch()
    with (run / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"kind": "save", "step": 130, "time": 1.0}) + "\n")
    tried.locator("option[value='130']").wait_for(state="attached")
    texts = tried.locator("option").all_inner_texts()
    assert [text.partition(" (")[0] for text in texts] == [
        "the newest",
        "step 130",
        "step 120",
        "step 60",
        "base model alone",
    ]
    assert exported.input_value() == "60"
    assert exported.locator("option[value='130']").count() == 1
    shutil.rmtree(run)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["train", "results"])
def test_what_a_run_learnt_and_what_it_cost_are_two_lines(
    opened: tuple[Any, Any], name: str, width: int
) -> None:
    """One below the other and apart; on a phone the sentences have the page's width."""
    studio, page = opened
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{studio.address}/p/animals/{name}?run=run-1")
    learnt, cost = (
        page.locator("p.state", has_text=word) for word in ("LEARNING", "FORGETTING")
    )
    boxes = [learnt.bounding_box(), cost.bounding_box()]
    assert boxes[1]["y"] - boxes[0]["y"] - boxes[0]["height"] >= 6
    assert boxes[0]["x"] == boxes[1]["x"]
    for line in (learnt, cost):
        sentence = line.evaluate(
            """line => {
                const range = document.createRange();
                range.selectNode(line.lastChild);
                return range.getBoundingClientRect().width / line.clientWidth;
            }"""
        )
        assert sentence > (0.85 if width == 390 else 0.6)
