"""Text encoders and VAEs from the files that people have: every layout gives what the
base model's own folder gives, or a sentence.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.families import FAMILIES
from tests.support.part_files import authors_umt5, scaled_fp8, stored
from videotune.errors import VideotuneError
from videotune.files import user_cache
from videotune.job.overrides import Overrides, resolve_config
from videotune.models.other_models import NotTrained
from videotune.trainer.build import open_models

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache()


def opened(base: Path, **keys: Any) -> Any:
    """The family with files in the place of parts."""
    sets = [f"base_model_name={base}", "train_dtype=FLOAT_32", "datasets=[]"]
    for key, value in keys.items():
        sets.append(f"{key.replace('__', '.')}={value}")
    resolved, spec, place = resolve_config(Overrides(sets=tuple(sets)))
    return open_models(spec, place, resolved.config)


def text_states(family: Any) -> torch.Tensor:
    return family.encode_text(["a red circle moves left"])[0]["text"]


def of_fp8(state: State) -> State:
    return {
        name: value.float() * state[name.replace(".weight", ".scale_weight")]
        if value.dtype == torch.float8_e4m3fn and name != "scaled_fp8"
        else value
        for name, value in state.items()
        if "scale" not in name
    }


LAYOUTS = (
    "transformers",
    "with a vocabulary",
    "authors",
    "authors, pickled",
    "pickled",
    "pickled long ago",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_encoder_in_each_layout(
    layout: str, tiny_bases: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    """Another encoder than the base's own, so that the file is what counts."""
    from videotune.models.wan import Wan

    base = tiny_bases("wan")
    other = Wan.tiny(tmp_path / "other", seed=5)
    state = stored(other / "text_encoder")
    state.pop("encoder.embed_tokens.weight", None)
    if "authors" in layout:
        state = authors_umt5(state)
    if layout == "with a vocabulary":
        state["spiece_model"] = torch.zeros(40, dtype=torch.uint8)
    file = tmp_path / f"umt5.{'pth' if 'pickled' in layout else 'safetensors'}"
    if "pickled" in layout:
        torch.save(state, file, _use_new_zipfile_serialization="ago" not in layout)
    else:
        save_file(state, file)

    family = opened(base, text_encoder__file=file)
    wanted = text_states(opened(other))
    assert torch.equal(text_states(family), wanted)
    assert not torch.allclose(text_states(opened(base)), wanted)
    assert (cache / "parts").is_dir() == (layout != "transformers")
    prints = family.fingerprints()
    own = opened(base).fingerprints()
    assert {part for part in own if own[part] != prints[part]} == {"text_encoder"}

    before = sorted(cache.rglob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in before]
    opened(base, text_encoder__file=file)
    assert [path.stat().st_mtime_ns for path in before] == times, "converted once"


def test_a_text_encoder_in_fp8_with_scales(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_bases("wan")
    state = stored(base / "text_encoder")
    state.pop("encoder.embed_tokens.weight", None)
    rounded = scaled_fp8(state)
    save_file(rounded, tmp_path / "fp8.safetensors")
    exact = {
        name: value.bfloat16() if rounded[name].dtype == torch.float8_e4m3fn else value
        for name, value in of_fp8(rounded).items()
        if name in state
    }
    save_file(exact, tmp_path / "exact.safetensors")
    states = [
        text_states(opened(base, text_encoder__file=tmp_path / f"{name}.safetensors"))
        for name in ("fp8", "exact")
    ]
    assert torch.equal(*states)
    assert not torch.equal(states[0], text_states(opened(base)))


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video15", "hidream"])
def test_each_of_several_encoders(
    name: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_bases(name)
    family = opened(base)
    parts = list(family.text_encoders)
    wanted = text_states(family)
    files: list[str | None] = [None] * len(parts)
    for index, part in enumerate(parts):
        if family.text_encoders[part] not in ("LlamaModel", "T5EncoderModel"):
            continue
        state = stored(base / part)
        state.pop("encoder.embed_tokens.weight", None)
        if family.text_encoders[part] == "LlamaModel":
            state = {f"model.{key}": value for key, value in state.items()}
        files[index] = str(tmp_path / f"{part}.safetensors")
        save_file(state, files[index])
    assert any(files)
    assert torch.equal(
        text_states(opened(base, text_encoder__file=json.dumps(files))), wanted
    )
    with pytest.raises(VideotuneError, match=rf"{len(parts)} text"):
        opened(base, text_encoder__file=files[0] or files[1])


RESIDUAL = {
    "norm1.": "residual.0.", "conv1.": "residual.2.", "norm2.": "residual.3.", "conv2.": "residual.6.",
    "conv_shortcut.": "shortcut.",
}  # fmt: skip
OTHERS = (
    (r"^quant_conv\.", "conv1."), (r"^post_quant_conv\.", "conv2."), (r"\.conv_in\.", ".conv1."),
    (r"\.norm_out\.", ".head.0."), (r"\.conv_out\.", ".head.2."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
)  # fmt: skip


def authors_wan_vae(state: State) -> State:
    """In the names of Wan's authors (wan/modules/vae.py): one list of layers each way."""
    result = {}
    for name, value in state.items():
        place = name
        match = re.fullmatch(
            r"(.+)\.(norm[12]\.|conv[12]\.|conv_shortcut\.)(\w+)", name
        )
        if match:
            place = f"{match[1]}.{RESIDUAL[match[2]]}{match[3]}"
        place = re.sub(
            r"mid_block\.resnets\.(\d)", lambda m: f"middle.{2 * int(m[1])}", place
        )
        place = place.replace("encoder.down_blocks.", "encoder.downsamples.")
        place = re.sub(
            r"up_blocks\.(\d)\.resnets\.(\d)",
            lambda m: f"upsamples.{4 * int(m[1]) + int(m[2])}",
            place,
        )
        place = re.sub(
            r"up_blocks\.(\d)\.upsamplers\.0",
            lambda m: f"upsamples.{4 * int(m[1]) + 3}",
            place,
        )
        for pattern, replacement in OTHERS:
            place = re.sub(pattern, replacement, place)
        result[place] = value
    return result


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_the_authors_wan_vae_by_diffusers_converter(
    ending: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Of the published number of layers, narrow."""
    from diffusers import AutoencoderKLWan

    base = shutil.copytree(tiny_bases("wan"), tmp_path / "base")
    torch.manual_seed(3)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    shutil.rmtree(base / "vae")
    vae.save_pretrained(base / "vae")
    family = opened(base)
    clip = torch.rand(3, 5, 32, 32) * 2 - 1
    wanted = family.encode_video(clip).mean
    file = tmp_path / f"Wan2.1_VAE.{ending}"
    state = authors_wan_vae(vae.state_dict())
    assert not set(state) & set(vae.state_dict())
    if ending == "pth":
        torch.save(state, file)
    else:
        save_file(state, file)
    torch.nn.init.ones_(vae.encoder.conv_in.weight)
    vae.save_pretrained(base / "vae")
    assert not torch.allclose(opened(base).encode_video(clip).mean, wanted)
    assert torch.equal(opened(base, vae__file=file).encode_video(clip).mean, wanted)


@pytest.mark.parametrize("form", ["safetensors", "pth", "bf16"])
def test_a_vae_in_diffusers_layout(
    form: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    from videotune.models.wan import Wan

    base = tiny_bases("wan")
    other = Wan.tiny(tmp_path / "other", seed=5)
    state = stored(other / "vae")
    if form == "bf16":
        state = {name: value.bfloat16() for name, value in state.items()}
    file = tmp_path / f"vae.{'pth' if form == 'pth' else 'safetensors'}"
    if form == "pth":
        torch.save({"state_dict": state}, file)
    else:
        save_file(state, file)
    clip = torch.rand(3, 5, 32, 32) * 2 - 1
    family = opened(base, vae__file=file)
    wanted = opened(other).encode_video(clip).mean
    found = family.encode_video(clip).mean
    assert torch.allclose(found, wanted, atol=2e-2 if form == "bf16" else 0)
    assert not torch.allclose(found, opened(base).encode_video(clip).mean, atol=5e-2)
    prints = family.fingerprints()
    own = opened(base).fingerprints()
    assert {part for part in own if own[part] != prints[part]} == {"vae"}


class Harmful:
    def __reduce__(self) -> Any:
        return (Path("/tmp/harm").touch, ())


def test_wrong_files_are_one_sentence(
    tiny_bases: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    base = tiny_bases("wan")

    def refused(key: str, file: Path, match: str) -> None:
        with pytest.raises(VideotuneError, match=match) as error:
            opened(base, **{key.replace(".", "__"): file})
        assert str(error.value).startswith(key)
        assert not list((cache / "parts").glob("*")), "nothing is left behind"

    refused("vae.file", tmp_path / "none.safetensors", "no such file")
    for key in ("vae.file", "text_encoder.file"):
        path = tmp_path / "x.gguf"
        path.write_bytes(b"GGUF")
        refused(key, path, r"must be a \.safetensors file")
        path = tmp_path / "x.safetensors"
        path.write_bytes(b"\0" * 40)
        refused(key, path, "x.safetensors")
        save_file({"blocks.0.weight": torch.ones(2)}, path)
        refused(key, path, "x.safetensors")
        path = tmp_path / "harm.pth"
        torch.save({"a": Harmful()}, path)
        refused(key, path, "without running code")
        torch.save({"a": torch.eye(3).to_sparse()}, path)
        refused(key, path, "no weights by name")
        torch.save({"a": torch.ones(2), "b": {"c": 1}}, path)
        refused(key, path, "no weights by name")
        torch.save([1, 2], path)
        refused(key, path, "no weights by name")
        path.write_bytes(b"not a pickle")
        refused(key, path, "without running code")
    assert not Path("/tmp/harm").exists()

    path = tmp_path / "animate.safetensors"
    save_file({"face_adapter.0.to_q.weight": torch.ones(2, 2)}, path)
    with pytest.raises(NotTrained):
        opened(base, vae__file=path)
    wider = {
        name: torch.cat([value, value]) if value.ndim == 2 else value
        for name, value in stored(base / "text_encoder").items()
    }
    save_file({name: value.clone() for name, value in wider.items()}, path)
    refused("text_encoder.file", path, "does not fit")


def lora_of(transformer: State) -> State:
    """A LoRA over a few matrices of a transformer."""
    matrices = [name for name, value in transformer.items() if value.ndim == 2]
    lora: State = {}
    for name in matrices[:4]:
        module = f"transformer.{name.removesuffix('.weight')}"
        lora[f"{module}.lora_A.weight"] = torch.zeros(2, transformer[name].shape[1])
        lora[f"{module}.lora_B.weight"] = torch.zeros(transformer[name].shape[0], 2)
    return lora


@FAMILIES
def test_a_file_of_another_kind_is_refused_before_it_is_read(
    name: str, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """By its file and key, and with the key that takes it; a library would report its own
    missing weights, or tensors without data.
    """
    base = tiny_bases(name)
    family = opened(base)
    text_encoder, *other_encoders = family.text_encoders
    transformer = stored(base / "transformer")
    contents = {
        "transformer": transformer,
        "vae": stored(base / "vae"),
        "text_encoder": stored(base / text_encoder),
        "lora": lora_of(transformer),
    }
    no_files = {
        "text_encoder": [None] * len(other_encoders),
        "transformer": [None] * (len(family.spec.experts) - 1),
    }
    for kind, state in contents.items():
        file = tmp_path / f"{kind}.safetensors"
        save_file(state, file)
        right_key = {"lora": "base_loras"}.get(kind, f"{kind}.file")
        for part in ("vae", "text_encoder", "transformer"):
            if part == kind:
                continue
            key = f"{part}.file"
            value = file
            if no_files.get(part):
                value = json.dumps([str(file), *no_files[part]])
            with pytest.raises(VideotuneError) as error:
                opened(base, **{f"{part}__file": value})
            message = str(error.value)
            assert message.startswith(f"{key}: {file} is a"), message
            assert f"Set {key} to the file of" in message
            if kind != "transformer":
                assert f"given as {right_key}" in message


def test_a_vae_in_a_checkpoint_of_several_parts_is_no_transformer(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    """Most keys of such a file are the transformer's; the library takes the VAE's."""
    base = tiny_bases("ltx_video")
    transformer = stored(base / "transformer")
    vae = {f"vae.{name}": value for name, value in stored(base / "vae").items()}
    file = tmp_path / "all.safetensors"
    save_file({**transformer, **vae}, file)
    with pytest.raises(VideotuneError) as error:
        opened(base, vae__file=file)
    assert "is not read by" in str(error.value), "a tiny VAE is in no author's layout"
