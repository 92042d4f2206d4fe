"""Each of the guide's four presets trains, is resumed to the bit and exported, on a tiny model of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.commands.safety_kit import Make, equal, state, steps_of
from tests.shell import train
from videotune.errors import DONE
from videotune.files import read_json
from videotune.planner.memory import Choice, need
from videotune.planner.memory_plan import PlanInputs, read_step_spec
from videotune.trainer.components import open_models
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.resume import Resume
from videotune.trainer.run_spec import open_job

RATES = {
    "wan 2.2 LoRA": {"transformer": 3e-4},
    "wan 2.2 LoRA 8GB": {"transformer": 3e-4},
    "wan 2.2 Finetune": {"transformer": 1e-4, "text_encoder": 5e-5},
    "wan 2.2 Embedding": {"embedding": 5e-3},
}
PARTS = {
    "wan 2.2 LoRA": ("blocks.0.attn1.to_q.lora_A",),
    "wan 2.2 LoRA 8GB": ("blocks.1.attn2.to_out.0.lora_B",),
    "wan 2.2 Finetune": ("blocks.0.ffn", "blocks.1.attn1", "patch_embedding", "text_encoder."),
    "wan 2.2 Embedding": ("embedding.",),
}
"""What trains, by how its names begin."""


@pytest.fixture(scope="module")
def preset_words(small_clips: Path, tiny_bases: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Words of a preset on the tiny TI2V: its size and its length are smaller, previews are not drawn."""
    cache = tmp_path_factory.mktemp("presets") / "cache"

    def make(preset: str, *sets: str) -> Overrides:
        small = (f"base_model_name={tiny_bases('wan', 'ti2v')}", f"cache_dir={cache}", "resolution=32x32")
        return Overrides(preset, data=str(small_clips), sets=(*small, "sample_after=0", "dataloader_threads=0", *sets))

    return make


@pytest.mark.parametrize("name", RATES)
def test_a_preset_of_the_guide_trains_resumes_and_exports(name: str, preset_words: Make, tmp_path: Path) -> None:
    """In float32, as a CPU is slow in the preset's bfloat16. One clip is shorter than a window of 8GB."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    short = ("save_every=1", "train_dtype=FLOAT_32")
    assert train(preset_words(f"#{name}.json", "steps=3", *short), whole, allow_skips="1") == DONE
    assert train(preset_words(name, "steps=2", *short), parted, allow_skips="1") == DONE
    assert train(Overrides(sets=("steps=3",)), parted, resume=Resume(), allow_skips="1") == DONE
    assert equal(state(whole, 3), state(parted, 3))

    lines = steps_of(whole)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["lr"] for line in lines] == [RATES[name]] * 3
    assert all(line["loss"] > 0 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)
    first, last = (state(whole, step) for step in (1, 3))
    moved = {key.removeprefix("weights/") for key in last if not torch.equal(first[key], last[key])}
    for part in PARTS[name]:
        assert any(key.startswith(part) for key in moved), part
    (exported,) = read_json(whole / "exports.json")
    place = whole / exported["path"]
    files = [place] if place.is_file() else list(place.rglob("*.safetensors"))
    assert files
    assert all(file.stat().st_size > 100 for file in files)


@pytest.mark.parametrize("name", RATES)
def test_a_run_has_the_settings_of_its_preset(name: str, preset_words: Make) -> None:
    """What stands in the preset, and was not set to another value, is what the run goes by, and comes from there."""
    from videotune.config.load import flatten, read_preset

    resolved = resolve_config(preset_words(name, "steps=3"))[0]
    settings = flatten(resolved.config.model_dump(mode="json"))
    wanted = flatten(read_preset(name))
    changed = {"base_model_name", "resolution", "steps", "sample_after", "dataloader_threads"}
    assert {key: settings[key] for key in wanted if key not in changed} == {
        key: value for key, value in wanted.items() if key not in changed
    }
    assert {resolved.origins[key] for key in wanted if key not in changed} == {"preset"}


def test_ratios_16_and_8_keep_the_picture_and_every_second_frame(preset_words: Make) -> None:
    """16 is the autoencoder's own; 8 is twice its 4, so of 9 frames at 12 fps the window has 5."""
    job = open_job(*resolve_config(preset_words("wan 2.2 LoRA 8GB")))
    assert (job.spec.rules.spatial_stride, job.spec.rules.temporal_stride) == (16, 4)
    assert {str(shape) for shape in job.shapes} == {"5x32x32"}
    assert any("of 9 frames every second is kept, so that a window has 5" in note for note in job.notes)
    assert {shape.fps for shape in job.shapes} == {6.0}
    assert job.library.windows


def test_the_guides_multiplier_is_not_called_unused(preset_words: Make) -> None:
    """Only what a person has set and nothing uses is said; a preset is for mixed datasets too."""
    job = open_job(*resolve_config(preset_words("wan 2.2 LoRA 8GB")))
    assert not any("video_batch_size_multiplier" in note for note in job.notes)
    printed = open_job(
        *resolve_config(preset_words("wan 2.2 LoRA 8GB", "video_config.video_batch_size_multiplier=0.25"))
    )
    assert any("video_batch_size_multiplier is unused" in note for note in printed.notes)


def test_streamed_blocks_take_nothing_of_the_text_encoder_along(preset_words: Make) -> None:
    """A text encoder that trains needs as much on the card however many blocks of the denoiser wait on the host."""
    job = open_job(*resolve_config(preset_words("wan 2.2 Finetune")))
    facts = read_step_spec(PlanInputs.of(job, "FLOAT_32"))
    more = replace(facts, blocks=facts.blocks * 2, trained=facts.trained * 2)  # two blocks are never streamed
    here, away = (need(more, Choice(1, "ON", streamed)).device["optimizer"] for streamed in (0, 4))
    family = open_models(job.spec, job.base, job.config)
    numbers = sum(p.numel() for net in family.text_skeletons().values() for p in net.parameters())
    assert here["text encoder's training"] == away["text encoder's training"]
    assert 16 * numbers <= here["text encoder's training"] <= 16 * numbers * 1.2, "in pieces of 512 bytes"
    assert here["optimizer"] > 0
    assert "optimizer" not in away
