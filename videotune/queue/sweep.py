"""Sweeps: a run for each combination of values, in a queue of its own, and their
comparison.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from videotune.config.nested_keys import merge
from videotune.errors import VideotuneError
from videotune.job.overrides import Overrides, preset_keys, resolve_config, user_keys
from videotune.queue.entries import CONFIG_SUFFIXES, QueueEntry, add, entries
from videotune.queue.worker import ProgressFn, run_queue
from videotune.reporter.comparison import write_comparison

MAX_RUNS = 256
"""Largest number of runs of a sweep."""

MAX_NAME_LENGTH = 100
"""Longest name of a run."""

COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""A comma outside [] and {}."""


def standalone_config(overrides: Overrides) -> dict[str, Any]:
    """Return the config of a command with the values of its preset filled in.

    Raises:
        VideotuneError: if the config is invalid.
    """
    resolve_config(overrides, planning=True)
    return merge(preset_keys(overrides), user_keys(overrides))


def combinations(vary: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of values, in the form that ``--set`` takes.

    Args:
        vary: ``KEY=V1,V2`` arguments; commas inside [] and {} do not separate values.

    Raises:
        VideotuneError: if an argument has no values, a key occurs twice, or there are
            more than ``MAX_RUNS`` combinations.
    """
    values_by_key: dict[str, list[str]] = {}
    for argument in vary:
        key, _, text = argument.partition("=")
        values = [value.strip() for value in COMMA.split(text)]
        if not key or not all(values) or key in values_by_key:
            raise VideotuneError(
                f"--vary {argument}: write KEY=V1,V2, each key once, such as "
                "learning_rate=1e-4,3e-4"
            )
        values_by_key[key] = list(dict.fromkeys(values))

    run_count = math.prod(map(len, values_by_key.values()))
    if run_count > MAX_RUNS:
        raise VideotuneError(
            f"--vary: {run_count} runs, but at most {MAX_RUNS} are allowed. Omit some values."
        )
    return [
        dict(zip(values_by_key, values, strict=True))
        for values in product(*values_by_key.values())
    ]


def plan_sweep(
    out: Path,
    overrides: Overrides,
    vary: Sequence[str],
    skips: str | None = None,
    cards: int = 1,
) -> list[str]:
    """Queue a run for each combination after checking all of them.

    Runs that are queued already stay as they are.

    Args:
        out: folder of the sweep's queue.
        overrides: config and options of all runs.
        vary: ``KEY=V1,V2`` arguments.
        skips: value of ``train --allow-skips``.
        cards: how many GPUs each run asks for.

    Returns:
        The names of the runs.

    Raises:
        VideotuneError: if a combination is invalid, or two of them have the same name.
    """
    config_by_name: dict[str, dict[str, Any]] = {}
    for values in combinations(vary):
        name = _run_name(values)
        if name in config_by_name:
            raise VideotuneError(
                f"--vary: two runs have the name {name!r} "
                f"(names are cut after {MAX_NAME_LENGTH} characters)"
            )
        sets = tuple(f"{key}={value}" for key, value in values.items())
        run_overrides = replace(overrides, sets=(*overrides.sets, *sets))
        config_by_name[name] = standalone_config(run_overrides)

    for name, config in config_by_name.items():
        is_queued = any(
            (out / f"{name}{suffix}").exists() for suffix in CONFIG_SUFFIXES
        )
        if not is_queued:
            add(out, name, config, skips=skips, cards=cards)
    return list(config_by_name)


def _run_name(values: dict[str, str]) -> str:
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]
    return re.sub(r"[^\w.,=+-]+", "-", ",".join(parts))[:MAX_NAME_LENGTH]


def run_sweep(
    out: Path,
    cards: Sequence[str | None],
    report: Callable[[QueueEntry], None],
    show_progress: ProgressFn = lambda entries: None,
) -> tuple[int, Path]:
    """Run the waiting runs of a sweep and update its comparison page whenever one ends.

    Args:
        out: folder of the sweep's queue.
        cards: numbers of the GPUs.
        report: gets each run whose state has changed.
        show_progress: gets all runs, twice a second.

    Returns:
        The exit code and the page.
    """
    page_path = out / "sweep.html"

    def report_and_compare(entry: QueueEntry) -> None:
        report(entry)
        if entry.state not in ("waiting", "running"):
            _write_page(out, page_path)

    exit_code = run_queue(
        out, cards, report=report_and_compare, show_progress=show_progress
    )
    return exit_code, _write_page(out, page_path)


def _write_page(out: Path, page_path: Path) -> Path:
    return write_comparison([entry.run for entry in entries(out)], page_path)
