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

from tests.models.models_kit import batch_of, small_shape
from tests.models.test_family_outputs import same_words
from videotune.errors import VideotuneError
from videotune.models.hunyuan_video import CROP, TEMPLATE, HunyuanVideo
from videotune.types import SampleRequest

Bases, Open = Callable[..., Path], Callable[..., Any]
NAME = "hunyuan_video"


def pipeline_of(folder: Path) -> Any:
    pipe = HunyuanVideoPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def changed(base: Path, folder: Path, part: str, **words: Any) -> Path:
    shutil.copytree(base, folder)
    path = folder / part
    path.write_text(json.dumps(json.loads(path.read_text()) | words))
    return folder


def test_the_template_is_the_pipelines() -> None:
    assert {"template": TEMPLATE, "crop_start": CROP} == DEFAULT_PROMPT_TEMPLATE


def test_the_states_are_of_the_layer_that_the_pipeline_takes(tiny_family: Open) -> None:
    """Two layers before the last, cached as in the step: the last one has the norm, and another content."""
    family = tiny_family(NAME)
    part = family.text_parts()["text_encoder"]
    told = part.tokenizer(TEMPLATE.format("a red circle"), return_tensors="pt")
    with torch.no_grad():
        layers = part.encoder(**told, output_hidden_states=True).hidden_states
    cached, live = family.encode_text(["a red circle"])[0]["text"], family.encode_in_loop(["a red circle"]).text[0]
    assert len(layers) == 4 + 1
    torch.testing.assert_close(cached, layers[-3][0, CROP:], rtol=0, atol=1e-6)
    assert torch.equal(live[: len(cached)], cached)
    assert (layers[-1][0, CROP:] - cached).abs().max() > 0.1


def test_a_tokenizer_is_read_as_its_file_says(tiny_bases: Bases, tmp_path: Path) -> None:
    """The published index names Llama's own class, which in transformers 5 splits otherwise than the file: ours does not."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_bases(NAME), folder)
    for file, key in (("tokenizer/tokenizer_config.json", "tokenizer_class"), ("model_index.json", "tokenizer")):
        words = json.loads((folder / file).read_text())
        words[key] = "LlamaTokenizerFast" if key == "tokenizer_class" else ["transformers", "LlamaTokenizerFast"]
        (folder / file).write_text(json.dumps(words))
    told = TEMPLATE.format("a red circle")
    one, other = (
        HunyuanVideo(place, torch.device("cpu"), torch.float32).tokenizers()["text_encoder"]
        for place in (tiny_bases(NAME), folder)
    )
    assert one(told).input_ids == other(told).input_ids
    assert pipeline_of(folder).tokenizer(told).input_ids != one(told).input_ids


def test_another_tokenizer_is_refused(tiny_bases: Bases, tmp_path: Path) -> None:
    """Where other than 95 tokens stand in front of a caption, the pipeline would cut at another place."""
    cpu = torch.device("cpu")
    left = changed(tiny_bases(NAME), tmp_path / "left", "tokenizer/tokenizer_config.json", padding_side="left")
    with pytest.raises(VideotuneError, match="pads on the left and reads 95 tokens"):
        HunyuanVideo(left, cpu, torch.float32).tokenizers()
    tokens = json.loads((left / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
    short = changed(tiny_bases(NAME), tmp_path / "short", "tokenizer/tokenizer.json", added_tokens=tokens[:-1])
    with pytest.raises(VideotuneError, match=r"is not HunyuanVideo's tokenizer: .* reads \d{3} tokens"):
        HunyuanVideo(short, cpu, torch.float32).tokenizers()


@pytest.mark.parametrize("wrong", ["guidance", "timestep", "encoder_attention_mask", "pooled_projections"])
def test_a_wrong_word_to_the_network_is_seen(wrong: str, tiny_family: Open) -> None:
    """What the contract compares would see a guidance of 6 for 1, k in 999 for 1000, no mask, another pooled state."""
    family, heard = tiny_family(NAME), []
    batch, shape = batch_of(family, ["a red circle"]), small_shape(family)
    net = family.denoiser()
    hook = lambda _, words, named: heard.append(("transformer", dict(named)))  # noqa: E731
    handle = net.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        family.sample({"transformer": net}, batch.cond, None, SampleRequest(shape, 2, 1.0, (3,)))
    theirs = heard[0][1]
    assert same_words(family, net, batch, theirs, heard) == []
    handle.remove()
    planted = {"guidance": 6.0, "timestep": 0.999, "encoder_attention_mask": 0.0, "pooled_projections": 1.5}

    def plant(_: Any, words: Any, named: dict[str, Any]) -> Any:
        told = named | {wrong: named[wrong] * planted[wrong]}
        heard.append(("transformer", told))
        return words, told

    net.register_forward_pre_hook(plant, with_kwargs=True)
    assert same_words(family, net, batch, theirs, heard) == [wrong]


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
