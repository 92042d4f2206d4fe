"""Which model to begin with: one preset for the card and the clips, with the reason."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from videotune.config.nested_keys import flatten
from videotune.files import read_json
from videotune.presets.recipes import motion_notes
from videotune.presets.shipped import read_preset
from videotune.studio.model_choices import (
    ChosenCard,
    ModelSize,
    runs_anywhere,
    sizes_of_model,
)
from videotune.studio.projects import NEUTRAL_PRESET

UNKNOWN_CARD = ChosenCard("cards of 16 GB", 16.0)
"""The card that is meant while none is chosen."""

FRAME_RATE = re.compile(r"(\d+) frames per second")
USUAL_FRAMES = 33
USUAL_RATE = 24.0


@dataclass(frozen=True)
class FirstModel:
    """The preset to begin with."""

    preset: str
    reason: str


@cache
def beginners_models() -> list[str]:
    """Return the models to begin with (first_models.json), the first choice first: small
    for their card, much used, and for video from text.
    """
    models: list[str] = read_json(Path(__file__).with_name("first_models.json"))
    return models


def first_model(
    card: ChosenCard, clip_seconds: Sequence[float] = (), *, keeps_speed: bool = False
) -> FirstModel:
    """Return the preset to begin with.

    A model whose trained parts are as long as most clips comes before the others that
    fit the card. If none fits, it is the trial.

    Args:
        card: the card of the project.
        clip_seconds: how long each clip is, as far as it is known.
        keeps_speed: prefer presets by which motion plays as fast as it was filmed.
    """
    used_card = card if card.gigabytes else UNKNOWN_CARD
    best_sizes = [_best_size(model, used_card) for model in beginners_models()]
    fitting = [size for size in best_sizes if size is not None]
    if not fitting:
        reason = (
            f"No model is made for {card.name}. With the toy you see in minutes how all "
            "of it works."
        )
        return FirstModel(NEUTRAL_PRESET, reason)

    def suits(size: ModelSize) -> bool:
        long_enough = _count_long_enough(size, clip_seconds)
        return not clip_seconds or 2 * long_enough >= len(clip_seconds)

    if keeps_speed:
        fitting.sort(key=lambda size: bool(motion_notes([size.preset])))
    size = next(filter(suits, fitting), fitting[0])
    return FirstModel(size.preset, _reason(size, used_card, clip_seconds))


def _best_size(model: str, card: ChosenCard) -> ModelSize | None:
    """Return the LoRA size of a model that is nearest to the card's memory and fits it;
    None if none does.
    """
    sizes = [
        size
        for size in sizes_of_model(model)
        if size.is_lora
        and size.is_made_for(card)
        and size.fits(card)
        and not runs_anywhere(size.preset)
    ]
    return max(sizes, key=lambda size: size.memory_class or 0, default=None)


def _reason(size: ModelSize, card: ChosenCard, clip_seconds: Sequence[float]) -> str:
    """Return why a size is the one to begin with."""
    parts = [f"made for cards of {size.memory_class} GB"]
    if size.download:
        parts.append(f"a download of {size.download}")
    if size.licence:
        parts.append(f"licence {size.licence}")

    reason = f"Of the models that fit {card.name}, a small one that is much used: "
    reason += f"{', '.join(parts)}."
    if clip_seconds:
        count = _count_long_enough(size, clip_seconds)
        reason += (
            f" It trains parts of {_seconds_of_part(size):.1f} s; {count} of your "
            f"{len(clip_seconds)} clips are that long."
        )
    return reason


def _count_long_enough(size: ModelSize, clip_seconds: Sequence[float]) -> int:
    needed = _seconds_of_part(size)
    return sum(seconds >= needed for seconds in clip_seconds)


def _seconds_of_part(size: ModelSize) -> float:
    """Return how many seconds of a clip a preset trains at once."""
    values: Mapping[str, Any] = flatten(read_preset(size.preset))
    frames = values.get("video_config.frames") or values.get("video_config.max_frames")
    own_rate = FRAME_RATE.search(size.good)
    rate = values.get("video_config.target_fps") or (
        float(own_rate[1]) if own_rate else USUAL_RATE
    )
    return float(frames or USUAL_FRAMES) / float(rate)
