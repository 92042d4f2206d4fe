"""The real base models, by their configs, on the meta device: sizes as published, what
a LoRA covers, exported names.

Presets fit the published models that they name, and the cards that they are for; those
of the guide have its numbers.

scripts/write_manifests.py writes tests/manifests/; what a manifest says and what the
code computes must agree.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import write_manifests as writer
from videotune.config.nested_keys import flatten
from videotune.config.resolve import resolve
from videotune.data.clip_sizes import parse_resolution
from videotune.data.frame_counts import snap_frames
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.model_spec import ModelSpec
from videotune.models.base_model import published, spec_for
from videotune.models.registry import find, names
from videotune.planner.fit import MEMORY_KEYS, fit, requested_card
from videotune.presets.shipped import (
    memory_class,
    preset_about,
    preset_names,
    read_preset,
)
from videotune.types import BasePlace, ClipShape

ROOT = Path(__file__).parents[2]
HOME = ROOT / "tests" / "manifests"
AGAIN = "the manifests are old: python scripts/write_manifests.py"
FINETRAINERS_LORA = 132_120_576
"""Trainable parameters of a LoRA of rank 128 on to_q, to_k, to_v, to_out.0 of
CogVideoX-5B, as finetrainers prints them.
"""
EACH = pytest.mark.parametrize("name", sorted(writer.MODELS))


def kept(name: str) -> dict[str, Any]:
    return json.loads((HOME / f"{name}.json").read_text(encoding="utf-8"))


def test_each_model_has_a_manifest_and_its_configs_come_with_videotune() -> None:
    assert {path.stem for path in HOME.glob("*.json")} == set(writer.MODELS), AGAIN
    assert {path.name for path in writer.CONFIGS.iterdir() if path.is_dir()} == set(
        writer.MODELS
    )


def test_the_base_model_of_every_preset_is_among_them() -> None:
    bases = {str(read_preset(name)["base_model_name"]) for name in preset_names()} - {
        "asset:toy"
    }
    assert all(published(base) for base in bases), bases
    assert published("somebody/other") is None
    assert published("../toy") is None


@EACH
def test_sizes_are_as_written_and_as_published(name: str) -> None:
    manifest, model = kept(name), writer.MODELS[name]
    for part in ("transformer", "vae"):
        config = writer.config(name, part)
        assert manifest[part] == (writer.count(config) if config else None), AGAIN
    counted = manifest["published"]
    assert counted == {"parameters": model.parameters, "source": model.source}, AGAIN
    if counted["parameters"] is None:
        assert counted["source"].startswith("not verified")
    else:
        assert counted["parameters"] == manifest["transformer"]["parameters"]


def test_the_bytes_that_are_loaded_are_the_published_ones() -> None:
    """A public log of the loaded parts in bfloat16, in GiB: so the modules that stay in
    float32 are the right ones.
    """
    for name, gib in (
        ("wan2.1-t2v-1.3b", 2.64891254901886),
        ("wan2.1-t2v-14b", 26.66874897480011),
    ):
        assert kept(name)["transformer"]["bytes_in_bfloat16"] == gib * 2**30
        assert kept(name)["vae"]["bytes_in_bfloat16"] == 0.23635575734078884 * 2**30


@EACH
def test_what_our_family_says_of_it(name: str) -> None:
    """Its title, licence, native frames, sizes and rate, noise levels, experts, and
    what a LoRA covers.
    """
    written = kept(name)["family"]
    found = writer.by_family(name, writer.CONFIGS / name)
    assert found == written, AGAIN
    if len(found["blocks"]) == 1:  # blocks of one kind have as many modules each
        assert (
            found["lora"]["attention"]["modules"] % sum(found["blocks"].values()) == 0
        )
    for form, keys in found["export"].items():
        joined = (
            form in find(found["spec"]["name"]).spec.fused_modules
        )  # several modules under one key
        assert (keys["keys"] < 2 * found["lora"]["linear"]["modules"]) == joined
        assert joined or keys["keys"] == 2 * found["lora"]["linear"]["modules"]
    assert found["lora"]["linear"]["modules"] > found["lora"]["attention"]["modules"]


@pytest.mark.parametrize(
    ("name", "shape", "tokens"),
    [
        ("cogvideox-5b", (49, 480, 720), 13 * 30 * 45),
        ("cogvideox-1.5-5b", (81, 768, 1360), 11 * 48 * 85),
        ("hunyuan-video-13b", (129, 720, 1280), 33 * 45 * 80),
        ("hunyuan-video-1.5-480p-t2v", (121, 480, 848), 31 * 30 * 53),
        ("hidream-i1", (1, 512, 512), 32 * 32),
        ("hidream-i1", (1, 512, 528), 4096),  # what is not square is padded
        ("ltx-video-2b", (161, 512, 704), 21 * 16 * 22),
        ("wan2.2-ti2v-5b", (121, 704, 1280), 31 * 22 * 40),
        ("kandinsky5-t2v-lite-5s", (121, 512, 768), 31 * 32 * 48),
    ],
)
def test_tokens_of_published_shapes(
    name: str, shape: tuple[int, int, int], tokens: int
) -> None:
    spec = spec_for(None, BasePlace(name, writer.CONFIGS / name))
    assert spec.tokens(ClipShape(*shape, spec.rules.fps)) == tokens


def test_the_spec_of_a_family_is_that_of_a_published_model() -> None:
    """What the name of a family alone stands for, where no base is given."""
    published = [
        spec_for(None, BasePlace(name, writer.CONFIGS / name)) for name in writer.MODELS
    ]
    for spec in (find(name).spec for name in names()):
        same = [
            replace(one, title=spec.title, guidance_embedded=spec.guidance_embedded)
            for one in published
        ]
        assert spec in same, spec.name


def test_a_lora_has_as_many_parameters_as_others_count() -> None:
    family = kept("cogvideox-5b")["family"]
    assert family is not None, AGAIN
    assert 128 * family["lora"]["attention"]["parameters_a_rank"] == FINETRAINERS_LORA


PRESETS = [name for name in preset_names() if name != "toy"]


def spec_of(name: str) -> ModelSpec:
    """The spec of the published model that a preset names."""
    base = str(read_preset(name)["base_model_name"])
    folder = published(base)
    return spec_for(None, BasePlace(base, folder))


GUIDE = json.loads(
    Path(__file__).with_name("guide_presets.json").read_text(encoding="utf-8")
)
"""The guide's table, and what all its presets have unless their row says otherwise;
what trains is not rounded.
"""

OURS = {"steps", "lora.rank", "lora.targets", "sample.resolution"}
"""What the guide does not name and its presets say."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_asks_for_what_its_model_takes_and_says_what_is_not_known(
    name: str,
) -> None:
    spec, preset = spec_of(name), read_preset(name)
    config = resolve({}, preset, spec).config
    frames = preset.get("video_config", {}).get("frames")
    assert frames is None or frames == snap_frames(frames, spec.rules)
    parse_resolution(config.resolution, spec.rules)
    from_image = "I2V" in name or "FLF2V" in name
    always_has_image = spec.first_frame_probability == 1
    assert from_image == (spec.image_conditioning == "concat" or always_has_image)
    assert ("A14B" in name) == (len(spec.experts) == 2)
    assert config.first_frame_probability == spec.first_frame_probability
    assert config.timestep_shift == (
        "resolution" if spec.shift_by_tokens else spec.timestep_shift
    )
    assert "memory not measured" in preset_about(name)


@pytest.mark.parametrize("name", GUIDE["rows"])
def test_the_guides_presets_have_the_guides_numbers(name: str) -> None:
    config = resolve({}, read_preset(name), spec_of(name)).config
    settings, row = (
        flatten(config.model_dump(mode="json")),
        GUIDE["every"] | GUIDE["rows"][name],
    )
    assert {key: settings[key] for key in row} == row
    assert set(flatten(read_preset(name))) - OURS <= set(row), "nothing is added"
    assert (
        config.weight_dtype in preset_about(name)
        or config.training_method == "FINE_TUNE"
    )


@pytest.mark.parametrize(
    "name", [name for name in preset_names() if f"#{name}.json" not in GUIDE["rows"]]
)
def test_what_is_not_the_guides_leaves_memory_to_the_plan(name: str) -> None:
    assert not set(MEMORY_KEYS) & set(read_preset(name))


CARDS = {"wan 2.2 LoRA": 12, "wan 2.2 Finetune": 180, "wan 2.2 Embedding": 16}
"""The memory in GB of the card that a preset is for, where its name says none."""


@pytest.fixture(scope="module")
def long_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A square clip of seven seconds at 24 fps; the plan reads its facts alone."""
    import numpy as np

    from videotune.toy.dataset import encode_clip

    folder = tmp_path_factory.mktemp("long")
    ramp = (
        np.linspace(0, 255, 168 * 32 * 32 * 3).reshape(168, 32, 32, 3).astype(np.uint8)
    )
    encode_clip(folder / "a.mp4", ramp, 24.0)
    (folder / "a.txt").write_text("a ramp")
    return folder


def test_every_preset_of_a_model_is_planned() -> None:
    assert {name for name in PRESETS if memory_class(name) is None} == set(CARDS)


@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_its_cards(name: str, long_clip: Path, tmp_path: Path) -> None:
    base = published(str(read_preset(name)["base_model_name"]))
    sets = (f"base_model_name={base}", f"cache_dir={tmp_path / 'cache'}")
    job = open_job(*resolve_config(Overrides(name, data=str(long_clip), sets=sets)))
    limit, card = requested_card(memory_class(name) or CARDS[name], None)
    assert fit(job, "BFLOAT_16", limit, card).fits, name
