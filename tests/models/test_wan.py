"""Wan's own facts, against diffusers' pipeline and the published configurations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from videotune.adapters.lora import add_lora
from videotune.config.schema import Lora
from videotune.exporter.lora import export_lora
from videotune.models.base import renamed
from videotune.models.wan import Wan


def test_comfyui_names_are_the_authors(tiny_family: Callable[..., Any], tmp_path: Path) -> None:
    assert renamed("blocks.3.attn1.to_q", Wan.comfyui_names) == "blocks.3.self_attn.q"
    assert renamed("blocks.3.attn2.to_out.0", Wan.comfyui_names) == "blocks.3.cross_attn.o"
    assert renamed("blocks.3.attn2.add_k_proj", Wan.comfyui_names) == "blocks.3.cross_attn.k_img"
    assert renamed("blocks.0.ffn.net.0.proj", Wan.comfyui_names) == "blocks.0.ffn.0"
    assert renamed("blocks.0.ffn.net.2", Wan.comfyui_names) == "blocks.0.ffn.2"
    family = tiny_family("wan")
    net = family.denoiser()
    state = add_lora(net, family.spec, Lora(rank=1), seed=0)
    for parameter in state.values():
        parameter.data.fill_(1.0)
    path = export_lora(family, "comfyui", state, 1.0, tmp_path / "c.safetensors", {}).path
    keys = set(load_file(path))
    assert "diffusion_model.blocks.1.cross_attn.k.lora_A.weight" in keys
    assert not any("alpha" in key for key in keys)


def test_a_shift_of_ones_own_changes_the_schedule(tiny_family: Callable[..., Any]) -> None:
    family = tiny_family("wan")
    usual, moved = family.pipeline({}), family.pipeline({}, shift=9.0)
    for pipe in (usual, moved):
        pipe.scheduler.set_timesteps(4)
    assert moved.scheduler.timesteps[1] > usual.scheduler.timesteps[1]
