"""Configs by purpose: a preset, a recipe, and the reason for each value as a comment."""

import difflib
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from videotune.config.base_models import has_pictures_only, starting_keys
from videotune.config.nested_keys import flatten, merge, unflatten
from videotune.config.safe_views import LOW_RATE, SAFE_VIEWS
from videotune.errors import VideotuneError, did_you_mean
from videotune.files import read_json
from videotune.presets import shipped
from videotune.text import some

SMALL = 20
"""Clips below which a dataset is small.

From this number on, a part of them is held out.
"""

COMMENT_COLUMNS = 100

EPOCHS = (
    "times that each window is seen: `plan` calls 10 to 50 moderate; for few clips the "
    "upper part of that"
)
SAVES = 5
"""Checkpoints of a run that is shorter than the usual intervals."""

VALIDATIONS = 4
"""Validations of such a run, besides that before the first step."""

USUAL_INTERVAL = 250
"""Steps between checkpoints by default."""

SHORT_RUN_INTERVALS = {
    "save_every": (
        SAVES,
        f"{SAVES} checkpoints to choose from; the default, every {USUAL_INTERVAL} "
        "steps, may be more than the run has",
    ),
    "validate_every": (
        VALIDATIONS,
        f"{VALIDATIONS} validations: a verdict needs 3, and by default a run of so "
        "few steps may make fewer",
    ),
}
"""What a run that is shorter gets by default: how often in the run, and the reason."""

INTERVALS = ("save_every", "validate_every", "sample_after")
"""Keys in steps that have a twin in passes over the data."""

PRIOR = (
    "of these clips the model learns its own prediction without the adapter, "
    "so that others of the kind stay as they are"
)

AUTHORS = (
    "captions are read as the model's authors and ComfyUI read them; diffusers' pipeline "
    'reads them differently: for a result for diffusers only, set "diffusers"'
)


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """Return the recipes by purpose.

    A recipe has "about", epochs for a "small" and a "large" dataset, "keys" (with rows
    of [value, reason, source]) and "advice"; "is_movement" is true if a model of pictures
    cannot learn it.
    """
    return dict(read_json(Path(__file__).parents[1] / "config" / "recipes.json"))


def recipe(purpose: str) -> dict[str, Any]:
    """Return the recipe of a purpose; VideotuneError if there is none."""
    if purpose not in recipes():
        raise VideotuneError(f"unknown purpose {purpose!r}{did_you_mean(recipes())}")
    return recipes()[purpose]


def is_movement(purpose: str) -> bool:
    """Return whether a purpose is a movement, which no single picture shows."""
    return bool(recipe(purpose).get("is_movement", False))


def refuse_pictures_for_movement(model: str, purpose: str) -> None:
    """Raise VideotuneError if a model of pictures is to learn a movement.

    Args:
        model: A model or a preset, as ``find_model`` returns it.
        purpose: What is to be learnt.
    """
    if not suits(model, purpose):
        name = display_name(presets_of(model)[0])
        raise VideotuneError(
            f"{name} generates single pictures, so it learns no {purpose}. "
            "Choose a model of videos, or another purpose."
        )


def suits(model: str, purpose: str) -> bool:
    """Return whether a model can learn a purpose at all."""
    preset = presets_of(model)[0]
    return not (is_movement(purpose) and has_pictures_only(_base_model(preset)))


def suits_best(preset: str, purpose: str) -> bool:
    """Return whether a preset is one to begin with for a purpose: a LoRA of a model that
    makes videos from text alone, which for a movement leaves the speed of motion as it is.

    A look or a thing is learnt by any model; one that begins with images, or repaints a
    video, has a use of its own.
    """
    if "LoRA" not in preset or has_pictures_only(_base_model(preset)):
        return False
    begins_with_image = re.search(r"\b(I2V|FLF2V)\b", preset) is not None
    if begins_with_image or "conditions" in shipped.read_preset(preset):
        return False
    return not is_movement(purpose) or not motion_notes([preset])


def _base_model(preset: str) -> str:
    return str(shipped.read_preset(preset).get("base_model_name", ""))


def models() -> dict[str, list[str]]:
    """Return the presets of each model, those for small cards first."""
    return {model: list(presets) for model, presets in _models().items()}


@cache
def _models() -> Mapping[str, Sequence[str]]:
    names = sorted(
        shipped.preset_names(), key=lambda name: shipped.preset_card(name) or 0
    )
    presets: dict[str, list[str]] = {}
    for name in names:
        model = name.removesuffix(f" {shipped.memory_class(name)}GB")
        presets.setdefault(model, []).append(name)
    return presets


def display_name(preset: str) -> str:
    """Return the name of a preset's model, as the list of presets shows it."""
    return re.split(", |: ", shipped.preset_about(preset))[0]


def find_model(text: str) -> str:
    """Return the model or the preset that a text names.

    Any spelling that fits one model is taken: of a preset, of the model in the list of
    presets, of its repository, or some words of these. Of several ways to train a model
    it is the LoRA.

    Raises:
        VideotuneError: None or several fit; the message names the nearest.
    """
    wanted = _without_spaces(text)
    for preset in shipped.preset_names():
        is_exact = wanted == _without_spaces(preset)
        if is_exact and preset not in models():
            return preset

    exact = []
    similar = []
    every_model = list(models())
    for model in every_model:
        spellings = _spellings(model)
        # The end of a repository's name may be that of the whole family.
        names = spellings[:3]
        short_name = model.removesuffix(" LoRA")
        is_unique = sum(name.startswith(f"{short_name} ") for name in every_model) == 1
        if is_unique:
            names.append(short_name)
        if wanted in map(_without_spaces, names):
            exact.append(model)
        if _has_words(text, " ".join(spellings)):
            similar.append(model)

    for candidates in (exact, similar):
        fitting = _usual_method(candidates)
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise VideotuneError(
                f"model {text!r} fits several: {_with_cards(fitting)}. Name one of them; "
                "the card chooses its preset, or name a preset of `videotune presets list`."
            )
    raise VideotuneError(
        f"there is no model {text!r}{did_you_mean(_near_models(text))}  "
        "`videotune presets list` shows all."
    )


def _with_cards(names: Sequence[str]) -> str:
    """Return models with the cards of their presets, as the list of presets names them."""
    texts = []
    for model in names:
        cards = [shipped.preset_card(preset) for preset in presets_of(model)]
        sizes = [f"{card} GB" for card in cards if card is not None]
        texts.append(f"{model} ({some(sizes)})" if sizes else model)
    return ", ".join(texts)


def _spellings(model: str) -> list[str]:
    """Return what a model is called, by its own name first."""
    preset = models()[model][0]
    repository = _base_model(preset)
    return [model, display_name(preset), repository, repository.rpartition("/")[2]]


def _without_spaces(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def _has_words(text: str, spellings: str) -> bool:
    """Whether all words of a text are among those of a model's names."""
    words = set(re.findall(r"[a-z]+|[\d.]+", text.lower()))
    names = set(re.findall(r"[a-z]+|[\d.]+", spellings.lower()))
    squashed = _without_spaces(text)
    if not squashed:
        return False
    # No number is cut: "1" is not a part of "13B".
    is_part = re.search(rf"{re.escape(squashed)}(?![\d.])", _without_spaces(spellings))
    return words <= names or is_part is not None


def _usual_method(names: Sequence[str]) -> list[str]:
    """Return those of some models that train a LoRA, or all if none does."""
    loras = []
    for model in names:
        settings = shipped.read_preset(models()[model][0])
        if settings.get("training_method", "LORA") == "LORA":
            loras.append(model)
    return loras or list(names)


def _near_models(text: str) -> list[str]:
    """Return models whose names are like a text, the nearest first."""
    model_by_spelling = {}
    for model in models():
        for spelling in _spellings(model):
            model_by_spelling[spelling.lower()] = model
    near = difflib.get_close_matches(text.lower(), model_by_spelling, 6, 0.4)
    if not near:
        # A short name, mistyped, is like none of the long ones as a whole.
        first_word = text.lower().split(" ")[0]
        near = [
            spelling
            for spelling in model_by_spelling
            if difflib.get_close_matches(first_word, spelling.split(" "), 1, 0.6)
        ]
    return list(dict.fromkeys(model_by_spelling[spelling] for spelling in near))[:3]


def motion_notes(presets: Iterable[str]) -> list[str]:
    """Return for each preset that changes the speed of motion what it does to it."""
    notes = []
    for preset in presets:
        reason = shipped.preset_reasons(preset).get("video_config.target_fps")
        rate = shipped.read_preset(preset).get("video_config", {}).get("target_fps")
        if reason and rate:
            notes.append(f"{preset} reads {rate:g} frames a second: {reason}")
    return notes


def presets_of(model: str) -> list[str]:
    """Return the presets of a model or preset that ``find_model`` returned."""
    return models().get(model, [model])


def preset_for(model: str, card: int | None) -> str:
    """Return the largest preset of a model that fits a card.

    Args:
        model: A model or a preset, as ``find_model`` takes it.
        card: The card's memory in GB. None: no limit.

    Raises:
        VideotuneError: Every preset of the model needs a larger card.
    """
    model = find_model(model)
    presets = presets_of(model)
    if model not in models():
        return presets[0]
    fitting = [
        name
        for name in presets
        if card is None or (shipped.preset_card(name) or 0) <= card
    ]
    if not fitting:
        raise VideotuneError(
            f"{model}: no preset fits {card} GB. It has: {', '.join(presets)}. "
            f"Choose another model."
        )
    return fitting[-1]


def config_of(
    purpose: str,
    preset: str,
    data: str,
    clips: int,
    trigger: str | None = None,
    prior: str | None = None,
    card: int | None = None,
    card_name: str = "",
) -> str:
    """Return a config as YAML, with the reason and source of each value as comments.

    Args:
        purpose: What is to be learnt.
        preset: Name of the preset.
        data: The dataset.
        clips: Number of its clips.
        trigger: A word for the subject in captions.
        prior: Clips for which the base model's predictions are preserved.
        card: Memory of the card in GB, if it is known.
        card_name: The card's name, if it is known.

    Raises:
        VideotuneError: The purpose is unknown.
    """
    chosen = recipe(purpose)
    recipe_keys = chosen["keys"]
    reasons = shipped.preset_reasons(preset) | {
        "epochs": EPOCHS,
        "datasets": chosen["advice"],
        "prior_preservation": PRIOR,
        "text_encoder.convention": AUTHORS,
    }
    for key, (_, reason, source) in recipe_keys.items():
        reasons[key] = f"{reason} ({source})" if source else reason

    dataset = {"path": data} | ({"trigger": trigger} if trigger else {})
    keys: dict[str, Any] = {"datasets": [dataset]}
    if prior:
        keys["prior_preservation"] = prior
    preset_keys = shipped.read_preset(preset)
    preset_steps = preset_keys.pop("steps", None)
    keys |= preset_keys
    values = {key: row[0] for key, row in recipe_keys.items()}
    keys = merge(keys, unflatten(values))
    is_small = clips < SMALL
    if is_small:  # so few clips have too few source videos to draw any from
        keys.pop("validation_fraction", None)
    keys["epochs"] = chosen["small" if is_small else "large"]
    keys = merge(keys, starting_keys(str(keys["base_model_name"])))
    keys, reasons = _fit_views(keys, reasons)
    keys, reasons = _fit_card(keys, reasons, preset, card)
    keys, reasons = _fit_intervals(keys, reasons, clips, preset_steps)

    count = f"{'fewer than' if is_small else 'at least'} {SMALL} clips"
    about = f"{chosen['about']}, {count}; preset {preset}"
    if card and shipped.preset_card(preset):
        card_words = f"a card of {card} GB"
        if card_name:
            card_words = f"the card {card_name} ({card} GB)"
        about += f", the largest of its model for {card_words}"
    about += f": {shipped.preset_about(preset)}"
    lines = [
        *_comment(f"videotune init: {purpose}, {about}"),
        "",
        *_yaml(keys, reasons),
    ]
    return "\n".join(lines) + "\n"


Reasons = dict[str, str]


def _fit_card(
    keys: dict[str, Any], reasons: Reasons, preset: str, card: int | None
) -> tuple[dict[str, Any], Reasons]:
    """Take the setting that a preset names for larger cards, if the card is one."""
    larger = re.search(
        r"With --set (\S+)=(\S+) for cards of (\d+) GB", shipped.preset_about(preset)
    )
    preset_card = shipped.preset_card(preset)
    if larger is None or preset_card is None or card is None:
        return keys, reasons
    key = larger[1]
    gigabytes = int(larger[3])
    if not preset_card < gigabytes <= card:
        return keys, reasons

    reason = (
        f"for cards of {gigabytes} GB and more; the preset is for {preset_card} GB "
        f"and has {flatten(keys)[key]}"
    )
    keys = merge(keys, unflatten({key: larger[2]}))
    return keys, reasons | {key: reason}


def _fit_views(
    keys: Mapping[str, Any], reasons: Reasons
) -> tuple[dict[str, Any], Reasons]:
    """Keep "epochs" within the views that are safe at a low learning rate."""
    rate = keys.get("learning_rate", math.inf)
    if rate > LOW_RATE or keys["epochs"] <= SAFE_VIEWS:
        return dict(keys), reasons
    reason = (
        f"times that each window is seen: at a rate of {rate:g} up to 20-{SAFE_VIEWS} "
        "should be safe"
    )
    return {**keys, "epochs": SAFE_VIEWS}, {**reasons, "epochs": reason}


def _fit_intervals(
    keys: dict[str, Any], reasons: Reasons, clips: int, preset_steps: int | None
) -> tuple[dict[str, Any], Reasons]:
    """Give intervals in passes over the data, as the length is.

    Args:
        keys: The config, with "epochs".
        reasons: The reasons of its values.
        clips: Number of clips; 0 if it is not known.
        preset_steps: Length of the run that the preset's intervals are made for.
    """
    keys = dict(keys)
    reasons = dict(reasons)
    epochs = keys["epochs"]
    for key in INTERVALS:
        if preset_steps and keys.get(key):
            share = keys.pop(key) / preset_steps
            keys[f"{key}_epochs"] = round(epochs * share, 2)
            reasons[f"{key}_epochs"] = reasons.get(key, "as in the preset")

    expected_steps = clips * epochs / keys.get("batch_size", 1)
    if expected_steps < SAVES * USUAL_INTERVAL:
        for key, (count, reason) in SHORT_RUN_INTERVALS.items():
            if {key, f"{key}_epochs"}.isdisjoint(keys):
                keys[f"{key}_epochs"] = round(epochs / count, 2)
                reasons[f"{key}_epochs"] = reason

    if preset_steps and clips and keys.get("warmup_steps"):
        share = keys["warmup_steps"] / preset_steps
        keys["warmup_steps"] = max(1, round(share * expected_steps))
    return keys, reasons


def _yaml(
    values: Mapping[str, Any],
    reasons: Mapping[str, str],
    prefix: str = "",
    indent: str = "",
) -> list[str]:
    """Return lines of YAML whose values are JSON, each below its reason."""
    lines: list[str] = []
    for key, value in values.items():
        lines += _comment(reasons.get(f"{prefix}{key}", ""), indent)
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:")
            lines += _yaml(value, reasons, f"{prefix}{key}.", f"{indent}  ")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}")
    return lines


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(
        text, COMMENT_COLUMNS, initial_indent=start, subsequent_indent=start
    )
