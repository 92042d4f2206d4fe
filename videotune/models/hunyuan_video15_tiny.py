"""Configs of tiny HunyuanVideo 1.5 checkpoints."""

from collections.abc import Mapping
from typing import Any

from videotune.models.hunyuan_video15_prompt import CHAT_TEMPLATE, SYSTEM_MESSAGE

TEXTS = ("assistant", SYSTEM_MESSAGE[99:])
"""Strings that are single tokens, so that the template has 108 tokens in front of a
caption.
"""

PARTS: Mapping[str, Any] = {
    "_class_name": "HunyuanVideo15Pipeline",
    "vae": {
        "_class_name": "AutoencoderKLHunyuanVideo15",
        "block_out_channels": [8, 8, 8, 8, 8],
        "latent_channels": 4,
        "layers_per_block": 1,
    },
    "transformer": {
        "_class_name": "HunyuanVideo15Transformer3DModel",
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "rope_axes_dim": [4, 4, 4],
        "text_embed_dim": 16,
        "text_embed_2_dim": 8,
        "image_embed_dim": 8,
        "target_size": 64,
        "task_type": "t2v",
    },
    "tokenizer": {
        "_class_name": "bytes",
        "marks": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "begins": False,
        "texts": list(TEXTS),
        "padding_side": "right",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    },
    "text_encoder": {
        "_class_name": "Qwen2_5_VLTextModel",
        "vocab_size": 262,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "tokenizer_2": {"_class_name": "ByT5Tokenizer", "extra_ids": 0},
    "text_encoder_2": {
        "_class_name": "T5EncoderModel",
        "vocab_size": 260,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
    },
    "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0},
    "guider": {"_class_name": "ClassifierFreeGuidance", "guidance_scale": 6.0},
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "t2v": {},
    "i2v": {
        "_class_name": "HunyuanVideo15ImageToVideoPipeline",
        "transformer": {"task_type": "i2v"},
        "image_encoder": {
            "_class_name": "SiglipVisionModel",
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
        "feature_extractor": {
            "_class_name": "SiglipImageProcessor",
            "size": {"height": 32, "width": 32},
        },
    },
}
