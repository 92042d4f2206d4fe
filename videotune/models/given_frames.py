"""Frames that samples are given, for pipelines that encode them by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch
from videotune.models.pipelines import vae_stand_in

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.model_spec import ModelSpec
    from videotune.types import SampleRequest


def beginning_of(request: SampleRequest) -> Tensor | None:
    """Return the latents (B,C,n,H,W) with which samples begin, or None."""
    beginning = request.first
    if request.known is not None and request.known_mask is not None:
        cells_of_frame = request.known_mask[0, 0].flatten(1)
        is_known = cells_of_frame.all(1)
        # What is known only later, such as a suffix, is not at the beginning.
        is_at_beginning = is_known.long().cumprod(0)
        count = int(is_at_beginning.sum())
        beginning = request.known[:, :, :count]

    if beginning is None or not beginning.shape[2]:
        return None
    return beginning


def vae_with_results(spec: ModelSpec, results: Sequence[Tensor], device: Any) -> Any:
    """Return a stand-in of the VAE whose ``encode`` returns ``results`` in turn."""
    first = None
    if results:
        first = results[0].float().to(device)
    vae = vae_stand_in(spec, first, device)
    remaining = iter(results)

    def encode_next(pixels: Tensor) -> Any:
        latents = next(remaining).float().to(device)
        return vae_stand_in(spec, latents, device).encode(pixels)

    vae.encode = encode_next
    return vae


def with_given_cells(latents: Tensor, request: SampleRequest) -> Tensor:
    """Return latents with the cells that samples were given, exactly as they were."""
    if request.first is not None:
        first = request.first.to(latents)
        later = latents[:, :, 1:]
        latents = torch.cat([first, later], dim=2)

    if request.known is not None and request.known_mask is not None:
        is_known = request.known_mask.to(latents.device)
        known = request.known.to(latents)
        latents = known.where(is_known, latents)
    return latents
