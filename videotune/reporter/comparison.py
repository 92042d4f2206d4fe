"""Compare runs: their settings, losses, verdicts and previews, as data and as a page."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from videotune import text
from videotune.files import write_text
from videotune.reporter import charts, inventory, outcome
from videotune.reporter.build import render, summary
from videotune.reporter.previews import MAX_ROWS, link_in, sample_rows
from videotune.reporter.privacy import shareable
from videotune.reporter.read import Record, Run, number, points, read_run
from videotune.sampling.picture_faults import describe_faults, describe_sound

STROKES = ("one", "two", "three", "four")

LOCATION_SETTINGS = ("output_model_destination", "cache_dir")
"""Settings that are not compared, since they are only locations."""


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write a page that compares runs, best first, with links to their reports.

    Folders without a run are listed as waiting.

    Args:
        folders: the run folders.
        path: path of the page.

    Returns:
        ``path``.
    """
    runs = []
    waiting = []
    for folder in folders:
        if (folder / "config.json").is_file():
            runs.append(read_run(folder))
        else:
            waiting.append(folder.name)

    keys, rows = comparison_table(runs, path.parent)
    names = run_names([run.folder for run in runs])
    order = [row["name"] for row in rows]
    runs.sort(key=lambda run: order.index(names[run.folder]))
    chart = _comparison_chart([run for run in runs if run.validations])
    contents = render(
        "runs.html.j2",
        title="Runs",
        rows=rows,
        keys=keys,
        chart=chart,
        waiting=waiting,
        previews=shared_previews(runs, path.parent),
    )
    write_text(path, contents)
    return path


def run_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each run: that of its folder, and of runs in folders of one
    name also the part of their paths that differs.
    """
    folders_by_name: dict[str, list[Path]] = {}
    for folder in folders:
        folders_by_name.setdefault(folder.name, []).append(folder)

    names = {}
    for name, alike in folders_by_name.items():
        if len(alike) == 1:
            names[alike[0]] = name
            continue
        above = Path(os.path.commonpath([folder.parent for folder in alike]))
        parents = [folder.parent.relative_to(above).parts for folder in alike]
        num_shared = _num_shared_at_end(parents)
        for folder, parts in zip(alike, parents, strict=True):
            differing = parts[: len(parts) - num_shared]
            shared = ["…"] if num_shared else []
            names[folder] = "/".join((*differing, *shared, name))
    return names


def _num_shared_at_end(paths: Sequence[tuple[str, ...]]) -> int:
    """Return how many parts at their ends several paths share."""
    count = 0
    for parts in zip(*(reversed(path) for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count


def comparison_table(
    runs: Sequence[Run], page_folder: Path
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the settings that differ, and a row for each run, best first.

    Runs whose losses do not differ, or were not measured, keep their order.

    Args:
        runs: the runs.
        page_folder: the folder that links are relative to.
    """
    # Before folders lose their parents: two may have the same name.
    keys = differing_settings(runs)
    names = run_names([run.folder for run in runs])
    rows = []
    for run in runs:
        name = names[run.folder]
        rows.append(_comparison_row(shareable(run), name, keys, page_folder))
    return keys, sorted(rows, key=lambda row: row["rank"])


def shared_previews(runs: Sequence[Run], page_folder: Path) -> list[dict[str, Any]]:
    """Return the prompts that at least two runs have sampled with the same seed.

    Args:
        runs: the runs.
        page_folder: the folder that links are relative to.

    Returns:
        {"prompt", "seed", "cells"}: a cell is {"run", "step", "link", "fault", "sound"}, of
        the recommended step if that was sampled, else of the latest.
    """
    names = run_names([run.folder for run in runs])
    cells_by_prompt: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        recommended = outcome.verdict(run)["step"]
        for prompt, records in sample_rows(run).items():
            step = recommended if recommended in records else max(records)
            cell = _preview_cell(run, records[step], step, page_folder)
            if cell is not None:
                cell["run"] = names[run.folder]
                cells_by_prompt.setdefault(prompt, []).append(cell)

    shared = []
    for (prompt_text, seed), cells in cells_by_prompt.items():
        if len(cells) > 1:
            shared.append({"prompt": prompt_text, "seed": seed, "cells": cells})
    return shared[:MAX_ROWS]


def _preview_cell(
    run: Run, record: Record, step: float, page_folder: Path
) -> dict[str, Any] | None:
    """Return a preview's cell, or None if its file is missing or not in the run."""
    path = str(record.get("path") or "")
    if link_in(run, path) is None:
        return None
    relative_path = Path(os.path.relpath(run.folder / path, page_folder)).as_posix()
    return {
        "step": step,
        "link": quote(relative_path.encode("utf-8", "replace"), safe="/"),
        "fault": describe_faults(record),
        "sound": describe_sound(record),
    }


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the dotted names of the settings that differ between runs."""
    run_settings = [inventory.flat_settings(run) for run in runs]
    names: dict[str, None] = {}
    for settings in run_settings:
        names |= dict.fromkeys(settings)

    differing = []
    for name in names:
        first = run_settings[0].get(name)
        is_equal = all(settings.get(name) == first for settings in run_settings)
        if name not in LOCATION_SETTINGS and not is_equal:
            differing.append(name)
    return differing


def _comparison_row(
    run: Run, name: str, keys: Sequence[str], page_folder: Path
) -> dict[str, Any]:
    """Return a run's cells; ``rank`` sorts by validation loss, missing ones last."""
    verdict = outcome.verdict(run)
    losses = dict(run.held_out_losses)
    # The error of the file that one takes; the lowest where that step was not measured.
    error = losses.get(verdict["step"], min(losses.values(), default=None))
    settings = inventory.flat_settings(run)

    link = None
    report = run.folder / "report.html"
    if report.is_file():
        link = Path(os.path.relpath(report, page_folder)).as_posix()
    minutes = None
    seconds = (run.last("end")["seconds"] or {}).values()
    if seconds:
        total = sum(number(value) or 0 for value in seconds)
        minutes = text.plain(total / 60, 2)
    return {
        "name": name,
        "link": link,
        "values": [text.value_text(settings.get(key)) for key in keys],
        "state": summary(run)["state"],
        "steps": run.steps.last,
        "verdict": (verdict["latest"] or {}).get("verdict") or "none",
        "recommended": verdict["step"],
        "held_out": None if error is None else text.plain(error),
        "held_out_parts": _errors_by_part(run, verdict["step"]),
        "minutes": minutes,
        "rank": (error is None, error or 0.0),
    }


def _errors_by_part(run: Run, step: int | None) -> str:
    """Return the held-out errors of video and sound at a step, in words; empty unless
    both are learnt and measured there.
    """
    errors = []
    for part in run.parts:
        losses = dict(points(part.validations, "held_out", "normalised"))
        if part.name and step in losses:
            errors.append(f"{part.name} {text.plain(losses[step])}")
    return ", ".join(errors)


def _comparison_chart(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return a chart of validation losses; runs beyond the fourth have pale lines.

    Args:
        runs: the runs, in the order of the table.
    """
    names = run_names([run.folder for run in runs])
    lines = []
    for index, run in enumerate(runs):
        css = STROKES[index % len(STROKES)]
        if index >= len(STROKES):
            css += " pale"
        curve = run.held_out_losses
        if curve:
            lines.append(charts.Line(names[run.folder], curve, css, dots=True))

    if not lines:
        return None
    return charts.line_chart(
        lines,
        says="error on held-out clips, relative to the base model: below 1 is better",
        x_label="step",
    )
