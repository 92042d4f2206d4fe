"""Configs of tiny HiDream-I1 checkpoints."""

from collections.abc import Mapping
from typing import Any

TINY_CLIP = {
    "_class_name": "CLIPTextModelWithProjection",
    "vocab_size": 514,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "projection_dim": 8,
    "max_position_embeddings": 248,
    "bos_token_id": 512,
    "eos_token_id": 513,
    "pad_token_id": 513,
}


PARTS: Mapping[str, Any] = {
    "_class_name": "HiDreamImagePipeline",
    "vae": {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [4, 4, 4, 4],
        "norm_num_groups": 2,
        "latent_channels": 4,
        "layers_per_block": 1,
        "sample_size": 64,
        "down_block_types": [
            "DownEncoderBlock2D",
            "DownEncoderBlock2D",
            "DownEncoderBlock2D",
            "DownEncoderBlock2D",
        ],
        "up_block_types": [
            "UpDecoderBlock2D",
            "UpDecoderBlock2D",
            "UpDecoderBlock2D",
            "UpDecoderBlock2D",
        ],
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    "transformer": {
        "_class_name": "HiDreamImageTransformer2DModel",
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "caption_channels": [16, 12],
        "text_emb_dim": 16,
        "num_routed_experts": 4,
        "num_activated_experts": 2,
        "axes_dims_rope": [4, 2, 2],
        "max_resolution": [12, 12],
        "llama_layers": [0, 1, 1, 1],
    },
    "tokenizer": {"_class_name": "clip", "longest": 248},
    "text_encoder": TINY_CLIP,
    "tokenizer_2": {"_class_name": "clip", "longest": 248},
    "text_encoder_2": TINY_CLIP,
    "tokenizer_3": {"_class_name": "letters"},
    "text_encoder_3": {
        "_class_name": "T5EncoderModel",
        "vocab_size": 98,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    },
    "tokenizer_4": {
        "_class_name": "bytes",
        "marks": ["<|begin_of_text|>", "<|eot_id|>"],
        "eos_token": "<|eot_id|>",
        "model_max_length": 131072,
    },
    "text_encoder_4": {
        "_class_name": "LlamaForCausalLM",
        "vocab_size": 258,
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 257,
        "bos_token_id": 256,
        "pad_token_id": None,
    },
}


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "full": {
        "scheduler": {
            "_class_name": "UniPCMultistepScheduler",
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": 3.0,
        }
    },
    "dev": {"scheduler": {"_class_name": "FlowMatchLCMScheduler", "shift": 6.0}},
}
