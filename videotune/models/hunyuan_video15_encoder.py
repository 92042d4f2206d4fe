"""HunyuanVideo 1.5's VAE over a whole clip in a fraction of the memory of diffusers'.

A clip's first activations have several GB. diffusers holds half a dozen of them at once,
this holds two: norms and convolutions work on a few frames at a time, and the second
half of a residual block overwrites the first. Attention, in which a frame sees itself and
those before it, works frame by frame instead of under a mask of all tokens by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_FRAMES = 4
"""Frames that a convolution makes at a time."""

Prepare = Callable[["Tensor"], "Tensor"]


def save_memory(vae: Any) -> None:
    """Let diffusers' VAE work in less memory where no gradient is needed."""
    _replace_forward(vae.encoder, _encode)
    for coder in (vae.encoder, vae.decoder):
        for attention in coder.mid_block.attentions:
            _replace_forward(attention, _attend)


def _replace_forward(module: Any, function: Callable[[Any, Tensor], Tensor]) -> None:
    forward = type(module).forward
    # A bound method would keep the network in memory until the garbage collector runs.
    weak_module = ref(module)

    def run(hidden_states: Tensor) -> Tensor:
        called = forward if torch.is_grad_enabled() else function
        result: Tensor = called(weak_module(), hidden_states)
        return result

    module.forward = run


def _encode(encoder: Any, clip: Tensor) -> Tensor:
    """Encode (B,3,T,H,W) as diffusers' encoder does."""
    hidden = _convolve(encoder.conv_in, clip)
    for block in encoder.down_blocks:
        for resnet in block.resnets:
            hidden = _residual(resnet, hidden)
        for downsampler in block.downsamplers or ():
            hidden = _downsample(downsampler, hidden)

    middle = encoder.mid_block
    hidden = _residual(middle.resnets[0], hidden)
    for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
        hidden = _residual(resnet, attention(hidden))

    shortcut = hidden.unflatten(1, (-1, encoder.group_size)).mean(dim=2)
    return _convolve(encoder.conv_out, hidden, _activated(encoder.norm_out)) + shortcut


def _residual(resnet: Any, frames: Tensor) -> Tensor:
    """Apply a residual block to (B,C,T,H,W)."""
    hidden = _convolve(resnet.conv1, frames, _activated(resnet.norm1))
    prepare = _activated(resnet.norm2)
    # The last frames come first, because a convolution reads the frames before.
    for begin, end in reversed(list(_chunks(0, hidden.shape[2]))):
        residual = frames[:, :, begin:end]
        if resnet.conv_shortcut is not None:
            residual = resnet.conv_shortcut(residual)
        chunk = _convolve_chunk(resnet.conv2, hidden, begin, end, prepare)
        hidden[:, :, begin:end] = chunk.add_(residual)
    return hidden


def _activated(norm: Any) -> Prepare:
    """Return a function that normalises frames and activates them."""
    return lambda frames: torch.nn.functional.silu(norm(frames), inplace=True)


def _downsample(layer: Any, frames: Tensor) -> Tensor:
    """Pack neighbours of (B,C,T,H,W) into channels; but for the first frame also those of
    time, if the layer does so.
    """
    pack = layer._dcae_downsample_rearrange
    pieces = []
    begin = 0
    if layer.add_temporal_downsample:
        # The first frame has no neighbour in time, and fills its channels twice.
        packed = pack(_convolve_chunk(layer.conv, frames, 0, 1), r1=1)
        shortcut = pack(frames[:, :, :1], r1=1)
        shortcut = shortcut.unflatten(1, (-1, layer.group_size // 2)).mean(dim=2)
        pieces.append(torch.cat([packed, packed], dim=1) + shortcut)
        begin = 1

    stride = 2 if layer.add_temporal_downsample else 1
    for first, end in _chunks(begin, frames.shape[2]):
        packed = pack(_convolve_chunk(layer.conv, frames, first, end), r1=stride)
        shortcut = pack(frames[:, :, first:end], r1=stride)
        pieces.append(
            packed + shortcut.unflatten(1, (-1, layer.group_size)).mean(dim=2)
        )
    return torch.cat(pieces, dim=2)


def _attend(attention: Any, hidden: Tensor) -> Tensor:
    """Let each frame of (B,C,T,H,W) attend to itself and to those before it."""
    normed = attention.norm(hidden)
    layers = (attention.to_q, attention.to_k, attention.to_v)
    # (B,1,T·H·W,C)
    query, key, value = (
        layer(normed).flatten(2).transpose(1, 2)[:, None].contiguous()
        for layer in layers
    )

    tokens = hidden.shape[3] * hidden.shape[4]
    frames = []
    for end in range(tokens, query.shape[2] + 1, tokens):
        frames.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, end - tokens : end], key[:, :, :end], value[:, :, :end]
            )
        )
    attended = torch.cat(frames, dim=2)[:, 0].transpose(1, 2).reshape(hidden.shape)
    result: Tensor = attention.proj_out(attended) + hidden
    return result


def _convolve(causal: Any, frames: Tensor, prepare: Prepare | None = None) -> Tensor:
    """Apply a causal convolution to a few frames at a time.

    Args:
        causal: the convolution.
        frames: (B,C,T,H,W).
        prepare: what is done to the frames before.
    """
    out: Tensor | None = None
    for begin, end in _chunks(0, frames.shape[2]):
        chunk = _convolve_chunk(causal, frames, begin, end, prepare)
        if out is None:
            batch, channels, _, rows, columns = chunk.shape
            out = chunk.new_empty((batch, channels, frames.shape[2], rows, columns))
        out[:, :, begin:end] = chunk
    assert out is not None
    return out


def _convolve_chunk(
    causal: Any, frames: Tensor, begin: int, end: int, prepare: Prepare | None = None
) -> Tensor:
    """Return the frames from ``begin`` to ``end`` of a causal convolution.

    Each reads the frames before it that its kernel covers; before the first frame, it is
    repeated.
    """
    *sides, before, _ = causal.time_causal_padding
    first = begin - before
    chunk = frames[:, :, max(0, first) : end]
    if prepare is not None:
        chunk = prepare(chunk)
    padding = (*sides, max(0, -first), 0)
    chunk = torch.nn.functional.pad(chunk, padding, mode=causal.pad_mode)
    result: Tensor = causal.conv(chunk)
    return result


def _chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where chunks of frames begin and end."""
    for first in range(begin, end, CHUNK_FRAMES):
        yield first, min(end, first + CHUNK_FRAMES)
