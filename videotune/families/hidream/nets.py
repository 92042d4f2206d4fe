"""HiDream's transformer made ready to train: experts that carry gradients, one form of output, experts for a plan."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def ready(net: nn.Module) -> nn.Module:
    """diffusers' transformer, whose answer is (B,C,H,W) and carries its gradients whether it is set to train or not.

    As it comes, outside of ``.train()`` its routed experts run without gradients, so that all before them silently loses
    what goes through them; in ``.train()`` its answer is not unpatchified. Both branches of both are diffusers' own, and
    which of them runs no longer hangs on the mode. Without weights the experts are those of a plan (``balanced``).
    """
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    known: Any = net
    plain, kind = SimpleNamespace(config=known.config, max_seq=known.max_seq), type(net)  # no cycle, so it can be freed
    known.patchify = partial(_patchify, kind, plain)
    known.unpatchify = partial(_unpatchify, kind, plain)
    for module in net.modules():
        if isinstance(module, MOEFeedForwardSwiGLU):
            module._force_inference_output = False
            module.gate._force_inference_output = True  # no auxiliary loss, which nothing reads
            module.register_forward_pre_hook(_carry)
            if next(module.parameters()).is_meta:
                module.forward = partial(balanced, module)
    return net


def _carry(module: nn.Module, _: Any) -> None:
    """Before the experts run: the branch through which gradients go. A block that is computed again takes it too."""
    module.training = True


def _patchify(kind: Any, plain: Any, latents: Tensor) -> tuple[Tensor, Tensor | None, list[tuple[int, int]], Tensor]:
    """diffusers' own, but sizes are numbers: its tensors would make the host wait for the device at every step."""
    tokens, mask, _, places = kind.patchify(plain, latents)
    patch = plain.config.patch_size
    return tokens, mask, [(latents.shape[2] // patch, latents.shape[3] // patch)] * len(latents), places


def _unpatchify(kind: Any, plain: Any, tokens: Tensor, sizes: list[tuple[int, int]], _: bool) -> Tensor:
    """diffusers' own of evaluation: tokens (B,S,p·p·C) -> (B,C,H,W)."""
    return kind.unpatchify(plain, tokens, sizes, False)


def balanced(moe: Any, states: Tensor) -> Tensor:
    """What stands in for routed experts on tensors without numbers: every expert gets as many tokens as the others.

    What it holds in memory and computes is what diffusers' own branch of training does when tokens are dealt out evenly.
    Where no expert trains, the first takes them all: as much work, told in a quarter of the calls.
    """
    torch, count = _torch(), moe.num_activated_experts
    _, weight, _ = moe.gate(states)
    rows = states.view(-1, states.shape[-1]).repeat_interleave(count, dim=0)
    mixed, first = torch.empty_like(rows), 0
    experts = moe.experts if any(p.requires_grad for p in moe.experts.parameters()) else moe.experts[:1]
    for expert, part in zip(experts, rows.tensor_split(len(experts)), strict=True):
        mixed[first : first + len(part)] = expert(part.clone())
        first += len(part)
    routed = (mixed.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1).view(states.shape).to(states.dtype)
    return routed + moe.shared_experts(states)


def pictures(vae: Any) -> nn.Module:
    """A VAE of pictures that takes clips of one frame, (B,C,1,H,W), as a plan hands them to it."""
    torch = _torch()

    class Pictures(torch.nn.Module):  # type: ignore[name-defined]
        """Frames in, frames out."""

        def __init__(self) -> None:
            super().__init__()
            self.vae = vae

        def encode(self, frames: Tensor) -> Any:
            return vae.encode(frames[:, :, 0])

        def decode(self, latents: Tensor) -> Any:
            return vae.decode(latents[:, :, 0])

        def enable_tiling(self) -> None:
            vae.enable_tiling()

        def disable_tiling(self) -> None:
            vae.disable_tiling()

    return Pictures()


def _torch() -> Any:
    import torch

    return torch
