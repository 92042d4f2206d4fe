"""``compare`` with several runs: what differs in their settings, losses, verdicts and
previews.

Nothing is generated: the page shows the previews that the runs have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.reporter.comparison import (
    comparison_table,
    shared_previews,
    write_comparison,
)
from videotune.reporter.ranking import doubt_on_errors, order_of_runs
from videotune.reporter.read import read_run, refuse_no_run

PAGE = "comparison.html"


@dataclass(frozen=True)
class RunComparison:
    """A comparison of several runs."""

    page: Path
    """As the folders were given: relative if they are."""

    keys: list[str]
    """The settings that differ, by dotted name."""

    rows: list[dict[str, Any]]
    """The facts of each run."""

    order: str
    """In which order the runs are; empty if none has measured clips kept aside."""

    doubt: str
    """Why the errors do not compare; empty if they do."""

    shared_prompts: int
    """How many prompts at least two of the runs have sampled with the same seed."""


def compare_runs(folders: Sequence[Path], out: Path | None = None) -> RunComparison:
    """Compare runs, and write the page that shows them side by side.

    Args:
        folders: the run folders.
        out: the folder of the page. None: the first run's.

    Raises:
        VideotuneError: if a folder is not a run folder, or is there twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for named, folder in zip(folders, resolved, strict=True):
        if resolved.count(folder) > 1:
            raise VideotuneError(f"{named} is given twice. Name different runs")
        refuse_no_run(named)
        if not (named / "config.json").is_file():
            raise VideotuneError(
                f"{named / 'config.json'} is missing, so its settings are not known. Restore a copy "
                "of it, or leave this run out"
            )

    page_folder = resolved[0] if out is None else out.resolve()
    write_comparison(resolved, page_folder / PAGE)
    runs = [read_run(folder) for folder in resolved]
    keys, rows = comparison_table(runs, page_folder)
    return RunComparison(
        page=(folders[0] if out is None else out) / PAGE,
        keys=keys,
        rows=rows,
        order=order_of_runs(runs),
        doubt=doubt_on_errors(runs),
        shared_prompts=len(shared_previews(runs, page_folder)),
    )
