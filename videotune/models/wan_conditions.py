"""Conditions of Wan: which a checkpoint takes, and how its pipeline gets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch
from videotune.model_spec import ConditionSupport, VideoRules
from videotune.types import Networks

if TYPE_CHECKING:
    from torch import Tensor

APPENDED = {"reference": ConditionSupport("context", in_diffusers=False)}
"""What every transformer can learn, because it takes a timestep for each token."""

IN_PLACE = {
    "first_frame": ConditionSupport("in_place"),
    **dict.fromkeys(
        ("last_frame", "prefix", "suffix", "mask"),
        ConditionSupport("in_place", in_diffusers=False),
    ),
    **APPENDED,
}
"""What a transformer without image channels can learn: it takes a timestep for each
token. diffusers' loop gives a first frame at timestep 0, and nothing else.
"""

ON_CHANNELS = {
    "last_frame": ConditionSupport("channels"),
    **dict.fromkeys(
        ("prefix", "suffix", "mask"), ConditionSupport("channels", in_diffusers=False)
    ),
    **APPENDED,
}
"""What a transformer with image channels can learn beside the first frame: its channels
hold latents of any pixels, and a mask that says which.
"""

BOTH_ENDS = {
    **dict.fromkeys(
        ("first_frame", "last_frame"), ConditionSupport("channels", is_required=True)
    ),
    **APPENDED,
}
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


def with_reference(
    latents: Tensor, timestep: Tensor, reference: Tensor, patch: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Append a reference to the inputs of a network, as clean frames after the clip's.

    Args:
        latents: the network's input (B,C,F,H,W), with any image channels.
        timestep: (B,), or (B,tokens).
        reference: latents (B,c,n,H,W).
        patch: latent cells of a token.

    Returns:
        (B,C,F+n,H,W), and a timestep for each token, 0 for those of the reference.
    """
    states = reference.to(latents)
    further_channels = latents.shape[1] - states.shape[1]
    if further_channels:
        # The image channels hold a mask, 1 where something is known, and what it is.
        masks = further_channels - states.shape[1]
        mask = states.new_ones(len(states), masks, *states.shape[2:])
        states = torch.cat([states, mask, states], dim=1)

    def count_tokens(frames: int) -> int:
        cells = frames * latents.shape[3] * latents.shape[4]
        return cells // (patch[0] * patch[1] * patch[2])

    if timestep.ndim == 1:
        timestep = timestep[:, None].expand(-1, count_tokens(latents.shape[2]))
    clean = timestep.new_zeros(len(timestep), count_tokens(states.shape[2]))
    return torch.cat([latents, states], dim=2), torch.cat([timestep, clean], dim=1)


class ReferencedNetworks(Mapping[str, Any]):
    """Networks that a pipeline calls without a reference, and that get one appended.

    Args:
        nets: denoisers by expert.
        reference: latents (B,c,n,H,W) of each sample of the pipeline.
        patch: latent cells of a token.
    """

    def __init__(
        self, nets: Networks, reference: Tensor, patch: tuple[int, int, int]
    ) -> None:
        self._nets = nets
        self._reference = reference
        self._patch = patch

    def __getitem__(self, name: str) -> Any:
        return _ReferencedNetwork(self._nets[name], self._reference, self._patch)

    def __iter__(self) -> Iterator[str]:
        return iter(self._nets)

    def __len__(self) -> int:
        return len(self._nets)


class _ReferencedNetwork:
    """A network that appends a reference to its inputs and cuts it off its output."""

    def __init__(
        self, net: Any, reference: Tensor, patch: tuple[int, int, int]
    ) -> None:
        self._net = net
        self._reference = reference
        self._patch = patch
        self.cache_context = net.cache_context

    def __call__(
        self, hidden_states: Tensor, timestep: Tensor, **inputs: Any
    ) -> tuple[Tensor]:
        states, timesteps = with_reference(
            hidden_states,
            timestep,
            self._reference.to(hidden_states.device),
            self._patch,
        )
        output = self._net(hidden_states=states, timestep=timesteps, **inputs)
        return (output[0][:, :, : hidden_states.shape[2]],)
