"""Parts of a base model from a folder such as ComfyUI's ``models``, by what files hold."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.part_files import authors_umt5, scaled_fp8, stored
from videotune.errors import VideotuneError
from videotune.exporter.single_file_export import in_one_layout
from videotune.job.overrides import Overrides, resolve_config
from videotune.models import models_folder
from videotune.models.wan import Wan
from videotune.trainer.build import open_models
from videotune.user_settings import settings_file

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def resolved(base: Path, folder: Path | None, *sets: str) -> Any:
    keys = (f"base_model_name={base}", "train_dtype=FLOAT_32", "datasets=[]", *sets)
    return resolve_config(Overrides(sets=keys, models_folder=folder))


def files_of(config: Any) -> list[Any]:
    return [config.transformer.file, config.text_encoder.file, config.vae.file]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another model of the same shapes, whose weights lie in the folder."""
    return Wan.tiny(tmp_path / "other", seed=7)


@pytest.fixture
def comfyui(tmp_path: Path, other: Path, tiny_bases: Callable[..., Path]) -> Path:
    """ComfyUI's folder: the parts in the names that it has there, and other files."""
    folder = tmp_path / "models"
    for name in ("diffusion_models", "text_encoders", "vae", "loras"):
        (folder / name).mkdir(parents=True)
    transformer = in_one_layout(stored(other / "transformer"), Wan.original_names)
    save_file(transformer, folder / "diffusion_models" / "wan_tiny.safetensors")
    encoder = stored(other / "text_encoder")
    encoder.pop("encoder.embed_tokens.weight", None)
    save_file(authors_umt5(encoder), folder / "text_encoders" / "umt5.safetensors")
    save_file(stored(other / "vae"), folder / "vae" / "vae.safetensors")

    ltx = tiny_bases("ltx_video")
    save_file(
        stored(ltx / "transformer"), folder / "diffusion_models" / "ltx.safetensors"
    )
    save_file(stored(ltx / "vae"), folder / "vae" / "ltx.safetensors")
    save_file({"a.lora_A.weight": torch.ones(2, 2)}, folder / "loras" / "x.safetensors")
    (folder / "loras" / "damaged.safetensors").write_bytes(b"\0" * 30)
    (folder / "vae" / "note.txt").write_text("nothing")
    return folder


def test_each_part_is_found_by_what_the_file_holds(
    comfyui: Path, other: Path, tiny_bases: Callable[..., Path]
) -> None:
    settings, spec, place = resolved(tiny_bases("wan"), comfyui)
    assert files_of(settings.config) == [
        str(comfyui / "diffusion_models" / "wan_tiny.safetensors"),
        str(comfyui / "text_encoders" / "umt5.safetensors"),
        str(comfyui / "vae" / "vae.safetensors"),
    ]
    family = open_models(spec, place, settings.config)
    truth_settings, truth_spec, truth_place = resolved(other, None)
    truth = open_models(truth_spec, truth_place, truth_settings.config)
    text = "a red circle"
    assert torch.equal(
        family.encode_text([text])[0]["text"], truth.encode_text([text])[0]["text"]
    )
    net, true_net = family.denoiser().state_dict(), truth.denoiser().state_dict()
    assert all(torch.equal(net[name], true_net[name]) for name in true_net)


def test_a_relative_folder_gives_paths_that_are_valid_anywhere(
    comfyui: Path, tiny_bases: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(comfyui.parent)
    settings, _, _ = resolved(tiny_bases("wan"), Path(comfyui.name))
    assert all(Path(file).is_absolute() for file in files_of(settings.config))


def test_linked_folders_are_searched_once(
    comfyui: Path, tmp_path: Path, tiny_bases: Callable[..., Path]
) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "models").symlink_to(comfyui)
    (comfyui / "loop").symlink_to(linked)
    settings, _, _ = resolved(tiny_bases("wan"), linked)
    assert all(files_of(settings.config))


def test_a_named_file_is_not_looked_for(
    comfyui: Path, tiny_bases: Callable[..., Path]
) -> None:
    own = tiny_bases("wan") / "vae"
    (file,) = own.glob("*.safetensors")
    settings, _, _ = resolved(tiny_bases("wan"), comfyui, f"vae.file={file}")
    assert settings.config.vae.file == str(file)
    assert settings.config.text_encoder.file is not None


def test_of_several_files_the_user_chooses(
    comfyui: Path, tiny_bases: Callable[..., Path]
) -> None:
    encoders = comfyui / "text_encoders"
    state = load_file(encoders / "umt5.safetensors")
    save_file(scaled_fp8(state), encoders / "umt5_fp8.safetensors")
    with pytest.raises(
        VideotuneError, match="2 files fit the base model's text_encoder"
    ):
        resolved(tiny_bases("wan"), comfyui)
    chosen = encoders / "umt5_fp8.safetensors"
    settings, _, _ = resolved(tiny_bases("wan"), comfyui, f"text_encoder.file={chosen}")
    assert settings.config.text_encoder.file == str(chosen)


def test_experts_are_told_apart_by_their_names(
    tmp_path: Path, tiny_bases: Callable[..., Path]
) -> None:
    base = tiny_bases("wan", "t2v-a14b")
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("low_noise", "high_noise", "of_nobody"):
        save_file(stored(base / "transformer"), folder / f"wan_{name}.safetensors")
    settings, _, _ = resolved(base, folder)
    assert settings.config.transformer.file == [
        str(folder / "wan_high_noise.safetensors"),
        str(folder / "wan_low_noise.safetensors"),
    ]


def test_the_folder_is_remembered_for_what_is_not_here(
    comfyui: Path, tmp_path: Path, tiny_bases: Callable[..., Path]
) -> None:
    base = tiny_bases("wan")
    assert models_folder.remembered() is None
    resolved(base, comfyui)
    assert models_folder.remembered() == comfyui
    settings, _, _ = resolved(base, None)
    assert files_of(settings.config) == [None, None, None], (
        "the base's weights are here"
    )

    bare = shutil.copytree(base, tmp_path / "bare")
    for part in ("transformer", "text_encoder", "vae"):
        for file in (bare / part).glob("*.safetensors"):
            file.unlink()
    settings, _, _ = resolved(bare, None)
    assert all(files_of(settings.config))

    settings_file().write_text(json.dumps({"models_folder": "/nowhere"}))
    assert models_folder.remembered() is None
    settings_file().write_text(json.dumps([1]))
    assert models_folder.remembered() is None


def test_a_folder_that_is_not_there_or_too_full(
    tmp_path: Path, tiny_bases: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VideotuneError, match="no such folder"):
        resolved(tiny_bases("wan"), tmp_path / "none")
    monkeypatch.setattr(models_folder, "MOST_FILES", 1)
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    with pytest.raises(VideotuneError, match="more than 1 files"):
        resolved(tiny_bases("wan"), tmp_path)
    assert models_folder.remembered() is None
