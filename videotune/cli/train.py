"""``videotune train``, ``videotune resume`` and ``videotune wait``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from videotune._version import BEGUN
from videotune.cli.options import Arg, Data, Offline, Opt, Sets, Skips, takes_config
from videotune.console import bar, doing, echo, exactly, is_silent_process
from videotune.errors import VideotuneError
from videotune.text import ONLY_FOR_TOY, as_argument, duration, memory_size

if TYPE_CHECKING:
    from videotune.commands.train import TrainResult
    from videotune.job.overrides import Overrides
    from videotune.runs.run_dir import BegunRun

RunFolder = Annotated[
    Path, Arg(help="a run folder; or hf://USER/NAME, where a run has uploaded itself")
]
ResumeStep = Annotated[
    int | None,
    Opt(
        "--from",
        help="resume from the checkpoint of this step; later steps move to RUN/branches",
    ),
]
Override = Annotated[
    bool,
    Opt("--override", help="resume although a changed setting changes the training"),
]
AllowDataChange = Annotated[
    bool, Opt("--allow-data-change", help="resume although the clips have changed")
]
Replan = Annotated[
    bool,
    Opt(
        "--replan",
        help="resume with micro-batch, checkpointing and offloading chosen again",
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
    auto_resume: Annotated[
        bool,
        Opt(
            "--auto-resume",
            help="begin the run, or resume it if this same command began it; "
            "torchrun --max-restarts sets it",
        ),
    ] = False,
    step: ResumeStep = None,
    override: Override = False,
    allow_data_change: AllowDataChange = False,
    replan: Replan = False,
    init_from: InitFrom = None,
    push: PushTo = None,
    allow_skips: Skips = None,
    accept_licence: Annotated[
        bool,
        Opt("--accept-licence", help="accept the base model's terms; asked for once"),
    ] = False,
) -> dict[str, Any]:
    """Train, with previews and checkpoints, into a run folder; export the result."""
    needs_resume = step is not None or override or allow_data_change or replan
    if needs_resume and not resume:
        raise VideotuneError(
            "--from, --override, --allow-data-change and --replan need --resume. Add it."
        )
    if resume and auto_resume:
        raise VideotuneError(
            "--resume continues any run, and --auto-resume only what this command began. "
            "Leave one of them out"
        )
    _refuse_repeated_rollback(step)

    sets = []
    if init_from:
        sets.append(f"init_from={json.dumps(str(init_from))}")
    if push:
        sets.append(f"push_to={json.dumps(push)}")
    overrides = replace(
        overrides, sets=(*overrides.sets, *sets), accept_licence=accept_licence
    )
    if not resume:
        _refuse_early(overrides, out, allow_skips, auto_resume=auto_resume)
        return _train(overrides, out, None, allow_skips, auto_resume=auto_resume)
    _refuse_no_run(out, step)
    options = (step, override, allow_data_change, replan)
    return _train(overrides, out, options, allow_skips)


def _refuse_repeated_rollback(step: int | None) -> None:
    """Refuse to go back to a step if a launcher may give the command again."""
    from videotune.runs.same_command import launcher_restarts

    if step is not None and launcher_restarts():
        raise VideotuneError(
            "--from would go back to its step at each restart. Give the command once "
            "without --max-restarts, and then without --from"
        )


def _refuse_early(
    overrides: Overrides, run: Path, allow_skips: str | None, *, auto_resume: bool
) -> None:
    """Refuse a new run for its folder, a missing file or caption before torch is
    imported.

    Whether a run that is there may go on is decided later, by all processes.
    """
    from videotune.runs.same_command import NO_RUN, begun_by, launcher_restarts

    if (auto_resume or launcher_restarts()) and begun_by(run) != NO_RUN:
        return

    from videotune.job.early_captions import refuse_missing_captions
    from videotune.job.overrides import check_files
    from videotune.runs.run_dir import refuse_run

    if not is_silent_process():  # of several processes only the first one writes there
        refuse_run(run)
    check_files(overrides)
    refuse_missing_captions(overrides, allow_skips)


def _refuse_no_run(run: Path, step: int | None) -> None:
    """Refuse to resume a folder without a run, or without the checkpoint of ``--from``,
    before torch is imported.
    """
    from videotune.runs.checkpoint import pick
    from videotune.runs.run_dir import read_run_config

    read_run_config(run)
    if step:  # 0 is the beginning, which needs no checkpoint
        pick(run, step)


def resume(
    run: RunFolder,
    data: Data = None,
    sets: Sets = None,
    step: ResumeStep = None,
    override: Override = False,
    allow_data_change: AllowDataChange = False,
    replan: Replan = False,
    offline: Offline = False,
    new_folder: Annotated[
        Path | None, Opt("--out", help="of hf://USER/NAME: the new run folder")
    ] = None,
) -> dict[str, Any]:
    """Continue an interrupted run with its own config, as train --resume does."""
    from videotune.job.overrides import Overrides, check_settings
    from videotune.reporter.outcome import FINISHED_STATES, status
    from videotune.runs.run_dir import read_begun
    from videotune.runs.way_on import command_to_train_on

    overrides = Overrides(data=data, sets=tuple(sets or ()))
    check_settings(overrides)
    _refuse_repeated_rollback(step)
    fetched = _fetch(run, data, new_folder, step)
    if fetched is not None:
        overrides = replace(overrides, data=None)  # it is in the new config
        run = fetched
        step = None
        data = None
    begun = read_begun(run)
    if begun is not None:
        return _begin_again(begun, overrides, run)
    _refuse_no_run(run, step)
    now = status(run)
    is_complete = now["steps"] is not None and now["step"] >= now["steps"]
    goes_back = step is not None or bool(sets) or data is not None
    if now["state"] in FINISHED_STATES and is_complete and not goes_back:
        raise VideotuneError(
            f"{run} is finished: {now['step']} of {now['steps']} steps are done. "
            f"To train on: {command_to_train_on(run, int(now['steps']))}"
        )
    return _train(overrides, run, (step, override, allow_data_change, replan), None)


def _fetch(
    run: Path, data: str | None, folder: Path | None, step: int | None
) -> Path | None:
    """Fetch a run that is named by its address on the Hub; None: it is a folder here."""
    from videotune.commands.download_run import download_run, repo_of

    repo = repo_of(str(run))
    if repo is None:
        if folder is not None:
            raise VideotuneError("--out is for hf://USER/NAME. Omit it")
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise VideotuneError(
            f"several processes cannot fetch {repo} into one folder. Fetch it once with: "
            f"videotune download hf://{repo} --data CLIPS; then resume the folder"
        )
    return download_run(repo, [data] if data else [], folder, step)


def _begin_again(begun: BegunRun, overrides: Overrides, run: Path) -> dict[str, Any]:
    """Train a run that was stopped before its first step, with what was asked for then."""
    keys = begun["keys"]
    if overrides.data is not None:
        keys = {key: value for key, value in keys.items() if key != "datasets"}
    begun_overrides = replace(overrides, preset=begun["preset"], config=keys)
    return _train(begun_overrides, run, None, begun["allow_skips"])


def _train(
    overrides: Overrides,
    run: Path,
    resume_options: tuple[int | None, bool, bool, bool] | None,
    allow_skips: str | None,
    *,
    auto_resume: bool = False,
) -> dict[str, Any]:
    """Train a run and print how it ended.

    Args:
        overrides: The config.
        run: The run folder.
        resume_options: The values of ``Resume``; None: a new run.
        allow_skips: How many clips may be skipped.
        auto_resume: Resume the run if this command began it.
    """
    doing("opening the run")
    from videotune.commands.train import Resume
    from videotune.commands.train import train as train_run

    with _telling_how_to_go_on(run):
        result = train_run(
            overrides,
            run,
            resume=Resume(*resume_options) if resume_options else False,
            auto_resume=auto_resume,
            allow_skips=allow_skips,
            program_start=BEGUN,
        )
    if result.report is not None:  # only on the main process
        show_training(result)
    return result.to_json()


@contextmanager
def _telling_how_to_go_on(run: Path) -> Iterator[None]:
    """Say how to go on after an interrupt that ends the process at once."""
    try:
        yield
    except KeyboardInterrupt:
        if any((run / name).is_file() for name in ("config.json", "begun.json")):
            echo(f"continue with: videotune resume {as_argument(run)}")
        else:
            echo("nothing was begun yet: give the same command again")
        raise


def show_training(result: TrainResult) -> None:
    """Print the exports, memory, the recommended checkpoint, and the report."""
    from videotune.reporter.comfyui import note_on_experts
    from videotune.reporter.read import read_run
    from videotune.reporter.sample_findings import sample_findings

    for item in result.exports:
        error = exactly(item.max_error)
        echo(f"{item.format}: {item.path}  (read back by {item.reader}: {error})")
    experts_note = note_on_experts([item.path.name for item in result.exports])
    if experts_note:
        echo(experts_note)
    if result.exports and result.is_toy:
        echo(ONLY_FOR_TOY)
        echo(
            "the toy draws only moving shapes: with filmed clips it shows how a run goes, "
            "not what a real model learns of them"
        )
    if not result.exports:
        saved = "saved" if result.saved else "nothing to save yet"
        command = f"videotune resume {as_argument(result.run)}"
        echo(f"{result.why} and {saved}; continue with: {command}")

    if result.memory is not None:
        line = f"{memory_size(result.memory['allocated_bytes'] or 0)} allocated"
        if result.memory["planned_bytes"]:
            line += f", planned {memory_size(result.memory['planned_bytes'])}"
        echo(f"memory at the peak of a step: {line}")

    best = result.recommended
    if best["step"] != result.step:
        line = f"recommended checkpoint: step {best['step']}: {best['why']}"
        names = [item.path.name for item in result.exports]
        if any(f"-step-{best['step']}" in name for name in names):
            echo(f"{line}. Its files are written too.")
        else:
            echo(
                f"{line}; videotune export {as_argument(result.run)} --step {best['step']}"
            )
    records = read_run(result.run).journal
    for line in sample_findings(records, best["step"]).lines(result.run):
        echo(line)
    training = duration(result.seconds.get("training", 0.0))
    total = duration(sum(result.seconds.values()))
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

    if not run.exists():
        echo(
            f"There is no folder {run} yet: this waits until a run begins there. Ctrl-C "
            "ends it."
        )
    with bar("waiting (steps)") as progress:
        exit_code, status = wait_for_run(run, step, timeout, progress.update)
    verdict = status["shown_verdict"]
    recommended = status["recommended"] or "none"
    print(
        f"{status['state']} at step {status['step']}, verdict: {verdict}, "
        f"recommended step: {recommended}; {status['why']}"
    )
    return {"exit_code": exit_code} | status
