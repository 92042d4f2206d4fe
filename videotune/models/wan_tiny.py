"""Configs of tiny Wan checkpoints."""

from collections.abc import Mapping
from typing import Any

TINY_TRANSFORMER = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 128,
}


TINY_I2V: Mapping[str, Any] = {
    "_class_name": "WanImageToVideoPipeline",
    "transformer": {
        "in_channels": 12,
        "image_dim": 16,
        "added_kv_proj_dim": 24,
    },
    "image_processor": {
        "_class_name": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    },
    "image_encoder": {
        "_class_name": "CLIPVisionModel",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    },
}

PARTS: Mapping[str, Any] = {
    "_class_name": "WanPipeline",
    "vae": {
        "_class_name": "AutoencoderKLWan",
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "latents_mean": [0.0, 0.0, 0.0, 0.0],
        "latents_std": [1.0, 1.0, 1.0, 1.0],
    },
    "transformer": TINY_TRANSFORMER,
    "tokenizer": {"_class_name": "letters"},
    "text_encoder": {
        "_class_name": "UMT5EncoderModel",
        "vocab_size": 98,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    },
    "scheduler": {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
    },
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "t2v": {},
    "i2v": TINY_I2V,
    "flf2v": {
        **TINY_I2V,
        "transformer": {**TINY_I2V["transformer"], "pos_embed_seq_len": 10},
    },
    "ti2v": {
        "vae": {
            "latents_mean": [0.1, -0.2, 0.0, 0.3],
            "latents_std": [0.5, 1.2, 0.8, 1.0],
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "decoder_base_dim": 4,
            "scale_factor_spatial": 16,
            "scale_factor_temporal": 4,
        },
        "scheduler": {"flow_shift": 5.0},
        "expand_timesteps": True,
    },
    "t2v-a14b": {
        "transformer_2": TINY_TRANSFORMER,
        "boundary_ratio": 0.875,
    },
    "i2v-a14b": {
        "_class_name": "WanImageToVideoPipeline",
        "transformer": {"in_channels": 12},
        "transformer_2": TINY_TRANSFORMER | {"in_channels": 12},
        "boundary_ratio": 0.9,
    },
}

VACE_TRANSFORMER = {
    **TINY_TRANSFORMER,
    "_class_name": "WanVACETransformer3DModel",
    "vace_layers": [0, 1],
    "vace_in_channels": 72,
}

VACE_PARTS: Mapping[str, Any] = {
    **PARTS,
    "_class_name": "WanVACEPipeline",
    "transformer": VACE_TRANSFORMER,
}

VACE_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "vace": {},
    "vace-a14b": {"transformer_2": VACE_TRANSFORMER, "boundary_ratio": 0.875},
}
