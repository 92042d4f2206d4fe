"""Each check of a written file can fail: what is changed by a hair, left out, or
contradicts itself is refused, and nothing is written.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support import lora_files
from tests.support.adapters import network_with_adapter, scale
from videotune.errors import VideotuneError
from videotune.exporter import adapter_export, full, lora_tools
from videotune.exporter.adapter_export import export_embedding, export_lora
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.formats import check_same, digest_of, formats_of
from videotune.exporter.full import export_full
from videotune.exporter.lora_tools import convert, merge
from videotune.exporter.lora_write import WrittenLora, bake_adapter

Tensors = dict[str, torch.Tensor]
Patch = pytest.MonkeyPatch
HAIR = 1e-5
"""A relative change, ten times what is allowed."""


def refused(folder: Path, write: Callable[[], object], words: str) -> None:
    """What ``write`` writes is refused, and leaves nothing."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(VideotuneError, match=words):
        write()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("kind", ["LORA", "DORA", "LOHA", "LOKR", "OFT"])
def test_an_export_that_is_off_by_a_hair_is_refused(
    kind: str, family: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Each tensor of each module of a block's first attention is changed by 1e-5 of
    itself.
    """
    state = network_with_adapter(family, kind)[1]
    format = formats_of(family, kind)[-1]
    tensors = bake_adapter(family, format, state, scale(kind))
    for key, value in tensors.items():
        if "attn2" in key or "blocks.1." in key:
            continue
        changed = tensors | {key: value * (1 + HAIR)}
        monkeypatch.setattr(adapter_export, "bake_adapter", lambda *_, x=changed: x)
        refused(
            tmp_path,
            lambda: export_lora(
                family, format, state, scale(kind), tmp_path / "x.safetensors", {}
            ),
            "ΔW differs",
        )


def dora_file(family: Any, path: Path) -> None:
    tensors = {}
    for name, (b, a) in lora_files.pairs(family, "attention").items():
        key = f"transformer.{name}"
        tensors |= {
            f"{key}.lora_A.weight": a,
            f"{key}.lora_B.weight": b,
            f"{key}.lora_magnitude_vector": b.norm(dim=1),
        }
    save_file(tensors, path)


def without(tensors: Tensors, path: str) -> Tensors:
    return {key: value for key, value in tensors.items() if f".{path}." not in key}


def scaled(tensors: Tensors, word: str) -> Tensors:
    """The first tensor with this word in its name, changed by a hair."""
    key = next(key for key in tensors if word in key)
    return tensors | {key: tensors[key] * (1 + HAIR)}


CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "a factor": lambda tensors: scaled(tensors, "lora_B"),
    "a magnitude": lambda tensors: scaled(tensors, "magnitude"),
    "a module": lambda tensors: without(tensors, "blocks.0.attn1.to_q"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_conversion_that_loses_something_is_refused(
    what: str, family: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    source = tmp_path / "a.safetensors"
    dora_file(family, source)
    write = lora_tools.write_form

    def damaged(*arguments: Any) -> WrittenLora:
        output = write(*arguments)
        return replace(output, tensors=CHANGES[what](output.tensors))

    monkeypatch.setattr(lora_tools, "write_form", damaged)
    for form in ("diffusers", "peft"):
        out = tmp_path / (form if form == "peft" else "b.safetensors")
        refused(
            tmp_path,
            lambda out=out, form=form: convert(  # type: ignore[misc]
                source, lora_files.file_of_form(family, out, form)
            ),
            "Verification",
        )


def test_a_whole_model_with_one_changed_number_is_refused(
    family: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    state = {"blocks.0.ffn.net.2.bias": torch.ones(24)}
    read = full.iter_tensors

    def changed(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in read(folder):
            off = torch.zeros_like(value)
            if name == "blocks.1.attn1.to_k.weight":
                off.view(-1)[3] = HAIR
            yield name, value + off

    def write() -> None:
        base = Path(family.folder)
        part = family.spec.experts[0].name
        export_full(family, part, state, base, tmp_path / "out", {})

    monkeypatch.setattr(full, "iter_tensors", changed)
    refused(tmp_path, write, "does not match")
    monkeypatch.setattr(full, "iter_tensors", read)
    write()
    assert (tmp_path / "out" / "videotune.json").is_file()


def test_a_text_encoder_with_one_changed_number_is_refused_by_its_folder(
    family: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    name = next(iter(family.text_skeletons()))
    text = {name: {"encoder.final_layer_norm.weight": torch.ones(16)}}
    read = full.iter_tensors

    def changed(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in read(folder):
            yield key, value + HAIR

    base = Path(family.folder)
    monkeypatch.setattr(full, "iter_tensors", changed)
    refused(
        tmp_path,
        lambda: export_full(family, "transformer", {}, base, tmp_path / "m", {}, text),
        rf"Verification of .*{name} failed: .* does not match",
    )


def test_rows_of_a_token_with_one_changed_number_are_refused(
    family: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    width = next(iter(family.text_skeletons().values())).get_input_embeddings()
    rows = {next(iter(family.text_skeletons())): torch.ones(2, width.embedding_dim)}
    read = adapter_export.read_embedding

    def changed(*arguments: Any) -> Any:
        token, found = read(*arguments)
        return token, {name: value + HAIR for name, value in found.items()}

    format = next(iter(family.embedding_keys()))
    monkeypatch.setattr(adapter_export, "read_embedding", changed)
    refused(
        tmp_path,
        lambda: export_embedding(family, format, rows, "<x>", tmp_path / "x", {}),
        "does not match",
    )


def test_tensors_are_the_same_in_number_shape_and_name() -> None:
    expected = {"a": torch.ones(2, 3), "b": torch.ones(1)}
    check_same(expected, expected.items(), Path("x"))
    check_same(expected, [("a", expected["a"])], Path("x"), needed={"a"})
    for wrong, fault in (
        (expected | {"a": torch.ones(2, 3) + 1e-6}, "a does not match"),
        (expected | {"a": torch.ones(3, 2)}, "a does not match"),
        (expected | {"c": torch.ones(1)}, "c does not match"),
        ({"a": expected["a"]}, "1 weights are missing, such as b"),
        ({}, "2 weights are missing, such as a"),
    ):
        with pytest.raises(VideotuneError, match=f"Verification of x failed.*{fault}"):
            check_same(expected, wrong.items(), Path("x"))


def test_files_of_two_experts_are_not_merged(family: Any, tmp_path: Path) -> None:
    paths = [tmp_path / f"x_{level}_noise.safetensors" for level in ("high", "low")]
    for path in paths:
        lora_files.peft_file(family, path)
    target = lora_files.file_of_form(family, tmp_path / "sum.safetensors")
    words = rf"^{paths[0]} and the others .* experts"
    refused(tmp_path, lambda: merge(paths, [], None, target), words)
    again = tmp_path / "again_high_noise.safetensors"
    lora_files.peft_file(family, again)
    assert merge([paths[0], again], [], None, target)


def test_a_converted_file_has_no_facts_of_other_tensors(
    family: Any, tmp_path: Path
) -> None:
    """Alphas and hashes in the source's header are those of the source's tensors."""
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    lora_files.peft_file(family, source, 2.0)
    stale = {
        "lora_config": json.dumps({"lora_alpha": 2}),
        "sshs_model_hash": "0",
        "sshs_legacy_hash": "0",
        "modelspec.hash_sha256": "0",
        "lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 2}),
        "adapter_config": json.dumps({"lora_alpha": 2}),
    }
    true = {"ss_tag_frequency": "{}", "modelspec.title": "a cat"}
    save_file(load_file(source), source, metadata=stale | true)
    convert(source, lora_files.file_of_form(family, out, "kohya"))
    with safe_open(out, "pt") as file:
        header = file.metadata()
    assert set(header) & set(stale) == set()
    assert {key: header[key] for key in true} == true


@pytest.mark.parametrize("key", ["lora_adapter_metadata", "lora_config"])
def test_two_alphas_that_contradict_each_other_are_refused(
    key: str, family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    lora_files.peft_file(family, path, 2.0)
    tensors = load_file(path)
    # A header may have the number that the tensor's dtype rounds.
    for alpha, is_refused in ((2, False), (2.0001, False), (2.01, True), (4, True)):
        settings = {"r": 4, "lora_alpha": alpha}
        save_file(tensors, path, metadata={key: json.dumps(settings)})
        if is_refused:
            with pytest.raises(VideotuneError, match="alpha"):
                lora_files.deltas_of(family, path)
        else:
            assert lora_files.deltas_of(family, path)


@pytest.mark.parametrize("form", ["comfyui", "kohya", "original"])
def test_pefts_alpha_of_whole_factors_is_multiplied_in(
    form: str, family: Any, tmp_path: Path
) -> None:
    """PEFT scales a LoKr of whole factors; the other forms do not."""
    folder = tmp_path / "peft"
    folder.mkdir()
    tensors, wanted = {}, {}
    for seed, (name, (b, a)) in enumerate(
        lora_files.pairs(family, "attention").items()
    ):
        one = lora_files.random_tensor(4, 4, seed=seed)
        two = lora_files.random_tensor(len(b) // 4, a.shape[1] // 4, seed=seed)
        tensors[f"base_model.model.{name}.lokr_w1"] = one
        tensors[f"base_model.model.{name}.lokr_w2"] = two
        wanted[name] = 0.25 * torch.kron(one.double(), two.double())
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LOKR", "r": 8, "alpha": 2.0}
    (folder / "adapter_config.json").write_text(json.dumps(settings))

    out = tmp_path / "out.safetensors"
    told = convert(folder, lora_files.file_of_form(family, out, form))
    lora_files.same_deltas(lora_files.deltas_of(family, out), wanted)
    assert not [key for key in load_file(out) if key.endswith("alpha")]
    assert len(told) > 1


@pytest.mark.parametrize(
    "change",
    [lambda value: value.reshape(3, 8), lambda value: value.view(torch.int32)],
    ids=["shape", "dtype"],
)
def test_the_digest_is_of_shape_and_dtype_too(
    change: Callable[[torch.Tensor], torch.Tensor], family: Any, tmp_path: Path
) -> None:
    """The same bytes under the same names."""
    value = torch.ones(24)
    assert digest_of({"x": value}) != digest_of({"x": change(value)})
    path = tmp_path / "x.safetensors"
    facts = json.dumps({"digest": digest_of({"x": value})})
    save_file({"x": value}, path, metadata={"videotune": facts})
    assert AdapterFile(path).tensors
    save_file({"x": change(value)}, path, metadata={"videotune": facts})
    with pytest.raises(VideotuneError, match="damaged"):
        AdapterFile(path)
