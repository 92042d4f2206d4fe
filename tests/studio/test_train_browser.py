"""The buttons of a run on the page Train, in a real browser."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import open_studio
from tests.support.job_folders import write_heartbeat
from tests.support.reports import full_run, write_file
from videotune.studio import projects


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 120 steps that is done."""
    project = projects.create(tmp_path / "root", "Cats", preset="toy")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120, "settings": {}})
    for step in (60, 120):
        (run / f"checkpoints/step-{step}/COMPLETE").touch()
    return run


def open_dialog(page: Any, address: str) -> None:
    """Open the dialog that trains a run on."""
    page.goto(f"{address}/p/cats/train?run=run-1")
    page.locator("[data-open=go-on]").click()


def test_a_run_that_trains_on_needs_a_later_end(run: Path) -> None:
    with open_studio(run.parents[2]) as (studio, page):
        open_dialog(page, studio.address)
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


def test_the_button_of_a_run_that_begins_to_train_says_what_it_does(run: Path) -> None:
    """The dialog gives the focus back to its button, which then makes way for another."""
    with open_studio(run.parents[2]) as (studio, page):
        open_dialog(page, studio.address)
        page.keyboard.press("Escape")
        write_heartbeat(run, os.getpid())

        stop = page.locator("#r-run .btn.stop")
        stop.wait_for()
        assert stop.inner_text() == "Stop and save"
        assert page.get_by_role("button", name="Train on from a step").count() == 0
        assert not stop.evaluate("button => button === document.activeElement")
