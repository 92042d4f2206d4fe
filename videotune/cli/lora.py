"""``videotune lora``: adapter files of any program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from videotune.cli.next_steps import command_line
from videotune.cli.options import Arg, AsJson, Offline, Opt
from videotune.console import doing, print_json, print_table, tell
from videotune.console import out as say
from videotune.errors import VideotuneError
from videotune.exporter.lora_target import (
    FORM_KINDS,
    Target,
    adapter_path,
    refuse_missing,
    refuse_weights,
)
from videotune.text import counted

LONGEST_CELL = 50
"""Characters of a header's value that are shown."""

lora_app = typer.Typer(
    help="LoRA files of any program: inspect, convert, merge, resize, extract",
    no_args_is_help=True,
)

LoraFile = Annotated[
    Path, Arg(help="a safetensors file, or a folder of PEFT or diffusers with one")
]
Out = Annotated[Path, Opt("--out", help="the file to write; for peft the folder")]
FormOption = Annotated[
    str,
    Opt(
        "--to",
        help="diffusers, comfyui, kohya (and musubi), original or peft (a folder)",
    ),
]
TargetBaseOption = Annotated[
    str | None,
    Opt(
        "--base",
        help="the base model's folder or Hub id (default: detected from the file)",
    ),
]
TargetFamilyOption = Annotated[
    str | None, Opt("--family", help="the model family, if a file fits several")
]
Overwrite = Annotated[bool, Opt("--overwrite", help="replace an existing --out")]
Rank = Annotated[int | None, Opt("--rank", min=1, help="the rank of every module")]
ShareOption = Annotated[
    float | None,
    Opt("--energy", min=0, max=1, help="share of ‖ΔW‖² to keep in each module"),
]
Error = Annotated[
    float | None,
    Opt("--error", min=0, max=1, help="relative error of ΔW to allow in each"),
]
Weights = Annotated[
    list[float] | None, Opt("--weight", help="strength of each file, in their order")
]
Against = Annotated[
    str | None, Opt("--against", help="check every shape against this base model")
]
LoraFiles = Annotated[list[Path], Arg(help="LoRA files of one base model")]
TunedModel = Annotated[
    Path,
    Arg(help="a fine-tuned model in diffusers layout, or its transformer's folder"),
]
OriginalBase = Annotated[
    str, Opt("--base", help="the base model that it was fine-tuned from, with weights")
]
LoraRank = Annotated[int, Opt("--rank", min=1, help="the rank of every module")]
Expert = Annotated[str | None, Opt("--expert", help="of a model with two: high or low")]


@lora_app.command("inspect")
def lora_inspect(
    file: LoraFile,
    against: Against = None,
    as_json: AsJson = False,
    offline: Offline = False,
    every: Annotated[bool, Opt("--all", help="print a line for each module")] = False,
) -> None:
    """Show a LoRA file's base, form, ranks, scales and health, and how programs read
    it.
    """
    refuse_missing(file)
    doing(f"reading {adapter_path(file)}")
    from videotune.commands.lora import inspect, summary_lines

    report = inspect(file, against)
    if as_json:
        print_json(report)
        return

    for line in (report["file"], *summary_lines(report)):
        tell(line)
    show_groups(report["groups"])
    show_scales(report["modules"])
    programs = [program_cells(program) for program in report["programs"]]
    columns = ["program", "multiplies it by", "strength to set"]
    # No other program has the toy; the table is right about the names all the same.
    is_toy = str(report["trained_on"] or "").startswith("asset:")
    title = "programs that read these names" if is_toy else "programs"
    print_table(title, columns, programs)
    if not is_toy:
        tell_conversion(report)
    if every:
        show_modules(report["modules"])
    if report["metadata"]:
        metadata = [
            [key, _shortened(value)] for key, value in report["metadata"].items()
        ]
        print_table("metadata", ["key", "value"], metadata)

    if against is not None and report["misfits"]:
        raise VideotuneError(f"{file} does not fit {against}: {report['misfits'][0]}")


def tell_conversion(report: dict[str, Any]) -> None:
    """Print the command that writes a file for ComfyUI, if ComfyUI does not read this one."""
    is_unread = any(
        program["program"] == "ComfyUI" and program["reads"] == "no"
        for program in report["programs"]
    )
    kinds = set(report["kind"].split(" and "))
    if not is_unread or not report["fits"] or not kinds <= set(FORM_KINDS["comfyui"]):
        return
    file = Path(report["file"])
    target = file.with_name(f"{file.stem}-comfyui.safetensors")
    command = ["videotune", "lora", "convert", str(file), "--to", "comfyui"]
    tell(f"for ComfyUI: {command_line([*command, '--out', str(target)])}")


def _shortened(value: str) -> str:
    """Return a value of the header as its cell shows it."""
    return value if len(value) <= LONGEST_CELL else f"{value[:LONGEST_CELL]}…"


def show_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Print the share that each group of modules has in the size of the adapter."""
    rows = []
    for group in groups:
        name = group["group"].replace("_", " ")
        rows.append([name, group["modules"], f"{group['share']:.1%}"])
    print_table(
        "where it changes the model most (share of ‖ΔW‖²)",
        ["part of the model", "modules", "share"],
        rows,
        right=(1, 2),
    )


def show_scales(modules: Sequence[dict[str, Any]]) -> None:
    """Print the most common ranks and scales, with their number of modules."""
    counts = Counter(
        (
            row["rank"],
            number(row["alpha"]) or "none",
            number(row["scale"]),
            row["alpha_in"] or "none",
        )
        for row in modules
    )
    rows = [[*scale, count] for scale, count in counts.most_common(12)]
    columns = ["rank", "alpha", "scale", "alpha is in", "modules"]
    print_table("ranks and scales", columns, rows, right=(0, 1, 2, 4))
    tell("scale: alpha / rank, by which the change is multiplied; 1 without an alpha")


def show_modules(modules: Sequence[dict[str, Any]]) -> None:
    """Print a line for each module."""
    rows = [
        [row["path"], row["rank"], number(row["norm"]), row["state"]] for row in modules
    ]
    print_table("modules", ["module", "rank", "‖ΔW‖", "state"], rows, right=(1, 2))


def number(value: float | None) -> str:
    """Return a figure as text; empty for None."""
    return "" if value is None else f"{value:.4g}"


def program_cells(program: dict[str, Any]) -> list[str]:
    """Return a program, the scale that it applies, and the strength that makes up for
    it.
    """
    if program["reads"] == "unknown":
        return [program["program"], "not known without the base", ""]
    if program["reads"] == "no":
        return [program["program"], "does not read this form", ""]
    scale = " to ".join(dict.fromkeys(map(number, program["scale"])))
    strength = number(program["strength"]) or "no strength is right: convert the file"
    return [program["program"], scale, strength]


@lora_app.command("convert")
def lora_convert(
    file: LoraFile,
    to: FormOption,
    out: Out,
    base: TargetBaseOption = None,
    family: TargetFamilyOption = None,
    overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:
    """Write a LoRA in another program's form, and read it back: ΔW is the same to 1e-6."""
    target = Target(out, to, base, family, overwrite)
    target.check(file)
    doing(f"reading {adapter_path(file)}")
    from videotune.commands.lora import convert

    say("\n".join(convert(file, target)))


@lora_app.command("merge")
def lora_merge(
    files: LoraFiles,
    out: Out,
    weights: Weights = None,
    rank: Rank = None,
    to: FormOption = "diffusers",
    base: TargetBaseOption = None,
    family: TargetFamilyOption = None,
    overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:
    """Write the sum of several LoRAs as one: exact, or with --rank the nearest of that
    rank.
    """
    target = Target(out, to, base, family, overwrite)
    target.check(*files)
    refuse_weights(files, weights or ())
    doing(f"reading {counted(len(files), 'file')}")
    from videotune.commands.lora import merge

    say("\n".join(merge(files, weights or (), rank, target)))


@lora_app.command("resize")
def lora_resize(
    file: LoraFile,
    out: Out,
    rank: Rank = None,
    energy: ShareOption = None,
    error: Error = None,
    to: FormOption = "diffusers",
    base: TargetBaseOption = None,
    family: TargetFamilyOption = None,
    overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:
    """Write the nearest LoRA of a lower rank: of one rank, or as low as a bound allows."""
    bounds = [bound for bound in (rank, energy, error) if bound is not None]
    if len(bounds) != 1:
        raise VideotuneError("lora resize takes one of --rank, --energy and --error")
    target = Target(out, to, base, family, overwrite)
    target.check(file)
    doing(f"reading {adapter_path(file)}")
    from videotune.commands.lora import resize

    relative_error = error or 0.0
    if energy is not None:
        relative_error = (1 - energy) ** 0.5

    say("\n".join(resize(file, rank, relative_error, target)))


@lora_app.command("extract")
def lora_extract(
    folder: TunedModel,
    base: OriginalBase,
    rank: LoraRank,
    out: Out,
    expert: Expert = None,
    to: FormOption = "diffusers",
    overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:
    """Write a fine-tuned model's changes as a LoRA, and report what a LoRA cannot hold."""
    target = Target(out, to, base, None, overwrite)
    target.check(folder)
    doing(f"reading {folder}")
    from videotune.commands.lora import extract

    say("\n".join(extract(folder, base, rank, expert, target)))
