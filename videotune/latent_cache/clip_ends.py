"""How much of a clip, or of a file beside it, a condition gives: in latent and in pixel
frames.
"""

from videotune.config.schema import Config
from videotune.model_spec import ModelSpec, VideoRules
from videotune.types import ClipShape

REFERENCE = "reference"
"""Type of a file beside the clip that is appended to it. Its latents are also called so
in a batch.
"""


def appended_sizes(
    config: Config, shape: ClipShape, spec: ModelSpec
) -> dict[str, tuple[int, int, int]]:
    """Return (F,H,W) of the latents that are appended to a clip, by the condition's
    type.
    """
    _, rows, columns = spec.rules.latent_size(shape)
    sizes: dict[str, tuple[int, int, int]] = {}
    for condition in config.conditions:
        if not spec.is_appended(condition.type):
            continue
        if condition.type == REFERENCE:
            count = latents_of_reference(condition.latent_frames, shape, spec)
            sizes[REFERENCE] = (count, rows, columns)
        elif shape.frames > 1:
            count = latents_of_end(condition.type, condition.frames_given, shape, spec)
            sizes[condition.type] = (count, rows, columns)
    return sizes


def latents_of_reference(
    latent_frames: int | None, shape: ClipShape, spec: ModelSpec
) -> int:
    """Return how many latent frames a clip's reference has."""
    if spec.has_reference_image:
        return 1
    most = spec.rules.latent_size(shape)[0]
    return min(latent_frames or most, most)


def latents_of_end(
    condition: str, latent_frames: int, shape: ClipShape, spec: ModelSpec
) -> int:
    """Return how many latent frames are encoded of a clip's last frame or suffix.

    An appended suffix has one more: it is encoded as a clip by itself, and the first
    latent frame of a clip holds one pixel frame.
    """
    if condition != "suffix":
        return 1
    if spec.is_appended(condition):
        most = spec.rules.latent_size(shape)[0] - 2
        return min(latent_frames, most) + 1
    return given_frames(latent_frames, shape, spec.rules)


def pixels_of_end(
    condition: str, latent_frames: int, shape: ClipShape, spec: ModelSpec
) -> int:
    """Return how many pixel frames a clip's last frame or suffix has."""
    count = latents_of_end(condition, latent_frames, shape, spec)
    if condition == "suffix" and spec.is_in_place(condition):
        return count * spec.rules.temporal_stride
    return (count - 1) * spec.rules.temporal_stride + 1


def given_frames(latent_frames: int, shape: ClipShape, rules: VideoRules) -> int:
    """Return how many latent frames of a prefix or suffix are given: one at least is
    left to learn.
    """
    return min(latent_frames, rules.latent_size(shape)[0] - 1)
