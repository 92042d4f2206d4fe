"""Which experts of a model train, and the prefixes of their parameters in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


TEXT = "text"
"""Name of what trains if only text encoders do.

It belongs to the run, not to an expert.
"""


def prefix(spec: ModelSpec, name: str) -> str:
    """Return the prefix of an expert's parameters in a checkpoint, empty for a model
    with one denoiser.
    """
    return f"{name}." if len(spec.experts) > 1 and name != TEXT else ""


def trained(spec: ModelSpec, config: Config) -> tuple[str, ...]:
    """Return the names of the experts that train.

    Raises VideotuneError for a choice that the model does not have, or the method
    cannot make.
    """
    names = tuple(expert.name for expert in spec.experts)
    if len(names) == 1:
        if config.experts is not None:
            raise VideotuneError(
                f"experts: {spec.title} has one denoiser, not two experts. Leave it out"
            )
        return names

    if config.learning_rate_low is not None and not config.transformer.train:
        raise VideotuneError(
            "learning_rate_low: no expert trains, only their text. Leave it out"
        )
    if config.experts in (None, "both"):
        if config.training_method == "FINE_TUNE" and config.transformer.train:
            raise VideotuneError(
                "experts: FINE_TUNE changes every weight of one expert at a time. Set high or low"
            )
        return names
    return (str(config.experts),)


def of_expert(state: Mapping[str, Tensor], name_prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(name_prefix): value
        for name, value in state.items()
        if name.startswith(name_prefix)
    }
