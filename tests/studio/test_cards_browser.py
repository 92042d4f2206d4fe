"""A run on two GPUs from the page Setup to the page Train, in a real browser. The driver
is a stand-in, so the two processes compute on the CPU.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import WAIT, Studio, started_studio
from tests.support.driver import build_driver
from tests.support.waiting import wait_until
from videotune.queue import jobs
from videotune.queue.entries import GPU_VARIABLE, entries
from videotune.runs.run_life import life
from videotune.studio import projects
from videotune.studio.header import QUEUE_FOLDER


@pytest.fixture
def studio_and_page(tmp_path: Path) -> Iterator[tuple[Studio, Any]]:
    """A studio of a computer with two GPUs."""
    build_driver(tmp_path)
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = str(tmp_path)
    root = tmp_path / "projects"
    root.mkdir()
    try:
        with started_studio(root) as (studio, new_page), new_page() as page:
            yield studio, page
    finally:
        os.environ.pop("LD_LIBRARY_PATH")
        if before is not None:
            os.environ["LD_LIBRARY_PATH"] = before
        for job in jobs.all_jobs(root / QUEUE_FOLDER):
            jobs.stop(job)


@pytest.mark.slow
def test_a_run_that_asks_for_two_gpus_shows_its_two_processes(
    studio_and_page: tuple[Studio, Any], small_clips: Path
) -> None:
    studio, page = studio_and_page
    page.set_default_timeout(WAIT)
    project = projects.create(studio.root, "Cats", preset="toy")
    clips = project.folder / "clips"
    for path in small_clips.glob("*/*.*"):
        shutil.copy(path, clips / path.name)
    projects.save_draft(project, {"steps": 20000, "resolution": "32x32"})

    page.goto(f"{studio.address}/p/cats/setup")
    count = page.locator("#run-gpus")
    assert count.locator("option").all_inner_texts() == ["1", "2"]
    count.select_option("2")
    page.locator("#start:not([disabled])").click()
    page.wait_for_url("**/train?run=run-1")

    queue = studio.root / QUEUE_FOLDER
    (entry,) = entries(queue)
    assert entry.cards == 2
    page.locator("#processes tbody tr").nth(1).wait_for()
    table = page.locator("#processes table").inner_text()
    assert "Own work" in table
    assert page.locator("#processes tbody tr").count() == 2
    box = page.locator("#processes .scroll-x")
    fits = box.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert fits, box.inner_text()

    (entry,) = entries(queue)
    assert entry.job is not None
    assert (entry.job.env[GPU_VARIABLE], entry.job.processes) == ("0,1", 2)
    page.goto(f"{studio.address}/queue")
    page.get_by_text("works for run-1").wait_for()
    assert page.get_by_text("2 GPUs").first.is_visible()

    page.get_by_role("button", name="Stop run-1").click()
    wait_until(lambda: entries(queue)[0].state == "stopped", WAIT / 1000)
    heartbeat = life(project.folder / "runs" / "run-1")
    assert heartbeat is not None
    assert heartbeat["state"] == "ended"
    assert [ranks["rank"] for ranks in heartbeat["ranks"]] == [0, 1]
