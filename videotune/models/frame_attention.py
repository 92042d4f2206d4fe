"""Attention that stays within each latent frame, for a run that trains on frames only.

diffusers' own attention runs in full; only its product of queries, keys and values is
computed frame by frame.
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
    net: nn.Module,
    attentions: Sequence[Any],
    on: bool,
    count_frames: Callable[..., int],
    text_first: bool = False,
) -> None:
    """Let video tokens see only their own frame and the text, and text only text.

    Args:
        net: the denoiser.
        attentions: its attention modules over video tokens.
        on: whether frames are isolated from now on.
        count_frames: returns the number of frames of the video tokens, from the
            network's inputs. A block that is recomputed for its gradients uses the
            result of the last call.
        text_first: whether the text's tokens come before the video's.
    """
    isolated = [
        attn for attn in attentions if isinstance(attn.processor, FrameProcessor)
    ]
    if on and not isolated:
        last_call = SimpleNamespace(frames=0)

        def store_frames(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            positional = {"hidden_states": args[0]} if args else {}
            last_call.frames = count_frames(**positional, **kwargs)

        handle = net.register_forward_pre_hook(store_frames, with_kwargs=True)
        for attn in attentions:
            attn.set_processor(
                FrameProcessor(attn.processor, last_call, text_first, handle)
            )

    if not on:
        for attn in isolated:
            attn.processor.handle.remove()
            attn.set_processor(attn.processor.original)


class FrameProcessor:
    """An attention processor that runs diffusers' ``original`` one with isolated
    frames.
    """

    def __init__(
        self, original: Any, last_call: SimpleNamespace, text_first: bool, handle: Any
    ) -> None:
        self.original = original
        self.last_call = last_call
        self.text_first = text_first
        self.handle = handle

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        *further: Any,
        perturbation_mask: Any = None,
        all_perturbed: Any = None,
        rotary_emb: Any = None,
        sparse_params: Any = None,
    ) -> Any:
        """Return attention over video tokens (B,S,D), and text (B,L,D) if any.

        The arguments are named as diffusers' attention modules look for them. Some
        processors take positions of keys in ``further``, and are told to pass the
        values on (perturbed). Others take positions as ``rotary_emb`` and no mask.
        """
        assert sparse_params is None, "sparse attention has frames of its own"
        arguments = (attention_mask, image_rotary_emb, *further)
        keywords = {}
        if rotary_emb is not None:
            arguments = ()
            keywords = {"rotary_emb": rotary_emb}
        if perturbation_mask is not None or all_perturbed is not None:
            keywords = {
                "perturbation_mask": perturbation_mask,
                "all_perturbed": all_perturbed,
            }
        text_tokens = (
            0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        )
        product_by_frame = _product_by_frame()
        with product_by_frame(
            self.last_call.frames, text_tokens, self.text_first
        ) as product:
            output = self.original(
                attn,
                hidden_states,
                encoder_hidden_states,
                *arguments,
                **keywords,
            )
        assert product.calls == 1 or all_perturbed, (
            "this attention does not use torch's attention product"
        )
        return output


class _FrameByFrame:
    """Attention of each frame to itself and to the text."""

    def __init__(self, frames: int, text_tokens: int, text_first: bool) -> None:
        super().__init__()
        self.frames = frames
        self.text_tokens = text_tokens
        self.text_first = text_first
        self.calls = 0

    def attend(
        self,
        product: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention of queries, keys and values (B,h,S,d).

        The mask (B,1,1,S) hides only text.
        """
        video_query, text_query = self.split(query)
        video_key, text_key = self.split(key)
        video_value, text_value = self.split(value)

        # Frames become samples, each with a copy of the text: (B·F,h,n,d).
        q = self.frames_as_samples(video_query)
        k = self.join(self.frames_as_samples(video_key), self.repeat(text_key))
        v = self.join(self.frames_as_samples(video_value), self.repeat(text_value))
        text_mask = None
        frame_mask = None
        if attn_mask is not None:
            text_mask = attn_mask[..., video_query.shape[2] :]
            video_mask = text_mask.new_ones(*text_mask.shape[:3], q.shape[2])
            frame_mask = self.repeat(torch.cat([video_mask, text_mask], 3))
        by_frame = product(q, k, v, attn_mask=frame_mask, **kwargs)

        video = by_frame.unflatten(0, (len(query), -1)).transpose(1, 2).flatten(2, 3)
        if not self.text_tokens:
            return video
        text = product(text_query, text_key, text_value, attn_mask=text_mask, **kwargs)
        return self.join(video, text)

    def frames_as_samples(self, x: Tensor) -> Tensor:
        """(B,h,F·n,d) -> (B·F,h,n,d)."""
        return x.unflatten(2, (self.frames, -1)).transpose(1, 2).flatten(0, 1)

    def repeat(self, x: Tensor) -> Tensor:
        """(B,…) -> (B·F,…)."""
        return x.repeat_interleave(self.frames, 0)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of the video and the part of the text."""
        if self.text_first:
            return x[:, :, self.text_tokens :], x[:, :, : self.text_tokens]
        cut = x.shape[2] - self.text_tokens
        return x[:, :, :cut], x[:, :, cut:]

    def join(self, video: Tensor, text: Tensor) -> Tensor:
        """Concatenate video and text in the network's order."""
        parts = [text, video] if self.text_first else [video, text]
        return torch.cat(parts, dim=2)


@cache
def _product_by_frame() -> Any:
    """Return the class, which can only be defined once torch is imported."""

    class ProductByFrame(_FrameByFrame, torch.overrides.TorchFunctionMode):
        """Compute torch's attention product frame by frame in this thread."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is not torch.nn.functional.scaled_dot_product_attention:
                return func(*args, **(kwargs or {}))
            self.calls += 1
            return self.attend(func, *args, **(kwargs or {}))

    return ProductByFrame
