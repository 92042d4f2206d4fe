"""Attention of HunyuanVideo 1.5's blocks under a mask of keys.

diffusers' processor makes a mask of all tokens by all, which each block keeps for its
gradients: 95 MB at 9,800 tokens as booleans, and 54 times as much in all blocks. Video
and caption see the same keys, so one row of it is enough. Padding, to which nothing
attends, differs: there it attends to nothing, here to what the others see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from videotune.lazy import diffusers, torch

if TYPE_CHECKING:
    from torch import Tensor


class KeyMaskProcessor:
    """Attend to video and text together; a mask hides padding of the text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of video (B,S,D) and text (B,L,D).

        Args:
            attn: the attention module.
            hidden_states: the video's.
            encoder_hidden_states: the text's.
            attention_mask: (B,L) bool, True where the text is.
            image_rotary_emb: cosines and sines of the video's positions.
        """
        rotate = diffusers.models.embeddings.apply_rotary_emb
        query = attn.norm_q(_heads(attn, attn.to_q, hidden_states))
        key = attn.norm_k(_heads(attn, attn.to_k, hidden_states))
        query = rotate(query, image_rotary_emb, sequence_dim=1)
        key = rotate(key, image_rotary_emb, sequence_dim=1)
        value = _heads(attn, attn.to_v, hidden_states)

        text = encoder_hidden_states
        text_query = attn.norm_added_q(_heads(attn, attn.add_q_proj, text))
        text_key = attn.norm_added_k(_heads(attn, attn.add_k_proj, text))
        text_value = _heads(attn, attn.add_v_proj, text)

        video_tokens = hidden_states.shape[1]
        is_seen = torch.nn.functional.pad(attention_mask, (video_tokens, 0), value=True)
        attended = torch.nn.functional.scaled_dot_product_attention(
            torch.cat([query, text_query], dim=1).transpose(1, 2),
            torch.cat([key, text_key], dim=1).transpose(1, 2),
            torch.cat([value, text_value], dim=1).transpose(1, 2),
            attn_mask=is_seen[:, None, None],
        )
        states = attended.transpose(1, 2).flatten(2)
        video = attn.to_out[1](attn.to_out[0](states[:, :video_tokens]))
        return video, attn.to_add_out(states[:, video_tokens:])


def _heads(attn: Any, projection: Any, states: Tensor) -> Tensor:
    """Return projected states by head, (B,S,h,d)."""
    by_head: Tensor = projection(states).unflatten(2, (attn.heads, -1))
    return by_head
