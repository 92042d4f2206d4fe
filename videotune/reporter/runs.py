"""One page for several runs: what sets their settings apart, how far each came, and their validation losses on one chart."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from videotune.config.load import flatten
from videotune.files import write_text
from videotune.reporter import outcome
from videotune.reporter.build import render, summary
from videotune.reporter.curves import Line, line_chart
from videotune.reporter.read import Run, number, points, read_run
from videotune.text import plain, value_text

STROKES = ("one", "two", "three", "four")
OWN = ("output_model_destination", "cache_dir")
"""Settings that say where a run lies, not what it is."""


def write_comparison(folders: Sequence[Path], page: Path) -> Path:
    """Write the page of these runs, best first, with links to their reports; returns ``page``.

    Folders where no run lies yet are listed as waiting.
    """
    runs = [read_run(folder) for folder in folders if (folder / "config.json").is_file()]
    differing = differing_settings(runs)
    rows = sorted((_row(run, differing, page.parent) for run in runs), key=lambda row: row["rank"])
    waiting = [folder.name for folder in folders if not (folder / "config.json").is_file()]
    chart = _chart([run for run in runs if run.validations], [row["name"] for row in rows])
    facts = {"rows": rows, "keys": differing, "chart": chart, "waiting": waiting}
    write_text(page, render("runs.html.j2", title="Runs", **facts))
    return page


def settings_of(run: Run) -> dict[str, Any]:
    """The run's settings by dotted name."""
    return flatten((run.config or {}).get("settings") or {})


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The dotted names of the settings that differ between runs."""
    flat = [settings_of(run) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one if name not in OWN)
    return [name for name in names if any(one.get(name) != flat[0].get(name) for one in flat)]


def _row(run: Run, differing: Sequence[str], home: Path) -> dict[str, Any]:
    """A run's cells; ``rank`` puts the lowest validation loss first, and runs without one last."""
    verdict = outcome.verdict(run)
    best = min((loss for _, loss in points(run.validations, "held_out", "normalised")), default=None)
    settings = settings_of(run)
    seconds = (run.last("end")["seconds"] or {}).values()
    report = run.folder / "report.html"
    return {
        "name": run.folder.name,
        "link": Path(os.path.relpath(report, home)).as_posix() if report.is_file() else None,
        "values": [value_text(settings.get(key)) for key in differing],
        "state": summary(run)["state"],
        "steps": run.steps.last,
        "verdict": (verdict["latest"] or {}).get("verdict") or "none",
        "recommended": verdict["step"],
        "held_out": None if best is None else plain(best),
        "minutes": plain(sum(number(one) or 0 for one in seconds) / 60, 2) if seconds else None,
        "rank": (best is None, best or 0.0, run.folder.name),
    }


def _chart(runs: Sequence[Run], order: Sequence[str]) -> dict[str, Any] | None:
    """The validation losses of the runs over their steps, in the order of the table; beyond four, pale lines."""
    lines = []
    for place, run in enumerate(sorted(runs, key=lambda one: order.index(one.folder.name))):
        css = STROKES[place % len(STROKES)] + (" pale" if place >= len(STROKES) else "")
        lines.append(Line(run.folder.name, points(run.validations, "held_out", "normalised"), css, dots=True))
    shown = [line for line in lines if line.points]
    says = "error on held-out clips, relative to the base model: below 1 is better"
    return line_chart(shown, says=says, x_label="step") if shown else None
