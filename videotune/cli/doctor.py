"""``videotune doctor``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from videotune import commands
from videotune.cli.options import Arg, AsJson, Opt
from videotune.console import answer, print_json, print_table, size
from videotune.errors import DONE, FAILED, SKIPPED, VideotuneError
from videotune.planner.gpus import measured_file

COLUMNS = ("what", "found", "note")


RunOption = Annotated[Path | None, Arg(help="a run folder whose problems to show")]
Repair = Annotated[
    bool,
    Opt("--repair-journal", help="remove damaged lines from the run's journal; a copy is kept"),
]
GpuOption = Annotated[
    bool,
    Opt(
        "--gpu", help="test and measure the GPU for some minutes; plan then uses its own rates"
    ),
]


def doctor(
    run: RunOption = None,
    as_json: AsJson = False,
    gpu: GpuOption = False,
    repair_journal: Repair = False,
) -> None:
    """Show what is installed, the devices, and what is missing; or the problems of a run.

    Exit code of --gpu: 2 where something is beyond its bound.
    """
    if gpu and (run is not None or repair_journal):
        raise VideotuneError(
            "--gpu tests the GPU, and no run: leave out RUN and --repair-journal"
        )
    if gpu:
        report = commands.self_test.self_test()
        answer(as_json, report, show_gpu)
        raise typer.Exit(SKIPPED if report["wrong"] else DONE)
    if run is not None:
        diagnose(run, as_json, repair_journal)
    elif repair_journal:
        raise VideotuneError(
            "--repair-journal: of which run? videotune doctor RUN --repair-journal"
        )
    else:
        rows, missing = commands.doctor.machine()
        table = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        answer(as_json, table, lambda _: show_machine(rows, bool(missing)))
        raise typer.Exit(FAILED if missing else DONE)


def show_machine(rows: Sequence[Sequence[str]], missing: bool) -> None:
    """Print what is installed, and where nothing is missing what works on which device."""
    print_table("doctor", COLUMNS, rows)
    if not missing:
        print_table("devices", commands.doctor.COLUMNS, commands.doctor.devices())
        print("Never: what stands there follows from torch's documentation and was not tried.")


def diagnose(run: Path, as_json: bool, repair_journal: bool) -> None:
    """Print what is wrong with a run, and what helps; or repair its journal."""
    from videotune.reporter import diagnosis  # reads checkpoints, which --help must not

    if repair_journal:
        print(diagnosis.repair_journal(run))
        return
    summary, found = diagnosis.diagnose(run)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    print(f"{run}: {summary}")
    for one in found:
        print(f"\n{one.line}\n  found: {one.found}\n  do:    {one.do}")
    print(
        "\nEach line is explained in docs/troubleshooting.md."
        if found
        else "nothing that its files show is wrong"
    )


def show_gpu(report: Mapping[str, Any]) -> None:
    """Print the report on a card."""
    card = report["card"]
    rates = report["matrix_flops"]
    rows = [
        [f"matrix products, {when}", f"{rate / 1e12:.3g} TFLOP/s"]
        for when, rate in rates.items()
    ]
    links = [
        [f"link {way}", f"{size(rate)}/s"]
        for way, rate in report["link_bytes_a_second"].items()
    ]
    rows += [["a training step reaches", f"{card['reached']:.0%} of it"], *links]
    for way, row in report["trainings"].items():
        memory = f"{size(row['allocated_bytes'])} held, {size(row['planned_bytes'])} planned"
        rows.append([f"step, {way}", f"{row['seconds']:.3f} s, {memory}"])
    last = ["the same losses twice", "yes" if report["same_losses"] else "no"]
    print_table(card["name"], ["what", "measured"], [*rows, last])
    for line in report["wrong"]:
        print(f"note: {line}")
    print(
        f"plan calculates with these rates from now on. To attach to a report: {measured_file(card['name'])}"
    )
