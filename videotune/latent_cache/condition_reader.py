"""Read what samples are given of their clips: tensors of conditions, from the cache or
encoded in the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from videotune.config.schema import Config
from videotune.latent_cache.conditioning_cells import put_conditions
from videotune.latent_cache.conditions import (
    SeparateCondition,
    channel_samples,
    condition_samples,
    conditions_of_most_samples,
    num_boxes,
    shown_on_channels,
)
from videotune.model_spec import ModelSpec
from videotune.types import Window


@dataclass(frozen=True)
class DrawnConditions:
    """Which conditions were drawn for a sample."""

    window: Window
    variant: int
    types: frozenset[str]
    box: int = 0
    """Which of the drawn rectangles is masked (condition "mask" without a file)."""


@dataclass(frozen=True)
class ConditionReader:
    """Reads the conditions of a run's samples."""

    config: Config
    spec: ModelSpec
    tensors_of: Callable[[SeparateCondition], dict[str, Tensor]]
    """Returns the tensors of a condition that is encoded on its own."""

    @cached_property
    def types_of_most_samples(self) -> frozenset[str]:
        """Types of the conditions that at least half of the samples have.

        Validation and previews, which draw no conditions, have all of these.
        """
        return conditions_of_most_samples(self.config, self.spec)

    @cached_property
    def prefix_frames(self) -> int:
        """Latent frames of a prefix that samples are given."""
        prefixes = (item for item in self.config.conditions if item.type == "prefix")
        return sum(prefix.frames_given for prefix in prefixes)

    def encoded_conditions(
        self, sample: DrawnConditions
    ) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a sample's conditions that are encoded on their own, by
        type, without those shown on channels.
        """
        encoded: dict[str, dict[str, Tensor]] = {}
        for condition in self.config.conditions:
            is_read = condition.type in sample.types
            if not is_read or self.spec.is_on_channels(condition.type):
                continue
            boxes = num_boxes(self.config)
            choices = condition_samples(
                sample.window, sample.variant, condition, boxes, self.spec
            )
            if choices:
                # Only a mask without a file has an entry for each box.
                chosen = choices[sample.box % len(choices)]
                encoded[condition.type] = self.tensors_of(chosen)
        return encoded

    def write_conditioning_cells(
        self,
        x0: Tensor,
        sample: DrawnConditions,
        encoded: Mapping[str, Mapping[str, Tensor]],
        start: Tensor | None,
    ) -> Tensor:
        """Write what a sample is given into its latents (C,F,H,W), in place.

        Args:
            x0: the latents.
            sample: the sample.
            encoded: tensors of its conditions, by type.
            start: latents of its start image, see ``put_conditions``.

        Returns:
            (F,H,W) bool: the cells that are given.
        """
        return put_conditions(
            x0, self.spec, sample.types, self.prefix_frames, encoded, start
        )

    def channel_states(
        self, sample: DrawnConditions, states_of_clip: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what a sample is shown on the network's channels.

        Args:
            sample: the sample.
            states_of_clip: the states that are cached with the clip's latents.
        """
        types = shown_on_channels(sample.types, sample.window, self.spec)
        if not self.spec.need_own_entry(types):
            # The clip's entry was encoded with exactly these conditions.
            if types:
                return dict(states_of_clip)
            # The sample is shown nothing: its channels are zeros. A network without
            # channels has no states here, so the result is empty.
            return {name: torch.zeros_like(x) for name, x in states_of_clip.items()}

        # Other conditions have an entry of their own: if they hide a drawn box one for each
        # box, else a single one.
        boxes = num_boxes(self.config)
        choices = channel_samples(
            sample.window, sample.variant, types, self.config, boxes
        )
        return self.tensors_of(choices[sample.box % len(choices)])
