"""An adapter on the text connectors of LTX-2: against connectors that run live, and
against diffusers' own pipeline with the exported file.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import families
from tests.support.families import Open
from videotune.adapters.adapter_types import by_module
from videotune.adapters.lora import ADAPTER, adapter_off, add_lora, idle_targets
from videotune.adapters.lora import matching as targeted
from videotune.config.sections import Lora
from videotune.diffusion.base_targets import BaseGuidance, guided_target
from videotune.diffusion.loss import Objective, denoising_loss
from videotune.diffusion.noise_paths import flow_path
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import export_lora, read_adapter
from videotune.exporter.full import export_merged
from videotune.exporter.lora_inspect import inspect
from videotune.exporter.lora_target import Target
from videotune.exporter.lora_tools import convert
from videotune.latent_cache.keys import CacheKeys
from videotune.memory.attention import set_attention
from videotune.memory.block_offload import stream_blocks
from videotune.memory.checkpointing import CPU_OFFLOADED, ON, checkpoint_blocks
from videotune.memory.quantization import QuantizedLinear
from videotune.models.base_model import spec_for
from videotune.models.model_files import CONFIGS
from videotune.models.registry import find
from videotune.types import BasePlace, Batch, SampleRequest, Sound, WeightDtypes

VERSIONS = pytest.mark.parametrize("version", find("ltx2").variants)
WITH_SOUND = pytest.mark.parametrize("has_sound", [False, True])
FLOW = Objective(flow_path, TimestepSampler())
BOTH = ["attention", "connectors"]
CAPTIONS = ["a red circle", ""]


@pytest.fixture
def pair(version: str, tiny_family: Open) -> tuple[Any, Any]:
    """A checkpoint twice: with captions cached after the connectors, and before them."""
    after = tiny_family("ltx2", variant=version)
    before = find("ltx2")(after.folder, torch.device("cpu"), torch.float32)
    before.spec = before.spec.with_connectors()
    return after, before


def with_sound(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    for family in pair:
        family.spec = family.spec.with_sound(["video", "sound"])
    return pair


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_of(family: Any, captions: list[str], has_sound: bool) -> Batch:
    batch = families.batch_of(family, captions)
    if not has_sound:
        return batch
    rules = family.spec.sound
    size = (len(batch), rules.channels, rules.latents(families.small_shape(family)))
    sound = Sound(
        noise(*size, 1, 1, seed=1),
        noise(*size, 1, 1, seed=2),
        torch.linspace(0.3, 0.7, len(batch)),
    )
    return replace(batch, sound=sound)


def loss_of(family: Any, net: Any, batch: Batch) -> Tensor:
    t = torch.linspace(0.4, 0.6, len(batch))
    drawn = noise(*batch.x0.shape, seed=3)
    return denoising_loss(family, net, FLOW, batch, t, drawn).loss


def gradients(parameters: dict[str, Any]) -> dict[str, Tensor | None]:
    found = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return found


@VERSIONS
@WITH_SOUND
@pytest.mark.parametrize("length", ["usual", "as long as the model reads"])
def test_without_an_adapter_both_caches_give_one_prediction_to_the_bit(
    pair: tuple[Any, Any], has_sound: bool, length: str
) -> None:
    after, before = with_sound(pair) if has_sound else pair
    captions = CAPTIONS if length == "usual" else ["many letters " * 100]
    losses = []
    for family in (after, before):
        batch = batch_of(family, captions, has_sound)
        with torch.no_grad():
            losses.append(loss_of(family, families.first_of(family), batch))
    assert torch.equal(*losses)


@VERSIONS
@WITH_SOUND
def test_the_gradient_is_that_of_the_pipelines_connectors_run_live(
    pair: tuple[Any, Any], has_sound: bool
) -> None:
    """The reference knows neither PEFT nor this cache: Gemma and diffusers' whole
    connectors run in the step, with weights W + scale · B A.
    """
    after, before = with_sound(pair) if has_sound else pair
    net = families.first_of(before)
    settings = Lora(rank=4, alpha=8, targets="connectors")
    parameters = add_lora(net, before.spec, settings, seed=0)
    for name, parameter in parameters.items():
        if "lora_B" in name:
            parameter.data.normal_(
                std=0.3, generator=torch.Generator().manual_seed(len(name))
            )
    loss = loss_of(before, net, batch_of(before, CAPTIONS, has_sound))
    loss.backward()

    factors = {name: p.detach().clone() for name, p in parameters.items()}
    for factor in factors.values():
        factor.requires_grad_()
    live = live_batch(after, factors, settings.scale, has_sound)
    expected = loss_of(after, families.first_of(after), live)
    expected.backward()

    torch.testing.assert_close(loss, expected)
    checked = 0
    for name, factor in factors.items():
        gradient = parameters[name].grad
        if name.startswith("connectors.audio") and not has_sound:
            assert gradient is None
            continue
        assert gradient is not None
        assert factor.grad is not None
        assert bool(gradient.any())
        torch.testing.assert_close(gradient, factor.grad, rtol=2e-4, atol=1e-7)
        checked += 1
    assert checked == (24 if has_sound else 12)


def live_batch(
    family: Any, factors: dict[str, Tensor], scale: float, has_sound: bool
) -> Batch:
    """A batch whose captions run through the whole connectors now."""
    pipe = family.text_pipeline()
    weights = dict(pipe.connectors.named_parameters())
    for path, parts in by_module(factors).items():
        name = f"{path.removeprefix('connectors.')}.weight"
        weights[name] = weights[name] + scale * parts["lora_B"] @ parts["lora_A"]

    videos, sounds = [], []
    for caption in CAPTIONS:
        states, mask, *_ = family.encode_prompt(
            caption, do_classifier_free_guidance=False
        )
        video, sound, _ = torch.func.functional_call(
            pipe.connectors,
            weights,
            (states, mask),
            {"padding_side": pipe.tokenizer.padding_side},
        )
        videos.append(video[0])
        sounds.append(sound[0])
    batch = batch_of(family, CAPTIONS, has_sound)
    conditioning = replace(
        batch.conditioning,
        text=torch.stack(videos),
        extras={"audio_text": torch.stack(sounds)},
    )
    return replace(batch, conditioning=conditioning)


@VERSIONS
def test_the_cache_keeps_the_captions_own_tokens(pair: tuple[Any, Any]) -> None:
    after, before = pair
    (plain,) = after.encode_text(["a red circle"])
    (states,) = before.encode_text(["a red circle"])
    tokens = before.text_length("a red circle")
    shares = not json.loads(
        (after.folder / "connectors" / "config.json").read_text()
    ).get("per_modality_projections", False)

    assert len(plain["text"]) == before.spec.text_tokens
    assert {len(value) for value in states.values()} == {tokens}
    assert set(states) == ({"text"} if shares else {"text", "audio_text"})
    assert sum(v.nbytes for v in states.values()) < 0.02 * sum(
        v.nbytes for v in plain.values()
    )
    blank = before.blank_states(families.small_shape(before))
    assert {name: value.shape[1:] for name, value in states.items()} == {
        name: blank[name].shape[1:] for name in states
    }


def test_bytes_of_a_caption_of_the_published_versions() -> None:
    """What docs/ltx2.md says, of a token in bfloat16."""
    numbers = {}
    for name in ("ltx-2-19b", "ltx-2.3-22b"):
        spec = spec_for("ltx2", BasePlace(name, CONFIGS / name)).with_connectors()
        numbers[name] = spec.text_width + spec.text_numbers // spec.text_tokens
    assert {name: 2 * count for name, count in numbers.items()} == {
        "ltx-2-19b": 7680,
        "ltx-2.3-22b": 12288,
    }


@VERSIONS
def test_captions_before_and_after_the_connectors_have_other_names(
    pair: tuple[Any, Any],
) -> None:
    after, before = pair
    names = {CacheKeys.of(family, seed=0).text_key("a red circle") for family in pair}
    assert len(names) == 2
    same = CacheKeys.of(before, seed=1).text_key("a red circle")
    assert same in names
    # Latents do not depend on it.
    assert CacheKeys.of(after, seed=0).vae == CacheKeys.of(before, seed=0).vae


@VERSIONS
def test_targets_name_modules_of_the_connectors(pair: tuple[Any, Any]) -> None:
    _, before = with_sound(pair)
    net = before.skeleton()

    def count(targets: Any) -> tuple[int, int]:
        paths = targeted(net, before.spec, targets)
        inside = sum(before.spec.is_connector(path) for path in paths)
        return inside, len(paths) - inside

    # Two connectors of one block: four projections of an attention and two layers.
    assert count("connectors") == (12, 0)
    assert count(BOTH) == (12, 48)
    assert count(["connectors", "to_k"]) == (12, 12)
    assert count(["to_k"]) == (0, 12)
    assert count([r"connectors\.video_connector\..+\.to_k", "video"]) == (1, 20)
    assert count(["video", "cross_modal"]) == (0, 36)
    with pytest.raises(VideotuneError, match=r"lora\.targets"):
        count([r"connectors\..+\.to_nothing"])
    parameters = add_lora(net, before.spec, Lora(targets=["to_k"]), seed=0)
    assert len(by_module(parameters)) == 12


@VERSIONS
def test_without_sound_the_sounds_connector_gets_no_adapter(
    pair: tuple[Any, Any],
) -> None:
    _, before = pair
    net = before.skeleton()
    paths = targeted(net, before.spec, "connectors")
    left_out = idle_targets(net, before.spec, "connectors")
    assert {path.split(".")[1] for path in paths} == {"video_connector"}
    assert {path.split(".")[1] for path in left_out} == {"audio_connector"}
    assert len(paths) == len(left_out) == 6


@VERSIONS
def test_targets_of_the_transformer_get_no_adapter_in_the_connectors(
    pair: tuple[Any, Any],
) -> None:
    """PEFT compares ends of paths, and blocks of both are numbered alike."""
    _, before = pair
    parameters = add_lora(
        families.first_of(before), before.spec, Lora(targets="linear"), seed=0
    )
    assert not any(map(before.spec.is_connector, parameters))


@VERSIONS
def test_without_its_adapter_the_network_is_the_base_model(
    pair: tuple[Any, Any],
) -> None:
    after, before = pair
    net = families.first_of(before)
    families.noisy_lora(before, net, targets=BOTH)
    batch = batch_of(before, CAPTIONS, has_sound=False)
    with torch.no_grad():
        plain = loss_of(
            after, families.first_of(after), batch_of(after, CAPTIONS, has_sound=False)
        )
        assert not torch.equal(loss_of(before, net, batch), plain)
        with adapter_off(net):
            assert torch.equal(loss_of(before, net, batch), plain)


@VERSIONS
@WITH_SOUND
def test_a_target_from_the_base_model_knows_nothing_of_the_adapter(
    pair: tuple[Any, Any], has_sound: bool
) -> None:
    """Of a distilled base it is with and without the caption, each through the base
    model's connectors.
    """
    targets = []
    for family in with_sound(pair) if has_sound else pair:
        net = families.first_of(family)
        is_in_step = family.spec.connectors_in_step
        families.noisy_lora(family, net, targets=BOTH if is_in_step else "attention")
        batch = batch_of(family, CAPTIONS, has_sound)
        empty = family.collate_states(family.encode_text([""]))
        drawn = noise(*batch.x0.shape, seed=3)
        t = torch.tensor([0.4, 0.6])
        with adapter_off(net):
            targets.append(
                guided_target(
                    family, net, FLOW, batch, t, drawn, BaseGuidance(4.0, empty)
                )
            )
    assert torch.equal(targets[0].video, targets[1].video)
    if has_sound:
        assert torch.equal(targets[0].sound, targets[1].sound)


def trained(family: Any, how: Callable[[Any], Any]) -> tuple[Tensor, dict[str, Any]]:
    """The loss and the gradients of two steps on end, with the network arranged."""
    net = families.first_of(family)
    parameters = families.noisy_lora(family, net, targets=BOTH)
    how((net, parameters))
    losses = []
    collected: dict[str, Any] = {}
    for seed in range(2):
        batch = batch_of(family, CAPTIONS, has_sound=True)
        loss = loss_of(family, net, replace(batch, x0=batch.x0 + seed))
        loss.backward()
        losses.append(loss.detach())
        for name, gradient in gradients(parameters).items():
            collected[f"{seed} {name}"] = gradient
        with torch.no_grad():
            losses.append(loss_of(family, net, batch))
    return torch.stack(losses), collected


@pytest.mark.parametrize(
    ("fraction", "checkpointing"),
    [(0.0, ON), (0.0, CPU_OFFLOADED), (0.5, ON), (1.0, CPU_OFFLOADED)],
)
@pytest.mark.parametrize("version", ["2.3"])
def test_offload_and_checkpointing_change_no_bit(
    pair: tuple[Any, Any], fraction: float, checkpointing: str
) -> None:
    _, before = with_sound(pair)
    streamed = []

    def arrange(made: Any) -> None:
        net, parameters = made
        if not fraction and checkpointing == ON:
            checkpoint_blocks(net, ON)
            return
        offload = stream_blocks(
            net,
            before.spec.block_lists,
            torch.device("cpu"),
            fraction,
            checkpointing,
            tuple(parameters.values()),
        )
        streamed.append(len(offload.streamed))

    plain, expected = trained(before, lambda _: None)
    losses, measured = trained(before, arrange)
    assert torch.equal(losses, plain)
    assert streamed in ([], [round(4 * fraction)])
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert torch.equal(measured[name], gradient), name


@VERSIONS
def test_connectors_are_quantized_as_the_transformer(
    pair: tuple[Any, Any],
) -> None:
    _, before = with_sound(pair)
    packed = find("ltx2")(
        before.folder, torch.device("cpu"), torch.float32, WeightDtypes("INT_8", None)
    )
    packed.spec = before.spec
    net = families.first_of(packed)
    blocks = net.get_submodule("connectors.video_connector.transformer_blocks")
    assert any(isinstance(module, QuantizedLinear) for module in blocks.modules())

    parameters = families.noisy_lora(packed, net, targets=BOTH)
    loss_of(packed, net, batch_of(packed, CAPTIONS, has_sound=True)).backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in parameters.values()
    )
    trains = {name for name, p in net.named_parameters() if p.requires_grad}
    assert len(trains) == len(parameters)


def test_the_connectors_keep_the_attention_of_their_pipeline(
    tiny_family: Open,
) -> None:
    """They are called with masks, which not every backend takes."""
    family = tiny_family("ltx2")
    family.spec = family.spec.with_connectors()
    net = families.first_of(family)
    set_attention(net, "_native_math")
    backends = {"transformer": set(), "connectors": set()}  # type: ignore[var-annotated]
    for path, module in net.named_modules():
        processor = getattr(module, "processor", None)
        if hasattr(processor, "_attention_backend"):
            part = "connectors" if family.spec.is_connector(path) else "transformer"
            backends[part].add(processor._attention_backend.value)
    assert backends == {"transformer": {"_native_math"}, "connectors": {"native"}}


@VERSIONS
@pytest.mark.parametrize("guided", [False, True])
def test_samples_without_an_adapter_are_those_of_cached_results(
    pair: tuple[Any, Any], guided: bool
) -> None:
    drawn = []
    for family in with_sound(pair):
        batch = batch_of(family, ["a red circle"], has_sound=False)
        negative = families.batch_of(family, ["b"]).conditioning if guided else None
        request = SampleRequest(
            families.small_shape(family), 2, 3.0 if guided else 1.0, (1,)
        )
        nets = families.denoisers(family)
        drawn.append(
            family.sample_with_sound(nets, batch.conditioning, negative, request)
        )
    for one, other in zip(*drawn, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@VERSIONS
@pytest.mark.parametrize("targets", [BOTH, "connectors"], ids=["both", "connectors"])
def test_the_pipeline_with_the_exported_file_calls_its_transformer_as_training_does(
    version: str, pair: tuple[Any, Any], targets: Any, tmp_path: Path
) -> None:
    """``load_lora_weights`` of LTX2Pipeline, on its own connectors and transformer."""
    _, before = with_sound(pair)
    net = families.first_of(before)
    state = families.noisy_lora(before, net, targets=targets)
    path = tmp_path / "lora.safetensors"
    exported = export_lora(before, "diffusers", state, 2.0, path, {})
    assert exported.reader == "diffusers load_lora_weights"
    assert exported.modules == len(by_module(state))
    assert {name.partition(".")[0] for name in load_file(path)} == (
        {"transformer", "connectors"} if targets == BOTH else {"connectors"}
    )

    whole = find("ltx2").tiny_pipeline(version)
    encoder = before.text_pipeline().text_encoder
    whole.text_encoder.load_state_dict(encoder.state_dict())
    for part in ("transformer", "connectors"):
        file = before.folder / part / "diffusion_pytorch_model.safetensors"
        getattr(whole, part).load_state_dict(load_file(file))
    whole.load_lora_weights(str(path))
    calls: list[dict[str, Any]] = []

    def keep(_: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        calls.append(keywords)

    whole.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    whole.set_progress_bar_config(disable=True)
    results = whole(
        prompt="a red circle",
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=1.0,
        **before.spec.unguided_arguments,
        **before.spec.pipeline_arguments,
        output_type="latent",
        generator=[torch.Generator().manual_seed(3)],
        return_dict=False,
    )
    batch = batch_of(before, ["a red circle"], has_sound=True)
    with torch.no_grad():
        text = before.text_for_video(net, batch.conditioning)
        sound = before.text_for_sound(net, batch.conditioning)
    torch.testing.assert_close(calls[0]["encoder_hidden_states"], text)
    torch.testing.assert_close(calls[0]["audio_encoder_hidden_states"], sound)

    request = SampleRequest(families.small_shape(before), 2, 1.0, (3,))
    video, _ = before.sample_with_sound(
        {"transformer": net}, batch.conditioning, None, request
    )
    mean = whole.vae.latents_mean.view(1, -1, 1, 1, 1)
    std = whole.vae.latents_std.view(1, -1, 1, 1, 1)
    torch.testing.assert_close(video, (results[0] - mean) / std, rtol=1e-3, atol=1e-3)


@VERSIONS
def test_comfyuis_file_has_its_names_and_is_read_back(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    _, before = with_sound(pair)
    net = families.first_of(before)
    state = families.noisy_lora(before, net, targets=BOTH)
    path = tmp_path / "lora.safetensors"
    export_lora(before, "comfyui", state, 2.0, path, {})
    names = {name.rpartition(".lora_")[0] for name in load_file(path)}
    block = "embeddings_connector.transformer_1d_blocks.0"
    assert {name for name in names if "_connector." in name} == {
        f"diffusion_model.{modality}_{block}.{module}"
        for modality in ("video", "audio")
        for module in (
            "attn1.to_q",
            "attn1.to_k",
            "attn1.to_v",
            "attn1.to_out.0",
            "ff.net.0.proj",
            "ff.net.2",
        )
    }

    again = families.first_of(before)
    read_adapter(before, again, path, ADAPTER)
    batch = batch_of(before, CAPTIONS, has_sound=True)
    with torch.no_grad():
        torch.testing.assert_close(
            loss_of(before, again, batch), loss_of(before, net, batch)
        )
    facts = inspect(path, str(before.folder))
    assert facts["fits"]
    groups = {row["group"]: row["modules"] for row in facts["groups"]}
    assert groups["connectors"] == 12


@pytest.mark.parametrize("form", ["diffusers", "comfyui", "kohya"])
def test_a_file_is_converted_there_and_back_with_its_alpha(
    form: str, tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("ltx2")
    before = find("ltx2")(family.folder, torch.device("cpu"), torch.float32)
    before.spec = before.spec.with_sound(["video", "sound"]).with_connectors()
    state = families.noisy_lora(before, families.first_of(before), targets=BOTH)
    first = tmp_path / "first.safetensors"
    export_lora(before, "diffusers", state, 2.0, first, {})
    base = str(before.folder)
    second = tmp_path / "second.safetensors"
    third = tmp_path / "third.safetensors"
    convert(first, Target(second, form=form, base=base))
    convert(second, Target(third, form="diffusers", base=base))
    tensors = load_file(third)
    expected = load_file(first)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value)
    with pytest.raises(VideotuneError, match="peft"):
        convert(first, Target(tmp_path / "folder", form="peft", base=base))


@VERSIONS
def test_a_merged_model_has_the_adapter_in_both_parts(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    _, before = with_sound(pair)
    net = families.first_of(before)
    state = families.noisy_lora(before, net, targets=BOTH)
    folder = tmp_path / "merged"
    exported = export_merged(
        before, {"transformer": state}, 2.0, before.folder, folder, {}
    )
    assert exported.modules == len(by_module(state))
    merged = find("ltx2")(folder, torch.device("cpu"), torch.float32)
    merged.spec = merged.spec.with_sound(["video", "sound"])
    losses = []
    for family, network in ((before, net), (merged, families.first_of(merged))):
        with torch.no_grad():
            batch = batch_of(family, CAPTIONS, has_sound=True)
            losses.append(loss_of(family, network, batch))
    torch.testing.assert_close(*losses)


@VERSIONS
def test_a_file_with_connectors_is_refused_where_they_do_not_run(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    after, before = with_sound(pair)
    net = families.first_of(before)
    state = families.noisy_lora(before, net, targets=BOTH)
    path = tmp_path / "lora.safetensors"
    export_lora(before, "diffusers", state, 2.0, path, {})
    with pytest.raises(VideotuneError, match="connectors"):
        read_adapter(after, families.first_of(after), path, ADAPTER)
