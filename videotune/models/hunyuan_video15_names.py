"""Names of HunyuanVideo 1.5's weights in the authors' files and in ComfyUI's.

The authors have q, k and v of a double block apart, ComfyUI's files join them. The rest
is named alike.
"""

from videotune.models.key_names import KeyRules

BLOCK_NAMES: KeyRules = (
    (r"^transformer_blocks\.", "double_blocks."),
    (r"\.attn\.to_([qkv])(?=\.|$)", r".img_attn_\1"),
    (r"\.attn\.add_([qkv])_proj(?=\.|$)", r".txt_attn_\1"),
    (r"\.attn\.to_out\.0(?=\.|$)", ".img_attn_proj"),
    (r"\.attn\.to_add_out(?=\.|$)", ".txt_attn_proj"),
    (r"\.attn\.norm_([qk])(?=\.|$)", r".img_attn_\1_norm"),
    (r"\.attn\.norm_added_([qk])(?=\.|$)", r".txt_attn_\1_norm"),
    (r"^(double_blocks\.\d+)\.ff\.net\.0\.proj(?=\.|$)", r"\1.img_mlp.fc1"),
    (r"^(double_blocks\.\d+)\.ff\.net\.2(?=\.|$)", r"\1.img_mlp.fc2"),
    (r"^(double_blocks\.\d+)\.ff_context\.net\.0\.proj(?=\.|$)", r"\1.txt_mlp.fc1"),
    (r"^(double_blocks\.\d+)\.ff_context\.net\.2(?=\.|$)", r"\1.txt_mlp.fc2"),
    (r"\.norm1\.linear(?=\.|$)", ".img_mod.linear"),
    (r"\.norm1_context\.linear(?=\.|$)", ".txt_mod.linear"),
)
"""From a module or parameter of a block to its name in the authors' files."""

_REFINER = r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)"
_AUTHORS_REFINER = r"txt_in.individual_token_refiner.blocks.\1"

EMBEDDER_NAMES: KeyRules = (
    (rf"{_REFINER}\.attn\.to_q\.(.+)$", rf"{_AUTHORS_REFINER}.self_attn_qkv.\2#0/3"),
    (rf"{_REFINER}\.attn\.to_k\.(.+)$", rf"{_AUTHORS_REFINER}.self_attn_qkv.\2#1/3"),
    (rf"{_REFINER}\.attn\.to_v\.(.+)$", rf"{_AUTHORS_REFINER}.self_attn_qkv.\2#2/3"),
    (rf"{_REFINER}\.attn\.to_out\.0\.", rf"{_AUTHORS_REFINER}.self_attn_proj."),
    (rf"{_REFINER}\.ff\.net\.0\.proj\.", rf"{_AUTHORS_REFINER}.mlp.fc1."),
    (rf"{_REFINER}\.ff\.net\.2\.", rf"{_AUTHORS_REFINER}.mlp.fc2."),
    (rf"{_REFINER}\.norm_out\.linear\.", rf"{_AUTHORS_REFINER}.adaLN_modulation.1."),
    (rf"{_REFINER}\.(norm[12])\.", rf"{_AUTHORS_REFINER}.\2."),
    (
        r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1\.",
        "txt_in.t_embedder.mlp.0.",
    ),
    (
        r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2\.",
        "txt_in.t_embedder.mlp.2.",
    ),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in\.", "txt_in.input_embedder."),
    (r"^context_embedder_2\.norm\.", "byt5_in.layernorm."),
    (r"^context_embedder_2\.linear_([123])\.", r"byt5_in.fc\1."),
    (r"^image_embedder\.norm_in\.", "vision_in.proj.0."),
    (r"^image_embedder\.linear_1\.", "vision_in.proj.1."),
    (r"^image_embedder\.linear_2\.", "vision_in.proj.3."),
    (r"^image_embedder\.norm_out\.", "vision_in.proj.4."),
    (r"^x_embedder\.", "img_in."),
    (r"^time_embed\.timestep_embedder\.linear_1\.", "time_in.mlp.0."),
    (r"^time_embed\.timestep_embedder\.linear_2\.", "time_in.mlp.2."),
    (r"^cond_type_embed\.", "cond_type_embedding."),
    # The authors have the shift before the scale.
    (r"^norm_out\.linear\.(.+)$", r"final_layer.adaLN_modulation.1.\1#1,0/2"),
    (r"^proj_out\.", "final_layer.linear."),
)
"""From the parameters outside the blocks to those of the authors' file; see
``single_file.find_sources``.
"""

_JOINED: KeyRules = (
    (r"\.(img|txt)_attn_q\.(.+)$", r".\1_attn_qkv.\2#0/3"),
    (r"\.(img|txt)_attn_k\.(.+)$", r".\1_attn_qkv.\2#1/3"),
    (r"\.(img|txt)_attn_v\.(.+)$", r".\1_attn_qkv.\2#2/3"),
)

AUTHORS_FILE_NAMES: KeyRules = (*EMBEDDER_NAMES, *BLOCK_NAMES)
COMFYUI_FILE_NAMES: KeyRules = (*AUTHORS_FILE_NAMES, *_JOINED)
COMFYUI_NAMES: KeyRules = (
    *BLOCK_NAMES,
    (r"\.(img|txt)_attn_[qkv]$", r".\1_attn_qkv"),
)
"""From a module of a block to its name in ComfyUI, which three of them share."""
