"""Configs by purpose: a preset, a recipe, and the reason for each value as a comment."""

import json
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from videotune.config import load
from videotune.errors import VideotuneError, did_you_mean
from videotune.files import read_json

SMALL = 20
"""Clips below which a dataset is small.

From this number on, a part of them is held out.
"""

COMMENT_COLUMNS = 100

EPOCHS = (
    "times that each window is seen: the notes' moderate band is 10 to 50, "
    "its upper part for few clips"
)
PRIOR = (
    "of these clips the model learns its own prediction without the adapter, "
    "so that others of the kind stay as they are"
)


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """Return the recipes by purpose.

    A recipe has "about", epochs for a "small" and a "large" dataset, "keys" (with rows
    of [value, reason, source]) and "advice".
    """
    return dict(read_json(Path(__file__).parents[1] / "config" / "recipes.json"))


def recipe(purpose: str) -> dict[str, Any]:
    """Return the recipe of a purpose; VideotuneError if there is none."""
    if purpose not in recipes():
        raise VideotuneError(f"unknown purpose {purpose!r}{did_you_mean(recipes())}")
    return recipes()[purpose]


def models() -> dict[str, list[str]]:
    """Return the presets of each model, those for small cards first."""
    names = sorted(load.preset_names(), key=lambda name: load.preset_card(name) or 0)
    presets: dict[str, list[str]] = {}
    for name in names:
        model = name.removesuffix(f" {load.memory_class(name)}GB")
        presets.setdefault(model, []).append(name)
    return presets


def preset_for(model: str, card: int | None) -> str:
    """Return the largest preset of a model that fits a card.

    Args:
        model: A model, or the name of a preset.
        card: The card's memory in GB. None: no limit.

    Raises:
        VideotuneError: Every preset of the model needs a larger card.
    """
    presets = models().get(model)
    if presets is None:
        return load.preset_named(model)
    fitting = [
        name
        for name in presets
        if card is None or (load.preset_card(name) or 0) <= card
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
) -> str:
    """Return a config as YAML, with the reason and source of each value as comments.

    Args:
        purpose: What is to be learnt.
        preset: Name of the preset.
        data: The dataset.
        clips: Number of its clips.
        trigger: A word for the subject in captions.
        prior: Clips for which the base model's predictions are preserved.

    Raises:
        VideotuneError: The purpose is unknown.
    """
    chosen = recipe(purpose)
    recipe_keys = chosen["keys"]
    reasons = load.preset_reasons(preset) | {
        "epochs": EPOCHS,
        "datasets": chosen["advice"],
        "prior_preservation": PRIOR,
    }
    for key, (_, reason, source) in recipe_keys.items():
        reasons[key] = f"{reason} ({source})" if source else reason

    dataset = {"path": data}
    if trigger:
        dataset["trigger"] = trigger
    keys: dict[str, Any] = {"datasets": [dataset]}
    if prior:
        keys["prior_preservation"] = prior
    keys |= {
        key: value for key, value in load.read_preset(preset).items() if key != "steps"
    }
    values = {key: row[0] for key, row in recipe_keys.items()}
    keys = load.merge(keys, load.unflatten(values))
    is_small = clips < SMALL
    keys["epochs"] = chosen["small" if is_small else "large"]

    count = f"{'fewer than' if is_small else 'at least'} {SMALL} clips"
    about = f"{chosen['about']}, {count}; preset {preset}: {load.preset_about(preset)}"
    lines = [
        *_comment(f"videotune init: {purpose}, {about}"),
        "",
        *_yaml(keys, reasons),
    ]
    return "\n".join(lines) + "\n"


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
