"""Files of a new token: what is written is read back to the bit, and what other programs
leave out is found; and the bounds of a LoRA's scale.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import (
    _names_modules_of,
    export_embedding,
    read_embedding,
)
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.read_scale import read_scale

Tensors = dict[str, torch.Tensor]


def rows_of(family: Any, count: int = 2) -> Tensors:
    """Rows of each text encoder's width."""
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for name, encoder in family.text_skeletons().items():
        width = encoder.get_input_embeddings().embedding_dim
        rows[name] = torch.randn(count, width, generator=generator)
    return rows


@pytest.mark.parametrize("name", ["wan", "hunyuan_video"])
def test_diffusers_has_a_file_for_each_encoder_and_comfyui_one_for_all(
    name: str, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family(name)
    rows = rows_of(family)
    one_for_all, *others = export_embedding(
        family, "comfyui", rows, "<x>", tmp_path / "all", {"step": 3}
    )
    assert not others
    assert one_for_all.path == tmp_path / "all.safetensors"
    assert (one_for_all.format, one_for_all.modules) == ("comfyui", len(rows))
    assert (one_for_all.max_error, one_for_all.reader) == (
        0.0,
        "safetensors, by the key that ComfyUI asks for",
    )
    token, read = read_embedding(family, one_for_all.path)
    assert token == "<x>"
    assert read.keys() == rows.keys()
    assert all(torch.equal(read[encoder], rows[encoder]) for encoder in rows)

    exports = export_embedding(
        family, "diffusers", rows, "<x>", tmp_path / "each", {"step": 3}
    )
    assert len(exports) == len(rows)
    for exported, (encoder, value) in zip(exports, rows.items(), strict=True):
        suffix = f"-{encoder}" if len(rows) > 1 else ""
        assert exported.path == tmp_path / f"each{suffix}.safetensors"
        assert (exported.format, exported.modules) == ("diffusers", 1)
        assert (exported.max_error, exported.reader) == (
            0.0,
            "diffusers load_textual_inversion",
        )
        assert load_file(exported.path).keys() == {"<x>"}
        token, read = read_embedding(family, exported.path)
        assert token == "<x>"
        assert read.keys() == {encoder}
        assert torch.equal(read[encoder], value)


def test_a_file_without_a_token_is_named_by_its_own_name(
    family: Any, tmp_path: Path
) -> None:
    """One row may be a vector, and rows in half precision become float32."""
    ((encoder, rows),) = rows_of(family, count=1).items()
    path = tmp_path / "my  new cat.safetensors"
    save_file({"emb_params": rows[0].half()}, path)
    token, read = read_embedding(family, path)
    assert token == "my-new-cat"
    assert read[encoder].dtype == torch.float32
    assert torch.equal(read[encoder], rows.half().float())

    save_file({"<y>": rows}, path)
    assert read_embedding(family, path)[0] == "<y>"
    save_file({"umt5xxl": rows}, path)
    token, read = read_embedding(family, path)
    assert (token, list(read)) == ("my-new-cat", [encoder])


def test_files_without_rows_of_a_token_are_refused(family: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(VideotuneError, match="no such file of new tokens"):
        read_embedding(family, path)
    rows = torch.ones(2, 3)
    for tensors in ({"b": rows.clone(), "a": rows}, {"a": rows[None]}):
        save_file(tensors, path)
        with pytest.raises(VideotuneError, match="it has the keys a"):
            read_embedding(family, path)


def test_each_tensor_of_a_file_must_belong_to_a_module() -> None:
    net = nn.Sequential(nn.Linear(1, 1))
    key = "transformer.0.lora_A.weight"
    assert _names_modules_of(
        net, {key: torch.ones(1), "0.lora_B.weight": torch.ones(1)}
    )
    other = "transformer.1.lora_A.weight"
    assert not _names_modules_of(net, {key: torch.ones(1), other: torch.ones(1)})


@pytest.mark.parametrize(
    ("alpha", "scale"),
    [(0.0, None), (-1.0, None), (1e-3, 5e-4), (2000.0, 1000.0), (2001.0, None)],
)
def test_a_scale_is_above_0_and_at_most_1000(
    alpha: float, scale: float | None, tmp_path: Path
) -> None:
    """Of an alpha beside factors of rank 2."""
    path = tmp_path / "x.safetensors"
    parts = {"lora_A": torch.ones(2, 3), "lora_B": torch.ones(4, 2)}
    save_file({f"to_q.{part}.weight": x for part, x in parts.items()}, path)
    file = AdapterFile(path)
    if scale is None:
        with pytest.raises(VideotuneError, match="is not a valid scale"):
            read_scale(file, parts, torch.tensor(alpha), "to_q")
    else:
        read = read_scale(file, parts, torch.tensor(alpha), "to_q")
        assert read == (pytest.approx(scale), "tensor")
