"""Conditions of LTX-Video from 0.9.5 on, as its pipeline takes them.

What begins at the first frame takes the place of the clip's first latents. The pipeline
encodes an image or clip at a later frame by itself. Its first two latent frames then
match no latent frame of the clip, so the pipeline appends them as tokens with the times
of their pixel frames. The rest takes the place of the clip's latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from videotune.lazy import diffusers, torch
from videotune.model_spec import APPENDED_OF_SUFFIX, ConditionSupport, VideoRules
from videotune.models.given_frames import beginning_of

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.model_spec import ModelSpec
    from videotune.types import ClipShape, Conditioning, SampleRequest

CONDITIONS = {
    "prefix": ConditionSupport("in_place"),
    "last_frame": ConditionSupport("context"),
    "suffix": ConditionSupport("context"),
}
"""What the pipeline takes beside a first frame."""


@dataclass(frozen=True)
class GivenFrames:
    """An image or clip that samples are conditioned on."""

    latents: Tensor
    """(B,C,n,H,W)."""
    frame_index: int
    """Pixel frame of the sample at which it begins."""


def frames_at_the_end(
    extras: Mapping[str, Tensor], clip_frames: int, rules: VideoRules
) -> list[GivenFrames]:
    """Return what samples are conditioned on at their end, in the pipeline's order.

    Args:
        extras: of the samples' conditioning; "suffix" (B,C,n,H,W), "last_frame"
            (B,C,1,H,W).
        clip_frames: latent frames of the samples.
        rules: strides of the latent grid.
    """
    given = []
    for name in ("suffix", "last_frame"):
        if name in extras:
            latents = extras[name]
            begin = (clip_frames - latents.shape[2]) * rules.temporal_stride
            given.append(GivenFrames(latents, begin))
    return given


def tokens_of(given: GivenFrames) -> Tensor:
    """Return the latents of given frames at the end that are tokens beside the clip's.

    The other ones have the place of the clip's latents.
    """
    return given.latents[:, :, :APPENDED_OF_SUFFIX]


def with_tokens_in_front(
    tokens: Tensor, timestep: Tensor, given: Sequence[GivenFrames]
) -> tuple[Tensor, Tensor]:
    """Put given frames in front of the inputs of a network, clean.

    Args:
        tokens: of the clip (B,S,C).
        timestep: (B,1), or (B,S).
        given: at the end of the clip.

    Returns:
        (B,n+S,C), and a timestep for each token, 0 for the given ones.
    """
    in_front = [
        tokens_of(frames).to(tokens).flatten(2).transpose(1, 2) for frames in given
    ]
    states = torch.cat([*in_front, tokens], dim=1)
    clean = timestep.new_zeros(len(timestep), states.shape[1] - tokens.shape[1])
    of_clip = timestep.expand(-1, tokens.shape[1])
    return states, torch.cat([clean, of_clip], dim=1)


def given_to_pipeline(
    spec: ModelSpec, conditioning: Conditioning, request: SampleRequest
) -> list[GivenFrames]:
    """Return what samples are conditioned on, in the pipeline's form: what begins at the
    first frame, then what ends at the last one.
    """
    given = []
    beginning = beginning_of(request)
    if beginning is not None:
        given.append(GivenFrames(beginning, 0))

    frames, _, _ = spec.rules.latent_size(request.shape)
    return given + frames_at_the_end(conditioning.extras, frames, spec.rules)


def pipeline_arguments(
    given: list[GivenFrames], shape: ClipShape, rules: VideoRules
) -> dict[str, Any]:
    """Return the arguments with which the pipeline is called for given frames, with
    blank pictures: of the pixels only their size counts.
    """
    images: list[Any] = []
    videos: list[Any] = []

    for frames in given:
        count = (frames.latents.shape[2] - 1) * rules.temporal_stride + 1
        pictures = torch.zeros(count, 3, shape.height, shape.width)
        images.append(pictures if count == 1 else None)
        videos.append(pictures if count > 1 else None)
    if not given:
        return {}

    return {
        "image": images,
        "video": videos,
        "frame_index": [frames.frame_index for frames in given],
        "strength": [1.0] * len(given),
    }


def video_coords(
    frames: int,
    rows: int,
    columns: int,
    rules: VideoRules,
    device: Any,
    frame_index: int = 0,
) -> Tensor:
    """Return the positions of latent frames (1,3,tokens) as the pipeline does: in pixel
    frames, rows and columns.
    """
    pipeline = diffusers.LTXConditionPipeline
    ids = pipeline._prepare_video_ids(1, frames, rows, columns, device=device)
    coords: Tensor = pipeline._scale_video_ids(
        ids,
        scale_factor=rules.spatial_stride,
        scale_factor_t=rules.temporal_stride,
        frame_index=frame_index,
        device=device,
    )
    return coords.float()
