"""Configs of the tiny LTX-Video checkpoints."""

from typing import Any

SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "shift_terminal": 0.1,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
}

PARTS: dict[str, Any] = {
    "_class_name": "LTXPipeline",
    "vae": {
        "_class_name": "AutoencoderKLLTXVideo",
        "latent_channels": 4,
        "_buffers": {
            "latents_mean": [0.1, -0.2, 0.0, 0.3],
            "latents_std": [0.5, 1.2, 0.8, 1.0],
        },
    },
    "transformer": {
        "_class_name": "LTXVideoTransformer3DModel",
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 16,
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
    "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler"},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "0.9.0": {
        "vae": {
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": [1, 1, 1, 1, 1],
            "spatio_temporal_scaling": [True, True, True, False],
            "decoder_block_out_channels": [8, 8, 8, 8],
            "decoder_layers_per_block": [1, 1, 1, 1, 1],
        },
        "scheduler": SCHEDULER,
    },
    "0.9.1": {
        "vae": {
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": [1, 1, 1, 1, 1],
            "spatio_temporal_scaling": [True, True, True, False],
            "decoder_block_out_channels": [8, 16, 32],
            "decoder_layers_per_block": [1, 1, 1, 1],
            "decoder_spatio_temporal_scaling": [True, True, True],
            "upsample_residual": [True, True, True],
            "upsample_factor": [2, 2, 2],
            "timestep_conditioning": True,
            "decoder_inject_noise": [True, True, True, False],
        },
        "scheduler": SCHEDULER,
    },
    "0.9.7": {
        "_class_name": "LTXConditionPipeline",
        "vae": {
            "decoder_block_out_channels": [8, 16, 32],
            "decoder_layers_per_block": [1, 1, 1, 1],
            "decoder_spatio_temporal_scaling": [True, True, True],
            "upsample_residual": [True, True, True],
            "upsample_factor": [2, 2, 2],
            "timestep_conditioning": True,
            "block_out_channels": [4, 8, 8, 16, 16],
            "down_block_types": [
                "LTXVideo095DownBlock3D",
                "LTXVideo095DownBlock3D",
                "LTXVideo095DownBlock3D",
                "LTXVideo095DownBlock3D",
            ],
            "layers_per_block": [1, 1, 1, 1, 1],
            "spatio_temporal_scaling": [True, True, True, True],
            "downsample_type": [
                "spatial",
                "temporal",
                "spatiotemporal",
                "spatiotemporal",
            ],
            "decoder_inject_noise": [False, False, False, False],
            "spatial_compression_ratio": 32,
            "temporal_compression_ratio": 8,
        },
    },
}
