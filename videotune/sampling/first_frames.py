"""Images of the user's that samples begin with."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from videotune.bounds import require_file
from videotune.data.decode import decode
from videotune.data.file_checks import ClipProblem
from videotune.data.probe import probe_image
from videotune.errors import VideotuneError
from videotune.latent_cache.encode import to_model
from videotune.models.base import DiffusersModel
from videotune.types import ClipShape, LatentDistribution


def read_image(path: Path, shape: ClipShape, key: str) -> np.ndarray:
    """Return an image as the still video of a shape, cropped as clips are.

    Raises VideotuneError, with the key, for an image that cannot be read.
    """
    require_file(path, key)
    try:
        times = [0.0] * shape.frames
        return decode(probe_image(path), times, shape.height, shape.width)
    except (ClipProblem, OSError) as problem:
        reason = getattr(problem, "detail", None) or problem
        raise VideotuneError(f"{key} {path}: {reason}") from problem


def encode_images(
    family: DiffusersModel, images: Sequence[tuple[Path, ClipShape]], key: str
) -> list[LatentDistribution]:
    """Encode images as first frames of videos of these shapes, then free the VAE.

    Raises VideotuneError, with the key, for an image that cannot be read.
    """
    try:
        return [
            family.encode_video(to_model(read_image(path, shape, key)))
            for path, shape in images
        ]
    finally:
        family.free("vae")
