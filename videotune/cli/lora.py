"""``videotune lora``: adapter files of any program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from videotune import commands
from videotune.cli.options import AsJson, Offline
from videotune.console import out as say
from videotune.console import print_table
from videotune.errors import VideotuneError

if TYPE_CHECKING:
    from videotune.exporter.lora_tools import Made

lora_app = typer.Typer(
    help="LoRA files of any program: inspect, convert, merge, resize, extract.", no_args_is_help=True
)

FORMS = "diffusers, comfyui, kohya (musubi's form too), original or peft (a folder)"
FileIn = Annotated[Path, typer.Argument(help="a safetensors file, or a folder of PEFT or diffusers with one")]
Out = Annotated[Path, typer.Option("--out", help="the file to write; of peft the folder")]
Form = Annotated[str, typer.Option("--to", help=FORMS)]
Base = Annotated[str | None, typer.Option("--base", help="the base model's folder or Hub id (default: the file tells)")]
FamilyName = Annotated[str | None, typer.Option("--family", help="the model family, where files fit several")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what --out names")]


@lora_app.command("inspect")
def lora_inspect(
    file: FileIn,
    against: Annotated[
        str | None, typer.Option("--against", help="check every shape against this base model (folder or Hub id)")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="a line for each module")] = False,
    as_json: AsJson = False,
    offline: Offline = False,
) -> None:
    """Show a LoRA file's base, form, ranks, scales and health, and which programs read it how strongly."""
    found = commands.lora.inspect(file, against)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    say(found["file"])
    for line in commands.lora.summary(found):
        say(line)
    print_table("‖ΔW‖² by module groups", ["group", "modules", "share"], group_rows(found), right=(1, 2))
    print_table(
        "ranks and scales", ["rank", "alpha", "scale", "alpha is in", "modules"], scale_rows(found), right=(0, 1, 2, 4)
    )
    print_table("programs", ["program", "reads it", "scale", "strength to set"], program_rows(found))
    if every:
        rows = [
            [row["name"], row["rank"], f"{row['scale']:g}", number(row["norm"]), row["state"]]
            for row in found["modules"]
        ]
        print_table("modules", ["module", "rank", "scale", "‖ΔW‖", "state"], rows, right=(1, 2, 3))
    if found["metadata"]:
        print_table("metadata", ["key", "value"], [[key, value[:60]] for key, value in found["metadata"].items()])
    if against is not None and found["misfits"]:
        raise VideotuneError(
            f"{file} does not fit {against}: {len(found['misfits'])} modules, first: {found['misfits'][0]}"
        )


def number(value: float | None) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:.4g}"


def group_rows(found: dict[str, Any]) -> list[list[Any]]:
    """group, modules, share."""
    return [[row["group"].replace("_", " "), row["modules"], f"{row['share']:.1%}"] for row in found["groups"]]


def scale_rows(found: dict[str, Any]) -> list[list[Any]]:
    """rank, alpha, scale, where alpha stands, and how many modules have these."""
    count: dict[tuple[Any, ...], int] = {}
    for row in found["modules"]:
        key = (row["rank"], number(row["alpha"]) or "none", f"{row['scale']:.4g}", row["alpha_in"] or "no place")
        count[key] = count.get(key, 0) + 1
    kinds = sorted(count.items(), key=lambda item: -item[1])
    rest = sum(many for _, many in kinds[12:])
    return [[*key, many] for key, many in kinds[:12]] + (
        [["…", "", "", f"{len(kinds) - 12} more", rest]] if rest else []
    )


def program_rows(found: dict[str, Any]) -> list[list[Any]]:
    """program, whether it reads the file, the scale that it applies, the strength that makes up for it."""
    rows = []
    for own in found["programs"]:
        low, high = own["scale"] or (None, None)
        scale = number(low) if low == high else f"{number(low)} to {number(high)}"
        strength = number(own["strength"]) or "none will do: convert the file" if own["reads"] else ""
        rows.append([own["program"], "yes" if own["reads"] else "no", scale, strength])
    return rows


@lora_app.command("convert")
def lora_convert(
    file: FileIn, to: Form, out: Out, base: Base = None, family: FamilyName = None, overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:  # fmt: skip
    """Write a LoRA in another program's form, and read it back: ΔW is the same to 1e-6."""
    show(commands.lora.convert(file, commands.lora.Target(out, to, base, family, overwrite)))


@lora_app.command("merge")
def lora_merge(
    files: Annotated[list[Path], typer.Argument(help="LoRA files of one base model")],
    out: Out,
    weights: Annotated[list[float] | None, typer.Option("--weight", help="strength of each file, in their order")] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=1, help="cut the sum to this rank (default: exact)")] = None,
    to: Form = "diffusers", base: Base = None, family: FamilyName = None, overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:  # fmt: skip
    """Write the sum of several LoRAs as one: exactly, or the nearest of a rank, with its error."""
    show(commands.lora.merge(files, weights or (), rank, commands.lora.Target(out, to, base, family, overwrite)))


@lora_app.command("resize")
def lora_resize(
    file: FileIn,
    out: Out,
    rank: Annotated[int | None, typer.Option("--rank", min=1, help="the rank of every module")] = None,
    energy: Annotated[float | None, typer.Option("--energy", min=0, max=1, help="share of ‖ΔW‖² to keep")] = None,
    error: Annotated[float | None, typer.Option("--error", min=0, max=1, help="relative error of ΔW to allow")] = None,
    to: Form = "diffusers", base: Base = None, family: FamilyName = None, overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:  # fmt: skip
    """Write the nearest LoRA of a lower rank, the same in every module or as low as a bound allows in each."""
    if sum(given is not None for given in (rank, energy, error)) != 1:
        raise VideotuneError("lora resize takes one of --rank, --energy and --error")
    bound = error if energy is None else (1 - energy) ** 0.5
    show(commands.lora.resize(file, rank, bound, commands.lora.Target(out, to, base, family, overwrite)))


@lora_app.command("extract")
def lora_extract(
    folder: Annotated[Path, typer.Argument(help="a fine-tuned model in diffusers layout, or its transformer's folder")],
    base: Annotated[str, typer.Option("--base", help="the base model that it was fine-tuned from, with weights")],
    rank: Annotated[int, typer.Option("--rank", min=1, help="the rank of every module")],
    out: Out,
    expert: Annotated[str | None, typer.Option("--expert", help="of a model with two: high or low")] = None,
    to: Form = "diffusers", overwrite: Overwrite = False, offline: Offline = False,
) -> None:  # fmt: skip
    """Write what fine-tuning has changed in a model as a LoRA, and say what of it a LoRA cannot hold."""
    show(commands.lora.extract(folder, base, rank, expert, commands.lora.Target(out, to, base, None, overwrite)))


def show(made: Made) -> None:
    """Print what was written."""
    for line in made.words():
        say(line)
