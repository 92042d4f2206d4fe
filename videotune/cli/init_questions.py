"""The questions of ``videotune init``: card, purpose, model and clips.

An answer that is none lets the question be put again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import typer

from videotune.config.base_models import DOWNLOAD_NOTE, download_size
from videotune.console import print_table, tell
from videotune.errors import VideotuneError
from videotune.planner.preset_fits import (
    PresetFit,
    best_preset,
    fit_of,
    fit_words,
    rank_of,
)
from videotune.presets.recipes import (
    find_model,
    is_movement,
    models,
    motion_notes,
    recipe,
    recipes,
    refuse_pictures_for_movement,
    suits,
    suits_best,
)
from videotune.presets.shipped import memory_class, preset_card, read_preset

HUB_DATASET = re.compile(r"(hf://.+|[\w.-]+/[\w.-]+)")


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

    card = memory_or_card(text)
    if isinstance(card, float):
        return ChosenCard(int(card))
    return ChosenCard(card.vram >> 30, card.name)


def ask_card() -> ChosenCard:
    """Ask for the card; the answer is that of this machine if its driver names one."""
    default = card_here() or "0"
    question = "The GPU: its memory in GB, or its name? 0: unknown"
    card: ChosenCard = typer.prompt(question, default=default, value_proc=_card_answer)
    return card


def card_here() -> str:
    """Return this machine's first card as --card takes it; empty without one."""
    from videotune.studio.gpu import list_gpus

    gpus = list_gpus()
    if not gpus:
        return ""
    try:
        card = parse_card(gpus[0].name)
    except VideotuneError:  # a card that the table lacks, or has with several memories
        return f"{round(gpus[0].memory_total / 2**30)} GB"
    return card.option if card else ""


def ask_purpose() -> str:
    """Ask what is to be learnt."""
    rows = [[name, entry["about"]] for name, entry in recipes().items()]
    print_table("purposes", ["purpose", "teaches"], rows)
    question = "What is to be learnt?"
    return str(typer.prompt(question, default="concept", value_proc=_again(_purpose)))


def ask_model(gigabytes: int, purpose: str) -> str:
    """Ask for the model; those that fit the card come first. Models that cannot learn the
    purpose are not offered.

    Args:
        gigabytes: memory of the card; 0: unknown.
        purpose: what is to be learnt.
    """
    columns = ["model", "cards", "download"]
    if gigabytes:
        columns = ["model", f"on {gigabytes} GB", "hours", "download"]

    rows = []
    left_out = []
    for model in _suiting_first(gigabytes, purpose):
        if suits(model, purpose):
            rows.append([model, *_fit_cells(model, gigabytes), _download(model)])
        else:
            left_out.append(model)
    print_table("models", columns, rows)
    tell(
        f"First those that {'fit and ' if gigabytes else ''}suit a {purpose}; the toy is for "
        "a trial without a GPU."
    )
    if gigabytes:
        tell(
            "Hours and fit are calculated for the preset's steps, not measured; the host's "
            f"memory is not counted, `videotune plan` counts it. {DOWNLOAD_NOTE}"
        )
        for note in motion_notes(_presets_for(gigabytes)):
            tell(note)
    if left_out:
        names = ", ".join(left_out)
        tell(
            f"Not listed, as it generates single pictures without a {purpose}: {names}"
        )

    def model_of_answer(text: str) -> str:
        model = find_model(text)
        refuse_pictures_for_movement(model, purpose)
        return model

    default = first_choice(gigabytes, purpose)
    return str(
        typer.prompt(
            "Which model?", default=default, value_proc=_again(model_of_answer)
        )
    )


def first_choice(gigabytes: int, purpose: str) -> str:
    """Return the model that the studio names first for a card of a memory; for a movement
    it is one whose preset leaves the speed of motion as it is.
    """
    from videotune.studio import first_model, model_choices

    card = model_choices.ChosenCard()
    if gigabytes:
        card = model_choices.ChosenCard(f"{gigabytes} GB", float(gigabytes))
    preset = first_model.first_model(card, keeps_speed=is_movement(purpose)).preset
    return preset.removesuffix(f" {memory_class(preset)}GB")


def ask_data() -> str:
    """Ask where the clips are."""
    return str(typer.prompt("Where are the clips?", value_proc=_again(_existing)))


def ask_trigger() -> str:
    """Ask for the word that stands for what is learnt; it may be empty."""
    question = "Which word is used for it in captions? Empty: none"
    return str(typer.prompt(question, default="", show_default=False))


def is_there(data: str) -> bool:
    """Return whether a dataset is on this machine, or may be one of the Hub."""
    return bool(HUB_DATASET.fullmatch(data)) or Path(data).expanduser().exists()


def _purpose(text: str) -> str:
    recipe(text.strip())  # refuses an unknown one
    return text.strip()


def _existing(text: str) -> str:
    text = text.strip().strip("\"'")
    if not is_there(text):
        raise VideotuneError(f"there is no folder {text}, seen from {Path.cwd()}")
    return text


Answer = TypeVar("Answer")


def _again(read: Callable[[str], Answer]) -> Callable[[str], Answer]:
    """Let a question be put again where an answer is refused."""

    def answer(text: str) -> Answer:
        try:
            return read(text)
        except VideotuneError as error:
            raise typer.BadParameter(str(error)) from error

    return answer


def _card_answer(text: str) -> ChosenCard | None:
    """Return the card of an answer, or let the question be put again."""
    try:
        return parse_card(text)
    except VideotuneError as error:
        # The user answers a question here, and gives no option.
        message = str(error).removeprefix("--card ").replace(": --card GB", " in GB")
        message = message.replace(" with --card GB", " in GB")
        message = re.sub(r"--card (\d+)", r"\1", message)
        raise typer.BadParameter(message) from error


def _fitting_first(gigabytes: int) -> list[str]:
    """Return the models: those that fit a card, then those that are tight, then others."""
    if not gigabytes:
        return list(models())
    return sorted(models(), key=lambda model: rank_of(_fit(model, gigabytes)))


def _suiting_first(gigabytes: int, purpose: str) -> list[str]:
    """Return the models in the order of a list: those that fit the card, of these first
    those that suit a purpose, and the toy last, which learns only moving shapes.
    """

    def rank(model: str) -> tuple[bool, int, bool]:
        is_toy = not any(preset_card(preset) for preset in models()[model])
        verdict = rank_of(_fit(model, gigabytes))[0] if gigabytes else 0
        is_best = suits_best(_preset_for(model, gigabytes), purpose)
        return is_toy, verdict, not is_best

    # Models of the same rank keep their order.
    return sorted(_fitting_first(gigabytes), key=rank)


def _presets_for(gigabytes: int) -> list[str]:
    """Return the preset of each model that fits a card."""
    presets = []
    for model in models():
        fit = _fit(model, gigabytes)
        if fit is None or fit.verdict:
            presets.append(best_preset(model, gigabytes))
    return presets


def _preset_for(model: str, gigabytes: int) -> str:
    """Return the preset that a card gets of a model, or the first if none fits."""
    try:
        return best_preset(model, gigabytes)
    except VideotuneError:
        return models()[model][0]


def _fit(model: str, gigabytes: int) -> PresetFit | None:
    """Return how the preset that a card gets of a model fits it."""
    try:
        return fit_of(best_preset(model, gigabytes), gigabytes)
    except VideotuneError:
        return PresetFit("")


def _fit_cells(model: str, gigabytes: int) -> list[str]:
    if gigabytes:
        fit = _fit(model, gigabytes)
        return [fit_words(fit), fit.time if fit else ""]
    cards = [f"{gb}GB" for preset in models()[model] if (gb := preset_card(preset))]
    return [", ".join(cards) or "any"]


def _download(model: str) -> str:
    size = download_size(str(read_preset(models()[model][0])["base_model_name"]))
    return "" if size is None else size.cell()
