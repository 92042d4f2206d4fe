"""Previews: the family's own diffusers pipeline over the very network that trains, and nothing of training moved.

Prompts come as cached text states, so no text encoder is loaded; noise has seeds of its own; the VAE is brought up after
all transformer passes, and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from videotune.files import digest, write_whole
from videotune.types import ClipShape, Condition, Family, SampleRequest

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


@dataclass(frozen=True)
class SampleSettings:
    """The shape of a sample, denoising steps, guidance (above 1: twice the passes), and the scheduler's shift."""

    shape: ClipShape
    steps: int
    guidance: float
    shift: float | None = None


def draw(
    family: Family,
    net: nn.Module,
    settings: SampleSettings,
    condition: Callable[[Sequence[str]], Condition],
    prompts: Sequence[str],
    seeds: Sequence[int],
    batch: int = 1,
    on_done: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """Latents (C,F,H,W) of each prompt with its seed; ``batch`` prompts at a time, which changes rounding alone."""
    import torch

    training = net.training
    net.eval()
    out: list[Tensor] = []
    try:
        with torch.no_grad():
            for lo in range(0, len(prompts), batch):
                words = list(prompts[lo : lo + batch])
                uncond = condition([""] * len(words)) if settings.guidance > 1 else None
                request = SampleRequest(
                    settings.shape, settings.steps, settings.guidance, tuple(seeds[lo : lo + batch]), settings.shift
                )
                out += family.sample(net, condition(words), uncond, request).unbind(0)
                if on_done:
                    on_done(len(out))
    finally:
        net.train(training)
    return out


def decode(family: Family, latents: Sequence[Tensor]) -> list[np.ndarray]:
    """Latents -> uint8 frames (T,H,W,3), by a VAE that is loaded for this and freed."""
    try:
        return [to_frames(family.decode(one)) for one in latents]
    finally:
        family.free("vae")


def to_frames(pixels: Tensor) -> np.ndarray:
    """(3,T,H,W) in [-1,1] -> uint8 (T,H,W,3), rounded as diffusers' video processor does."""
    return ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 3, 0).contiguous().numpy()


def file_name(step: int, prompt: str, seed: int) -> str:
    """Says which step, prompt and seed a sample shows."""
    return f"step-{step:06d}-{digest(prompt)[:8]}-seed{seed}.mp4"


def write_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write uint8 frames (T,H,W,3) as H.264 that browsers play, at the given frames a second."""
    import av

    def write(aside: Path) -> None:
        with av.open(str(aside), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
            stream.width, stream.height = frames.shape[2] // 2 * 2, frames.shape[1] // 2 * 2
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": "16", "preset": "medium"}
            for image in frames[:, : stream.height, : stream.width]:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode())

    write_whole(path, write, durable=False)


def conditions(family: Family, states: Mapping[str, Mapping[str, Tensor]]) -> Callable[[Sequence[str]], Condition]:
    """Prompt -> condition, from states that were made once."""
    return lambda prompts: family.condition([states[prompt] for prompt in prompts])
