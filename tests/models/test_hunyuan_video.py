"""HunyuanVideo's own facts, against diffusers' pipeline; its LoRA in ComfyUI's form is in test_hunyuan_video_export.py."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

from tests.models.models_kit import batch_of, edit, opened
from videotune.errors import VideotuneError
from videotune.models.hunyuan_video import CROP, TEMPLATE

Bases, Open = Callable[..., Path], Callable[..., Any]
NAME = "hunyuan_video"


def test_the_template_is_the_pipelines() -> None:
    assert {"template": TEMPLATE, "crop_start": CROP} == DEFAULT_PROMPT_TEMPLATE


def test_a_tokenizer_is_read_as_its_file_says(tiny_bases: Bases, tmp_path: Path) -> None:
    """The published index names Llama's own class, which in transformers 5 splits otherwise than the file: ours does not."""
    folder = Path(shutil.copytree(tiny_bases(NAME), tmp_path / "base"))
    edit(folder / "tokenizer" / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    edit(folder / "model_index.json", tokenizer=["transformers", "LlamaTokenizerFast"])
    told = TEMPLATE.format("a red circle")
    one, other = (opened(NAME, place).tokenizers()["text_encoder"](told) for place in (tiny_bases(NAME), folder))
    assert one.input_ids == other.input_ids
    assert HunyuanVideoPipeline.from_pretrained(folder).tokenizer(told).input_ids != one.input_ids


def test_another_tokenizer_is_refused(tiny_bases: Bases, tmp_path: Path) -> None:
    """Where other than 95 tokens stand in front of a caption, the pipeline would cut at another place."""
    folder = Path(shutil.copytree(tiny_bases(NAME), tmp_path / "base"))
    words = folder / "tokenizer" / "tokenizer.json"
    edit(folder / "tokenizer" / "tokenizer_config.json", padding_side="left")
    with pytest.raises(VideotuneError, match="pads on the left and reads 95 tokens"):
        opened(NAME, folder).tokenizers()
    edit(words, added_tokens=json.loads(words.read_text())["added_tokens"][:-1])
    with pytest.raises(VideotuneError, match=r"is not HunyuanVideo's tokenizer: .* reads \d{3} tokens"):
        opened(NAME, folder).tokenizers()


def test_the_noise_level_is_told_in_float32(tiny_family: Open) -> None:
    family, said = tiny_family(NAME, torch.bfloat16), []
    net = family.denoiser()
    net.register_forward_pre_hook(lambda _, words, named: said.append(named), with_kwargs=True)
    with torch.no_grad():
        family.predict(net, torch.randn(1, 4, 2, 4, 4), torch.tensor([0.7317]), batch_of(tiny_family(NAME), ["a"]))
    assert said[0]["timestep"].dtype == torch.float32
    assert said[0]["timestep"].item() == pytest.approx(731.7, abs=1e-4)
    assert said[0]["guidance"].tolist() == [1000.0]


def test_gradients_reach_every_weight_that_trains(tiny_family: Open) -> None:
    """Of all the network's weights: the text's side of the blocks and its refiner too, with captions of unequal length."""
    family = tiny_family(NAME)
    batch, net = batch_of(family, ["a red circle", ""]), family.denoiser().requires_grad_(True)
    family.predict(net, torch.randn_like(batch.x0), torch.tensor([0.3, 0.8]), batch).square().mean().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())] == []
