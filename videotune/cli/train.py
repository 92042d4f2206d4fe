"""``videotune train`` and ``videotune wait``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from videotune import commands
from videotune._version import BEGUN
from videotune.cli.options import Arg, Opt, Skips, takes_config
from videotune.console import bar, clock, echo, exactly, size
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from videotune.commands.train import TrainResult
    from videotune.job.overrides import Overrides

Override = Annotated[
    bool, Opt("--override", help="--resume although a changed setting changes the training")
]
AllowDataChange = Annotated[
    bool, Opt("--allow-data-change", help="--resume although the clips have changed")
]


Replan = Annotated[
    bool,
    Opt(
        "--replan", help="--resume with micro-batch, checkpointing and offloading chosen again"
    ),
]
InitFrom = Annotated[
    Path | None,
    Opt(help="start a new run from a LoRA or embedding file's weights; fresh optimizer"),
]


@takes_config
def train(
    overrides: Overrides,
    out: Annotated[Path, Opt(help="the run folder")],
    resume: Annotated[bool, Opt("--resume", help="resume the run in --out")] = False,
    step: Annotated[
        int | None,
        Opt(
            "--from",
            help="--resume from the checkpoint of this step; later steps move to RUN/branches",
        ),
    ] = None,
    override: Override = False,
    allow_data_change: AllowDataChange = False,
    replan: Replan = False,
    init_from: InitFrom = None,
    push: Annotated[
        str | None, Opt(help="upload the result to this repository of the Hub")
    ] = None,
    allow_skips: Skips = None,
) -> dict[str, Any]:
    """Train, with previews and checkpoints, into a run folder; export the result."""
    own = {"init_from": init_from and str(init_from), "push_to": push}
    sets = [f"{key}={json.dumps(value)}" for key, value in own.items() if value]
    overrides = replace(overrides, sets=(*overrides.sets, *sets))
    if not resume and (step is not None or override or allow_data_change or replan):
        raise VideotuneError(
            "--from, --override, --allow-data-change and --replan go with --resume"
        )
    how = commands.train.Resume(step, override, allow_data_change, replan) if resume else False
    result = commands.train.train(
        overrides, out, resume=how, allow_skips=allow_skips, begun=BEGUN
    )
    if result.report is not None:  # of several processes the main one's
        show_training(result)
    return result.to_json()


def show_training(result: TrainResult) -> None:
    """Print where everything is, and the recommended checkpoint."""
    for one in result.exports:
        echo(f"{one.format}: {one.path}  (read back by {one.reader}: {exactly(one.max_error)})")
    if not result.exports:
        saved = "saved" if result.saved else "nothing to save yet"
        echo(
            f"{result.why} and {saved}; continue with: videotune train --out {result.run} --resume"
        )
    if result.memory is not None:
        planned = (
            f", planned {size(result.memory['planned_bytes'])}"
            if result.memory["planned_bytes"]
            else ""
        )
        echo(
            f"memory at the peak of a step: {size(result.memory['allocated_bytes'] or 0)} allocated{planned}"
        )
    best = result.recommended
    spent = result.seconds
    if best["step"] != result.step:
        command = f"videotune export {result.run} --step {best['step']}"
        echo(f"recommended checkpoint: step {best['step']}: {best['why']}; {command}")
    took = (
        f"{clock(spent.get('training', 0.0))} of training, {clock(sum(spent.values()))} in all"
    )
    echo(f"report: {result.report}  ({took})")


def wait(
    run: Annotated[Path, Arg(help="a run folder, which may not be there yet")],
    step: Annotated[
        int | None, Opt("--step", min=1, help="until this step (default: to the end)")
    ] = None,
    timeout: Annotated[
        float | None, Opt("--timeout", min=0, help="seconds; 0: print the state now")
    ] = None,
) -> dict[str, Any]:
    """Block until a run has ended, or has done a step, and print its state.

    Exit code: 0 reached, 1 ended otherwise, 2 timed out.
    """
    with bar("waiting (steps)") as progress:
        code, found = commands.wait.wait(
            run, step, timeout, lambda done: progress.update(done, step or max(done, 1))
        )
    verdict, best = (found[key] or "none" for key in ("verdict", "recommended"))
    print(
        f"{found['state']} at step {found['step']}, verdict: {verdict}, recommended step: {best}; {found['why']}"
    )
    return {"exit_code": code} | found
