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
        query, key, value = _video_heads(attn, hidden_states, image_rotary_emb)
        text_query, text_key, text_value = _text_heads(attn, encoder_hidden_states)

        video_tokens = hidden_states.shape[1]
        padding = (video_tokens, 0)
        is_seen = torch.nn.functional.pad(attention_mask, padding, value=True)
        attended = torch.nn.functional.scaled_dot_product_attention(
            _joined(query, text_query),
            _joined(key, text_key),
            _joined(value, text_value),
            attn_mask=is_seen[:, None, None],
        )
        states = attended.transpose(1, 2).flatten(2)

        project, dropout = attn.to_out
        video = dropout(project(states[:, :video_tokens]))
        text = attn.to_add_out(states[:, video_tokens:])
        return video, text


def _video_heads(
    attn: Any, states: Tensor, positions: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of the video by head, (B,S,h,d) each."""
    rotate = diffusers.models.embeddings.apply_rotary_emb
    query = attn.norm_q(_heads(attn, attn.to_q, states))
    key = attn.norm_k(_heads(attn, attn.to_k, states))
    return (
        rotate(query, positions, sequence_dim=1),
        rotate(key, positions, sequence_dim=1),
        _heads(attn, attn.to_v, states),
    )


def _text_heads(attn: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of the text by head, (B,L,h,d) each."""
    query = _heads(attn, attn.add_q_proj, states)
    key = _heads(attn, attn.add_k_proj, states)
    value = _heads(attn, attn.add_v_proj, states)
    return attn.norm_added_q(query), attn.norm_added_k(key), value


def _heads(attn: Any, projection: Any, states: Tensor) -> Tensor:
    """Return projected states by head, (B,S,h,d)."""
    by_head: Tensor = projection(states).unflatten(2, (attn.heads, -1))
    return by_head


def _joined(video: Tensor, text: Tensor) -> Tensor:
    """Return video and text after one another, by head first: (B,h,S+L,d)."""
    tokens = torch.cat([video, text], dim=1)
    return tokens.transpose(1, 2)
