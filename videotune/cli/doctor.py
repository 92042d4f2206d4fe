"""``videotune doctor``."""

from pathlib import Path
from typing import Annotated

import typer

from videotune import commands
from videotune.cli.options import AsJson
from videotune.console import print_table
from videotune.errors import DONE, FAILED, VideotuneError


def doctor(
    run: Annotated[Path | None, typer.Argument(help="a run folder: what its journal says is wrong with it")] = None,
    as_json: AsJson = False,
    repair_journal: Annotated[
        bool, typer.Option("--repair-journal", help="take damaged lines out of the run's journal; a copy is kept")
    ] = False,
) -> None:
    """Say what is installed, which device there is, and what is missing; or what a run's journal shows."""
    if repair_journal:
        from videotune.reporter.diagnosis import repair_journal as repair

        if run is None:
            raise VideotuneError("--repair-journal: of which run? videotune doctor RUN --repair-journal")
        raise typer.Exit(repair(run))
    if run is not None:
        from videotune.reporter.diagnosis import diagnose

        raise typer.Exit(diagnose(run, as_json=as_json))
    rows, missing = commands.doctor.machine()
    print_table("doctor", ["what", "found", "note"], rows)
    raise typer.Exit(FAILED if missing else DONE)
