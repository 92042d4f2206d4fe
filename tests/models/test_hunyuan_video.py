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

from tests.models.models_kit import batch_of, clip_of, noisy_lora, small_shape
from tests.models.test_family_outputs import same_words
from videotune.errors import VideotuneError
from videotune.exporter.lora import export_lora
from videotune.models.hunyuan_video import CROP, TEMPLATE, HunyuanVideo
from videotune.types import ClipShape, SampleRequest

Bases, Open = Callable[..., Path], Callable[..., Any]
NAME = "hunyuan_video"
LONG = "a much longer caption than any that the tokenizer of single letters leaves whole, " * 6


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


def test_what_only_looks_like_it_is_refused(tiny_bases: Bases, tmp_path: Path) -> None:
    for number, kind in enumerate(("latent_concat", "token_replace")):
        folder = changed(tiny_bases(NAME), tmp_path / str(number), "transformer/config.json", image_condition_type=kind)
        with pytest.raises(VideotuneError, match="text-to-video checkpoint alone"):
            HunyuanVideo.read_spec(folder)
    with pytest.raises(VideotuneError, match="reads 9 channels"):
        HunyuanVideo.read_spec(changed(tiny_bases(NAME), tmp_path / "nine", "transformer/config.json", in_channels=9))


def test_native_numbers() -> None:
    """24 fps, 4n+1 frames, sides of multiples of 16: the published shape has 118,800 tokens."""
    rules = HunyuanVideo.spec.rules
    assert (rules.fps, rules.frame_step, rules.frame_rest, rules.side_multiple) == (24, 4, 1, 16)
    assert HunyuanVideo.spec.tokens(ClipShape(129, 720, 1280, 24.0)) == 33 * 45 * 80
    assert HunyuanVideo.spec.licence == "Tencent Hunyuan Community License"


@pytest.mark.parametrize("caption", ["a red circle moves left", "", "Ünïcode — and {braces} &amp; entities", LONG])
def test_text_is_what_the_pipeline_feeds(caption: str, tiny_bases: Bases, tiny_family: Open) -> None:
    """Where the mask shows it; what it hides changes no bit that matters: the network says the same of both."""
    family, pipe = tiny_family(NAME), pipeline_of(tiny_bases(NAME))
    ours = family.condition(family.encode_text([caption]))
    with torch.no_grad():
        text, pooled, mask = pipe.encode_prompt(caption)
    shown = mask.bool()
    assert ours.text.shape == text.shape == (1, 256, 16)
    assert torch.equal(ours.text_mask, shown)
    assert torch.equal(ours.text[shown], text[shown])
    assert torch.equal(ours.extras["pooled"], pooled)
    net, x, t = family.denoiser(), torch.randn(1, 4, 2, 4, 4), torch.tensor([400.0])

    def says(states: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return net(x, t, states, mask.float(), pooled, torch.tensor([1000.0]), return_dict=False)[0]

    torch.testing.assert_close(says(ours.text), says(text), rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("distilled", [True, False])
def test_our_frames_are_those_of_the_pipeline_with_the_exported_file(
    distilled: bool, tiny_bases: Bases, tmp_path: Path
) -> None:
    """What previews draw is what a person gets who loads the file with plain diffusers, however it is guided."""

    folder = tiny_bases(NAME)
    if not distilled:
        folder = tmp_path / "undistilled"
        shutil.copytree(tiny_bases(NAME), folder)
        from diffusers import HunyuanVideoTransformer3DModel as Net

        net = Net.from_config(Net.load_config(folder / "transformer") | {"guidance_embeds": False})
        net.save_pretrained(folder / "transformer")
    family = HunyuanVideo(folder, torch.device("cpu"), torch.float32)
    shape, net = small_shape(family), family.denoiser()
    state = noisy_lora(family, net)
    cond, uncond = (family.condition(family.encode_text([text])) for text in ("a zorble", ""))
    request = SampleRequest(shape, 3, 4.0, (7,))
    ours = family.decode(family.sample({"transformer": net}, cond, uncond, request)[0])
    pipe = pipeline_of(folder)
    guided = {"guidance_scale": 4.0} if distilled else {"guidance_scale": 1.0, "true_cfg_scale": 4.0}

    def theirs() -> torch.Tensor:
        frames = pipe(
            "a zorble", negative_prompt="", num_frames=shape.frames, height=shape.height, width=shape.width,
            num_inference_steps=3, generator=torch.Generator().manual_seed(7), output_type="pt", **guided,
        ).frames[0]  # fmt: skip
        return frames.permute(1, 0, 2, 3) * 2 - 1

    without = theirs()
    pipe.load_lora_weights(str(export_lora(family, "diffusers", state, 2.0, tmp_path / "l.safetensors", {}).path))
    torch.testing.assert_close(ours, theirs(), rtol=0, atol=1e-5)
    assert (ours - without).abs().max() > 1e-3, "the adapter must have changed the frames for this to mean anything"


def test_latents_have_the_scale_of_the_checkpoint(tiny_bases: Bases, tiny_family: Open) -> None:
    """Also of more frames than the VAE takes at a time; the variance goes with the square of the scale."""
    family, pipe = tiny_family(NAME), pipeline_of(tiny_bases(NAME))
    clip = clip_of(family, ClipShape(21, 32, 32, 24.0), 0)
    with torch.no_grad():
        dist = pipe.vae.encode(clip[None]).latent_dist
    moments = family.encode_video(clip)
    torch.testing.assert_close(moments.mean, 0.476986 * dist.mean[0])
    torch.testing.assert_close((0.5 * moments.logvar).exp(), 0.476986 * dist.std[0])
    with torch.no_grad():
        theirs = pipe.vae.decode(moments.mean[None] / 0.476986).sample[0].clamp(-1, 1)
    torch.testing.assert_close(family.decode(moments.mean), theirs, rtol=0, atol=1e-5)


def test_isolated_frames_are_a_mask_in_diffusers_own_attention(tiny_family: Open) -> None:
    """The same as the whole attention under the mask that says it, with captions of unequal length."""
    family = tiny_family(NAME)
    batch = batch_of(family, ["a red circle", "b"], shape=ClipShape(13, 32, 48, 24.0))
    net, t = family.denoiser(), torch.tensor([0.3, 0.8])
    frames, tokens, length = 4, 2 * 3, 256
    place = torch.cat([torch.arange(frames).repeat_interleave(tokens), torch.full((length,), -1)])
    seen = (place[:, None] == place[None]) | ((place[None] == -1) & (place[:, None] >= 0))

    def masked(_: Any, words: Any, named: dict[str, Any]) -> Any:
        return words, named | {"attention_mask": named["attention_mask"] & seen[None, None]}

    attentions = [b.attn for blocks in (net.transformer_blocks, net.single_transformer_blocks) for b in blocks]
    handles = [attn.register_forward_pre_hook(masked, with_kwargs=True) for attn in attentions]
    with torch.no_grad():
        wanted = family.predict(net, batch.x0, t, batch)
    for handle in handles:
        handle.remove()
    family.isolate_frames(net, True)
    with torch.no_grad():
        found = family.predict(net, batch.x0, t, batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_presets_ask_for_what_the_checkpoint_takes(tiny_bases: Bases) -> None:
    from videotune.config.load import preset_about, preset_names, read_preset
    from videotune.config.resolve import resolve
    from videotune.data.frame_sampling import snap_frames

    ours = [name for name in preset_names() if name.startswith("hunyuan")]
    assert [name.rpartition(" ")[2] for name in ours] == ["16GB", "24GB", "48GB"]
    for name in ours:
        preset = read_preset(name)
        config = resolve({}, preset, HunyuanVideo.read_spec(tiny_bases(NAME))).config
        assert (
            snap_frames(preset["video_config"]["frames"], HunyuanVideo.spec.rules) == preset["video_config"]["frames"]
        )
        assert preset["resolution"] % HunyuanVideo.spec.rules.side_multiple == 0
        assert config.timestep_shift == 7.0
        assert "memory not measured" in preset_about(name)


def test_gradients_reach_every_weight_that_trains(tiny_family: Open) -> None:
    """Of all the network's weights: the text's side of the blocks and its refiner too, with captions of unequal length."""
    family = tiny_family(NAME)
    batch, net = batch_of(family, ["a red circle", ""]), family.denoiser().requires_grad_(True)
    family.predict(net, torch.randn_like(batch.x0), torch.tensor([0.3, 0.8]), batch).square().mean().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not bool(p.grad.any())] == []
