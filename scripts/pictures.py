"""Makes the pictures of runs in docs/pictures: before and after, comparison, report,
report of a run that overfits.

Use: python scripts/pictures.py WORK [--out DIR]. WORK keeps the demo and the run that
overfits; a second call uses what is there. It takes about ten minutes on two cores and
needs Chromium. The studio's pictures come from studio_pictures.py.
"""

import argparse
import json
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from videotune.toy.dataset import write_dataset

ROOT = Path(__file__).parents[1]
PROMPT = "a zorble moves right"
LARGEST = 300_000
"""Bytes of a picture; a larger one keeps 6 of 8 bits of each colour."""

OVERFITTING_CLIPS = 4
HELD_OUT_CLIPS = 16
OVERFITTING = {
    "seed": 1,
    "steps": 240,
    "batch_size": 4,
    "learning_rate": 2e-3,
    "learning_rate_scheduler": "CONSTANT",
    "video_config.frames": 9,
    "video_config.windows": "head",
    "validation_fraction": 0,
    "validation_windows": 24,
    "validate_every": 40,
    "save_every": 40,
    "sample_after": 0,
    "sample_metrics.budget": 0,
}
"""Four clips, each seen 240 times: the verdict calls it."""


def videotune(work: Path, *words: str) -> None:
    """Run a command of this checkout in ``work``."""
    subprocess.run([sys.executable, "-m", "videotune", *words], cwd=work, check=True)


def overfit(work: Path) -> Path:
    """Train on four clips until the run copies them; return the run's folder."""
    run = work / "overfits"
    if (run / "report.html").is_file():
        return run

    clips = work / "four-clips"
    fresh = work / "fresh-clips"
    write_dataset(clips, concept_clips=OVERFITTING_CLIPS, reminder_clips=0, seed=1001)
    write_dataset(fresh, concept_clips=HELD_OUT_CLIPS, reminder_clips=0, seed=2001)
    datasets = [{"path": clips.name}, {"path": fresh.name, "kind": "validation"}]
    settings = OVERFITTING | {"datasets": datasets}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    videotune(work, "train", "--preset", "toy", "--out", run.name, *sets)
    return run


def write(picture: Image.Image, path: Path) -> None:
    """Write the picture, with fewer shades if it is too large."""
    picture = picture.convert("RGB")
    picture.save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        ImageOps.posterize(picture, 6).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def screenshot(page: Any, report: Path, width: int, height: int) -> Image.Image:
    """Return the beginning of a report as a browser shows it."""
    page.set_viewport_size({"width": width, "height": height})
    page.goto(report.as_uri())
    page.wait_for_timeout(1500)
    return Image.open(BytesIO(page.screenshot()))


def main() -> None:
    """Make the runs that are missing, then the pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    out = arguments.out
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)

    demo = work / "demo"
    videotune(work, "demo", "--out", demo.name)
    videotune(work, "compare", "demo/run", "--prompt", PROMPT)
    overfits = overfit(work)
    for run in (demo / "run", overfits):  # with the words of today
        videotune(work, "report", str(run.relative_to(work)))

    write(Image.open(demo / "before_after.png"), out / "before-after.png")
    compared = json.loads((demo / "run" / "compare" / "compare.json").read_text())
    sheet = next(entry["sheet"] for entry in compared if entry["prompt"] == PROMPT)
    write(Image.open(demo / "run" / sheet), out / "compare.png")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(color_scheme="light")
        write(
            screenshot(page, demo / "run" / "report.html", 800, 1000),
            out / "report.png",
        )
        write(
            screenshot(page, overfits / "report.html", 1160, 890),
            out / "overfitting.png",
        )
        browser.close()


if __name__ == "__main__":
    main()
