"""What stands around HunyuanVideo's transformer: its stand-in, attention by frame, names in other layouts, its readers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from videotune.families.frames import by_frame

if TYPE_CHECKING:
    from torch import Tensor, nn


def both_encoders(llama: nn.Module, clip: nn.Module) -> nn.Module:
    """Both text encoders as one network that reads as Llama does: together they are in memory while captions are encoded."""
    from torch import nn

    class Both(nn.Module):
        """Llama, with CLIP beside it."""

        def __init__(self) -> None:
            super().__init__()
            self.llama, self.clip = llama, clip

        def get_input_embeddings(self) -> Any:
            return self.llama.get_input_embeddings()  # type: ignore[operator]

        def forward(self, *words: Any, **named: Any) -> Any:
            return self.llama(*words, **named)

    return Both()


class FrameAttention:
    """Attention of diffusers' blocks with each latent frame by itself; ``own`` and ``handle`` undo it.

    It knows the frames by the rotary tables (F, tokens of a frame, d), which ``isolate_frames`` shapes so.
    """

    def __init__(self, own: Any, handle: Any) -> None:
        self.own, self.handle = own, handle

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Video (B, F·n, D) and text (B, L, D), of which the mask (B,1,1,F·n+L) shows a part -> both attended."""
        import torch
        from diffusers.models.attention_dispatch import dispatch_attention_fn
        from diffusers.models.embeddings import apply_rotary_emb

        frames, tokens = image_rotary_emb[0].shape[:2]
        tables = tuple(table.flatten(0, 1) for table in image_rotary_emb)
        own, added = _of_video(attn), _of_text(attn)
        q, k, v = (to(hidden_states).unflatten(2, (attn.heads, -1)) for to in own[:3])
        q, k = (apply_rotary_emb(norm(x), tables, sequence_dim=1) for norm, x in zip(own[3:], (q, k), strict=True))
        q_text, k_text, v_text = (to(encoder_hidden_states).unflatten(2, (attn.heads, -1)) for to in added[:3])
        q_text, k_text = added[3](q_text), added[4](k_text)

        def by_frame(x: Tensor, text: Tensor | None = None) -> Tensor:
            """(B,F·n,h,d) -> (B·F,n,h,d), the text's L behind it where that is given."""
            x = x.unflatten(1, (frames, tokens))
            if text is not None:
                x = torch.cat([x, text[:, None].expand(-1, frames, -1, -1, -1)], dim=2)
            return x.flatten(0, 1)

        shown = attention_mask[..., frames * tokens :]  # (B,1,1,L): of the text
        mask = torch.cat([shown.new_ones(*shown.shape[:3], tokens), shown], dim=3).repeat_interleave(frames, dim=0)
        video = dispatch_attention_fn(by_frame(q), by_frame(k, k_text), by_frame(v, v_text), attn_mask=mask)
        video = video.unflatten(0, (len(q), frames)).flatten(1, 2).flatten(2)
        text = dispatch_attention_fn(q_text, k_text, v_text, attn_mask=shown).flatten(2)
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return video, text


def _of_video(attn: Any) -> tuple[Any, ...]:
    return attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k


def _of_text(attn: Any) -> tuple[Any, ...]:
    """Double blocks have projections of the text's own; single ones project both alike."""
    if attn.add_q_proj is None:
        return _of_video(attn)
    return attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.norm_added_q, attn.norm_added_k


def isolate_frames(net: nn.Module, on: bool) -> None:
    """Video tokens attend to their own latent frame and the text, text to text alone; until turned off."""
    shell: Any = net
    attentions = [
        block.attn for blocks in (shell.transformer_blocks, shell.single_transformer_blocks) for block in blocks
    ]

    def tables_by_frame(module: Any, words: tuple[Tensor, ...], tables: tuple[Tensor, Tensor]) -> Any:
        return tuple(table.unflatten(0, (words[0].shape[2] // module.patch_size_t, -1)) for table in tables)

    by_frame(attentions, FrameAttention, on, lambda: shell.rope.register_forward_hook(tables_by_frame))


_NATIVE = (
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"^(single_blocks\.\d+)\.(attn\.to_[qkv]|proj_mlp)$", r"\1.linear1"),
    (r"^(single_blocks\.\d+)\.proj_out$", r"\1.linear2"),
    (r"^(single_blocks\.\d+)\.norm\.linear$", r"\1.modulation.linear"),
    (r"\.attn\.to_[qkv]$", ".img_attn_qkv"),
    (r"\.attn\.add_[qkv]_proj$", ".txt_attn_qkv"),
    (r"\.attn\.to_out\.0$", ".img_attn_proj"),
    (r"\.attn\.to_add_out$", ".txt_attn_proj"),
    (r"\.ff\.net\.0\.proj$", ".img_mlp.fc1"),
    (r"\.ff\.net\.2$", ".img_mlp.fc2"),
    (r"\.ff_context\.net\.0\.proj$", ".txt_mlp.fc1"),
    (r"\.ff_context\.net\.2$", ".txt_mlp.fc2"),
    (r"\.norm1\.linear$", ".img_mod.linear"),
    (r"\.norm1_context\.linear$", ".txt_mod.linear"),
)


def native(path: str) -> str:
    """A block module's path in diffusers -> its name in the authors' code, which ComfyUI uses; several share a name."""
    for pattern, name in _NATIVE:
        path = re.sub(pattern, name, path)
    return path
