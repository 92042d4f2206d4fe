"""The previews of a run and its branches, as the viewer shows them."""

from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.reporter.previews import sample_rows
from videotune.sampling.picture_faults import describe_faults, describe_sound
from videotune.studio.preview_clips import nearest
from videotune.studio.projects import Project, inside
from videotune.studio.queue_page import run_folder
from videotune.studio.status import read_live


def branches(run: Path) -> list[tuple[str, Path]]:
    """Return label and folder of a run and of its branches.

    A branch holds the steps that a return to an earlier checkpoint has archived.
    """
    labelled = [("", run)]
    for path in sorted(run.glob("branches/[0-9]*")):
        labelled.append((f"branch {path.name}", path))
    return labelled


def existing_file(run: Path, relative: Any) -> Path | None:
    """Return a file that a run's journal names; None if it is gone or not in the run."""
    try:
        path = inside(run, str(relative))
    except VideotuneError:
        return None
    return path if path.is_file() else None


def preview_rows(project: Project, name: str) -> list[dict[str, Any]]:
    """Return the previews of a run and its branches: a row for each prompt and seed."""
    rows = []
    for label, folder in branches(run_folder(project, name)):
        rows += _preview_rows(project.folder, label, folder)
    return rows


def _preview_rows(home: Path, label: str, folder: Path) -> list[dict[str, Any]]:
    """Return the previews of a branch, each prompt with its nearest training clip."""
    run = read_live(folder)
    checked_at = sum(path.stat().st_mtime_ns for path in folder.glob("check.json"))

    rows = []
    for (prompt, seed), cells in sample_rows(run).items():
        existing_cells = []
        for step, cell in sorted(cells.items()):
            path = existing_file(folder, cell.get("path"))
            if path is not None:
                fault = describe_faults(cell)
                relative = path.relative_to(home).as_posix()
                existing_cells.append((step, relative, fault, describe_sound(cell)))

        if existing_cells:
            row = {
                "branch": label,
                "prompt": prompt,
                "seed": seed,
                "near": nearest(home, folder, checked_at, prompt),
                "cells": existing_cells,
            }
            rows.append(row)
    return rows
