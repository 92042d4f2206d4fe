"""LoRA files under the training: what the loaded weights are, for every family and kind
of file, against PEFT's and diffusers' own merging.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import network_output, network_with_adapter
from tests.support.families import FAMILIES as EACH_FAMILY
from tests.support.families import first_of
from tests.support.lora_files import pairs, peft_file, same_deltas
from videotune.adapters.lora import ADAPTER
from videotune.adapters.side_update import set_strength
from videotune.config.sections import BaseLora, LoraFile
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import export_lora, read_adapter
from videotune.exporter.base_loras import (
    _inside,
    _outside,
    merge_into_base,
    weight_changes,
)
from videotune.exporter.preview_loras import preview_updates
from videotune.memory.quantization import QuantizedLinear, pack, unpack
from videotune.models.other_models import NotTrained
from videotune.models.wan import Wan
from videotune.types import WeightDtypes


def weights_of(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def added(family: Any, *loras: BaseLora) -> dict[str, torch.Tensor]:
    """What merged files add to the weights, float64, without weights that stay."""
    family.weight_changes = {}
    before = weights_of(first_of(family))
    merge_into_base(family, loras)
    after = weights_of(first_of(family))
    family.weight_changes = {}
    changes = {name: after[name].double() - before[name].double() for name in before}
    return {
        name.removesuffix(".weight"): change
        for name, change in changes.items()
        if bool(change.any())
    }


@EACH_FAMILY
def test_every_family_loads_the_sum(
    name: str, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    """W + strength · alpha / rank · B·A, and nothing else."""
    family = tiny_family(name)
    path = tmp_path / "x_high_noise.safetensors"
    deltas = peft_file(family, path, alpha=2.0)
    expert = family.spec.experts[0].name if len(family.spec.experts) > 1 else None
    changes = added(family, BaseLora(file=str(path), strength=0.25, expert=expert))
    wanted = {path: 0.25 * delta for path, delta in deltas.items()}
    same_deltas(changes, wanted, 1e-5)


def test_two_files_add_up_and_a_negative_strength_takes_away(
    tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    first, second = (str(tmp_path / f"{name}.safetensors") for name in "ab")
    deltas = peft_file(family, Path(first))
    peft_file(family, Path(second), alpha=1.0)
    both = added(family, BaseLora(file=first), BaseLora(file=second, strength=-2.0))
    same_deltas(both, {path: 0.5 * delta for path, delta in deltas.items()}, 1e-5)


@pytest.mark.parametrize("name", ["lora_A", "lora_B"])
def test_a_file_in_half_precision_adds_what_its_numbers_say(
    name: str, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    full, half = tmp_path / "full.safetensors", tmp_path / "half.safetensors"
    peft_file(family, full)
    state = load_file(full)
    rounded = {key: value.half() for key, value in state.items() if name in key}
    save_file(state | rounded, half)
    save_file(state | {key: value.float() for key, value in rounded.items()}, full)
    expected = added(family, BaseLora(file=str(full)))
    same_deltas(added(family, BaseLora(file=str(half))), expected, 1e-7)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("LORA", "diffusers"),
        ("LORA", "comfyui"),
        ("DORA", "diffusers"),
        ("LOHA", "comfyui"),
        ("LOHA", "peft"),
        ("LOKR", "comfyui"),
        ("LOKR", "peft"),
        ("OFT", "peft"),
    ],
)
def test_a_merged_file_computes_what_the_adapter_computes(
    kind: str, form: str, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    net, state = network_with_adapter(family, kind)
    wanted = network_output(net)
    path = tmp_path / "x.safetensors"
    scale = 1.0 if kind == "OFT" else 2.0
    export_lora(family, form, dict(state), scale, path, {})
    merge_into_base(family, [BaseLora(file=str(path))])
    merged = network_output(family.denoiser())
    family.weight_changes = {}
    plain = network_output(family.denoiser())
    assert torch.allclose(merged, wanted, atol=1e-5)
    assert not torch.allclose(plain, wanted, atol=1e-3)


def test_merged_weights_are_those_of_diffusers_fuse_lora(
    tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    path = tmp_path / "x.safetensors"
    peft_file(family, path, alpha=2.0)
    net = family.denoiser()
    read_adapter(family, net, path, ADAPTER)
    net.fuse_lora(0.7)
    net.unload_lora()
    merge_into_base(family, [BaseLora(file=str(path), strength=0.7)])
    ours = weights_of(family.denoiser())
    for name, weight in weights_of(net).items():
        assert torch.allclose(ours[name], weight, atol=1e-5), name


@pytest.mark.parametrize("packed", ["FLOAT_8", "INT_8"])
def test_packed_weights_are_rounded_after_the_sum(
    packed: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    weights = WeightDtypes(transformer=packed)
    family = Wan(tiny_bases("wan"), torch.device("cpu"), torch.float32, weights)
    path = tmp_path / "x.safetensors"
    peft_file(family, path, rank=1)
    plain = Wan(tiny_bases("wan"), torch.device("cpu"), torch.float32)
    for each in (family, plain):
        merge_into_base(each, [BaseLora(file=str(path), strength=0.01)])
    exact = plain.denoiser().state_dict()
    layers = {
        name: module
        for name, module in family.denoiser().named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert layers
    for name, layer in layers.items():
        weight = exact[f"{name}.weight"]
        rounded = unpack(pack(weight, packed), packed, layer.shape, torch.float32)
        assert torch.equal(layer.dequantize(), rounded), name


def lightning(family: Any, path: Path) -> None:
    """A file as distilled models have it: factors of some layers in the authors' names,
    differences of a bias and of a norm.
    """
    start = "diffusion_model.blocks.0.self_attn"
    (rows, columns) = family.skeleton().blocks[0].attn1.to_q.weight.shape
    save_file(
        {
            f"{start}.q.lora_down.weight": torch.ones(2, columns),
            f"{start}.q.lora_up.weight": torch.ones(rows, 2),
            f"{start}.q.diff_b": torch.full((rows,), 3.0),
            f"{start}.norm_q.diff": torch.full((rows,), 0.5),
            "diffusion_model.patch_embedding.diff_b": torch.full((rows,), 2.0),
        },
        path,
    )


def test_differences_of_biases_and_norms_are_merged(
    tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    path = tmp_path / "x.safetensors"
    lightning(family, path)
    changes = added(family, BaseLora(file=str(path), strength=0.5))
    assert set(changes) == {
        "blocks.0.attn1.to_q",
        "blocks.0.attn1.to_q.bias",
        "blocks.0.attn1.norm_q",
        "patch_embedding.bias",
    }
    expected = {
        "blocks.0.attn1.to_q": 1.0,
        "blocks.0.attn1.to_q.bias": 1.5,
        "blocks.0.attn1.norm_q": 0.25,
        "patch_embedding.bias": 1.0,
    }
    for name, value in expected.items():
        assert torch.allclose(changes[name], torch.tensor(value).double(), atol=1e-5)


def test_content_and_strength_are_in_the_fingerprint(
    tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    plain = family.fingerprints()
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    peft_file(family, first)
    peft_file(family, second, alpha=1.0)
    moved = tmp_path / "c.safetensors"
    moved.write_bytes(first.read_bytes())

    prints = []
    for lora in (
        BaseLora(file=str(first)),
        BaseLora(file=str(moved), training_only=True),
        BaseLora(file=str(first), strength=0.5),
        BaseLora(file=str(second)),
    ):
        merge_into_base(family, [lora])
        prints.append(family.fingerprints())
    assert prints[0] == prints[1]
    assert len({each["transformer"] for each in prints}) == 3
    for each in prints:
        changed = {part for part in plain if each[part] != plain[part]}
        assert changed == {"transformer"}, "cached latents and captions stay valid"


@pytest.mark.parametrize("variant", ["t2v-a14b", "t2v"])
def test_a_file_belongs_to_one_expert(
    variant: str, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan", variant=variant)
    unnamed = tmp_path / "x.safetensors"
    named = tmp_path / "x_low_noise.safetensors"
    for path in (unnamed, named):
        peft_file(family, path)
    if variant == "t2v":
        with pytest.raises(VideotuneError, match="Leave expert out"):
            weight_changes(family, [BaseLora(file=str(unnamed), expert="low")])
        return
    with pytest.raises(VideotuneError, match="Set expert"):
        weight_changes(family, [BaseLora(file=str(unnamed))])
    parts = weight_changes(
        family, [BaseLora(file=str(unnamed), expert="high"), BaseLora(file=str(named))]
    )
    assert set(parts) == {"transformer", "transformer_2"}
    merge_into_base(family, [BaseLora(file=str(named))])
    low = weights_of(family.denoiser("low"))
    high = weights_of(family.denoiser("high"))
    family.weight_changes = {}
    assert not torch.equal(
        low["blocks.0.attn1.to_q.weight"],
        weights_of(family.denoiser("low"))["blocks.0.attn1.to_q.weight"],
    )
    for name, weight in weights_of(family.denoiser("high")).items():
        assert torch.equal(high[name], weight), name


def factors(module: str) -> dict[str, torch.Tensor]:
    start = f"blocks.0.{module}.to_q"
    return {
        f"{start}.lora_A.weight": torch.ones(1, 8),
        f"{start}.lora_B.weight": torch.ones(8, 1),
    }


def test_what_cannot_be_merged_is_refused_before_anything_is_loaded(
    tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    path = tmp_path / "x.safetensors"

    def refused(match: str, **settings: Any) -> None:
        with pytest.raises(VideotuneError, match=match):
            merge_into_base(family, [BaseLora(file=str(path), **settings)])
        assert not family.weight_changes

    refused("no such file")
    path.write_bytes(b"no tensors")
    refused("is a text file, not a LoRA")
    save_file(factors("attn9"), path)
    refused("modules that the model lacks")
    peft_file(family, path)
    refused("strength 0", strength=0.0)
    save_file(load_file(path) | {"diffusion_model.blocks.9.norm.diff": torch.ones(2)}, path)  # fmt: skip
    refused("has no blocks.9.norm")
    save_file(load_file(path) | factors("audio_injector"), path)
    with pytest.raises(NotTrained):
        merge_into_base(family, [BaseLora(file=str(path))])

    _, state = network_with_adapter(family, "DORA")
    export_lora(family, "diffusers", dict(state), 2.0, path, {})
    refused("no strength but 1", strength=0.5)


def test_a_preview_without_it_is_the_base_and_with_another_is_the_sum(
    tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    """To rounding; afterwards the network computes what it did before, to the bit."""
    family = tiny_family("wan")
    below, extra = tmp_path / "below.safetensors", tmp_path / "extra.safetensors"
    peft_file(family, below, alpha=0.4)
    peft_file(family, extra, alpha=0.8)
    base = family.denoiser()
    wanted_without = network_output(base)
    merge_into_base(family, [BaseLora(file=str(below)), BaseLora(file=str(extra))])
    wanted_with_extra = network_output(family.denoiser())

    lora = BaseLora(file=str(below), training_only=True)
    merge_into_base(family, [lora])
    net = family.denoiser()
    merged = network_output(net)

    def output(loras: list[LoraFile], below: BaseLora, with_base_loras: bool) -> Any:
        (updates,) = preview_updates(
            family, [below], loras, with_base_loras=with_base_loras
        ).values()
        undo = updates[0].add_to(net)
        result = network_output(net)
        undo()
        return result

    assert torch.allclose(output([], lora, True), wanted_without, atol=1e-4)
    kept = BaseLora(file=str(below))
    assert torch.allclose(output([], kept, False), wanted_without, atol=1e-4)
    with_extra = output([LoraFile(file=str(extra))], kept, True)
    assert torch.allclose(with_extra, wanted_with_extra, atol=1e-4)
    assert not torch.allclose(with_extra, wanted_without, atol=1e-2)
    assert torch.equal(network_output(net), merged)


def test_previews_leave_out_norms_and_name_the_key_of_what_they_refuse(
    tiny_family: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bias is added as it is in the file, multiplied by the strength."""
    family = tiny_family("wan")
    path = tmp_path / "x.safetensors"
    lightning(family, path)
    lora = LoraFile(file=str(path), strength=0.5)
    ((update,),) = preview_updates(family, [], [lora], with_base_loras=True).values()
    assert set(update.factors) == {"blocks.0.attn1.to_q"}
    assert set(update.biases) == {"blocks.0.attn1.to_q"}
    expected = torch.full((24,), 1.5)
    torch.testing.assert_close(update.biases["blocks.0.attn1.to_q"], expected)
    note = "x.safetensors: previews leave out 2 differences of other weights"
    assert note in capsys.readouterr().err
    preview_updates(family, [], [lora], with_base_loras=True, quiet=True)
    assert "leave out" not in capsys.readouterr().err

    _, state = network_with_adapter(family, "DORA")
    export_lora(family, "diffusers", dict(state), 2.0, path, {})
    for key, below, extra in (
        ("sample.loras", [], [LoraFile(file=str(path))]),
        ("base_loras", [BaseLora(file=str(path))], []),
    ):
        with pytest.raises(VideotuneError, match=f"^{key}: x.* is no plain LoRA"):
            preview_updates(family, below, extra, with_base_loras=False)


def test_the_strength_of_the_adapter_that_trains(
    tiny_family: Callable[..., Any],
) -> None:
    family = tiny_family("wan")
    net, _ = network_with_adapter(family)
    full = network_output(net)
    undo = set_strength(net, 0.0)
    plain = network_output(family.denoiser())
    assert torch.allclose(network_output(net), plain, atol=1e-6)
    undo()
    undo = set_strength(net, 2.0)
    doubled = network_output(net)
    undo()
    assert not torch.allclose(doubled, full, atol=1e-4)
    assert torch.equal(network_output(net), full)


def test_a_form_for_another_width_is_refused(
    tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("wan")
    name, (factor_b, factor_a) = next(iter(pairs(family).items()))
    path = tmp_path / "x.safetensors"
    save_file(
        {
            f"transformer.{name}.lora_A.weight": torch.cat([factor_a, factor_a], 1),
            f"transformer.{name}.lora_B.weight": factor_b,
        },
        path,
    )
    with pytest.raises(VideotuneError, match="another base"):
        merge_into_base(family, [BaseLora(file=str(path))])


def test_changes_are_split_between_a_module_and_what_is_outside_of_it() -> None:
    """Each name once, of the module without its path."""
    changes: dict[str, Any] = {
        name: object() for name in ("a.weight", "inner.a.weight", "inner2.a.weight")
    }
    assert _inside("inner", lambda: changes) == {"a.weight": changes["inner.a.weight"]}
    del changes["inner.a.weight"]
    assert _outside("inner", lambda: changes | {"inner.b": object()}) == changes
