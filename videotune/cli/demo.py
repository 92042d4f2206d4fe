"""``videotune demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune import commands
from videotune.cli.data import show_account
from videotune.cli.plan import show_plan
from videotune.cli.train import show_training
from videotune.console import clock, echo, print_table
from videotune.errors import INTERRUPTED

if TYPE_CHECKING:
    from videotune.commands.check import CheckResult
    from videotune.commands.plan import PlanResult
    from videotune.commands.train import TrainResult


def demo(
    out: Annotated[Path, typer.Option("--out", help="folder for all files of the demo")] = Path(
        "demo"
    ),
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="of the clips and of the training")
    ] = 0,
) -> None:
    """Fine-tune the toy base model on a new shape, and show before and after."""
    result = commands.demo.demo(out, seed, show)
    if result is None:
        echo("run the demo again to continue")
        raise typer.Exit(INTERRUPTED)
    show_demo(out, result)


def show(result: CheckResult | PlanResult | TrainResult) -> None:
    """Print a part of the demo as its own command does."""
    if isinstance(result, commands.check.CheckResult):
        show_account(result)
    elif isinstance(result, commands.plan.PlanResult):
        show_plan(result)
    else:
        show_training(result)


def show_demo(out: Path, result: dict[str, Any]) -> None:
    """The result as a table, and where everything is."""
    concept = result["concept"]
    control = result["control"]
    validation = result["validation"]
    rows = [
        [
            f'"{commands.demo.TRIGGER}" is an {" ".join(commands.demo.CONCEPT)}',
            *shares(concept),
            concept["n"],
        ],
        ["what the base model knew is still right", *shares(control), control["n"]],
        [
            "error on held-out clips",
            f"{validation['before']:.3f}",
            f"{validation['after']:.3f}",
            "",
        ],
    ]
    print()
    print_table("before and after", ["", "before", "after", "samples"], rows, right=(1, 2, 3))
    print(
        f"{result['clips_used']} clips, {result['steps']} steps, {clock(result['seconds'])} in all"
    )
    print(
        f"our frames and diffusers' with the export differ by {result['same_frames']['max_difference']} of 255"
    )
    files = {"report": out / "run" / "report.html", "picture": out / "before_after.png"}
    files |= {"LoRA": Path(result["lora"]), "figures": out / "demo.json"}
    for name, path in files.items():
        print(f"{name + ':':9} {path}")


def shares(part: dict[str, Any]) -> tuple[str, str]:
    """Before and after in percent."""
    return f"{part['before']:.0%}", f"{part['after']:.0%}"
