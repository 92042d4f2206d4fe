"""Configs of the tiny LTX-2 checkpoints."""

from typing import Any

PARTS: dict[str, Any] = {
    "_class_name": "LTX2Pipeline",
    "vae": {
        "_class_name": "AutoencoderKLLTX2Video",
        "latent_channels": 4,
        "block_out_channels": [4, 4, 8, 8],
        "decoder_block_out_channels": [8, 16, 32],
        "layers_per_block": [1, 1, 1, 1, 1],
        "decoder_layers_per_block": [1, 1, 1, 1],
        "decoder_causal": False,
        "decoder_spatial_padding_mode": "zeros",
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
        "_buffers": {
            "latents_mean": [0.1, -0.2, 0.0, 0.3],
            "latents_std": [0.5, 1.2, 0.8, 1.0],
        },
    },
    "audio_vae": {
        "_class_name": "AutoencoderKLLTX2Audio",
        "base_channels": 8,
        "ch_mult": [1, 1, 1],
        "num_res_blocks": 1,
        "latent_channels": 2,
        "mel_bins": 16,
        "_buffers": {
            "latents_mean": [0.1, -0.1, 0.2, 0.0, 0.1, -0.1, 0.2, 0.0],
            "latents_std": [0.5, 1.2, 0.8, 1.0, 0.5, 1.2, 0.8, 1.0],
        },
    },
    "transformer": {
        "_class_name": "LTX2VideoTransformer3DModel",
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_in_channels": 8,
        "audio_out_channels": 8,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 2,
        "caption_channels": 16,
        "rope_type": "split",
    },
    "tokenizer": {
        "_class_name": "bytes",
        "marks": ["<bos>", "<eos>", "<pad>"],
        "padding_side": "left",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 1024,
        "model_input_names": ["input_ids", "attention_mask"],
    },
    "text_encoder": {
        "_class_name": "Gemma3ForConditionalGeneration",
        "text_config": {
            "vocab_size": 262,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 512,
            "max_position_embeddings": 2048,
            "pad_token_id": 258,
            "bos_token_id": 256,
            "eos_token_id": 257,
        },
        "vision_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 261,
        "boi_token_index": 259,
        "eoi_token_index": 260,
    },
    "connectors": {
        "_class_name": "ltx2.LTX2TextConnectors",
        "caption_channels": 16,
        "text_proj_in_factor": 3,
        "video_connector_num_attention_heads": 2,
        "audio_connector_num_attention_heads": 2,
        "video_connector_num_layers": 1,
        "audio_connector_num_layers": 1,
        "rope_type": "split",
    },
    "vocoder": {
        "_class_name": "ltx2.LTX2Vocoder",
        "in_channels": 32,
        "hidden_channels": 8,
        "upsample_kernel_sizes": [4, 4],
        "upsample_factors": [2, 2],
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1, 3, 5]],
        "output_sampling_rate": 16000,
    },
    "scheduler": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "use_dynamic_shifting": True,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "shift_terminal": 0.1,
        "base_image_seq_len": 1024,
        "max_image_seq_len": 4096,
    },
}

NEWER_TRANSFORMER = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
"""What the transformers of LTX-2.3 and LTX-2.5 have."""

NEWER_CONNECTORS = {
    "video_connector_attention_head_dim": 16,
    "audio_connector_attention_head_dim": 8,
    "video_gated_attn": True,
    "audio_gated_attn": True,
    "per_modality_projections": True,
    "video_hidden_dim": 32,
    "audio_hidden_dim": 16,
    "proj_bias": True,
}

GEMMA_4 = {
    "_class_name": "Gemma4UnifiedForConditionalGeneration",
    "text_config": {
        "vocab_size": 268,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 512,
        "max_position_embeddings": 2048,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": 258,
        "bos_token_id": 256,
        "eos_token_id": 257,
    },
    "vision_config": {
        "patch_size": 4,
        "mm_embed_dim": 16,
        "mm_posemb_size": 16,
        "output_proj_dims": 16,
    },
    "audio_config": {"audio_embed_dim": 16},
    "image_token_id": 262,
    "audio_token_id": 263,
    "video_token_id": 264,
    "boi_token_id": 265,
    "eoi_token_id": 266,
    "boa_token_id": 267,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "2.3": {"transformer": NEWER_TRANSFORMER, "connectors": NEWER_CONNECTORS},
    "2.0": {
        "vae": {"decoder_spatial_padding_mode": "reflect"},
        "connectors": {
            "video_connector_attention_head_dim": 8,
            "audio_connector_attention_head_dim": 8,
        }
    },
    "2.5": {
        "transformer": NEWER_TRANSFORMER
        | {"ff_bias": False, "use_keyframes_abs_pos_embedding": True},
        "connectors": NEWER_CONNECTORS,
        "text_encoder": GEMMA_4,
    },
}
