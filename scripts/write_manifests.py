"""Writes tests/manifests/*.json, what the real base models are by their configs: python scripts/write_manifests.py [FOLDER].

No weights are needed: the models are built on the meta device. tests/families/test_manifests.py recomputes each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1] / "tests" / "manifests"
CONFIGS = HOME / "configs"
UNKNOWN = "not verified: no public source that counts them was found; the model is known by its name alone"

TORCHAX = (
    "the README of eltsai/diffusers, by the bytes of the loaded parts in bfloat16: 2.64891254901886 GiB (1.3B), "
    "26.66874897480011 GiB (14B)"
)
HEADERS = "public code that lists the parameters of this Hub repository's files"
FINETRAINERS = "docs/training of a-r-r-o-w/finetrainers: trainable parameters of full fine-tuning"


@dataclass(frozen=True)
class Published:
    """How many parameters of the transformer a public source counts, and which; None: nobody that we found."""

    parameters: int | None = None
    source: str = UNKNOWN


@dataclass(frozen=True)
class Model:
    """A real base model: its Hub repository, pipeline, configs by file, and what its index says besides."""

    hub: str
    pipeline: str
    transformer: str
    vae: str | None
    scheduler: str | None
    published: Published
    index: dict[str, Any] = field(default_factory=dict)


WAN = ("WanPipeline", "wan2.1.vae", "wan")
COG = ("CogVideoXPipeline", "cogvideox.vae", "cogvideox")
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": (
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
    ),
    "hidream": (
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
    ),
    "cogvideox": (
        "CogVideoXDDIMScheduler",
        {
            "beta_schedule": "scaled_linear",
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "num_train_timesteps": 1000,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "snr_shift_scale": 1.0,
            "timestep_spacing": "trailing",
            "trained_betas": None,
        },
    ),
    "ltx": (
        "FlowMatchEulerDiscreteScheduler",
        {
            "use_dynamic_shifting": True,
            "base_image_seq_len": 1024,
            "base_shift": 0.95,
            "max_image_seq_len": 4096,
            "max_shift": 2.05,
            "shift_terminal": 0.1,
        },
    ),
    "ltx 0.9.7": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": False}),
    "hunyuan": ("FlowMatchEulerDiscreteScheduler", {"num_train_timesteps": 1000, "shift": 7.0}),
}
"""Of the schedulers only what decides the noising path."""


def wan(hub: str, transformer: str, published: Published, vae: str = WAN[1], **index: Any) -> Model:
    pipeline = "WanImageToVideoPipeline" if "-I2V-" in hub else WAN[0]
    return Model(f"Wan-AI/{hub}-Diffusers", pipeline, transformer, vae, WAN[2], published, index)


def cog(hub: str, transformer: str, published: Published) -> Model:
    pipeline = "CogVideoXImageToVideoPipeline" if "I2V" in hub else COG[0]
    return Model(f"zai-org/{hub}", pipeline, transformer, COG[1], COG[2], published)


MODELS = {
    "wan2.1-t2v-1.3b": wan("Wan2.1-T2V-1.3B", "wan2.1-t2v-1.3b", Published(1_418_996_800, TORCHAX)),
    "wan2.1-t2v-14b": wan("Wan2.1-T2V-14B", "wan2.1-t2v-14b", Published(14_288_491_584, TORCHAX)),
    "wan2.1-i2v-14b-480p": wan("Wan2.1-I2V-14B-480P", "wan2.1-i2v-14b-480p", Published()),
    "wan2.1-i2v-14b-720p": wan("Wan2.1-I2V-14B-720P", "wan2.1-i2v-14b-720p", Published()),
    "wan2.2-ti2v-5b": wan(
        "Wan2.2-TI2V-5B", "wan2.2-ti2v-5b", Published(4_999_787_712, HEADERS), "wan2.2-5b.vae", expand_timesteps=True
    ),
    "wan2.2-t2v-a14b": wan(
        "Wan2.2-T2V-A14B", "wan2.2-t2v-a14b", Published(14_288_491_584, HEADERS), boundary_ratio=0.875
    ),
    "wan2.2-i2v-a14b": wan(
        "Wan2.2-I2V-A14B", "wan2.2-i2v-a14b", Published(14_288_901_184, HEADERS), boundary_ratio=0.9
    ),
    "cogvideox-2b": cog("CogVideoX-2b", "cogvideox-2b", Published(1_693_783_872, HEADERS)),
    "cogvideox-5b": cog("CogVideoX-5b", "cogvideox-5b", Published(5_570_283_072, FINETRAINERS)),
    "cogvideox-5b-i2v": cog("CogVideoX-5b-I2V", "cogvideox-5b-i2v", Published()),
    "cogvideox-1.5-5b": cog("CogVideoX1.5-5B", "cogvideox-1.5-5b", Published()),
    "cogvideox-1.5-5b-i2v": cog("CogVideoX1.5-5B-I2V", "cogvideox-1.5-5b-i2v", Published()),
    "hunyuan-video-13b": Model(
        "hunyuanvideo-community/HunyuanVideo", "HunyuanVideoPipeline", "hunyuan-video-13b", "hunyuan-video.vae", "hunyuan",
        Published(12_821_012_544, HEADERS),
    ),
    "hidream-i1": Model(
        "HiDream-ai/HiDream-I1-Full", "HiDreamImagePipeline", "hidream-i1", "hidream.vae", "hidream",
        Published(17_105_733_184, HEADERS),
    ),
    "ltx-video-2b": Model(
        "Lightricks/LTX-Video", "LTXPipeline", "ltx-video-2b", "ltx-video-0.9.0.vae", "ltx",
        Published(1_923_385_472, FINETRAINERS),
    ),
    "ltx-video-13b": Model(
        "Lightricks/LTX-Video-0.9.7-dev", "LTXConditionPipeline", "ltx-video-13b", "ltx-video-0.9.7.vae",
        "ltx 0.9.7",
        Published(13_042_569_344, HEADERS),
    ),
}  # fmt: skip


def config(name: str) -> dict[str, Any]:
    """A part's config, as the repository keeps it."""
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def lay_out(name: str, folder: Path) -> Path:
    """Write the configs of a real model as a folder in diffusers layout, without weights, and return it."""
    model, parts = MODELS[name], {}
    parts["transformer"] = config(f"{model.transformer}.transformer")
    if model.index.get("boundary_ratio") is not None:
        parts["transformer_2"] = parts["transformer"]
    if model.vae is not None:
        parts["vae"] = config(model.vae)
    if model.scheduler is not None:
        kind, values = SCHEDULERS[model.scheduler]
        parts["scheduler"] = {"_class_name": kind, **values}
    if parts["transformer"].get("image_dim") is not None:  # CLIP's vision model of this width: ViT-H/14 at 224 pixels
        sizes = {"hidden_size": parts["transformer"]["image_dim"], "image_size": 224, "patch_size": 14}
        parts["image_encoder"] = {"_class_name": "CLIPVisionModel", **sizes}
    index = {part: ["diffusers", values["_class_name"]] for part, values in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": model.pipeline, **model.index, **index}))
    for part, values in parts.items():
        (folder / part).mkdir()
        file = "scheduler_config.json" if part == "scheduler" else "config.json"
        (folder / part / file).write_text(json.dumps(values))
    return folder


def count(values: dict[str, Any]) -> dict[str, Any]:
    """What a network of this config is: parameters, tensors, bytes as it is loaded in bfloat16."""
    import diffusers
    import torch

    cls = getattr(diffusers, values["_class_name"])
    with torch.device("meta"):
        net = cls.from_config(values)
    kept = cls._keep_in_fp32_modules or ()
    sizes = [
        parameter.numel() * (4 if any(part in kept for part in name.split(".")) else 2)
        for name, parameter in net.named_parameters()
    ]
    parameters = list(net.parameters())
    return {
        "class": cls.__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "bytes_in_bfloat16": sum(sizes),
    }


def by_family(name: str, folder: Path) -> dict[str, Any]:
    """What our family says of the model in ``folder`` (``lay_out``): blocks, what a LoRA covers, names in each format.

    Raises VideotuneError where no family reads it.
    """
    import torch

    from videotune.adapters.lora import matching
    from videotune.families.find import find, spec_for
    from videotune.types import BasePlace

    spec = spec_for(None, BasePlace(name, folder))
    family = find(spec.name).open_family(folder, torch.device("cpu"), torch.float32)
    net = family.skeleton()
    modules = dict(net.named_modules())
    covered = {targets: matching(net, spec, targets) for targets in spec.lora_targets}
    keys = {
        form: [f"{rename(path)}.lora_{part}.weight" for path in covered["linear"] for part in "AB"]
        for form, rename in family.key_maps().items()
    }
    return {
        "name": spec.name,
        "experts": [[expert.name, expert.t_lo, expert.t_hi] for expert in spec.experts],
        "blocks": {path: len(net.get_submodule(path)) for path in spec.blocks},
        "lora": {
            targets: {
                "modules": len(paths),
                "parameters_a_rank": sum(modules[path].in_features + modules[path].out_features for path in paths),
            }
            for targets, paths in covered.items()
        },
        "export": {form: {"first": names[0], "keys": len(set(names))} for form, names in keys.items()},
    }


def manifest(name: str) -> dict[str, Any]:
    """All that a manifest holds; ``family`` is null where no family reads the model."""
    from videotune.errors import VideotuneError

    model = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            family = by_family(name, lay_out(name, Path(folder) / "model"))
        except VideotuneError:
            family = None
    return {
        "hub": model.hub,
        "pipeline": model.pipeline,
        "transformer": count(config(f"{model.transformer}.transformer")),
        "vae": count(config(model.vae)) if model.vae else None,
        "published": {"parameters": model.published.parameters, "source": model.published.source},
        "family": family,
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HOME
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        written = manifest(name)
        text = json.dumps(written, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
        family = written["family"]["name"] if written["family"] else "no family reads it"
        print(f"{name}: {written['transformer']['parameters']:,} parameters; {family}")


if __name__ == "__main__":
    main()
