"""``videotune demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune.cli.data import show_account
from videotune.cli.options import Opt
from videotune.cli.plan import show_plan
from videotune.cli.train import show_training
from videotune.console import echo, print_table
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

    result = run_demo(out, seed, show)
    if result is None:
        echo("run the demo again to continue")
        raise typer.Exit(INTERRUPTED)
    show_demo(out, result)


def show(result: CheckResult | PlanResult | TrainResult) -> None:
    """Print a part of the demo as its command does."""
    from videotune.commands.check import CheckResult
    from videotune.commands.plan import PlanResult

    if isinstance(result, CheckResult):
        show_account(result)
    elif isinstance(result, PlanResult):
        show_plan(result)
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
        [f'"{TRIGGER}" is an {" ".join(CONCEPT)}', *shares(concept), concept["n"]],
        ["what the base model knew is still right", *shares(control), control["n"]],
        ["error on clips kept aside", *errors, ""],
    ]
    print()
    print_table(
        "before and after", ["", "before", "after", "samples"], rows, right=(1, 2, 3)
    )

    seconds = duration(result["seconds"])
    difference = result["same_frames"]["max_difference"]
    print(f"{result['clips_used']} clips, {result['steps']} steps, {seconds} in all")
    print(
        "diffusers with the exported file draws the frames that videotune draws, to "
        f"{difference} of 255 grey levels"
    )

    files = {
        "report": out / "run" / "report.html",
        "picture": out / "before_after.png",
        "LoRA": Path(result["lora"]),
        "ComfyUI": _for_comfyui(Path(result["lora"])),
        "figures": out / "demo.json",
    }
    for name, path in files.items():
        print(f"{name + ':':9} {path}")
    print("the LoRA works only with the toy model; a real model's goes the same way")
    print("next, your own clips: videotune check FOLDER --preset NAME")
    print("                      videotune presets list --card NAME: the presets")


def _for_comfyui(lora: Path) -> Path:
    """Return the file with ComfyUI's names beside the one for diffusers."""
    return lora.with_name(f"{lora.stem}-comfyui{lora.suffix}")


def shares(samples: dict[str, Any]) -> tuple[str, str]:
    """Return the shares before and after in percent."""
    return f"{samples['before']:.0%}", f"{samples['after']:.0%}"
