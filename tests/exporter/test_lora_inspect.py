"""``videotune lora inspect``: what is said of files is what they hold, and of a file
that is none a sentence.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.support import lora_files
from tests.support.command_line import Bases, Printed, run
from tests.support.damaged_files import try_each
from videotune.errors import VideotuneError
from videotune.exporter.base_detection import load_architecture
from videotune.exporter.lora_inspect import inspect, open_modules, summary_lines
from videotune.exporter.lora_tools import convert
from videotune.models import base_model
from videotune.models.base_model import CONFIGS, of_base, place

Open = Callable[..., Any]


def readers(found: dict[str, Any]) -> dict[str, float | None]:
    """The strength to set in each program that reads a file."""
    return {
        own["program"]: own["strength"] for own in found["programs"] if own["scale"]
    }


@pytest.mark.parametrize("name", lora_files.FAMILIES)
def test_ranks_scales_and_norms(name: str, tiny_family: Open, tmp_path: Path) -> None:
    family, first = tiny_family(name), tmp_path / "a_low-noise.safetensors"
    wanted = lora_files.peft_file(family, first, 2.0)
    for form in ("diffusers", "comfyui", "kohya", "peft"):
        out = tmp_path / f"{form}{'' if form == 'peft' else '.safetensors'}"
        convert(first, lora_files.file_of_form(family, out, form))
        found = inspect(out, str(family.folder))
        assert (found["family"], found["kind"], found["misfits"]) == (
            family.spec.name,
            "LORA",
            [],
        )
        assert found["expert"] == "low"
        whole = 0.0
        for row in found["modules"]:
            assert row["state"] == "ok"
            assert row["scale"] == 0.5
            assert row["rank"] in (4, 12, 16), "of one, three or four modules"
            assert row["alpha"] == row["rank"] / 2
            assert row["alpha_in"]
            torch.testing.assert_close(
                row["norm"], float(wanted[row["path"]].norm()), rtol=1e-6, atol=0.0
            )
            whole += row["norm"] ** 2
        groups = {own["group"]: own["share"] for own in found["groups"]}
        feed = sum(
            row["norm"] ** 2
            for row in found["modules"]
            if row["group"] == "feed_forward"
        )
        assert groups["feed_forward"] == pytest.approx(feed / whole)
        assert sum(groups.values()) == pytest.approx(1.0)
        assert readers(found)["videotune"] == 1.0


def test_names_are_of_diffusers_or_of_the_authors_or_of_neither(
    family: Any, tmp_path: Path
) -> None:
    """Without an alpha the scale is 1, and no alpha is shown."""
    first = tmp_path / "a.safetensors"
    lora_files.peft_file(family, first)
    native = tmp_path / "b.safetensors"
    convert(first, lora_files.file_of_form(family, native, "comfyui"))
    by_path = {path: load_file(path) for path in (first, native)}
    mixed = {}
    for path, block in ((first, ".0."), (native, ".1.")):
        mixed |= {key: x for key, x in by_path[path].items() if block in key}
    both = tmp_path / "c.safetensors"
    save_file(mixed, both)
    for path, names in ((first, "diffusers"), (native, "native"), (both, "unknown")):
        facts = inspect(path, str(family.folder))
        assert facts["form"]["names"] == names
        assert facts["misfits"] == []
    for row in inspect(first, str(family.folder))["modules"]:
        assert (row["scale"], row["alpha"], row["alpha_in"]) == (1.0, None, "")


def test_the_scale_that_each_program_applies(family: Any, tmp_path: Path) -> None:
    """By the loaders' sources: ComfyUI goes by the tensor, diffusers by its header,
    PEFT by its folder.
    """
    first = tmp_path / "a.safetensors"
    lora_files.peft_file(family, first, 2.0)
    strengths = {}
    for form in ("diffusers", "comfyui", "kohya", "peft"):
        out = tmp_path / f"{form}{'' if form == 'peft' else '.safetensors'}"
        convert(first, lora_files.file_of_form(family, out, form))
        strengths[form] = readers(inspect(out, str(family.folder)))
    assert strengths["diffusers"] == {"videotune": 1.0, "diffusers": 1.0}
    for row in inspect(first, str(family.folder))["programs"]:
        assert row.keys() == {"program", "reads", "scale", "strength"}
        if row["reads"] == "no":
            assert (row["scale"], row["strength"]) == (None, None)
    assert strengths["comfyui"] == {"videotune": 1.0, "diffusers": 1.0, "ComfyUI": 1.0}
    assert strengths["kohya"] == {
        "videotune": 1.0,
        "diffusers": 1.0,
        "ComfyUI": 1.0,
        "musubi-tuner": 1.0,
    }
    assert strengths["peft"] == {"videotune": 1.0, "PEFT": 1.0}
    pipe = {
        f"diffusion_model.{key}": value
        for key, value in load_file(tmp_path / "comfyui.safetensors").items()
    }
    pipe = {
        key.removeprefix("diffusion_model."): value
        for key, value in pipe.items()
        if not key.endswith(".alpha")
    }
    # diffusion-pipe, models/wan/wan.py, save_adapter: PEFT's settings beside ComfyUI's
    # names
    (tmp_path / "pipe").mkdir()
    save_file(pipe, tmp_path / "pipe" / "adapter_model.safetensors")
    (tmp_path / "pipe" / "adapter_config.json").write_text(
        json.dumps({"r": 4, "lora_alpha": 2})
    )
    found = readers(inspect(tmp_path / "pipe", str(family.folder)))
    assert found == {
        "videotune": 1.0,
        "diffusers": 0.5,
        "ComfyUI": 0.5,
        "diffusion-pipe": 0.5,
    }


@pytest.mark.parametrize(
    "folder", sorted(own.name for own in CONFIGS.iterdir() if own.is_dir())
)
def test_published_bases_are_known_by_the_shapes(folder: str, tmp_path: Path) -> None:
    """One block's attention at the published width, under the authors' flat names."""
    family = of_base(CONFIGS / folder)(
        CONFIGS / folder, torch.device("cpu"), torch.float32
    )
    net, tensors = family.skeleton(), {}
    for path, module in net.named_modules():
        if path.startswith(f"{family.spec.blocks[0]}.0.") and path.endswith(
            ("attn1.to_k", "attn.to_k", "self_attention.to_key")
        ):
            rows, columns = module.weight.shape
            tensors = {
                f"{path}.lora_A.weight": torch.ones(1, columns),
                f"{path}.lora_B.weight": torch.ones(rows, 1),
            }
    save_file(tensors, tmp_path / "a.safetensors")
    found = inspect(tmp_path / "a.safetensors")
    index = json.loads((CONFIGS / "index.json").read_text())
    assert {
        name for name, own in index.items() if own == folder and "/" in name
    } <= set(found["fits"])


def test_odd_modules_are_named_and_the_table_fits(
    family: Any, tmp_path: Path, capsys: Printed, monkeypatch: Any
) -> None:
    first = tmp_path / "a.safetensors"
    lora_files.peft_file(family, first)
    state = load_file(first)
    names = sorted({key.split(".lora")[0] for key in state})
    state[f"{names[0]}.lora_B.weight"].zero_()
    state[f"{names[1]}.lora_A.weight"][0, 0] = float("nan")
    state[f"{names[2]}.lora_A.weight"][0, 0] = float("inf")
    save_file(
        state | {"foo.bias": torch.ones(1)},
        first,
        {"ss_base_model_version": "x" * 5000, "odd": "\x1b[31m\n"},
    )
    found = inspect(first, str(family.folder))
    states = {
        row["name"]: row["state"] for row in found["modules"] if row["state"] != "ok"
    }
    assert states == {names[0]: "zero", names[1]: "NaN", names[2]: "infinite"}
    assert found["other_tensors"] == ["foo.bias"]
    assert len(found["metadata"]["ss_base_model_version"]) == 200
    monkeypatch.setenv("COLUMNS", "80")
    assert run("lora", "inspect", first, against=family.folder, every=True) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if line[:1] in "┃│")


def toy_lora(path: Path, base: str) -> Path:
    """A LoRA of the toy, whose header names a base model."""
    net = load_architecture(place("asset:toy", weights=False).folder, ()).net
    tensors = {}
    for name, module in net.named_modules():
        if name.endswith("attn1.to_k"):
            rows, columns = module.weight.shape
            tensors[f"transformer.{name}.lora_A.weight"] = torch.ones(1, columns)
            tensors[f"transformer.{name}.lora_B.weight"] = torch.ones(rows, 1)
    facts = {"videotune": "0.2.0", "base": {"name": base, "fingerprints": {}}}
    save_file(tensors, path, {"videotune": json.dumps(facts)})
    return path


def test_the_base_of_the_header_is_taken_where_it_is_on_this_machine(
    tmp_path: Path, capsys: Printed
) -> None:
    """So that inspect, convert and resize know a file that training has just written."""
    file = toy_lora(tmp_path / "toy.safetensors", "asset:toy")
    found = inspect(file)
    assert (found["fits"], found["form"]["names"]) == (["asset:toy"], "diffusers")
    programs = {program["program"]: program["reads"] for program in found["programs"]}
    assert (programs["diffusers"], programs["ComfyUI"]) == ("yes", "no")
    for words, name in (
        (("convert", file, "--to", "comfyui"), "b.safetensors"),
        (("resize", file, "--rank", "1"), "c.safetensors"),
    ):
        assert run("lora", *words, out=tmp_path / name) == 0
        assert inspect(tmp_path / name)["fits"] == ["asset:toy"]

    copy = tmp_path / "base"
    shutil.copytree(place("asset:toy", weights=False).folder, copy)
    file = toy_lora(tmp_path / "local.safetensors", str(copy))
    assert inspect(file)["fits"] == [str(copy)]


@pytest.mark.parametrize(
    "base", ["somebody/model", "asset:nothing", "/dev/null", "x" * 5000, ""]
)
def test_a_base_that_is_not_here_is_not_known_and_not_fetched(
    base: str, tmp_path: Path, capsys: Printed, monkeypatch: Any
) -> None:
    def refuse(*words: Any, **named: Any) -> Any:
        raise AssertionError("a stranger's file must not start a download")

    monkeypatch.setattr(base_model, "fetch", refuse)
    file = toy_lora(tmp_path / "toy.safetensors", base)
    found = inspect(file)
    assert (found["fits"], found["family"]) == ([], None)
    reads = {program["program"]: program["reads"] for program in found["programs"]}
    assert reads["videotune"] == "yes"
    for name in ("diffusers", "ComfyUI", "PEFT", "musubi-tuner", "diffusion-pipe"):
        assert reads[name] == "unknown"
    assert run("lora", "inspect", file) == 0
    printed = capsys.readouterr()
    assert "not known without the base" in printed.out
    assert "does not read this form" not in printed.out
    assert printed.err.startswith(f"reading {file}")


def test_a_lora_of_another_model(
    family: Any, tiny_bases: Bases, tmp_path: Path
) -> None:
    first = tmp_path / "a.safetensors"
    lora_files.peft_file(family, first)
    other = str(tiny_bases("cogvideox"))
    assert len(inspect(first, other)["misfits"]) == len(inspect(first)["modules"])
    assert inspect(first)["family"] is None
    with pytest.raises(VideotuneError, match="does not fit"):
        run("lora", "inspect", first, against=other)


def test_a_lora_of_a_model_that_is_named_by_its_file_only_is_refused_by_that_name(
    tmp_path: Path,
) -> None:
    tensors = {
        "lora_unet_x.lora_down.weight": torch.ones(4, 8),
        "lora_unet_x.lora_up.weight": torch.ones(8, 4),
    }
    for stem, other in (("my_qwen_image_lora", True), ("my_lora", False)):
        path = tmp_path / f"{stem}.safetensors"
        save_file(tensors, path)
        with pytest.raises(VideotuneError) as refused:
            open_modules(path, None, None)
        assert ("Qwen" in str(refused.value)) == other
        title = inspect(path)["other_model"]
        assert ("Qwen" in title) if other else title is None


def test_the_name_of_a_file_that_fits_names_no_other_model(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "my_qwen_image_lora.safetensors"
    lora_files.peft_file(family, path)
    assert inspect(path, str(family.folder))["other_model"] is None


def test_a_file_of_the_toy_is_said_to_be_of_no_use_elsewhere(
    family: Any, tmp_path: Path
) -> None:
    said = []
    for base in ("asset:toy", "somebody/model"):
        facts = inspect(toy_lora(tmp_path / "toy.safetensors", base))
        said.append(any("toy model" in line for line in summary_lines(facts)))
    assert said == [True, False]


def test_products_of_a_base_that_is_not_known_have_no_norm_but_cheap_ones_have(
    tmp_path: Path,
) -> None:
    """A LoHa claims its size by itself; a LoRA's and a LoKr's norm needs small products."""
    ones = torch.ones
    kinds = {
        "LORA": {"lora_down.weight": ones(2, 8), "lora_up.weight": ones(8, 2)},
        "LOKR": {"lokr_w1": ones(2, 2), "lokr_w2": ones(4, 4)},
        "LOHA": {
            "hada_w1_a": ones(8, 2),
            "hada_w1_b": ones(2, 8),
            "hada_w2_a": ones(8, 2),
            "hada_w2_b": ones(2, 8),
        },
    }
    norms = {}
    for kind, parts in kinds.items():
        path = tmp_path / f"{kind}.safetensors"
        save_file({f"lora_unet_x.{part}": value for part, value in parts.items()}, path)
        (row,) = inspect(path)["modules"]
        norms[kind] = row["norm"]
    assert norms == {
        "LORA": pytest.approx(2 * 8),
        "LOKR": pytest.approx(8),
        "LOHA": None,
    }


def test_files_that_hold_no_adapter(family: Any, tmp_path: Path) -> None:
    (weights,) = (family.folder / "transformer").glob("*.safetensors")
    cut, pickled, empty = (
        tmp_path / "cut.safetensors",
        tmp_path / "x.pt",
        tmp_path / "none.safetensors",
    )
    lora_files.peft_file(family, cut)
    cut.write_bytes(cut.read_bytes()[:-100])
    pickled.write_bytes(pickle.dumps({"lora_A": 1}))
    save_file({}, empty)
    (tmp_path / "folder").mkdir()
    for path in (
        weights,
        cut,
        pickled,
        empty,
        tmp_path / "folder",
        tmp_path / "absent.safetensors",
    ):
        with pytest.raises(VideotuneError):
            run("lora", "inspect", path)


def test_damaged_files_are_read_or_refused(family: Any, tmp_path: Path) -> None:
    first, base = tmp_path / "a.safetensors", str(family.folder)
    lora_files.peft_file(family, first, 2.0, "attention")
    convert(first, lora_files.file_of_form(family, tmp_path / "b.safetensors"))
    (tmp_path / "peft").mkdir()
    convert(first, lora_files.file_of_form(family, tmp_path / "p", "peft"))
    files = [first, tmp_path / "b.safetensors", tmp_path / "p" / "adapter_config.json"]

    def read() -> None:
        for path in (*files[:2], tmp_path / "p"):
            inspect(path, base)

    assert try_each(files, read, 60)["refused"] > 0


KEYS = st.text(st.sampled_from("aABlor_.w0 1\x00é"), max_size=30) | st.sampled_from(
    [
        "lora_unet_blocks_0_self_attn_q",
        "transformer.blocks.0.attn1.to_q",
        "diffusion_model.blocks.0.ffn.0",
        "x",
        "",
    ]
)
PARTS = st.sampled_from(["lora_A.weight", "lora_B.weight", "lora_down.weight", "alpha", "lokr_w1", "lokr_w2_a", "hada_w1_a",
                         "oft_R.weight", "dora_scale", "lora_A.x.y.weight", "lora.up.weight", ""])  # fmt: skip
SHAPES = st.lists(st.integers(0, 5), max_size=3)
HEADERS = st.dictionaries(
    st.sampled_from(["videotune", "lora_adapter_metadata", "lora_config", "adapter_config", "ss_x"]),
    st.sampled_from(["", "{", "[]", "null", '{"r": 0, "lora_alpha": 1e999}', '{"digest": 3}', '{"base": 5, "expert": [1]}',
                     '{"alpha_pattern": {"(a+)+$": 1}}', '{"transformer.lora_alpha": "x"}', '{"family": {}}']),
)  # fmt: skip


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.tuples(KEYS, PARTS), SHAPES, max_size=6), HEADERS)
def test_any_names_shapes_and_headers(
    family: Any,
    tmp_path: Path,
    tensors: dict[tuple[str, str], list[int]],
    header: dict[str, str],
) -> None:
    """Whatever a header says is told, or refused in a sentence."""
    path = tmp_path / "a.safetensors"
    save_file(
        {".".join(key): torch.ones(shape) for key, shape in tensors.items()},
        path,
        header,
    )
    with suppress(VideotuneError):
        inspect(path, str(family.folder))
    with suppress(VideotuneError):
        convert(path, lora_files.file_of_form(family, tmp_path / "o" / "b.safetensors"))
    (tmp_path / "o" / "b.safetensors").unlink(missing_ok=True)
