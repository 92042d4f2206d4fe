"""Tiny random HiDream-I1 checkpoints in the real layout, and what a perfect transformer would say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("full", "dev")
"""The checkpoints that ``tiny`` can write: one that is drawn with guidance, and one of the distilled."""


def tiny(folder: Path, seed: int = 0, variant: str = VARIANTS[0]) -> Path:
    """Write a random checkpoint of some 60,000 parameters in the real layout, all four text encoders, and return its folder.

    Its experts are as wide as a config allows, which is a multiple of 256.
    """
    import diffusers
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel

    from videotune.families.tiny import letters_tokenizer

    assert variant in VARIANTS, f"{variant!r} is none of {', '.join(VARIANTS)}"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = diffusers.AutoencoderKL(
            block_out_channels=(4, 4, 4, 4), norm_num_groups=2, latent_channels=4, layers_per_block=1, sample_size=64,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip
        net = diffusers.HiDreamImageTransformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8,
            num_attention_heads=2, caption_channels=[16, 12], text_emb_dim=16, num_routed_experts=4,
            num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(12, 12), llama_layers=[0, 1, 1, 1],
        )  # fmt: skip
        letters = letters_tokenizer()
        t5 = T5Config(vocab_size=len(letters), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
        llama_letters, clip_letters = _llama_letters(), _clip_letters()
        llama = LlamaConfig(
            vocab_size=len(llama_letters), hidden_size=12, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=256, eos_token_id=llama_letters.eos_token_id,
            bos_token_id=llama_letters.bos_token_id, pad_token_id=None,
        )  # fmt: skip
        parts = {
            "text_encoder": _clip(clip_letters, 8),
            "text_encoder_2": _clip(clip_letters, 8),
            "text_encoder_3": T5EncoderModel(t5),
            "text_encoder_4": LlamaForCausalLM(llama),
        }
    shift = 3.0 if variant == "full" else 6.0
    scheduler = (
        diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
        if variant == "full"
        else diffusers.FlowMatchLCMScheduler(shift=shift)
    )
    diffusers.HiDreamImagePipeline(
        scheduler=scheduler, vae=vae, transformer=net, tokenizer=clip_letters, tokenizer_2=_clip_letters(),
        tokenizer_3=letters, tokenizer_4=llama_letters, **parts,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _clip(letters: Any, width: int) -> Any:
    """CLIP's text model, with places for the 248 tokens of the published ones."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(letters),
            hidden_size=width,
            intermediate_size=16,
            projection_dim=width,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=248,
            bos_token_id=letters.bos_token_id,
            eos_token_id=letters.eos_token_id,
            pad_token_id=letters.pad_token_id,
        )
    )


def _bytes() -> list[str]:
    """The 256 signs by which tokenizers of bytes write them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _clip_letters() -> Any:
    """CLIP's tokenizer without merges: letters, and letters that end a word."""
    from transformers import CLIPTokenizer

    pieces = [*_bytes(), *(f"{sign}</w>" for sign in _bytes()), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=248)


def _llama_letters() -> Any:
    """A tokenizer of bytes as Llama 3 has one: a mark in front, none at the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*_bytes(), "<|begin_of_text|>", "<|eot_id|>"]
    words = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[(pieces[256], 256)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=pieces[256], eos_token=pieces[257], model_max_length=131072
    )


def oracle(x0: Tensor, spec: Any = None) -> Callable[..., Tensor]:
    """What a perfect transformer would return for the latents x0 (B,C,1,H,W): v = (x_t - x0) / t turned about, told 1000 t.

    In the family's own pipeline it must end at x0, which settles sign, units, layout and schedule; tests use it.
    """

    def answer(hidden_states: Tensor, timesteps: Tensor, **_: Any) -> Tensor:
        t = timesteps.float().view(-1, 1, 1, 1) / 1000
        return (x0[:, :, 0] - hidden_states) / t.clamp(min=1e-9)

    return answer
