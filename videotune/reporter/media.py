"""What of a run's videos and pictures travels inside the page, so that the page alone can be sent."""

import base64
import re
from collections.abc import Iterator, Sequence
from os.path import getsize, isfile
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from videotune.reporter.read import Record, Run, number
from videotune.text import value_text

BUDGET = 5_000_000
"""Letters of the page that videos and pictures may take; what is beyond is referred to where it lies."""

WIDEST = 320
"""Pixels: the width of one video of those that stand side by side."""

SMALL = 160
"""Pixels: a video of lower height plays without controls, which would cover it."""

MOST_ROWS = 16
"""How many prompts are shown before and after."""

KINDS = {".mp4": ("video/mp4", 4, b"ftyp"), ".png": ("image/png", 1, b"PNG"), ".jpg": ("image/jpeg", 0, b"\xff\xd8")}
"""The type of a file by its suffix, and at which place which letters a true one has."""


class Media:
    """What the page carries: files by their path in the run directory, and ``cards``, prompts before and after.

    ``left_out``: how many would have gone over the budget.
    """

    def __init__(self, run: Run) -> None:
        """Take in what fits: prompts before and after, pictures of clips, comparisons, then previews, the latest first."""
        self.folder, self.left_out, self._room = run.folder, 0, BUDGET
        self.cards: list[dict[str, Any]] = []
        self.carried: dict[str, str] = {}
        for (prompt, seed), cells in list(sample_rows(run).items())[:MOST_ROWS]:
            steps = sorted({min(cells), max(cells)} | (exported_steps(run) & set(cells)))
            if len(steps) > 1:
                paths = [str(cells[step].get("path") or "") for step in steps]
                card = {
                    "prompt": prompt,
                    "seed": seed,
                    "steps": steps,
                    "paths": paths,
                    **_in_one_video(run.folder, paths),
                }
                fits = self._take(len(card["uri"]))
                self.cards.append(card if fits else card | {"uri": "", "why": "the page is full"})
        for path in dict.fromkeys(_wanted(run)):
            file = run.folder / path
            if local_link(path) and _is_what_it_says(file) and self._take(4 * -(-getsize(file) // 3) + 40):
                self.carried[path] = _data_uri(file.read_bytes(), file.suffix)

    def _take(self, letters: int) -> bool:
        """Whether so many letters fit; they then count."""
        fits = letters <= self._room
        self._room -= letters if fits else 0
        self.left_out += not fits
        return fits

    def video(self, path: str) -> tuple[str, str]:
        """The address of a video, within the page or where it lies; or an empty one, and why."""
        link = local_link(path)
        if link is None:
            return "", f"outside the run folder: {path}" if path else "not generated"
        there = path in self.carried or isfile(self.folder / path)
        return (self.carried.get(path, link), "") if there else ("", f"no longer there: {path}")


def local_link(path: str) -> str | None:
    """A path relative to the page as a URL, or None where it leads out of the page's folder."""
    parts = path.replace("\\", "/").split("/")
    if not path or parts[0] == "" or parts[0].endswith(":") or ".." in parts:
        return None
    return quote("/".join(parts).encode("utf-8", "replace"), safe="/")


def sample_rows(run: Run) -> dict[tuple[str, str], dict[float, Record]]:
    """Previews by prompt and seed, and for each by step."""
    rows: dict[tuple[str, str], dict[float, Record]] = {}
    for record in run.of_kind("sample"):
        key = (str(record.get("prompt", "")), value_text(record.get("seed")))
        rows.setdefault(key, {})[number(record.get("step")) or 0] = record
    return rows


def step_in(entry: Record) -> int | None:
    """The step in the name of an exported file; None where it says none."""
    found = re.search(r"-step-([0-9]{1,12})(?![0-9])", PurePath(str(entry.get("path", ""))).stem)
    return int(found[1]) if found else None


def exported_steps(run: Run) -> set[float]:
    """The steps whose checkpoints were exported."""
    return {step for entry in run.exports or () if (step := step_in(entry)) is not None}


def picture_of(clip: Record) -> str:
    """Where a run keeps the picture of a clip of its account; empty where the account gives no id."""
    return f"pictures/{str(clip['id'])[:16]}.jpg" if clip.get("id") else ""


def _in_one_video(folder: Path, paths: Sequence[str]) -> dict[str, Any]:
    """The address of a video of all these side by side, or why there is none; ``small``: controls would cover much of it."""
    if any(local_link(path) is None for path in paths):
        return {"uri": "", "small": False, "why": "a video lies outside the run folder"}
    from videotune.data.video_writer import read_video, side_by_side, video_bytes  # PyAV, for videos alone

    try:
        read = [read_video(folder / path, WIDEST) for path in paths]
        frames = side_by_side([frames for frames, _ in read])
        content = video_bytes(frames, read[0][1], crf=22)
    except (OSError, ValueError) as problem:  # of a file that is gone, or is no video, or another size than the first
        why = str(problem).replace(f"{folder}/", "")[:200]
        return {"uri": "", "small": False, "why": f"cannot be shown side by side: {why}"}
    return {"uri": _data_uri(content, ".mp4"), "small": frames[0].shape[0] < SMALL, "why": ""}


def _data_uri(content: bytes, suffix: str) -> str:
    return f"data:{KINDS[suffix][0]};base64,{base64.b64encode(content).decode()}"


def _wanted(run: Run) -> Iterator[str]:
    """Paths of the run directory, the most wanted first."""
    yield from map(picture_of, run.clips)
    for key in ("sheet", "video"):
        yield from (str(entry.get(key, "")) for entry in run.compared or ())
    records = sorted(run.of_kind("sample"), key=lambda record: -(number(record.get("step")) or 0))
    yield from (str(record.get("path") or "") for record in records)


def _is_what_it_says(file: Path) -> bool:
    """Whether a file is there and begins as its kind does."""
    if file.suffix not in KINDS or not isfile(file):
        return False
    _, place, letters = KINDS[file.suffix]
    with file.open("rb") as opened:
        return opened.read(16)[place : place + len(letters)] == letters
