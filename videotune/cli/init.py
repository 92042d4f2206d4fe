"""``videotune init``: five answers, and a config with the reason for each value; ``videotune tiny``: a random base model."""

from pathlib import Path
from typing import Annotated

import typer

from videotune.cli.options import Arg, Opt
from videotune.console import echo, print_table
from videotune.errors import VideotuneError
from videotune.files import write_text
from videotune.presets.recipes import config_of, models, preset_for, recipe, recipes

ANY = 1_000_000
"""GB of a card that holds everything."""


def init(
    folder: Annotated[Path, Arg(help="the folder that gets config.yaml")],
    purpose: Annotated[str | None, Opt(help=f"what to learn: {', '.join(recipes())}")] = None,
    model: Annotated[
        str | None, Opt(help="a model of `videotune presets list`, or a preset's whole name")
    ] = None,
    card: Annotated[int | None, Opt(min=1, help="memory of the GPU in GB")] = None,
    data: Annotated[
        str | None, Opt(help="a folder of clips, an archive or a Hub dataset")
    ] = None,
    trigger: Annotated[str | None, Opt(help="the word that stands for it; empty: none")] = None,
    prior: Annotated[
        str | None,
        Opt(
            "--prior-preservation",
            help="clips of others of its kind, which the model keeps as it knows them",
        ),
    ] = None,
) -> None:
    """Write a commented config for a purpose, a model and a card; the command asks for options that are not given."""
    target = folder / "config.yaml"
    if target.exists():
        raise VideotuneError(f"{target} is there already: name another folder")
    if purpose is None:
        print_table(
            "purposes",
            ["purpose", "teaches"],
            [[name, one["about"]] for name, one in recipes().items()],
        )
        purpose = typer.prompt("What is to be learnt?", default="concept")
    recipe(purpose)  # refuses it before the next question
    if model is None:
        cards = [
            [name, ", ".join(x.rpartition(" ")[2] for x in own if x != name)]
            for name, own in models().items()
        ]
        print_table("models", ["model", "cards"], cards)
        model = typer.prompt("Which model?")
    if card is None:
        card = typer.prompt("Memory of the GPU in GB? 0: unknown", type=int, default=0) or ANY
    preset = preset_for(model, card)
    data = data or typer.prompt("Where are the clips?")
    if trigger is None:
        trigger = typer.prompt(
            "Which word stands for it in captions? Empty: none", default="", show_default=False
        )
    place = (
        str(Path(data).expanduser().absolute()) if Path(data).expanduser().exists() else data
    )
    write_text(
        target, config_of(purpose, preset, place, _clips(Path(place)), trigger or None, prior)
    )
    print(target)
    for command in ("check", "plan", f"train --out {folder / 'run'}"):
        echo(f"videotune {command} --config {target}")


def _clips(folder: Path) -> int:
    """Clips of a folder; 0 for an archive or a Hub dataset, which nobody has opened yet."""
    from videotune.data.layouts import read_folder

    return len(read_folder(folder)[0]) if folder.is_dir() else 0


Variant = Annotated[
    str | None,
    Opt(help="the kind of checkpoint; an unknown name lists them (default: the first)"),
]


def tiny(
    family: Annotated[str, Arg(help="the family, by any of its names")],
    folder: Annotated[Path, Arg(help="a new folder; name it as base_model_name")],
    variant: Variant = None,
    seed: Annotated[int, Opt(min=0, max=2**63 - 1, help="seed of the random weights")] = 0,
) -> None:
    """Write a tiny base model of random weights in a family's real layout, for trying a run on any machine."""
    from videotune.models.loading import quietly
    from videotune.models.registry import find

    known = find(family)
    if variant is not None and variant not in known.variants:
        raise VideotuneError(
            f"--variant: {known.spec.name} has {', '.join(known.variants)}, not {variant!r}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VideotuneError(f"{folder} is there already: name a new folder")
    with quietly():
        print(known.tiny(folder, seed, variant))
