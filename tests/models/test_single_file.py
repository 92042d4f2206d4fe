"""A base model as one file of weights: every family's, in each layout of names, in full precision and in fp8."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file

from tests.effects.effects_kit import Lab, run_steps, trainer_of
from tests.models.models_kit import FAMILIES, Bases
from tests.shell import Patch
from videotune.models.loading import CONFIGS, load_model, on_meta
from videotune.models.model_files import Header
from videotune.models.registry import find, names
from videotune.models.single_file import PREFIXES, find_sources, kind_of, renamed

CPU, WEIGHTS = torch.device("cpu"), "transformer/diffusion_pytorch_model.safetensors"
State = dict[str, torch.Tensor]


def tables_of(name: str) -> list[Any]:
    """The layouts of a family's files: diffusers' own, and each that its class knows."""
    cls: Any = find(name)
    return [(), *cls.file_names, *([cls.original_names] if cls.original_names else [])]


def in_layout(state: State, table: Any, prefix: str = "") -> State:
    """Tensors by diffusers' names as a file of another layout has them: joined along the rows where it joins them."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in state.items():
        place, _, rows = renamed(name, table).partition("#")
        parts = [int(part) for part in rows.partition("/")[0].split(",")] if rows else [0]
        pieces.setdefault(prefix + place, {}).update(zip(parts, value.chunk(len(parts)), strict=True))
    return {name: torch.cat([one[part] for part in sorted(one)]) for name, one in pieces.items()}


def scaled(state: State, word: str = "scale_weight") -> State:
    """The matrices in fp8, each with its scale, as ComfyUI's files have them."""
    out = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, value in state.items():
        if value.dim() == 2:
            scale = (value.abs().max() / 448).float()
            out |= {name: (value / scale).to(torch.float8_e4m3fn), f"{name.removesuffix('weight')}{word}": scale}
            out[f"{name.removesuffix('weight')}scale_input"] = torch.tensor(7.0)
        else:
            out[name] = value
    return out


def plain_fp8(state: State) -> State:
    return {name: value.to(torch.float8_e4m3fn) for name, value in state.items()}


def in_float64(state: State, word: str = "scale_weight") -> State:
    """What the numbers of a file are, in float64, rounded once to float32."""
    scales = {
        name.removesuffix(word) + "weight": value.double() for name, value in state.items() if name.endswith(word)
    }
    own = {name: value for name, value in state.items() if not name.endswith((word, "scale_input", "scaled_fp8"))}
    return {name: (value.double() * scales.get(name, 1.0)).float() for name, value in own.items()}


@pytest.mark.parametrize(
    "model", sorted(path.parents[1].name for path in CONFIGS.glob("[!c]*/transformer/config.json"))
)
def test_the_tables_are_diffusers_own_converters_at_full_size(model: str) -> None:
    """Row by row: each row of a tensor tells from which row of which tensor of the file it came.

    Of CogVideoX diffusers has no converter.
    """
    folder = CONFIGS / model / "transformer"
    cls = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    shapes = {name: tuple(value.shape) for name, value in on_meta(cls, folder).state_dict().items()}
    family = next(name for name in names() if getattr(find(name), "transformer_class", "") == cls.__name__)
    rows: dict[str, int] = {}
    for name, shape in shapes.items():
        place, _, part = renamed(name, tables_of(family)[1] if len(tables_of(family)) > 1 else ()).partition("#")
        parts, _, of = part.partition("/")
        rows[place] = shape[0] // (parts.count(",") + 1) * int(of or 1)
    probes = {name: (torch.arange(count) + (i << 32)).view(-1, 1) for i, (name, count) in enumerate(rows.items())}
    file = {Path("one"): {name: Header("F32", (count, 1)) for name, count in rows.items()}}
    ours = find_sources(cls.__name__, shapes, file)
    theirs = SINGLE_FILE_LOADABLE_CLASSES[cls.__name__]["checkpoint_mapping_fn"](checkpoint=dict(probes), config={})
    assert set(theirs) == set(ours) == set(shapes)
    for name, source in ours.items():
        cut = probes[source.name].chunk(source.of)
        assert torch.equal(torch.cat([cut[part] for part in source.parts]), theirs[name]), name
        assert source.shape[0] == shapes[name][0]


NAMES_OF_COMFYUI = {
    "cogvideox": {
        "time_embedding.linear_1.weight": "time_embedding_linear_1.weight",
        "transformer_blocks.3.norm1.linear.bias": "blocks.3.norm1.linear.bias",
        "transformer_blocks.3.attn1.norm_q.weight": "blocks.3.norm_q.weight",
        "transformer_blocks.3.attn1.to_q.weight": "blocks.3.q.weight",
        "transformer_blocks.3.attn1.to_out.0.bias": "blocks.3.attn_out.bias",
        "transformer_blocks.3.ff.net.0.proj.weight": "blocks.3.ff_proj.weight",
        "patch_embed.text_proj.weight": "patch_embed.text_proj.weight",
    },
    "hunyuan_video": {
        "transformer_blocks.3.attn.to_v.weight": "double_blocks.3.img_attn.qkv.weight#2/3",
        "transformer_blocks.3.attn.norm_added_q.weight": "double_blocks.3.txt_attn.norm.query_norm.scale",
        "transformer_blocks.3.ff.net.0.proj.weight": "double_blocks.3.img_mlp.0.weight",
        "transformer_blocks.3.norm1.linear.weight": "double_blocks.3.img_mod.lin.weight",
        "single_transformer_blocks.3.attn.norm_k.weight": "single_blocks.3.norm.key_norm.scale",
        "single_transformer_blocks.3.norm.linear.weight": "single_blocks.3.modulation.lin.weight",
        "time_text_embed.timestep_embedder.linear_2.weight": "time_in.out_layer.weight",
        "context_embedder.time_text_embed.text_embedder.linear_1.weight": "txt_in.c_embedder.in_layer.weight",
    },
}
"""As ComfyUI's own models call them (comfy/ldm/cogvideo/model.py; its renaming of HunyuanVideo's, comfy/supported_models.py)."""


@pytest.mark.parametrize("name", NAMES_OF_COMFYUI)
def test_comfyuis_own_names(name: str) -> None:
    table = tables_of(name)[-1]
    assert {ours: renamed(ours, table) for ours in NAMES_OF_COMFYUI[name]} == NAMES_OF_COMFYUI[name]


@FAMILIES
def test_each_layout_in_each_dtype_gives_the_folders_weights(name: str, tiny_bases: Bases, tmp_path: Path) -> None:
    """To the bit: in full precision those of the folder, in fp8 the products in float64, rounded once."""
    folder, cls = tmp_path / "transformer", getattr(diffusers, str(getattr(find(name), "transformer_class", "")))
    shutil.copytree(tiny_bases(name) / "transformer", folder)
    state = load_file(tiny_bases(name) / WEIGHTS)
    for table in tables_of(name):
        for prefix in PREFIXES:
            own = (
                in_layout(state, table, prefix) | {"vae.decoder.conv_in.weight": torch.zeros(64, 64)} if prefix else {}
            )
            own = own or in_layout(state, table)
            assert kind_of(own, name) is None
            for change in (dict, scaled, lambda one: scaled(one, "weight_scale"), plain_fp8):
                written = change(own)
                save_file(written, tmp_path / WEIGHTS)
                word = "weight_scale" if any(key.endswith("weight_scale") for key in written) else "scale_weight"
                truth = in_float64(written, word)
                read = load_model(cls, folder, torch.float32, CPU).state_dict()
                assert set(read) == set(state)
                for key, value in in_layout(read, table, prefix).items():
                    assert torch.equal(value, truth[key]), (key, prefix)
                if change is dict:
                    assert all(torch.equal(read[key], state[key]) for key in state)


def losses(lab: Lab, knobs: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in run_steps(trainer_of(lab, knobs), 2)]


@FAMILIES
def test_a_file_trains_as_the_folder_does(
    name: str, tiny_bases: Bases, small_clips: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """With the folder's losses, in float32 and bfloat16; in fp8 with those of the folder that holds the same numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    base, table = tiny_bases(name), tables_of(name)[-1]
    lab = Lab(base, small_clips, tmp_path / "cache", tmp_path)
    knobs: dict[str, Any] = {"video_config.frames": 1} if name == "hidream" else {"video_config.target_fps": 16}
    state = load_file(base / WEIGHTS)
    file, parts = (
        tmp_path / "one.safetensors",
        {"base_model_name": str(tmp_path / "one.safetensors"), "base_parts": str(base)},
    )
    for dtype in ("FLOAT_32", "BFLOAT_16"):
        save_file(in_layout(state, table, "model.diffusion_model."), file)
        knobs |= {"train_dtype": dtype}
        assert losses(lab, knobs | parts) == losses(lab, knobs)
    same = Path(shutil.copytree(base, tmp_path / "same"))
    cut = scaled(in_layout(state, table))
    save_file(cut, file)
    cls = getattr(diffusers, str(getattr(find(name), "transformer_class", "")))
    (tmp_path / "net").mkdir()
    shutil.copy(base / "transformer" / "config.json", tmp_path / "net")
    save_file(in_float64(cut), tmp_path / "net" / "diffusion_pytorch_model.safetensors")
    plain = load_model(cls, tmp_path / "net", torch.float32, CPU)
    plain.save_pretrained(same / "transformer")
    assert losses(lab, knobs | parts) == losses(Lab(same, small_clips, lab.cache, tmp_path / "other"), knobs)
