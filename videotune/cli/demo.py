"""``videotune demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune.cli.data import show_account
from videotune.cli.next_steps import next_command
from videotune.cli.options import Opt
from videotune.cli.plan import show_plan
from videotune.cli.train import show_training
from videotune.console import echo, print_table, tell
from videotune.errors import INTERRUPTED
from videotune.text import duration

if TYPE_CHECKING:
    from videotune.commands.check import CheckResult
    from videotune.commands.plan import PlanResult
    from videotune.commands.train import TrainResult

OutOption = Annotated[Path, Opt("--out", help="folder for all files of the demo")]
SeedOption = Annotated[
    int, Opt("--seed", min=0, help="seed of the clips and the training")
]


def demo(out: OutOption = Path("demo"), seed: SeedOption = 0) -> None:
    """Fine-tune the toy base model on a new shape, and show before and after."""
    from videotune.commands.demo import demo as run_demo

    result = run_demo(out, seed, lambda part: show(out, part))
    if result is None:
        echo("run the demo again to continue")
        raise typer.Exit(INTERRUPTED)
    show_demo(out, result)


def show(out: Path, result: CheckResult | PlanResult | TrainResult) -> None:
    """Print a part of the demo as its command does."""
    from videotune.commands.check import CheckResult
    from videotune.commands.demo import CONFIG_NAME
    from videotune.commands.plan import PlanResult
    from videotune.job.overrides import Overrides

    overrides = Overrides(preset="toy", config=out / CONFIG_NAME)
    if isinstance(result, CheckResult):
        show_account(result, command=next_command("check", overrides))
    elif isinstance(result, PlanResult):
        show_plan(result, command=next_command("plan", overrides))
    else:
        show_training(result)


def show_demo(out: Path, result: dict[str, Any]) -> None:
    """Print the result as a table, and the path of every file."""
    from videotune.commands.demo import CONCEPT, TRIGGER

    concept = result["concept"]
    control = result["control"]
    validation = result["validation"]
    errors = (f"{validation['before']:.3f}", f"{validation['after']:.3f}")
    rows = [
        [
            f'draws a "{TRIGGER}": an {" ".join(CONCEPT)}',
            *shares(concept),
            concept["n"],
        ],
        ["draws the shapes that it knew before", *shares(control), control["n"]],
        ["error on clips it did not train on *", *errors, ""],
    ]
    print()
    print_table(
        "samples that are right, before and after the training",
        ["the model", "before", "after", "samples"],
        rows,
        right=(1, 2, 3),
    )
    tell("* of the denoising, on the clips kept aside for checking: lower is better")

    seconds = duration(result["seconds"])
    difference = result["same_frames"]["max_difference"]
    print(f"{result['clips_used']} clips, {result['steps']} steps, {seconds} in all")
    tell(
        "diffusers draws the same with the exported file as videotune: no pixel differs by "
        f"more than {difference} of 255 levels"
    )

    files = {
        "report": out / "run" / "report.html",
        "picture": out / "before_after.png",
        "LoRA": Path(result["lora"]),
        "the same": _for_comfyui(Path(result["lora"])),
        "figures": out / "demo.json",
    }
    for name, path in files.items():
        print(f"{name + ':':9} {path}")
    tell(
        "The toy is a tiny model that comes with videotune, draws only moving shapes and is "
        "in no other program. A real model's LoRA is written as the same two files, one for "
        "diffusers and one with ComfyUI's names."
    )
    print("next, your own clips: videotune init work")


def _for_comfyui(lora: Path) -> Path:
    """Return the file with ComfyUI's names beside the one for diffusers."""
    return lora.with_name(f"{lora.stem}-comfyui{lora.suffix}")


def shares(samples: dict[str, Any]) -> tuple[str, str]:
    """Return the shares before and after in percent."""
    return f"{samples['before']:.0%}", f"{samples['after']:.0%}"
