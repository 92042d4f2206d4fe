"""Configs of tiny CogVideoX checkpoints."""

from collections.abc import Mapping
from typing import Any

PARTS: Mapping[str, Any] = {
    "_class_name": "CogVideoXPipeline",
    "vae": {
        "_class_name": "AutoencoderKLCogVideoX",
        "block_out_channels": [4, 4, 4, 4],
        "norm_num_groups": 2,
        "latent_channels": 4,
        "layers_per_block": 1,
        "scaling_factor": 0.7,
        "invert_scale_latents": False,
    },
    "transformer": {
        "_class_name": "CogVideoXTransformer3DModel",
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "time_embed_dim": 8,
        "text_embed_dim": 16,
        "sample_height": 4,
        "sample_width": 6,
    },
    "scheduler": {
        "_class_name": "CogVideoXDDIMScheduler",
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "clip_sample": False,
        "timestep_spacing": "trailing",
        "snr_shift_scale": 1.0,
    },
    "tokenizer": {"_class_name": "letters"},
    "text_encoder": {
        "_class_name": "T5EncoderModel",
        "vocab_size": 98,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    },
}


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "5b": {"transformer": {"use_rotary_positional_embeddings": True}},
    "2b": {
        "vae": {"scaling_factor": 1.15258426},
        "scheduler": {"snr_shift_scale": 3.0},
    },
    "5b-i2v": {
        "_class_name": "CogVideoXImageToVideoPipeline",
        "transformer": {
            "use_rotary_positional_embeddings": True,
            "in_channels": 8,
            "use_learned_positional_embeddings": True,
            "sample_width": 4,
        },
    },
    "1.5-5b": {
        "vae": {"invert_scale_latents": True},
        "transformer": {
            "sample_height": 40,
            "sample_width": 40,
            "patch_size_t": 2,
            "patch_bias": False,
            "use_rotary_positional_embeddings": True,
        },
    },
    "1.5-5b-i2v": {
        "_class_name": "CogVideoXImageToVideoPipeline",
        "vae": {"invert_scale_latents": True},
        "transformer": {
            "sample_height": 40,
            "sample_width": 40,
            "patch_size_t": 2,
            "patch_bias": False,
            "use_rotary_positional_embeddings": True,
            "in_channels": 8,
            "ofs_embed_dim": 8,
        },
    },
}
