"""Configs of the tiny Kandinsky 5 checkpoints."""

from collections.abc import Mapping
from typing import Any

ONE_TOKEN = (
    " Describe the video in detail.\nDescribe how the camera moves or "
    "shakes, describe the zoom and view angle, whether it follows the "
    "objects.\nDescribe the location of the video, main characters or "
    "objects and their action.\nDescribe the dynamism of the video and "
    "presented actions.\nName the visual style of the video: whether it is "
    "a professional footage, user generated content, some kind of "
    "animation, video game or scren content.\nDescribe the visual effects, "
    "postprocessing and transitions if they are p"
)
"""The part of the prompt template that the tiny tokenizer reads as one token.

With it the template has as many tokens before the caption as Qwen's tokenizer gives.
"""

PARTS: Mapping[str, Any] = {
    "_class_name": "Kandinsky5T2VPipeline",
    "vae": {
        "_class_name": "AutoencoderKLHunyuanVideo",
        "block_out_channels": [4, 4, 4, 4],
        "norm_num_groups": 2,
        "latent_channels": 4,
        "layers_per_block": 1,
    },
    "transformer": {
        "_class_name": "Kandinsky5Transformer3DModel",
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 16,
        "in_text_dim2": 8,
        "time_dim": 16,
        "model_dim": 24,
        "ff_dim": 32,
        "num_text_blocks": 2,
        "num_visual_blocks": 2,
        "axes_dims": [4, 4, 4],
        "visual_cond": True,
    },
    "tokenizer": {
        "_class_name": "bytes",
        "marks": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "texts": [ONE_TOKEN],
        "padding_side": "right",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_input_names": ["input_ids", "attention_mask"],
    },
    "text_encoder": {
        "_class_name": "Qwen2_5_VLForConditionalGeneration",
        "text_config": {
            "vocab_size": 260,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [1, 1, 2],
            },
            "bos_token_id": 256,
            "eos_token_id": 258,
            "pad_token_id": 256,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
    },
    "tokenizer_2": {"_class_name": "clip", "longest": 77},
    "text_encoder_2": {
        "_class_name": "CLIPTextModel",
        "vocab_size": 514,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "bos_token_id": 512,
        "eos_token_id": 2,
    },
    "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0},
}

VARIANTS: Mapping[str, Any] = {
    "t2v": {},
    "i2v": {"_class_name": "Kandinsky5I2VPipeline"},
}
