"""Figures and settings of LoRA files in closed form: PEFT's settings, alphas, norms,
shares, strengths, and what is said of a file that was made.
"""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.command_line import Printed
from tests.support.lora_files import (
    deltas_of,
    file_of_form,
    pairs,
    peft_file,
    random_tensor,
    same_deltas,
)
from videotune import console
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import AdapterModule
from videotune.exporter.base_detection import load_architecture
from videotune.exporter.full import export_merged
from videotune.exporter.lora_extract import extract
from videotune.exporter.lora_factors import (
    delta_norm,
    low_rank_factors,
    relative_difference,
)
from videotune.exporter.lora_inspect import group_shares, inspect, summary_lines
from videotune.exporter.lora_target import Target
from videotune.exporter.lora_tools import (
    compare_adapters,
    convert,
    lora_module,
    merge,
    resize,
)
from videotune.exporter.lora_write import peft_settings_json, write_form

Tensors = dict[str, torch.Tensor]
Open = Callable[..., Any]
Patch = pytest.MonkeyPatch


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def module(path: str, scale: float = 1.0, **parts: torch.Tensor) -> AdapterModule:
    return AdapterModule(path, (path,), parts, scale)


def lora(path: str, rank: int, scale: float = 1.0) -> AdapterModule:
    return module(path, scale, lora_A=ones(rank, 8), lora_B=ones(8, rank))


def settings_of(*modules: AdapterModule) -> dict[str, Any]:
    return peft_settings_json({module.name: module for module in modules})


# PEFT's settings


def test_pefts_settings_have_the_usual_rank_and_all_others_as_exceptions() -> None:
    settings = settings_of(lora("c", 2, 3.0), lora("b", 4, 0.5), lora("a", 4, 0.5))
    assert settings["peft_type"] == "LORA"
    assert settings["target_modules"] == ["a", "b", "c"]
    assert (settings["r"], settings["rank_pattern"]) == (4, {"c": 2})
    # alpha of the first module's scale at the usual rank
    assert settings["lora_alpha"] == 12.0
    assert settings["alpha_pattern"] == {"c": 6.0, "b": 2.0, "a": 2.0}
    assert settings["lora_dropout"] == 0.0
    assert settings["use_dora"] is False

    settings = settings_of(lora("a", 4, 0.5), lora("b", 4, 0.5))
    assert (settings["rank_pattern"], settings["alpha_pattern"]) == ({}, {})


def lokr(path: str, *sides: int) -> AdapterModule:
    return module(path, lokr_w1=ones(*sides), lokr_w2=ones(6, 10))


LOKR_IN_TWO = module("z", lokr_w1_a=ones(4, 3), lokr_w1_b=ones(3, 4), lokr_w2=ones(2, 2))  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "factor", "both"),
    [
        ([lokr("a", 4, 4)], 4, False),
        ([lokr("a", 4, 4), lokr("b", 4, 4)], 4, False),
        ([lokr("a", 4, 4), lokr("b", 2, 2)], -1, False),
        ([lokr("a", 2, 4)], -1, False),
        ([LOKR_IN_TWO], -1, True),
        ([lokr("a", 4, 4), LOKR_IN_TWO], -1, True),
    ],
)
def test_pefts_settings_of_lokr_keep_its_factors(
    modules: list[AdapterModule], factor: int, both: bool
) -> None:
    settings = settings_of(*modules)
    assert settings["peft_type"] == "LOKR"
    assert settings["decompose_factor"] == factor
    assert settings["decompose_both"] is both
    # A rank of the whole side, so that PEFT does not take the second factor apart.
    rank = 10 if "lokr_w1" in modules[0].parts else 3
    assert settings["r"] == rank
    assert settings["rank_dropout"] == 0.0


def test_pefts_settings_of_oft_have_its_block_size() -> None:
    settings = settings_of(module("a", oft_R=ones(3, 6)))
    assert settings["peft_type"] == "OFT"
    assert settings["oft_block_size"] == 4
    assert settings["target_modules"] == ["a"]


# forms


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_an_alpha_is_stated_where_the_form_needs_it(scale: float, family: Any) -> None:
    """Kohya's always; the others have one only if it is not the rank."""
    path = "blocks.0.attn1.to_q"
    parts = {"lora_A": ones(4, 24), "lora_B": ones(24, 4)}
    modules = {path: module(path, scale, **parts)}
    alphas = {}
    for form in ("kohya", "comfyui", "original"):
        written = write_form(family, family.skeleton(), modules, form)
        alphas[form] = [
            (float(value), value.dtype)
            for key, value in written.tensors.items()
            if key.endswith(".alpha")
        ]
        assert (written.header, written.folded) == ({}, 0)
    stated = [(4 * scale, torch.float32)]
    unless_1 = [] if scale == 1.0 else stated
    assert alphas == {"kohya": stated, "comfyui": unless_1, "original": unless_1}

    written = write_form(family, family.skeleton(), modules, "diffusers")
    if scale == 1.0:
        assert written.header == {}
        return
    metadata = json.loads(written.header["lora_adapter_metadata"])
    assert metadata == {
        "transformer.r": 4,
        "transformer.lora_alpha": 4 * scale,
        "transformer.rank_pattern": {},
        "transformer.alpha_pattern": {},
        "transformer.use_dora": False,
        "transformer.target_modules": [path],
    }


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_scale_of_whole_factors_is_multiplied_into_the_first(
    scale: float, family: Any
) -> None:
    path = "blocks.0.attn1.to_q"
    parts = {"lokr_w1": ones(4, 4), "lokr_w2": ones(6, 6)}
    written = write_form(
        family, family.skeleton(), {path: module(path, scale, **parts)}, "comfyui"
    )
    assert written.folded == (scale != 1.0)
    name = "diffusion_model.blocks.0.self_attn.q"
    assert set(written.tensors) == {f"{name}.lokr_w1", f"{name}.lokr_w2"}
    assert written.tensors[f"{name}.lokr_w1"].unique().tolist() == [scale]
    assert written.tensors[f"{name}.lokr_w2"].unique().tolist() == [1.0]


@pytest.mark.parametrize("form", ["comfyui", "kohya", "original"])
def test_oft_is_not_written_where_comfyui_would_rotate_the_outputs(
    form: str, family: Any
) -> None:
    modules = {"x": module("x", oft_R=ones(6, 6))}
    with pytest.raises(VideotuneError, match=f"--to {form}: OFT .*rotates a weight"):
        write_form(family, family.skeleton(), modules, form)


QKV = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]


@pytest.mark.parametrize("scales", [(0.5, 0.5, 0.5), (0.5, 2.0, 1.0)])
@pytest.mark.parametrize("shares_a", [False, True])
@pytest.mark.parametrize("names", [QKV, QKV[:2], QKV[1:]])
def test_modules_of_any_scales_are_joined_without_a_change(
    names: list[str],
    shares_a: bool,
    scales: tuple[float, ...],
    tiny_family: Open,
    tmp_path: Path,
) -> None:
    """One A for all is kept only if all have it and one scale."""
    family = tiny_family("hunyuan_video")
    modules = {}
    for seed, (name, scale) in enumerate(zip(names, scales, strict=False)):
        factor_a = random_tensor(2, 24, seed=0 if shares_a else 10 + seed)
        factor_b = random_tensor(24, 2, seed=seed + 1)
        modules[name] = module(name, scale, lora_A=factor_a, lora_B=factor_b)
    written = write_form(family, family.skeleton(), modules, "comfyui")
    joined = "diffusion_model.double_blocks.0.img_attn_qkv"
    is_kept = shares_a and len(names) == 3 and len(set(scales)) == 1
    rank = 2 if is_kept else 2 * len(names)
    assert written.tensors[f"{joined}.lora_A.weight"].shape == (rank, 24)
    assert (f"{joined}.alpha" in written.tensors) == (len(set(scales)) == 1)

    save_file({key: value.contiguous() for key, value in written.tensors.items()}, tmp_path / "x.safetensors")  # fmt: skip
    deltas = deltas_of(family, tmp_path / "x.safetensors")
    same_deltas(deltas, {name: module.delta for name, module in modules.items()})


def test_products_of_more_factors_are_not_joined(tiny_family: Open) -> None:
    family = tiny_family("hunyuan_video")
    parts = {f"hada_w{n}_{part}": ones(*shape) for n in (1, 2) for part, shape in (("a", (24, 2)), ("b", (2, 24)))}  # fmt: skip
    modules = {name: module(name, **parts) for name in QKV}
    with pytest.raises(VideotuneError, match="joins 3 modules"):
        write_form(family, family.skeleton(), modules, "comfyui")


# norms and differences

KINDS = {
    "LORA": {"lora_A": random_tensor(2, 6), "lora_B": random_tensor(4, 2, seed=1)},
    "LOHA": {
        "hada_w1_a": random_tensor(4, 2, seed=2),
        "hada_w1_b": random_tensor(2, 6, seed=3),
        "hada_w2_a": random_tensor(4, 2, seed=4),
        "hada_w2_b": random_tensor(2, 6, seed=5),
    },
    "LOKR": {"lokr_w1": random_tensor(2, 2), "lokr_w2": random_tensor(2, 3, seed=1)},
    "LOKR of products": {
        "lokr_w1_a": random_tensor(2, 1),
        "lokr_w1_b": random_tensor(1, 2, seed=1),
        "lokr_w2_a": random_tensor(2, 1, seed=2),
        "lokr_w2_b": random_tensor(1, 3, seed=3),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_differences_of_each_kind_are_those_of_the_products(
    kind: str,
) -> None:
    """A scale may be negative: a LoRA that is taken away."""
    parts = KINDS[kind]
    for scale in (0.5, -2.0):
        update = module("x", scale, **parts)
        assert delta_norm(update) == pytest.approx(float(update.delta.norm()))
    half, whole = module("x", 0.5, **parts), module("x", 1.0, **parts)
    assert relative_difference(half, half) == pytest.approx(0.0, abs=1e-12)
    assert relative_difference(half, whole) == pytest.approx(1.0)
    assert relative_difference(whole, half) == pytest.approx(0.5)


def test_the_norm_of_a_rotation_is_that_of_its_difference_from_none() -> None:
    assert delta_norm(module("x", oft_R=ones(2, 1) * 0)) == 0.0
    turned = module("x", oft_R=ones(2, 1) * 0.1)
    assert delta_norm(turned) == pytest.approx(float(turned.delta.norm()))


def test_a_magnitude_differs_by_its_own_part() -> None:
    """And an update of zero by the other's norm."""
    parts = KINDS["LORA"]

    def dora(change: float, scale: float = 1.0) -> AdapterModule:
        magnitude = torch.tensor([3.0, 4.0, 0.0, 0.0 + change])
        return module("x", scale, **parts, lora_magnitude_vector=magnitude)

    assert relative_difference(dora(0.0), dora(1.0)) == pytest.approx(1 / 5)
    assert relative_difference(dora(0.0), dora(0.0)) == pytest.approx(0.0, abs=1e-12)
    assert relative_difference(dora(0.0), dora(1.0, 2.0)) == pytest.approx(1.0)
    zero = module("x", 0.0, **parts)
    other = module("x", 0.1, **parts)
    assert relative_difference(zero, other) == pytest.approx(delta_norm(other))


def test_a_randomized_svd_is_the_same_each_time_and_draws_from_no_one() -> None:
    matrix = random_tensor(1100, 1040).double()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = low_rank_factors(matrix, 2)
    assert torch.equal(torch.rand(3), expected)
    second = low_rank_factors(matrix, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_written_file_is_compared_with_what_was_meant(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    peft_file(family, path, targets=[r"blocks\.0\.attn1\..*"])
    base = load_architecture(family.folder, ())
    tensors = pairs(family, [r"blocks\.0\.attn1\..*"])
    meant = {name: lora_module(name, factors) for name, factors in tensors.items()}
    final = Path("final.safetensors")
    assert compare_adapters(base, meant, final, path) == (
        pytest.approx(0.0, abs=1e-9),
        "videotune",
    )

    first = next(iter(meant))
    factor_b, factor_a = tensors[first]
    for change in (5e-7, 2e-6):
        changed = lora_module(first, (factor_b.double() * (1 + change), factor_a))
        if change < 1e-6:
            error, _ = compare_adapters(base, meant | {first: changed}, final, path)
            assert error == pytest.approx(change, rel=1e-3)
            continue
        with pytest.raises(VideotuneError, match=f"final.* {first} differs by 2"):
            compare_adapters(base, meant | {first: changed}, final, path)
    # A module that was not meant must change nothing, and one that was must be there.
    fewer = {name: value for name, value in meant.items() if name != first}
    with pytest.raises(VideotuneError, match=f"final.* {first} differs"):
        compare_adapters(base, fewer, final, path)
    more = meant | {"blocks.1.attn1.to_q": lora_module("x", (factor_b, factor_a))}
    with pytest.raises(VideotuneError, match=r"1 modules are missing, such as blocks\.1"):  # fmt: skip
        compare_adapters(base, more, final, path)


# what is said


def row(group: str, norm: float | None) -> dict[str, Any]:
    return {"group": group, "norm": norm}


def test_shares_are_of_the_squares_and_the_largest_is_first() -> None:
    rows = [row("b", 1.0), row("c", 3.0), row("a", 1.0), row("c", None), row("d", 5.0)]
    assert group_shares(rows) == [
        {"group": "d", "modules": 1, "share": 25 / 36},
        {"group": "c", "modules": 2, "share": 9 / 36},
        {"group": "a", "modules": 1, "share": 1 / 36},
        {"group": "b", "modules": 1, "share": 1 / 36},
    ]
    unknown = [{"group": "a", "modules": 1, "share": 0.0}]
    assert group_shares([row("a", None)]) == unknown


def test_each_module_has_its_group_and_its_dtypes(family: Any, tmp_path: Path) -> None:
    groups = {
        "blocks.0.attn1.to_q": "attention",
        "blocks.0.attn2.to_q": "cross_attention",
        "blocks.0.ffn.net.2": "feed_forward",
        "condition_embedder.time_proj": "other",
    }
    tensors = {}
    for path in groups:
        rows, columns = family.skeleton().get_submodule(path).weight.shape
        tensors[f"transformer.{path}.lora_A.weight"] = ones(1, columns).bfloat16()
        tensors[f"transformer.{path}.lora_B.weight"] = ones(rows, 1)
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    facts = inspect(path, str(family.folder))
    assert {row["path"]: row["group"] for row in facts["modules"]} == groups
    assert {row["dtype"] for row in facts["modules"]} == {"bfloat16+float32"}
    assert facts["bytes"] == path.stat().st_size
    assert facts["file"] == str(path)
    assert facts["fits"] == [str(family.folder)]


def test_long_lists_of_facts_are_cut(family: Any, tmp_path: Path) -> None:
    def with_entries(count: int) -> dict[str, Any]:
        tensors = {}
        for number in range(count):
            name = f"transformer.blocks.{number + 100}.attn1.to_q"
            tensors[f"{name}.lora_A.weight"] = ones(1, 24)
            tensors[f"{name}.lora_B.weight"] = ones(24, 1)
            tensors[f"other.{number:03}"] = ones(1)
        header = {f"{number:03}" + "k" * 300: "v" * 300 for number in range(count - 1)}
        header["videotune"] = json.dumps({"base": {"name": "b" * 300}})
        path = tmp_path / "x.safetensors"
        save_file(tensors, path, header)
        return inspect(path, str(family.folder))

    for count in (40, 41):
        facts = with_entries(count)
        assert len(facts["misfits"]) == len(facts["metadata"]) == 40
        assert facts["other_tensors"] == [f"other.{number:03}" for number in range(40)]
        assert len(facts["modules"]) == count
    assert {len(key) for key in facts["metadata"]} <= {200, len("videotune")}
    values = {len(value) for key, value in facts["metadata"].items() if "k" in key}
    assert values == {200}
    assert facts["trained_on"] == "b" * 200
    name, _, reason = facts["misfits"][0].partition(": ")
    assert (name, reason) == ("transformer.blocks.100.attn1.to_q", "no module of it")


def test_no_single_strength_makes_up_for_several_alphas(
    family: Any, tmp_path: Path
) -> None:
    """ComfyUI reads no settings beside the file."""
    strengths = {}
    for pattern in ({}, {"blocks.0.attn1.to_q": 1}):
        tensors = {}
        for name in ("blocks.0.self_attn.q", "blocks.0.self_attn.k"):
            tensors[f"{name}.lora_A.weight"] = ones(4, 24)
            tensors[f"{name}.lora_B.weight"] = ones(24, 4)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        settings = {"r": 4, "lora_alpha": 2, "alpha_pattern": pattern}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        facts = inspect(tmp_path / "adapter_model.safetensors", str(family.folder))
        for program in facts["programs"]:
            if program["program"] in ("ComfyUI", "videotune"):
                figures = (program["reads"], program["scale"], program["strength"])
                strengths[program["program"], bool(pattern)] = figures
    assert strengths == {
        ("ComfyUI", False): ("yes", [1.0, 1.0], 0.5),
        ("ComfyUI", True): ("yes", [1.0, 1.0], None),
        ("videotune", False): ("yes", [0.5, 0.5], 1.0),
        ("videotune", True): ("yes", [0.25, 0.5], 1.0),
    }


def test_a_summary_has_a_line_for_what_there_is(family: Any, tmp_path: Path) -> None:
    path = tmp_path / "x_low_noise.safetensors"
    peft_file(family, path, targets=[r"blocks\.0\.attn1\..*"])
    lines = summary_lines(inspect(path, str(family.folder)))
    assert lines == [
        "LORA, 4 modules, float32",
        "form: diffusers names, prefix transformer.",
        f"base: every module fits {family.folder}",
        "expert: low (from its file name)",
        "health: good, no module is zero, NaN or infinite",
    ]

    tensors = load_file(path)
    names = sorted(key for key in tensors if "lora_B" in key)
    tensors[names[0]].zero_()
    tensors[names[1]][0, 0] = math.nan
    tensors[names[2]][0, 0] = math.inf
    extra = {"transformer.x.lora_A.weight": ones(1, 2), "transformer.x.lora_B.weight": ones(2, 1)}  # fmt: skip
    header = {"videotune": json.dumps({"base": {"name": "somebody/model"}})}
    save_file(tensors | extra | {"foo": ones(1)}, path, header)
    lines = summary_lines(inspect(path, str(family.folder)))
    paths = [name.removeprefix("transformer.").removesuffix(".lora_B.weight") for name in names]  # fmt: skip
    assert lines[2:] == [
        "base: wan",
        "trained on: somebody/model (from its header)",
        "expert: low (from its file name)",
        "1 modules do not fit, such as transformer.x: no module of it",
        "other tensors that do not belong to an adapter: foo",
        f"1 modules are zero: {paths[0]}",
        f"1 modules are NaN: {paths[1]}",
        f"1 modules are infinite: {paths[2]}",
    ]
    facts = inspect(path, str(family.folder)) | {"fits": [], "family": None}
    assert summary_lines(facts)[2].startswith("base: not known")


# files that are made


def header_facts(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        facts = dict(json.loads(file.metadata()["videotune"]))
    del facts["digest"]
    return facts


def test_what_is_said_of_merged_and_cut_files(family: Any, tmp_path: Path) -> None:
    """One weight counts for all files; folders above the file are made."""
    source = tmp_path / "a.safetensors"
    delta = peft_file(family, source, 2.0, "attention")
    out = tmp_path / "new" / "folder" / "b.safetensors"
    lines = merge([source, source], [0.25], None, file_of_form(family, out))
    same_deltas(deltas_of(family, out), {name: x / 2 for name, x in delta.items()})
    assert lines[0].startswith(f"{out}: 16 modules, read back: ΔW ")
    assert lines[1:] == ["rank 8; relative error of ΔW 0.00e+00"]

    out = tmp_path / "c.safetensors"
    lines = resize(source, 3, 0.0, file_of_form(family, out))
    lost = [float(torch.linalg.svdvals(x)[3:].square().sum()) for x in delta.values()]
    whole = sum(float(x.square().sum()) for x in delta.values())
    error = math.sqrt(sum(lost) / whole)
    assert lines[1:] == [f"rank 3; relative error of ΔW {error:.2e}"]

    lines = resize(source, None, 0.5, file_of_form(family, tmp_path / "d.safetensors"))
    tensors = load_file(tmp_path / "d.safetensors")
    ranks = {len(value) for key, value in tensors.items() if "lora_A" in key}
    assert lines[1].startswith(f"rank {min(ranks)} to {max(ranks)}; ")


def test_a_folded_alpha_is_said_with_the_number_of_modules(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "adapter_model.safetensors"
    name = "base_model.model.blocks.0.attn1.to_q"
    save_file({f"{name}.lokr_w1": ones(4, 4), f"{name}.lokr_w2": ones(6, 6)}, path)
    settings = {"peft_type": "LOKR", "r": 8, "alpha": 2.0}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    out = tmp_path / "b.safetensors"
    lines = convert(path, file_of_form(family, out, "comfyui"))
    assert len(lines) == 2
    assert "1 module," in lines[0]
    assert "1 module," in lines[1]


def test_a_family_chooses_among_bases_that_a_file_fits(tmp_path: Path) -> None:
    module = "diffusion_model.transformer_blocks.0.attn1.to_q"
    source = tmp_path / "a.safetensors"
    save_file(
        {
            f"{module}.lora_A.weight": ones(1, 4096),
            f"{module}.lora_B.weight": ones(4096, 1),
        },
        source,
    )
    out, merged = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    convert(source, Target(out, "kohya", family="ltx_video"))
    merge([source], [0.5], None, Target(merged, "kohya", family="ltx_video"))
    for path in (out, merged):
        assert header_facts(path)["family"] == "ltx_video"


# extraction


def tuned_copy(family: Any, folder: Path, part: str = "transformer") -> Path:
    """The base with one attention's weights changed, of rank 4, and a norm's."""
    shutil.copytree(family.folder, folder)
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    weights["blocks.0.attn1.to_q.weight"] += random_tensor(24, 4) @ random_tensor(4, 24)
    weights["blocks.0.norm2.weight"] += 2.0
    weights["blocks.1.norm2.weight"] += 1.0
    save_file(weights, file, {"format": "pt"})
    return folder


def test_an_extraction_says_what_is_kept_and_what_could_be(
    family: Any, tmp_path: Path
) -> None:
    tuned = tuned_copy(family, tmp_path / "tuned")
    out = tmp_path / "x.safetensors"
    lines = extract(tuned, str(family.folder), 2, None, file_of_form(family, out))
    squares = torch.linalg.svdvals(random_tensor(24, 4) @ random_tensor(4, 24)).square()
    other = 24 * (4.0 + 1.0)
    total = float(squares.sum()) + other
    assert lines[0].startswith(f"{out}: 1 module, ")
    assert f"{float(squares[:2].sum()) / total:.2%}" in lines[1]
    assert "at rank 2;" in lines[1]
    assert f"{float(squares[2:].sum()) / total:.2%}" in lines[1]
    assert lines[2].startswith(f"{other / total:.2%} no LoRA can hold: 2 norms")
    assert header_facts(out) == {
        "family": "wan",
        "from": ["tuned"],
        "made": "lora extract",
        "expert": None,
    }


def test_an_expert_is_extracted_from_its_own_folder(
    tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    tuned = tuned_copy(family, tmp_path / "tuned", "transformer_2")
    base = str(family.folder)
    out = tmp_path / "x.safetensors"
    for expert in (None, "middle"):
        with pytest.raises(VideotuneError, match=r"--expert: .* high and low; name"):
            extract(tuned, base, 4, expert, file_of_form(family, out))
    with pytest.raises(VideotuneError, match="nothing to extract"):
        extract(tuned, base, 4, "high", file_of_form(family, out))
    extract(tuned, base, 4, "low", file_of_form(family, out))
    assert header_facts(out)["expert"] == "low"
    delta = random_tensor(24, 4).double() @ random_tensor(4, 24).double()
    same_deltas(deltas_of(family, out), {"blocks.0.attn1.to_q": delta}, 1e-5)


def test_an_expert_of_a_model_with_one_is_refused_unless_it_is_that(
    family: Any, tmp_path: Path
) -> None:
    tuned = tuned_copy(family, tmp_path / "tuned")
    base = str(family.folder)
    out = file_of_form(family, tmp_path / "x.safetensors")
    with pytest.raises(VideotuneError, match="transformer; leave it out"):
        extract(tuned, base, 4, "low", out)
    assert extract(tuned, base, 4, "transformer", out)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("blocks.0.norm2.weight", ones(12), r"1 tensors differ in shape: blocks\.0\.n"),
        ("another.weight", ones(12), "1 tensors differ in shape: another"),
        ("blocks.0.norm2.weight", ones(24) * math.inf, r"blocks\.0\.norm2\.weight holds"),
        ("blocks.0.norm2.weight", ones(24) * math.nan, r"blocks\.0\.norm2\.weight holds"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_a_fine_tuned_base_is_refused(
    name: str, value: torch.Tensor, fault: str, family: Any, tmp_path: Path
) -> None:
    tuned = tuned_copy(family, tmp_path / "tuned")
    (file,) = (tuned / "transformer").glob("*.safetensors")
    save_file(load_file(file) | {name: value}, file, {"format": "pt"})
    target = file_of_form(family, tmp_path / "x.safetensors")
    with pytest.raises(VideotuneError, match=fault):
        extract(tuned, str(family.folder), 4, None, target)
    assert not target.path.exists()


def test_an_extracted_file_says_no_alpha_of_its_own(
    family: Any, tmp_path: Path
) -> None:
    """Its factors are whole, at a scale of 1."""
    out = tmp_path / "x.safetensors"
    tuned = tuned_copy(family, tmp_path / "tuned")
    extract(tuned, str(family.folder), 4, None, file_of_form(family, out))
    assert set(AdapterFile(out).header) == {"format", "videotune"}


# progress


def progress_lines(printed: str) -> list[tuple[str, int, int, str]]:
    """The title, what is done, what there is, and the name beside it."""
    lines = []
    for line in printed.splitlines():
        match = re.match(r"(\w+): (\d+)/(\d+)  (\S+)", line)
        if match:
            lines.append((match[1], int(match[2]), int(match[3]), match[4]))
    return lines


def test_bars_count_what_is_cut_extracted_or_merged(
    family: Any, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    source = tmp_path / "a.safetensors"
    paths = list(peft_file(family, source, targets=[r"blocks\.0\.attn1\.to_[qk]"]))
    resize(source, 2, 0.0, file_of_form(family, tmp_path / "b.safetensors"))
    cut = progress_lines(capsys.readouterr().err)
    assert cut == [("resize", done, 2, path) for done, path in enumerate(sorted(paths))]

    tuned = tuned_copy(family, tmp_path / "tuned")
    extract(tuned, str(family.folder), 2, None, file_of_form(family, tmp_path / "c.safetensors"))  # fmt: skip
    names = sorted(family.skeleton().state_dict())
    extracted = progress_lines(capsys.readouterr().err)
    assert extracted == [
        ("extract", done, len(names), name) for done, name in enumerate(names)
    ]

    state = {}
    for path in paths:
        state[f"{path}.lora_A.weight"] = ones(1, 24)
        state[f"{path}.lora_B.weight"] = ones(24, 1)
    export_merged(family, {"transformer": state}, 1.0, family.folder, tmp_path / "m", {})  # fmt: skip
    merged = progress_lines(capsys.readouterr().err)
    assert merged == [
        ("merge", done, 2, f"{path}.weight") for done, path in enumerate(paths)
    ]
