"""How tensors become modules: which parts belong together, their rank and bounds, and
where a header's settings come from.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command_line import Printed
from tests.support.lora_files import random_tensor
from videotune.adapters.lora import ADAPTER, lora_parameters
from videotune.bounds import ADAPTER_BYTES, DELTA_NUMBERS, ROTATION_SIDE
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_adapter, read_parts
from videotune.exporter.adapter_file import AdapterFile, refuse_large_file
from videotune.exporter.adapter_modules import (
    AdapterModule,
    _refuse_large,
    group_by_module,
    modules_by_path,
)
from videotune.exporter.converted_lora import lost_tensors

Tensors = dict[str, torch.Tensor]
Open = Callable[..., Any]
MODULE = "transformer.blocks.0.attn1.to_q"


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def opened(path: Path, tensors: Tensors, header: Any = None) -> AdapterFile:
    save_file(tensors, path, header)
    return AdapterFile(path)


LORA = {f"{MODULE}.lora_A.weight": ones(2, 24), f"{MODULE}.lora_B.weight": ones(24, 2)}
LOHA = {
    f"transformer.blocks.1.attn1.to_q.hada_w{number}_{part}": ones(*shape)
    for number in (1, 2)
    for part, shape in (("a", (24, 2)), ("b", (2, 24)))
}


# parts of a module


@pytest.mark.parametrize(
    ("parts", "rank"),
    [
        ({"lora_A": ones(2, 8), "lora_B": ones(6, 2)}, 2),
        ({"lokr_w1": ones(2, 2), "lokr_w2_a": ones(4, 3), "lokr_w2_b": ones(3, 5)}, 3),
        ({"lokr_w1": ones(2, 2), "lokr_w2": ones(6, 4)}, 4),
        ({"oft_R": ones(3, 6)}, 4),
        ({"oft_R": ones(1, 1)}, 2),
    ],
)
def test_the_rank_of_full_factors_and_rotations_is_their_block_size(
    parts: Tensors, rank: int
) -> None:
    """A rotation of b inputs has b(b-1)/2 numbers."""
    assert AdapterModule("x", ("x",), parts).rank == rank


@pytest.mark.parametrize(
    "extra",
    [
        {f"{MODULE}.lora_magnitude_vector": ones(24, 2)},
        {f"{MODULE}.lora_magnitude_vector": ones(12)},
        {"transformer.blocks.1.attn1.to_q.oft_R.weight": ones(0, 6)},
        {"transformer.blocks.1.attn1.to_q.oft_R.weight": ones(6)},
        LOHA,
    ],
    ids=["a magnitude in two columns", "a short magnitude", "no rotation",
         "a rotation without blocks", "two kinds"],
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_refused(
    extra: Tensors, family: Any, tmp_path: Path
) -> None:
    save_file(LORA | extra, tmp_path / "x.safetensors")
    with pytest.raises(VideotuneError, match=r"x\.safetensors"):
        read_parts(family, tmp_path / "x.safetensors")


def test_an_alpha_of_a_module_without_factors_is_left_out(tmp_path: Path) -> None:
    alone = {"transformer.blocks.1.attn1.to_q.alpha": torch.tensor(4.0)}
    modules, other = group_by_module(opened(tmp_path / "x.safetensors", LORA | alone))
    assert list(modules) == [MODULE]
    assert other == {}
    with pytest.raises(VideotuneError, match="not a LoRA"):
        group_by_module(opened(tmp_path / "x.safetensors", alone))


def test_only_a_lora_is_said_to_lack_its_alpha(
    family: Any, tmp_path: Path, capsys: Printed
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(LORA, path)
    net = family.skeleton()
    modules_by_path(family, net, AdapterFile(path), quiet=True)
    assert capsys.readouterr().err == ""
    modules_by_path(family, net, AdapterFile(path))
    assert "x.safetensors does not say its alpha" in capsys.readouterr().err
    save_file(LOHA, path)
    modules_by_path(family, net, AdapterFile(path))
    assert capsys.readouterr().err == ""


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("excess", [0, 1])
def test_the_largest_update_that_is_read(excess: int) -> None:
    """A LoRA's update is never built, so it has no bound."""
    side = ROTATION_SIDE + excess
    columns = DELTA_NUMBERS // 1024 + excess
    loha = {
        f"hada_w{number}_{part}": meta(*shape)
        for number in (1, 2)
        for part, shape in (("a", (1024, 1)), ("b", (1, columns)))
    }
    for parts in ({"oft_R": meta(1, side * (side - 1) // 2)}, loha):
        if not excess:
            _refuse_large(Path("x"), "to_q", parts)
            continue
        with pytest.raises(VideotuneError, match=r"^x: to_q claims"):
            _refuse_large(Path("x"), "to_q", parts)
    lora = {"lora_A": meta(1, columns), "lora_B": meta(1024, 1)}
    _refuse_large(Path("x"), "to_q", lora)


def test_a_file_may_have_8_gb_and_no_byte_more(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.touch()
    os.truncate(path, ADAPTER_BYTES)  # bytes that are not on the disk
    refuse_large_file(path)
    os.truncate(path, ADAPTER_BYTES + 1)
    with pytest.raises(VideotuneError, match="has 8 GB"):
        refuse_large_file(path)
    refuse_large_file(tmp_path / "absent")


def test_a_fused_loha_is_split_by_rows_and_a_lokr_is_not(
    tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("hunyuan_video")
    fused = "diffusion_model.double_blocks.0.img_attn.qkv"
    w1_a, w2_a = random_tensor(72, 2), random_tensor(72, 2, seed=1)
    w1_b, w2_b = random_tensor(2, 24, seed=2), random_tensor(2, 24, seed=3)
    parts = {"hada_w1_a": w1_a, "hada_w1_b": w1_b, "hada_w2_a": w2_a, "hada_w2_b": w2_b}
    path = tmp_path / "x.safetensors"
    save_file({f"{fused}.{part}": value for part, value in parts.items()}, path)
    modules = modules_by_path(family, family.skeleton(), AdapterFile(path))
    delta = (w1_a.double() @ w1_b.double()) * (w2_a.double() @ w2_b.double())
    names = [f"transformer_blocks.0.attn.{part}" for part in ("to_q", "to_k", "to_v")]
    assert list(modules) == names
    for name, rows in zip(names, delta.split(24), strict=True):
        torch.testing.assert_close(modules[name].delta, rows)

    lokr = {f"{fused}.lokr_w1": ones(3, 3), f"{fused}.lokr_w2": ones(24, 8)}
    file = opened(path, lokr)
    with pytest.raises(VideotuneError, match="joins 3 modules"):
        modules_by_path(family, family.skeleton(), file)


# settings of the header


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("lora_adapter_metadata", "header"),
        ("lora_config", "lora_config"),
        ("adapter_config", "header"),
    ],
)
def test_where_settings_are_found(key: str, source: str, tmp_path: Path) -> None:
    settings = {"transformer.lora_alpha": 2}
    file = opened(tmp_path / "a.safetensors", LORA, {key: json.dumps(settings)})
    assert (file.settings, file.settings_source) == ({"lora_alpha": 2}, source)


def test_a_folder_s_settings_belong_to_pefts_file_only(tmp_path: Path) -> None:
    beside = tmp_path / "adapter_config.json"
    beside.write_text(json.dumps({"lora_alpha": 2}))
    file = opened(tmp_path / "a.safetensors", LORA)
    assert (file.settings, file.settings_source) == ({}, "")
    file = opened(tmp_path / "adapter_model.safetensors", LORA)
    assert (file.settings, file.settings_source) == ({"lora_alpha": 2}, "folder")
    beside.write_text("{}")
    file = opened(tmp_path / "adapter_model.safetensors", LORA)
    assert (file.settings, file.settings_source) == ({}, "")


def test_the_first_exception_that_names_a_module_counts(tmp_path: Path) -> None:
    settings = {
        "lora_alpha": 1,
        "alpha_pattern": {"to_k": 5, "to_q": 2, "attn1.to_q": 3},
    }
    header = {"lora_config": json.dumps(settings)}
    file = opened(tmp_path / "a.safetensors", LORA, header)
    alphas = [
        file.peft_number("lora_alpha", "alpha_pattern", f"blocks.0.attn1.{name}")
        for name in ("to_q", "to_k", "to_v")
    ]
    assert alphas == [2.0, 5.0, 1.0]
    assert file.peft_number("r", "rank_pattern", "blocks.0.attn1.to_q") is None


@pytest.mark.parametrize(
    ("settings", "shown"),
    [({"alpha_pattern": {"(" + "q" * 99: 5}}, 57), ({"lora_alpha": "q" * 99}, 40)],
)
def test_a_damaged_setting_is_shown_by_its_beginning(
    settings: dict[str, Any], shown: int, tmp_path: Path
) -> None:
    header = {"lora_config": json.dumps(settings)}
    file = opened(tmp_path / "a.safetensors", LORA, header)
    with pytest.raises(VideotuneError) as refused:
        file.peft_number("lora_alpha", "alpha_pattern", MODULE)
    assert max(map(len, re.findall("q+", str(refused.value)))) == shown


def test_the_weights_of_a_file_s_expert_are_compared(
    tiny_family: Open, tmp_path: Path, capsys: Printed
) -> None:
    """The other expert's may be others."""
    family = tiny_family("wan", variant="t2v-a14b")
    path = tmp_path / "x.safetensors"
    prints = dict(family.fingerprints())
    warned = []
    for part in ("transformer", "transformer_2"):
        others = prints | {part: "another"}
        facts = {"expert": "low", "base": {"name": "mine", "fingerprints": others}}
        save_file(LORA, path, {"videotune": json.dumps(facts)})
        read_parts(family, path)
        warned.append("was trained on mine" in capsys.readouterr().err)
    assert warned == [False, True]

    save_file(LORA, path, {"videotune": json.dumps({"base": {"name": "mine"}})})
    read_parts(family, path)
    assert "trained on" not in capsys.readouterr().err


# loading into a network


def test_an_adapter_has_the_name_that_it_is_loaded_under(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    for tensors, count in ((LORA, 2), (LOHA, 4)):
        save_file(tensors, path)
        net = family.denoiser()
        read_adapter(family, net, path, "style")
        assert len(lora_parameters(net, "style")) == count
        assert lora_parameters(net, ADAPTER) == {}


@pytest.mark.parametrize("alpha", [1.0, 2.0, 4.0])
def test_a_loaded_lora_is_scaled_by_its_alpha(
    alpha: float, family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(LORA | {f"{MODULE}.alpha": torch.tensor(alpha)}, path)
    net = family.denoiser()
    read_adapter(family, net, path, ADAPTER)
    layer = net.get_submodule("blocks.0.attn1.to_q")
    change = layer(ones(1, 24)) - layer.base_layer(ones(1, 24))
    torch.testing.assert_close(change, torch.full((1, 24), alpha / 2 * 48))


def test_a_lokr_that_peft_would_factor_otherwise_is_refused(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    parts = {"lokr_w1": ones(2, 3), "lokr_w2_a": ones(12, 1), "lokr_w2_b": ones(1, 8)}
    save_file({f"{MODULE}.{part}": value for part, value in parts.items()}, path)
    with pytest.raises(VideotuneError, match=r"x\.safetensors is not a LoRA"):
        read_adapter(family, family.denoiser(), path, ADAPTER)


NATIVE = "diffusion_model.blocks.0.self_attn.q"
PAIR = {f"{NATIVE}.lora_down.weight": ones(4, 24), f"{NATIVE}.lora_up.weight": ones(24, 4)}  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        "text_encoder.final_layer_norm.diff",
        f"{NATIVE}.alpha_of_norm.diff",
        f"{NATIVE}.dora_scale_of_norm.diff",
    ],
)
def test_a_tensor_that_changes_what_others_mean_is_not_left_out(
    key: str, family: Any, tmp_path: Path
) -> None:
    """Diffusers' converter drops it: without it, all else draws otherwise."""
    path = tmp_path / "x.safetensors"
    save_file(PAIR | {key: ones(24)}, path)
    with pytest.raises(VideotuneError, match="is not a LoRA"):
        read_adapter(family, family.denoiser(), path, ADAPTER)


def test_a_setting_for_one_module_counts_also_where_a_converter_reads_the_file(
    family: Any, tmp_path: Path
) -> None:
    """The setting has diffusers' name, and the file the authors'."""
    pattern = {"blocks.0.attn1.to_q": 8}
    header = {"lora_config": json.dumps({"lora_alpha": 4, "alpha_pattern": pattern})}
    path = tmp_path / "x.safetensors"
    save_file(PAIR | {f"{NATIVE}.diff_b": ones(24)}, path, header)
    net = family.denoiser()
    read_adapter(family, net, path, ADAPTER)
    layer = net.get_submodule("blocks.0.attn1.to_q")
    change = layer(ones(1, 24)) - layer.base_layer(ones(1, 24))
    torch.testing.assert_close(change, torch.full((1, 24), 8 / 4 * 4 * 24 + 1.0))


def test_a_tensor_is_lost_if_no_converted_one_holds_it() -> None:
    """Joined by rows, by columns, or as it is; scalars and vectors too."""
    state = {name: ones(2, 3) for name in ("rows", "more", "left", "right", "gone")}
    state |= {"vector": ones(2), "scalar": torch.tensor(1.0), "dropped": ones(2)}

    def convert(tensors: Tensors) -> Tensors:
        return {
            "by rows": torch.cat([tensors["rows"], tensors["more"]]),
            "by columns": torch.cat([tensors["left"], tensors["right"]], dim=1),
            "vector": tensors["vector"],
            "scalar": tensors["scalar"],
        }

    assert lost_tensors(convert, state) == ["gone", "dropped"]
