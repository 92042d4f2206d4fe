"""The sound of a batch's samples, from the cache or encoded in the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from videotune.latent_cache.conditions import LATENTS, SOUND, SeparateCondition
from videotune.latent_cache.step_batch import draw_noise
from videotune.types import Batch, Sound, Window

if TYPE_CHECKING:
    from videotune.model_spec import ModelSpec

TensorsFn = Callable[[SeparateCondition], dict[str, Tensor]]
"""Returns the tensors of what has an entry of its own, see
``BatchSource.condition_tensors``.
"""


def attach_sound(
    batch: Batch,
    windows: Sequence[Window],
    variants: Sequence[int],
    spec: ModelSpec,
    tensors_of: TensorsFn,
) -> Batch:
    """Return a batch with the sound of its samples, in which nothing is noised yet.

    A video that is not learnt is given clean as a whole.

    Args:
        batch: of samples of one bucket.
        windows: the samples' windows.
        variants: variant of each window.
        spec: the spec of the run's model.
        tensors_of: returns the tensors of a window's sound.
    """
    if not windows[0].shape.sound:
        return batch

    latents = []
    for window, variant in zip(windows, variants, strict=True):
        sample = SeparateCondition(window, variant, SOUND)
        latents.append(tensors_of(sample)[LATENTS])
    x0 = torch.stack(latents)[..., None, None]
    sound = Sound(
        x0=x0,
        noise=torch.zeros_like(x0),
        t=x0.new_zeros(len(x0)),
        is_conditioning="sound" not in spec.generates,
    )
    if "video" in spec.generates:
        return replace(batch, sound=sound)

    return replace(
        batch,
        sound=sound,
        video_is_conditioning=True,
        has_clean_frames=True,
        conditioning_mask=torch.ones_like(batch.conditioning_mask),
        loss_mask=torch.zeros_like(batch.loss_mask),
    )


def draw_sound_noise(
    batch: Batch, t: Tensor, seed: int, step: int, first: int
) -> Batch:
    """Return a batch with noise drawn for the sound, if that is learnt.

    Args:
        batch: a process's samples of a step.
        t: noise levels (b,) of their sound.
        seed: the run's seed.
        step: the step.
        first: number of the first sample among those of the step.
    """
    if batch.sound is None or batch.sound.is_conditioning:
        return batch
    noise = draw_noise(batch.sound.x0, seed, step, first, "noise sound")
    return replace(batch, sound=replace(batch.sound, noise=noise, t=t))
