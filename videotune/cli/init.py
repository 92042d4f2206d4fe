"""``videotune init``: write a config with reasons; ``videotune tiny``: a random base
model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from videotune import console
from videotune.cli.init_questions import (
    ChosenCard,
    ask_card,
    ask_data,
    ask_model,
    ask_purpose,
    ask_trigger,
    is_there,
    parse_card,
)
from videotune.cli.next_steps import (
    CONFIG_NAME,
    card_line,
    card_options,
    next_command,
    proposed_run,
)
from videotune.cli.options import Arg, Opt
from videotune.config.base_models import download_size
from videotune.console import doing, echo
from videotune.errors import VideotuneError
from videotune.files import write_text
from videotune.planner.preset_fits import best_preset
from videotune.presets.recipes import (
    config_of,
    find_model,
    presets_of,
    recipe,
    recipes,
    refuse_pictures_for_movement,
)
from videotune.presets.shipped import preset_card, read_preset

CardOption = Annotated[
    ChosenCard | None,
    Opt(
        parser=str,
        callback=parse_card,
        metavar="GB|NAME",
        help="memory of the GPU in GB, or its name, such as 'rtx 4090'; 0: unknown",
    ),
]


def init(
    folder: Annotated[Path, Arg(help="the folder that gets config.yaml")],
    purpose: Annotated[
        str | None, Opt(help=f"what to learn: {', '.join(recipes())}")
    ] = None,
    model: Annotated[
        str | None,
        Opt(
            help="a model or a preset of `videotune presets list`, or a part of its name "
            "that no other has"
        ),
    ] = None,
    card: CardOption = None,
    data: Annotated[
        str | None, Opt(help="a folder of clips, an archive or a Hub dataset")
    ] = None,
    trigger: Annotated[
        str | None, Opt(help="the word for it in captions; empty: no such word")
    ] = None,
    prior: Annotated[
        str | None,
        Opt(
            "--prior-preservation",
            help="clips of the same class that must stay as they are",
        ),
    ] = None,
) -> dict[str, Any]:
    """Write a commented config for a purpose, a model and a card; ask for missing
    options.
    """
    target = folder / CONFIG_NAME
    if target.exists():
        raise VideotuneError(f"{target} exists already. Name another folder.")

    options = {
        "--purpose": purpose,
        "--model": model,
        "--card": card,
        "--data": data,
        "--trigger": trigger,
    }
    missing = [name for name in options if options[name] is None]
    if purpose is not None:
        recipe(purpose)  # refuses an unknown one before the first question
    if model is not None:
        model = find_model(model)
        if not _needs_card(model) and card is None:
            missing.remove("--card")

    with _answers_as_options(missing):
        if card is None:
            needs_card = model is None or _needs_card(model)
            card = ask_card() if needs_card else ChosenCard(0)
        if purpose is None:
            purpose = ask_purpose()
        if model is None:
            model = ask_model(card.gigabytes, purpose)
        refuse_pictures_for_movement(model, purpose)
        preset = best_preset(model, card.gigabytes)

        data = _absolute_if_local(data or ask_data())
        trigger = ask_trigger() if trigger is None else trigger

    config = _config_for(purpose, preset, data, trigger=trigger, prior=prior, card=card)
    write_text(target, config)
    console.out(target)
    if not is_there(data):
        echo(f"note: there is no folder {data} yet")
    return {"config": str(target), "next": _show_next_commands(target, preset)}


def _config_for(
    purpose: str,
    preset: str,
    data: str,
    *,
    trigger: str,
    prior: str | None,
    card: ChosenCard,
) -> str:
    """Return the config of the answers as YAML."""
    config = config_of(
        purpose,
        preset,
        data,
        clips=_count_clips(Path(data)),
        trigger=trigger or None,
        prior=prior,
        card=card.gigabytes,
        card_name=card.name,
    )
    if card.gigabytes and preset_card(preset):
        return f"{card_line(card.option)}\n{config}"
    return config


def _absolute_if_local(data: str) -> str:
    """Return the absolute path of a dataset that is on this machine, else its name."""
    path = Path(data).expanduser()
    return str(path.absolute()) if path.exists() else data


def _show_next_commands(config: Path, preset: str) -> list[str]:
    """Print the commands from a new config to its training, and return them; one fetches
    the base model if that is not on this machine.
    """
    from videotune.job.overrides import Overrides

    overrides = Overrides(config=config)
    commands = [
        next_command("check", overrides),
        next_command("plan", overrides, *card_options(config)),
    ]
    if _lacks_base_model(preset):
        commands.append(next_command("download", overrides))
    commands.append(next_command("train", overrides, "--out", proposed_run(config)))

    echo("next:")
    for command in commands:
        echo(f"  {command}")
    return commands


def _lacks_base_model(preset: str) -> bool:
    """Return whether a preset's base model has to be downloaded; say how large it is."""
    from videotune.models.hub import is_complete_here

    base_model = str(read_preset(preset)["base_model_name"])
    if base_model.startswith("asset:") or is_complete_here(base_model):
        return False
    size = download_size(base_model)
    how_large = f" ({size})" if size else ""
    echo(
        f"note: the base model {base_model}{how_large} is not on this machine; `train` "
        "downloads it too"
    )
    return True


@contextmanager
def _answers_as_options(names: Sequence[str]) -> Iterator[None]:
    """Name the options that answer the questions of a block, if nobody can answer them.

    Raises:
        VideotuneError: a question got no answer, or is not asked, as with --json.
    """
    missing = " ".join(f"{name} …" for name in names)
    if names and console.are_tables_recorded():
        raise VideotuneError(
            f"--json asks no questions. Give the answers as options: {missing}"
        )
    try:
        yield
    except typer.Abort:
        raise VideotuneError(
            f"stopped at a question. Give the answers as options: {missing}"
        ) from None


def _needs_card(model: str) -> bool:
    """Whether a preset of the model is for cards of some memory; the toy needs none."""
    return any(preset_card(preset) for preset in presets_of(model))


def _count_clips(folder: Path) -> int:
    """Return the number of clips in a folder; 0 for an archive or a Hub dataset."""
    from videotune.data.layouts import read_folder

    if not folder.is_dir():
        return 0
    return len(read_folder(folder)[0])


Variant = Annotated[
    str | None,
    Opt(help="the kind of checkpoint; an unknown name lists them (default: the first)"),
]


def tiny(
    family: Annotated[str, Arg(help="the family, by any of its names")],
    folder: Annotated[Path, Arg(help="a new folder; name it as base_model_name")],
    variant: Variant = None,
    seed: Annotated[
        int, Opt(min=0, max=2**63 - 1, help="seed of the random weights")
    ] = 0,
) -> None:
    """Write a tiny base model of random weights in a family's layout, to try a run
    anywhere.
    """
    from videotune.models.loading import quietly
    from videotune.models.registry import find

    model = find(family)
    if variant is not None and variant not in model.variants:
        variants = ", ".join(model.variants)
        raise VideotuneError(
            f"--variant: {model.spec.name} has {variants}, and not {variant!r}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VideotuneError(f"{folder} exists already. Name a new folder.")

    doing("making random weights")
    with quietly():
        console.out(model.tiny(folder, seed, variant))
