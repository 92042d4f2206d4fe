"""The chapters with videos: before and after, all previews, one prompt over all checkpoints, and sample metrics.

What of a run's videos and pictures travels inside the page (``Media``), so that the page alone can be sent.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from os.path import exists, getsize, isfile
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from videotune.files import path_from
from videotune.reporter.curves import Line, line_chart
from videotune.reporter.read import Record, Run, at, items, mapping, number, points
from videotune.text import plain, some, value_text

BUDGET = 5_000_000
"""Letters of the page that videos and pictures may take; what is beyond is referred to where it lies."""

WIDEST = 320
"""Pixels: the width of one video of those that stand side by side."""

SMALL = 160
"""Pixels: a video of lower height plays without controls, which would cover it."""

MOST_ROWS = 16
"""How many prompts are shown before and after."""

KINDS = {
    ".mp4": ("video/mp4", 4, b"ftyp"),
    ".png": ("image/png", 1, b"PNG"),
    ".jpg": ("image/jpeg", 0, b"\xff\xd8"),
}
"""The type of a file by its suffix, and at which place which letters a true one has."""


class Media:
    """What the page carries: files by their path in the run directory, and ``cards``, prompts before and after.

    ``left_out``: how many would have gone over the budget.
    """

    def __init__(self, run: Run) -> None:
        """Take in what fits: prompts before and after, pictures of clips, comparisons, then previews, the latest first."""
        self.folder = run.folder
        self.left_out = 0
        self._room = BUDGET
        self.cards: list[dict[str, Any]] = []
        self.carried: dict[str, str] = {}
        for (prompt, seed), cells in list(sample_rows(run).items())[:MOST_ROWS]:
            steps = sorted({min(cells), max(cells)} | (exported_steps(run) & set(cells)))
            if len(steps) > 1:
                paths = [str(cells[step].get("path") or "") for step in steps]
                card = {"prompt": prompt, "seed": seed, "steps": steps, "paths": paths}
                card |= _in_one_video(run.folder, paths)
                fits = self._take(len(card["uri"]))
                self.cards.append(
                    card if fits else card | {"uri": "", "why": "the page is full"}
                )
        for path in dict.fromkeys(_wanted(run)):
            file = run.folder / path
            if (
                local_link(path)
                and _is_what_it_says(file)
                and self._take(4 * -(-getsize(file) // 3) + 40)
            ):
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


def link_in(run: Run, path: str) -> str | None:
    """The address of a file or folder of the run; None where it is not there, or lies elsewhere."""
    place = run.folder / path
    return local_link(path_from(run.folder, place)) if path and exists(place) else None


def sample_rows(run: Run) -> dict[tuple[str, str], dict[float, Record]]:
    """Previews by prompt and seed, and for each by step."""
    rows: dict[tuple[str, str], dict[float, Record]] = {}
    for record in run.of_kind("sample"):
        key = (str(record.get("prompt", "")), value_text(record.get("seed")))
        rows.setdefault(key, {})[number(record.get("step")) or 0] = record
    return rows


def step_in(entry: Record) -> int | None:
    """The step in the name of an exported file; None where it says none."""
    found = re.search(
        r"-step-([0-9]{1,12})(?![0-9])", PurePath(str(entry.get("path", ""))).stem
    )
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
    from videotune.data.video_writer import (
        read_video,
        side_by_side,
        video_bytes,
    )  # PyAV, for videos alone

    try:
        read = [read_video(folder / path, WIDEST) for path in paths]
        frames = side_by_side([frames for frames, _ in read])
        content = video_bytes(frames, read[0][1], crf=22)
    except (
        OSError,
        ValueError,
    ) as problem:  # of a file that is gone, or is no video, or another size than the first
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
    records = sorted(
        run.of_kind("sample"), key=lambda record: -(number(record.get("step")) or 0)
    )
    yield from (str(record.get("path") or "") for record in records)


def _is_what_it_says(file: Path) -> bool:
    """Whether a file is there and begins as its kind does."""
    if file.suffix not in KINDS or not isfile(file):
        return False
    _, place, letters = KINDS[file.suffix]
    with file.open("rb") as opened:
        return opened.read(16)[place : place + len(letters)] == letters


def before(run: Run, media: Media) -> dict[str, Any]:
    """Each prompt as the base samples it beside what was learnt, with the same seed, in one video and so in step."""
    exported = exported_steps(run)
    for card in media.cards:
        card["kind"] = _prompt_kind(run, card["prompt"])
        card["names"] = [
            _step_name(step) + ", exported" * (step > 0 and step in exported)
            for step in card["steps"]
        ]
        card["videos"] = [media.video(path) for path in card["paths"]]
    why = run.absent("a prompt appears as soon as it is sampled twice", "sample_after")
    return {"absent": "" if media.cards else why, "demo": run.demo, "cards": media.cards}


def _prompt_kind(run: Run, prompt: str) -> tuple[str, str] | None:
    """Whether a prompt is a caption that the run was shown, in words, and a colour; None where the account has none."""
    clips = [clip for clip in run.clips if clip.get("used") and "captions" in clip]
    kinds = {clip.get("kind") for clip in clips if prompt in items(clip.get("captions"))}
    if not clips:
        return None
    if kinds - {"regularization"}:
        return "caption of training clips", "care"  # what is sampled may be copied
    return (
        ("caption of regularization clips", "calm") if kinds else ("caption of no clip", "good")
    )


def _step_name(step: float) -> str:
    return "base" if step == 0 else f"step {plain(step)}"


def samples(run: Run, media: Media) -> dict[str, Any]:
    """Previews as a grid: a row a prompt and seed, a column a step, the base's first."""
    rows = sample_rows(run)
    above = {
        (card["prompt"], card["seed"], path) for card in media.cards for path in card["paths"]
    }
    there = {
        (*row, str(cell.get("path"))) for row, cells in rows.items() for cell in cells.values()
    }
    steps = sorted({step for cells in rows.values() for step in cells})
    paths = {
        row: [str(mapping(cells.get(step))["path"] or "") for step in steps]
        for row, cells in rows.items()
    }
    return {
        "absent": ""
        if rows
        else run.absent("previews appear as the run samples them", "sample_after"),
        "all_above": there <= above,
        "left_out": media.left_out,
        "budget": f"{BUDGET / 1e6:g} MB",
        "steps": ["base (step 0)" if step == 0 else _step_name(step) for step in steps],
        "rows": [(*row, [media.video(path) for path in own]) for row, own in paths.items()],
    }


def compare(run: Run, media: Media) -> dict[str, Any]:
    """What ``compare`` sampled: one prompt and seed over all checkpoints."""
    entries = []
    for entry in run.compared or ():
        steps = ", ".join(_step_name(number(step) or 0) for step in items(entry.get("steps")))
        entries.append((mapping(entry), media.video(str(entry.get("video") or "")), steps))
    return {"entries": entries}


METRICS = {
    "diversity (Vendi)": ("diversity",), "motion energy": ("motion", "energy"), "flicker": ("motion", "flicker"),
    "saturation": ("motion", "saturation"),
}  # fmt: skip
"""Sample metrics of a record by their name: the keys under which each lies."""

LIKENESS = {
    "samples": (("mean",), "one"), "base": (("base",), "pale one"), "likely copy above": (("line",), "two"),
    "held-out clips, median": (("held_out", "median"), "three"), "other clips, median": (("others", "median"), "pale two"),
}  # fmt: skip
"""Curves of likeness by their name: the keys under which the values lie, and the stroke."""


def metrics(run: Run) -> dict[str, Any]:
    """Measured samples: the nearest clip beside each, and ratios to the base's and the clips'."""
    everything = run.of_kind("sample_metrics")
    measured = [record for record in everything if "not_measured" not in record]
    alike = [
        record
        for record in measured
        if record.get("sample_metrics") == measured[-1].get("sample_metrics")
    ]
    last = mapping(alike[-1] if alike else None)
    others = [
        number(at(last, "replication", key, "p99")) or 0.0 for key in ("held_out", "others")
    ]
    sampled = [mapping(one) for one in items(last.get("samples"))]
    return {
        "absent": ""
        if everything
        else run.absent("samples are measured at checkpoints", "sample_metrics.budget"),
        "not_measured": _not_measured(
            [record for record in everything if "not_measured" in record]
        ),
        "latest": last,
        "copies": {
            key: number(at(last, "replication", key))
            for key in ("line", "copies", "base_copies")
        },
        "too_alike": max(others) > 0.95,
        "charts": _curves(alike),
        "head": ["step", *METRICS],
        "rows": [
            [plain(number(r.get("step"))), *(_figure(r, keys) for keys in METRICS.values())]
            for r in alike
        ],
        "nearest": [(one, link_in(run, str(one["path"] or ""))) for one in sampled],
    }


def _curves(records: Sequence[Record]) -> list[tuple[str, dict[str, Any]]]:
    """Mean likeness to the nearest clip by step, between the base's and the line; diversity and motion as ratios."""
    likeness = [
        Line(n, points(records, "replication", *keys), c, c == "one")
        for n, (keys, c) in LIKENESS.items()
    ]
    ratio_keys = [keys for name, keys in METRICS.items() if name != "flicker"]
    strokes = zip(ratio_keys, ("one", "two", "three"), strict=True)
    ratios = [
        Line(keys[-1], points(records, *keys, "to_base"), css, dots=True)
        for keys, css in strokes
    ]
    charts = []
    for title, lines in (
        ("Likeness to the nearest training clip", likeness),
        ("As ratios to the base's", ratios),
    ):
        if found := [line for line in lines if line.points]:
            charts.append(
                (
                    title,
                    line_chart(found, says=title, x_label="step", from_zero=lines is ratios),
                )
            )
    return charts


def _figure(record: Record, keys: Sequence[str]) -> str:
    """A metric's value, and its ratio to the base's and the clips'."""
    one = mapping(at(record, *keys))
    pairs = [(number(one.get("to_base")), "base"), (number(one.get("to_data")), "clips")]
    ratios = ", ".join(f"{ratio:.2f} × {of}" for ratio, of in pairs if ratio is not None)
    return plain(number(one.get("value")), 3) + (f" ({ratios})" if ratios else "")


def _not_measured(records: Sequence[Record]) -> list[str]:
    """Which steps were not measured, and why; equal reasons once, with the figures of the latest."""
    steps: dict[str, list[str]] = {}
    latest: dict[str, str] = {}
    for record in records:
        reason = str(record["not_measured"])
        key = reason.partition(":")[0]
        steps.setdefault(key, []).append(f"step {plain(number(record.get('step')))}")
        latest[key] = reason
    return [f"Not measured at {some(each)}: {latest[key]}." for key, each in steps.items()]
