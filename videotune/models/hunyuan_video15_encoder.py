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
    first_resnet, *later_resnets = middle.resnets
    hidden = _residual(first_resnet, hidden)
    for attention, resnet in zip(middle.attentions, later_resnets, strict=True):
        attended = attention(hidden)
        hidden = _residual(resnet, attended)

    shortcut = _mean_of_groups(hidden, encoder.group_size)
    prepare = _activated(encoder.norm_out)
    return _convolve(encoder.conv_out, hidden, prepare) + shortcut


def _residual(resnet: Any, frames: Tensor) -> Tensor:
    """Apply a residual block to (B,C,T,H,W)."""
    hidden = _convolve(resnet.conv1, frames, _activated(resnet.norm1))
    prepare = _activated(resnet.norm2)
    # The last frames come first, because a convolution reads the frames before.
    num_frames = hidden.shape[2]
    chunks = list(_chunks(0, num_frames))
    for begin, end in reversed(chunks):
        residual = frames[:, :, begin:end]
        if resnet.conv_shortcut is not None:
            residual = resnet.conv_shortcut(residual)
        chunk = _convolve_chunk(resnet.conv2, hidden, begin, end, prepare)
        chunk = chunk.add_(residual)
        hidden[:, :, begin:end] = chunk
    return hidden


def _activated(norm: Any) -> Prepare:
    """Return a function that normalises frames and activates them."""

    def activate(frames: Tensor) -> Tensor:
        normed = norm(frames)
        return torch.nn.functional.silu(normed, inplace=True)

    return activate


def _mean_of_groups(frames: Tensor, group_size: int) -> Tensor:
    """Return the means of neighbouring channels of (B,C,T,H,W), ``group_size`` each."""
    grouped = frames.unflatten(1, (-1, group_size))
    return grouped.mean(dim=2)


def _downsample(layer: Any, frames: Tensor) -> Tensor:
    """Pack neighbours of (B,C,T,H,W) into channels; but for the first frame also those of
    time, if the layer does so.
    """
    pack = layer._dcae_downsample_rearrange
    pieces = []
    begin = 0
    if layer.add_temporal_downsample:
        # The first frame has no neighbour in time, and fills its channels twice.
        convolved = _convolve_chunk(layer.conv, frames, 0, 1)
        packed = pack(convolved, r1=1)
        packed_twice = torch.cat([packed, packed], dim=1)
        first_frame = frames[:, :, :1]
        shortcut = pack(first_frame, r1=1)
        shortcut = _mean_of_groups(shortcut, layer.group_size // 2)
        pieces.append(packed_twice + shortcut)
        begin = 1

    stride = 2 if layer.add_temporal_downsample else 1
    num_frames = frames.shape[2]
    for first, end in _chunks(begin, num_frames):
        convolved = _convolve_chunk(layer.conv, frames, first, end)
        packed = pack(convolved, r1=stride)
        chunk = frames[:, :, first:end]
        shortcut = pack(chunk, r1=stride)
        shortcut = _mean_of_groups(shortcut, layer.group_size)
        pieces.append(packed + shortcut)
    return torch.cat(pieces, dim=2)


def _attend(attention: Any, hidden: Tensor) -> Tensor:
    """Let each frame of (B,C,T,H,W) attend to itself and to those before it."""
    normed = attention.norm(hidden)
    query = _tokens(attention.to_q(normed))
    key = _tokens(attention.to_k(normed))
    value = _tokens(attention.to_v(normed))

    rows, columns = hidden.shape[3:]
    tokens_per_frame = rows * columns
    total_tokens = query.shape[2]
    frames = []
    for end in range(tokens_per_frame, total_tokens + 1, tokens_per_frame):
        begin = end - tokens_per_frame
        frame = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, :end],
            value[:, :, :end],
        )
        frames.append(frame)

    attended = torch.cat(frames, dim=2)[:, 0]
    attended = attended.transpose(1, 2).reshape(hidden.shape)
    result: Tensor = attention.proj_out(attended) + hidden
    return result


def _tokens(states: Tensor) -> Tensor:
    """Return (B,C,T,H,W) as the tokens of a single head, (B,1,T·H·W,C)."""
    tokens = states.flatten(2).transpose(1, 2)
    return tokens[:, None].contiguous()


def _convolve(causal: Any, frames: Tensor, prepare: Prepare | None = None) -> Tensor:
    """Apply a causal convolution to a few frames at a time.

    Args:
        causal: the convolution.
        frames: (B,C,T,H,W).
        prepare: what is done to the frames before.
    """
    num_frames = frames.shape[2]
    out: Tensor | None = None
    for begin, end in _chunks(0, num_frames):
        chunk = _convolve_chunk(causal, frames, begin, end, prepare)
        if out is None:
            batch, channels, _, rows, columns = chunk.shape
            size = (batch, channels, num_frames, rows, columns)
            out = chunk.new_empty(size)
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
    first_present = max(0, first)
    num_repeated = max(0, -first)

    chunk = frames[:, :, first_present:end]
    if prepare is not None:
        chunk = prepare(chunk)
    padding = (*sides, num_repeated, 0)
    chunk = torch.nn.functional.pad(chunk, padding, mode=causal.pad_mode)
    result: Tensor = causal.conv(chunk)
    return result


def _chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where chunks of frames begin and end."""
    for first in range(begin, end, CHUNK_FRAMES):
        chunk_end = min(end, first + CHUNK_FRAMES)
        yield first, chunk_end
