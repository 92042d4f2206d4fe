"""What stands around LTX-Video's transformer: stand-ins that its pipelines hold, attention by frame, names elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.families.frames import by_frame

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from videotune.types import FamilySpec


def encoded(spec: FamilySpec, first: Tensor | None, device: torch.device) -> nn.Module:
    """What a pipeline holds in place of the VAE: its strides, and the image's latents (B,C,1,H,W), known already.

    Its statistics are 0 and 1, so that the pipeline hands the latents on as they are.
    """
    import torch
    from diffusers.utils.torch_utils import randn_tensor
    from torch import nn

    def draw(generators: Sequence[torch.Generator]) -> Tensor:
        """The known latents; as many numbers are drawn as the VAE's own would have cost, for the noise that comes later."""
        assert first is not None
        randn_tensor(first.shape, list(generators))
        return first

    class Encoded(nn.Module):
        """A VAE that encodes whatever it is given to known latents."""

        def __init__(self) -> None:
            super().__init__()
            self.dtype, self.device = torch.float32, device
            self.spatial_compression_ratio = spec.rules.spatial_stride
            self.temporal_compression_ratio = spec.rules.temporal_stride
            self.latents_mean, self.latents_std = torch.zeros(spec.latent_channels), torch.ones(spec.latent_channels)

        def encode(self, pixels: Tensor) -> Any:
            return SimpleNamespace(latent_dist=SimpleNamespace(sample=draw))

    return Encoded()


@contextmanager
def quiet_schedule(scheduler: Any) -> Iterator[None]:
    """Without the warning that a schedule of timesteps may be shifted otherwise than its noise, where nothing shifts it."""
    config, logger = scheduler.config, logging.getLogger(type(scheduler).__module__)
    level = logger.level
    if config.shift == 1 and not config.use_dynamic_shifting and not config.shift_terminal:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class ByFrame:
    """An attention processor that runs diffusers' own one latent frame at a time, frames laid into the batch.

    It knows the frames by the rotary tables (B·F, tokens of a frame, D), which ``isolate_frames`` shapes so.
    """

    def __init__(self, own: Any, handle: Any) -> None:
        self.own, self.handle = own, handle

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What diffusers' processor gives (B,S,D) where no token sees another frame."""
        assert encoder_hidden_states is None, "cross attention reads text alone"
        assert attention_mask is None
        assert image_rotary_emb is not None
        states = hidden_states.reshape(*image_rotary_emb[0].shape[:2], -1)  # (B F, tokens of a frame, D)
        return self.own(attn, states, None, None, image_rotary_emb).reshape(hidden_states.shape)


def isolate_frames(net: nn.Module, on: bool) -> None:
    """Let video tokens attend to their own latent frame alone until switched off, when all is as it was."""
    blocks: Any = net.transformer_blocks
    rope: Any = net.rope
    by_frame([block.attn1 for block in blocks], ByFrame, on, lambda: rope.register_forward_hook(_tables_by_frame))


def _tables_by_frame(rope: nn.Module, words: tuple[Any, ...], tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The rotary tables (B,S,D) with each frame in a row of its own, (B·F, tokens of a frame, D).

    A pipeline that tells positions says no count of frames: tokens of one frame are those of the first one's time.
    """
    states, frames, _, _, _, coords = words
    if frames is None:
        frames = states.shape[1] // int((coords[0, 0] == coords[0, 0, 0]).sum())
    return tuple(table.reshape(len(states) * frames, -1, table.shape[-1]) for table in tables)


_FULL = (("proj_in.", "patchify_proj."), ("time_embed.", "adaln_single."))


def full_name(name: str) -> str:
    """A parameter's name in diffusers -> its name in the authors' checkpoints."""
    for own, other in _FULL:
        if name.startswith(own):
            name = other + name.removeprefix(own)
    return name.replace(".norm_q.", ".q_norm.").replace(".norm_k.", ".k_norm.")
