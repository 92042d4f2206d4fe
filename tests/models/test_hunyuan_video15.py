"""What only HunyuanVideo 1.5 does: its prompt, kinds of samples that are predicted apart,
attention and an encoder of its own, names in the authors' files.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15AttnProcessor2_0,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
)

from tests.support.families import (
    batch_of,
    clip_of,
    edit_json,
    first_of,
    open_family,
    small_shape,
)
from videotune.config.resolve import resolve
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_parts
from videotune.exporter.single_file_export import in_one_layout
from videotune.models.base import DiffusersModel
from videotune.models.hunyuan_video15_encoder import save_memory
from videotune.models.hunyuan_video15_names import (
    AUTHORS_FILE_NAMES,
    COMFYUI_FILE_NAMES,
)
from videotune.models.hunyuan_video15_prompt import CROP, SYSTEM_MESSAGE, TEMPLATE
from videotune.models.planning_mode import select_all
from videotune.models.registry import find
from videotune.planner.measure import FakeRun
from videotune.presets.shipped import read_preset
from videotune.types import Batch, ClipShape

Bases, Open = Callable[..., Path], Callable[..., Any]
NAME = "hunyuan_video15"


# the prompt


def test_the_template_is_the_pipelines(tiny_bases: Bases) -> None:
    """Also with the chat template that comes with the checkpoint, which is not run."""
    pipe = diffusers.HunyuanVideo15Pipeline.from_pretrained(tiny_bases(NAME))
    assert pipe.system_message == SYSTEM_MESSAGE
    assert pipe.prompt_template_encode_start_idx == CROP
    messages = [
        {"role": "system", "content": SYSTEM_MESSAGE},
        {"role": "user", "content": "a cat"},
    ]
    family = open_family(NAME, tiny_bases(NAME))
    for tokenizer in (pipe.tokenizer, family.tokenizers()["text_encoder"]):
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert text == TEMPLATE.format("a cat")


def test_a_chat_template_of_the_checkpoint_is_not_run(
    tiny_bases: Bases, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bases(NAME), tmp_path / "base"))
    template = folder / "tokenizer" / "chat_template.jinja"
    assert template.is_file()
    template.write_text("{{ raise_exception('it ran') }}")
    family = open_family(NAME, folder)
    assert len(family.encode_text(["a cat"])[0]["text"]) == family.text_length("a cat")


@pytest.mark.parametrize("how", ["left", "another template"])
def test_a_tokenizer_that_the_pipeline_would_cut_wrongly_is_refused(
    how: str, tiny_bases: Bases, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bases(NAME), tmp_path / "base"))
    if how == "left":
        edit_json(folder / "tokenizer" / "tokenizer_config.json", padding_side="left")
    else:
        path = folder / "tokenizer" / "tokenizer.json"
        path.write_text(path.read_text().replace("Describe", "Depict"))
        path.write_text(
            path.read_text().replace('"content": "assistant"', '"content": "zzz"')
        )
    with pytest.raises(VideotuneError, match=r"is not HunyuanVideo 1\.5's tokenizer"):
        open_family(NAME, folder).tokenizers()


def test_only_quoted_text_is_read_by_the_second_encoder(tiny_family: Open) -> None:
    family = tiny_family(NAME)
    plain, quoted, curly = family.encode_text(
        ["a sign", 'a sign "abc"', "a sign “abc”"]
    )
    assert len(plain["glyph"]) == 0
    # Text "abc". and a blank, and the end mark
    assert len(quoted["glyph"]) == len('Text "abc". ') + 1
    assert torch.equal(quoted["glyph"], curly["glyph"])
    assert "text_encoder_2" not in family.text_parts()
    assert not torch.equal(quoted["text"], plain["text"])


# kinds of samples


@pytest.fixture
def mixed(tiny_family: Open) -> tuple[Any, nn.Module, Batch]:
    """Four samples, of which the second and the last are shown no image."""
    family = tiny_family(NAME, variant="i2v")
    batch = batch_of(family, ["a", 'b "c"', "a much longer caption", ""])
    extras = {name: value.clone() for name, value in batch.conditioning.extras.items()}
    for name in ("image", "vision"):
        extras[name][[1, 3]] = 0
    conditioning = replace(batch.conditioning, extras=extras)
    return family, first_of(family), replace(batch, conditioning=conditioning)


def test_no_sample_depends_on_whether_its_neighbours_have_an_image(
    mixed: tuple[Any, nn.Module, Batch],
) -> None:
    """The network alone would tell a text sample that it has an image, too."""
    family, net, batch = mixed
    x_t = torch.randn_like(batch.x0)
    t = torch.tensor([0.2, 0.4, 0.6, 0.8])
    with torch.no_grad():
        together = family.predict(net, x_t, t, batch)
        alone = torch.cat(
            [
                family.predict(net, x_t[[i]], t[[i]], batch.take([i]))
                for i in range(len(batch))
            ]
        )
        unsplit = family._predict_one_kind(net, x_t, t, batch)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    away = (unsplit - alone).flatten(1).abs().amax(1)
    assert away[[1, 3]].min() > 1e-3
    assert away[[0, 2]].max() < 1e-5


def test_gradients_come_back_in_order(mixed: tuple[Any, nn.Module, Batch]) -> None:
    family, net, batch = mixed
    x_t = torch.randn_like(batch.x0).requires_grad_()
    v = family.predict(net, x_t, torch.full((4,), 0.5), batch)
    v[1].square().sum().backward()
    assert x_t.grad is not None
    moved = x_t.grad.flatten(1).abs().amax(1)
    assert moved[1] > 0
    assert moved[[0, 2, 3]].max() == 0


def test_a_sample_without_an_image_is_that_of_the_model_from_text(
    mixed: tuple[Any, nn.Module, Batch], tiny_bases: Bases
) -> None:
    """Zeros on all channels of an image, and no state of one is seen."""
    family, net, batch = mixed
    from_text = open_family(NAME, tiny_bases(NAME))
    text_batch = batch.take([1, 3])
    extras = dict(text_batch.conditioning.extras)
    del extras["image"], extras["vision"]
    conditioning = replace(text_batch.conditioning, extras=extras)
    bare = replace(text_batch, conditioning=conditioning)
    t = torch.tensor([0.3, 0.7])
    with torch.no_grad():
        shown = family.predict(net, text_batch.x0, t, text_batch)
        without = from_text.predict(net, bare.x0, t, bare)
    torch.testing.assert_close(shown, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "is_refused"),
    [
        ({"first_frame_probability": 0.5}, True),
        ({"first_frame_probability": 0.5, "micro_batch_size": 1}, False),
        ({"first_frame_probability": 0.5, "batch_size": 1}, False),
        ({"first_frame_probability": 1.0}, False),
        ({"first_frame_probability": 0.0}, False),
        ({"first_frame_probability": 0.5, "sharding": "OFF"}, False),
    ],
)
def test_sharded_weights_and_passes_apart(
    keys: dict[str, Any], is_refused: bool, tiny_bases: Bases
) -> None:
    """Processes that run a sharded network unequally often would wait for ever."""
    spec = find(NAME).read_spec(tiny_bases(NAME, "i2v"))
    settings = {"batch_size": 2, "sharding": "FULL", **keys}
    if is_refused:
        with pytest.raises(VideotuneError, match="sharding"):
            resolve(settings, {}, spec)
    else:
        resolve(settings, {}, spec)
    resolve({"batch_size": 2, "sharding": "FULL"}, {}, find(NAME).spec)


# the network


def test_timesteps_are_not_rounded_before_they_are_embedded(tiny_family: Open) -> None:
    """In bfloat16 731 and 733 are the same number."""
    family = tiny_family(NAME, torch.bfloat16)
    batch = batch_of(tiny_family(NAME), ["a"])
    net, embedded = first_of(family), []
    net.get_submodule("time_embed.timestep_embedder").register_forward_pre_hook(
        lambda _, inputs: embedded.append(inputs[0])
    )
    assert torch.tensor(731.0).bfloat16() == torch.tensor(733.0).bfloat16()
    with torch.no_grad():
        for number in (731, 733):
            family.predict(net, batch.x0, torch.tensor([number / 1000]), batch)
    assert not torch.equal(*embedded)
    assert embedded[0].dtype == torch.bfloat16


def test_attention_under_a_mask_of_keys_is_diffusers(tiny_family: Open) -> None:
    """Output and gradients, with captions of unequal length."""
    family = tiny_family(NAME)
    batch = batch_of(family, ["a", 'a much "longer" caption'])
    results = []
    for is_theirs in (False, True):
        net = first_of(family)
        if is_theirs:
            for block in net.get_submodule("transformer_blocks").children():
                attn: Any = block.get_submodule("attn")
                attn.set_processor(HunyuanVideo15AttnProcessor2_0())
        weight = net.get_parameter("transformer_blocks.0.attn.add_k_proj.weight")
        weight.requires_grad_()
        v = family.predict(net, batch.x0, torch.tensor([0.2, 0.7]), batch)
        v.square().mean().backward()
        assert weight.grad is not None
        results.append((v.detach(), weight.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_a_step_on_fake_tensors_has_the_sizes_of_a_real_one() -> None:
    """What a mask and its inverse select have together the size of both."""
    with FakeTensorMode(), select_all():
        states, mask = torch.zeros(7, 3), torch.ones(7).bool()
        assert len(states[mask]) + len(states[~mask]) == 7
        assert len(mask[mask]) + len(mask[~mask]) == 7
        assert states[1:3].shape == (2, 3)
        if torch.all(states == 0):
            pytest.fail("a fake number is false")
    real = torch.tensor([True, False, True])
    with select_all():
        assert len(real[real]) == 2, "real tensors are as they are"
        assert bool(real[0])


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("variant", ["t2v", "i2v"])
def test_the_plan_runs_the_network(
    variant: str, samples: int, tiny_bases: Bases, tiny_family: Open
) -> None:
    family = tiny_family(NAME, variant=variant)
    config = resolve({"base_model_name": "x"}, {}, family.spec).config
    run = FakeRun(family, config)
    reading = run.step(small_shape(family), samples, "ON", (("transformer_blocks", 2),))
    assert reading.phases["forward"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(family), "planning_mode", DiffusersModel.planning_mode)
        with pytest.raises(DataDependentOutputException):
            FakeRun(family, config).step(
                small_shape(family), samples, "ON", (("transformer_blocks", 2),)
            )


# the VAE


@pytest.mark.parametrize("frames", [1, 5, 9, 21])
def test_a_clip_in_little_memory_has_diffusers_latents(frames: int) -> None:
    torch.manual_seed(0)
    theirs, ours = (
        diffusers.AutoencoderKLHunyuanVideo15(
            block_out_channels=(4, 8, 16, 16, 16), latent_channels=4
        )
        for _ in range(2)
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    ours.load_state_dict(theirs.state_dict())
    save_memory(ours)
    clip = torch.rand(1, 3, frames, 32, 48) * 2 - 1
    with torch.no_grad():
        expected, actual = theirs.encode(clip), ours.encode(clip)
        mean = expected.latent_dist.mean
        torch.testing.assert_close(
            actual.latent_dist.parameters,
            expected.latent_dist.parameters,
            rtol=1e-4,
            atol=1e-4,
        )
        torch.testing.assert_close(
            ours.decode(mean).sample, theirs.decode(mean).sample, rtol=1e-4, atol=1e-4
        )


def test_the_first_latent_frame_is_the_image(tiny_family: Open) -> None:
    """The encoder is causal, so a clip's first latent is that of its first frame."""
    family = tiny_family(NAME, variant="i2v")
    shape = ClipShape(13, 32, 48, 24.0)
    moments = family.encode_video(clip_of(family, shape, 0))
    torch.testing.assert_close(
        moments.extras["image"], moments.mean[:, :1], rtol=1e-4, atol=1e-5
    )


# names in other programs

REFINER = "context_embedder.token_refiner.refiner_blocks.0"
THEIR_REFINER = "txt_in.individual_token_refiner.blocks.0"
AUTHORS = {
    f"{REFINER}.norm1.bias": f"{THEIR_REFINER}.norm1.bias",
    f"{REFINER}.attn.to_out.0.weight": f"{THEIR_REFINER}.self_attn_proj.weight",
    f"{REFINER}.ff.net.0.proj.bias": f"{THEIR_REFINER}.mlp.fc1.bias",
    f"{REFINER}.norm_out.linear.weight": f"{THEIR_REFINER}.adaLN_modulation.1.weight",
    "transformer_blocks.0.attn.to_q.weight": "double_blocks.0.img_attn_q.weight",
    "transformer_blocks.0.attn.add_v_proj.bias": "double_blocks.0.txt_attn_v.bias",
    "transformer_blocks.1.attn.to_out.0.weight": "double_blocks.1.img_attn_proj.weight",
    "transformer_blocks.1.attn.to_add_out.weight": "double_blocks.1.txt_attn_proj.weight",
    "transformer_blocks.0.attn.norm_q.weight": "double_blocks.0.img_attn_q_norm.weight",
    "transformer_blocks.0.attn.norm_added_k.weight": "double_blocks.0.txt_attn_k_norm.weight",
    "transformer_blocks.0.ff.net.0.proj.weight": "double_blocks.0.img_mlp.fc1.weight",
    "transformer_blocks.0.ff_context.net.2.bias": "double_blocks.0.txt_mlp.fc2.bias",
    "transformer_blocks.0.norm1.linear.weight": "double_blocks.0.img_mod.linear.weight",
    "transformer_blocks.0.norm1_context.linear.bias": "double_blocks.0.txt_mod.linear.bias",
    "context_embedder.proj_in.weight": "txt_in.input_embedder.weight",
    "context_embedder.time_text_embed.timestep_embedder.linear_1.weight": "txt_in.t_embedder.mlp.0.weight",
    "context_embedder.time_text_embed.timestep_embedder.linear_2.bias": "txt_in.t_embedder.mlp.2.bias",
    "context_embedder.time_text_embed.text_embedder.linear_1.bias": "txt_in.c_embedder.linear_1.bias",
    "context_embedder_2.norm.weight": "byt5_in.layernorm.weight",
    "context_embedder_2.linear_3.bias": "byt5_in.fc3.bias",
    "image_embedder.norm_in.weight": "vision_in.proj.0.weight",
    "image_embedder.linear_1.weight": "vision_in.proj.1.weight",
    "image_embedder.linear_2.weight": "vision_in.proj.3.weight",
    "image_embedder.norm_out.bias": "vision_in.proj.4.bias",
    "x_embedder.proj.weight": "img_in.proj.weight",
    "time_embed.timestep_embedder.linear_1.weight": "time_in.mlp.0.weight",
    "cond_type_embed.weight": "cond_type_embedding.weight",
    "proj_out.bias": "final_layer.linear.bias",
}
"""From diffusers' script that converts the authors' files
(scripts/convert_hunyuan_video1_5_to_diffusers.py).
"""


def test_the_authors_names_are_those_of_diffusers_script(tiny_family: Open) -> None:
    """No name is left as it was, and what is joined there comes in their order."""
    net = first_of(tiny_family(NAME))
    state = {key: value.detach() for key, value in net.state_dict().items()}
    file = in_one_layout(state, AUTHORS_FILE_NAMES)
    assert not set(file) & set(state)
    for ours, theirs in AUTHORS.items():
        assert torch.equal(file[theirs], state[ours]), ours

    joined = torch.cat([state[f"{REFINER}.attn.to_{name}.weight"] for name in "qkv"])
    assert torch.equal(file[f"{THEIR_REFINER}.self_attn_qkv.weight"], joined)
    scale, shift = state["norm_out.linear.weight"].chunk(2)
    modulation = file["final_layer.adaLN_modulation.1.weight"]
    assert torch.equal(modulation, torch.cat([shift, scale]))


def test_comfyuis_file_joins_q_k_and_v_of_each_block(tiny_family: Open) -> None:
    net = first_of(tiny_family(NAME))
    state = {key: value.detach() for key, value in net.state_dict().items()}
    authors = in_one_layout(state, AUTHORS_FILE_NAMES)
    comfyui = in_one_layout(state, COMFYUI_FILE_NAMES)
    for stream in ("img", "txt"):
        for kind in ("weight", "bias"):
            parts = [
                authors.pop(f"double_blocks.{i}.{stream}_attn_{name}.{kind}")
                for i in (0, 1)
                for name in "qkv"
            ]
            for i in (0, 1):
                key = f"double_blocks.{i}.{stream}_attn_qkv.{kind}"
                assert torch.equal(
                    comfyui.pop(key), torch.cat(parts[3 * i : 3 * i + 3])
                )
    assert authors.keys() == comfyui.keys()


def test_musubis_names_which_have_q_k_and_v_apart(
    tiny_family: Open, tmp_path: Path
) -> None:
    family, path = tiny_family(NAME), tmp_path / "a.safetensors"
    a, b = torch.randn(4, 24), torch.randn(24, 4)
    name = "lora_unet_double_blocks_1_txt_attn_k"
    tensors = {
        f"{name}.lora_down.weight": a,
        f"{name}.lora_up.weight": b,
        f"{name}.alpha": torch.tensor(2.0),
    }
    save_file(tensors, path)
    parts, scales = read_parts(family, path)
    assert scales == {"transformer_blocks.1.attn.add_k_proj": 0.5}
    assert torch.equal(parts["transformer_blocks.1.attn.add_k_proj"]["lora_A"], a)
    assert load_file(path).keys() == tensors.keys()


@pytest.mark.parametrize("card", [16, 24, 48])
@pytest.mark.parametrize("kind", ["", " I2V"])
def test_presets_are_for_the_480p_checkpoints(kind: str, card: int) -> None:
    preset = read_preset(f"hunyuan 1.5{kind} LoRA {card}GB")
    assert str(preset["base_model_name"]).endswith("480p_i2v" if kind else "480p_t2v")
