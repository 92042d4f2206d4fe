"""Previews: the family's own diffusers pipeline over the very network that trains, and nothing of training moved.

Prompts come as cached text states, so no text encoder is loaded; noise has seeds of its own; the VAE is brought up after
all transformer passes, and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch

from videotune.files import digest
from videotune.models.base import DiffusersModel
from videotune.types import ClipShape, LatentDistribution, SampleRequest

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


@dataclass(frozen=True)
class SampleSettings:
    """The shape of a sample, denoising steps, guidance (above 1: twice the passes), and the scheduler's shift.

    ``guidance_2``: the second expert's (None: the same); ``temporal_attention`` False: frames are isolated; ``negative``:
    the prompt that guidance leads away from.
    """

    shape: ClipShape
    steps: int
    guidance: float
    shift: float | None = None
    guidance_2: float | None = None
    temporal_attention: bool = True
    negative: str = ""


def draw(
    family: DiffusersModel,
    nets: Mapping[str, nn.Module],
    settings: SampleSettings,
    text: Callable[[str], Mapping[str, Tensor]],
    samples: Sequence[tuple[str, int]],
    on_done: Callable[[int], object] | None = None,
    first: Sequence[LatentDistribution] | None = None,
    isolated: bool = False,
) -> list[Tensor]:
    """Latents (C,F,H,W) of each (prompt, seed).

    ``text`` gives a prompt's cached states; ``first`` the clip or image on whose first frame each is conditioned (None:
    none); ``isolated`` says that the networks' frames are isolated now, which they are again afterwards.
    """
    out: list[Tensor] = []
    with (
        torch.no_grad(),
        closing(_Ready(family, nets, isolated, not settings.temporal_attention)) as ready,
    ):
        for place, (prompt, seed) in enumerate(samples):
            image = first[place] if first else None
            extras = {} if image is None else image.extras
            latent = (
                image.mean[None, :, :1]
                if image is not None and family.spec.image_conditioning == "replace"
                else None
            )
            conditioning = family.condition([{**text(prompt), **extras}])
            unconditional = (
                family.condition([{**text(settings.negative), **extras}])
                if settings.guidance > 1
                else None
            )
            request = SampleRequest(
                settings.shape,
                settings.steps,
                settings.guidance,
                (seed,),
                settings.shift,
                settings.guidance_2,
                latent,
            )
            out += family.sample(ready, conditioning, unconditional, request).unbind(0)
            if on_done:
                on_done(len(out))
    return out


class _Ready(Mapping[str, "nn.Module"]):
    """``nets``, each in evaluation and with its frames isolated or not, from its first look-up on.

    It keeps no network in memory: ``nets`` may let one go.
    """

    def __init__(
        self,
        family: DiffusersModel,
        nets: Mapping[str, nn.Module],
        isolated: bool,
        isolate: bool,
    ) -> None:
        self.family = family
        self.nets = nets
        self.isolated = isolated
        self.isolate = isolate
        self.met: list[tuple[ref[nn.Module], bool]] = []

    def __getitem__(self, name: str) -> nn.Module:
        net = self.nets[name]
        if not any(known() is net for known, _ in self.met):
            self.met.append((ref(net), net.training))
            net.eval()
            if self.isolate != self.isolated:
                self.family.isolate_frames(net, self.isolate)
        return net

    def __iter__(self) -> Iterator[str]:
        return iter(self.nets)

    def __len__(self) -> int:
        return len(self.nets)

    def close(self) -> None:
        """Those that still live are as they were."""
        for known, training in self.met:
            net = known()
            if net is not None:
                net.train(training)
                if self.isolate != self.isolated:
                    self.family.isolate_frames(net, self.isolated)


def decode(
    family: DiffusersModel, latents: Sequence[Tensor], tiled: bool = False
) -> list[np.ndarray]:
    """Latents -> uint8 frames (T,H,W,3), by a VAE that is loaded for this and freed."""
    try:
        return [to_frames(family.decode(one, tiled)) for one in latents]
    finally:
        family.free("vae")


def to_frames(pixels: Tensor) -> np.ndarray:
    """(3,T,H,W) in [-1,1] -> uint8 (T,H,W,3), rounded as diffusers' video processor does."""
    return (
        ((pixels / 2 + 0.5).clamp(0, 1) * 255)
        .round()
        .byte()
        .permute(1, 2, 3, 0)
        .contiguous()
        .numpy()
    )


def file_name(step: int, prompt: str, seed: int) -> str:
    """Says which step, prompt and seed a sample shows."""
    return f"step-{step:06d}-{digest(prompt)[:8]}-seed{seed}.mp4"
