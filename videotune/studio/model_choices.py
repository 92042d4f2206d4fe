"""What a project can train: models by family, with their fit on a card, and the cards."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from videotune.config import base_models
from videotune.config.nested_keys import flatten
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.planner.gpus import Card, cards, memory_or_card
from videotune.planner.preset_fits import (
    DRIVER_SHARE,
    FIT_BASIS,
    TIGHT_MEANING,
    PresetFit,
    fit_of,
)
from videotune.presets.shipped import (
    preset_about,
    preset_card,
    preset_names,
    read_preset,
)
from videotune.studio import gpu

TRIAL_FAMILY = "Toy"
"""The family that trains anywhere and is good for nothing else; it comes last."""

METHODS = {
    "LORA": "LoRA",
    "FINE_TUNE": "all weights",
    "EMBEDDING": "a new word (embedding)",
}
"""What a preset trains, in the words of the page."""

FIT_MEANINGS = {"fits": FIT_BASIS, "tight": TIGHT_MEANING}
"""What the badges of sizes mean, in the words of ``presets list --card``."""

MAX_CARD_LETTERS = 80
"""Letters of a typed card that are read."""


@dataclass(frozen=True)
class ChosenCard:
    """The card that a project is planned for."""

    name: str = ""
    """Empty if none is known."""

    gigabytes: float = 0.0
    """Its memory in GiB, as it is sold; 0 if it is not known."""

    error: str = ""
    """Why what the user has typed is no card."""

    @property
    def sold(self) -> str:
        """Its memory as it is sold: "24 GB"."""
        return f"{self.gigabytes:.0f} GB"


@dataclass(frozen=True)
class ModelSize:
    """A preset as one of the sizes of a family."""

    preset: str
    label: str
    base_model: str
    about: str
    good: str
    licence: str

    memory_class: int | None
    """GB of the cards that it is for; None if it trains anywhere."""

    @property
    def download(self) -> str:
        """The size of its download as text; empty if it is not known."""
        return str(base_models.download_size(self.base_model) or "")

    @property
    def is_lora(self) -> bool:
        """Whether it trains a LoRA, and not the whole model or a new word."""
        return self.label.endswith(METHODS["LORA"])

    def is_made_for(self, card: ChosenCard) -> bool | None:
        """Return whether it is made for cards of so much memory or less; None if no card
        is known.
        """
        if self.memory_class is None:
            return True
        if not card.gigabytes:
            return None
        return self.memory_class <= card.gigabytes * DRIVER_SHARE

    def fit(self, card: ChosenCard) -> PresetFit | None:
        """Return how it fits a card, as plans have calculated it beforehand; None if no
        card is known, and for one that trains anywhere.
        """
        return fit_of(self.preset, card.gigabytes) if card.gigabytes else None

    def fits(self, card: ChosenCard) -> bool | None:
        """Return whether it fits a card, however tight; None if no card is known."""
        fit = self.fit(card)
        return self.is_made_for(card) if fit is None else bool(fit.verdict)


COMPARED_KEYS = {
    "video_config.frames": "frames",
    "resolution": "resolution",
    "lora.rank": "rank",
    "weight_dtype": "weights",
}
"""The settings in which sizes of one label differ for the user, as the list names them."""

WEIGHT_WORDS = {"NFLOAT_4": "in 4 bits", "FLOAT_8": "in 8 bits", None: "not rounded"}


@cache
def difference(preset: str, reference: str) -> str:
    """Return how a preset differs from another one of the same model: "frames 17 instead
    of 33".
    """
    values = flatten(read_preset(preset))
    reference_values = flatten(read_preset(reference))
    parts = []
    for key, name in COMPARED_KEYS.items():
        value = values.get(key)
        reference_value = reference_values.get(key)
        if value == reference_value:
            continue
        if key == "weight_dtype":
            parts.append(f"{name} {WEIGHT_WORDS[value]}")
        elif reference_value is None or value is None:
            parts.append(f"{name} {_shown(value or 'automatic')}")
        else:
            parts.append(f"{name} {_shown(value)} instead of {_shown(reference_value)}")
    return ", ".join(parts) or _difference_of_cards(preset, reference)


def _difference_of_cards(preset: str, reference: str) -> str:
    """Return which cards a preset is for, where it trains the same as another one."""
    is_equal = flatten(read_preset(preset)) == flatten(read_preset(reference))
    settings = "all settings are the same" if is_equal else "some finer settings differ"
    memory = preset_card(preset)
    reference_memory = preset_card(reference)
    if memory == reference_memory:
        return settings
    return f"for {_cards(memory)} instead of {_cards(reference_memory)}; {settings}"


def _cards(gigabytes: int | None) -> str:
    return "any computer" if gigabytes is None else f"{gigabytes} GB cards"


def _shown(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class ModelFamily:
    """Models of one name, with what they are good for."""

    name: str
    good: str
    sizes: tuple[ModelSize, ...]

    @property
    def best(self) -> list[ModelSize]:
        """The first size of each label: the chosen one, or the best for the card."""
        size_by_label: dict[str, ModelSize] = {}
        for size in self.sizes:
            size_by_label.setdefault(size.label, size)
        return list(size_by_label.values())

    @property
    def others(self) -> list[ModelSize]:
        """The other sizes."""
        best = self.best
        return [size for size in self.sizes if size not in best]

    def difference(self, size: ModelSize) -> str:
        """Return how one of the other sizes differs from the first of its label."""
        (reference,) = [best for best in self.best if best.label == size.label]
        return difference(size.preset, reference.preset)

    @property
    def licences(self) -> list[str]:
        """The licences of its models."""
        return list(dict.fromkeys(size.licence for size in self.sizes if size.licence))

    @property
    def is_trial(self) -> bool:
        """Whether it is only for trying the studio out."""
        return self.name == TRIAL_FAMILY


@cache
def _model_facts() -> Mapping[str, Mapping[str, Any]]:
    """Return what presets.json has on each base model."""
    return read_json(Path(__file__).with_name("presets.json"))


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the text, base model, GPU memory and facts (presets.json) of each preset."""
    facts_by_model = _model_facts()
    presets_by_name = {}
    for name in preset_names():
        keys = read_preset(name)
        base_model = str(keys.get("base_model_name"))
        presets_by_name[name] = {
            "about": preset_about(name),
            "base": base_model,
            "gb": preset_card(name),
            "method": METHODS[str(keys.get("training_method", "LORA"))],
            **facts_by_model.get(base_model, {}),
        }
    return presets_by_name


def is_of_a_preset(base_model: str) -> bool:
    """Return whether a preset trains this base model."""
    return any(facts["base"] == base_model for facts in presets().values())


def preset_of_model(base_model: str, card: ChosenCard) -> str:
    """Return the preset of a base model that is best for a card; empty if none has it."""
    for family in families_for(card):
        for size in family.sizes:
            if size.base_model == base_model:
                return size.preset
    return ""


def conditions_of(base_model: str) -> list[str] | None:
    """Return the types of the conditions that a base model takes; None if it is not one
    of presets.json.
    """
    facts = _model_facts().get(base_model)
    if facts is None:
        return None
    conditions: list[str] = facts["conditions"]
    return conditions


def makes_sound(base_model: str) -> bool | None:
    """Return whether a base model makes sound; None if it is not one of presets.json."""
    facts = _model_facts().get(base_model)
    return None if facts is None else bool(facts.get("sound", False))


def has_too_large(families: Iterable[ModelFamily], card: ChosenCard) -> bool:
    """Return whether one of the sizes does not fit a card."""
    sizes = chain.from_iterable(family.sizes for family in families)
    return any(size.fits(card) is False for size in sizes)


def runs_anywhere(preset: str) -> bool:
    """Return whether a preset trains on any computer, so that its card does not matter."""
    return preset in presets() and presets()[preset]["gb"] is None


@cache
def _families() -> tuple[ModelFamily, ...]:
    """Return the families in the order of families.json, their smallest sizes first."""
    sizes_by_family: dict[str, list[ModelSize]] = {}
    for name, facts in presets().items():
        size = ModelSize(
            preset=name,
            label=f"{facts['size']}, {facts['method']}",
            base_model=facts["base"],
            about=facts["about"],
            good=facts["good"],
            licence=base_models.published_licence(facts["base"]),
            memory_class=facts["gb"],
        )
        sizes_by_family.setdefault(facts["family"], []).append(size)

    texts = read_json(Path(__file__).with_name("families.json"))
    return tuple(
        ModelFamily(family, texts[family], tuple(sizes_by_family[family]))
        for family in texts
    )


def sizes_of_model(base_model: str) -> list[ModelSize]:
    """Return the sizes of a base model."""
    sizes = chain.from_iterable(family.sizes for family in _families())
    return [size for size in sizes if size.base_model == base_model]


def families_for(
    card: ChosenCard, chosen_preset: str = "", first_preset: str = ""
) -> list[ModelFamily]:
    """Return the families: the chosen one first, then that of the preset to begin with,
    then those that fit the card, the trial last.

    In each the chosen size is first, then the one to begin with, then the largest that
    fits, those that are made for the card before those that are made for larger ones.
    """
    ordered = []
    for family in _families():
        sizes = sorted(
            family.sizes,
            key=lambda size: (
                size.preset != chosen_preset,
                size.preset != first_preset,
                size.fits(card) is False,
                size.is_made_for(card) is False,
                not size.is_lora,
                _distance(size, card),
            ),
        )
        ordered.append(ModelFamily(family.name, family.good, tuple(sizes)))
    return sorted(
        ordered,
        key=lambda family: (
            family.sizes[0].preset != chosen_preset,
            first_preset not in [size.preset for size in family.sizes],
            family.is_trial,
            not any(size.fits(card) is not False for size in family.sizes),
        ),
    )


def _distance(size: ModelSize, card: ChosenCard) -> float:
    """Return how far a size is from the card's memory; without a card its memory."""
    need = size.memory_class or 0
    return abs(card.gigabytes - need) if card.gigabytes else need


def sizes_to_time(card: ChosenCard, chosen_preset: str) -> list[str]:
    """Return the presets whose hours are calculated: the chosen one, then those that are
    made for the card, then those for larger cards, the nearest first.

    A preset for a larger card may still fit: only the plan knows.
    """
    sizes: list[ModelSize] = []
    for family in families_for(card, chosen_preset):
        if not family.is_trial:
            sizes += family.sizes
    fitting = [size for size in sizes if size.is_made_for(card)]
    larger = [size for size in sizes if not size.is_made_for(card)]
    larger.sort(key=lambda size: size.memory_class or 0)

    names = [size.preset for size in (*fitting, *larger)]
    chosen = [chosen_preset] if chosen_preset else []
    return list(dict.fromkeys([*chosen, *names]))


def chosen_card(facts: Mapping[str, Any]) -> ChosenCard:
    """Return the card of a project's facts, or else the first one of this computer."""
    memory = facts.get("vram")
    name = str(facts.get("card") or "")
    if memory:
        return ChosenCard(f"a card of {memory:g} GB", float(memory))
    if name:
        return _card_named(name)

    gpus = gpu.list_gpus()
    if not gpus:
        return ChosenCard()
    return ChosenCard(gpus[0].name, gpus[0].memory_total / 2**30)


def _card_named(name: str) -> ChosenCard:
    try:
        card = _memory_or_card(name)
    except VideotuneError as error:
        return ChosenCard(error=str(error))
    if isinstance(card, float):
        return ChosenCard(f"a card of {card:g} GB", card)
    return ChosenCard(card.name, card.vram / 2**30)


def card_facts(text: str) -> dict[str, Any]:
    """Return the facts of a project for a card as the user types it, by its name or its
    memory; the card of this computer has neither.

    Raises:
        VideotuneError: if no card, or several, have the name, or it has no memory.
    """
    if not text.strip():
        return {"card": None, "vram": None}
    card = _memory_or_card(text)
    if isinstance(card, float):
        return {"card": None, "vram": card}
    return {"card": card.name, "vram": None}


def _memory_or_card(text: str) -> float | Card:
    """Return the GB or the card that a text means on the command line, with the studio's
    advice in the error.
    """
    text = text.strip()[:MAX_CARD_LETTERS]
    try:
        return memory_or_card(text)
    except VideotuneError as error:
        message = str(error).removeprefix(f"--card {text!r}: ")
        for command_line_advice in (" You can give", " Give one of"):
            message = message.partition(command_line_advice)[0]
        if message[-1] not in ".?":
            message += "."
        raise VideotuneError(
            f"{text}: {message} Choose a card of the list, or type its memory, such as 16 GB"
        ) from error


def card_groups() -> Mapping[str, Iterable[Any]]:
    """Return the known cards by the kind of computer that they are in."""
    groups: dict[str, list[Any]] = {"Desktop": [], "Laptop": [], "Workstation": []}
    for card in cards():
        group = "Desktop" if re.match(r"RTX \d{4}", card.name) else "Workstation"
        if "Laptop" in card.name:
            group = "Laptop"
        elif card.name.endswith(" Ada"):
            group = "Workstation"
        groups[group].append(card)
    return groups
