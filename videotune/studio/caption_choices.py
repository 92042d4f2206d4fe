"""The models that write captions, and whether this computer can run each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from videotune.captioning.offered_models import offered_models
from videotune.studio import gpu


@dataclass(frozen=True)
class CaptionChoice:
    """A model as the dialog offers it."""

    facts: Mapping[str, Any]
    """Its entry in the list of models."""

    memory: str
    """The memory that it needs on this computer."""

    verdict: str
    """Whether it runs here, in a few words."""

    colour: str
    """The colour of the verdict's badge."""


def caption_choices() -> list[CaptionChoice]:
    """Return the models with what this computer, which runs them, lacks for each.

    The card of the plan may be in another computer and says nothing here.
    """
    gpus = gpu.list_gpus()
    if gpus:
        gigabytes_here = gpus[0].memory_total / 2**30
    else:
        gigabytes_here = psutil.virtual_memory().total / 2**30
    return [
        _choice(facts, gigabytes_here, has_card=bool(gpus))
        for facts in offered_models()
    ]


def _choice(
    facts: Mapping[str, Any], gigabytes_here: float, *, has_card: bool
) -> CaptionChoice:
    """Return a model with its verdict.

    Args:
        facts: Its entry in the list of models.
        gigabytes_here: The memory of the card; of the computer if it has none.
        has_card: Whether it would run on a card.
    """
    if has_card:
        needed = facts["memory_gb"]
        memory = f"{needed:g} GB of the card's memory"
        runner = "the card here"
    else:
        # Without a card the weights are in float32, twice the size of their download.
        needed = facts["memory_gb"] + facts["download_gb"]
        memory = f"{needed:.0f} GB of this computer's memory, as it has no NVIDIA card"
        runner = "this computer"

    if needed > gigabytes_here:
        verdict = f"too large for {runner} ({gigabytes_here:.0f} GB)"
        return CaptionChoice(facts, memory, verdict, "bad")
    if has_card:
        return CaptionChoice(facts, memory, "fits the card here", "good")
    return CaptionChoice(facts, memory, "runs here on the processor, slowly", "care")
