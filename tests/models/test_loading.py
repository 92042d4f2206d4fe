"""Loading: weights as diffusers loads them, in less memory, from several files or one,
and what names their bytes.

A base model whose files are damaged, absurd or incomplete is refused with a sentence:
no traceback, no hang.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import command_line
from tests.support.families import KINDS, edit_json, open_family
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.model_spec import Expert, ModelSpec
from videotune.models import fingerprint as part_hash
from videotune.models.base_model import part_files, place, spec_for
from videotune.models.fingerprint import fingerprint
from videotune.models.loading import (
    PROBES,
    WORD_VOCABULARY,
    _tokenizer_fault,
    load_model,
    read_tokenizer,
)
from videotune.models.model_files import check_parts, missing, weight_files
from videotune.models.registry import find, names
from videotune.models.wan import Wan

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"
NET, SCHEDULE, INDEX, GUIDER = (
    "transformer/config.json",
    "scheduler/scheduler_config.json",
    "model_index.json",
    "guider/guider_config.json",
)


@pytest.fixture
def base(tiny_bases: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Wan to spoil."""
    return Path(shutil.copytree(tiny_bases("wan"), tmp_path / "base"))


@pytest.fixture
def authors(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of the tiny Wan, all of them plus one, in a file with the authors'
    names and ComfyUI's prefix.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state, path = (
        load_file(base / "transformer" / WEIGHTS),
        tmp_path / "one.safetensors",
    )
    rename = open_family("wan", base).original
    save_file(
        {
            f"model.diffusion_model.{rename(name)}": value + 1
            for name, value in state.items()
        },
        path,
    )
    return path


def tensors(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*net.named_parameters(), *net.named_buffers()])


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(VideotuneError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
def test_it_is_what_diffusers_loads(
    name: str,
    variant: str,
    dtype: torch.dtype,
    tiny_bases: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Transformers in many files and VAEs: values, dtypes, strides, config."""
    for part, kind in {
        "transformer": find(name).transformer_class,
        "vae": find(name).vae_class,
    }.items():
        cls, folder = getattr(diffusers, kind), tmp_path / part
        cls.from_pretrained(tiny_bases(name, variant) / part).save_pretrained(
            folder, max_shard_size="20KB"
        )
        assert part == "vae" or len(weight_files(folder)) > 2
        theirs, ours = (
            cls.from_pretrained(folder, dtype=dtype),
            load_model(cls, folder, dtype, CPU),
        )
        a, b = tensors(theirs), tensors(ours)
        assert {key: (value.dtype, value.stride()) for key, value in a.items()} == {
            key: (value.dtype, value.stride()) for key, value in b.items()
        }
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert ours.dtype == theirs.dtype
        assert {**ours.config, "_name_or_path": ""} == {
            **theirs.config,
            "_name_or_path": "",
        }
        assert not ours.training
        assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_text_encoders_are_what_transformers_loads(base: Path) -> None:
    from transformers import UMT5EncoderModel

    folder = base / "text_encoder"
    for dtype in (torch.float32, torch.bfloat16):
        theirs = UMT5EncoderModel.from_pretrained(folder, dtype=dtype)
        a, b = (
            tensors(theirs),
            tensors(load_model(UMT5EncoderModel, folder, dtype, CPU)),
        )
        assert {key: value.dtype for key, value in a.items()} == {
            key: value.dtype for key, value in b.items()
        }
        assert all(torch.equal(a[key], b[key]) for key in a)
    state = load_file(folder / "model.safetensors")
    del state["encoder.block.0.layer.0.SelfAttention.q.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    said = refused(lambda: load_model(UMT5EncoderModel, folder, torch.float32, CPU))
    assert (
        "1 tensors are missing, as encoder.block.0.layer.0.SelfAttention.q.weight"
        in said
    )


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


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads what Linux says of a process"
)
def test_never_more_than_the_model_and_one_file_is_in_memory(
    base: Path, tmp_path: Path
) -> None:
    cls = diffusers.WanTransformer3DModel
    shutil.copytree(base / "transformer", tmp_path / "warm")
    large = {
        "num_attention_heads": 8,
        "attention_head_dim": 64,
        "ffn_dim": 2048,
        "num_layers": 6,
        "text_dim": 64,
    }
    cls(**large, freq_dim=32).save_pretrained(tmp_path / "net", max_shard_size="20MB")
    shard = max(path.stat().st_size for path in weight_files(tmp_path / "net"))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, after, size = map(int, done.stdout.split())
    assert size > 45e6
    assert peak < 1.15 * size + shard
    assert after < 1.15 * size


def test_a_file_with_the_authors_names_is_the_transformer(
    base: Path, authors: Path
) -> None:
    """Tensor for tensor, and modules that diffusers keeps in float32 stay so, which its
    own loader of such files forgets.
    """
    state = load_file(base / "transformer" / WEIGHTS)
    folder = place(str(base), files={"transformer": authors}).folder
    cls = diffusers.WanTransformer3DModel
    ours = load_model(cls, folder / "transformer", torch.float32, CPU).state_dict()
    assert set(ours) == set(state)
    assert all(torch.equal(ours[key], state[key] + 1) for key in state)
    half = load_model(cls, folder / "transformer", torch.bfloat16, CPU)
    usual = load_model(cls, base / "transformer", torch.bfloat16, CPU)
    assert {k: v.dtype for k, v in half.state_dict().items()} == {
        k: v.dtype for k, v in usual.state_dict().items()
    }
    assert half.scale_shift_table.dtype == torch.float32
    forgets = cls.from_single_file(
        str(authors), config=str(base / "transformer"), dtype=torch.bfloat16
    )
    assert forgets.scale_shift_table.dtype == torch.bfloat16


def config(**values: Any) -> Callable[[Path], object]:
    return lambda path: edit_json(path.with_name("config.json"), **values)


def weights(
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[[Path], object]:
    return lambda path: save_file(change(load_file(path)), path)


LORA = {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.zeros(2, 4)}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
SPOILT: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "fewer blocks": (config(num_layers=1), ["does not fit", "not in the model by the config"]),
    "more blocks": (config(num_layers=3), ["does not fit", "missing in the file"]),
    "quantized": (config(quantization_config={"quant_method": "bitsandbytes"}), ["take the checkpoint in float32"]),
    "8 bits": (weights(lambda all: {k: v.to(torch.int8) for k, v in all.items()}), ["the dtype I8"]),
    "a LoRA": (weights(lambda _: LORA), ["is a LoRA: it has no tensor"]),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-100]), ["is damaged", "Fetch it again"]),
    "a pointer": (lambda path: path.write_text(POINTER), ["pointer of git-lfs", "git lfs pull"]),
    "a pickle": (lambda path: path.rename(path.with_name("diffusion_pytorch_model.bin")), ["no weights", "can run code"]),
    "a variant": (
        lambda path: path.rename(path.with_name("diffusion_pytorch_model.fp16.safetensors")),
        ["called diffusion_pytorch_model.safetensors", "it has diffusion_pytorch_model.fp16.safetensors"],
    ),
}  # fmt: skip
"""What is wrong with the transformer's only file of weights, or its config, and what is
said of it.
"""


@pytest.mark.parametrize("how", SPOILT)
def test_a_wrong_file_is_known_before_anything_is_encoded(base: Path, how: str) -> None:
    spoil, words = SPOILT[how]
    place(str(base))
    spoil(base / "transformer" / WEIGHTS)
    said = refused(lambda: place(str(base)))
    for word in [str(base), *words]:
        assert word in said


def test_weights_without_a_place_are_left_out_and_said(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = base / "transformer" / WEIGHTS
    save_file(load_file(path) | {"rope.freqs": torch.zeros(3)}, path)
    net = load_model(
        diffusers.WanTransformer3DModel, base / "transformer", torch.float32, CPU
    )
    assert "rope.freqs" not in net.state_dict()
    assert (
        "1 weights that no WanTransformer3DModel has are left out: rope.freqs"
        in capsys.readouterr().err
    )


def test_a_missing_shard_is_named(base: Path) -> None:
    folder = base / "transformer"
    net = diffusers.WanTransformer3DModel.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    net.save_pretrained(folder, max_shard_size="20KB")
    first, *_, last = names = [path.name for path in weight_files(folder)]
    (folder / last).unlink()
    (folder / first).unlink()
    said = refused(lambda: place(str(base)))
    assert said.startswith(f"base_model_name: {base} is incomplete")
    assert f"lacks transformer/{first}, transformer/{last}" in said
    assert f"{folder} lacks {first}, {last}: 2 of {len(names)} files" in refused(
        lambda: weight_files(folder)
    )


def test_what_an_incomplete_folder_lacks_is_listed(base: Path) -> None:
    shutil.rmtree(base / "tokenizer")
    (base / "tokenizer").mkdir()
    (base / "scheduler" / "scheduler_config.json").unlink()
    (base / "vae" / WEIGHTS).unlink()
    said = refused(lambda: place(str(base)))
    assert (
        "lacks scheduler/, tokenizer/, vae/diffusion_pytorch_model.safetensors" in said
    )
    shutil.rmtree(base / "vae")
    assert "has no vae/, which its model_index.json names" in refused(
        lambda: check_parts(base)
    )


def test_parts_of_two_models_are_named(base: Path) -> None:
    edit_json(base / "vae" / "config.json", z_dim=48)
    said = refused(lambda: spec_for(None, place(str(base), weights=False)))
    assert "mixes two models: its transformer takes 4 latent channels, its vae" in said
    assert "its vae gives 48. Take both parts from one checkpoint" in said
    edit_json(base / "vae" / "config.json", z_dim=4)
    edit_json(base / "text_encoder" / "config.json", d_model=32)
    assert "takes 16 numbers a text token, its text_encoder gives 32" in refused(
        lambda: check_parts(base)
    )
    edit_json(base / "text_encoder" / "config.json", d_model=16)
    edit_json(
        base / "transformer" / "config.json", _class_name="CogVideoXTransformer3DModel"
    )
    said = refused(lambda: check_parts(base))
    assert (
        "holds a CogVideoXTransformer3DModel, where model_index.json names a WanTransformer3DModel"
        in said
    )


def test_a_folder_of_another_family_names_both(base: Path) -> None:
    edit_json(
        base / INDEX,
        _class_name="CogVideoXPipeline",
        transformer=["diffusers", "CogVideoXTransformer3DModel"],
    )
    said = refused(lambda: spec_for("wan", place(str(base), weights=False)))
    assert "CogVideoX" in said
    assert "wan" in said


@pytest.fixture
def two(tiny_bases: Callable[[str], Path]) -> ModelSpec:
    """The facts of a family with two experts."""
    spec = Wan.read_spec(tiny_bases("wan"))
    return replace(
        spec, experts=(Expert("high", 0.875, 1.0), Expert("low", 0.0, 0.875))
    )


def a_file(path: Path) -> str:
    save_file({"weight": torch.zeros(1)}, path)
    return str(path)


def test_files_go_to_the_experts_in_order(two: ModelSpec, tmp_path: Path) -> None:
    assert [two.part_of(name) for name in (None, "high", "low")] == [
        "transformer",
        "transformer",
        "transformer_2",
    ]
    high, low = (
        a_file(tmp_path / "model_high_noise.safetensors"),
        a_file(tmp_path / "model_low_noise.safetensors"),
    )
    assert part_files([high, low], two) == {
        "transformer": Path(high),
        "transformer_2": Path(low),
    }
    assert part_files([None, low], two) == {"transformer_2": Path(low)}
    assert part_files(None, two) == part_files([], two) == {}
    (tmp_path / "a.gguf").touch()
    for given, said in (
        (
            [low, high],
            "model_low_noise.safetensors stands for the expert 'high', and is one for 'low' by its name",
        ),
        (high, r"1 given; .* takes 2 \(high, low; null"),
        (
            [a_file(tmp_path / "a.safetensors")] * 2,
            "a.safetensors is given for two experts",
        ),
        ([None, str(tmp_path / "none.safetensors")], "no such file"),
        ([None, str(tmp_path / "a.gguf")], r"it must be the \.safetensors file"),
    ):
        with pytest.raises(VideotuneError, match=said):
            part_files(given, two)


def test_a_change_of_one_tensor_of_a_large_file_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 40 tensors in turn, small and large ones, although not a tenth of the
    file is read.
    """
    monkeypatch.setattr(part_hash, "SAMPLED_ABOVE", 1 << 10)
    monkeypatch.setattr(part_hash, "BLOCK", 1 << 10)
    path = tmp_path / "model.safetensors"
    tensors = {
        f"{i:02d}.{kind}": torch.zeros(size)
        for i in range(20)
        for kind, size in (("w", 1 << 14), ("b", 8))
    }
    seen = set()
    for changed in (None, *tensors):
        value = {name: tensor + (name == changed) for name, tensor in tensors.items()}
        save_file(value, path)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 1 + len(tensors)
    assert (
        sum(length for _, length in part_hash._blocks(path, path.stat().st_size))
        < path.stat().st_size / 10
    )


def used(folder: Path) -> None:
    """All that a run reads of a base: its configs, tokenizers, weights and scheduler."""
    found = place(str(folder))
    spec = spec_for(None, found)
    family = find(spec.name)(found.folder, CPU, torch.float32)
    family.encode_text(["a red circle"])
    nets = {expert.name: family.denoiser(expert.name) for expert in spec.experts}
    family.part("vae")
    family.pipeline(nets)


@pytest.mark.parametrize(
    ("name", "part", "values", "words"),
    [
        ("wan", NET, {"in_channels": 16}, "reads 16 channels"),
        ("wan", NET, {"in_channels": 12, "pos_embed_seq_len": 514}, "FLF2V"),
        ("wan", INDEX, {"boundary_ratio": 0.875}, "needs transformer_2/"),
        ("wan:t2v-a14b", INDEX, {"boundary_ratio": None}, "needs boundary_ratio"),
        ("cogvideox", NET, {"in_channels": 9}, "reads 9 channels"),
        (
            "cogvideox",
            SCHEDULE,
            {"prediction_type": "epsilon"},
            "prediction_type is 'epsilon'",
        ),
        ("cogvideox", SCHEDULE, {"beta_schedule": "linear"}, "beta_schedule"),
        (
            "cogvideox",
            SCHEDULE,
            {"snr_shift_scale": None},
            "does not say snr_shift_scale",
        ),
        (
            "hunyuan_video",
            NET,
            {"image_condition_type": "latent_concat"},
            "takes an image",
        ),
        ("hunyuan_video", NET, {"in_channels": 9}, "reads 9 channels"),
        (
            "hunyuan_video15",
            NET,
            {"in_channels": 4},
            "noise, an image and a mask are 9",
        ),
        ("hunyuan_video15", NET, {"in_channels": 8}, "reads 8 channels"),
        ("hunyuan_video15", NET, {"use_meanflow": True}, "distilled to few steps"),
        ("hunyuan_video15", GUIDER, {"guidance_scale": "x"}, "guidance_scale"),
        ("hunyuan_video15", GUIDER, {"_class_name": "SkipLayer"}, "guider_config.json"),
        ("ltx_video", NET, {"in_channels": 8}, "reads 8 channels"),
        ("ltx_video", NET, {"patch_size": 2}, "covers more than one latent"),
        ("hidream", NET, {"in_channels": 8}, "reads 8 channels"),
        ("kandinsky5", NET, {"in_visual_dim": 8}, "reads 8 channels"),
        ("kandinsky5", NET, {"attention_type": "nabla"}, "nabla attention"),
        ("kandinsky5", NET, {"visual_cond": False}, "reads no mask"),
    ],
)
def test_what_only_looks_like_a_checkpoint_of_the_family(
    name: str,
    part: str,
    values: dict[str, Any],
    words: str,
    tiny_bases: Callable[..., Path],
    tmp_path: Path,
) -> None:
    family, _, variant = name.partition(":")
    base = Path(shutil.copytree(tiny_bases(family, variant or None), tmp_path / "base"))
    edit_json(base / part, **values)
    with pytest.raises(VideotuneError, match=words):
        find(family).read_spec(base)


CONTENTS = {
    "nothing": b"",
    "a list": b"[1, 2]",
    "null": b"null",
    "binary": bytes(range(256)),
    "deep": b'{"a": ' * 100_000,
    "nested": b'{"a": ' * 900 + b"1" + b"}" * 900,
    "a number of 5,000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "not finite": b'{"a": NaN}',
    "without its keys": b"{}",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize(
    "name",
    [
        INDEX,
        NET,
        SCHEDULE,
        "vae/config.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer.json",
    ],
)
def test_json_that_is_none(name: str, content: bytes, base: Path) -> None:
    (base / name).write_bytes(content)
    if content in (
        CONTENTS["without its keys"],
        CONTENTS["not finite"],
    ):  # some classes have a default of every key
        with suppress(VideotuneError):
            used(base)
    else:
        with pytest.raises(VideotuneError, match=name.split("/")[0]):
            used(base)


VALUES: list[Any] = [
    None,
    "text",
    0,
    -1,
    10**9,
    10**30,
    2.5,
    [],
    ["a"],
    [0],
    {"a": 1},
    True,
    [[2]],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(
            (NET, key)
            for key in (
                "num_layers",
                "patch_size",
                "num_attention_heads",
                "rope_max_seq_len",
            )
        ),
        *(("vae/config.json", key) for key in ("z_dim", "latents_mean")),
        *(("text_encoder/config.json", key) for key in ("num_layers", "vocab_size")),
        *((SCHEDULE, key) for key in ("flow_shift", "num_train_timesteps")),
        *(
            (INDEX, key)
            for key in ("_class_name", "boundary_ratio", "transformer", "scheduler")
        ),
    ],
)
def test_values_of_a_wrong_type_or_size(
    name: str, key: str, value: Any, base: Path
) -> None:
    edit_json(base / name, **{key: value})
    with suppress(VideotuneError):
        used(base)


@pytest.mark.parametrize("family", ["wan", "ltx", "hunyuan_video", "ltx2"])
def test_a_network_without_blocks_is_refused_before_it_is_planned(
    family: str, tiny_bases: Callable[[str], Path], small_clips: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases(family), tmp_path / "base"))
    edit_json(base / NET, num_layers=0, num_single_layers=0)
    with pytest.raises(
        VideotuneError, match=r"transformer/config\.json .* without blocks"
    ):
        command_line.run(
            "plan",
            data=small_clips,
            vram="8GB",
            set=[
                f"base_model_name={base}",
                "resolution=64x64",
                "training_method=FINE_TUNE",
            ],
        )


@pytest.mark.parametrize(
    "classes",
    [["diffusers", 7], [7, "Scheduler"], ["os", "system"], ["diffusers", "logging"]],
)
@pytest.mark.parametrize("part", ["scheduler", "transformer", "../vae"])
def test_classes_of_the_index(part: str, classes: list[Any], base: Path) -> None:
    edit_json(base / INDEX, **{part: classes})
    with pytest.raises(VideotuneError):
        used(base)


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        {"weight_map": []},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": "../../x.safetensors"}},
    ],
    ids=str,
)
def test_an_index_of_shards(index: Any, base: Path) -> None:
    part = base / "transformer"
    (part / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(VideotuneError, match="index"):
        used(base)


@pytest.mark.parametrize("family", names())
def test_each_tokenizer_must_have_its_vocabulary(
    family: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases(family), tmp_path / "base"))
    parts = [path.name for path in base.iterdir() if path.name.startswith("tokenizer")]
    assert parts
    for part in parts:
        vocabulary = base / part / "tokenizer.json"
        if vocabulary.is_file():  # a tokenizer of bytes has none
            content = vocabulary.read_bytes()
            vocabulary.unlink()
            assert missing(base, weights=True) == [f"{part}/tokenizer.json"]
            with pytest.raises(VideotuneError, match=f"{part}/tokenizer.json"):
                place(str(base))
            vocabulary.write_bytes(content)
        encoder, settings = (
            base / part.replace("tokenizer", "text_encoder"),
            base / part / "tokenizer_config.json",
        )
        read_tokenizer(base / part, encoder)
        edit_json(settings, model_max_length=-1)
        with pytest.raises(VideotuneError, match=part):
            read_tokenizer(base / part, encoder)
        content = settings.read_bytes()
        settings.unlink()
        with pytest.raises(VideotuneError, match=part):
            read_tokenizer(base / part, encoder)
        settings.write_bytes(content)
    assert missing(base, weights=True) == []


def test_what_else_a_vocabulary_may_be(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases("hidream"), tmp_path / "base"))
    for part, forms in {
        "tokenizer": ("vocab.json", "merges.txt"),
        "tokenizer_3": ("spiece.model",),
    }.items():
        (base / part / "tokenizer.json").unlink()
        for name in forms:
            (base / part / name).touch()
        assert missing(base, weights=True) == []
    (base / "tokenizer" / "merges.txt").unlink()
    assert missing(base, weights=True) == ["tokenizer/merges.txt"]


def test_captions_that_become_the_same_numbers_are_refused(base: Path) -> None:
    """As transformers reads a vocabulary that has only its marks: every word is the
    unknown one.
    """
    path = base / "tokenizer" / "tokenizer.json"
    facts = json.loads(path.read_text())
    facts["model"]["vocab"] = facts["model"]["vocab"][:4]
    path.write_text(json.dumps(facts))
    with pytest.raises(VideotuneError, match="same"):
        used(base)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pad_token", "a new one"),
        ("eos_token", "a new one"),
        ("model_max_length", "long"),
    ],
)
def test_settings_of_a_tokenizer_that_do_not_fit(
    key: str, value: Any, base: Path
) -> None:
    """A token that the text encoder has no row for, a length that is no number."""
    edit_json(base / "tokenizer" / "tokenizer_config.json", **{key: value})
    with pytest.raises(VideotuneError, match="tokenizer"):
        used(base)


@pytest.mark.parametrize(
    "family", ["wan", "hunyuan_video", "hunyuan_video15", "hidream", "kandinsky5"]
)
def test_a_tokenizer_that_lost_a_part_gives_the_same_tokens_or_is_refused(
    family: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases(family), tmp_path / "base"))
    refused = set()
    for file in sorted(base.glob("tokenizer*/tokenizer.json")):
        encoder = base / file.parent.name.replace("tokenizer", "text_encoder")
        before = read_tokenizer(file.parent, encoder)(PROBES[0]).input_ids
        content = file.read_text()
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            edit_json(file, **{part: None})
            try:
                after = read_tokenizer(file.parent, encoder)(PROBES[0]).input_ids
                assert after == before, part
            except VideotuneError:
                refused.add(part)
            file.write_text(content)
    expected = set() if family == "wan" else {"pre_tokenizer", "post_processor"}
    if family == "hunyuan_video15":
        expected = {"pre_tokenizer"}  # Qwen puts no mark around a text
    assert refused - {"decoder"} == expected


@pytest.mark.parametrize(
    ("content", "is_told"),
    [("circle", True), ("a phrase", True), ("<mark>", False), ("\u5186", True)],
)
def test_words_that_were_added_to_a_tokenizer_are_told(
    content: str,
    is_told: bool,
    tiny_bases: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = Path(shutil.copytree(tiny_bases("hidream"), tmp_path / "base"))
    folder = base / "tokenizer_4"
    edit_json(base / "text_encoder_4" / "config.json", vocab_size=300)  # rows to spare
    tokenizer = read_tokenizer(folder, base / "text_encoder_4")
    known = [token.content for token in tokenizer.added_tokens_decoder.values()]
    assert "added" not in capsys.readouterr().err, known

    file = read_json(folder / "tokenizer.json")
    token = file["added_tokens"][0] | {"content": content, "special": False, "id": 7}
    edit_json(folder / "tokenizer.json", added_tokens=[*file["added_tokens"], token])
    read_tokenizer(folder, base / "text_encoder_4")
    assert (f"({content!r})" in capsys.readouterr().err) == is_told


BAD_VAE: dict[str, dict[str, Any]] = {
    "none": {"latents_mean": None, "latents_std": None},
    "one": {"latents_mean": [1.0]},
    "text": {"latents_std": ["x"] * 4},
    "zero": {"latents_std": [0.0, 1.0, 1.0, 1.0]},
    "nested": {"latents_mean": {"a": 1}},
}


@pytest.mark.parametrize("how", BAD_VAE)
def test_a_vae_without_a_valid_scale_of_its_latents(
    how: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases("wan"), tmp_path / "base"))
    edit_json(base / "vae" / "config.json", **BAD_VAE[how])
    family = find("wan")(base, torch.device("cpu"), torch.float32)
    with pytest.raises(VideotuneError, match="vae"):
        family.encode_video(torch.zeros(3, 5, 32, 32))
    with pytest.raises(VideotuneError, match="vae"):
        family.raw_latents(torch.zeros(4, 2, 4, 4))


@pytest.mark.parametrize("value", [None, 0, -1, "x"])
def test_a_vae_without_a_valid_factor(
    value: Any, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(tiny_bases("cogvideox"), tmp_path / "base"))
    edit_json(base / "vae" / "config.json", scaling_factor=value)
    family = find("cogvideox")(base, torch.device("cpu"), torch.float32)
    with pytest.raises(VideotuneError, match="vae"):
        family.encode_video(torch.zeros(3, 9, 32, 32))


def test_a_vocabulary_of_words_that_is_read_letter_by_letter_is_refused() -> None:
    """Without its merges a tokenizer of words gives letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz "
    vocab = {letter: index for index, letter in enumerate(letters)}
    for number in range(WORD_VOCABULARY):
        vocab[f"word{number}"] = len(vocab)
    merges = [("r", "e"), ("re", "d"), ("c", "i"), ("ci", "r"), ("m", "o"), ("l", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)

    for kept, is_refused in ((merges, False), ([], True)):
        backend = Tokenizer(models.BPE(vocab, kept))
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        tokenizer.decode = lambda ids, **_: PROBES[0]
        assert (_tokenizer_fault(tokenizer, 32) is not None) == is_refused
