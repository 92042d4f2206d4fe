"""ComfyUI's form of HunyuanVideo's LoRA, at the published width; nothing but the adapter takes memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_hunyuan_video_lora_to_diffusers as to_diffusers
from safetensors.torch import load_file

from videotune.adapters.lora import matching
from videotune.errors import VideotuneError
from videotune.exporter.formats import formats_of, refuse_format
from videotune.exporter.lora import export_lora
from videotune.models.registry import find

Bases = Callable[..., Path]
NAME = "hunyuan_video"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tiny_bases: Bases) -> Any:
    """The family over a config of the published width with one block of each kind; no weights are read for an export."""
    folder = tmp_path_factory.mktemp("wide") / "base"
    shutil.copytree(tiny_bases(NAME), folder)
    path = folder / "transformer" / "config.json"
    real = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 1, "num_single_layers": 1}
    real |= {"mlp_ratio": 0.5}  # a feed-forward of 1,536: what is joined keeps its width of 3,072
    path.write_text(json.dumps(json.loads(path.read_text()) | real | {"rope_axes_dim": [16, 56, 56]}))
    return find(NAME)(folder, torch.device("cpu"), torch.float32)


def lora_on(family: Any, targets: Any, rank: int = 2) -> dict[str, torch.Tensor]:
    net, state = family.skeleton(), {}
    for number, path in enumerate(matching(net, family.spec, targets)):
        module, random = net.get_submodule(path), torch.Generator().manual_seed(number)
        state[f"{path}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=random)
        state[f"{path}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=random)
    return state


@pytest.mark.parametrize("targets", ["attention", "feed_forward", ["single_transformer_blocks.*proj_out", "attn.to_k"]])
def test_diffusers_reads_the_joined_weights_back(targets: Any, wide: Any, tmp_path: Path) -> None:
    """With modules of a joined weight that have no update, and without the one by which diffusers knows the form."""
    state = lora_on(wide, targets)
    done = export_lora(wide, "comfyui", state, 1.5, tmp_path / "c.safetensors", {})
    assert done.max_error <= 1e-6
    assert done.modules == len(state) // 2
    keys = set(load_file(done.path))
    assert not any(key.startswith("transformer.") or ".to_" in key or "proj_mlp" in key for key in keys)
    assert any("img_attn_qkv" in key for key in keys)
    assert set(to_diffusers(load_file(done.path))) >= {f"transformer.{name}" for name in state}


def test_a_form_that_cannot_be_proved_or_joined_is_refused(wide: Any, tiny_bases: Bases) -> None:
    tiny = find(NAME)(tiny_bases(NAME), torch.device("cpu"), torch.float32)
    assert formats_of(tiny, "LORA") == ("diffusers",)
    assert formats_of(wide, "LORA") == ("comfyui", "diffusers")
    for kind in ("LOHA", "LOKR"):
        assert formats_of(wide, kind) == ("peft",)
        with pytest.raises(VideotuneError, match=r"several modules into one weight.*--merge"):
            refuse_format(wide, kind, "comfyui")
