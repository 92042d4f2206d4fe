"""``videotune lora``: adapter files of any program."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from videotune import commands
from videotune.cli.options import Arg, AsJson, Offline, Opt
from videotune.console import out as say
from videotune.console import print_json, print_table
from videotune.errors import VideotuneError

lora_app = typer.Typer(
    help="LoRA files of any program: inspect, convert, merge, resize, extract",
    no_args_is_help=True,
)

FileIn = Annotated[
    Path, Arg(help="a safetensors file, or a folder of PEFT or diffusers with one")
]
Out = Annotated[Path, Opt("--out", help="the file to write; of peft the folder")]
FormOption = Annotated[
    str, Opt("--to", help="diffusers, comfyui, kohya (and musubi), original or peft (a folder)")
]
TargetBaseOption = Annotated[
    str | None,
    Opt("--base", help="the base model's folder or Hub id (default: the file tells)"),
]
TargetFamilyOption = Annotated[
    str | None, Opt("--family", help="the model family, where a file fits several")
]
Overwrite = Annotated[bool, Opt("--overwrite", help="replace what --out names")]
Rank = Annotated[int | None, Opt("--rank", min=1, help="the rank of every module")]
ShareOption = Annotated[
    float | None, Opt("--energy", min=0, max=1, help="share of ‖ΔW‖² to keep in each module")
]
Error = Annotated[
    float | None, Opt("--error", min=0, max=1, help="relative error of ΔW to allow in each")
]
Weights = Annotated[
    list[float] | None, Opt("--weight", help="strength of each file, in their order")
]
Against = Annotated[
    str | None, Opt("--against", help="check every shape against this base model")
]


@lora_app.command("inspect")
def lora_inspect(
    file: FileIn, against: Against = None, as_json: AsJson = False, offline: Offline = False,
    every: Annotated[bool, Opt("--all", help="a line for each module")] = False,
) -> None:  # fmt: skip
    """Show a LoRA file's base, form, ranks, scales and health, and which programs read it how strongly."""
    found = commands.lora.inspect(file, against)
    if as_json:
        print_json(found)
        return
    say("\n".join([found["file"], *commands.lora.summary_lines(found)]))
    groups = [
        [row["group"].replace("_", " "), row["modules"], f"{row['share']:.1%}"]
        for row in found["groups"]
    ]
    readers = [reader(own) for own in found["programs"]]
    rows = found["modules"]
    kinds = Counter(
        (row["rank"], number(row["alpha"]), number(row["scale"]), row["alpha_in"])
        for row in rows
    )
    print_table("share of ‖ΔW‖²", ["modules of", "modules", "share"], groups, right=(1, 2))
    columns = ["rank", "alpha", "scale", "alpha is in", "modules"]
    print_table(
        "ranks and scales",
        columns,
        [[*key, many] for key, many in kinds.most_common(12)],
        right=(0, 1, 2, 4),
    )
    print_table("programs", ["program", "reads it with scale", "strength to set"], readers)
    if every:
        table = [[row["path"], row["rank"], number(row["norm"]), row["state"]] for row in rows]
        print_table("modules", ["module", "rank", "‖ΔW‖", "state"], table, right=(1, 2))
    if found["metadata"]:
        print_table(
            "metadata",
            ["key", "value"],
            [[key, value[:60]] for key, value in found["metadata"].items()],
        )
    if against is not None and found["misfits"]:
        raise VideotuneError(f"{file} does not fit {against}: {found['misfits'][0]}")


def number(value: float | None) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:.4g}"


def reader(own: dict[str, Any]) -> list[Any]:
    """A program, the scale that it applies, and the strength that makes up for it."""
    if own["scale"] is None:
        return [own["program"], "does not read this form", ""]
    scale = " to ".join(dict.fromkeys(map(number, own["scale"])))
    return [own["program"], scale, number(own["strength"]) or "none will do: convert the file"]


@lora_app.command("convert")
def lora_convert(
    file: FileIn, to: FormOption, out: Out, base: TargetBaseOption = None, family: TargetFamilyOption = None, overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:  # fmt: skip
    """Write a LoRA in another program's form, and read it back: ΔW is the same to 1e-6."""
    say(
        "\n".join(
            commands.lora.convert(file, commands.lora.Target(out, to, base, family, overwrite))
        )
    )


@lora_app.command("merge")
def lora_merge(
    files: Annotated[list[Path], Arg(help="LoRA files of one base model")], out: Out, weights: Weights = None,
    rank: Rank = None, to: FormOption = "diffusers", base: TargetBaseOption = None, family: TargetFamilyOption = None, overwrite: Overwrite = False,
    offline: Offline = False,
) -> None:  # fmt: skip
    """Write the sum of several LoRAs as one: exactly, or with --rank the nearest of a rank, with its error."""
    say(
        "\n".join(
            commands.lora.merge(
                files,
                weights or (),
                rank,
                commands.lora.Target(out, to, base, family, overwrite),
            )
        )
    )


@lora_app.command("resize")
def lora_resize(
    file: FileIn, out: Out, rank: Rank = None, energy: ShareOption = None, error: Error = None, to: FormOption = "diffusers",
    base: TargetBaseOption = None, family: TargetFamilyOption = None, overwrite: Overwrite = False, offline: Offline = False,
) -> None:  # fmt: skip
    """Write the nearest LoRA of a lower rank, the same in every module or as low as a bound allows in each."""
    if sum(given is not None for given in (rank, energy, error)) != 1:
        raise VideotuneError("lora resize takes one of --rank, --energy and --error")
    bound = (error or 0.0) if energy is None else (1 - energy) ** 0.5
    say(
        "\n".join(
            commands.lora.resize(
                file, rank, bound, commands.lora.Target(out, to, base, family, overwrite)
            )
        )
    )


@lora_app.command("extract")
def lora_extract(
    folder: Annotated[Path, Arg(help="a fine-tuned model in diffusers layout, or its transformer's folder")],
    base: Annotated[str, Opt("--base", help="the base model that it was fine-tuned from, with weights")],
    rank: Annotated[int, Opt("--rank", min=1, help="the rank of every module")], out: Out,
    expert: Annotated[str | None, Opt("--expert", help="of a model with two: high or low")] = None,
    to: FormOption = "diffusers", overwrite: Overwrite = False, offline: Offline = False,
) -> None:  # fmt: skip
    """Write what fine-tuning has changed in a model as a LoRA, and say what of it a LoRA cannot hold."""
    say(
        "\n".join(
            commands.lora.extract(
                folder, base, rank, expert, commands.lora.Target(out, to, base, None, overwrite)
            )
        )
    )
