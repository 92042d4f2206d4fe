"""Attention that stays within each latent frame, for a run that trains on frames alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from videotune.lazy import diffusers, torch

if TYPE_CHECKING:
    from torch import Tensor


def isolate(attentions: Sequence[Any], kind: type, on: bool, hook: Callable[[], Any]) -> None:
    """Put a processor ``kind(own, handle)`` around that of each attention, or take it off again.

    ``hook`` registers what tells them where frames lie; its handle goes with them, and is removed with them.
    """
    inside = [attn for attn in attentions if isinstance(attn.processor, kind)]
    if on and not inside:
        handle = hook()
        for attn in attentions:
            attn.set_processor(kind(attn.processor, handle))
    if not on:
        for attn in inside:
            attn.processor.handle.remove()
            attn.set_processor(attn.processor.own)


class FrameProcessor:
    """An attention processor over video tokens alone: diffusers' ``own``, with frames in the batch.

    It knows the frames by the rotary tables (B·F, tokens of a frame, ...), which a hook of the family shapes so.
    """

    def __init__(self, own: Any, handle: Any) -> None:
        self.own, self.handle = own, handle

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What diffusers' processor gives (B,S,D) where no token sees another frame."""
        assert encoder_hidden_states is None, "cross attention reads text alone"
        assert attention_mask is None
        assert tables is not None
        states = hidden_states.reshape(*tables[0].shape[:2], -1)  # (B·F, tokens of a frame, D)
        return self.own(attn, states, None, None, tables).reshape(hidden_states.shape)


def joint_attention(
    video: Sequence[Tensor],
    text: Sequence[Tensor],
    frames: int,
    mask: Tensor | None = None,
    text_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Joint attention in which a video token sees its own frame and the text, and text sees text alone.

    ``video`` and ``text``: q, k and v, (B,F·n,h,d) and (B,L,h,d); ``mask`` (B,1,1,L) shows a part of the text;
    ``text_first``: the order of the keys. Returns both attended, (B,F·n,h·d) and (B,L,h·d).
    """
    attend = diffusers.models.attention_dispatch.dispatch_attention_fn

    def by_frame(x: Tensor) -> Tensor:
        return x.unflatten(1, (frames, -1)).flatten(0, 1)

    (q, *rest), tokens, wide = video, video[0].shape[1] // frames, None
    pairs = [(by_frame(x), y.repeat_interleave(frames, dim=0)) for x, y in zip(rest, text[1:], strict=True)]
    keys = [torch.cat(pair[::-1] if text_first else pair, dim=1) for pair in pairs]
    if mask is not None:
        wide = torch.cat([mask.new_ones(*mask.shape[:3], tokens), mask], dim=3).repeat_interleave(frames, dim=0)
    seen = attend(by_frame(q), *keys, attn_mask=wide).unflatten(0, (len(q), frames)).flatten(1, 2)
    return seen.flatten(2), attend(*text, attn_mask=mask).flatten(2)
