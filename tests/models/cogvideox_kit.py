"""What CogVideoX's tests share: shapes that each variant takes, batches, and checkpoints with a changed config."""

import json
from pathlib import Path
from typing import Any

import torch

from videotune.models.cogvideox import CogVideoX
from videotune.types import Batch, ClipShape

OLDER = [ClipShape(9, 32, 48, 8.0), ClipShape(17, 48, 48, 8.0), ClipShape(1, 64, 32, 8.0)]
NEWER = [ClipShape(17, 32, 48, 16.0), ClipShape(33, 48, 48, 16.0), ClipShape(1, 64, 32, 16.0)]
SHAPES = {"2b": OLDER, "5b": OLDER, "5b-i2v": [ClipShape(49, 32, 32, 8.0)], "1.5-5b": NEWER, "1.5-5b-i2v": NEWER}
"""Some of the model's own size (its positions are trained there), some of others, and one of a single frame."""


def opened(folder: Path) -> Any:
    """The family over a checkpoint, on the CPU in float32."""
    return CogVideoX(folder, torch.device("cpu"), torch.float32)


def edit(path: Path, **words: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | words))


def batch_for(family: Any, shape: ClipShape, captions: list[str], image: bool, seed: int = 0) -> Batch:
    """A batch of noise for latents; ``image``: told latents of an image, where the checkpoint takes one."""
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.randn(
        len(captions), family.spec.latent_channels, *family.spec.rules.latent_size(shape), generator=generator
    )
    states = family.encode_text(captions)
    if image and family.spec.first_frame is not None:
        latents = torch.randn(len(captions), x0.shape[1], 1, *x0.shape[3:], generator=generator)
        states = [state | {"image": latent} for state, latent in zip(states, latents, strict=True)]
    none = torch.zeros(len(captions), 1, x0.shape[2], 1, 1, dtype=torch.bool)
    return Batch(
        x0=x0,
        given=none,
        dropped=none,
        weight=torch.ones_like(none, dtype=torch.float32),
        scale=torch.ones(len(captions)),
        anchored=torch.zeros(len(captions), dtype=torch.bool),
        cond=family.condition(states),
        captions=tuple(captions),
        window_ids=(),
        fps=torch.full((len(captions),), shape.fps),
    )
