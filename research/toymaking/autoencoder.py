"""The toy's autoencoder: Wan 2.2's kind, small, trained on drawn clips by a plain loop
that goes on where it was killed.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from numpy.typing import NDArray
from torch import Tensor, nn
from toymaking.kept import keep, kept
from toymaking.recipe import Recipe
from toymaking.whole_clip import decode, encode
from toymaking.wide import draw_wide, striped

from videotune.files import write_json
from videotune.rng import generator_for, torch_seed
from videotune.toy.shapes import HELD_OUT, KNOWN, PALETTE, Look, draw_clip

STAGES = ((0.12, 1, 16), (0.24, 5, 5), (1.0, 17, 2))
"""(until this share of the steps, frames, clips a step): pictures first, as most of
what is learnt there is cheap.
"""
RATE = 3e-3
WARMUP = 40
DECAY_FROM = 0.4
LATENT_NOISE = 0.1
"""Added to the latents, so that the decoder forgives what a transformer gets slightly
wrong.
"""
SUBJECT_WEIGHT = 4.0
"""More weight on the shape and 2 pixels about it: most of the picture is flat."""
SIZE_WEIGHT = 1e-3


def train(out: Path, recipe: Recipe) -> Path:
    """Train and return the folder of the finished autoencoder; one that is finished is
    left as it is.
    """
    finished = out / "autoencoder"
    if (finished / "config.json").is_file():
        return finished
    vae = fresh(recipe)
    state_file = out / "work" / "autoencoder.pt"
    optimizers = Optimizers(vae)
    state = kept(state_file)
    curve = []
    begun = 0
    if state is not None:
        vae.load_state_dict(state["weights"])
        optimizers.load(state["optimizers"])
        curve = state["curve"]
        begun = state["step"]
        print(f"autoencoder: goes on after step {begun}", flush=True)
    seconds = curve[-1]["seconds"] if curve else 0.0
    for step in range(begun + 1, recipe.autoencoder_steps + 1):
        since = time.process_time()
        loss = update(vae, optimizers, recipe, step)
        seconds += time.process_time() - since
        if step % recipe.keep_every == 0 or step == recipe.autoencoder_steps:
            line = {
                "step": step,
                "seconds": round(seconds, 1),
                "loss": round(loss, 4),
            } | quick_look(vae, min(2, recipe.scored_clips))
            curve.append(line)
            print(f"autoencoder: {line}", flush=True)
            state = {
                "step": step,
                "weights": vae.state_dict(),
                "optimizers": optimizers.state(),
                "curve": curve,
            }
            keep(state_file, state)
    measure_statistics(vae, recipe)
    vae.save_pretrained(out / "work" / "autoencoder")
    write_json(out / "work" / "autoencoder" / "curve.json", curve)
    (out / "work" / "autoencoder").rename(finished)
    return finished


def fresh(recipe: Recipe) -> Any:
    """A random autoencoder, of 2.5 million parameters as shipped: 17x64x64 pixels to
    5x8x8 latents of 12 channels.
    """
    torch.manual_seed(torch_seed(recipe.seed, "autoencoder"))
    return AutoencoderKLWan(
        base_dim=recipe.autoencoder_width,
        decoder_base_dim=recipe.autoencoder_width,
        z_dim=recipe.channels,
        dim_mult=[1, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
        latents_mean=[0.0] * recipe.channels,
        latents_std=[1.0] * recipe.channels,
    )


class Optimizers:
    """torch's Muon on the kernels, each seen as a matrix (out, in x space x time), and
    AdamW on the rest.
    """

    def __init__(self, vae: nn.Module) -> None:
        self.parameters = list(vae.parameters())
        kernels = [
            p for p in self.parameters if p.ndim > 2 and min(len(p), p[0].numel()) >= 8
        ]
        others = [
            p for p in self.parameters if not any(p is kernel for kernel in kernels)
        ]
        self.views = [
            (kernel, nn.Parameter(kernel.detach().flatten(1))) for kernel in kernels
        ]  # the same memory
        matrices = [matrix for _, matrix in self.views]
        self.muon = torch.optim.Muon(
            matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(
            others, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0
        )

    def step(self, loss: Tensor, rate: float) -> None:
        """One update at this rate, the gradient clipped to norm 1."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for kernel, matrix in self.views:
            matrix.grad = None if kernel.grad is None else kernel.grad.flatten(1)
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def state(self) -> dict[str, Any]:
        """What has to be kept of both."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Put back what was kept."""
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def update(vae: Any, optimizers: Optimizers, recipe: Recipe, step: int) -> float:
    """One step on clips that are drawn for it alone; its loss."""
    share = (step - 1) / recipe.autoencoder_steps
    frames, count = next(
        (frames, count) for until, frames, count in STAGES if share < until
    )
    clip = batch(recipe.seed, step, frames, count)
    mean = encode(vae, clip)
    noise = generator_for(recipe.seed, "autoencoder latents", step).standard_normal(
        mean.shape, dtype=np.float32
    )
    error = decode(vae, mean + LATENT_NOISE * torch.from_numpy(noise)) - clip
    loss = (
        (0.5 * error.abs() + error.square()) * subject_weight(clip)
    ).mean() + SIZE_WEIGHT * mean.square().mean()
    decay = 1.0 if share < DECAY_FROM else max(0.01, (1 - share) / (1 - DECAY_FROM))
    optimizers.step(loss, RATE * min(1.0, step / WARMUP) * decay)
    return float(loss.detach())


def batch(seed: int, step: int, frames: int, count: int) -> Tensor:
    """(count,3,frames,64,64): every other clip shows what the transformer is taught,
    the others anything.
    """
    clips = []
    for index in range(count):
        rng = generator_for(seed, "autoencoder", step, index)
        drawn = (
            draw_wide(rng)
            if index % 2
            else draw_clip(rng, *KNOWN[rng.integers(len(KNOWN))])
        )
        start = int(rng.integers(len(drawn) - frames + 1))
        clips.append(to_model(drawn[start : start + frames]))
    return torch.stack(clips)


def to_model(frames: NDArray[np.uint8]) -> Tensor:
    """Frames uint8 (T,H,W,3) -> (3,T,H,W) in [-1,1]."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1


def subject_weight(clip: Tensor) -> Tensor:
    """(B,1,T,H,W): what differs from the top left corner, grown by 2 pixels, counts
    more.
    """
    stands_out = ((clip - clip[..., :1, :1]).abs().amax(1, keepdim=True) > 0.15).float()
    return 1 + SUBJECT_WEIGHT * nn.functional.max_pool3d(
        stands_out, (1, 5, 5), 1, (0, 2, 2)
    )


def held_out_clips(part: str, count: int) -> Tensor:
    """(count,3,17,64,64) that no stage is trained on: "base" looks that were held out,
    the "concept", or it "striped".
    """
    clips = []
    for index in range(count):
        rng = generator_for(0, "held out", part, index)
        look = HELD_OUT[index * 7 % len(HELD_OUT)]
        concept: Look = ("orange", "diamond", look[2])
        colour, shape, direction = look if part == "base" else concept
        stripes = partial(
            striped, colours=(PALETTE[colour], (245, 230, 200)), period=10.0
        )
        clips.append(
            to_model(
                draw_clip(
                    rng, stripes if part == "striped" else colour, shape, direction
                )
            )
        )
    return torch.stack(clips)


@torch.no_grad()
def rebuilt(vae: Any, clips: Tensor) -> Tensor:
    """Clips after encoding and decoding by the autoencoder's own calls, one at a time."""
    return torch.cat(
        [vae.decode(vae.encode(clip[None]).latent_dist.mode()).sample for clip in clips]
    )


def psnr(clips: Tensor, others: Tensor) -> float:
    """Peak signal-to-noise ratio in dB over the range [-1,1], the mean over clips."""
    error = ((clips - others) / 2).square().mean((1, 2, 3, 4))
    return float((-10 * error.log10()).mean())


def quick_look(vae: Any, count: int) -> dict[str, float]:
    """PSNR of a few held-out clips, for the curve."""
    parts = {
        part: held_out_clips(part, count) for part in ("base", "concept", "striped")
    }
    return {
        part: round(psnr(clips, rebuilt(vae, clips)), 2)
        for part, clips in parts.items()
    }


@torch.no_grad()
def measure_statistics(vae: Any, recipe: Recipe) -> None:
    """Write into the config the mean and deviation of each latent channel over the
    looks that are taught.
    """
    clips = [
        draw_clip(generator_for(recipe.seed, "statistics", index), *look)
        for index, look in enumerate(KNOWN[: recipe.looks])
    ]
    latents = torch.cat(
        [vae.encode(to_model(clip)[None]).latent_dist.mode() for clip in clips]
    )
    mean, deviation = (
        value.tolist()
        for value in (latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4)))
    )
    vae.register_to_config(latents_mean=mean, latents_std=deviation)
