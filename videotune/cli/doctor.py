"""``videotune doctor``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune.cli.options import Arg, AsJson, Opt
from videotune.console import answer, doing, out, print_json, print_table, size, tell
from videotune.errors import DONE, FAILED, SKIPPED, VideotuneError
from videotune.pages import docs_page
from videotune.planner.gpus import measured_file
from videotune.text import as_argument, memory_size

if TYPE_CHECKING:
    from videotune.reporter.diagnosis import Finding

COLUMNS = ("what", "found", "note")

GOING = ("running", "paused", "done", "early")
"""States of a run that is not interrupted."""


RunOption = Annotated[Path | None, Arg(help="show the problems of this run folder")]
Repair = Annotated[
    bool,
    Opt(
        "--repair-journal",
        help="remove damaged lines from the run's journal; keep a copy",
    ),
]
GpuOption = Annotated[
    bool,
    Opt(
        "--gpu",
        help="test and measure the GPU for some minutes; plan then uses its rates",
    ),
]
NotifyOption = Annotated[
    list[str] | None,
    Opt(
        "--notify",
        help="send a test message: an environment variable with a URL of Apprise, or the URL; may be repeated",
    ),
]
BundleOption = Annotated[
    Path | None,
    Opt(
        "--bundle",
        help="write a zip for a bug report: this machine, and RUN; no clip, caption, name or token",
    ),
]
WithCaptions = Annotated[
    bool,
    Opt("--with-captions", help="of --bundle: keep captions, prompts and clips' names"),
]


def doctor(
    run: RunOption = None,
    as_json: AsJson = False,
    gpu: GpuOption = False,
    repair_journal: Repair = False,
    notify: NotifyOption = None,
    bundle: BundleOption = None,
    with_captions: WithCaptions = False,
) -> None:
    """Show what is installed, the devices, and what is missing; or the problems of a
    run.

    Exit code of --gpu: 2 if a result is beyond its bound.
    """
    if with_captions and bundle is None:
        raise VideotuneError("--with-captions is for --bundle. Omit it")
    if bundle is not None:
        if gpu or repair_journal or notify:
            raise VideotuneError(
                "--bundle writes a bundle and does nothing else. Omit the other options"
            )
        bundle_up(bundle, run, as_json=as_json, with_captions=with_captions)
        return
    if notify:
        if gpu or repair_journal or run is not None:
            raise VideotuneError(
                "--notify sends a test message and does nothing else. Omit the other options"
            )
        send_test_messages(notify, as_json)
    if gpu and (run is not None or repair_journal):
        raise VideotuneError(
            "--gpu tests the GPU, not a run. Omit RUN and --repair-journal."
        )
    if repair_journal and run is None:
        raise VideotuneError(
            "--repair-journal needs a run. Write: videotune doctor RUN --repair-journal"
        )

    if gpu:
        measure_gpu(as_json)
    elif run is not None:
        diagnose_run(run, as_json=as_json, repair_journal=repair_journal)
    else:
        show_machine(as_json)


def bundle_up(
    bundle: Path, run: Path | None, *, as_json: bool, with_captions: bool
) -> None:
    """Write a bundle, and print what is in it."""
    from videotune.commands.bundle import refuse_bundle, write_bundle

    refuse_bundle(bundle, run)
    doing("collecting")
    result = write_bundle(bundle, run, with_captions=with_captions)

    def show(written: Mapping[str, Any]) -> None:
        for file in written["files"]:
            out(f"{file['path']}  {size(file['bytes'])}")
        out(f"{written['bundle']}  {size(written['bytes'])}")
        tell(
            "Look into it before you send it. "
            + (
                "It has captions and names of clips."
                if with_captions
                else "Captions, prompts, names of clips and folders, and tokens are left out."
            )
        )

    answer(as_json, result, show)


def send_test_messages(addresses: Sequence[str], as_json: bool) -> None:
    """Send a message to each address, print what went wrong, and exit."""
    from videotune.config.resolve import parse
    from videotune.runs.notification_sender import SECONDS
    from videotune.runs.notifications import (
        refuse_missing_library,
        resolve_address,
        send,
    )

    checked = parse({"notify": list(addresses)}).notify
    refuse_missing_library()
    resolved = [resolve_address(address) for address in checked]
    doing("sending")
    rows = []
    for address in resolved:
        text = "Messages about your runs arrive here."
        problem = send(address, "videotune: test", text, SECONDS)
        rows.append({"address": address.name, "problem": problem})

    def show(results: Sequence[Mapping[str, str | None]]) -> None:
        for result in results:
            out(f"{result['address']}: {result['problem'] or 'the message was taken'}")

    answer(as_json, rows, show)
    has_failed = any(row["problem"] for row in rows)
    raise typer.Exit(FAILED if has_failed else DONE)


def show_machine(as_json: bool) -> None:
    """Print what is installed and, if nothing is missing, what works on which device."""
    doing("looking at packages and devices")
    from videotune.commands import doctor as machine_doctor

    rows, missing = machine_doctor.machine()

    def show(table: Sequence[Mapping[str, str]]) -> None:
        print_table("this machine", COLUMNS, [list(row.values()) for row in table])
        if not missing:
            print_table("devices", machine_doctor.COLUMNS, machine_doctor.devices())
            tell("Never: taken from torch's documentation, and not tried on a device.")
            tell(machine_doctor.can_train())

    answer(as_json, [dict(zip(COLUMNS, row, strict=True)) for row in rows], show)
    raise typer.Exit(FAILED if missing else DONE)


def diagnose_run(run: Path, *, as_json: bool, repair_journal: bool) -> None:
    """Print the problems of a run and their remedies; or repair its journal."""
    from videotune.reporter.read import refuse_no_run

    refuse_no_run(run)
    doing(f"reading {run}")
    from videotune.reporter import diagnosis  # reads checkpoints, which --help must not
    from videotune.reporter.outcome import status

    if repair_journal:
        out(diagnosis.repair_journal(run))
        return

    summary, problems = diagnosis.diagnose(run)
    if as_json:
        print_json([asdict(problem) for problem in problems])
        return

    tell(f"{run}: {summary}")
    if status(run)["state"] not in GOING:
        tell(f"To continue it: videotune resume {as_argument(run)}")
    show_problems(problems)
    if problems:
        out(f"\nExplained in {docs_page('troubleshooting', 'findings-of-doctor')}")
    else:
        out("its files show no problem")


def show_problems(problems: Sequence[Finding]) -> None:
    """Print each heading once, with what was found and what to do."""
    by_heading: dict[str, list[Finding]] = {}
    for problem in problems:
        by_heading.setdefault(problem.line, []).append(problem)

    for heading, same_heading in by_heading.items():
        out(f"\n{heading}")
        for problem in same_heading:
            tell(f"  found: {problem.found}", indent="         ")
            tell(f"  do:    {problem.do}", indent="         ")


def measure_gpu(as_json: bool) -> None:
    """Test and measure the GPU, print the report, and exit with 2 if a result is out of
    bounds.
    """
    from videotune.commands.self_test import self_test

    report = self_test()
    answer(as_json, report, show_gpu)
    raise typer.Exit(SKIPPED if report["wrong"] else DONE)


def show_gpu(report: Mapping[str, Any]) -> None:
    """Print the report on a GPU."""
    card = report["card"]
    rows = []
    for name, rate in report["matrix_flops"].items():
        rows.append([f"matrix products, {name}", f"{rate / 1e12:.3g} TFLOP/s"])
    rows.append(["a training step reaches", f"{card['reached']:.0%} of it"])
    for direction, rate in report["link_bytes_a_second"].items():
        rows.append([f"link {direction}", f"{size(rate)}/s"])

    for name, training in report["trainings"].items():
        allocated = memory_size(training["allocated_bytes"])
        planned = memory_size(training["planned_bytes"])
        memory = f"{allocated} allocated, {planned} planned"
        rows.append([f"step, {name}", f"{training['seconds']:.3f} s, {memory}"])
    rows.append(["the same losses twice", "yes" if report["same_losses"] else "no"])
    print_table(card["name"], ["what", "measured"], rows)

    for line in report["wrong"]:
        out(f"note: {line}")
    file = measured_file(card["name"])
    out(f"plan uses these rates from now on. To attach to a report: {file}")
