"""``videotune status``: all runs and projects of a folder, and the next step of each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from videotune.cli.next_steps import (
    CONFIG_NAME,
    card_options,
    next_command,
    proposed_run,
)
from videotune.cli.options import Arg
from videotune.console import print_table, tell
from videotune.text import (
    ONLY_FOR_TOY,
    as_argument,
    counted,
    memory_size,
    plain,
    some,
    time_left,
)

if TYPE_CHECKING:
    from videotune.commands.status import DatasetOverview, RunOverview
    from videotune.studio.stage import Stage

StatusFolder = Annotated[
    Path,
    Arg(help="a run, a folder of runs or of clips, or a folder of studio projects"),
]

NAMED_RUNS = 3
"""Older runs that are named below the table."""


def status(folder: StatusFolder = Path(".")) -> dict[str, Any]:
    """Show all runs in a folder: step, time left, verdict, and what to do next."""
    from videotune.commands.status import (
        PROJECT_MARKS,
        dataset_overview,
        find_marked,
        runs_below,
    )

    runs = runs_below(folder)
    projects = list(find_marked(folder, PROJECT_MARKS))
    stages_by_project = {project: _stages(project) for project in projects}
    dataset = None if runs or projects else dataset_overview(folder)

    if runs:
        _show_runs(runs)
    for project, stages in stages_by_project.items():
        _show_project(project, stages)
    if dataset is not None:
        _show_dataset(dataset)
    elif not runs and not projects:
        _show_no_run(folder)

    return {
        "runs": [run.to_json() for run in runs],
        "projects": [
            _project_json(project, stages)
            for project, stages in stages_by_project.items()
        ],
        "dataset": dataset.to_json() if dataset else None,
    }


def _show_no_run(folder: Path) -> None:
    """Show what comes next in a folder without a run, a project or clips."""
    config = folder / CONFIG_NAME
    if not config.is_file():
        print(f"{folder} holds no run, no project and no clips yet.")
        print("next: videotune init work    (or: videotune studio)")
        return

    from videotune.job.overrides import Overrides

    overrides = Overrides(config=config)
    print(f"{folder} holds a config and no run yet.")
    print("next:")
    for command in (
        next_command("plan", overrides, *card_options(config)),
        next_command("train", overrides, "--out", proposed_run(config)),
    ):
        print(f"  {command}")


def _show_runs(runs: Sequence[RunOverview]) -> None:
    rows = []
    for run in runs:
        steps = "?" if run.steps is None else run.steps
        left = "" if run.seconds_left is None else time_left(run.seconds_left)
        verdict = run.shown_verdict
        if run.verdict and run.verdict_parts:
            parts = [
                f"{name} {label or 'none'}" for name, label in run.verdict_parts.items()
            ]
            verdict += f" ({', '.join(parts)})"
        state = f"{run.state}: {run.activity}" if run.activity else run.state
        rows.append([run.run, state, f"{run.step} of {steps}", left, verdict])
    print_table("runs", ["run", "state", "step", "left", "verdict"], rows, right=(3,))

    from videotune.reporter.comfyui import place_of
    from videotune.reporter.restarts import launcher_sentence

    newest, *others = runs
    if others:
        print(f"newest: {newest.run}")
    _show_processes(newest)
    restarts = launcher_sentence(list(newest.restarts))
    if restarts:
        tell(restarts)
    if newest.is_stopped:
        tell(newest.stopped_text)
    if newest.verdict is None and newest.no_verdict:
        tell(f"no verdict: {newest.no_verdict}")
    if newest.verdict_reason:
        tell(f"{newest.shown_verdict}: {newest.verdict_reason}")
    for line in newest.samples.lines(newest.run) if newest.samples else ():
        tell(line)
    print(f"next: {newest.next_command}")
    for path, step in newest.exports:
        program = "diffusers and others"
        if "-comfyui" in path.name:
            program = f"ComfyUI{place_of(path.name)}"
        is_recommended = newest.takes_result and newest.is_recommended(step)
        mark = "recommended, " if is_recommended else "exported, "
        print(f"{mark}for {program}: {path}")
    is_named = newest.takes_result and newest.recommended is not None
    if is_named and newest.recommended_why:
        tell(f"step {newest.recommended} is recommended: {newest.recommended_why}")
    if newest.exports and newest.is_toy:
        print(ONLY_FOR_TOY)

    going_well = ("done", "early", "running")
    for run in others:
        if run.state not in going_well:
            print(f"next for {run.run} ({run.state}): {run.next_command}")
    _show_others([run for run in others if run.state in going_well])


def _show_processes(run: RunOverview) -> None:
    """Show what each process of a run needs for a step, and name one that is slower."""
    from videotune.runs.rank_figures import find_stragglers

    if not run.ranks:
        return
    rows = []
    for figures in run.ranks:
        rows.append(
            [
                figures.rank,
                f"{figures.device} of {figures.host}",
                memory_size(figures.memory_bytes),
                memory_size(figures.peak_bytes),
                _seconds(figures.own_seconds),
                _seconds(figures.waiting_seconds),
                _seconds(figures.data_seconds),
                plain(figures.samples_per_second),
            ]
        )
    columns = ["process", "device", "memory", "peak", "own work of a step"]
    columns += ["waiting for others", "reading", "samples a second"]
    print_table("processes", columns, rows, right=tuple(range(2, len(columns))))
    for straggler in find_stragglers(run.ranks):
        tell(str(straggler))


def _seconds(value: float | None) -> str:
    return "in step" if value is None else f"{value:.3f} s"


def _show_others(runs: Sequence[RunOverview]) -> None:
    """Name the older runs that need nothing, and the command that shows one of them."""
    if not runs:
        return
    names = [str(run.run) for run in runs[:NAMED_RUNS]]
    if len(runs) > NAMED_RUNS:
        names.append(f"{len(runs) - NAMED_RUNS} more in the table")
    tell(f"{counted(len(runs), 'other run')}: {some(names)}")
    folder = shlex.quote(str(runs[0].run))
    print(f"to see the files of one: videotune status {folder}")


def _show_dataset(dataset: DatasetOverview) -> None:
    missing = dataset.without_caption
    captions = f"{missing} without a caption" if missing else "each has a caption"
    damaged = (
        f", {dataset.unreadable} that cannot be read" if dataset.unreadable else ""
    )
    tell(f"{dataset.folder}: {counted(dataset.clips, 'clip')}, {captions}{damaged}")
    print(f"next: {dataset.next_command}")


def _stages(project: Path) -> list[Stage]:
    """Return the stages of a project of the studio, as its pages show them."""
    from videotune.studio.projects import find_project
    from videotune.studio.stages import stages
    from videotune.studio.web import FormData, PageContext

    folder = project.resolve()
    opened = find_project(folder.parent, folder.name)
    return stages(
        PageContext(
            root=folder.parent, is_local=True, project=opened, query=FormData({})
        )
    )


def _show_project(project: Path, stages: Sequence[Stage]) -> None:
    from videotune.studio.stages import next_stage

    print(f"\nproject {project.resolve().name}")
    for stage in stages:
        mark = {"done": "✓", "blocked": "!", "busy": "…"}.get(stage.state, " ")
        print(f"  {mark} {stage.name:<9}{stage.text}")
    step = next_stage(list(stages))
    if step is not None and step.action:
        root = project.resolve().parent
        print(f"next: {step.action}: videotune studio --root {as_argument(root)}")


def _project_json(project: Path, stages: Sequence[Stage]) -> dict[str, Any]:
    from videotune.studio.stages import next_stage

    step = next_stage(list(stages))
    return {
        "project": str(project),
        "stages": [
            {"stage": stage.name, "state": stage.state, "text": stage.text}
            for stage in stages
        ],
        "next": step.action if step is not None else "",
    }
