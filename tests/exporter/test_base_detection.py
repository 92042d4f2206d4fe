"""To which base model and which expert an adapter file belongs: by its tensors' shapes,
its header and its name.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support import lora_files
from videotune.errors import VideotuneError
from videotune.exporter.adapter_file import AdapterFile
from videotune.exporter.adapter_modules import group_by_module
from videotune.exporter.base_detection import (
    Base,
    base_of_header,
    candidate_bases,
    detect_expert,
    find_fitting_bases,
    load_architecture,
    misfits,
    open_adapter,
    other_model_of_adapter,
)
from videotune.exporter.lora_inspect import open_modules
from videotune.models.base_model import CONFIGS

Tensors = dict[str, torch.Tensor]

LTX_WIDTH = 2048
"""Width of LTX-Video 2B."""

LTX_2B = ("Lightricks/LTX-Video",)
LTX_13B = ("Lightricks/LTX-Video-0.9.7-dev",)


def lora_pair(module: str, rows: int, columns: int) -> Tensors:
    """Return A and B of rank 1 for a module."""
    return {
        f"{module}.lora_A.weight": torch.ones(1, columns),
        f"{module}.lora_B.weight": torch.ones(rows, 1),
    }


def adapter(
    path: Path, tensors: Tensors, header: dict[str, str] | None = None, **facts: Any
) -> AdapterFile:
    """Write a file with videotune's facts in its header, and open it."""
    metadata = dict(header or {})
    if facts:
        metadata["videotune"] = json.dumps(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata)
    return AdapterFile(path)


def base_folder(folder: Path, config: str, **transformer: int) -> Path:
    """Copy a published model's configs, with other sizes of its transformer."""
    shutil.copytree(CONFIGS / config, folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | transformer))
    return folder


def names_of(bases: list[Base]) -> list[tuple[str, ...]]:
    return [base.names for base in bases]


# which files are adapters


@pytest.mark.parametrize(
    ("name", "is_adapter"),
    [
        ("blocks.0.lora_A.weight", True),
        ("blocks.0.lora_down.weight", True),
        ("blocks.0.hada_w1_a", True),
        ("blocks.0.lokr_w1", True),
        ("blocks.0.oft_R.weight", True),
        ("blocks.0.weight", False),
        ("lora_layers.0.weight", False),
    ],
)
def test_an_adapter_is_known_by_the_names_of_its_tensors(
    name: str, is_adapter: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x.bias": torch.ones(1), name: torch.ones(2, 2)}, path)
    if is_adapter:
        assert set(open_adapter(path).tensors) == {"x.bias", name}
        return
    with pytest.raises(VideotuneError):
        open_adapter(path)


def test_numbers_that_are_not_finite_are_refused_unless_they_are_wanted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x.lora_A.weight": torch.tensor([[float("nan")]])}, path)
    with pytest.raises(VideotuneError):
        open_adapter(path)
    assert open_adapter(path, finite=False).tensors["x.lora_A.weight"].isnan().all()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.touch()
    os.truncate(path, (8 << 30) + 1)  # bytes that are not on the disk
    with pytest.raises(VideotuneError, match="too large"):
        open_adapter(path)
    with pytest.raises(VideotuneError, match="no such file"):
        open_adapter(tmp_path / "absent.safetensors")


# models that are not trained


@pytest.mark.parametrize(
    "key",
    [
        "modelspec.architecture",
        "ss_base_model_version",
        "ss_network_module",
        "base_model",
    ],
)
def test_a_header_names_another_model(key: str, tmp_path: Path) -> None:
    tensors = lora_pair("transformer.blocks.0.attn1.to_k", 24, 24)
    file = adapter(tmp_path / "a.safetensors", tensors, {key: "Wan Animate"})
    assert other_model_of_adapter(file) == "Wan Animate"

    known = adapter(tmp_path / "b.safetensors", tensors, {key: "wan2.1"})
    assert other_model_of_adapter(known) is None
    elsewhere = adapter(tmp_path / "c.safetensors", tensors, {"title": "Wan Animate"})
    assert other_model_of_adapter(elsewhere) is None


def test_tensors_decide_before_the_header_and_an_earlier_key_before_a_later_one(
    tmp_path: Path,
) -> None:
    header = {"base_model": "FramePack", "modelspec.architecture": "Wan Animate"}
    plain = lora_pair("transformer.blocks.0.attn1.to_k", 24, 24)
    file = adapter(tmp_path / "a.safetensors", plain, header)
    assert other_model_of_adapter(file) == "Wan Animate"

    sound = lora_pair("audio_injector.0.to_k", 24, 24)
    file = adapter(tmp_path / "b.safetensors", plain | sound, header)
    assert other_model_of_adapter(file) == "Wan S2V"


# candidates


def test_published_bases_of_one_family() -> None:
    """By the names of repositories; "hidream-i1-full" is none."""
    assert names_of(list(candidate_bases(family="ltx_video"))) == [LTX_13B, LTX_2B]
    (hidream,) = candidate_bases(family="hidream")
    assert hidream.names == ("HiDream-ai/HiDream-I1-Full",)
    assert hidream.family.spec.name == "hidream"


def test_a_base_that_is_named_is_the_only_candidate(
    tiny_bases: Callable[..., Path],
) -> None:
    folder = tiny_bases("wan")
    (base,) = candidate_bases(str(folder), "ltx_video")
    assert base.names == (str(folder),)
    assert base.family.spec.name == "wan"
    assert base.family.folder == folder
    assert {weight.device.type for weight in base.net.parameters()} == {"meta"}


# the header's base model


def test_the_header_names_a_base_model_of_this_machine(
    tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    folder = str(tiny_bases("wan"))
    tensors = lora_pair("transformer.blocks.0.attn1.to_k", 24, 24)

    def named(base: Any) -> Base | None:
        return base_of_header(adapter(tmp_path / "a.safetensors", tensors, base=base))

    base = named({"name": folder})
    assert base is not None
    assert base.names == (folder,)
    assert base.family.spec.name == "wan"
    toy = named({"name": "asset:toy"})
    assert toy is not None
    assert toy.names == ("asset:toy",)

    for stranger in (folder, {"name": 5}, {}, [folder], {"name": "asset:none"}):
        assert named(stranger) is None
    assert base_of_header(adapter(tmp_path / "b.safetensors", tensors)) is None


def test_a_folder_that_is_no_base_model_is_not_the_headers_base(tmp_path: Path) -> None:
    tensors = lora_pair("transformer.blocks.0.attn1.to_k", 24, 24)
    folder = tmp_path / "base"
    (folder / "model_index.json").mkdir(parents=True)
    named = {"name": str(folder)}
    assert base_of_header(adapter(tmp_path / "a.safetensors", tensors, base=named)) is None  # fmt: skip

    (folder / "model_index.json").rmdir()
    (folder / "model_index.json").write_text("{")
    assert base_of_header(adapter(tmp_path / "a.safetensors", tensors, base=named)) is None  # fmt: skip


@pytest.mark.parametrize(("length", "is_read"), [(1000, True), (1001, False)])
def test_a_name_of_more_than_1000_characters_is_not_read(
    length: int, is_read: bool, tiny_bases: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path
    while len(str(folder)) < length - 220:
        folder /= "d" * 200
    folder /= "e" * (length - len(str(folder)) - 1)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(tiny_bases("wan"))
    assert len(str(folder)) == length

    tensors = lora_pair("transformer.blocks.0.attn1.to_k", 24, 24)
    file = adapter(tmp_path / "a.safetensors", tensors, base={"name": str(folder)})
    assert (base_of_header(file) is not None) == is_read


# what fits


def test_each_module_that_does_not_fit_is_named_with_both_sizes(
    family: Any, tmp_path: Path
) -> None:
    base = load_architecture(family.folder, ("tiny",))
    block = "transformer.blocks.0.attn1"
    file = adapter(
        tmp_path / "a.safetensors",
        lora_pair(f"{block}.to_q", 24, 24)
        | lora_pair(f"{block}.to_k", 24, 16)
        | lora_pair(f"{block}.to_v", 8, 24)
        | lora_pair("transformer.absent", 24, 24)
        | lora_pair("transformer.blocks.0.ffn.net.2", 24, 24)
        | {f"{block}.to_q.alpha": torch.tensor(1.0)}
        | {f"{block}.to_out.0.oft_R.weight": torch.ones(1, 1000 * 999 // 2)},
    )
    reasons = misfits(base, group_by_module(file)[0])

    assert set(reasons) == {
        f"{block}.to_k",
        f"{block}.to_v",
        f"{block}.to_out.0",
        "transformer.absent",
        "transformer.blocks.0.ffn.net.2",
    }
    for module, size in ((f"{block}.to_k", "24x16"), (f"{block}.to_v", "8x24")):
        assert size in reasons[module]
        assert "24x24" in reasons[module]
    rows, columns = base.net.get_submodule("blocks.0.ffn.net.2").weight.shape
    assert rows != columns
    assert f"{rows}x{columns}" in reasons["transformer.blocks.0.ffn.net.2"]

    # OFT stores rotations, which have no size to compare; the network lacks the second.
    rotation, _, size = reasons[f"{block}.to_out.0"].partition(",")
    assert "rotations" in rotation
    assert "24x24" in size
    assert not re.search(r"\dx\d", reasons["transformer.absent"])


def one_attention(path: Path, width: int, **facts: Any) -> AdapterFile:
    """A file whose only module has the name that CogVideoX and LTX-Video share."""
    module = "transformer.transformer_blocks.0.attn1.to_k"
    return adapter(path, lora_pair(module, width, width), **facts)


@pytest.mark.parametrize(
    ("family_of_header", "nearest"),
    [("cogvideox", "cogvideox"), ("ltx_video", "ltx_video"), ("other", "ltx_video")],
)
def test_of_two_families_that_fit_the_headers_is_nearest(
    family_of_header: str, nearest: str, tmp_path: Path
) -> None:
    """Where neither is, the base with fewer modules is: 28 blocks against 30 larger
    ones.
    """
    folder = base_folder(tmp_path / "cog", "cogvideox-2b", num_attention_heads=32)
    file = one_attention(
        tmp_path / "a.safetensors",
        LTX_WIDTH,
        family=family_of_header,
        base={"name": str(folder)},
    )
    fits, nearest_base, reasons = find_fitting_bases(file, None, None)

    families = {base.family.spec.name for base in fits}
    assert families == {"cogvideox", "ltx_video"}
    assert fits[0].family.spec.name == nearest
    assert nearest_base is fits[0]
    assert reasons == {}

    # A base that is named is the only one, whatever the header says.
    ltx = str(CONFIGS / "ltx-video-2b")
    assert names_of(find_fitting_bases(file, ltx, None)[0]) == [(ltx,)]


@pytest.mark.parametrize(
    ("key", "name", "family"),
    [
        ("ss_base_model_version", "ltx2", "ltx2"),
        ("modelspec.architecture", "LTX-2.3/lora", "ltx2"),
        ("ss_base_model_version", "ltx-video", "ltx_video"),
    ],
)
def test_a_trainers_header_tells_ltx_2_from_ltx_video(
    key: str, name: str, family: str, tmp_path: Path
) -> None:
    """A LoRA on the attention of the video fits LTX-Video 13B and LTX-2 alike."""
    module = "diffusion_model.transformer_blocks.0.attn1.to_q"
    file = adapter(
        tmp_path / "a.safetensors", lora_pair(module, 4096, 4096), {key: name}
    )
    assert open_modules(file.path, None, None)[1].family.spec.name == family

    unnamed = adapter(tmp_path / "b.safetensors", lora_pair(module, 4096, 4096))
    with pytest.raises(VideotuneError):
        open_modules(unnamed.path, None, None)


def modules_of(base: Base) -> int:
    linear = [net for net in base.net.modules() if isinstance(net, torch.nn.Linear)]
    return len(linear)


def test_a_family_narrows_the_published_bases(tmp_path: Path) -> None:
    file = one_attention(tmp_path / "a.safetensors", LTX_WIDTH)
    assert names_of(find_fitting_bases(file, None, "ltx_video")[0]) == [LTX_2B]

    fits, nearest, reasons = find_fitting_bases(file, None, "cogvideox")
    assert fits == []
    assert nearest.family.spec.name == "cogvideox"
    assert len(reasons) == 1


def test_the_base_with_the_fewest_misfits_is_nearest(tmp_path: Path) -> None:
    """Two modules of 13 billion parameters' width and one of 2 billion's."""
    block = "transformer.transformer_blocks.0.attn1"
    file = adapter(
        tmp_path / "a.safetensors",
        lora_pair(f"{block}.to_q", 4096, 4096)
        | lora_pair(f"{block}.to_k", 4096, 4096)
        | lora_pair(f"{block}.to_v", LTX_WIDTH, LTX_WIDTH),
    )
    fits, nearest, reasons = find_fitting_bases(file, None, "ltx_video")
    assert fits == []
    assert nearest.names == LTX_13B
    assert set(reasons) == {f"{block}.to_v"}


def test_of_bases_that_fit_the_one_with_the_fewest_other_modules_is_nearest(
    tmp_path: Path,
) -> None:
    module = "transformer.blocks.0.attn1.to_k"
    file = adapter(tmp_path / "a.safetensors", lora_pair(module, 5120, 5120))
    fits, nearest, _ = find_fitting_bases(file, None, "wan")
    counts = [modules_of(base) for base in fits]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert nearest is fits[0]


def test_a_file_of_an_expert_fits_the_bases_that_have_it(tmp_path: Path) -> None:
    module = "transformer.blocks.0.attn1.to_k"
    tensors = lora_pair(module, 5120, 5120)
    without = adapter(tmp_path / "a.safetensors", tensors)
    names = names_of(find_fitting_bases(without, None, "wan")[0])
    assert ("Wan-AI/Wan2.1-T2V-14B-Diffusers",) in names

    high = adapter(tmp_path / "high_noise.safetensors", tensors)
    fits, nearest, _ = find_fitting_bases(high, None, "wan")
    assert set(names_of(fits)) == {
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
        ("Wan-AI/Wan2.2-I2V-A14B-Diffusers",),
    }
    assert nearest is fits[0]

    # A width that only bases without experts have: they fit nevertheless.
    small = adapter(tmp_path / "low_noise.safetensors", lora_pair(module, 1536, 1536))
    names = names_of(find_fitting_bases(small, None, "wan")[0])
    assert ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",) in names


# the expert


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("style_high_noise", "high"),
        ("style-LOW-Noise-v2", "low"),
        ("HighNoise", "high"),
        ("low noise", "low"),
        ("high_high_noise", "high"),
        ("high", None),
        ("noise", None),
        ("highly_noise", None),
        ("high__noise", None),
        ("high_noise_and_low_noise", None),
        ("high_noise_high_noise", "high"),
        ("style", None),
    ],
)
def test_an_expert_by_the_name_of_the_file(
    name: str, expert: str | None, tmp_path: Path
) -> None:
    """The folder's name does not count: it may hold anything."""
    tensors = lora_pair("blocks.0.attn1.to_k", 24, 24)
    file = adapter(tmp_path / "low_noise" / f"{name}.safetensors", tensors)
    source = "file name" if expert else ""
    assert detect_expert(file) == (expert, source)


def test_an_expert_by_the_name_of_pefts_folder(family: Any, tmp_path: Path) -> None:
    """Its file is always called adapter_model."""
    tensors = lora_pair("base_model.model.blocks.0.attn1.to_k", 24, 24)
    folder = tmp_path / "Style_High_Noise"
    file = adapter(folder / "adapter_model.safetensors", tensors)
    assert detect_expert(file) == (None, "")

    (folder / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    assert detect_expert(AdapterFile(folder)) == ("high", "file name")


def test_the_header_decides_the_expert_before_the_name(
    family: Any, tmp_path: Path
) -> None:
    tensors = lora_pair("blocks.0.attn1.to_k", 24, 24)
    path = tmp_path / "low_noise.safetensors"
    assert detect_expert(adapter(path, tensors, expert="high")) == ("high", "header")
    assert detect_expert(adapter(path, tensors, expert=["high"])) == (
        "low",
        "file name",
    )
    long = adapter(path, tensors, expert="abcdefghijklmnopqrstuvwxyz")
    assert detect_expert(long) == ("abcdefghijklmnopqrst", "header")


def test_a_file_as_others_write_it_belongs_to_its_tiny_base(
    family: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    lora_files.peft_file(family, path)
    fits, nearest, reasons = find_fitting_bases(
        open_adapter(path), str(family.folder), None
    )
    assert names_of(fits) == [(str(family.folder),)]
    assert nearest is fits[0]
    assert reasons == {}
