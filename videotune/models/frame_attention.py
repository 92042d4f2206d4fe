"""Attention that stays within each latent frame, for a run that trains on frames alone.

diffusers' own attention runs whole; its one product of queries, keys and values is taken frame by frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def isolate(
    net: nn.Module, attentions: Sequence[Any], on: bool, frames_of: Callable[..., int], text_first: bool = False
) -> None:
    """Let video tokens see their own frame and the text, and text see text alone, until switched off.

    ``frames_of``: from what the network is called with to the count of frames that tokens lie in; a block that is computed
    again for its gradients goes by the last call. ``text_first``: the text's tokens stand in front of the video's.
    """
    inside = [attn for attn in attentions if isinstance(attn.processor, FrameProcessor)]
    if on and not inside:
        seen = SimpleNamespace(frames=0)

        def look(_: Any, words: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.frames = frames_of(**({"hidden_states": words[0]} if words else {}), **named)

        handle = net.register_forward_pre_hook(look, with_kwargs=True)
        for attn in attentions:
            attn.set_processor(FrameProcessor(attn.processor, seen, text_first, handle))
    if not on:
        for attn in inside:
            attn.processor.handle.remove()
            attn.set_processor(attn.processor.own)


class FrameProcessor:
    """An attention processor around diffusers' ``own``."""

    def __init__(self, own: Any, seen: SimpleNamespace, text_first: bool, handle: Any) -> None:
        self.own, self.seen, self.text_first, self.handle = own, seen, text_first, handle

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """What ``own`` gives of video tokens (B,S,D), and of text (B,L,D) where the attention is over both."""
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        with _product_by_frame()(self.seen.frames, text, self.text_first) as product:
            out = self.own(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        assert product.calls == 1, "this attention takes another way than torch's own product"
        return out


@cache
def _product_by_frame() -> Any:
    class ByFrame(torch.overrides.TorchFunctionMode):
        """In this block of this thread torch's attention product is taken frame by frame."""

        def __init__(self, frames: int, text: int, text_first: bool) -> None:
            super().__init__()
            self.frames, self.text, self.text_first, self.calls = frames, text, text_first, 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.nn.functional.scaled_dot_product_attention:
                return func(*args, **(kwargs or {}))
            self.calls += 1
            return self.attend(func, *args, **(kwargs or {}))

        def attend(
            self, product: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **named: Any
        ) -> Tensor:
            """Queries, keys and values (B,h,S,d), of which the mask (B,1,1,S) shows a part of the text."""
            video, text = zip(*map(self.split, (query, key, value)), strict=True)
            q, k, v = (x.unflatten(2, (self.frames, -1)).transpose(1, 2).flatten(0, 1) for x in video)  # (B·F,h,n,d)
            k, v = (self.join(x, y.repeat_interleave(self.frames, 0)) for x, y in zip((k, v), text[1:], strict=True))
            shown = wide = None
            if attn_mask is not None:
                shown = attn_mask[..., video[0].shape[2] :]
                wide = torch.cat([shown.new_ones(*shown.shape[:3], q.shape[2]), shown], 3)
                wide = wide.repeat_interleave(self.frames, 0)
            out = product(q, k, v, attn_mask=wide, **named).unflatten(0, (len(query), -1)).transpose(1, 2).flatten(2, 3)
            return self.join(out, product(*text, attn_mask=shown, **named)) if self.text else out

        def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
            """Of the video, and of the text."""
            cut = self.text if self.text_first else x.shape[2] - self.text
            return (x[:, :, cut:], x[:, :, :cut]) if self.text_first else (x[:, :, :cut], x[:, :, cut:])

        def join(self, video: Tensor, text: Tensor) -> Tensor:
            """Both again."""
            return torch.cat([text, video] if self.text_first else [video, text], dim=2)

    return ByFrame
