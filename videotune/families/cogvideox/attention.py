"""Frames that see themselves and the text alone: CogVideoX's joint attention, one frame at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from videotune.families.frames import by_frame

if TYPE_CHECKING:
    from torch import Tensor, nn


def isolate_frames(net: nn.Module, on: bool) -> None:
    """Video tokens attend to their own latent frame (1.5: its pair) and the text, text to text alone; until turned off."""
    blocks: Any = net.transformer_blocks

    def hook() -> Any:
        return net.register_forward_pre_hook(_with_frame_tokens, with_kwargs=True)

    by_frame([block.attn1 for block in blocks], FrameAttention, on, hook)


class FrameAttention:
    """Attention of diffusers' CogVideoX blocks with each frame by itself; ``own`` and ``handle`` undo it."""

    def __init__(self, own: Any, handle: Any) -> None:
        self.own, self.handle = own, handle

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        frame_tokens: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, F·n, D) with n = frame_tokens, and text (B, L, D) -> both attended; no mask is known here."""
        from diffusers.models.embeddings import apply_rotary_emb
        from torch.nn.functional import scaled_dot_product_attention

        assert attention_mask is None
        assert frame_tokens > 0
        torch, length = _torch(), encoder_hidden_states.shape[1]
        joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        q, k, v = (to(joint).unflatten(2, (attn.heads, -1)).transpose(1, 2) for to in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (norm(x) if norm is not None else x for norm, x in ((attn.norm_q, q), (attn.norm_k, k)))
        (q_text, q), (k_text, k), (v_text, v) = ((x[:, :, :length], x[:, :, length:]) for x in (q, k, v))
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb) for x in (q, k))

        def by_frame(x: Tensor, text: Tensor | None = None) -> Tensor:
            """(B,h,F·n,d) -> (B·F,h,n,d), behind the text's L where that is given."""
            x = x.unflatten(2, (-1, frame_tokens)).transpose(1, 2)  # (B,F,h,n,d)
            if text is not None:
                x = torch.cat([text[:, None].expand(-1, x.shape[1], -1, -1, -1), x], dim=3)
            return x.flatten(0, 1)

        video = scaled_dot_product_attention(by_frame(q), by_frame(k, k_text), by_frame(v, v_text))
        video = video.unflatten(0, (len(joint), -1)).transpose(2, 3).flatten(1, 2).flatten(2)  # (B,F·n,h·d)
        text = scaled_dot_product_attention(q_text, k_text, v_text).transpose(1, 2).flatten(2)
        out = attn.to_out[1](attn.to_out[0](torch.cat([text, video], dim=1)))
        return out[:, length:], out[:, :length]


def _with_frame_tokens(
    net: Any, words: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a forward pass: tell the blocks how many tokens a frame has. Handed on as an argument, so that a block that
    is computed again for its gradients hears the same."""
    video = named["hidden_states"] if "hidden_states" in named else words[0]
    tokens = (video.shape[-2] // net.config.patch_size) * (video.shape[-1] // net.config.patch_size)
    return words, named | {"attention_kwargs": (named.get("attention_kwargs") or {}) | {"frame_tokens": tokens}}


def _torch() -> Any:
    import torch

    return torch
