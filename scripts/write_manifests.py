"""Writes tests/manifests/*.json, what the real base models are by their configs: python
scripts/write_manifests.py [FOLDER].

No weights are needed: the models are built on the meta device.
tests/models/test_manifests.py recomputes each.
"""

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1] / "tests" / "manifests"
CONFIGS = Path(__file__).parents[1] / "videotune" / "assets" / "models"
IN_CODE = ("aliases", "lora_targets", "fused_modules")
"""Facts of a family that no checkpoint changes."""
UNKNOWN = "not verified: no public source that counts them was found; the model is known by its name alone"

BY_CONVERTER = (
    "not verified: no public source that counts them was found; the config is the one that "
    "diffusers' converter writes (scripts/convert_ltx2_to_diffusers.py)"
)

BY_CONVERTER_OF_HUNYUAN = (
    "not verified: no public source that counts them was found; the config is the one that diffusers' converter "
    "writes (scripts/convert_hunyuan_video1_5_to_diffusers.py), and the authors say 8.3B"
)

CATALOGUE = (
    "public code of a catalogue of models, which has the parameters of this Hub repository's transformer as "
    "totalParams; the authors say 8.3B"
)

BY_AUTHORS_CONFIG = (
    "not verified: its authors print 2B; the numbers are those of their own config "
    "(configs/config_5s_sft.yaml of ai-forever/Kandinsky-5)"
)

TORCHAX = (
    "the README of eltsai/diffusers, by the bytes of the loaded parts in bfloat16: 2.64891254901886 GiB (1.3B), "
    "26.66874897480011 GiB (14B)"
)
HEADERS = "public code that lists the parameters of this Hub repository's files"
FINETRAINERS = (
    "docs/training of a-r-r-o-w/finetrainers: trainable parameters of full fine-tuning"
)


@dataclass(frozen=True)
class Published:
    """How many parameters of the transformer a public source counts, and which; None:
    nobody that we found.
    """

    parameters: int | None = None
    source: str = UNKNOWN


MODELS = {
    "wan2.1-t2v-1.3b": Published(1_418_996_800, TORCHAX),
    "wan2.1-t2v-14b": Published(14_288_491_584, TORCHAX),
    "wan2.1-i2v-14b-480p": Published(),
    "wan2.1-i2v-14b-720p": Published(),
    "wan2.1-flf2v-14b-720p": Published(),
    "wan2.1-vace-1.3b": Published(),
    "wan2.1-vace-14b": Published(),
    "wan2.2-ti2v-5b": Published(4_999_787_712, HEADERS),
    "wan2.2-t2v-a14b": Published(14_288_491_584, HEADERS),
    "wan2.2-i2v-a14b": Published(14_288_901_184, HEADERS),
    "cogvideox-2b": Published(1_693_783_872, HEADERS),
    "cogvideox-5b": Published(5_570_283_072, FINETRAINERS),
    "cogvideox-5b-i2v": Published(),
    "cogvideox-1.5-5b": Published(),
    "cogvideox-1.5-5b-i2v": Published(),
    "hunyuan-video-13b": Published(12_821_012_544, HEADERS),
    "hunyuan-video-1.5-480p-t2v": Published(8_326_608_160, CATALOGUE),
    "hunyuan-video-1.5-480p-i2v": Published(source=BY_CONVERTER_OF_HUNYUAN),
    "hunyuan-video-1.5-720p-t2v": Published(8_326_608_160, CATALOGUE),
    "hunyuan-video-1.5-720p-i2v": Published(source=BY_CONVERTER_OF_HUNYUAN),
    "hidream-i1": Published(17_105_733_184, HEADERS),
    "ltx-video-2b": Published(1_923_385_472, FINETRAINERS),
    "ltx-video-13b": Published(13_042_569_344, HEADERS),
    "ltx-2-19b": Published(18_876_174_592, HEADERS),
    "ltx-2.3-22b": Published(source=BY_CONVERTER),
    "kandinsky5-t2v-lite-5s": Published(source=BY_AUTHORS_CONFIG),
    "kandinsky5-i2v-lite-5s": Published(source=BY_AUTHORS_CONFIG),
}
"""The models whose configs come with videotune (videotune/assets/models), by the names
of their folders.
"""


def config(name: str, part: str) -> dict[str, Any] | None:
    """A part's config; None where the model has no such part."""
    path = CONFIGS / name / part / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def count(values: dict[str, Any]) -> dict[str, Any]:
    """What a network of this config is: parameters, tensors, bytes as it is loaded in
    bfloat16.
    """
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
    """What our family says of the model in ``folder``: blocks, what a LoRA covers,
    names in each format.
    """
    import torch

    from videotune.adapters.lora import matching
    from videotune.errors import VideotuneError
    from videotune.models.base_model import spec_for
    from videotune.models.registry import find
    from videotune.types import BasePlace

    spec = spec_for(None, BasePlace(name, folder))
    family = find(spec.name)(folder, torch.device("cpu"), torch.float32)
    net = family.skeleton()
    modules = dict(net.named_modules())
    covered = {}
    for targets in spec.lora_targets:
        # Sets of sound alone act only in a run with sound.
        with suppress(VideotuneError):
            covered[targets] = matching(net, spec, targets)
    if spec.sound is not None:
        with_sound = spec.with_sound(("video", "sound"))
        for targets in with_sound.lora_targets:
            covered[f"{targets} with sound"] = matching(net, with_sound, targets)
    names = {
        "diffusers": "transformer.{}".format,
        "comfyui": lambda path: f"diffusion_model.{family.to_comfyui_name(path)}",
    }
    keys = {
        form: [
            f"{names[form](path)}.lora_{part}.weight"
            for path in covered["linear"]
            for part in "AB"
        ]
        for form in family.lora_formats()
    }
    return {
        "spec": json.loads(
            json.dumps(
                {
                    key: value
                    for key, value in asdict(spec).items()
                    if key not in IN_CODE
                }
            )
        ),
        "blocks": {
            path: len(list(net.get_submodule(path).children())) for path in spec.blocks
        },
        "lora": {
            targets: {
                "modules": len(paths),
                "parameters_a_rank": sum(
                    modules[path].in_features + modules[path].out_features
                    for path in paths
                ),
            }
            for targets, paths in covered.items()
        },
        "export": {
            form: {"first": own[0], "keys": len(set(own))} for form, own in keys.items()
        },
    }


def manifest(name: str) -> dict[str, Any]:
    """All that a manifest holds."""
    index = json.loads(
        (CONFIGS / name / "model_index.json").read_text(encoding="utf-8")
    )
    return {
        "pipeline": index["_class_name"],
        **{
            part: count(values) if (values := config(name, part)) else None
            for part in ("transformer", "vae")
        },
        "published": {
            "parameters": MODELS[name].parameters,
            "source": MODELS[name].source,
        },
        "family": by_family(name, CONFIGS / name),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HOME
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        written = manifest(name)
        text = json.dumps(written, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
        print(
            f"{name}: {written['transformer']['parameters']:,} parameters; {written['family']['spec']['title']}"
        )


if __name__ == "__main__":
    main()
