"""Weights of text encoders as ComfyUI and the authors of models store them."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

State = dict[str, torch.Tensor]


def stored(folder: Path) -> State:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


UMT5 = {
    "shared.weight": "token_embedding.weight",
    "encoder.final_layer_norm.weight": "norm.weight",
    "layer.0.layer_norm.weight": "norm1.weight",
    "layer.0.SelfAttention.q.weight": "attn.q.weight",
    "layer.0.SelfAttention.k.weight": "attn.k.weight",
    "layer.0.SelfAttention.v.weight": "attn.v.weight",
    "layer.0.SelfAttention.o.weight": "attn.o.weight",
    "layer.0.SelfAttention.relative_attention_bias.weight": "pos_embedding.embedding.weight",
    "layer.1.layer_norm.weight": "norm2.weight",
    "layer.1.DenseReluDense.wi_0.weight": "ffn.gate.0.weight",
    "layer.1.DenseReluDense.wi_1.weight": "ffn.fc1.weight",
    "layer.1.DenseReluDense.wo.weight": "ffn.fc2.weight",
}
"""transformers' names and those of Wan's authors (wan/modules/t5.py)."""


def authors_umt5(state: State) -> State:
    result = {}
    for name, value in state.items():
        if name == "encoder.embed_tokens.weight":
            continue
        block = re.fullmatch(r"encoder\.block\.(\d+)\.(.+)", name)
        if block is None:
            result[UMT5[name]] = value
        else:
            result[f"blocks.{block[1]}.{UMT5[block[2]]}"] = value
    return result


def scaled_fp8(state: State) -> State:
    """As ComfyUI's ``…_fp8_e4m3fn_scaled``: matrices in fp8 with a scale each."""
    result: State = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, value in state.items():
        if value.ndim == 2 and "shared" not in name:
            scale = value.abs().max() / 448
            result[name] = (value / scale).to(torch.float8_e4m3fn)
            result[name.replace(".weight", ".scale_weight")] = scale
        else:
            result[name] = value
    return result
