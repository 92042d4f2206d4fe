"""diffusers' residual AutoencoderKLWan over a whole clip at once, for training.

Its own encode and decode walk through a clip four frames at a time and keep what the
causal convolutions have seen: the same numbers, in a third more time. Here its modules
see all frames together, zeros before the first one.
"""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor


def encode(vae: Any, clip: Tensor) -> Tensor:
    """Clips (B,3,T,H,W) in [-1,1], T = 4n+1 -> the latents' means (B,C,F,H,W), not
    normalised.
    """
    encoder = vae.encoder
    x = encoder.conv_in(patchify(clip, vae.config.patch_size))
    for block in encoder.down_blocks:
        shortcut = block.avg_shortcut(x)
        for resnet in block.resnets:
            x = resnet(x)
        if block.downsampler is not None:
            x = _halved(block.downsampler, x)
        x = x + shortcut
    x = encoder.conv_out(encoder.nonlinearity(encoder.norm_out(encoder.mid_block(x))))
    mean: Tensor = vae.quant_conv(x).chunk(2, dim=1)[0]
    return mean


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Latents (B,C,F,H,W) -> clips (B,3,T,H,W), not clamped: outside [-1,1] a clamp has
    no gradient.
    """
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        shortcut = (
            0.0
            if block.avg_shortcut is None
            else block.avg_shortcut(x, first_chunk=True)
        )
        for resnet in block.resnets:
            x = resnet(x)
        if block.upsampler is not None:
            x = _doubled(block.upsampler, x)
        x = x + shortcut
    x = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
    clip: Tensor = unpatchify(x, vae.config.patch_size)
    return clip


def _halved(resample: Any, x: Tensor) -> Tensor:
    """Half the rows and columns, then of the frames after the first one half."""
    x = _by_frame(resample.resample, x)
    if resample.mode == "downsample3d" and x.shape[2] > 1:
        x = torch.cat([x[:, :, :1], resample.time_conv(x)], dim=2)
    return x


def _doubled(resample: Any, x: Tensor) -> Tensor:
    """Each frame after the first becomes two, then twice the rows and columns."""
    if resample.mode == "upsample3d" and x.shape[2] > 1:
        # (B, 2, C, frames, H, W)
        pairs = resample.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))
        x = torch.cat(
            [x[:, :, :1], pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)], dim=2
        )
    return _by_frame(resample.resample, x)


def _by_frame(module: Any, x: Tensor) -> Tensor:
    batch = len(x)
    pictures = module(x.transpose(1, 2).flatten(0, 1))
    out: Tensor = pictures.unflatten(0, (batch, -1)).transpose(1, 2)
    return out
