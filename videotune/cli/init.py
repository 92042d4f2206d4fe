"""``videotune init``: write a config with reasons; ``videotune tiny``: a random base
model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from videotune import console
from videotune.cli.options import Arg, Opt
from videotune.console import doing, echo, print_table
from videotune.errors import VideotuneError
from videotune.files import write_text
from videotune.presets.recipes import (
    config_of,
    find_model,
    models,
    preset_for,
    presets_of,
    recipe,
    recipes,
)
from videotune.presets.shipped import preset_card

UNKNOWN_CARD = 1_000_000
"""Memory in GB of a card that nobody named: every preset fits it."""


@dataclass(frozen=True)
class ChosenCard:
    """The card that a user named."""

    gigabytes: int
    """0: unknown."""

    name: str = ""
    """As the list of cards has it; empty if only the memory was given."""

    @property
    def option(self) -> str:
        """The card as the option --card of other commands takes it."""
        return self.name or f"{self.gigabytes} GB"


def parse_card(text: str | None) -> ChosenCard | None:
    """Return the card that is given by its memory or its name; 0: unknown."""
    if text is None:
        return None
    if text.strip() == "0":
        return ChosenCard(0)
    from videotune.planner.gpus import memory_or_card

    try:
        card = memory_or_card(text)
    except VideotuneError as error:
        message = str(error).replace("--vram GB", "--card GB")
        raise VideotuneError(message) from error
    if isinstance(card, float):
        return ChosenCard(int(card))
    return ChosenCard(card.vram >> 30, card.name)


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
) -> None:
    """Write a commented config for a purpose, a model and a card; ask for missing
    options.
    """
    target = folder / "config.yaml"
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
    if model is not None:
        model = find_model(model)  # refuses a wrong one before the first question
        if not _needs_card(model) and card is None:
            missing.remove("--card")

    with _answers_as_options(missing):
        if purpose is None:
            purpose = _ask_purpose()
        recipe(purpose)  # refuses an unknown purpose before the next question
        if model is None:
            model = _ask_model()
        if card is None:
            card = _ask_card() if _needs_card(model) else ChosenCard(0)
        preset = preset_for(model, card.gigabytes or UNKNOWN_CARD)

        data = data or str(typer.prompt("Where are the clips?"))
        data = _absolute_if_local(data)
        if trigger is None:
            question = "Which word is used for it in captions? Empty: none"
            trigger = typer.prompt(question, default="", show_default=False)

    config = _config_for(purpose, preset, data, trigger=trigger, prior=prior, card=card)
    write_text(target, config)
    console.out(target)
    _print_next_commands(target, card if preset_card(preset) else ChosenCard(0))


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
    return config_of(
        purpose,
        preset,
        data,
        clips=_count_clips(Path(data)),
        trigger=trigger or None,
        prior=prior,
        card=card.gigabytes,
        card_name=card.name,
    )


def _absolute_if_local(data: str) -> str:
    """Return the absolute path of a dataset that is on this machine, else its name."""
    path = Path(data).expanduser()
    return str(path.absolute()) if path.exists() else data


def _print_next_commands(config: Path, card: ChosenCard) -> None:
    # A run's files have its name, also beside those of other folders.
    run = config.parent / f"{config.parent.absolute().name}-1"
    of_card = f' --card "{card.option}"' if card.gigabytes else ""
    echo(f"videotune check {config}")
    echo(f"videotune plan {config}{of_card}")
    echo(f"videotune train {config} --out {run}")


@contextmanager
def _answers_as_options(names: Sequence[str]) -> Iterator[None]:
    """Name the options that answer the questions of a block, if there is no terminal.

    Raises:
        VideotuneError: a question got no answer.
    """
    try:
        yield
    except typer.Abort:
        missing = " ".join(f"{name} …" for name in names)
        raise VideotuneError(
            f"stopped at a question. Give the answers as options: {missing}"
        ) from None


def _ask_purpose() -> str:
    rows = [[name, entry["about"]] for name, entry in recipes().items()]
    print_table("purposes", ["purpose", "teaches"], rows)
    return str(typer.prompt("What is to be learnt?", default="concept"))


def _ask_model() -> str:
    rows = []
    for name, presets in models().items():
        cards = [f"{gb}GB" for preset in presets if (gb := preset_card(preset))]
        rows.append([name, ", ".join(cards)])
    print_table("models", ["model", "cards"], rows)
    return str(typer.prompt("Which model?", value_proc=_model_answer))


def _model_answer(text: str) -> str:
    """Return the model that an answer names, or let the question be put again."""
    try:
        return find_model(text)
    except VideotuneError as error:
        raise typer.BadParameter(str(error)) from error


def _ask_card() -> ChosenCard:
    question = "The GPU: its memory in GB, or its name? 0: unknown"
    card: ChosenCard = typer.prompt(question, default="0", value_proc=_card_answer)
    return card


def _card_answer(text: str) -> ChosenCard | None:
    """Return the card of an answer, or let the question be put again."""
    try:
        return parse_card(text)
    except VideotuneError as error:
        # The user answers a question here, and gives no option.
        message = str(error).removeprefix("--card ").replace(": --card GB", " in GB")
        raise typer.BadParameter(
            message.replace(" with --card GB", " in GB")
        ) from error


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
