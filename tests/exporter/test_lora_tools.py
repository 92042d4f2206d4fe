"""``videotune lora``: every form of every family, and what is written does what its
source did.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support import lora_files
from tests.support.adapters import network_with_adapter, read_back
from tests.support.command_line import Bases, run
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import export_lora
from videotune.exporter.formats import digest_of
from videotune.exporter.lora_extract import extract
from videotune.exporter.lora_target import FORM_KINDS, Target
from videotune.exporter.lora_tools import convert, merge, resize

Open = Callable[..., Any]


def named(folder: Path, form: str) -> Path:
    return folder / form if form == "peft" else folder / f"{form}.safetensors"


@pytest.mark.parametrize("name", lora_files.FAMILIES)
def test_every_form_becomes_every_other(
    name: str, tiny_family: Open, tmp_path: Path
) -> None:
    """alpha is half the rank throughout, and not lost on any way."""
    family, first = tiny_family(name), tmp_path / "first.safetensors"
    wanted = lora_files.peft_file(family, first, 2.0)
    forms = [
        form
        for form in FORM_KINDS
        if form != "original" or family.original("") is not None
    ]
    for form in forms:
        one = named(tmp_path, form)
        lines = convert(first, lora_files.file_of_form(family, one, form))
        assert not any("alpha / rank is multiplied into" in line for line in lines)
        lora_files.same_deltas(lora_files.deltas_of(family, one), wanted)
        for other in forms:
            (tmp_path / form.upper()).mkdir(exist_ok=True)
            two = named(tmp_path / form.upper(), other)
            convert(one, lora_files.file_of_form(family, two, other))
            lora_files.same_deltas(lora_files.deltas_of(family, two), wanted)


ATTENTION = "blocks.0.attn1.to_q"
FORM_NAMES = {
    "diffusers": [f"transformer.{ATTENTION}.lora_{part}.weight" for part in "AB"],
    "peft": [f"base_model.model.{ATTENTION}.lora_{part}.weight" for part in "AB"],
    "comfyui": [
        "diffusion_model.blocks.0.self_attn.q.alpha",
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
        "diffusion_model.blocks.0.self_attn.q.lora_B.weight",
    ],
    "kohya": [
        "lora_unet_blocks_0_self_attn_q.alpha",
        "lora_unet_blocks_0_self_attn_q.lora_down.weight",
        "lora_unet_blocks_0_self_attn_q.lora_up.weight",
    ],
}


@pytest.mark.parametrize("form", FORM_NAMES)
def test_programs_know_a_form_by_its_names(
    form: str, family: Any, tmp_path: Path
) -> None:
    source, out = tmp_path / "a.safetensors", named(tmp_path, form)
    lora_files.peft_file(family, source, 2.0, [r"blocks\.0\.attn1\.to_q"])
    convert(source, lora_files.file_of_form(family, out, form))
    file = out / "adapter_model.safetensors" if form == "peft" else out
    assert sorted(load_file(file)) == FORM_NAMES[form]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_converted_file_keeps_its_dtype_and_a_calculated_one_is_float32(
    dtype: torch.dtype, family: Any, tmp_path: Path
) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    lora_files.peft_file(family, source, targets="attention")
    save_file({name: x.to(dtype) for name, x in load_file(source).items()}, source)
    convert(source, lora_files.file_of_form(family, out))
    assert {value.dtype for value in load_file(out).values()} == {dtype}

    cut = tmp_path / "c.safetensors"
    resize(source, 2, 0.0, lora_files.file_of_form(family, cut))
    assert {value.dtype for value in load_file(cut).values()} == {torch.float32}


def test_a_dora_is_sent_to_the_export_for_comfyui(family: Any, tmp_path: Path) -> None:
    """ComfyUI's magnitudes need the base's weights, which a conversion does not read."""
    source = tmp_path / "a.safetensors"
    _, state = network_with_adapter(family, "DORA")
    export_lora(family, "diffusers", state, 2.0, source, {})
    for form in ("comfyui", "kohya"):
        target = lora_files.file_of_form(family, tmp_path / "b.safetensors", form)
        with pytest.raises(VideotuneError, match=f"--to {form}: DORA .* export RUN"):
            convert(source, target)


@pytest.mark.parametrize("name", lora_files.FAMILIES)
def test_diffusers_reads_its_form_with_alpha(
    name: str, tiny_family: Open, tmp_path: Path
) -> None:
    """``load_lora_weights`` itself, the alpha of the header included, ranks that differ
    too.
    """
    family, first, out = (
        tiny_family(name),
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
    )
    wanted = lora_files.peft_file(family, first, 2.0)
    convert(first, lora_files.file_of_form(family, out))
    lora_files.same_deltas(read_back(family, out), wanted)
    resize(out, None, 0.5, lora_files.file_of_form(family, tmp_path / "c.safetensors"))
    lora_files.same_deltas(read_back(family, tmp_path / "c.safetensors"), wanted, 0.5)


def test_peft_reads_its_folder(family: Any, tmp_path: Path) -> None:
    import peft

    wanted = lora_files.peft_file(family, tmp_path / "a.safetensors", 2.0)
    convert(
        tmp_path / "a.safetensors",
        lora_files.file_of_form(family, tmp_path / "out", "peft"),
    )
    net = family.denoiser()
    before = {name: net.get_submodule(name).weight.double() for name in wanted}
    merged = peft.PeftModel.from_pretrained(
        net, str(tmp_path / "out")
    ).merge_and_unload()
    lora_files.same_deltas(
        {
            name: merged.get_submodule(name).weight.double() - before[name]
            for name in wanted
        },
        wanted,
        1e-5,
    )


def lycoris(family: Any, kind: str) -> tuple[lora_files.Tensors, lora_files.Tensors]:
    """A file as LyCORIS writes it, ``lycoris_`` before flat names of diffusers, alpha
    half the rank; and its ΔW.
    """
    tensors, deltas = {}, {}
    for seed, (name, (b, a)) in enumerate(
        lora_files.pairs(family, "attention").items()
    ):
        rows, columns, flat = len(b), a.shape[1], f"lycoris_{name.replace('.', '_')}"
        b2, a2 = (
            lora_files.random_tensor(rows, 4, seed=900 + seed),
            lora_files.random_tensor(4, columns, seed=990 + seed),
        )
        if kind == "LOHA":
            parts = {"hada_w1_a": b, "hada_w1_b": a, "hada_w2_a": b2, "hada_w2_b": a2}
            deltas[name] = 0.5 * (b.double() @ a.double()) * (b2.double() @ a2.double())
        else:
            one, two = (
                lora_files.random_tensor(4, 4, seed=seed),
                lora_files.random_tensor(rows // 4, columns // 4, seed=seed),
            )
            parts, deltas[name] = (
                {"lokr_w1": one, "lokr_w2": two},
                torch.kron(one.double(), two.double()),
            )
        tensors |= {f"{flat}.{part}": value for part, value in parts.items()} | {
            f"{flat}.alpha": torch.tensor(2.0)
        }
    return tensors, deltas


@pytest.mark.parametrize("kind", ["LOHA", "LOKR"])
def test_lycoris_files_are_converted_where_the_form_has_the_kind(
    kind: str, family: Any, tmp_path: Path
) -> None:
    """A LoKr of whole factors is not scaled, whatever alpha says: so LyCORIS, musubi
    and ComfyUI have it.
    """
    first = tmp_path / "a.safetensors"
    tensors, wanted = lycoris(family, kind)
    save_file(tensors, first)
    lora_files.same_deltas(lora_files.deltas_of(family, first), wanted)
    for form in ("comfyui", "kohya", "peft"):
        out = named(tmp_path, form)
        convert(first, lora_files.file_of_form(family, out, form))
        lora_files.same_deltas(lora_files.deltas_of(family, out), wanted)
    lora_files.same_deltas(read_back(family, tmp_path / "peft"), wanted)
    with pytest.raises(VideotuneError, match="reads only LoRA and DoRA"):
        convert(first, lora_files.file_of_form(family, tmp_path / "d.safetensors"))
    with pytest.raises(VideotuneError, match=kind):
        resize(
            first, 2, 0.0, lora_files.file_of_form(family, tmp_path / "d.safetensors")
        )
    assert not (tmp_path / "d.safetensors").exists()


def test_dora_of_lycoris_becomes_pefts(family: Any, tmp_path: Path) -> None:
    tensors = {}
    for name, (b, a) in lora_files.pairs(family, "attention").items():
        key = f"diffusion_model.{family.to_comfyui_name(name)}"
        tensors |= {
            f"{key}.lora_down.weight": a,
            f"{key}.lora_up.weight": b,
            f"{key}.dora_scale": b.norm(dim=1)[:, None],
        }
    save_file(tensors, tmp_path / "a.safetensors")
    convert(
        tmp_path / "a.safetensors",
        lora_files.file_of_form(family, tmp_path / "out", "peft"),
    )
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())[
        "use_dora"
    ]
    name, (b, _) = next(iter(lora_files.pairs(family, "attention").items()))
    assert torch.equal(
        found[f"base_model.model.{name}.lora_magnitude_vector"], b.norm(dim=1)
    )
    with pytest.raises(VideotuneError, match="norm"):
        convert(
            tmp_path / "a.safetensors",
            lora_files.file_of_form(family, tmp_path / "b.safetensors", "comfyui"),
        )


def test_musubis_joined_qkv_is_taken_apart_and_joined_again(
    tiny_family: Open, tmp_path: Path
) -> None:
    """musubi's HunyuanVideo names (networks/lora.py, modules MMDoubleStreamBlock): one
    A for q, k and v.
    """
    family, tensors = tiny_family("hunyuan_video"), {}
    width, flat = 24, "lora_unet_double_blocks_0_img_attn_qkv"
    a, b = lora_files.random_tensor(4, width), lora_files.random_tensor(3 * width, 4)
    tensors = {
        f"{flat}.lora_down.weight": a,
        f"{flat}.lora_up.weight": b,
        f"{flat}.alpha": torch.tensor(1.0),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    convert(
        tmp_path / "a.safetensors",
        lora_files.file_of_form(family, tmp_path / "b.safetensors"),
    )
    found = read_back(family, tmp_path / "b.safetensors")
    for part, rows in zip(("to_q", "to_k", "to_v"), b.split(width), strict=True):
        lora_files.same_deltas(
            {"": found[f"transformer_blocks.0.attn.{part}"]},
            {"": 0.25 * rows.double() @ a.double()},
        )
    convert(
        tmp_path / "b.safetensors",
        lora_files.file_of_form(family, tmp_path / "c.safetensors", "kohya"),
    )
    assert all(
        torch.equal(value, tensors[key])
        for key, value in load_file(tmp_path / "c.safetensors").items()
    )


def test_a_merge_is_the_sum(family: Any, tmp_path: Path) -> None:
    one, two, out = (tmp_path / f"{name}.safetensors" for name in "abc")
    first, second = (
        lora_files.peft_file(family, one, 2.0),
        lora_files.peft_file(family, two, None, "attention", 3),
    )
    merge([one, two], [0.5, -2.0], None, lora_files.file_of_form(family, out))
    wanted = {
        name: 0.5 * delta - 2.0 * second.get(name, torch.zeros_like(delta))
        for name, delta in first.items()
    }
    lora_files.same_deltas(lora_files.deltas_of(family, out), wanted)
    told = merge(
        [one, two],
        [0.5, -2.0],
        2,
        lora_files.file_of_form(family, tmp_path / "d.safetensors", "kohya"),
    )
    best = {
        name: torch.linalg.svdvals(delta)[2:].norm() for name, delta in wanted.items()
    }
    found = lora_files.deltas_of(family, tmp_path / "d.safetensors")
    for name, delta in wanted.items():
        torch.testing.assert_close(
            (found[name] - delta).norm(), best[name], rtol=1e-5, atol=1e-6
        )
    whole = sum(delta.square().sum() for delta in wanted.values()) ** 0.5
    assert (
        f"{float(sum(lost**2 for lost in best.values()) ** 0.5 / whole):.2e}"
        in " ".join(told)
    )


def test_a_resize_is_the_nearest_of_its_rank(family: Any, tmp_path: Path) -> None:
    """No factors of the rank are nearer than the cut SVD; the bounds hold, and one rank
    less breaks them.
    """
    first, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    wanted = lora_files.peft_file(family, first, 2.0)
    resize(first, 3, 0.0, lora_files.file_of_form(family, out))
    found = lora_files.deltas_of(family, out)
    for name, delta in wanted.items():
        best = torch.linalg.svdvals(delta)[3:].norm()
        torch.testing.assert_close(
            (found[name] - delta).norm(), best, rtol=1e-5, atol=1e-6
        )
    assert (
        run(
            "lora",
            "resize",
            first,
            out=out,
            energy=0.9,
            base=family.folder,
            overwrite=True,
        )
        == 0
    )
    ranks = {
        key: len(value) for key, value in load_file(out).items() if "lora_A" in key
    }
    found = lora_files.deltas_of(family, out)
    for name, delta in wanted.items():
        sigma, rank = (
            torch.linalg.svdvals(delta),
            ranks[f"transformer.{name}.lora_A.weight"],
        )
        assert float((found[name] - delta).norm() / delta.norm()) <= 0.1**0.5 + 1e-6
        assert float(sigma[rank - 1 :].norm() / delta.norm()) > 0.1**0.5
    assert len(set(ranks.values())) > 1


def test_extraction_finds_what_was_added(family: Any, tmp_path: Path) -> None:
    """And says what no LoRA can hold: a norm's weight was changed too."""
    tuned = Path(shutil.copytree(family.folder, tmp_path / "tuned"))
    wanted = lora_files.peft_file(family, tmp_path / "a.safetensors")
    (file,) = (tuned / "transformer").glob("*.safetensors")
    weights = load_file(file)
    for name, delta in wanted.items():
        weights[f"{name}.weight"] += delta.float()
    weights["blocks.0.norm2.weight"] += 10.0
    save_file(weights, file, {"format": "pt"})
    target = lora_files.file_of_form(family, tmp_path / "b.safetensors")
    told = extract(
        tuned / "transformer", str(family.folder), lora_files.RANK, None, target
    )
    lora_files.same_deltas(
        lora_files.deltas_of(family, tmp_path / "b.safetensors"), wanted, 1e-5
    )
    own = weights["blocks.0.norm2.weight"].numel() * 100.0
    share = own / (own + sum(float(delta.square().sum()) for delta in wanted.values()))
    assert f"{share:.2%}" in told[2]
    with pytest.raises(VideotuneError, match="differs"):
        extract(
            Path(family.folder),
            str(family.folder),
            4,
            None,
            lora_files.file_of_form(family, tmp_path / "c.safetensors"),
        )


def test_a_large_matrix_is_cut_by_a_randomized_svd() -> None:
    from videotune.exporter.lora_factors import low_rank_factors

    left, right = (
        lora_files.random_tensor(1200, 8).double(),
        lora_files.random_tensor(8, 1100, seed=1).double(),
    )
    noise = 1e-3 * lora_files.random_tensor(1200, 1100, seed=2).double()
    b, a = low_rank_factors(left @ right + noise, 8)
    best = torch.linalg.svdvals(left @ right + noise)[8:].norm()
    assert float((b @ a - left @ right - noise).norm()) <= 1.001 * float(best)


@pytest.mark.parametrize(
    ("name", "form", "overwrite", "fault"),
    [
        ("new.safetensors", "kohya", False, None),
        ("file.safetensors", "kohya", False, "already exists; --overwrite"),
        ("file.safetensors", "kohya", True, None),
        ("source.safetensors", "kohya", True, "is one of the sources"),
        ("link.safetensors", "kohya", True, "is one of the sources"),
        ("new.bin", "kohya", True, r"ending \.safetensors"),
        ("folder.safetensors", "kohya", True, r"ending \.safetensors"),
        ("new", "peft", False, None),
        ("adapter", "peft", False, "already exists; --overwrite"),
        ("adapter", "peft", True, None),
        ("folder.safetensors", "peft", True, "is not a PEFT folder"),
        ("file.safetensors", "peft", True, "is not a PEFT folder"),
        ("new", "lycoris", True, "--to lycoris: this form is unknown"),
    ],
)
def test_a_place_is_taken_only_if_it_may_be_replaced(
    name: str, form: str, overwrite: bool, fault: str | None, tmp_path: Path
) -> None:
    source = tmp_path / "source.safetensors"
    for file in (source, tmp_path / "file.safetensors"):
        file.touch()
    (tmp_path / "link.safetensors").symlink_to(source)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    target = Target(tmp_path / name, form, overwrite=overwrite)
    if fault is None:
        target.check(source)
        with pytest.raises(VideotuneError, match="no such file or folder"):
            target.check(source, tmp_path / "absent")
    else:
        with pytest.raises(VideotuneError, match=fault):
            target.check(source)


@pytest.mark.parametrize(("targets", "adds"), [("feed_forward", 1), ("attention", 0)])
def test_a_reader_that_knows_a_form_by_fused_weights_gets_one_that_is_zero(
    targets: str, adds: int, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    family = tiny_family("hunyuan_video")
    first, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    wanted = lora_files.peft_file(family, first, targets=targets)
    convert(first, lora_files.file_of_form(family, out, "comfyui"))
    lora_files.same_deltas(lora_files.deltas_of(family, out), wanted)
    zero = {key: x for key, x in load_file(out).items() if not x.any()}
    assert len(zero) == 2 * adds
    width = (
        family.skeleton().get_submodule("transformer_blocks.0.attn.to_q").in_features
    )
    shapes = {tuple(x.shape) for x in zero.values()}
    assert shapes == ({(1, width), (3 * width, 1)} if adds else set())


def test_nothing_is_written_where_something_is_wrong(
    family: Any, tiny_bases: Bases, tmp_path: Path
) -> None:
    first, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    lora_files.peft_file(family, first, 2.0)
    own, cog = str(family.folder), str(tiny_bases("cogvideox"))
    for wrong in (
        Target(out, "kohya", cog), Target(out, "lycoris", own), Target(first, "kohya", own), Target(out, "kohya"),
        Target(tmp_path / "x.bin", "kohya", own), Target(tmp_path, "peft", own),
    ):  # fmt: skip
        with pytest.raises(VideotuneError):
            convert(first, wrong)
    with pytest.raises(VideotuneError):
        merge(
            [first, first], [1.0, 2.0, 3.0], None, lora_files.file_of_form(family, out)
        )
    with pytest.raises(VideotuneError):
        run("lora", "resize", first, out=out, base=family.folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors"]
    convert(first, lora_files.file_of_form(family, out, "kohya"))
    with pytest.raises(VideotuneError, match="overwrite"):
        convert(first, lora_files.file_of_form(family, out, "comfyui"))
    with safe_open(out, "pt") as file:
        assert "lora convert" in file.metadata()["videotune"]


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([0.0], "add up to zero"),
        ([1e-320], "add up to zero"),
        ([1.0, -1.0], "add up to zero"),
        ([math.nan], "finite"),
    ],
)
@pytest.mark.parametrize("rank", [None, 2])
def test_a_sum_of_nothing_is_one_sentence(
    weights: list[float], told: str, rank: int | None, tiny_family: Open, tmp_path: Path
) -> None:
    family, source, out = (
        tiny_family("wan"),
        tmp_path / "a.safetensors",
        lora_files.file_of_form,
    )
    lora_files.peft_file(family, source)
    with pytest.raises(VideotuneError, match=told):
        merge(
            [source, source], weights, rank, out(family, tmp_path / "out.safetensors")
        )
    assert not (tmp_path / "out.safetensors").exists()


def test_a_module_that_cancels_out_is_left_out(
    tiny_family: Open, tmp_path: Path
) -> None:
    family, one, other = (
        tiny_family("wan"),
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
    )
    wanted = lora_files.peft_file(family, one)
    tensors = load_file(one)
    first = next(key for key in tensors if "lora_B" in key)
    save_file(tensors | {first: -tensors[first]}, other)
    merge(
        [one, other],
        (),
        None,
        lora_files.file_of_form(family, tmp_path / "sum.safetensors"),
    )
    gone = first.removeprefix("transformer.").removesuffix(".lora_B.weight")
    lora_files.same_deltas(
        lora_files.deltas_of(family, tmp_path / "sum.safetensors"),
        {n: 2 * x for n, x in wanted.items() if n != gone},
    )


def test_a_module_that_is_zero_in_every_file_is_left_out(
    tiny_family: Open, tmp_path: Path
) -> None:
    family, source = tiny_family("wan"), tmp_path / "a.safetensors"
    wanted = lora_files.peft_file(family, source, targets="attention")
    tensors = load_file(source)
    first = next(key for key in tensors if "lora_B" in key)
    save_file(tensors | {first: tensors[first] * 0}, source)
    out = tmp_path / "b.safetensors"
    (line, _) = merge([source], (), None, lora_files.file_of_form(family, out))
    assert f"{len(wanted) - 1} modules" in line
    assert not any(first.removesuffix("lora_B.weight") in key for key in load_file(out))


def test_a_sum_that_is_infinite_is_not_taken_for_zero(
    tiny_family: Open, tmp_path: Path
) -> None:
    """Its factors are finite in float64, and neither its norm nor a float32 is."""
    family, source = tiny_family("wan"), tmp_path / "a.safetensors"
    lora_files.peft_file(family, source, targets=[r"blocks\.0\.attn1\.to_q"])
    tensors = load_file(source)
    key = next(key for key in tensors if "lora_A" in key)
    save_file(tensors | {key: tensors[key] * 1e30}, source)
    target = lora_files.file_of_form(family, tmp_path / "b.safetensors")
    with pytest.raises(VideotuneError, match="NaN or infinite"):
        merge([source], [1e290], None, target)


@pytest.mark.parametrize("name", ["loop.safetensors", "loop.safetensors/x.safetensors"])
def test_a_link_to_itself_as_out_is_no_crash(
    name: str, tiny_family: Open, tmp_path: Path
) -> None:
    family, source, out = (
        tiny_family("wan"),
        tmp_path / "a.safetensors",
        tmp_path / name,
    )
    lora_files.peft_file(family, source)
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    if out.parent == tmp_path:
        convert(source, lora_files.file_of_form(family, out))
        lora_files.same_deltas(
            lora_files.deltas_of(family, out), lora_files.deltas_of(family, source)
        )
    else:
        with pytest.raises(OSError, match="loop"):
            convert(source, lora_files.file_of_form(family, out))


@pytest.mark.parametrize("how", ["float4", "float64", "alpha", "surrogate"])
def test_what_numbers_and_texts_cannot_hold(
    how: str, tiny_family: Open, tmp_path: Path
) -> None:
    """Refused by the source's name; half a letter in our header's texts is kept."""
    family, source = tiny_family("wan"), tmp_path / "a.safetensors"
    lora_files.peft_file(family, source)
    tensors, head = load_file(source), {}
    key = next(iter(tensors))
    if how == "float64":
        tensors[key] = tensors[key].double() * 1e300
    elif how == "float4":
        tensors[key] = torch.zeros(4, 12, dtype=torch.uint8).view(
            torch.float4_e2m1fn_x2
        )
    else:
        heads = {"alpha": {"lora_config": f'{{"lora_alpha": {"9" * 400}}}'}}
        head = heads.get(how, {"videotune": r'{"a": "\ud800"}'})
    save_file(tensors, source, metadata=head)
    target = lora_files.file_of_form(family, tmp_path / "out.safetensors")
    if how == "surrogate":
        convert(source, target)
        return
    with pytest.raises(
        VideotuneError,
        match=r"a\.safetensors.*(not a weight dtype|infinite|finite number)",
    ):
        convert(source, target)


# facts of the new file's header

SOURCE_FACTS = {
    "videotune": "0.1.0",
    "base": {"name": "somebody/model", "fingerprints": {}},
    "step": 300,
    "from": ["older.safetensors"],
    "made": "export",
    "family": "another",
}
DESCRIBES_TENSORS = {"use": "x", "alpha": 2.0, "rank": 4, "variant": "LORA"}
"""Facts that are wrong for a file with other tensors; the digest is one of them."""


def source_with_facts(family: Any, path: Path, **facts: Any) -> Path:
    lora_files.peft_file(family, path, 2.0, "attention")
    tensors = load_file(path)
    header = {**SOURCE_FACTS, **DESCRIBES_TENSORS, **facts}
    header["digest"] = digest_of(tensors)
    save_file(tensors, path, {"videotune": json.dumps(header)})
    return path


def new_facts(path: Path) -> dict[str, Any]:
    """The header's facts, without the digest of the new tensors."""
    with safe_open(path, "pt") as file:
        facts = dict(json.loads(file.metadata()["videotune"]))
    assert facts.pop("digest") == digest_of(load_file(path))
    return facts


def test_the_facts_of_a_converted_or_resized_file_are_its_sources(
    family: Any, tmp_path: Path
) -> None:
    """Without what describes the old tensors, and with what was done to them."""
    source = source_with_facts(family, tmp_path / "a.safetensors")
    expected = SOURCE_FACTS | {"family": "wan", "from": ["a.safetensors"]}

    out = tmp_path / "b.safetensors"
    convert(source, lora_files.file_of_form(family, out))
    assert new_facts(out) == expected | {"made": "lora convert"}
    out = tmp_path / "c.safetensors"
    resize(source, 2, 0.0, lora_files.file_of_form(family, out))
    assert new_facts(out) == expected | {"made": "lora resize"}


def test_a_merge_has_no_facts_of_its_sources(family: Any, tmp_path: Path) -> None:
    """Neither base nor step is that of the sum."""
    sources = [
        source_with_facts(family, tmp_path / f"{name}.safetensors") for name in "ab"
    ]
    out = tmp_path / "c.safetensors"
    merge(sources, (), None, lora_files.file_of_form(family, out))
    assert new_facts(out) == {
        "family": "wan",
        "from": ["a.safetensors", "b.safetensors"],
        "made": "lora merge",
    }


def test_the_expert_of_the_sources_is_a_fact(family: Any, tmp_path: Path) -> None:
    """By the file's name, or by its header before the name."""
    by_name = tmp_path / "a_high_noise.safetensors"
    lora_files.peft_file(family, by_name, 2.0, "attention")
    out = tmp_path / "b.safetensors"
    convert(by_name, lora_files.file_of_form(family, out))
    assert new_facts(out)["expert"] == "high"

    by_header = source_with_facts(
        family, tmp_path / "c_high_noise.safetensors", expert="low"
    )
    out = tmp_path / "d.safetensors"
    convert(by_header, lora_files.file_of_form(family, out))
    assert new_facts(out)["expert"] == "low"

    plain = source_with_facts(family, tmp_path / "e.safetensors")
    out = tmp_path / "f.safetensors"
    convert(plain, lora_files.file_of_form(family, out))
    assert "expert" not in new_facts(out)
