"""What is written does elsewhere what was trained here, or is not written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from videotune.adapters.lora import add_lora, updates
from videotune.config.schema import Lora
from videotune.errors import VideotuneError
from videotune.export import lora as room
from videotune.export.formats import digest_of
from videotune.export.lora import baked, export_lora, read_back

Open = Callable[..., Any]


@pytest.fixture
def trained(tiny_family: Open) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    family = tiny_family("wan")
    state = add_lora(family.denoiser(), family.spec, Lora(rank=4, alpha=8), seed=0)
    for parameter in state.values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    return family, state


def test_alpha_is_in_b_and_nowhere_else(trained: tuple[Any, Any], tmp_path: Path) -> None:
    """A reader that assumes alpha = rank, and one that reads alpha, then apply the same update."""
    family, state = trained
    path = export_lora(family, "diffusers", state, 2.0, tmp_path / "x.safetensors", {"step": 3, "word": "zörble"}).path
    tensors = load_file(path)
    assert not any("alpha" in name for name in tensors)
    b = tensors["transformer.blocks.0.attn1.to_q.lora_B.weight"]
    torch.testing.assert_close(b, 2.0 * state["blocks.0.attn1.to_q.lora_B.weight"].detach())
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert set(header) == {"format", "videotune"}, "lora_adapter_metadata would make diffusers scale a second time"
    assert json.loads(header["videotune"]) == {"step": 3, "word": "zörble", "digest": digest_of(tensors)}


def test_reading_back_finds_a_wrong_scale(trained: tuple[Any, Any], tmp_path: Path) -> None:
    """The check can fail: a file with B twice as large is told apart from what was trained."""
    family, state = trained
    path = tmp_path / "wrong.safetensors"
    save_file({k: v * 2 if "lora_B" in k else v for k, v in baked(family, "diffusers", state, 2.0).items()}, path)
    wanted, found = updates(state, 2.0), read_back(family, path)
    assert set(wanted) == set(found)
    name = next(iter(wanted))
    torch.testing.assert_close(found[name], 2 * wanted[name], rtol=1e-6, atol=1e-6)


def test_a_file_that_would_act_otherwise_is_an_error(
    trained: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, state = trained
    real = room.baked

    def halved(*words: Any) -> dict[str, torch.Tensor]:
        return {k: v / 2 if "lora_B" in k else v for k, v in real(*words).items()}

    monkeypatch.setattr(room, "baked", halved)
    with pytest.raises(VideotuneError, match="ΔW differs"):
        export_lora(family, "diffusers", state, 2.0, tmp_path / "x.safetensors", {})


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "NaN"), (float("inf"), "NaN or infinite"), (0.0, "is zero")]
)
def test_an_adapter_that_helps_nobody_is_not_exported(
    value: float, words: str, trained: tuple[Any, Any], tmp_path: Path
) -> None:
    family, state = trained
    for name, parameter in state.items():
        if "lora_B" in name:
            parameter.data.fill_(value)
    with pytest.raises(VideotuneError, match=words):
        export_lora(family, "comfyui", state, 1.0, tmp_path / "x.safetensors", {})
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_names_the_known(trained: tuple[Any, Any], tmp_path: Path) -> None:
    family, state = trained
    with pytest.raises(VideotuneError, match="comfyui, diffusers"):
        export_lora(family, "kohya", state, 1.0, tmp_path / "x.safetensors", {})
