"""``videotune wait``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from videotune import commands
from videotune.console import bar


def wait(
    run: Annotated[Path, typer.Argument(help="a run folder, which may not be there yet")],
    step: Annotated[int | None, typer.Option("--step", min=1, help="until this step (default: to the end)")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0, help="seconds; 0: print the state now")] = None,
) -> dict[str, Any]:
    """Block until a run has ended, or has done a step, and print its state.

    Exit code: 0 reached, 1 ended otherwise, 2 timed out.
    """
    with bar("waiting (steps)") as progress:
        code, found = commands.wait.wait(run, step, timeout, lambda done: progress.update(done, step or max(done, 1)))
    verdict, best = (found[key] or "none" for key in ("verdict", "recommended"))
    print(f"{found['state']} at step {found['step']}, verdict: {verdict}, recommended step: {best}; {found['why']}")
    return {"exit_code": code} | found
