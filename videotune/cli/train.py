"""``videotune train`` and ``videotune wait``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from videotune._version import BEGUN
from videotune.cli.options import Arg, Opt, Skips, takes_config
from videotune.console import bar, clock, echo, exactly, size
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from videotune.commands.train import TrainResult
    from videotune.job.overrides import Overrides

ResumeStep = Annotated[
    int | None,
    Opt(
        "--from",
        help="--resume from the checkpoint of this step; later steps move to RUN/branches",
    ),
]
Override = Annotated[
    bool,
    Opt("--override", help="--resume although a changed setting changes the training"),
]
AllowDataChange = Annotated[
    bool, Opt("--allow-data-change", help="--resume although the clips have changed")
]
Replan = Annotated[
    bool,
    Opt(
        "--replan",
        help="--resume with micro-batch, checkpointing and offloading chosen again",
    ),
]
InitFrom = Annotated[
    Path | None,
    Opt(
        help="start a new run from a LoRA or embedding file's weights; fresh optimizer"
    ),
]
PushTo = Annotated[
    str | None, Opt(help="upload the result to this repository of the Hub")
]


@takes_config
def train(
    overrides: Overrides,
    out: Annotated[Path, Opt(help="the run folder")],
    resume: Annotated[bool, Opt("--resume", help="resume the run in --out")] = False,
    step: ResumeStep = None,
    override: Override = False,
    allow_data_change: AllowDataChange = False,
    replan: Replan = False,
    init_from: InitFrom = None,
    push: PushTo = None,
    allow_skips: Skips = None,
) -> dict[str, Any]:
    """Train, with previews and checkpoints, into a run folder; export the result."""
    from videotune.commands.train import Resume
    from videotune.commands.train import train as train_run

    needs_resume = step is not None or override or allow_data_change or replan
    if needs_resume and not resume:
        raise VideotuneError(
            "--from, --override, --allow-data-change and --replan need --resume. Add it."
        )

    sets = []
    if init_from:
        sets.append(f"init_from={json.dumps(str(init_from))}")
    if push:
        sets.append(f"push_to={json.dumps(push)}")
    result = train_run(
        replace(overrides, sets=(*overrides.sets, *sets)),
        out,
        resume=Resume(step, override, allow_data_change, replan) if resume else False,
        allow_skips=allow_skips,
        begun=BEGUN,
    )
    if result.report is not None:  # only on the main process
        show_training(result)
    return result.to_json()


def show_training(result: TrainResult) -> None:
    """Print the exports, memory, the recommended checkpoint, and the report."""
    for item in result.exports:
        error = exactly(item.max_error)
        echo(f"{item.format}: {item.path}  (read back by {item.reader}: {error})")
    if not result.exports:
        saved = "saved" if result.saved else "nothing to save yet"
        command = f"videotune train --out {result.run} --resume"
        echo(f"{result.why} and {saved}; continue with: {command}")

    if result.memory is not None:
        line = f"{size(result.memory['allocated_bytes'] or 0)} allocated"
        if result.memory["planned_bytes"]:
            line += f", planned {size(result.memory['planned_bytes'])}"
        echo(f"memory at the peak of a step: {line}")

    best = result.recommended
    if best["step"] != result.step:
        command = f"videotune export {result.run} --step {best['step']}"
        echo(f"recommended checkpoint: step {best['step']}: {best['why']}; {command}")
    training = clock(result.seconds.get("training", 0.0))
    total = clock(sum(result.seconds.values()))
    echo(f"report: {result.report}  ({training} of training, {total} in all)")


def wait(
    run: Annotated[Path, Arg(help="a run folder, which need not exist yet")],
    step: Annotated[
        int | None,
        Opt("--step", min=1, help="wait for this step (default: for the end)"),
    ] = None,
    timeout: Annotated[
        float | None, Opt("--timeout", min=0, help="seconds; 0: print the state now")
    ] = None,
) -> dict[str, Any]:
    """Block until a run has ended, or has done a step, and print its state.

    Exit code: 0 reached, 1 ended otherwise, 2 timed out.
    """
    from videotune.commands.wait import wait as wait_for_run

    with bar("waiting (steps)") as progress:
        exit_code, status = wait_for_run(
            run, step, timeout, lambda done: progress.update(done, step or max(done, 1))
        )
    verdict = status["verdict"] or "none"
    recommended = status["recommended"] or "none"
    print(
        f"{status['state']} at step {status['step']}, verdict: {verdict}, "
        f"recommended step: {recommended}; {status['why']}"
    )
    return {"exit_code": exit_code} | status
