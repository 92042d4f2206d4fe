"""Drop random latent frames of a batch."""

from dataclasses import replace

import torch

from videotune.rng import generator_for
from videotune.types import Batch


def drop_frames(
    batch: Batch,
    probability: float,
    frames_per_token: int,
    *,
    seed: int,
    step: int,
    first: int,
) -> Batch:
    """Drop random latent frames: they are fed as noise and left out of the loss.

    All frames of a token are dropped together, and the first token's never.

    Args:
        batch: the samples.
        probability: probability that a token is dropped.
        frames_per_token: latent frames of a token.
        seed: the run's seed.
        step: the step.
        first: index of the batch's first sample among those of the step.
    """
    if probability == 0:
        return batch

    frames = batch.x0.shape[2]
    padding = -frames % frames_per_token  # stands before the first frame
    token_of_frame = (torch.arange(frames) + padding) // frames_per_token

    dropped = torch.zeros_like(batch.dropped_frames_mask)
    for index in range(len(batch)):
        generator = generator_for(seed, "frame dropout", step, first + index)
        random_by_token = torch.from_numpy(
            generator.random(frames)
        )  # more than there are tokens
        is_drawn = random_by_token[token_of_frame] < probability
        dropped[index, 0, :, 0, 0] = is_drawn & (token_of_frame > 0)
    dropped &= ~batch.conditioning_mask.flatten(3).any(3)[..., None, None]
    return replace(
        batch, dropped_frames_mask=dropped, loss_mask=batch.loss_mask * ~dropped
    )
