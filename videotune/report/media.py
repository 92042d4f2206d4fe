"""What of a run's videos and pictures travels inside the page, so that the page alone can be sent."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.report.markup import local_link, value_text
from videotune.report.read import Record, Run, items, mapping, number, of_kind

BUDGET = 5_000_000
"""Letters of the page that videos and pictures may take; what is beyond is referred to where it lies."""

WIDEST = 320
"""Pixels: the width of one video of those that stand side by side."""

SMALL = 160
"""Pixels: a video of lower height plays without controls, which would cover it."""

MOST_ROWS = 16
"""How many prompts are shown before and after."""

KINDS = {".mp4": "video/mp4", ".png": "image/png", ".jpg": "image/jpeg"}

Row = tuple[str, str]
"""A prompt and its seed, in words."""


@dataclass(frozen=True)
class Compared:
    """A prompt's videos side by side, base first: at which steps, as a data URI, or why there is none.

    ``small``: controls would cover much of it.
    """

    row: Row
    steps: tuple[float, ...]
    paths: tuple[str, ...]
    uri: str | None
    why: str = ""
    small: bool = False


@dataclass(frozen=True)
class Media:
    """What the page carries: files by their path in the run folder, and prompts before and after.

    ``left_out``: how many files would have gone over the budget.
    """

    carried: Mapping[str, str]
    compared: tuple[Compared, ...]
    left_out: int

    def source(self, path: str) -> str | None:
        """What ``src`` says of a file of the run folder: its content, or where it lies; None for one outside of it."""
        return self.carried.get(path) or local_link(path)


def gather(run: Run) -> Media:
    """Take in what fits: prompts before and after, pictures of clips, comparisons, then previews, the latest first."""
    room, left_out = BUDGET, 0
    compared = []
    for row, cells in list(sample_rows(run).items())[:MOST_ROWS]:
        steps = ends(run, cells)
        if len(steps) < 2:
            continue
        paths = tuple(str(cells[step].get("path") or "") for step in steps)
        made = _composed(run, row, steps, paths)
        if made.uri and len(made.uri) > room:
            made, left_out = Compared(row, steps, paths, None, "the page is full"), left_out + 1
        room -= len(made.uri or "")
        compared.append(made)
    carried: dict[str, str] = {}
    for path in _wanted(run):
        file = run.folder / path
        if local_link(path) is None or path in carried or not _is_what_it_says(file):
            continue
        size = 4 * -(-file.stat().st_size // 3) + 40
        if size > room:
            left_out += 1
            continue
        carried[path] = data_uri(file.read_bytes(), KINDS[file.suffix])
        room -= size
    return Media(carried, tuple(compared), left_out)


def sample_rows(run: Run) -> dict[Row, dict[float, Record]]:
    """Previews by prompt and seed, and for each by step."""
    rows: dict[Row, dict[float, Record]] = {}
    for record in of_kind(run, "sample"):
        key = (str(record.get("prompt", "")), value_text(record.get("seed")))
        rows.setdefault(key, {})[number(record.get("step")) or 0] = record
    return rows


def exported_steps(run: Run) -> set[float]:
    """The steps whose checkpoints were exported, as their files' names say."""
    names = [Path(str(entry.get("path", ""))).stem for entry in run.exports or ()]
    found = [name.partition("-step-")[2].partition("-")[0] for name in names]
    return {float(step) for step in found if step.isdigit()}


def ends(run: Run, cells: Mapping[float, Record]) -> tuple[float, ...]:
    """Of the steps at which a prompt was drawn the base's or first, the latest, and the exported one."""
    return tuple(sorted({min(cells), max(cells)} | (exported_steps(run) & set(cells))))


def data_uri(content: bytes, kind: str) -> str:
    """Content as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _composed(run: Run, row: Row, steps: tuple[float, ...], paths: tuple[str, ...]) -> Compared:
    from videotune.data.video_writer import video_bytes
    from videotune.report.beside import read_video, side_by_side

    if any(local_link(path) is None for path in paths):
        return Compared(row, steps, paths, None, "a video lies outside the run folder")
    try:
        read = [read_video(run.folder / path, WIDEST) for path in paths]
        frames = side_by_side([frames for frames, _ in read])
        content = video_bytes(frames, read[0][1], crf=22)
    except (OSError, ValueError) as problem:  # of a file that is gone, or is no video, or another size than the first
        return Compared(row, steps, paths, None, f"cannot be shown side by side: {_short(problem, run.folder)}")
    return Compared(row, steps, paths, data_uri(content, KINDS[".mp4"]), small=frames[0].shape[0] < SMALL)


def _short(problem: Exception, folder: Path) -> str:
    return str(problem).replace(f"{folder}/", "")[:200]


def _wanted(run: Run) -> Iterator[str]:
    """Paths of the run folder, the most wanted first."""
    for clip in items(mapping(run.check).get("clips")):
        if name := picture_of(mapping(clip)):
            yield name
    yield from (str(entry.get("sheet", "")) for entry in run.compared)
    yield from (str(entry.get("video", "")) for entry in run.compared)
    by_step: Callable[[Record], float] = lambda record: -(number(record.get("step")) or 0)  # noqa: E731
    records: Sequence[Record] = sorted(of_kind(run, "sample"), key=by_step)
    yield from (str(record.get("path") or "") for record in records)


def picture_of(clip: Record) -> str:
    """Where a run keeps the picture of a clip of its account; empty where the account gives no id."""
    return f"pictures/{str(clip['id'])[:16]}.jpg" if clip.get("id") else ""


def _is_what_it_says(file: Path) -> bool:
    """Whether a file is there and begins as its kind does."""
    begin = {".mp4": (4, b"ftyp"), ".png": (1, b"PNG"), ".jpg": (0, b"\xff\xd8")}
    if file.suffix not in begin or not file.is_file():
        return False
    place, letters = begin[file.suffix]
    with file.open("rb") as opened:
        return opened.read(16)[place : place + len(letters)] == letters
