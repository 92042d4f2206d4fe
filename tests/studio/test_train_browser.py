"""The buttons of a run on the page Train, in a real browser."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import HeldRequests, NewPage, Studio
from tests.support.job_folders import write_heartbeat
from tests.support.reports import full_run, picture, sample, step, write_file
from videotune.studio import projects


@pytest.fixture
def run(browser_studio: tuple[Studio, NewPage]) -> Iterator[Path]:
    """A run of 120 steps that is done."""
    studio, _ = browser_studio
    project = projects.create(studio.root, "Cats", preset="toy")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120, "settings": {}})
    for saved in (60, 120):
        (run / f"checkpoints/step-{saved}/COMPLETE").touch()
    yield run
    shutil.rmtree(project.folder)  # no later test sees it train


@pytest.fixture
def address(browser_studio: tuple[Studio, NewPage], run: Path) -> str:
    """The page of the run."""
    studio, _ = browser_studio
    return f"{studio.address}/p/{run.parents[1].name}/train?run=run-1"


@pytest.fixture
def page(browser_studio: tuple[Studio, NewPage], run: Path) -> Iterator[Any]:
    _, new_page = browser_studio
    with new_page() as page:
        yield page


def open_dialog(page: Any, address: str) -> None:
    """Open the dialog that trains a run on."""
    page.goto(address)
    page.locator("[data-open=go-on]").click()


def test_a_run_that_trains_on_needs_a_later_end(page: Any, address: str) -> None:
    open_dialog(page, address)
    steps = page.locator("#go-on-steps")
    assert "more than 120" in steps.evaluate("field => field.validationMessage")

    page.locator("#go-on-start").click()
    assert page.locator("#go-on").is_visible(), "the dialog waits for a later end"

    steps.fill("121")
    assert steps.evaluate("field => field.validationMessage") == ""
    steps.fill("")
    page.locator("#go-on-step").select_option("60")
    assert steps.evaluate("field => field.validationMessage") == ""
    steps.fill("60")
    assert "more than 60" in steps.evaluate("field => field.validationMessage")


def test_the_button_of_a_run_that_begins_to_train_says_what_it_does(
    page: Any, address: str, run: Path
) -> None:
    """The dialog gives the focus back to its button, which then makes way for another."""
    open_dialog(page, address)
    page.keyboard.press("Escape")
    write_heartbeat(run, os.getpid())

    stop = page.locator("#r-run .btn.stop")
    stop.wait_for()
    assert stop.inner_text() == "Stop and save"
    assert page.get_by_role("button", name="Train on from a step").count() == 0
    assert not stop.evaluate("button => button === document.activeElement")


def test_times_seen_are_of_one_reading_while_a_run_goes_on(
    page: Any, address: str, run: Path
) -> None:
    """The figure and the part below it are never of two steps, even if one is late."""
    page.goto(address)
    figure, chapter = page.locator("#times-seen"), page.locator("#exposure-text")
    before = figure.inner_text()
    page.locator("#exposure > summary").click()
    chapter.filter(has_text=f"each seen {before}").wait_for()

    held = HeldRequests(page, "**/exposure?*")
    samples = page.locator(".stat", has_text="loss (mean").locator("b")
    loss = samples.inner_text()
    with (run / "journal.jsonl").open("a") as journal:
        for number in range(121, 141):
            journal.write(json.dumps(step(number, mse=9.0)) + "\n")
    page.wait_for_function(
        "([loss]) => !document.querySelector('#r-run').innerText.includes(loss)",
        arg=[loss],
    )
    held.wait()
    assert figure.inner_text() == before

    held.release()
    chapter.filter(has_not_text=f"each seen {before}").wait_for()
    now = figure.inner_text()
    assert now != before
    assert f"each seen {now}" in chapter.inner_text()

    # While the list is folded, only the figure follows the run.
    page.locator("#exposure > summary").click()
    with (run / "journal.jsonl").open("a") as journal:
        for number in range(141, 161):
            journal.write(json.dumps(step(number)) + "\n")
    page.wait_for_function(
        "([now]) => document.querySelector('#times-seen').innerText !== now",
        arg=[now],
    )


def test_marks_of_a_chart_are_named_and_stand_below_its_curves(
    page: Any, address: str, run: Path
) -> None:
    """A dot within the curves would look like a value."""
    page.goto(address)
    page.locator("#tab-validation").click()
    marks = page.locator(".chart-lane i")
    marks.first.wait_for()
    bottom = page.locator(".uplot .u-over").evaluate(
        "plot => plot.getBoundingClientRect().bottom"
    )
    tops = marks.evaluate_all(
        "marks => marks.map((mark) => mark.getBoundingClientRect().top)"
    )
    assert min(tops) >= bottom
    titles = page.locator(".chart-lane b").all_inner_texts()
    assert titles == ["Previews", "Checkpoints"]

    checkpoint = page.locator(".chart-lane.saves i").first
    checkpoint.hover()
    said = checkpoint.evaluate("mark => getComputedStyle(mark, '::after').content")
    assert said == '"Checkpoint of step 60"'
    page.locator("#chart-words summary").click()
    assert (
        "Checkpoints at steps 60, 120." in page.locator("#chart-sentence").inner_text()
    )


def test_the_border_of_a_wipe_ends_with_the_previews(
    page: Any, address: str, run: Path
) -> None:
    page.goto(address)
    page.locator("#viewer-wipe").click()
    # The training clip below, as its button shows it.
    page.locator("#shot-near").evaluate("shot => { shot.hidden = false; }")
    boxes = [
        page.locator(f"#{name}").bounding_box()
        for name in ("shot-left", "shot-right", "wipe-line", "shot-near")
    ]
    left, right, line, near = (
        (round(box["y"]), round(box["y"] + box["height"])) for box in boxes
    )
    assert right == left
    assert line[1] <= left[1]
    assert near[0] >= left[1]


def test_all_steps_open_in_sight_while_the_wipe_is_on(
    page: Any, address: str, run: Path
) -> None:
    page.set_viewport_size({"width": 1280, "height": 500})
    page.goto(address)
    page.locator("#viewer-wipe").click()
    page.locator("#viewer-all").click()
    page.locator("#viewer-matrix table").wait_for()
    box = page.locator("#viewer-matrix").bounding_box()
    assert box["y"] + min(box["height"], 60) <= 500


def test_the_fault_of_a_preview_is_read_whole_among_all_steps(
    page: Any, address: str, run: Path
) -> None:
    faulty = sample(0, "a zorble moves left", picture=picture("flat"))
    with (run / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps(faulty) + "\n")

    page.goto(address)
    page.locator("#viewer-all").click()
    label = page.locator("#viewer-matrix .badge")
    label.wait_for()
    label_box, tile_box = label.bounding_box(), label.locator("..").bounding_box()
    assert label_box["x"] + label_box["width"] <= tile_box["x"] + tile_box["width"]
    assert label_box["y"] >= tile_box["y"]
    typeface = "element => getComputedStyle(element).fontFamily"
    assert label.evaluate(typeface) == page.locator("body").evaluate(typeface)


@pytest.mark.parametrize("width", [390, 1280])
def test_how_often_a_clip_was_seen_is_read_whole(
    page: Any, address: str, run: Path, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(address)
    page.evaluate(
        "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
    )
    amounts = page.locator(".bars > span:nth-child(3n)")
    amounts.first.wait_for()
    amounts.first.evaluate(
        "one => { one.textContent = '1,039 of 1,134 times, in 15 parts'; }"
    )
    is_whole = amounts.first.evaluate(
        "one => one.scrollWidth <= one.clientWidth && "
        "one.getBoundingClientRect().right <= one.closest('.bars').getBoundingClientRect().right + 1"
    )
    assert is_whole
