"""--merge: the base with the adapter in its weights, each rounded once to the dtype that it had."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.exporter.export_kit import acts, scale, trained
from videotune.adapters.effect import new_weight
from videotune.adapters.kinds import PARTS, by_module
from videotune.errors import VideotuneError
from videotune.exporter.full import export_merged

Open = Callable[..., Any]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("kind", PARTS)
def test_the_folder_opens_and_acts_as_the_adapter_did(kind: str, tiny_family: Open, tmp_path: Path) -> None:
    from diffusers import WanPipeline

    family = tiny_family("wan")
    net, state = trained(family, kind)
    done = export_merged(family, {"transformer": state}, scale(kind), family.folder, tmp_path / "m", {"step": 1})
    pipe = WanPipeline.from_pretrained(done.path)
    torch.testing.assert_close(acts(pipe.transformer.eval()), acts(net), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(acts(net), acts(family.denoiser()), atol=1e-3)
    assert (done.format, done.modules) == ("merged", 20)
    assert json.loads((done.path / "videotune.json").read_text()) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"], "nothing is left beside it"


def mixed(family: Any, folder: Path) -> Path:
    """The base with its weights in bfloat16, but for the first block in float32, in two files."""
    shutil.copytree(family.folder, folder)
    weights = load_file(folder / "transformer" / WEIGHTS)
    (folder / "transformer" / WEIGHTS).unlink()
    files = {"one.safetensors": {}, "two.safetensors": {}}
    for name, value in weights.items():
        first = name.startswith("blocks.0.")
        files["one.safetensors" if first else "two.safetensors"][name] = value if first else value.bfloat16()
    for file, tensors in files.items():
        save_file(tensors, folder / "transformer" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "transformer" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", PARTS)
def test_each_weight_is_rounded_once_to_its_own_dtype_and_no_other_is_touched(
    kind: str, tiny_family: Open, tmp_path: Path
) -> None:
    from videotune.models.registry import find

    base = mixed(tiny_family("wan"), tmp_path / "base")
    family = find("wan")(base, torch.device("cpu"), torch.float32)
    before = {file: (base / "transformer" / file).read_bytes() for file in ("one.safetensors", "two.safetensors")}
    _, state = trained(family, kind)
    folder = export_merged(family, {"transformer": state}, scale(kind), base, tmp_path / "m", {}).path
    parts, dtypes = by_module(state), set()
    for file, old in before.items():
        assert (base / "transformer" / file).read_bytes() == old, "the base's own file was written to"
        was, now = load_file(base / "transformer" / file), load_file(folder / "transformer" / file)
        assert list(was) == list(now)
        for name, value in was.items():
            path = name.removesuffix(".weight")
            wanted = new_weight(value, parts[path], scale(kind)).to(value.dtype) if path in parts else value
            assert now[name].dtype == value.dtype
            assert torch.equal(now[name], wanted), name
            dtypes |= {value.dtype} if path in parts else set()
    assert dtypes == {torch.float32, torch.bfloat16}
    vae = next((folder / "vae").glob("*.safetensors"))
    assert vae.samefile(base / "vae" / vae.name), "what did not train is linked"


@pytest.mark.parametrize("experts", [("high", "low"), ("low",)])
def test_both_experts_or_one(experts: tuple[str, ...], tiny_family: Open, tmp_path: Path) -> None:
    from diffusers import WanPipeline

    family = tiny_family("wan", variant="t2v-a14b")
    nets = {expert: trained(family, expert=expert) for expert in experts}
    states = {expert: state for expert, (_, state) in nets.items()}
    pipe = WanPipeline.from_pretrained(export_merged(family, states, 2.0, family.folder, tmp_path / "m", {}).path)
    for expert, net in (("high", pipe.transformer), ("low", pipe.transformer_2)):
        wanted = nets[expert][0] if expert in nets else family.denoiser(expert)
        torch.testing.assert_close(acts(net.eval()), acts(wanted), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_merged_is_told_and_leaves_nothing(tiny_family: Open, tmp_path: Path) -> None:
    family = tiny_family("wan")
    _, state = trained(family, "LORA")
    base = shutil.copytree(family.folder, tmp_path / "base")
    rename = family.full_key_maps()["original"]
    file = base / "transformer" / WEIGHTS
    save_file({rename(name): value for name, value in load_file(file).items()}, file)
    with pytest.raises(VideotuneError, match="its tensors have their authors' names"):
        export_merged(family, {"transformer": state}, 2.0, base, tmp_path / "out" / "m", {})
    next(iter(state.values())).data.fill_(float("nan"))
    with pytest.raises(VideotuneError, match="NaN"):
        export_merged(family, {"transformer": state}, 2.0, family.folder, tmp_path / "out" / "m", {})
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_too_large_for_the_base_s_dtype_are_told(tiny_family: Open, tmp_path: Path) -> None:
    family = tiny_family("wan")
    _, state = trained(family, "LORA")
    base = shutil.copytree(family.folder, tmp_path / "base")
    file = base / "transformer" / WEIGHTS
    save_file({name: value.half() for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    state["blocks.0.attn1.to_q.lora_B.weight"].data.fill_(1e6)
    with pytest.raises(VideotuneError, match=r"blocks.0.attn1.to_q.weight is too large for the base's torch.float16"):
        export_merged(family, {"transformer": state}, 2.0, base, tmp_path / "m", {})
    assert not (tmp_path / "m").exists()
