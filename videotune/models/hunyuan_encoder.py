"""HunyuanVideo's VAE encoder over a whole clip: diffusers' result in two thirds of its
memory.

A clip as a whole has activations of several GB. diffusers holds five of them at once,
this holds three: convolutions work on a few frames at a time, activations are applied
in place, and nothing keeps a block's input longer than the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_FRAMES = 4
"""Frames that a convolution makes at a time."""


def save_memory(encoder: Any) -> None:
    """Let diffusers' encoder work in less memory where no gradient is needed."""
    forward = type(encoder).forward
    # A bound method would keep the network in memory until the garbage collector runs.
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
