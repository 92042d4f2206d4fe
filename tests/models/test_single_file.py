"""A base model as one file of weights: every family's, in each layout of names, in full
precision and in fp8.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file

from tests.models.test_loading import PEAK
from tests.support.command_line import Patch, run
from tests.support.damaged_files import limited
from tests.support.families import FAMILIES, Bases
from tests.support.trainers import BASE, Lab, run_steps, trainer_of
from videotune.errors import FAILED, VideotuneError
from videotune.exporter.full import _merge_part
from videotune.models.base_model import place_of
from videotune.models.key_names import rename_key
from videotune.models.loading import load_model
from videotune.models.model_files import CONFIGS, Header, headers
from videotune.models.registry import find, names
from videotune.models.single_file import PREFIXES, find_sources, kind_of, tensors
from videotune.models.skeletons import on_meta

CPU, WEIGHTS = torch.device("cpu"), "transformer/diffusion_pytorch_model.safetensors"
State = dict[str, torch.Tensor]
DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "single_file.json").read_text()
)


def tables_of(name: str) -> list[Any]:
    """The layouts of a family's files: diffusers' own, and each that its class knows."""
    cls: Any = find(name)
    return [(), *cls.file_names, *([cls.original_names] if cls.original_names else [])]


def in_layout(state: State, table: Any, prefix: str = "") -> State:
    """Tensors by diffusers' names as a file of another layout has them: joined along
    the rows where it joins them.
    """
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in state.items():
        place, _, rows = rename_key(name, table).partition("#")
        parts = (
            [int(part) for part in rows.partition("/")[0].split(",")] if rows else [0]
        )
        pieces.setdefault(prefix + place, {}).update(
            zip(parts, value.chunk(len(parts)), strict=True)
        )
    return {
        name: torch.cat([one[part] for part in sorted(one)])
        for name, one in pieces.items()
    }


def scaled(state: State, word: str = "scale_weight") -> State:
    """The matrices in fp8, each with its scale, as ComfyUI's files have them."""
    out = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, value in state.items():
        if value.dim() == 2 and name.endswith(".weight"):
            most = (
                value.abs().amax(1, keepdim=True)
                if word == "weight_scale"
                else value.abs().max()
            )
            scale = (most / 448).float()
            out |= {
                name: (value / scale).to(torch.float8_e4m3fn),
                f"{name.removesuffix('weight')}{word}": scale,
            }
            out[f"{name.removesuffix('weight')}scale_input"] = torch.tensor(7.0)
        else:
            out[name] = value
    return out


def in_float64(state: State, word: str = "scale_weight") -> State:
    """What the numbers of a file are, in float64, rounded once to float32."""
    scales = {
        name.removesuffix(word) + "weight": state[name].double()
        for name in state
        if name.endswith(word)
    }
    own = {
        name: value
        for name, value in state.items()
        if not name.endswith((word, "scale_input", "scaled_fp8"))
    }
    return {
        name: (value.double() * scales.get(name, 1.0)).float()
        for name, value in own.items()
    }


WITH_CONVERTER = sorted(
    path.name
    for path in CONFIGS.glob("[!cik]*")
    if not path.name.startswith("hunyuan-video-1.5")
)


@pytest.mark.parametrize("model", WITH_CONVERTER)
def test_the_tables_are_diffusers_own_converters_at_full_size(model: str) -> None:
    """Row by row: each row of a tensor tells from which row of which tensor of the file
    it came.

    Of CogVideoX, Kandinsky 5 and HunyuanVideo 1.5 diffusers has no converter; Kandinsky's
    authors have diffusers' names, and HunyuanVideo 1.5 has a test of its own.
    """
    folder = CONFIGS / model / "transformer"
    cls = getattr(
        diffusers, json.loads((folder / "config.json").read_text())["_class_name"]
    )
    shapes = {
        name: tuple(value.shape)
        for name, value in on_meta(cls, folder).state_dict().items()
    }
    family = next(
        name
        for name in names()
        if getattr(find(name), "transformer_class", "") == cls.__name__
    )
    rows: dict[str, int] = {}
    for name, shape in shapes.items():
        place, _, part = rename_key(
            name, tables_of(family)[1] if len(tables_of(family)) > 1 else ()
        ).partition("#")
        parts, _, of = part.partition("/")
        rows[place] = shape[0] // (parts.count(",") + 1) * int(of or 1)
    probes = {
        name: (torch.arange(count) + (i << 32)).view(-1, 1)
        for i, (name, count) in enumerate(rows.items())
    }
    file = {
        Path("one"): {name: Header("F32", (count, 1)) for name, count in rows.items()}
    }
    ours = find_sources(cls.__name__, shapes, file)
    theirs = SINGLE_FILE_LOADABLE_CLASSES[cls.__name__]["checkpoint_mapping_fn"](
        checkpoint=dict(probes), config={}
    )
    # Their reader of single files has no name for these modules of LTX-2.3; their script
    # that converts the authors' files has.
    theirs = {
        name.replace("prompt_adaln_single.", "prompt_adaln."): rows
        for name, rows in theirs.items()
    }
    assert set(theirs) == set(ours) == set(shapes)
    for name, source in ours.items():
        cut = probes[source.name].chunk(source.of)
        assert torch.equal(
            torch.cat([cut[part] for part in source.parts]), theirs[name]
        ), name
        assert source.shape[0] == shapes[name][0]


@pytest.mark.parametrize("name", ["cogvideox", "hunyuan_video"])
def test_comfyuis_own_names(name: str) -> None:
    own = DATA["comfyui"][name]
    assert {ours: rename_key(ours, tables_of(name)[-1]) for ours in own} == own


@pytest.mark.parametrize("model", sorted(path.name for path in CONFIGS.glob("ltx*")))
def test_ltx_video_and_ltx_2_are_not_taken_for_each_other(model: str) -> None:
    """In diffusers' names and in the authors', although most names are in both."""
    family, other = "ltx_video", "ltx2"
    if model.startswith("ltx-2"):
        family, other = other, family
    transformer = CONFIGS / model / "transformer"
    cls: Any = find(family)
    names_in_diffusers = list(
        on_meta(getattr(diffusers, cls.transformer_class), transformer).state_dict()
    )
    for table in tables_of(family):
        keys = [rename_key(name, table) for name in names_in_diffusers]
        assert kind_of(keys, family) is None
        assert kind_of(keys, other) == kind_of(keys, "wan") == kind_of(keys)
        assert ("LTX-2" in str(kind_of(keys))) == (family == "ltx2")


@FAMILIES
def test_each_layout_in_each_dtype_gives_the_folders_weights(
    name: str, tiny_bases: Bases, tmp_path: Path
) -> None:
    """To the bit: in full precision those of the folder, in fp8 the products in
    float64, rounded once.

    Wan's layouts have each prefix in each dtype, those of others each dtype with one.
    """
    folder, cls = (
        tmp_path / "transformer",
        getattr(diffusers, str(getattr(find(name), "transformer_class", ""))),
    )
    shutil.copytree(tiny_bases(name) / "transformer", folder)
    state = load_file(tiny_bases(name) / WEIGHTS)
    for number, table in enumerate(tables_of(name)):
        for prefix in PREFIXES:
            is_in_each_dtype = name == "wan" or prefix == PREFIXES[number % 4]
            own = in_layout(state, table, prefix) | (
                {"vae.decoder.conv.weight": torch.zeros(64, 64)} if prefix else {}
            )
            assert kind_of(own, name) is None
            plain = {key: value.to(torch.float8_e4m3fn) for key, value in own.items()}
            eight_bits = [scaled(own), scaled(own, "weight_scale"), plain]
            for written in [own, *(eight_bits if is_in_each_dtype else [])]:
                save_file(written, tmp_path / WEIGHTS)
                word = (
                    "weight_scale"
                    if any(key.endswith("weight_scale") for key in written)
                    else "scale_weight"
                )
                truth = in_float64(written, word)
                read = load_model(cls, folder, torch.float32, CPU).state_dict()
                assert set(read) == set(state)
                for key, value in in_layout(read, table, prefix).items():
                    assert torch.equal(value, truth[key]), (key, prefix)
                if written is own:
                    assert all(torch.equal(read[key], state[key]) for key in state)


def losses(lab: Lab, knobs: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in run_steps(trainer_of(lab, knobs), 2)]


@FAMILIES
def test_a_file_trains_as_the_folder_does(
    name: str, tiny_bases: Bases, small_clips: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """With the folder's losses; in fp8 with those of the folder that holds the same
    numbers.

    Wan's also in bfloat16 and with weights in int8: the reader knows no family there.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    base, table = tiny_bases(name), tables_of(name)[-1]
    lab = Lab(base, small_clips, tmp_path / "cache", tmp_path)
    knobs: dict[str, Any] = (
        {"video_config.frames": 1}
        if name == "hidream"
        else {"video_config.target_fps": 16}
    )
    state = load_file(base / WEIGHTS)
    file = tmp_path / "one.safetensors"
    parts = {"base_model_name": str(file), "base_parts": str(base)}
    dtypes = [{"train_dtype": "FLOAT_32"}]
    if name == "wan":
        dtypes += [{"train_dtype": "BFLOAT_16"}, {"weight_dtype": "INT_8"}]
    for more in dtypes:
        save_file(in_layout(state, table, "model.diffusion_model."), file)
        assert losses(lab, knobs | more | parts) == losses(lab, knobs | more)
    same = Path(shutil.copytree(base, tmp_path / "same"))
    cut = scaled(in_layout(state, table))
    save_file(cut, file)
    cls = getattr(diffusers, str(getattr(find(name), "transformer_class", "")))
    save_file(in_float64(cut), same / WEIGHTS)
    plain: Any = load_model(cls, same / "transformer", torch.float32, CPU)
    plain.save_pretrained(same / "transformer")
    assert losses(lab, knobs | parts) == losses(
        Lab(same, small_clips, lab.cache, tmp_path / "other"), knobs
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads what Linux says of a process"
)
@pytest.mark.parametrize("change", [dict, scaled])
def test_a_file_is_read_tensor_by_tensor(
    change: Any, tiny_bases: Bases, tmp_path: Path
) -> None:
    """The peak is the model in bfloat16 and some tensors, whatever the file's dtype; no
    page of the file stays.
    """
    cls, table = diffusers.WanTransformer3DModel, tables_of("wan")[-1]
    shutil.copytree(tiny_bases("wan") / "transformer", tmp_path / "warm")
    large = {
        "num_attention_heads": 8,
        "attention_head_dim": 64,
        "ffn_dim": 4096,
        "num_layers": 6,
        "text_dim": 64,
    }
    net = cls(**large, freq_dim=32)
    net.save_config(tmp_path / "net")
    save_file(
        change(in_layout(net.state_dict(), table)),
        tmp_path / "net" / "diffusion_pytorch_model.safetensors",
    )
    most = max(value.numel() for value in net.parameters()) * 4
    given = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536"
    }  # what is freed goes back, as of real models' tensors
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        env=given,
    )
    peak, after, size = map(int, done.stdout.split())
    assert size > 70e6
    assert peak < 1.1 * size + 4 * most
    assert after < 1.1 * size


@pytest.fixture
def lab(
    tiny_bases: Bases, small_clips: Path, tmp_path: Path, monkeypatch: Patch
) -> Lab:
    """A copy of the tiny Wan, and ``one.safetensors``: its transformer in its authors'
    names.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    base = Path(shutil.copytree(tiny_bases("wan"), tmp_path / "base"))
    save_file(
        in_layout(load_file(base / WEIGHTS), tables_of("wan")[-1]),
        tmp_path / "one.safetensors",
    )
    return Lab(base, small_clips, tmp_path / "cache", tmp_path)


def command(
    lab: Lab, *sets: str, base: str = "one.safetensors", parts: str = "base"
) -> None:
    words = [f"base_parts={lab.tmp / parts}"] if parts else []
    knobs = [
        f"{key}={json.dumps(value)}"
        for key, value in (BASE | {"cache_dir": str(lab.cache), "steps": 2}).items()
    ]
    assert (
        run(
            "train",
            "--data",
            lab.clips,
            base=lab.tmp / base,
            out=lab.tmp / "run",
            set=[*knobs, *words, *sets],
        )
        == 0
    )


@pytest.mark.parametrize("change", [dict, scaled])
def test_a_merged_model_has_the_dtypes_of_its_file_and_bfloat16_for_fp8(
    change: Callable[[State], State], lab: Lab
) -> None:
    """Modules that diffusers keeps in float32 stay in it."""
    base = lab.tmp / "transformer"
    shutil.copytree(lab.model / "transformer", base)
    file = change(load_file(lab.tmp / "one.safetensors"))
    save_file(file, base / Path(WEIGHTS).name)
    net = on_meta(diffusers.WanTransformer3DModel, base)
    weight = "blocks.0.attn1.to_q.weight"
    doubled = {weight: lambda value: 2 * value}
    assert _merge_part(net, torch.bfloat16, base, doubled, lab.tmp / "out") == 1

    merged = load_file(lab.tmp / "out" / Path(WEIGHTS).name)
    before = load_file(lab.model / WEIGHTS)
    assert merged.keys() == before.keys()
    kept = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    for name, value in merged.items():
        is_fp8 = change is scaled and value.dim() == 2 and name.endswith(".weight")
        is_half = is_fp8 and not any(part in kept for part in name.split("."))
        assert value.dtype == (torch.bfloat16 if is_half else torch.float32), name
        wanted = before[name] * (2 if name == weight else 1)
        tolerance = 0.1 if is_fp8 else 0.0
        torch.testing.assert_close(
            value.float(), wanted, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("change", [dict, scaled])
def test_all_else_of_a_run_works(change: Any, lab: Lab) -> None:
    """Plan, check, train, resume, sample; exports are those of the folder; a changed
    file is noticed, a moved one is not.
    """
    file = lab.tmp / "one.safetensors"
    words = {"base": file, "set": f"base_parts={lab.model}"}
    save_file(change(load_file(file)), file)
    assert (
        run("plan", "--data", lab.clips, **words)
        == run("check", "--data", lab.clips, **words)
        == 0
    )
    command(lab)
    kept = json.loads((lab.tmp / "run" / "config.json").read_text())
    assert kept["base"]["name"] == kept["settings"]["base_model_name"] == str(file)
    file = file.rename(lab.tmp / "moved.safetensors")
    assert (
        run(
            "train",
            "--resume",
            out=lab.tmp / "run",
            set=["steps=3", f"base_model_name={file}"],
        )
        == 0
    )
    assert (
        run("sample", lab.tmp / "run", prompt="a circle", out=lab.tmp / "video.mp4")
        == 0
    )
    assert run("export", lab.tmp / "run", merge=True) == 0
    (merged,) = (lab.tmp / "run" / "export").glob("*-merged")
    base = json.loads((merged / "videotune.json").read_text())["base"]
    assert (base["name"], base["parts"]) == ("moved.safetensors", "base")
    own, truth = load_file(merged / WEIGHTS), in_float64(load_file(file))
    same = [
        torch.equal(value, truth[name])
        for name, value in in_layout(own, tables_of("wan")[-1]).items()
    ]
    assert 0 < sum(same) < len(same)
    assert set(own) == set(load_file(lab.model / WEIGHTS))
    save_file(
        {name: value.clone().fill_(1) for name, value in load_file(file).items()}, file
    )
    with pytest.raises(VideotuneError, match="has changed"):
        run("train", "--resume", out=lab.tmp / "run", set="steps=4")


def of(change: Callable[[State], State]) -> Callable[[Path], object]:
    return lambda path: save_file(change(load_file(path)), path)


def as_published(path: Path) -> None:
    """A file of Wan 2.1 1.3B's shapes, of which only the head is written."""
    net, head, end = (
        on_meta(
            diffusers.WanTransformer3DModel, CONFIGS / "wan2.1-t2v-1.3b" / "transformer"
        ),
        {},
        0,
    )
    for name, value in net.state_dict().items():
        place = {
            "dtype": "BF16",
            "shape": list(value.shape),
            "data_offsets": [end, end := end + 2 * value.numel()],
        }
        head[rename_key(name, tables_of("wan")[-1])] = place
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


KEY, MARK = (
    "blocks.0.ffn.0.weight",
    torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8),
)
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
    "a pickle": (lambda path: torch.save({"x": torch.zeros(2)}, path), "cannot be read"),
    "another size": (as_published, "wan2.1-t2v-1.3b"),
    "whole numbers": (of(lambda state: state | {KEY: state[KEY].to(torch.int8)}), "dtype I8"),
    "nvfp4": (of(lambda state: state | {"blocks.0.ffn.0.comfy_quant": MARK}), "in nvfp4"),
    "blocks of scales": (of(lambda state: state | {"blocks.0.ffn.0.weight_scale": torch.ones(2, 3)}), "shape 2x3"),
    "a tensor less": (of(lambda state: {name: state[name] for name in state if name != KEY}), "missing in the file"),
    **{name: (of(lambda _, own=own: {name: torch.zeros(2, 2) for name in own}), f"is {name}")  # type: ignore[misc]
       for name, own in DATA["kinds"].items()},
}  # fmt: skip
"""What is wrong with the file, and what is said of it."""


@pytest.mark.parametrize("how", SPOILT)
def test_a_wrong_file_is_one_sentence_and_nothing_is_written(
    how: str, lab: Lab
) -> None:
    spoil, words = SPOILT[how]
    spoil(lab.tmp / "one.safetensors")
    with pytest.raises(VideotuneError, match=words) as caught:
        command(lab)
    assert caught.value.exit_code == FAILED
    assert "one.safetensors" in str(caught.value)
    assert not (lab.tmp / "run" / "config.json").exists()
    assert {path.name for path in lab.cache.glob("*")} <= {"index.sqlite", "pictures"}


@pytest.mark.parametrize("how", DATA["together"])
def test_what_does_not_go_together(how: str, lab: Lab, tiny_bases: Bases) -> None:
    words, sets, said = DATA["together"][how].values()
    for name in ("one.gguf", "wan_high_noise_14B.safetensors"):
        shutil.copy(lab.tmp / "one.safetensors", lab.tmp / name)
    (lab.tmp / "two").symlink_to(tiny_bases("wan", "t2v-a14b"))
    with pytest.raises(VideotuneError, match=said) as caught:
        command(lab, *sets, **words)
    assert caught.value.exit_code == FAILED
    assert not (lab.tmp / "run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(value: float, tmp_path: Path) -> None:
    save_file(
        {"x.weight": torch.ones(2, 2), "x.scale_weight": torch.tensor(value)},
        path := tmp_path / "a.safetensors",
    )
    with pytest.raises(
        VideotuneError,
        match=r"a\.safetensors is damaged: x\.scale_weight is NaN or infinite",
    ):
        list(tensors(find_sources("", ["x.weight"], {path: headers([path])})))


@pytest.mark.parametrize("how", ["whole numbers", "a tensor less", "another size"])
def test_check_and_plan_refuse_a_wrong_file_already(how: str, lab: Lab) -> None:
    """Weights in int8, one shard of two, another size: by the file's header alone."""
    spoil, words = SPOILT[how]
    file = lab.tmp / "one.safetensors"
    settings = [f"base_parts={lab.model}", f"cache_dir={lab.cache}"]
    assert run("check", "--data", lab.clips, base=file, set=settings) == 0
    spoil(file)
    for command_name in ("check", "plan"):
        with pytest.raises(VideotuneError, match=words):
            run(command_name, "--data", lab.clips, base=file, set=settings)


@pytest.mark.parametrize("key", ["base_model_name", "base_parts", "transformer.file"])
def test_a_pipe_in_place_of_a_model_is_refused_in_words(key: str, lab: Lab) -> None:
    pipe = lab.tmp / "pipe.safetensors"
    os.mkfifo(pipe)
    settings = {
        "base_model_name": str(lab.tmp / "one.safetensors"),
        "base_parts": str(lab.model),
    }
    if key == "transformer.file":
        settings = {"base_model_name": str(lab.model)}
    settings[key] = str(pipe)
    sets = [f"{name}={value}" for name, value in settings.items()]
    with pytest.raises(VideotuneError, match="named pipe"), limited(10):
        run("check", "--data", lab.clips, set=sets)


def test_settings_of_a_run_without_a_base_model_are_refused_in_words() -> None:
    """As in a config.json that was edited by hand."""
    with pytest.raises(VideotuneError, match="base_model_name"):
        place_of({"base_model_name": None})
