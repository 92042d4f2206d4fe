"""What CogVideoX's tests share: shapes that each variant takes, and batches with an image or without."""

from dataclasses import replace
from functools import partial
from typing import Any

from tests.models import models_kit
from tests.models.models_kit import batch_of
from videotune.types import Batch, ClipShape

OLDER = [ClipShape(9, 32, 48, 8.0), ClipShape(17, 48, 48, 8.0), ClipShape(1, 64, 32, 8.0)]
NEWER = [ClipShape(17, 32, 48, 16.0), ClipShape(33, 48, 48, 16.0), ClipShape(1, 64, 32, 16.0)]
SHAPES = {"2b": OLDER, "5b": OLDER, "5b-i2v": [ClipShape(49, 32, 32, 8.0)], "1.5-5b": NEWER, "1.5-5b-i2v": NEWER}
"""Some of the model's own size (its positions are trained there), some of others, and one of a single frame."""

opened = partial(models_kit.opened, "cogvideox")


def batch_for(family: Any, shape: ClipShape, captions: list[str], image: bool) -> Batch:
    """A batch of noise for latents; ``image``: told an image, where the checkpoint takes one."""
    batch = batch_of(family, captions, shape=shape)
    return batch if image else replace(batch, cond=replace(batch.cond, extras={}))
