"""HunyuanVideo's VAE over a whole clip, as its authors encode it, in two thirds of the
memory of diffusers' encoder.

A clip as a whole has activations of several GB. diffusers holds five of them at once,
this holds three: convolutions work on a few frames at a time, activations are applied
in place, and nothing keeps a block's input longer than the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

TILE_FRAMES = 64
"""Frames up to which the VAE encodes a clip as a whole.

Above, it encodes tiles of 65 frames, ``TILE_STRIDE`` apart, and blends them, as the
authors' does if it is told to tile. diffusers' own numbers, 16 and 12, give other
latents from 21 frames on.
"""

TILE_STRIDE = 48

CHUNK_FRAMES = 4
"""Frames that a convolution makes at a time."""


def encode_long_clips(vae: Any) -> None:
    """Let a VAE encode in the authors' tiles of time."""
    encode = type(vae).encode
    # A bound method would keep the network in memory until the garbage collector runs.
    weak_vae = ref(vae)

    def encode_in_long_tiles(clip: Tensor, **arguments: Any) -> Any:
        with _long_tiles(weak_vae()):
            return encode(weak_vae(), clip, **arguments)

    vae.encode = encode_in_long_tiles


@contextmanager
def _long_tiles(vae: Any) -> Iterator[None]:
    """Let a VAE work on ``TILE_FRAMES`` at a time within the block.

    Its decoding, in previews, keeps diffusers' tiles, which need less memory.
    """
    frames = vae.tile_sample_min_num_frames
    stride = vae.tile_sample_stride_num_frames
    vae.tile_sample_min_num_frames = TILE_FRAMES
    vae.tile_sample_stride_num_frames = TILE_STRIDE
    try:
        yield
    finally:
        vae.tile_sample_min_num_frames = frames
        vae.tile_sample_stride_num_frames = stride


def save_memory(encoder: Any) -> None:
    """Let diffusers' encoder work in less memory where no gradient is needed."""
    forward = type(encoder).forward
    weak_encoder = ref(encoder)

    def encode(clip: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            result: Tensor = forward(weak_encoder(), clip)
            return result
        return _encode(weak_encoder(), clip)

    encoder.forward = encode


def _encode(encoder: Any, clip: Tensor) -> Tensor:
    """Encode (B,3,T,H,W) as diffusers' encoder does."""
    hidden = _convolve(encoder.conv_in, clip)
    for block in encoder.down_blocks:
        for resnet in block.resnets:
            hidden = _residual(resnet, hidden)
        for downsampler in block.downsamplers or ():
            hidden = _convolve(downsampler.conv, hidden)

    hidden = encoder.mid_block(hidden)
    hidden = encoder.conv_norm_out(hidden)
    hidden = torch.nn.functional.silu(hidden, inplace=True)
    return _convolve(encoder.conv_out, hidden)


def _residual(resnet: Any, residual: Tensor) -> Tensor:
    """Apply a residual block."""
    hidden = torch.nn.functional.silu(resnet.norm1(residual), inplace=True)
    hidden = _convolve(resnet.conv1, hidden)
    hidden = torch.nn.functional.silu(resnet.norm2(hidden), inplace=True)
    hidden = _convolve(resnet.conv2, hidden)
    if resnet.conv_shortcut is not None:
        residual = _convolve(resnet.conv_shortcut, residual)
    return hidden.add_(residual)


def _convolve(causal: Any, frames: Tensor) -> Tensor:
    """Apply a causal convolution to a few frames at a time.

    Output t reads the frames from ``stride * t`` back to as many as the kernel has;
    before the first frame, it is repeated.
    """
    conv = causal.conv
    kernel = conv.kernel_size[0]
    stride = conv.stride[0]
    *sides, _, _ = causal.time_causal_padding
    count = (frames.shape[2] - 1) // stride + 1

    out: Tensor | None = None
    for begin in range(0, count, CHUNK_FRAMES):
        end = min(count, begin + CHUNK_FRAMES)
        first = begin * stride - (kernel - 1)
        last = (end - 1) * stride
        chunk = torch.nn.functional.pad(
            frames[:, :, max(0, first) : last + 1],
            (*sides, max(0, -first), 0),
            mode=causal.pad_mode,
        )
        made = conv(chunk)
        if out is None:
            batch, channels, _, rows, columns = made.shape
            out = made.new_empty((batch, channels, count, rows, columns))
        out[:, :, begin:end] = made
    assert out is not None
    return out
