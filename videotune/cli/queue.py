"""``videotune queue`` and ``videotune sweep``: trainings in turn, or one on each GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune.cli.options import Arg, AsJson, Opt, Skips, takes_config
from videotune.cli.queue_stop import interrupts_as_stops
from videotune.cli.run_table import print_runs, tell_ranking
from videotune.console import answer, echo, print_table
from videotune.errors import INTERRUPTED, VideotuneError
from videotune.queue import entries, worker
from videotune.runs.run_life import life
from videotune.text import counted

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides

queue_app = typer.Typer(
    help="Queue trainings, and run them in turn or one on each GPU.",
    no_args_is_help=True,
)

QueueFolder = Annotated[
    Path, Opt("--queue", envvar="VIDEOTUNE_QUEUE", help="the queue's folder")
]
DEFAULT_QUEUE = Path("videotune-queue")
EntryOption = Annotated[str, Arg(help="an entry of the queue")]
EntryName = Annotated[
    str | None,
    Opt("--name", help="its name (default: that of --out, or the config file)"),
]
RunFolder = Annotated[
    Path | None, Opt("--out", help="the run folder (default: QUEUE/runs/NAME)")
]
Gpus = Annotated[
    str | None,
    Opt("--gpus", help="numbers of the GPUs, such as 0,1: a training on each"),
]
CardCount = Annotated[
    int,
    Opt(
        "--gpus",
        min=1,
        max=entries.MAX_CARDS,
        help="number of GPUs that train it, with a process on each",
    ),
]
CardsPerRun = Annotated[
    int,
    Opt(
        "--gpus-per-run",
        min=1,
        max=entries.MAX_CARDS,
        help="number of GPUs that train each run, with a process on each",
    ),
]
Watch = Annotated[
    bool, Opt("--watch", help="wait for more entries when the queue is empty")
]
Priority = Annotated[int, Opt("--priority", help="the highest runs first")]
SweepFolder = Annotated[
    Path, Opt("--out", help="folder of the sweep: its queue, its runs, sweep.html")
]
Vary = Annotated[
    list[str],
    Opt("--vary", help="KEY=V1,V2,…; several are combined", show_default=False),
]
NoRun = Annotated[
    bool, Opt("--no-run", help="`videotune queue run --queue OUT` trains later")
]


GO_ON = "stopped; give the same command again to continue"
"""What is said at the end of a queue that was interrupted."""


def _gpu_list(gpus: str | None) -> list[str | None]:
    """Return the GPUs that --gpus names; [None] without the option."""
    names = [part.strip() for part in (gpus or "").split(",")]
    unique = dict.fromkeys(name for name in names if name)
    if not all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name) for name in unique):
        raise VideotuneError(
            f"--gpus {gpus}: not a list of GPUs. "
            f"Give their numbers as nvidia-smi lists them, such as 0,1."
        )
    return list[str | None](unique) or [None]


@queue_app.command("add")
@takes_config
def add(
    overrides: Overrides,
    name: EntryName = None,
    out: RunFolder = None,
    priority: Priority = 0,
    gpus: CardCount = 1,
    queue: QueueFolder = DEFAULT_QUEUE,
    allow_skips: Skips = None,
) -> None:
    """Add a training of clips or of a config; its settings are checked at once."""
    from videotune.queue.sweep import standalone_config

    if name is None:
        if out is not None:
            name = out.name
        elif isinstance(overrides.config, Path):
            name = overrides.config.stem
        else:
            name = "run"
    config = standalone_config(overrides)
    _refuse_uneven_groups(config, gpus)
    path = entries.add(
        queue, name, config, out, priority=priority, skips=allow_skips, cards=gpus
    )
    print(path)


def _refuse_uneven_groups(config: Mapping[str, Any], gpus: int) -> None:
    """Refuse a number of GPUs that the groups of ``context_parallel`` do not divide."""
    group = config.get("context_parallel", 1)
    if gpus % group:
        raise VideotuneError(
            f"--gpus {gpus}: context_parallel lets {group} GPUs share each sample. "
            f"Give a multiple of {group}"
        )


@queue_app.command("list", hidden=True)
@queue_app.command("ls")
def ls(queue: QueueFolder = DEFAULT_QUEUE, as_json: AsJson = False) -> None:
    """List the queue in the order in which it runs."""
    rows = []
    for entry in entries.entries(queue):
        heartbeat = life(entry.run) or {}
        rows.append(entry.to_json() | {"step": heartbeat.get("step", 0)})
    answer(as_json, rows, show_queue)


def show_queue(rows: Sequence[dict[str, Any]]) -> None:
    """Print the queue as a table."""
    columns = ["name", "state", "priority", "step", "why"]
    if any(row["cards"] > 1 for row in rows):
        columns.insert(3, "cards")
    cells = [_cells(row, columns) for row in rows]
    titles = ["GPUs" if column == "cards" else column for column in columns]
    print_table("queue", titles, cells)


def _cells(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    return ["" if row[column] is None else row[column] for column in columns]


@queue_app.command("run")
def run(
    queue: QueueFolder = DEFAULT_QUEUE, gpus: Gpus = None, watch: Watch = False
) -> dict[str, Any]:
    """Train the waiting entries.

    Ctrl-C saves and stops; the next `queue run` resumes.
    """
    from videotune.cli.queue_progress import QueueProgress

    with interrupts_as_stops(), QueueProgress() as progress:
        exit_code = worker.run_queue(
            queue,
            _gpu_list(gpus),
            watch,
            _print_state,
            show_progress=progress.update,
        )
    if exit_code == INTERRUPTED:
        echo(GO_ON)
    return {"exit_code": exit_code, "entries": _rows(queue)}


@queue_app.command("rm")
def rm(name: EntryOption, queue: QueueFolder = DEFAULT_QUEUE) -> None:
    """Remove an entry; a running one is saved and stopped. Its run folder stays."""
    run_folder = entries.remove(queue, name)
    stays = f"; its run folder stays: {run_folder}" if run_folder.exists() else ""
    echo(f"{name} is removed from the queue{stays}")


@takes_config
def sweep(
    overrides: Overrides,
    out: SweepFolder,
    vary: Vary,
    gpus: Gpus = None,
    gpus_per_run: CardsPerRun = 1,
    allow_skips: Skips = None,
    no_run: NoRun = False,
) -> dict[str, Any]:
    """Train every combination of some values, and compare the runs.

    A repeat continues it.
    """
    from videotune.cli.queue_progress import QueueProgress
    from videotune.queue.sweep import plan_sweep, run_sweep

    names = plan_sweep(out, overrides, vary, allow_skips, gpus_per_run)
    echo(f"{counted(len(names), 'run')} in {out}")
    if no_run:
        return {}

    with interrupts_as_stops(), QueueProgress() as progress:
        exit_code, page = run_sweep(
            out, _gpu_list(gpus), _print_state, show_progress=progress.update
        )
    _print_results(out)
    print(page)
    if exit_code == INTERRUPTED:
        echo(GO_ON)
    return {"exit_code": exit_code, "page": page, "entries": _rows(out)}


def _print_results(queue: Path) -> None:
    """Print the runs of a queue side by side, those that have begun."""
    from videotune.reporter.comparison import comparison_table
    from videotune.reporter.ranking import (
        doubt_on_errors,
        doubt_on_found_clips,
        order_of_runs,
    )
    from videotune.reporter.read import read_run

    runs = []
    for entry in entries.entries(queue):
        if (entry.run / "config.json").is_file():
            runs.append(read_run(entry.run))
    if runs:
        print_runs(*comparison_table(runs, queue))
    if len(runs) > 1:
        doubts = [doubt_on_errors(runs), doubt_on_found_clips(runs)]
        tell_ranking(order_of_runs(runs), " ".join(filter(None, doubts)))


def _rows(queue: Path) -> list[dict[str, Any]]:
    """Return the queue's entries as JSON objects."""
    return [entry.to_json() for entry in entries.entries(queue)]


def _print_state(entry: entries.QueueEntry) -> None:
    """Print an entry's new state."""
    is_new = entry.state == "waiting" and not entry.tries
    if is_new:
        return
    reason = entry.to_json()["why"]
    state = f"{entry.state} ({reason})" if reason else entry.state
    echo(f"{entry.name}: {state}  {entry.run}")
