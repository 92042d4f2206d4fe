"""diffusers' transformer and VAE of HiDream-I1, changed so that they train on clips of
one frame.
"""

from __future__ import annotations

from functools import partial, partialmethod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch
from videotune.memory.accelerator import has_streams

if TYPE_CHECKING:
    from torch import Tensor, nn


def make_trainable(net: nn.Module) -> nn.Module:
    """Let diffusers' transformer return (B,C,H,W) with gradients, in training and
    evaluation.

    In evaluation its routed experts run without gradients, so everything before them
    silently loses the gradient through them. In training its output is not
    unpatchified. Both no longer depend on the mode.
    """
    from diffusers.models.transformers.transformer_hidream_image import (
        MOEFeedForwardSwiGLU,
    )  # imports torch

    transformer: Any = net
    cls: Any = type(net)
    # Methods are bound to a copy of the facts: a reference to the network would be a
    # cycle, and the network could not be freed.
    facts = SimpleNamespace(config=transformer.config, max_seq=transformer.max_seq)
    transformer.patchify = partial(_patchify, cls, facts)
    # False: as diffusers does it in evaluation.
    transformer.unpatchify = lambda tokens, sizes, _: cls.unpatchify(
        facts, tokens, sizes, False
    )

    for module in net.modules():
        if isinstance(module, MOEFeedForwardSwiGLU):
            # no auxiliary loss, which is not used
            module.gate._force_inference_output = True
            is_meta = next(module.parameters()).is_meta
            forward = partialmethod(_routed, upper_bound=is_meta)
            # A new class rather than a bound method, which would be a cycle.
            module.__class__ = type(
                "Routed", (MOEFeedForwardSwiGLU,), {"forward": forward}
            )
    return net


def _patchify(
    cls: Any, facts: Any, latents: Tensor
) -> tuple[Tensor, Tensor | None, list[tuple[int, int]], Tensor]:
    """Patchify as diffusers does, but with sizes as numbers.

    diffusers' tensors of sizes would make the host wait for the device at each step.
    """
    tokens, mask, _, positions = cls.patchify(facts, latents)
    patch = facts.config.patch_size
    size = (latents.shape[2] // patch, latents.shape[3] // patch)
    return tokens, mask, [size] * len(latents), positions


def _routed(moe: Any, states: Tensor, upper_bound: bool) -> Tensor:
    """Compute diffusers' routed experts in training, bit for bit, with one wait for the
    device.

    diffusers waits once per expert. Here tokens are sorted by expert, and the number of
    tokens per expert is copied to the host while the shared experts compute.

    Args:
        moe: the layer.
        states: hidden states.
        upper_bound: assign all tokens to as few experts as possible, which needs the
            most memory; for the meta device, where the numbers are unknown.
    """
    from videotune.memory.host_weights import to_host  # imports torch

    expert_ids, weight, _ = moe.gate(states)
    all_ids = torch.arange(len(moe.experts), device=states.device)
    counts = (expert_ids.view(-1, 1) == all_ids).sum(0)
    copied = None
    if has_streams(states.device) and not upper_bound:
        counts, copied = to_host(counts)
    shared = moe.shared_experts(states)

    experts_per_token = moe.num_activated_experts
    order = expert_ids.flatten().argsort(stable=True)
    rows = states.view(-1, states.shape[-1]).repeat_interleave(
        experts_per_token, dim=0
    )[order]
    if copied is not None:
        copied.synchronize()
    if upper_bound:
        unused_experts = len(moe.experts) - experts_per_token
        sizes = [len(rows) // experts_per_token] * experts_per_token + [
            0
        ] * unused_experts
    else:
        sizes = counts.tolist()

    outputs = []
    for expert, part in zip(moe.experts, rows.split(sizes), strict=True):
        outputs.append(expert(part))
    joined_outputs = torch.cat(outputs)
    del outputs
    mixed = joined_outputs[order.argsort()]
    del joined_outputs
    weighted = mixed.view(*weight.shape, -1) * weight.unsqueeze(-1)
    routed = weighted.sum(dim=1).view(states.shape).to(states.dtype)
    return routed + shared


def one_frame_vae(vae: Any) -> nn.Module:
    """Wrap a VAE of images so that it takes clips of one frame, (B,C,1,H,W)."""

    class OneFrameVAE(torch.nn.Module):
        """Encode and decode clips of one frame."""

        def __init__(self) -> None:
            super().__init__()
            self.vae = vae
            self.config = vae.config
            self.enable_tiling = vae.enable_tiling
            self.disable_tiling = vae.disable_tiling

        def encode(self, frames: Tensor) -> Any:
            latent = vae.encode(frames[:, :, 0]).latent_dist
            distribution = SimpleNamespace(
                mean=latent.mean[:, :, None], logvar=latent.logvar[:, :, None]
            )
            return SimpleNamespace(latent_dist=distribution)

        def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
            images = vae.decode(latents[:, :, 0], return_dict=False)[0]
            return (images[:, :, None],)

    return OneFrameVAE()
