"""Models that videotune does not train are told by their names, and never taken for a
model that is spelled like them.
"""

import json
import re
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from videotune.commands.autopsy import autopsy
from videotune.commands.import_config import import_config
from videotune.exporter.lora_inspect import inspect, open_modules
from videotune.models import hub
from videotune.models.base import FAMILIES
from videotune.models.base_model import place, spec_for
from videotune.models.model_files import CONFIGS, read_config
from videotune.models.other_models import (
    NotTrained,
    other_model_of_keys,
    other_model_of_name,
    other_model_of_pipeline,
    trained_models,
)
from videotune.models.registry import find, names

OTHERS = {
    "ltx-2-spatial-upscaler-x2-1.0.safetensors": "LTX-2's upscalers",
    "/models/ltx-2.3-temporal-upscaler-x2-1.0.safetensors": "LTX-2's upscalers",
    "MiniMaxAI/MiniMax-H3": "MiniMax H3",
    "minimax_h3": "MiniMax H3",
    "nvidia/Cosmos-Predict2.5-2B": "Cosmos",
    "fpack_train_network.py": "FramePack",
    "kandinskylab/Kandinsky-5.0-T2I-Lite": "Kandinsky 5 for images",
    "k5-lite-i2i-hd": "Kandinsky 5 for images",
    "Wan-AI/Wan2.2-S2V-14B": "Wan S2V",
    "genmo/mochi-1-preview": "Mochi",
    "black-forest-labs/FLUX.1-dev": "FLUX",
    "Qwen/Qwen-Image": "Qwen-Image",
    "stabilityai/stable-diffusion-xl-base-1.0": "Stable Diffusion XL",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_by_its_name(name: str) -> None:
    assert other_model_of_name(name) == OTHERS[name]


def test_no_trained_model_is_taken_for_another() -> None:
    hub_ids = json.loads((CONFIGS / "index.json").read_text(encoding="utf-8"))
    spellings = [
        "wan2.1_t2v_14B_fp8.safetensors",
        "ltxv-2b-0.9.5.safetensors",
        "ltx-video-2b-v0.9.1",
        "LTX_2B",
        "Lightricks/LTX-2.3",
        "/models/ltx-2.3-22b-dev.safetensors",
        "ltxvideo2",
        "hunyuan_video_720_cfgdistill_bf16.safetensors",
        "kandinsky5_t2v_lite",
        "k5-lite-i2v-5s-sd",
        "/home/flux/mochi/models/clips/wan.safetensors",
    ]
    for name in [*hub_ids, *names(), *spellings]:
        assert other_model_of_name(name) is None, name
    for name in names():
        for alias in FAMILIES[name].spec.aliases:
            assert other_model_of_pipeline(alias) is None, alias
        assert FAMILIES[name].series in trained_models()


@pytest.mark.parametrize(
    "folder", sorted(CONFIGS.glob("*/")), ids=lambda path: path.name
)
def test_weights_of_a_trained_model_are_not_taken_for_another(folder: Path) -> None:
    index = read_config(folder / "model_index.json")
    cls = getattr(diffusers, index["transformer"][1])
    with torch.device("meta"):
        net = cls.from_config(read_config(folder / "transformer" / "config.json"))
    assert other_model_of_keys(net.state_dict()) is None


@pytest.mark.parametrize(
    ("cls", "title"),
    [
        ("WanAnimateTransformer3DModel", "Wan Animate"),
        ("HunyuanVideoFramepackTransformer3DModel", "FramePack"),
    ],
)
def test_another_model_by_its_weights(cls: str, title: str) -> None:
    with torch.device("meta"):
        if "Framepack" in cls:
            net = getattr(diffusers, cls)(has_clean_x_embedder=True)
        else:
            net = getattr(diffusers, cls)()
    assert other_model_of_keys(net.state_dict()) == title


LTX_2_PIPELINES = [
    name
    for name in dir(diffusers)
    # Modular pipelines write another index file, so no base names one.
    if re.fullmatch("LTX2.*Pipeline", name) and "Modular" not in name
]


@pytest.mark.parametrize("name", LTX_2_PIPELINES)
def test_a_pipeline_of_ltx_2_is_a_base_or_is_refused(name: str) -> None:
    is_base = name in find("ltx2").spec.aliases
    is_refused = other_model_of_pipeline(name) is not None
    assert is_base != is_refused


IMPORTS = {
    "MiniMax H3.yaml": """
job: extension
config:
  name: x
  process:
    - type: sd_trainer
      network: {type: lora, linear: 32}
      datasets: [{folder_path: /data, num_frames: 49}]
      train: {batch_size: 1, steps: 3000, lr: 1e-4}
      model: {name_or_path: MiniMaxAI/MiniMax-H3, arch: minimax_h3}
""",
    "Cosmos.toml": """
output_dir = '/x'
dataset = 'd.toml'
epochs = 10
[model]
type = 'cosmos'
diffusers_path = '/models/Cosmos'
[adapter]
type = 'lora'
rank = 32
[optimizer]
type = 'adamw_optimi'
lr = 2e-5
""",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_config_of_another_model_writes_nothing(name: str, tmp_path: Path) -> None:
    config = tmp_path / name
    config.write_text(IMPORTS[name], encoding="utf-8")
    out = tmp_path / "ours.json"
    with pytest.raises(NotTrained, match=Path(name).stem) as refused:
        import_config([config], out=out)
    assert refused.value.exit_code == 1
    assert not out.exists()
    with pytest.raises(NotTrained):
        autopsy([config], tmp_path)


def test_folders_of_the_user_do_not_change_what_a_config_is_of(tmp_path: Path) -> None:
    config = tmp_path / "flux.toml"
    model = "type = 'wan'\nckpt_path = '/home/rowan/flux/Wan2.1-T2V-1.3B'"
    text = IMPORTS["Cosmos.toml"]
    start, _, rest = text.partition("[model]")
    config.write_text(f"{start}[model]\n{model}\n{rest[rest.index('[adapter]') :]}")
    assert (
        import_config([config]).config["base_model_name"]
        == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    )

    # An artist's folder contains "wan", and the model's type says what it is.
    model = "type = 'flux'\ndiffusers_path = '/home/rowan/flux1-dev'"
    config.write_text(f"{start}[model]\n{model}\n{rest[rest.index('[adapter]') :]}")
    with pytest.raises(NotTrained, match="FLUX"):
        import_config([config])


def test_a_base_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotTrained, match="MiniMax H3"):
        place("MiniMaxAI/MiniMax-H3", weights=False)
    with pytest.raises(NotTrained, match="FramePack"):
        find("framepack")

    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "LTX2HDRPipeline"}')
    with pytest.raises(NotTrained, match="LTX-2 HDR"):
        spec_for(None, place(str(folder), weights=False))
    (folder / "model_index.json").write_text('{"_class_name": "NewVideoPipeline"}')
    with pytest.raises(NotTrained, match="NewVideoPipeline"):
        spec_for(None, place(str(folder), weights=False))

    with pytest.raises(hub.VideotuneError) as refused:
        place("Lightricks/LTX-Vide", weights=False)
    assert not isinstance(refused.value, NotTrained)

    file = tmp_path / "weights.safetensors"
    save_file({"face_adapter.0.to_q.weight": torch.ones(2, 2)}, file)
    with pytest.raises(NotTrained, match="Wan Animate"):
        place(str(file))


@pytest.mark.parametrize("way", ["tensors", "header", "file name"])
def test_a_lora_of_another_model(way: str, tmp_path: Path) -> None:
    block = "face_adapter" if way == "tensors" else "blocks_of_it"
    name = "wan-animate_style" if way == "file name" else "style"
    header = {"modelspec.architecture": "wan-animate/lora"} if way == "header" else None
    start = f"diffusion_model.{block}.0.to_q"
    file = tmp_path / f"{name}.safetensors"
    save_file(
        {
            f"{start}.lora_A.weight": torch.ones(2, 8),
            f"{start}.lora_B.weight": torch.ones(8, 2),
        },
        file,
        metadata=header,
    )
    assert inspect(file)["other_model"] == "Wan Animate"
    with pytest.raises(NotTrained, match="Wan Animate"):
        open_modules(file, None, None)
