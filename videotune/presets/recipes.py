"""Configs by purpose: a preset for the card, a recipe for what is to be learnt, and the reason for each value beside it."""

import json
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from videotune.config import load
from videotune.errors import VideotuneError, did_you_mean

SMALL = 20
"""Clips below which a set is small: from as many on a part of them is held out."""

EPOCHS = "times that each window is seen: the notes' moderate band is 10 to 50, its upper part for few clips"
PRIOR = "of these clips the model learns its own prediction without the adapter, so that others of the kind stay as they are"


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """By purpose: ``about``, epochs for a ``small`` and a ``large`` set, ``keys`` ([value, why, source]), ``advice``."""
    return dict(
        json.loads(
            (Path(__file__).parents[1] / "config" / "recipes.json").read_text(encoding="utf-8")
        )
    )


def recipe(purpose: str) -> dict[str, Any]:
    """The recipe of a purpose; VideotuneError for one that there is not."""
    if purpose not in recipes():
        raise VideotuneError(f"there is no purpose {purpose!r}{did_you_mean(recipes())}")
    return recipes()[purpose]


def models() -> dict[str, list[str]]:
    """The presets of each model, those for small cards first."""
    found: dict[str, list[str]] = {}
    for name in sorted(load.preset_names(), key=lambda one: load.memory_class(one) or 0):
        gb = load.memory_class(name)
        found.setdefault(name.removesuffix(f" {gb}GB"), []).append(name)
    return found


def preset_for(model: str, card: int | None) -> str:
    """The preset of a model, or by its own name, that a card of ``card`` GB holds; of several the largest.

    Raises VideotuneError where none is for so small a card.
    """
    fits = [
        one
        for one in models().get(model, [])
        if card is None or (load.memory_class(one) or 0) <= card
    ]
    if model in models() and not fits:
        small = ", ".join(models()[model])
        raise VideotuneError(
            f"no preset of {model} is for {card} GB: it has {small}. Take another model."
        )
    return fits[-1] if fits else load.preset_named(model)


def config_of(
    purpose: str,
    preset: str,
    data: str,
    clips: int,
    trigger: str | None = None,
    prior: str | None = None,
) -> str:
    """A config as YAML, with the reason and the source of each value as comments. ``clips``: how many there are.

    ``prior``: clips at which the base model's predictions are preserved.

    Raises VideotuneError for a purpose that there is not.
    """
    found = recipe(purpose)
    own = found["keys"]
    why = load.preset_reasons(preset) | {
        "epochs": EPOCHS,
        "datasets": found["advice"],
        "prior_preservation": PRIOR,
    }
    why |= {name: f"{row[1]} ({row[2]})" if row[2] else row[1] for name, row in own.items()}
    small = clips < SMALL
    count = f"{'fewer than' if clips < SMALL else 'at least'} {SMALL} clips"
    keys: dict[str, Any] = {
        "datasets": [{"path": data} | ({"trigger": trigger} if trigger else {})]
    }
    keys |= {"prior_preservation": prior} if prior else {}
    keys |= {key: value for key, value in load.read_preset(preset).items() if key != "steps"}
    keys = load.merge(keys, load.unflatten({name: row[0] for name, row in own.items()}))
    keys["epochs"] = found["small" if small else "large"]
    head = f"{found['about']}, {count}; preset {preset}: {load.preset_about(preset)}"
    return (
        "\n".join([*_comment(f"videotune init: {purpose}, {head}"), "", *_yaml(keys, why)])
        + "\n"
    )


def _yaml(
    values: Mapping[str, Any], why: Mapping[str, str], prefix: str = "", indent: str = ""
) -> list[str]:
    """Lines of YAML, whose values are JSON, each below its reason."""
    lines: list[str] = []
    for key, value in values.items():
        lines += _comment(why.get(f"{prefix}{key}", ""), indent)
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_yaml(value, why, f"{prefix}{key}.", f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}")
    return lines


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )
