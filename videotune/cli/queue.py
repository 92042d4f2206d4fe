"""``videotune queue`` and ``videotune sweep``: trainings one after the other, or one a card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune.cli.options import Arg, AsJson, Opt, Skips, takes_config
from videotune.console import answer, echo, print_table
from videotune.errors import VideotuneError
from videotune.files import life
from videotune.queue import entries, worker

if TYPE_CHECKING:
    from videotune.job.overrides import Overrides

queue_app = typer.Typer(
    help="Queue trainings, and run them one after the other or one a GPU.", no_args_is_help=True
)

Place = Annotated[Path, Opt("--queue", envvar="VIDEOTUNE_QUEUE", help="the queue's folder")]
HERE = Path("videotune-queue")
EntryOption = Annotated[str, Arg(help="an entry of the queue")]
Cards = Annotated[
    str | None, Opt("--gpus", help="numbers of the GPUs, such as 0,1: a training on each")
]
Watch = Annotated[bool, Opt("--watch", help="when nothing waits, wait for more")]
Priority = Annotated[int, Opt("--priority", help="the highest runs first")]


def _cards(gpus: str | None) -> list[str | None]:
    cards = dict.fromkeys(part.strip() for part in (gpus or "").split(",") if part.strip())
    if not all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", card) for card in cards):
        raise VideotuneError(
            f"--gpus {gpus}: give the numbers of GPUs, as nvidia-smi lists them, such as 0,1"
        )
    return list[str | None](cards) or [None]


@queue_app.command("add")
@takes_config
def add(
    overrides: Overrides,
    name: Annotated[
        str | None, Opt("--name", help="its name (default: of --out, or the config file)")
    ] = None,
    out: Annotated[
        Path | None, Opt("--out", help="the run folder (default: QUEUE/runs/NAME)")
    ] = None,
    priority: Priority = 0,
    queue: Place = HERE,
    allow_skips: Skips = None,
) -> None:
    """Add a training; its settings are checked at once."""
    from videotune.queue.sweep import standalone_config

    source = overrides.config if isinstance(overrides.config, Path) else None
    own = name or (out.name if out else source.stem if source else "run")
    print(entries.add(queue, own, standalone_config(overrides), out, priority, allow_skips))


@queue_app.command("ls")
def ls(queue: Place = HERE, as_json: AsJson = False) -> None:
    """List the queue in the order in which it runs."""
    rows = [
        one.to_json() | {"step": (life(one.run) or {}).get("step", 0)}
        for one in entries.entries(queue)
    ]
    answer(as_json, rows, show)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the queue as a table."""
    shown = [
        [row["name"], row["state"], row["priority"], row["step"], row["why"] or ""]
        for row in rows
    ]
    print_table("queue", ["name", "state", "priority", "step", "why"], shown)


@queue_app.command("run")
def run(queue: Place = HERE, gpus: Cards = None, watch: Watch = False) -> dict[str, Any]:
    """Train what waits. Ctrl-C saves and stops; the next `queue run` resumes."""
    code = worker.run_queue(queue, _cards(gpus), watch, _tell)
    return {"exit_code": code, "entries": [one.to_json() for one in entries.entries(queue)]}


@queue_app.command("rm")
def rm(name: EntryOption, queue: Place = HERE) -> None:
    """Take an entry out; one that runs is saved and stopped. Its run folder stays."""
    echo(f"{name} is out of the queue; its run folder stays: {entries.remove(queue, name)}")


@takes_config
def sweep(
    overrides: Overrides,
    out: Annotated[
        Path, Opt("--out", help="folder of the sweep: its queue, its runs, sweep.html")
    ],
    vary: Annotated[
        list[str], Opt("--vary", help="KEY=V1,V2,…; several are combined", show_default=False)
    ],
    gpus: Cards = None,
    allow_skips: Skips = None,
    no_run: Annotated[
        bool, Opt("--no-run", help="`videotune queue run --queue OUT` trains later")
    ] = False,
) -> dict[str, Any]:
    """Train every combination of some values, and compare the runs on one page. Given again, it continues."""
    from videotune.queue.sweep import plan_sweep, run_sweep

    names = plan_sweep(out, overrides, vary, allow_skips)
    echo(f"{len(names)} runs in {out}")
    if not no_run:
        code, page = run_sweep(out, _cards(gpus), _tell)
        print(page)
        return {
            "exit_code": code,
            "page": page,
            "entries": [one.to_json() for one in entries.entries(out)],
        }
    return {}


def _tell(entry: entries.QueueEntry) -> None:
    """Print an entry's new state."""
    if entry.state != "waiting" or entry.tries:
        why = entry.to_json()["why"]
        echo(f"{entry.name}: {entry.state}{f' ({why})' if why else ''}  {entry.run}")
