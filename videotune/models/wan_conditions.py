"""Conditions of Wan: which a checkpoint takes, and how its pipeline gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from videotune.lazy import torch
from videotune.model_spec import ConditionSupport, VideoRules

if TYPE_CHECKING:
    from torch import Tensor

IN_PLACE = {
    "first_frame": ConditionSupport("in_place"),
    **dict.fromkeys(
        ("last_frame", "prefix", "suffix", "mask"),
        ConditionSupport("in_place", in_diffusers=False),
    ),
}
"""What a transformer without image channels can learn: it takes a timestep for each
token. diffusers' loop gives a first frame at timestep 0, and nothing else.
"""

ON_CHANNELS = {
    "last_frame": ConditionSupport("channels"),
    **dict.fromkeys(
        ("prefix", "suffix", "mask"), ConditionSupport("channels", in_diffusers=False)
    ),
}
"""What a transformer with image channels can learn beside the first frame: its channels
hold latents of any pixels, and a mask that says which.
"""

BOTH_ENDS = dict.fromkeys(
    ("first_frame", "last_frame"), ConditionSupport("channels", is_required=True)
)
"""What a checkpoint for first and last frames (FLF2V) always reads."""


def folded_mask(known: Tensor, rules: VideoRules) -> Tensor:
    """Return the mask channels of image-to-video (4,F,H,W): of each latent frame one for
    each of its pixel frames, 1 in cells of which all is known.

    Args:
        known: (T,H,W) bool in pixels.
        rules: strides of the latent grid.
    """
    is_hidden = (~known).float()[:, None]
    cells = 1 - torch.nn.functional.max_pool2d(is_hidden, rules.spatial_stride)[:, 0]
    # The first latent frame holds one pixel frame, each other one as many as fold.
    fold = rules.temporal_stride
    frames = torch.cat([cells[:1].expand(fold, -1, -1), cells[1:]])
    return frames.reshape(-1, fold, *cells.shape[1:]).transpose(0, 1)


def give_cells(pipe: Any, known: Tensor, known_mask: Tensor) -> None:
    """Let an image-to-video pipeline that expands timesteps feed these cells clean.

    Its loop handles any mask; only the first frame's comes from its arguments.

    Args:
        pipe: the pipeline.
        known: latents (1,C,F,H,W).
        known_mask: (1,1,F,H,W) bool: the cells that are given.
    """
    prepare_latents = pipe.prepare_latents

    def prepare_with_cells(*arguments: Any, **keywords: Any) -> Any:
        latents, _, _ = prepare_latents(*arguments, **keywords)
        is_sampled = (~known_mask).to(latents)
        return latents, known.to(latents), is_sampled

    pipe.prepare_latents = prepare_with_cells


def give_channels(pipe: Any, image: Tensor) -> None:
    """Let an image-to-video pipeline feed these channels beside the noise.

    Its arguments give a first and a last frame; the channels may show more.

    Args:
        pipe: the pipeline.
        image: (1,4+C,F,H,W), see ``Wan.channel_states``.
    """
    prepare_latents = pipe.prepare_latents

    def prepare_with_channels(*arguments: Any, **keywords: Any) -> Any:
        latents, _ = prepare_latents(*arguments, **keywords)
        return latents, image.to(latents)

    pipe.prepare_latents = prepare_with_channels
