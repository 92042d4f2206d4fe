"""Names of HunyuanVideo's weights in the files of other programs."""

from __future__ import annotations

AUTHORS_FILE_NAMES = (
    (
        r"^single_transformer_blocks\.(\d+)\.attn\.to_q\.(.+)$",
        r"single_blocks.\1.linear1.\2#0/7",
    ),
    (
        r"^single_transformer_blocks\.(\d+)\.attn\.to_k\.(.+)$",
        r"single_blocks.\1.linear1.\2#1/7",
    ),
    (
        r"^single_transformer_blocks\.(\d+)\.attn\.to_v\.(.+)$",
        r"single_blocks.\1.linear1.\2#2/7",
    ),
    (
        r"^single_transformer_blocks\.(\d+)\.proj_mlp\.(.+)$",
        r"single_blocks.\1.linear1.\2#3,4,5,6/7",
    ),
    (r"^single_transformer_blocks\.(\d+)\.proj_out\.", r"single_blocks.\1.linear2."),
    (
        r"^single_transformer_blocks\.(\d+)\.norm\.linear\.",
        r"single_blocks.\1.modulation.linear.",
    ),
    (
        r"^single_transformer_blocks\.(\d+)\.attn\.norm_([qk])\.",
        r"single_blocks.\1.\2_norm.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.to_q\.(.+)$",
        r"double_blocks.\1.img_attn_qkv.\2#0/3",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.to_k\.(.+)$",
        r"double_blocks.\1.img_attn_qkv.\2#1/3",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.to_v\.(.+)$",
        r"double_blocks.\1.img_attn_qkv.\2#2/3",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.add_q_proj\.(.+)$",
        r"double_blocks.\1.txt_attn_qkv.\2#0/3",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.add_k_proj\.(.+)$",
        r"double_blocks.\1.txt_attn_qkv.\2#1/3",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.add_v_proj\.(.+)$",
        r"double_blocks.\1.txt_attn_qkv.\2#2/3",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.to_out\.0\.",
        r"double_blocks.\1.img_attn_proj.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.to_add_out\.",
        r"double_blocks.\1.txt_attn_proj.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.norm_([qk])\.",
        r"double_blocks.\1.img_attn_\2_norm.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.attn\.norm_added_([qk])\.",
        r"double_blocks.\1.txt_attn_\2_norm.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.norm1\.linear\.",
        r"double_blocks.\1.img_mod.linear.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.norm1_context\.linear\.",
        r"double_blocks.\1.txt_mod.linear.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.ff\.net\.0\.proj\.",
        r"double_blocks.\1.img_mlp.fc1.",
    ),
    (r"^transformer_blocks\.(\d+)\.ff\.net\.2\.", r"double_blocks.\1.img_mlp.fc2."),
    (
        r"^transformer_blocks\.(\d+)\.ff_context\.net\.0\.proj\.",
        r"double_blocks.\1.txt_mlp.fc1.",
    ),
    (
        r"^transformer_blocks\.(\d+)\.ff_context\.net\.2\.",
        r"double_blocks.\1.txt_mlp.fc2.",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_q\.(.+)$",
        r"txt_in.individual_token_refiner.blocks.\1.self_attn_qkv.\2#0/3",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_k\.(.+)$",
        r"txt_in.individual_token_refiner.blocks.\1.self_attn_qkv.\2#1/3",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_v\.(.+)$",
        r"txt_in.individual_token_refiner.blocks.\1.self_attn_qkv.\2#2/3",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_out\.0\.",
        r"txt_in.individual_token_refiner.blocks.\1.self_attn_proj.",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.ff\.net\.0\.proj\.",
        r"txt_in.individual_token_refiner.blocks.\1.mlp.fc1.",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.ff\.net\.2\.",
        r"txt_in.individual_token_refiner.blocks.\1.mlp.fc2.",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.norm_out\.linear\.",
        r"txt_in.individual_token_refiner.blocks.\1.adaLN_modulation.1.",
    ),
    (
        r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.(norm[12])\.",
        r"txt_in.individual_token_refiner.blocks.\1.\2.",
    ),
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
    (r"^x_embedder\.", "img_in."),
    (r"^time_text_embed\.timestep_embedder\.linear_1\.", "time_in.mlp.0."),
    (r"^time_text_embed\.timestep_embedder\.linear_2\.", "time_in.mlp.2."),
    (r"^time_text_embed\.guidance_embedder\.linear_1\.", "guidance_in.mlp.0."),
    (r"^time_text_embed\.guidance_embedder\.linear_2\.", "guidance_in.mlp.2."),
    (r"^time_text_embed\.text_embedder\.linear_1\.", "vector_in.in_layer."),
    (r"^time_text_embed\.text_embedder\.linear_2\.", "vector_in.out_layer."),
    (r"^norm_out\.linear\.(.+)$", r"final_layer.adaLN_modulation.1.\1#1,0/2"),
    (r"^proj_out\.", "final_layer.linear."),
)
"""From diffusers' keys to those of the authors' file; see ``single_file.find_sources``.
"""


COMFYUI_FILE_NAMES = (
    *AUTHORS_FILE_NAMES,
    (r"^txt_in\.t_embedder\.mlp\.0\.", "txt_in.t_embedder.in_layer."),
    (r"^txt_in\.t_embedder\.mlp\.2\.", "txt_in.t_embedder.out_layer."),
    (r"^txt_in\.c_embedder\.linear_1\.", "txt_in.c_embedder.in_layer."),
    (r"^txt_in\.c_embedder\.linear_2\.", "txt_in.c_embedder.out_layer."),
    (r"_mod\.linear\.", "_mod.lin."),
    (r"_attn_qkv\.", "_attn.qkv."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"_attn_q_norm\.weight", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm\.weight", "_attn.norm.key_norm.scale"),
    (r"\.q_norm\.weight", ".norm.query_norm.scale"),
    (r"\.k_norm\.weight", ".norm.key_norm.scale"),
    (r"_attn_proj\.", "_attn.proj."),
    (r"\.modulation\.linear\.", ".modulation.lin."),
    (r"_in\.mlp\.2\.", "_in.out_layer."),
    (r"_in\.mlp\.0\.", "_in.in_layer."),
)
