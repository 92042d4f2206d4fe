"""Loading: weights as diffusers loads them, in less memory, from several files or one, and what is said of wrong ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.models_kit import edit
from videotune.errors import VideotuneError
from videotune.models.base_model import check_base, place, spec_for
from videotune.models.loading import load_model
from videotune.models.model_files import check_parts, weight_files

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"
WAN = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 128,
}  # fmt: skip
COGVIDEOX = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
    "text_embed_dim": 16, "num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 9,
}  # fmt: skip
HUNYUAN = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
    "num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": (2, 4, 4), "text_embed_dim": 16,
    "pooled_projection_dim": 8,
}  # fmt: skip
NETS = [
    ("WanTransformer3DModel", WAN),
    ("CogVideoXTransformer3DModel", COGVIDEOX | {"use_rotary_positional_embeddings": False}),
    ("CogVideoXTransformer3DModel", COGVIDEOX | {"use_rotary_positional_embeddings": True,
                                                 "use_learned_positional_embeddings": True}),
    ("HunyuanVideoTransformer3DModel", HUNYUAN),
    ("AutoencoderKLWan", {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
                          "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}),
]  # fmt: skip
AUTHORS = [
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1", "self_attn"), ("attn2", "cross_attn"), ("to_out.0", "o"),
    (".to_q.", ".q."), (".to_k.", ".k."), (".to_v.", ".v."),
    ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2"), ("proj_out", "head.head"),
    ("norm2", "norm_held"), ("norm3", "norm2"), ("norm_held", "norm3"),
]  # fmt: skip
"""From diffusers' names of Wan's tensors to its authors'."""


def authors_name(name: str) -> str:
    for ours, theirs in AUTHORS:
        name = name.replace(ours, theirs)
    return "head.modulation" if name == "scale_shift_table" else name.replace("scale_shift_table", "modulation")


@pytest.fixture
def base(tiny_bases: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Wan to spoil."""
    return Path(shutil.copytree(tiny_bases("wan"), tmp_path / "base"))


@pytest.fixture
def authors(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of the tiny Wan, all of them plus one, in a file with the authors' names and ComfyUI's prefix."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = load_file(base / "transformer" / WEIGHTS)
    path = tmp_path / "one.safetensors"
    save_file({f"model.diffusion_model.{authors_name(name)}": value + 1 for name, value in state.items()}, path)
    return path


def tensors(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*net.named_parameters(), *net.named_buffers()])


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(VideotuneError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "sizes"), NETS)
def test_it_is_what_diffusers_loads(name: str, sizes: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    cls = getattr(diffusers, name)
    torch.manual_seed(0)
    cls(**sizes).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(weight_files(tmp_path)) > 2
    theirs, ours = cls.from_pretrained(tmp_path, dtype=dtype), load_model(cls, tmp_path, dtype, CPU)
    a, b = tensors(theirs), tensors(ours)
    assert {key: (value.dtype, value.stride()) for key, value in a.items()} == {
        key: (value.dtype, value.stride()) for key, value in b.items()
    }
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert ours.dtype == theirs.dtype
    assert {**ours.config, "_name_or_path": ""} == {**theirs.config, "_name_or_path": ""}
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_text_encoders_are_what_transformers_loads(base: Path) -> None:
    from transformers import UMT5EncoderModel

    folder = base / "text_encoder"
    for dtype in (torch.float32, torch.bfloat16):
        theirs = UMT5EncoderModel.from_pretrained(folder, dtype=dtype)
        a, b = tensors(theirs), tensors(load_model(UMT5EncoderModel, folder, dtype, CPU))
        assert {key: value.dtype for key, value in a.items()} == {key: value.dtype for key, value in b.items()}
        assert all(torch.equal(a[key], b[key]) for key in a)
    state = load_file(folder / "model.safetensors")
    del state["encoder.block.0.layer.0.SelfAttention.q.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    said = refused(lambda: load_model(UMT5EncoderModel, folder, torch.float32, CPU))
    assert "1 tensors are missing, as encoder.block.0.layer.0.SelfAttention.q.weight" in said


PEAK = """
import os, sys, torch
from pathlib import Path
from diffusers import WanTransformer3DModel
from videotune.models.loading import load_model

def resident(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) * 1024

folder, cpu = Path(sys.argv[1]), torch.device("cpu")
load_model(WanTransformer3DModel, folder / "warm", torch.bfloat16, cpu)
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is counted from here
net = load_model(WanTransformer3DModel, folder / "net", torch.bfloat16, cpu)
size = sum(p.numel() * p.element_size() for p in net.parameters())
print(resident("VmHWM") - before, resident("VmRSS") - before, size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
def test_never_more_than_the_model_and_one_file_is_in_memory(tmp_path: Path) -> None:
    cls = diffusers.WanTransformer3DModel
    cls(**WAN).save_pretrained(tmp_path / "warm")
    large = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 6, "text_dim": 64}
    cls(**large, freq_dim=32).save_pretrained(tmp_path / "net", max_shard_size="20MB")
    shard = max(path.stat().st_size for path in weight_files(tmp_path / "net"))
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, after, size = map(int, done.stdout.split())
    assert size > 45e6
    assert peak < 1.15 * size + shard
    assert after < 1.15 * size


def test_a_file_with_the_authors_names_is_the_transformer(base: Path, authors: Path) -> None:
    """Tensor for tensor, and modules that diffusers keeps in float32 stay so, which its own loader of such files forgets."""
    state = load_file(base / "transformer" / WEIGHTS)
    folder = place(str(base), files={"transformer": authors}).folder
    cls = diffusers.WanTransformer3DModel
    ours = load_model(cls, folder / "transformer", torch.float32, CPU).state_dict()
    assert set(ours) == set(state)
    assert all(torch.equal(ours[key], state[key] + 1) for key in state)
    half = load_model(cls, folder / "transformer", torch.bfloat16, CPU)
    usual = load_model(cls, base / "transformer", torch.bfloat16, CPU)
    assert {k: v.dtype for k, v in half.state_dict().items()} == {k: v.dtype for k, v in usual.state_dict().items()}
    assert half.scale_shift_table.dtype == torch.float32
    forgets = cls.from_single_file(str(authors), config=str(base / "transformer"), dtype=torch.bfloat16)
    assert forgets.scale_shift_table.dtype == torch.bfloat16


def test_a_base_with_a_file_of_ones_own_is_a_folder_of_links(base: Path, authors: Path) -> None:
    (base / "transformer" / WEIGHTS).unlink()
    assert "lacks transformer/diffusion_pytorch_model.safetensors" in refused(lambda: place(str(base)))
    placed = place(str(base), files={"transformer": authors})
    assert placed == place(str(base), files={"transformer": authors})
    assert placed.name == str(base)
    assert spec_for("wan", placed) == spec_for("wan", place(str(base), weights=False))
    assert (placed.folder / "transformer" / WEIGHTS).resolve() == authors.resolve()
    assert (placed.folder / "vae").resolve() == (base / "vae").resolve()


def test_a_family_without_a_reader_of_such_files_takes_diffusers_names(tmp_path: Path) -> None:
    cls = diffusers.CogVideoXTransformer3DModel
    cls(**COGVIDEOX).save_pretrained(tmp_path)
    assert load_model(cls, tmp_path, torch.float32, CPU).config.num_layers == 2
    state = load_file(tmp_path / WEIGHTS)
    save_file({f"net.{name}": value for name, value in state.items()}, tmp_path / WEIGHTS)
    said = refused(lambda: load_model(cls, tmp_path, torch.float32, CPU))
    assert "it reads those of hidream, hunyuan_video, ltx_video, wan" in said


def spoil(folder: Path, how: str) -> None:
    """Make the transformer's only file of weights a wrong one."""
    path = folder / "transformer" / WEIGHTS
    state = load_file(path)
    if how == "another size":
        edit(folder / "transformer" / "config.json", ffn_dim=48)
    elif how == "fewer blocks":
        edit(folder / "transformer" / "config.json", num_layers=1)
    elif how == "more blocks":
        edit(folder / "transformer" / "config.json", num_layers=3)
    elif how == "quantized":
        edit(folder / "transformer" / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    elif how == "8 bits":
        save_file({name: value.to(torch.float8_e4m3fn) for name, value in state.items()}, path)
    elif how == "a LoRA":
        save_file({"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.zeros(2, 4)}, path)
    elif how == "something else":
        save_file({"blocks.nothing.weight": torch.zeros(2, 4)}, path)
    elif how == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "a pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    elif how == "a pickle":
        path.rename(path.with_name("diffusion_pytorch_model.bin"))
    elif how == "a variant":
        path.rename(path.with_name("diffusion_pytorch_model.fp16.safetensors"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("another size", ["does not fit", "config.json", "tensors differ, as blocks.0.ffn", "32x24 in the file, 48x24 by"]),
        ("fewer blocks", ["does not fit", "not in the model by the config"]),
        ("more blocks", ["does not fit", "missing in the file"]),
        ("quantized", ["is quantized: take the checkpoint in float32"]),
        ("8 bits", ["weights of the dtype F8_E4M3"]),
        ("a LoRA", ["is a LoRA, not a transformer"]),
        ("something else", ["does not fit"]),
        ("cut short", ["is damaged, or was not copied to its end", "Fetch it again"]),
        ("a pointer", ["pointer of git-lfs", "git lfs pull"]),
        ("a pickle", ["transformer has no weights in safetensors; diffusion_pytorch_model.bin can run code"]),
        ("a variant", ["called diffusion_pytorch_model.safetensors", "it has diffusion_pytorch_model.fp16.safetensors"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_known_before_anything_is_encoded(base: Path, how: str, words: list[str]) -> None:
    place(str(base))
    spoil(base, how)
    said = refused(lambda: place(str(base)))
    for word in words:
        assert word in said
    assert str(base) in said


def test_weights_without_a_place_are_left_out_and_said(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = base / "transformer" / WEIGHTS
    save_file(load_file(path) | {"rope.freqs": torch.zeros(3)}, path)
    net = load_model(diffusers.WanTransformer3DModel, base / "transformer", torch.float32, CPU)
    assert "rope.freqs" not in net.state_dict()
    assert "1 weights have no place in a WanTransformer3DModel and are left out: rope.freqs" in capsys.readouterr().err


def test_a_missing_shard_is_named(base: Path) -> None:
    folder = base / "transformer"
    (folder / WEIGHTS).unlink()
    diffusers.WanTransformer3DModel(**WAN).save_pretrained(folder, max_shard_size="20KB")
    first, *_, last = names = [path.name for path in weight_files(folder)]
    (folder / last).unlink()
    (folder / first).unlink()
    said = refused(lambda: place(str(base)))
    assert said.startswith(f"base_model_name: {base} is incomplete")
    assert f"lacks transformer/{first}, transformer/{last}" in said
    assert f"{folder} lacks {first}, {last}: of {len(names)} files" in refused(lambda: weight_files(folder))


def test_what_an_incomplete_folder_lacks_is_listed(base: Path) -> None:
    shutil.rmtree(base / "tokenizer")
    (base / "tokenizer").mkdir()
    (base / "scheduler" / "scheduler_config.json").unlink()
    (base / "vae" / WEIGHTS).unlink()
    said = refused(lambda: place(str(base)))
    assert "lacks scheduler/, tokenizer/, vae/diffusion_pytorch_model.safetensors" in said
    shutil.rmtree(base / "vae")
    assert "has no vae/, which its model_index.json names" in refused(lambda: check_parts(base))


def test_parts_of_two_models_are_named(base: Path) -> None:
    edit(base / "vae" / "config.json", z_dim=48)
    said = refused(lambda: spec_for(None, place(str(base), weights=False)))
    assert "mixes two models: its transformer (WanTransformer3DModel) takes 4 latent channels, its vae" in said
    assert "(AutoencoderKLWan) gives 48. Take both parts from one checkpoint" in said
    edit(base / "vae" / "config.json", z_dim=4)
    edit(base / "text_encoder" / "config.json", d_model=32)
    assert "takes 16 numbers a text token, its text_encoder (UMT5EncoderModel) gives 32" in refused(
        lambda: check_parts(base)
    )
    edit(base / "text_encoder" / "config.json", d_model=16)
    edit(base / "transformer" / "config.json", _class_name="CogVideoXTransformer3DModel")
    said = refused(lambda: check_parts(base))
    assert "holds a CogVideoXTransformer3DModel, where model_index.json names a WanTransformer3DModel" in said


def test_a_folder_of_another_family_names_both(base: Path) -> None:
    edit(
        base / "model_index.json",
        _class_name="CogVideoXPipeline",
        transformer=["diffusers", "CogVideoXTransformer3DModel"],
    )
    said = refused(lambda: spec_for("wan", place(str(base), weights=False)))
    assert "CogVideoX" in said
    assert "wan" in said


def test_a_class_that_diffusers_does_not_have(base: Path) -> None:
    edit(base / "model_index.json", transformer=["diffusers", "NextYearsTransformer"])
    assert "has no NextYearsTransformer: install a newer one" in refused(lambda: check_base(base))
