"""Which experts of a model train, and by what their parameters are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.types import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


TEXT = "text"
"""What trains of the text encoders alone, whatever the denoisers are: it is the run's, not an expert's."""


def prefix(spec: ModelSpec, name: str) -> str:
    """What the names of an expert's parameters begin with in a checkpoint; nothing where there is one denoiser."""
    return f"{name}." if len(spec.experts) > 1 and name != TEXT else ""


def trained(spec: ModelSpec, config: Config) -> tuple[str, ...]:
    """The names of the experts that train.

    Raises VideotuneError for a choice that the model does not have, or the method cannot make.
    """
    names = tuple(expert.name for expert in spec.experts)
    if len(names) == 1:
        for key in ("experts", "expert_share", "learning_rate_low"):
            if getattr(config, key) is not None:
                raise VideotuneError(
                    f"{key}: {spec.title} has one denoiser, not two experts: leave it out"
                )
        return names
    if config.learning_rate_low is not None and not config.transformer.train:
        raise VideotuneError(
            "learning_rate_low: no expert trains, only what both are told: leave it out"
        )
    if config.experts in (None, "both"):
        if config.training_method == "FINE_TUNE" and config.transformer.train:
            raise VideotuneError(
                "experts: FINE_TUNE changes every weight of one expert at a time: set high or low"
            )
        return names
    if config.expert_share is not None:
        raise VideotuneError(f"expert_share: {config.experts} alone trains; leave it out")
    return (str(config.experts),)


def of_expert(state: Mapping[str, Tensor], begin: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without the beginning."""
    return {
        name.removeprefix(begin): value
        for name, value in state.items()
        if name.startswith(begin)
    }
