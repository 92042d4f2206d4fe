"""What stands around Wan's transformer: stand-ins that its pipelines hold, attention by frame, names in other
layouts; and what a caption comes to in tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.families.find import read_config
from videotune.families.frames import by_frame
from videotune.families.text import count_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_ATTENTION, _FEED_FORWARD = r"(to_q|to_k|to_v|to_out\.0)", r"blocks\.\d+\.ffn\.(net\.0\.proj|net\.2)"

TARGETS = {
    "attention": (rf"blocks\.\d+\.attn[12]\.{_ATTENTION}",),
    "self_attention": (rf"blocks\.\d+\.attn1\.{_ATTENTION}",),
    "cross_attention": (rf"blocks\.\d+\.attn2\.{_ATTENTION}",),
    "feed_forward": (_FEED_FORWARD,),
    "linear": (rf"blocks\.\d+\.attn[12]\.{_ATTENTION}", _FEED_FORWARD),
    "all": (r"blocks\..+",),  # of image-to-video also the projections of what CLIP sees
}
"""The named sets of ``lora.targets``."""


def encoded(latents: Tensor, device: torch.device) -> Any:
    """What a pipeline holds in place of the VAE where the image's latents (1,C,F,H,W), normalised, are known already.

    Its statistics are 0 and 1, so that the pipeline hands the latents on as they are.
    """
    from types import SimpleNamespace

    import torch
    from diffusers.configuration_utils import FrozenDict
    from torch import nn

    channels = latents.shape[1]

    class Encoded(nn.Module):
        """A VAE that encodes whatever it is given to one known latent."""

        def __init__(self) -> None:
            super().__init__()
            self.config = FrozenDict(z_dim=channels, latents_mean=[0.0] * channels, latents_std=[1.0] * channels)
            self.dtype, self.device = torch.float32, device

        def encode(self, pixels: Tensor) -> Any:
            return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))

    return Encoded()


def clip_numbers(path: Path) -> int:
    """How many numbers CLIP, by its config, says of an image: a state for each of its patches and one for the whole."""
    config = read_config(path)
    return ((config["image_size"] // config["patch_size"]) ** 2 + 1) * int(config["hidden_size"])


class ByFrame:
    """An attention processor that runs diffusers' own one latent frame at a time, frames laid into the batch.

    It knows the frames by the rotary tables (F, tokens of a frame, 1, d), which ``isolate_frames`` shapes so.
    """

    def __init__(self, own: Any, handle: Any) -> None:
        self.own, self.handle = own, handle

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What diffusers' processor gives (B,S,D) where no token sees another frame."""
        assert encoder_hidden_states is None, "cross attention reads text alone"
        assert rotary_emb is not None
        batch, frames = len(hidden_states), len(rotary_emb[0])
        tables = tuple(table.repeat(batch, 1, 1, 1) for table in rotary_emb)
        states = hidden_states.unflatten(1, (frames, -1)).flatten(0, 1)  # (B F, tokens of a frame, D)
        states = self.own(attn, states, None, attention_mask, tables)
        return states.unflatten(0, (batch, frames)).flatten(1, 2)


def isolate_frames(net: nn.Module, on: bool) -> None:
    """Let video tokens attend to their own latent frame alone until switched off, when all is as it was."""
    blocks: Any = net.blocks
    config: Any = net.config
    rope: Any = net.rope

    def tables_by_frame(module: nn.Module, words: tuple[Tensor, ...], tables: tuple[Tensor, Tensor]) -> Any:
        frames = words[0].shape[2] // config.patch_size[0]
        return tuple(table.reshape(frames, -1, *table.shape[2:]) for table in tables)

    by_frame([block.attn1 for block in blocks], ByFrame, on, lambda: rope.register_forward_hook(tables_by_frame))


_NATIVE = (
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.add_([kv])_proj(?=\.|$)", r".\1_img"),
    (r"\.to_([qkv])(?=\.|$)", r".\1"),
    (r"\.to_out\.0(?=\.|$)", ".o"),
    (r"\.ffn\.net\.0\.proj(?=\.|$)", ".ffn.0"),
    (r"\.ffn\.net\.2(?=\.|$)", ".ffn.2"),
)

_FULL = (
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"^proj_out\.", "head.head."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.norm_added_k\.", ".norm_k_img."),
)

_SWAPPED = {"norm2": "norm3", "norm3": "norm2"}
"""The authors count the norm before cross attention third, diffusers second."""


def native(path: str) -> str:
    """A block module's path in diffusers -> its name in the authors' code, which ComfyUI uses."""
    for pattern, name in _NATIVE:
        path = re.sub(pattern, name, path)
    return path


def full_name(name: str) -> str:
    """A parameter's name in diffusers -> its name in the authors' checkpoints."""
    if name.startswith("blocks."):
        name = re.sub(r"(?<=\.)(norm2|norm3)(?=\.)", lambda found: _SWAPPED[found[0]], name)
    for pattern, other in _FULL:
        name = re.sub(pattern, other, name)
    return native(name)


def token_lengths(folder: Path, captions: Sequence[str]) -> list[int] | None:
    """How many tokens each caption has, the end mark included, without torch; None without a tokenizer.json."""
    import html

    import ftfy

    cleaned = [" ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split()) for caption in captions]
    return count_tokens(folder / "tokenizer", cleaned)
