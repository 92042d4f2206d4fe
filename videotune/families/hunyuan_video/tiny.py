"""Tiny random HunyuanVideo checkpoints in the real layout, and the transformer that is never wrong: for tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.families.hunyuan_video.facts import CROP, TEMPLATE

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("t2v",)
"""The checkpoints that ``tiny`` can write."""

MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<pad>")
"""Llama's own tokens that the template has, its beginning, and its padding."""


def tiny(folder: Path, seed: int = 0, variant: str = VARIANTS[0]) -> Path:
    """Write a random checkpoint of some 120,000 parameters in the real layout, and return its folder."""
    import diffusers
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    assert variant in VARIANTS, f"{variant!r} is none of {', '.join(VARIANTS)}"
    letters, words = llama_tokenizer(), clip_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = diffusers.AutoencoderKLHunyuanVideo(
            block_out_channels=(4, 4, 4, 4), norm_num_groups=2, latent_channels=4, layers_per_block=1
        )
        net = diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2,
            num_single_layers=2, num_refiner_layers=1, rope_axes_dim=(4, 4, 4), text_embed_dim=16,
            pooled_projection_dim=8,
        )  # fmt: skip
        llama = LlamaModel(
            LlamaConfig(
                vocab_size=len(letters), hidden_size=16, intermediate_size=32, num_hidden_layers=4,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
            )
        )  # fmt: skip
        clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(words), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                bos_token_id=len(words) - 2, eos_token_id=2,  # as in the published config, where it is wrong too
            )
        )  # fmt: skip
    diffusers.HunyuanVideoPipeline(
        text_encoder=llama, tokenizer=letters, transformer=net, vae=vae, text_encoder_2=clip, tokenizer_2=words,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def llama_tokenizer() -> Any:
    """A tokenizer of single bytes; what stands in front of a caption has as many tokens as Llama 3 reads it in."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(rest_of_template(), normalized=False)])
    begin = (MARKS[0], tokenizer.token_to_id(MARKS[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{MARKS[0]} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=MARKS[0], eos_token=MARKS[3], pad_token=MARKS[4], padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def rest_of_template() -> str:
    """The end of the longest text in the template, which is one token: so in front of a caption there are as many tokens as
    the pipeline cuts off, all others being marks and single letters."""
    front = TEMPLATE.partition("{}")[0]
    text = max(re.split(r"<\|\w+\|>", front), key=len)
    others = 1 + len(re.sub(r"<\|\w+\|>", "*", front)) - len(text)  # with the beginning, which the tokenizer adds
    return text[CROP - 1 - others :]


def clip_tokenizer() -> Any:
    """CLIP's tokenizer of single letters; as in the published one the end mark is the last of its tokens."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({name: i for i, name in enumerate(names)}, [], model_max_length=77)


def oracle(x0: Tensor, spec: Any = None) -> Callable[..., Tensor]:
    """What a perfect transformer would return for the latents x0 (B,C,F,H,W): v = (x_t - x0) / t, told 1000 t.

    In the family's own pipeline it must end at x0, which settles sign, units, layout and schedule; tests use it.
    ``spec`` is for families whose path hangs on the checkpoint.
    """

    def answer(hidden_states: Tensor, timestep: Tensor, **_: Any) -> Tensor:
        return (hidden_states - x0) / (timestep.float() / 1000).view(-1, 1, 1, 1, 1)

    return answer
