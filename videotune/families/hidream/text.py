"""HiDream's four text encoders: captions read by diffusers' own pipeline, all of them in memory at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.families.hidream.facts import ENCODERS
from videotune.families.loading import load_model
from videotune.families.pretrained import read_tokenizer
from videotune.types import WeightDtypes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

OLDER_END = 2
"""What CLIP's configs once named as the number of the end mark, which is another."""


def reader(folder: Path, dtype: torch.dtype, device: torch.device, weights: WeightDtypes) -> Any:
    """diffusers' pipeline of text encoders and tokenizers alone, for its own prompt handling."""
    from diffusers import HiDreamImagePipeline

    tokenizers = {place: read_tokenizer(folder / place, folder / part) for part, (place, _) in ENCODERS.items()}
    parts: dict[str, Any] = dict(encoders(folder, dtype, device, weights))
    for part in ("text_encoder", "text_encoder_2"):
        # Older configs name 2 as the end mark, and then the highest number of a caption counts as its end: that of a new
        # token would. The end mark's own place is the same one in every other caption.
        end = tokenizers[ENCODERS[part][0]].eos_token_id
        for module in parts[part].modules():
            if getattr(module, "eos_token_id", None) == OLDER_END:
                module.eos_token_id = end
    # the pipeline asks for maps of attention and never looks at them; fused attention has none, and says so each time
    parts["text_encoder_4"].register_forward_pre_hook(
        lambda _, words, named: (words, named | {"output_attentions": False}), with_kwargs=True
    )
    return HiDreamImagePipeline(scheduler=None, vae=None, transformer=None, **parts, **tokenizers)


def encoders(folder: Path, dtype: torch.dtype, device: torch.device, weights: WeightDtypes) -> dict[str, nn.Module]:
    """The text encoders by their folders' names."""
    import transformers

    return {
        part: load_model(getattr(transformers, name), folder / part, dtype, device, weights.text_encoder)
        for part, (_, name) in ENCODERS.items()
    }


def states(pipe: Any, caption: str, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """What the pipeline makes of a caption, padding included, which neither encoders' readers nor transformer mask.

    "text" (128, D) T5's states, "llama" (layers, 128, D) those of every layer of Llama, "pooled" (P,) both CLIPs'.
    """
    text, _, llama, _, pooled, _ = pipe.encode_prompt(
        caption, do_classifier_free_guidance=False, max_sequence_length=tokens, device=device
    )
    return {"text": text[0], "llama": llama[:, 0], "pooled": pooled[0]}


def together(loaded: dict[str, nn.Module]) -> nn.Module:
    """All text encoders as one network, as a plan reads it: a caption of full length through Llama, the largest."""
    import torch

    class Together(torch.nn.ModuleDict):
        """Called as Llama; its parameters are those of all."""

        def get_input_embeddings(self) -> Any:
            return loaded["text_encoder_4"].get_input_embeddings()  # type: ignore[operator]

        def forward(self, **named: Any) -> Any:
            out = loaded["text_encoder_4"](**named, output_hidden_states=True)
            return (torch.stack(out.hidden_states[1:]),)

    return Together(loaded)
