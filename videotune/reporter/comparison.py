"""Compare runs: their settings, losses, verdicts and previews, as data and as a page."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from videotune import text
from videotune.files import write_text
from videotune.reporter import charts, outcome
from videotune.reporter.build import render, summary
from videotune.reporter.previews import MAX_ROWS, link_in, sample_rows
from videotune.reporter.privacy import shareable
from videotune.reporter.progress import progress
from videotune.reporter.ranking import (
    common_reference,
    comparable_settings,
    doubt_on_errors,
    is_ranked,
    order_of_runs,
    ranked_start,
)
from videotune.reporter.read import (
    Record,
    Run,
    at,
    items,
    mapping,
    number,
    points,
    read_run,
)
from videotune.reporter.setting_cells import folder_names, setting_cells
from videotune.sampling.picture_faults import describe_faults, describe_sound
from videotune.text import counted
from videotune.validation.verdict_words import shown_word

MOST_KEYS_BESIDE = 3
"""Settings that differ which are columns of the table of results; more have their own
table, below the previews.
"""

MOST_CHARACTERS_BESIDE = 24
"""Characters of a value in the table of results."""

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

    keys, rows, order = _ranked_rows(runs, path.parent)
    runs = [runs[index] for index in order]
    chart = _comparison_chart([run for run in runs if run.validations])
    contents = render(
        "runs.html.j2",
        title="Runs",
        rows=rows,
        keys=keys,
        chart=chart,
        waiting=waiting,
        is_short=_fits_beside_results(rows),
        previews=shared_previews(runs, path.parent),
        order=order_of_runs(runs),
        reference=common_reference(runs),
        doubt=doubt_on_errors(runs),
    )
    write_text(path, contents)
    return path


def comparison_table(
    runs: Sequence[Run], page_folder: Path
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the settings that differ, and a row for each run, best first.

    Runs whose losses do not differ, or were not measured, keep their order.

    Args:
        runs: the runs.
        page_folder: the folder that links are relative to.
    """
    keys, rows, _ = _ranked_rows(runs, page_folder)
    return keys, rows


def _ranked_rows(
    runs: Sequence[Run], page_folder: Path
) -> tuple[list[str], list[dict[str, Any]], list[int]]:
    """Return what ``comparison_table`` does, and the index of each row's run."""
    # Before folders lose their parents: two may have the same name.
    keys = differing_settings(runs)
    names = folder_names([run.folder for run in runs])
    run_settings = [comparable_settings(run) for run in runs]
    cells_by_key = []
    for key in keys:
        values = [settings.get(key) for settings in run_settings]
        cells_by_key.append(setting_cells(key, values))
    for name, cells in differences_of_data(runs).items():
        keys.append(name)
        cells_by_key.append(cells)

    start = ranked_start(runs)
    rows = []
    for index, run in enumerate(runs):
        row = _comparison_row(
            shareable(run),
            names[run.folder],
            [cells[index] for cells in cells_by_key],
            page_folder,
            is_comparable=is_ranked(run, start),
        )
        rows.append(row)
    order = sorted(range(len(rows)), key=lambda index: rows[index]["rank"])
    return keys, [rows[index] for index in order], order


def shared_previews(runs: Sequence[Run], page_folder: Path) -> list[dict[str, Any]]:
    """Return the prompts that at least two runs have sampled with the same seed.

    Args:
        runs: the runs.
        page_folder: the folder that links are relative to.

    Returns:
        {"prompt", "seed", "cells"}: a cell is {"run", "step", "link", "fault", "sound"}, of
        the recommended step if that was sampled, else of the latest.
    """
    names = folder_names([run.folder for run in runs])
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
    run_settings = [comparable_settings(run) for run in runs]
    names: dict[str, None] = {}
    for settings in run_settings:
        names |= dict.fromkeys(settings)

    differing = []
    for name in names:
        first = run_settings[0].get(name)
        is_equal = all(settings.get(name) == first for settings in run_settings)
        is_chosen = any(_is_chosen(run, name) for run in runs)
        if name not in LOCATION_SETTINGS and is_chosen and not is_equal:
            differing.append(name)
    return differing


def _is_chosen(run: Run, name: str) -> bool:
    """Whether a user or a preset has set a value; the plan sets others, which follow from
    the clips and the length.
    """
    return mapping(at(run.config, "origins"))[name] != "plan"


def differences_of_data(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return a cell for each run on its clips and on their captions, if they differ from
    those of the first run; of clips that both have, captions are compared.
    """
    captions_by_run = [_captions_by_clip(run) for run in runs]
    if not runs or not all(captions_by_run):
        return {}  # all may wait, and one from elsewhere may lack an account of its clips
    first = captions_by_run[0]

    clip_cells = []
    caption_cells = []
    for captions in captions_by_run:
        others = sum(clip not in first for clip in captions)
        cell = counted(len(captions), "clip")
        clip_cells.append(f"{cell}, {others} of them others" if others else cell)

        common = [clip for clip in captions if clip in first]
        changed = sum(captions[clip] != first[clip] for clip in common)
        caption_cells.append(f"{changed} of {len(common)} differ" if changed else "–")

    cells = {"clips": clip_cells, "captions": caption_cells}
    return {name: row for name, row in cells.items() if len(set(row)) > 1}


def _captions_by_clip(run: Run) -> dict[str, list[Any]]:
    """Return the captions of the clips that a run used, by the clips' ids."""
    used = [clip for clip in run.clips if clip["used"] or clip["held_out"]]
    return {str(clip["id"]): items(clip["captions"]) for clip in used}


def _fits_beside_results(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the settings that differ fit into the table of results."""
    values: list[str] = []
    for row in rows:
        values.extend(row["values"])
    num_keys = max((len(row["values"]) for row in rows), default=0)
    longest = max(map(len, values), default=0)
    return num_keys <= MOST_KEYS_BESIDE and longest <= MOST_CHARACTERS_BESIDE


def _comparison_row(
    run: Run, name: str, cells: Sequence[str], page_folder: Path, *, is_comparable: bool
) -> dict[str, Any]:
    """Return a run's cells; ``rank`` sorts by validation loss, missing ones last, as well as
    those that do not compare.
    """
    verdict = outcome.verdict(run)
    losses = dict(run.held_out_losses)
    # The error of the file that one takes; the lowest where that step was not measured.
    error = losses.get(verdict["step"], min(losses.values(), default=None))
    is_recommended = verdict["step"] in losses
    held_out = "" if error is None else text.plain(error)
    if error is not None and not is_recommended:
        lowest_step = min(losses, key=lambda step: (losses[step], step))
        held_out += f" at step {text.plain(lowest_step)}"

    # Errors that do not compare say what they are relative to.
    reference = run.error_reference
    training = _training_error(run, verdict["step"])
    if not is_comparable:
        suffix = f" times {reference.share}"
        if reference.changed_at:
            suffix += ", since its clips kept aside changed there"
        if held_out:
            held_out += suffix
        if training:
            training += suffix

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
        "values": cells,
        "state": summary(run)["state"],
        "steps": run.steps.last,
        "verdict": shown_word(verdict["latest"], reference.changed_at),
        "recommended": verdict["step"],
        "held_out": held_out or None,
        "training": training,
        "loss": _mean_error(run),
        "held_out_parts": _errors_by_part(run, verdict["step"]),
        "minutes": minutes,
        "rank": (0, error) if is_comparable and error is not None else (1, 0.0),
    }


def _training_error(run: Run, step: int | None) -> str | None:
    """Return the error on training clips at the recommended step, or the last one that
    was measured, relative to the first; None if it was not measured.
    """
    errors = dict(points(run.validations, "train", "normalised"))
    if not errors:
        return None
    measured = step if step in errors else max(errors)
    cell = text.plain(errors[measured])
    return cell if measured == step else f"{cell} at step {text.plain(measured)}"


def _mean_error(run: Run) -> str | None:
    """Return the mean error of a run's last steps; None before the first."""
    loss = progress(run).loss
    return None if loss is None else text.plain(loss)


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
    names = folder_names([run.folder for run in runs])
    start = ranked_start(runs)
    lines = []
    for index, run in enumerate(runs):
        css = STROKES[index % len(STROKES)]
        if index >= len(STROKES):
            css += " pale"
        curve = run.held_out_losses
        if curve and is_ranked(run, start):
            lines.append(charts.Line(names[run.folder], curve, css, dots=True))

    if not lines:
        return None
    ranked = [run for run in runs if is_ranked(run, start)]
    return charts.line_chart(
        lines,
        says="error on clips kept aside, relative to "
        f"{common_reference(ranked)}: below 1 is better",
        x_label="step",
    )
