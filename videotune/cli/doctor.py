"""``videotune doctor``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from videotune import commands
from videotune.cli.options import AsJson
from videotune.console import print_table
from videotune.errors import DONE, FAILED, VideotuneError


def doctor(
    run: Annotated[Path | None, typer.Argument(help="a run folder whose problems to show")] = None,
    as_json: AsJson = False,
    repair_journal: Annotated[
        bool, typer.Option("--repair-journal", help="remove damaged lines from the run's journal; a copy is kept")
    ] = False,
) -> None:
    """Show what is installed, the devices, and what is missing; or the problems of a run."""
    if run is not None:
        diagnose(run, as_json, repair_journal)
    elif repair_journal:
        raise VideotuneError("--repair-journal: of which run? videotune doctor RUN --repair-journal")
    else:
        rows, missing = commands.doctor.machine()
        print_table("doctor", ["what", "found", "note"], rows)
        if not missing:
            print_table("devices", commands.doctor.COLUMNS, commands.doctor.devices())
            print("Never: what stands there follows from torch's documentation and was not tried.")
        raise typer.Exit(FAILED if missing else DONE)


def diagnose(run: Path, as_json: bool, repair_journal: bool) -> None:
    """Print what is wrong with a run, and what helps; or repair its journal."""
    from videotune.reporter import diagnosis  # reads checkpoints, which --help must not

    if repair_journal:
        print(diagnosis.repair_journal(run))
        return
    summary, found = diagnosis.diagnose(run)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2, ensure_ascii=False))
        return
    print(f"{run}: {summary}")
    for one in found:
        print(f"\n{one.line}\n  found: {one.found}\n  do:    {one.do}")
    print("\nEach line is explained in docs/troubleshooting.md." if found else "nothing that its files show is wrong")
