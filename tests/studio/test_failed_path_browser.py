"""A long reason why a training failed leaves every part of the bars in sight."""

import time
from pathlib import Path

from tests.support.browser import NewPage, Studio
from tests.support.reports import full_run, write_file
from videotune.files import write_json
from videotune.queue import entries
from videotune.studio import projects, queue_page

REASON = "5 steps in a row had no finite loss or gradient, and nobody knows why, " * 2
WIDTHS = (390, 768, 1000, 1280, 1920)

OVERLAPS = """() => {
  const parts = [...document.querySelectorAll('.path li, .path .next, .top-end > *')];
  const boxes = parts.map((part) => part.getBoundingClientRect()).filter((box) => box.width);
  return boxes.filter((one, i) => boxes.some((other, j) => i !== j
    && one.left < other.right - 1 && other.left < one.right - 1
    && one.top < other.bottom - 1 && other.top < one.bottom - 1)).length;
}"""


CUT_WITHOUT_MARK = """() => [...document.querySelectorAll('.running, .running > span')]
  .filter((part) => part.scrollWidth > part.clientWidth + 1
    && getComputedStyle(part).textOverflow !== 'ellipsis').length"""
"""Parts of the status whose text is cut without an ellipsis."""

WRAPPED_COUNTS = """() => [...document.querySelectorAll('.path li span')].filter((span) => {
  if (!/^\\d+ clips?$/.test(span.textContent)) return false;
  const range = document.createRange();
  range.selectNodeContents(span);
  return range.getClientRects().length > 1;
}).length"""


def add_failed_run(root: Path, reason: str = REASON) -> projects.Project:
    project = projects.create(root, "A project of a long name", preset="toy")
    (project.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    (project.folder / "clips/a.txt").write_text("a cat\n")
    run = project.folder / "runs" / "run-1"
    queue = queue_page.queue_folder(root)
    name = f"{project.name}--run-1"
    entries.add(queue, name, {}, run)
    entries.requeue(queue, name, ["train", "--resume"])
    entry = entries.find_entry(queue, name)
    full_run(run)
    write_file(run, "config.json", {"steps": 120})
    started = time.time() + 10
    folder = queue / "jobs" / "000001-train"
    folder.mkdir(parents=True)
    facts = {
        "kind": "train", "about": name, "words": ["train"],
        "cwd": str(queue), "started": started, "turn": entry.turn,
    }  # fmt: skip
    write_json(folder / "job.json", facts)
    write_json(folder / "rc.json", {"code": 1, "ended": started + 1})
    (folder / "log").write_text(f"videotune: {reason}\n")
    return project


def test_the_bars_of_a_failed_run_fit_every_width(
    browser_studio: tuple[Studio, NewPage],
) -> None:
    studio, new_page = browser_studio
    project = add_failed_run(studio.root)
    with new_page() as page:
        page.goto(f"{studio.address}/p/{project.name}/data")
        page.locator(".path .blocked", has_text="no finite loss").wait_for(
            timeout=20_000
        )
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 600})
            assert page.evaluate(OVERLAPS) == 0, f"{width} pixels"
            assert page.evaluate(CUT_WITHOUT_MARK) == 0, f"{width} pixels"
            assert page.evaluate(WRAPPED_COUNTS) == 0, f"{width} pixels"
            assert page.evaluate("document.documentElement.scrollWidth") == width
