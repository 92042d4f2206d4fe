"""Sweeps: a run for every combination of some values, in a queue of their own, and the page that compares them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from videotune.config.load import merge
from videotune.errors import VideotuneError
from videotune.job.overrides import Overrides, preset_keys, resolve_config, user_keys
from videotune.queue.entries import CONFIG_SUFFIXES, QueueEntry, add, entries, run_queue
from videotune.reporter.build import write_comparison

MAX_RUNS = 256
MAX_NAME_LENGTH = 100
"""Runs of a sweep, and characters of a run's name."""


def standalone_config(overrides: Overrides) -> dict[str, Any]:
    """The config of a command, its preset's values among its own; VideotuneError where it does not resolve."""
    resolve_config(overrides, planning=True)
    return merge(preset_keys(overrides), user_keys(overrides))


def combinations(vary: Sequence[str]) -> list[dict[str, str]]:
    """Every combination of ``KEY=V1,V2`` words, as ``--set`` takes them; commas inside [] and {} separate nothing.

    Raises VideotuneError for a word without values, for a key given twice, and beyond ``MAX_RUNS`` runs.
    """
    lists: dict[str, list[str]] = {}
    for word in vary:
        key, _, text = word.partition("=")
        values = [value.strip() for value in re.split(r",(?![^\[{]*[\]}])", text)]
        if not key or not all(values) or key in lists:
            raise VideotuneError(
                f"--vary {word}: write KEY=V1,V2 once a key, such as learning_rate=1e-4,3e-4"
            )
        lists[key] = list(dict.fromkeys(values))
    count = math.prod(map(len, lists.values()))
    if count > MAX_RUNS:
        raise VideotuneError(f"--vary: {count} runs; at most {MAX_RUNS}, so leave values out")
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def plan_sweep(
    out: Path, overrides: Overrides, vary: Sequence[str], skips: str | None = None
) -> list[str]:
    """Queue a run for each combination, after all are checked; their names. What is queued already stays as it is.

    Raises VideotuneError where a combination is no config, or shares its name with another.
    """
    configs: dict[str, dict[str, Any]] = {}
    for values in combinations(vary):
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
        name = re.sub(r"[^\w.,=+-]+", "-", name)[:MAX_NAME_LENGTH]
        if name in configs:
            raise VideotuneError(
                f"--vary: two runs have the name {name!r}, of which {MAX_NAME_LENGTH} characters count"
            )
        sets = tuple(f"{key}={value}" for key, value in values.items())
        configs[name] = standalone_config(replace(overrides, sets=(*overrides.sets, *sets)))
    for name, config in configs.items():
        if not any((out / f"{name}{ending}").exists() for ending in CONFIG_SUFFIXES):
            add(out, name, config, skips=skips)
    return list(configs)


def run_sweep(
    out: Path, cards: Sequence[str | None], tell: Callable[[QueueEntry], None]
) -> tuple[int, Path]:
    """Train what waits of a sweep; the exit code, and the page, which is written anew whenever a run ends."""
    page = out / "sweep.html"

    def heard(entry: QueueEntry) -> None:
        tell(entry)
        if entry.state not in ("waiting", "running"):
            write_comparison([one.run for one in entries(out)], page)

    code = run_queue(out, cards, tell=heard)
    return code, write_comparison([one.run for one in entries(out)], page)
