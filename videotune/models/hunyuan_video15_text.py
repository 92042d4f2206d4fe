"""Captions of HunyuanVideo 1.5: Qwen2.5-VL reads them, ByT5 what they have in quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.models.base import DiffusersModel
from videotune.models.hunyuan_video15_prompt import CHAT_TEMPLATE, CROP, TEMPLATE
from videotune.models.pipelines import vae_stand_in
from videotune.types import ClipShape, Conditioning

if TYPE_CHECKING:
    from torch import Tensor

GLYPH_TOKENS = 256
"""Tokens of ByT5, which reads only what a caption has in quotes."""


class HunyuanVideo15Text(DiffusersModel):
    """A HunyuanVideo 1.5 checkpoint, as far as captions are read."""

    text_encoders = {
        "text_encoder": "Qwen2_5_VLTextModel",
        "text_encoder_2": "T5EncoderModel",
    }
    # It reads only letters in quotes, in which a new token has no place.
    fixed_text_encoders = ("text_encoder_2",)
    tokens_in_front = CROP

    @classmethod
    def clean(cls, caption: str) -> str:
        """Return what Qwen reads of a caption; an empty one is a blank."""
        return TEMPLATE.format(caption or " ")

    def tokenizers(self) -> Mapping[str, Any]:
        """Load a fresh tokenizer of Qwen, with the template that the pipeline expects.

        Raises:
            VideotuneError: if it reads the template in another number of tokens than
                the pipeline cuts off, or pads on the left.
        """
        folder = self.folder / "tokenizer"
        qwen = self._read_tokenizer("text_encoder")
        qwen.chat_template = CHAT_TEMPLATE
        # Two captions that differ in their first letter show where the caption begins.
        first_ids = qwen(self.clean("a"), verbose=False).input_ids
        second_ids = qwen(self.clean("0"), verbose=False).input_ids
        pairs = zip(first_ids, second_ids, strict=False)
        front = next(
            (i for i, (first, second) in enumerate(pairs) if first != second), -1
        )
        if front != CROP or qwen.padding_side != "right":
            raise VideotuneError(
                f"{folder} is not HunyuanVideo 1.5's tokenizer: it pads on the {qwen.padding_side} "
                f"and reads {front} tokens in front of a caption, not {CROP}"
            )
        return {"text_encoder": qwen}

    def text_pipeline_class(self) -> Any:
        """Return the class of the pipeline that reads captions; it asks the VAE for its
        strides.
        """
        return partial(
            self.pipeline_class(), vae=vae_stand_in(self.spec, None, self.device)
        )

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Return "text" (1000,D) of Qwen and "glyph" (256,G) of ByT5, with their masks.

        Both are zero where the mask is False: the pipeline feeds the padding's states,
        but the mask hides them.
        """
        text, mask, glyph, glyph_mask = self.text_pipeline().encode_prompt(
            caption, device=self.device
        )
        mask = mask[0].bool()
        glyph_mask = glyph_mask[0].bool()
        return {
            "text": text[0].where(mask[:, None], text.new_zeros(())),
            "mask": mask,
            "glyph": glyph[0].where(glyph_mask[:, None], glyph.new_zeros(())),
            "glyph_mask": glyph_mask,
        }

    def trimmed(self, caption: str, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states without the padding, which is on the right."""
        length = int(states["mask"].sum())
        glyph_length = int(states["glyph_mask"].sum())
        return {
            "text": states["text"][:length],
            "glyph": states["glyph"][:glyph_length],
            "glyph_mask": states["glyph_mask"][:glyph_length],
        }

    def collate_states(self, states: Sequence[Mapping[str, Tensor]]) -> Conditioning:
        """Pad and stack states; trimmed text gets a mask by its length."""
        padded_states = []
        for state in states:
            missing = GLYPH_TOKENS - len(state["glyph"])
            padding = torch.nn.functional.pad
            glyph = padding(state["glyph"], (0, 0, 0, missing))
            glyph_mask = padding(state["glyph_mask"], (0, missing))
            padded_states.append({**state, "glyph": glyph, "glyph_mask": glyph_mask})

        conditioning = super().collate_states(padded_states)
        if conditioning.text_mask is not None:
            return conditioning
        positions = torch.arange(self.spec.text_tokens)
        masks = [positions < len(state["text"]) for state in states]
        return replace(conditioning, text_mask=torch.stack(masks))

    def blank_states(self, shape: ClipShape) -> dict[str, Tensor]:
        """Return zeros in the form of a clip's states, with ByT5's."""
        glyph_width = self.config["text_embed_2_dim"]
        glyph = torch.zeros(GLYPH_TOKENS, glyph_width, dtype=self.text_dtype)
        glyph_mask = torch.ones(GLYPH_TOKENS, dtype=torch.bool)
        states = {"glyph": glyph, "glyph_mask": glyph_mask}
        return super().blank_states(shape) | states
