"""Conditions of LTX-2, as its pipelines take them.

A first frame and a prefix replace the clip's first latents. A last frame and a reference
are appended as tokens, each with its own time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from videotune.lazy import diffusers, torch
from videotune.model_spec import ConditionSupport, VideoRules
from videotune.models.given_frames import beginning_of

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.types import Conditioning, SampleRequest

CONDITIONS = {
    "prefix": ConditionSupport("in_place"),
    "last_frame": ConditionSupport("context"),
    "reference": ConditionSupport("context"),
}
"""What the pipelines take beside a first frame.

No suffix: a clip that is given at the end begins at a latent frame of the sample there,
so its own last frame never falls on the sample's.
"""


@dataclass(frozen=True)
class AppendedFrames:
    """Clean latents beside the clip's."""

    name: str
    """Type of the condition."""
    latents: Tensor
    """(B,C,n,H,W)."""


def appended_frames(extras: Mapping[str, Tensor]) -> list[AppendedFrames]:
    """Return what is appended to samples, in the pipeline's order.

    Args:
        extras: of the samples' conditioning.
    """
    return [
        AppendedFrames(name, extras[name])
        for name in ("last_frame", "reference")
        if name in extras
    ]


def with_tokens_behind(
    tokens: Tensor, timestep: Tensor, appended: Sequence[AppendedFrames]
) -> tuple[Tensor, Tensor]:
    """Append clean tokens to the inputs of a network.

    Args:
        tokens: of the clip (B,S,C).
        timestep: (B,), or (B,S).
        appended: latents of the same width.

    Returns:
        (B,S+n,C), and a timestep for each token, 0 for the appended ones.
    """
    behind = [
        frames.latents.to(tokens).flatten(2).transpose(1, 2) for frames in appended
    ]
    states = torch.cat([tokens, *behind], dim=1)
    of_clip = timestep.reshape(len(tokens), -1).expand(-1, tokens.shape[1])
    clean = timestep.new_zeros(len(tokens), states.shape[1] - tokens.shape[1])
    return states, torch.cat([of_clip, clean], dim=1)


def last_frame_coords(
    clip_frames: int, rows: int, columns: int, rules: VideoRules, device: Any
) -> Tensor:
    """Return the bounds (1,3,tokens,2) of a last frame's tokens as the pipeline gives
    them, in pixel frames, rows and columns.

    The pipeline counts in latent frames: it puts the last frame at the first pixel frame
    of the clip's last latent frame.

    Args:
        clip_frames: latent frames of the clip.
        rows: latent rows.
        columns: latent columns.
        rules: strides of the latent grid.
        device: device of the result.
    """
    pipe = diffusers.LTX2ConditionPipeline.__new__(diffusers.LTX2ConditionPipeline)
    pipe.transformer_spatial_patch_size = 1
    pipe.transformer_temporal_patch_size = 1
    pipe.vae_temporal_compression_ratio = rules.temporal_stride
    pipe.vae_spatial_compression_ratio = rules.spatial_stride

    coords: Tensor = pipe._prepare_keyframe_coords(
        keyframe_latent_num_frames=1,
        keyframe_latent_height=rows,
        keyframe_latent_width=columns,
        pixel_frame_idx=(clip_frames - 2) * rules.temporal_stride + 1,
        num_pixel_frames=1,
        fps=1.0,
        device=device,
    )
    return coords


@dataclass(frozen=True)
class PipelineCall:
    """A pipeline and its arguments for the conditions of samples."""

    pipeline: Any
    """Its class."""
    latents: list[Tensor]
    """Results of its VAE's ``encode``, in order of the calls: (B,C,n,H,W) each."""
    arguments: dict[str, Any]


def pipeline_call(
    conditioning: Conditioning, request: SampleRequest, rules: VideoRules
) -> PipelineCall:
    """Return the pipeline call for the conditions of samples.

    Their beginning is in ``request``, appended frames are in the ``extras`` of the
    conditioning.
    """
    latents = []
    conditions = []
    beginning = beginning_of(request)
    if beginning is not None:
        latents.append(beginning)
        conditions.append(_condition(beginning, request, rules, index=0))

    references = []
    for appended in appended_frames(conditioning.extras):
        latents.append(appended.latents)
        if appended.name == "reference":
            references.append(_reference(appended.latents, request, rules))
        else:
            conditions.append(_condition(appended.latents, request, rules, index=-1))

    arguments: dict[str, Any] = {}
    if conditions:
        arguments["conditions"] = conditions
    if references:
        arguments["reference_conditions"] = references
        return PipelineCall(diffusers.LTX2InContextPipeline, latents, arguments)
    if conditions:
        return PipelineCall(diffusers.LTX2ConditionPipeline, latents, arguments)
    return PipelineCall(diffusers.LTX2Pipeline, latents, arguments)


def _pictures(latents: Tensor, request: SampleRequest, rules: VideoRules) -> Tensor:
    """Return blank pixels (T,3,H,W): of the pixels only their size counts."""
    count = (latents.shape[2] - 1) * rules.temporal_stride + 1
    return torch.zeros(count, 3, request.shape.height, request.shape.width)


def _condition(
    latents: Tensor, request: SampleRequest, rules: VideoRules, index: int
) -> Any:
    from diffusers.pipelines.ltx2.pipeline_ltx2_condition import (  # imports torch
        LTX2VideoCondition,
    )

    pictures = _pictures(latents, request, rules)
    return LTX2VideoCondition(frames=pictures, index=index, strength=1.0, crf=0)


def _reference(latents: Tensor, request: SampleRequest, rules: VideoRules) -> Any:
    from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import (  # imports torch
        LTX2ReferenceCondition,
    )

    return LTX2ReferenceCondition(frames=_pictures(latents, request, rules))
