"""DoRA is read by diffusers; LoHa, LoKr and OFT by PEFT, of which the first two have
ComfyUI's names.

And --merge: the base with the adapter in its weights, each rounded once to the dtype
that it had.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.adapters import network_output, network_with_adapter, scale
from tests.support.lora_files import peft_file
from tests.support.run_results import updates
from videotune.adapters.adapter_types import PARTS, by_module
from videotune.adapters.effect import new_weight
from videotune.adapters.lora import ADAPTER, add_lora
from videotune.config.nested_keys import unflatten
from videotune.config.resolve import parse
from videotune.config.sections import BaseLora, Lora
from videotune.errors import VideotuneError
from videotune.exporter import adapter_export, merged_file
from videotune.exporter.adapter_export import export_lora, read_adapter, read_lora
from videotune.exporter.base_loras import merge_into_base
from videotune.exporter.formats import (
    PEFT_CONFIG_KEY,
    Exported,
    check_formats,
    configured_formats,
    digest_of,
    formats_of,
    refuse_format,
)
from videotune.exporter.full import export_full, export_merged
from videotune.exporter.lora_inspect import inspect
from videotune.exporter.lora_write import bake_adapter, round_adapter
from videotune.exporter.merged_file import export_merged_file
from videotune.exporter.single_file_export import export_single_file, in_one_layout

Open = Callable[..., Any]
KINDS = pytest.mark.parametrize("kind", PARTS)


def wanted_of(family: Any, state: dict[str, Any], kind: str) -> torch.Tensor:
    """What the network makes of a batch with the adapter worked into its weights."""
    net = family.denoiser()
    for path, parts in by_module(state).items():
        weight = net.get_submodule(path).weight
        weight.data = new_weight(weight, parts, scale(kind)).float()
    return network_output(net)


@KINDS
def test_every_format_is_read_back_and_acts_as_trained(
    kind: str, family: Any, tmp_path: Path
) -> None:
    """diffusers' form by its pipeline too, which reads DoRA with its magnitudes."""
    _, state = network_with_adapter(family, kind)
    wanted = wanted_of(family, state, kind)
    formats = [
        format
        for format in formats_of(family, kind)
        if (kind, format) != ("DORA", "comfyui")  # read by ComfyUI alone, see below
    ]
    for format in formats:
        done = export_lora(
            family,
            format,
            state,
            scale(kind),
            tmp_path / f"{format}.safetensors",
            {"step": 1},
        )
        assert done.modules == 20
        assert done.max_error < 1e-6
        assert done.reader.startswith(
            "diffusers" if kind in ("LORA", "DORA") else "PEFT"
        )
        net = family.denoiser()
        read_lora(family, net, done.path, ADAPTER)
        torch.testing.assert_close(network_output(net), wanted, rtol=1e-4, atol=1e-5)
        if format == "diffusers":
            pipe = WanPipeline.from_pretrained(family.folder)
            pipe.load_lora_weights(str(done.path))
            torch.testing.assert_close(
                network_output(pipe.transformer.eval()), wanted, rtol=1e-4, atol=1e-5
            )
            magnitudes = [
                name
                for name in load_file(done.path)
                if name.endswith("lora_magnitude_vector")
            ]
            assert len(magnitudes) == (20 if kind == "DORA" else 0)
    assert not torch.allclose(wanted, network_output(family.denoiser()), atol=1e-3)


@pytest.mark.parametrize("kind", ["LOHA", "LOKR", "OFT"])
@pytest.mark.parametrize("rank", [2, 8])
def test_peft_reads_the_kin_by_what_stands_in_the_file(
    kind: str, rank: int, family: Any, tmp_path: Path
) -> None:
    """By PEFT alone, on diffusers' own model: none of our code reads the file."""
    import peft

    state = network_with_adapter(family, kind, rank)[1]
    path = export_lora(
        family, "peft", state, scale(kind), tmp_path / "l.safetensors", {}
    ).path
    with safe_open(path, "pt") as file:
        config = peft.get_peft_config(json.loads(file.metadata()[PEFT_CONFIG_KEY]))
    net = family.denoiser()
    net.add_adapter(config)
    told = peft.set_peft_model_state_dict(net, load_file(path))
    assert not told.unexpected_keys + [
        key for key in told.missing_keys if "default" in key
    ]
    wanted = wanted_of(family, state, kind)
    torch.testing.assert_close(network_output(net), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["LOHA", "LOKR"])
@pytest.mark.parametrize("rank", [2, 8])
def test_comfyui_s_formula_over_comfyui_s_names(
    kind: str, rank: int, family: Any, tmp_path: Path
) -> None:
    """As its weight adapters read them: no .alpha, so the products count as they are;
    LoKr's factors whole or in two.
    """
    state = network_with_adapter(family, kind, rank)[1]
    tensors = load_file(
        export_lora(family, "comfyui", state, 2.0, tmp_path / "c.safetensors", {}).path
    )
    wanted = updates(state, 2.0)
    names = {
        "blocks.1.attn2.to_out.0": "blocks.1.cross_attn.o",
        "blocks.0.ffn.net.0.proj": "blocks.0.ffn.0",
    }
    for path, native in names.items():
        own = {
            key.rpartition(".")[2]: value.double()
            for key, value in tensors.items()
            if f".{native}." in key
        }
        assert all(f"diffusion_model.{native}.{part}" in tensors for part in own)
        assert "alpha" not in own
        if kind == "LOHA":
            found = (own["hada_w1_a"] @ own["hada_w1_b"]) * (
                own["hada_w2_a"] @ own["hada_w2_b"]
            )
        else:
            assert ("lokr_w2" in own) == (rank == 8)
            second = (
                own["lokr_w2"]
                if "lokr_w2" in own
                else own["lokr_w2_a"] @ own["lokr_w2_b"]
            )
            found = torch.kron(own["lokr_w1"], second)
        torch.testing.assert_close(found, wanted[path], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "format", "words"),
    [
        ("LOHA", "diffusers", "has comfyui, peft, not 'diffusers'"),
        ("LOKR", "diffusers", "--merge` works with every program"),
        (
            "OFT",
            "comfyui",
            "has peft, not 'comfyui': ComfyUI's OFT rotates a weight's outputs",
        ),
        ("LORA", "peft", "has comfyui, diffusers, not 'peft'"),
        ("LORA", "kohya", "has comfyui, diffusers, not 'kohya'"),
    ],
)
def test_formats_that_others_would_read_wrongly_are_refused(
    kind: str, format: str, words: str, family: Any, tmp_path: Path
) -> None:
    with pytest.raises(VideotuneError) as caught:
        export_lora(
            family,
            format,
            network_with_adapter(family, kind)[1],
            scale(kind),
            tmp_path / "x.safetensors",
            {},
        )
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@KINDS
@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "is zero"), (math.nan, "NaN"), (math.inf, "NaN or infinite")],
)
def test_an_adapter_that_helps_nobody_is_not_exported(
    kind: str, value: float | None, words: str, family: Any, tmp_path: Path
) -> None:
    """One of no step, and one that holds such numbers."""
    state = add_lora(family.denoiser(), family.spec, Lora(rank=4, variant=kind), seed=0)
    if value is not None:
        list(state.values())[-1].data.fill_(value)
    with pytest.raises(VideotuneError, match=words):
        export_lora(
            family,
            formats_of(family, kind)[-1],
            state,
            1.0,
            tmp_path / "x.safetensors",
            {},
        )
    assert list(tmp_path.iterdir()) == []


def test_alpha_is_in_b_and_nowhere_else(family: Any, tmp_path: Path) -> None:
    """A reader that assumes alpha = rank, and one that reads alpha, then apply the same
    update.
    """
    _, state = network_with_adapter(family)
    path = export_lora(
        family,
        "diffusers",
        state,
        2.0,
        tmp_path / "x.safetensors",
        {"step": 3, "word": "zörble"},
    ).path
    tensors = load_file(path)
    assert not any("alpha" in name for name in tensors)
    b = tensors["transformer.blocks.0.attn1.to_q.lora_B.weight"]
    torch.testing.assert_close(
        b, 2.0 * state["blocks.0.attn1.to_q.lora_B.weight"].detach()
    )
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert set(header) == {"format", "videotune"}, (
        "lora_adapter_metadata would make diffusers scale a second time"
    )
    assert json.loads(header["videotune"]) == {
        "step": 3,
        "word": "zörble",
        "digest": digest_of(tensors),
    }


def test_a_run_lists_what_was_written_and_who_read_it_back(tmp_path: Path) -> None:
    exported = Exported(
        format="comfyui",
        path=tmp_path / "run" / "export" / "a.safetensors",
        modules=6,
        max_error=0.0,
        reader="diffusers",
        use="pipe.load()",
    )
    assert exported.to_json(tmp_path / "run") == {
        "format": "comfyui",
        "path": "export/a.safetensors",
        "use": "pipe.load()",
        "verified": {"max_error": 0.0, "modules": 6, "reader": "diffusers"},
    }


def test_a_file_for_another_model_is_told(tiny_family: Open, tmp_path: Path) -> None:
    family, other = tiny_family("wan"), tiny_family("cogvideox")
    path = export_lora(
        family,
        "peft",
        network_with_adapter(family, "LOHA")[1],
        2.0,
        tmp_path / "l.safetensors",
        {},
    ).path
    with pytest.raises(ValueError, match=r"modules that the model lacks; .* blocks"):
        read_lora(other, other.denoiser(), path, ADAPTER)


@KINDS
def test_a_file_that_would_act_otherwise_is_an_error(
    kind: str, family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail, for each tensor of each kind: one changed number is enough."""
    (_, state), format = (
        network_with_adapter(family, kind),
        formats_of(family, kind)[-1],
    )
    tensors = bake_adapter(family, format, state, scale(kind))
    for key in [
        key
        for key in tensors
        if "blocks.1.attn1.to_k" in key or "blocks.1.self_attn.k." in key
    ]:
        other = {name: value.clone() for name, value in tensors.items()}
        other[key].view(-1)[1] += 0.01
        monkeypatch.setattr(
            adapter_export, "bake_adapter", lambda *_, other=other: other
        )
        with pytest.raises(VideotuneError, match="ΔW differs"):
            export_lora(
                family, format, state, scale(kind), tmp_path / "x.safetensors", {}
            )
        assert list(tmp_path.iterdir()) == []


WEIGHTS = "diffusion_pytorch_model.safetensors"


@KINDS
def test_the_folder_opens_and_acts_as_the_adapter_did(
    kind: str, family: Any, tmp_path: Path
) -> None:
    net, state = network_with_adapter(family, kind)
    done = export_merged(
        family,
        {"transformer": state},
        scale(kind),
        family.folder,
        tmp_path / "m",
        {"step": 1},
    )
    pipe = WanPipeline.from_pretrained(done.path)
    torch.testing.assert_close(
        network_output(pipe.transformer.eval()),
        network_output(net),
        rtol=1e-4,
        atol=1e-5,
    )
    assert not torch.allclose(
        network_output(net), network_output(family.denoiser()), atol=1e-3
    )
    assert (done.format, done.modules) == ("merged", 20)
    assert json.loads((done.path / "videotune.json").read_text()) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"], (
        "nothing is left beside it"
    )


def mixed(family: Any, folder: Path) -> Path:
    """The base with its weights in bfloat16, but for the first block in float32, in two
    files.
    """
    shutil.copytree(family.folder, folder)
    weights = load_file(folder / "transformer" / WEIGHTS)
    (folder / "transformer" / WEIGHTS).unlink()
    files = {"one.safetensors": {}, "two.safetensors": {}}
    for name, value in weights.items():
        first = name.startswith("blocks.0.")
        files["one.safetensors" if first else "two.safetensors"][name] = (
            value if first else value.bfloat16()
        )
    for file, tensors in files.items():
        save_file(tensors, folder / "transformer" / file, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, own in files.items() for name in own},
    }
    (folder / "transformer" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return folder


@KINDS
def test_each_weight_is_rounded_once_to_its_own_dtype_and_no_other_is_touched(
    kind: str, tiny_family: Open, tmp_path: Path
) -> None:
    from videotune.models.registry import find

    base = mixed(tiny_family("wan"), tmp_path / "base")
    family = find("wan")(base, torch.device("cpu"), torch.float32)
    before = {
        file: (base / "transformer" / file).read_bytes()
        for file in ("one.safetensors", "two.safetensors")
    }
    _, state = network_with_adapter(family, kind)
    folder = export_merged(
        family, {"transformer": state}, scale(kind), base, tmp_path / "m", {}
    ).path
    parts, dtypes = by_module(state), set()
    for file, old in before.items():
        assert (base / "transformer" / file).read_bytes() == old, (
            "the base's own file was written to"
        )
        was, now = (
            load_file(base / "transformer" / file),
            load_file(folder / "transformer" / file),
        )
        assert list(was) == list(now)
        for name, value in was.items():
            path = name.removesuffix(".weight")
            wanted = (
                new_weight(value, parts[path], scale(kind)).to(value.dtype)
                if path in parts
                else value
            )
            assert now[name].dtype == value.dtype
            assert torch.equal(now[name], wanted), name
            dtypes |= {value.dtype} if path in parts else set()
    assert dtypes == {torch.float32, torch.bfloat16}
    vae = next((folder / "vae").glob("*.safetensors"))
    assert vae.samefile(base / "vae" / vae.name), "what did not train is linked"


@pytest.mark.parametrize("experts", [("high", "low"), ("low",)])
def test_both_experts_or_one(
    experts: tuple[str, ...], tiny_family: Open, tmp_path: Path
) -> None:
    family = tiny_family("wan", variant="t2v-a14b")
    nets = {expert: network_with_adapter(family, expert=expert) for expert in experts}
    states = {expert: state for expert, (_, state) in nets.items()}
    pipe = WanPipeline.from_pretrained(
        export_merged(family, states, 2.0, family.folder, tmp_path / "m", {}).path
    )
    for expert, net in (("high", pipe.transformer), ("low", pipe.transformer_2)):
        wanted = nets[expert][0] if expert in nets else family.denoiser(expert)
        torch.testing.assert_close(
            network_output(net.eval()), network_output(wanted), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("expert", ["high", "low"])
def test_one_file_of_comfyui_has_the_weights_of_its_expert(
    expert: str, tiny_family: Open, tmp_path: Path
) -> None:
    """What did not train is that expert's own in the base."""
    family = tiny_family("wan", variant="t2v-a14b")
    net = family.denoiser(expert)
    parameters = dict(net.named_parameters())
    trained = next(iter(parameters))
    state = {trained: parameters[trained].detach() + 0.5}
    path = tmp_path / "model.safetensors"
    export_single_file(family, expert, state, family.folder, path, {})
    wanted = [value for name, value in net.state_dict().items() if name != trained]
    found = list(load_file(path).values())
    for value in wanted:
        assert any(
            value.shape == other.shape and torch.equal(value, other) for other in found
        )


@pytest.mark.parametrize("name", ["wan", "hunyuan_video", "hunyuan_video15"])
def test_a_merged_transformer_as_one_file_of_comfyui(
    name: str, tiny_family: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file as a fine-tuned model of these weights, and a file that reads back
    differently is not left behind.
    """
    family = tiny_family(name)
    expert = family.spec.experts[0].name
    _, state = network_with_adapter(family, "LORA")
    folder = export_merged(
        family, {expert: state}, scale("LORA"), family.folder, tmp_path / "m", {}
    ).path
    path = tmp_path / "merged.safetensors"
    done = export_merged_file(family, expert, folder, path, {"step": 3})
    assert done.format == "merged-comfyui"

    part = folder / family.spec.part_of(expert)
    weights = load_file(next(part.glob("*.safetensors")))
    tuned = tmp_path / "tuned.safetensors"
    export_single_file(family, expert, weights, folder, tuned, {})
    expected = load_file(tuned)
    written = load_file(path)
    assert set(written) == set(expected)
    for key, value in written.items():
        assert torch.equal(value, expected[key]), key

    path.unlink()
    monkeypatch.setattr(merged_file, "in_one_layout", changed)
    with pytest.raises(VideotuneError, match="does not match"):
        export_merged_file(family, expert, folder, path, {})
    assert sorted(tmp_path.iterdir()) == [folder, tuned]


def test_one_file_of_comfyui_keeps_the_dtype_of_each_weight(
    tiny_family: Open, tmp_path: Path
) -> None:
    """Some weights of the base are bfloat16, the others float32; the rest of the folder
    is none of the file.
    """
    from videotune.models.registry import find

    base = mixed(tiny_family("wan"), tmp_path / "base")
    family = find("wan")(base, torch.device("cpu"), torch.float32)
    path = tmp_path / "merged.safetensors"
    facts = {"step": 3, "use": "load it"}
    done = export_merged_file(family, "transformer", base, path, facts)
    assert (done.max_error, done.use) == (0.0, "load it")
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["videotune"]) == facts

    rules = family.single_file_names()
    expected = {}
    for name in ("one.safetensors", "two.safetensors"):
        expected |= in_one_layout(load_file(base / "transformer" / name), rules)
    written = load_file(path)
    assert set(written) == set(expected)
    for key, value in written.items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key
    assert {value.dtype for value in written.values()} == {
        torch.float32,
        torch.bfloat16,
    }


@pytest.mark.parametrize("what", ["adapter", "one file", "folder"])
def test_numbers_beyond_the_dtype_of_the_file_are_refused(
    what: str, family: Any, tmp_path: Path
) -> None:
    """The weight is named, and nothing is left; in bfloat16 the same numbers fit."""
    path = tmp_path / "out.safetensors"
    if what == "adapter":
        _, state = network_with_adapter(family, "LORA")
        name = "blocks.0.attn1.to_q.lora_B.weight"
        state[name].data.fill_(1e6)
    else:
        name = "blocks.0.attn1.to_q.weight"
        state = {name: torch.full((24, 24), 1e6)}

    def export(dtype: torch.dtype) -> Any:
        if what == "adapter":
            facts = {"use": "load it"}
            return export_lora(
                family, "diffusers", state, 1.0, path, facts, dtype=dtype
            )
        write = export_full if what == "folder" else export_single_file
        arguments = ("transformer", state, family.folder, path, {"use": "load it"})
        return write(family, *arguments, dtype=dtype)

    with pytest.raises(VideotuneError, match=f"float16 holds .* {name} has larger"):
        export(torch.float16)
    assert list(tmp_path.iterdir()) == []
    assert export(torch.bfloat16).use == "load it"


def changed(weights: dict[str, torch.Tensor], rules: Any) -> dict[str, torch.Tensor]:
    """A layout with one wrong number in each tensor that is not on the meta device."""
    tensors = in_one_layout(weights, rules)
    for value in tensors.values():
        if not value.is_meta:
            value.view(-1)[0] += 0.01
    return tensors


def test_a_base_in_its_authors_names_is_merged_as_any_other(
    family: Any, tmp_path: Path
) -> None:
    state, base = (
        network_with_adapter(family, "LORA")[1],
        shutil.copytree(family.folder, tmp_path / "base"),
    )
    rename, file = family.original, base / "transformer" / WEIGHTS
    save_file({rename(name): value for name, value in load_file(file).items()}, file)
    out = [export_merged(family, {"transformer": state}, 2.0, one, tmp_path / str(i), {}).path
           for i, one in enumerate((base, family.folder))]  # fmt: skip
    own, usual = (load_file(folder / "transformer" / WEIGHTS) for folder in out)
    assert {name: value.tolist() for name, value in own.items()} == {
        key: x.tolist() for key, x in usual.items()
    }


def test_what_cannot_be_merged_is_told_and_leaves_nothing(
    family: Any, tmp_path: Path
) -> None:
    _, state = network_with_adapter(family, "LORA")
    for value, said in (
        ({f"more.{name}": x for name, x in state.items()}, "no weight called more"),
        (state, "NaN"),
    ):
        next(iter(state.values())).data.fill_(float("nan") if value is state else 0.0)
        with pytest.raises(VideotuneError, match=said):
            export_merged(
                family,
                {"transformer": value},
                2.0,
                family.folder,
                tmp_path / "out" / "m",
                {},
            )
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_too_large_for_the_base_s_dtype_are_told(
    family: Any, tmp_path: Path
) -> None:
    _, state = network_with_adapter(family, "LORA")
    base = shutil.copytree(family.folder, tmp_path / "base")
    file = base / "transformer" / WEIGHTS
    save_file(
        {name: value.half() for name, value in load_file(file).items()},
        file,
        metadata={"format": "pt"},
    )
    state["blocks.0.attn1.to_q.lora_B.weight"].data.fill_(1e6)
    with pytest.raises(
        VideotuneError,
        match=r"blocks.0.attn1.to_q.weight is too large for the base's torch.float16",
    ):
        export_merged(family, {"transformer": state}, 2.0, base, tmp_path / "m", {})
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("settings", "formats"),
    [
        ({}, ["diffusers", "comfyui"]),
        ({"lora.variant": "DORA"}, ["diffusers", "comfyui"]),
        ({"lora.variant": "LOHA"}, ["peft", "comfyui"]),
        ({"lora.variant": "OFT"}, ["peft"]),
        ({"training_method": "FINE_TUNE"}, ["diffusers"]),
        ({"training_method": "EMBEDDING"}, ["diffusers", "comfyui"]),
        ({"output_model_format": "comfyui"}, ["comfyui"]),
    ],
)
def test_files_of_both_programs_are_written_unless_the_config_says_otherwise(
    settings: dict[str, Any], formats: list[str], family: Any
) -> None:
    config = parse(unflatten(settings))
    assert configured_formats(config, family) == formats
    check_formats(config, family)


@pytest.mark.parametrize(
    "name",
    [
        "wan",
        "cogvideox",
        "ltx_video",
        "hunyuan_video",
        "hunyuan_video15",
        "hidream",
        "kandinsky5",
    ],
)
def test_a_fine_tuned_model_as_one_file_of_comfyui(
    name: str, tiny_family: Callable[..., Any], tmp_path: Path
) -> None:
    """Read back by videotune as a base model, and by diffusers' own converter where it
    knows the layout at any size.
    """
    family = tiny_family(name)
    config = parse(
        unflatten({"training_method": "FINE_TUNE", "output_model_format": "comfyui"})
    )
    check_formats(config, family)
    expert = family.spec.experts[0].name
    net = family.denoiser(expert)
    state = {key: value + 0.5 for key, value in net.named_parameters()}
    path = tmp_path / "model.safetensors"
    export_single_file(
        family, expert, dict(list(state.items())[:5]), family.folder, path, {"step": 3}
    )
    written = load_file(path)
    if name not in ("hidream", "kandinsky5"):
        assert set(written) != set(net.state_dict()), "the names are the authors'"

    folder = shutil.copytree(family.folder, tmp_path / "base")
    part = folder / family.spec.part_of(expert)
    for file in part.glob("*.safetensors*"):
        file.unlink()
    shutil.copy(path, part / "diffusion_pytorch_model.safetensors")
    opened = type(family)(folder, torch.device("cpu"), torch.float32)
    read = opened.denoiser(expert).state_dict()
    changed = dict(list(state.items())[:5])
    for key, value in net.state_dict().items():
        assert torch.equal(read[key], changed.get(key, value)), key

    if name in ("wan", "ltx_video"):
        cls = type(family.skeleton(expert))
        theirs = cls.from_single_file(
            str(path), config=str(family.folder / part.name), local_files_only=True
        )
        for key, value in theirs.state_dict().items():
            assert torch.equal(value, read[key]), key


@pytest.mark.parametrize(
    "settings",
    [
        {"output_model_format": "peft"},
        {"output_model_format": "comfyui", "text_encoder.train": True},
        {"output_model_format": "comfyui", "text_encoder.train": True, "transformer.train": False},
    ],
)  # fmt: skip
def test_what_one_file_of_a_model_cannot_hold(
    settings: dict[str, Any], family: Any
) -> None:
    config = parse(unflatten({"training_method": "FINE_TUNE"} | settings))
    with pytest.raises(VideotuneError, match="output_model_format"):
        check_formats(config, family)


def comfyui_dora(
    weight: torch.Tensor, dora_scale: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    """ComfyUI's own function (comfy/weight_adapter/base.py, weight_decompose), retyped, for
    one magnitude per output and strength 1.
    """
    calculated = weight + delta
    assert dora_scale.shape[0] == calculated.shape[0]
    norm = weight.reshape(weight.shape[0], -1).norm(dim=1, keepdim=True)
    return calculated * (dora_scale / (norm + torch.finfo(weight.dtype).eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_acts_in_comfyui_as_trained(
    dtype: torch.dtype, family: Any, tmp_path: Path
) -> None:
    _, state = network_with_adapter(family, "DORA")
    for name, value in state.items():
        if "magnitude" in name:
            value.data *= torch.linspace(0.5, 2.0, len(value))
    path = tmp_path / "x-comfyui.safetensors"
    done = export_lora(family, "comfyui", state, 2.0, path, {}, dtype=dtype)
    assert done.max_error < 1e-6
    tensors = load_file(path)
    assert {key.rsplit(".", 1)[-1] for key in tensors} == {"weight", "dora_scale"}

    rounded = round_adapter(state, 2.0, dtype)
    net = family.denoiser()
    for module, parts in by_module(rounded).items():
        weight = net.get_submodule(module).weight.data
        name = f"diffusion_model.{family.to_comfyui_name(module)}"
        delta = (
            tensors[f"{name}.lora_B.weight"].float()
            @ tensors[f"{name}.lora_A.weight"].float()
        )
        theirs = comfyui_dora(weight, tensors[f"{name}.dora_scale"], delta)
        exact = new_weight(weight, parts, 1.0).float()
        torch.testing.assert_close(theirs, exact, rtol=1e-5, atol=1e-6)
        naive = comfyui_dora(
            weight, parts["lora_magnitude_vector"][:, None].float(), delta
        )
        assert not torch.allclose(naive, exact, rtol=1e-3)

    programs = {
        row["program"]: row["reads"]
        for row in inspect(path, str(family.folder))["programs"]
    }
    assert {name for name, reads in programs.items() if reads == "yes"} == {"ComfyUI"}
    # Without the mark in its header it is a DoRA as other programs write it.
    plain = tmp_path / "plain.safetensors"
    save_file(tensors, plain)
    readers = [
        row["program"]
        for row in inspect(plain, str(family.folder))["programs"]
        if row["reads"] == "yes"
    ]
    assert readers == ["videotune"]
    with pytest.raises(VideotuneError, match="for ComfyUI's norm"):
        read_adapter(family, family.denoiser(), path, ADAPTER)


def test_dora_for_comfyui_counts_lora_files_under_the_training(
    family: Any, tmp_path: Path
) -> None:
    """They are in the weights that ComfyUI divides by, if they are loaded before it."""
    below = tmp_path / "below.safetensors"
    peft_file(family, below)
    merge_into_base(family, [BaseLora(file=str(below), strength=0.1)])
    _, state = network_with_adapter(family, "DORA")
    path = tmp_path / "x.safetensors"
    export_lora(family, "comfyui", state, 2.0, path, {})
    scales = load_file(path)
    family.weight_changes = {}
    export_lora(family, "comfyui", state, 2.0, tmp_path / "y.safetensors", {})
    plain = load_file(tmp_path / "y.safetensors")
    name = next(key for key in scales if key.endswith("dora_scale"))
    assert not torch.allclose(scales[name], plain[name])


@pytest.mark.parametrize(
    ("fused", "dora", "products"),
    [
        ({}, {"comfyui", "diffusers"}, {"comfyui", "peft"}),
        ({"comfyui": (("blocks", ("attn1.to_q",)),)}, {"diffusers"}, {"peft"}),
    ],
    ids=["each module", "fused modules"],
)
def test_only_lora_is_written_where_comfyui_fuses_modules(
    fused: dict[str, Any], dora: set[str], products: set[str], family: Any
) -> None:
    family.spec = replace(family.spec, fused_modules=fused)
    formats = {
        "LORA": {"comfyui", "diffusers"},
        "DORA": dora,
        "LOHA": products,
        "LOKR": products,
        "OFT": {"peft"},
    }
    for kind, expected in formats.items():
        assert set(formats_of(family, kind)) == expected, kind
        for format in ("comfyui", "diffusers", "peft"):
            if format in expected:
                refuse_format(family, kind, format)
            else:
                with pytest.raises(VideotuneError):
                    refuse_format(family, kind, format)
