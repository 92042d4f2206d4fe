"""The guide's four presets and three snippets train on a tiny model of their kind;
presets resume to the bit.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_line import train
from tests.support.run_processes import Make, Work
from tests.support.run_results import assert_same_run, of_kind, state, steps_of
from videotune.errors import DONE
from videotune.files import read_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.planner.memory import Choice, need
from videotune.planner.plan_inputs import PlanInputs
from videotune.planner.read_step import read_step_spec
from videotune.trainer.build import open_models
from videotune.trainer.resume import Resume

Parts = tuple[str, ...]
PRESETS: dict[str, tuple[dict[str, float], Parts]] = {
    "wan 2.2 LoRA": ({"transformer": 3e-4}, ("blocks.0.attn1.to_q.lora_A",)),
    "wan 2.2 LoRA 8GB": ({"transformer": 3e-4}, ("blocks.1.attn2.to_out.0.lora_B",)),
    "wan 2.2 Finetune": (
        {"transformer": 1e-4, "text_encoder": 5e-5},
        ("blocks.0.ffn", "blocks.1.attn1", "patch_embedding", "text_encoder."),
    ),
    "wan 2.2 Embedding": ({"embedding": 5e-3}, ("embedding.",)),
}
"""The rates of each, and what trains, by how its names begin."""

ON, OFF = {"train": True}, {"train": False}
SNIPPETS: dict[str, tuple[dict[str, Any], dict[str, float], Parts]] = {
    "LORA": (
        {
            "batch_size": 2,
            "learning_rate": 3e-4,
            "transformer": ON,
            "text_encoder": OFF,
        },
        {"transformer": 3e-4},
        ("blocks.",),
    ),
    "FINE_TUNE": (
        {
            "batch_size": 1,
            "learning_rate": 1e-4,
            "transformer": ON,
            "text_encoder": ON | {"learning_rate": 5e-5},
        },
        {"transformer": 0.0001, "text_encoder": 0.00005},
        ("blocks.", "text_encoder."),
    ),
    "EMBEDDING": (
        {"batch_size": 4, "learning_rate": 0.001, "embedding_learning_rate": 0.005},
        {"embedding": 0.005},
        ("embedding.",),
    ),
}
"""The keys of each beside its training_method, its rates, and what trains."""


@pytest.fixture
def preset(overrides: Make) -> Make:
    """Overrides of a preset on the tiny TI2V: its size and its length are smaller, no
    previews.
    """
    own = (
        "base_model_name=",
        "cache_dir=",
        "resolution=",
        "sample_after=",
        "dataloader_threads=",
    )
    plain = overrides(base=("wan", "ti2v"))
    small = tuple(text for text in plain.sets if text.startswith(own))
    return lambda name, *sets: Overrides(name, data=plain.data, sets=(*small, *sets))


def trained(run: Path, rates: dict[str, float], parts: Parts) -> None:
    """Three steps moved these parts at these rates, and one result was exported."""
    lines = steps_of(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["lr"] for line in lines] == [rates] * 3
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in lines)
    first, last = (state(run, step) for step in (1, 3))
    moved = {
        key.removeprefix("weights/")
        for key in last
        if not torch.equal(first[key], last[key])
    }
    for part in parts:
        assert any(key.startswith(part) for key in moved), part
    exported, *_ = read_json(run / "exports.json")
    place = run / exported["path"]
    files = [place] if place.is_file() else list(place.rglob("*.safetensors"))
    assert files
    assert all(file.stat().st_size > 100 for file in files)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_the_guide_trains_resumes_and_exports(
    name: str, preset: Make, tmp_path: Path
) -> None:
    """In float32, as a CPU is slow in the preset's bfloat16.

    One clip is shorter than a window of 8GB.
    """
    whole = tmp_path / "whole"
    words = preset(f"#{name}.json", "steps=3", "save_every=1", "train_dtype=FLOAT_32")
    assert train(words, whole, allow_skips="1") == DONE
    parted = shutil.copytree(whole, tmp_path / "parted")
    assert train(Overrides(), parted, resume=Resume(step=2), allow_skips="1") == DONE
    assert_same_run(whole, parted, 3)
    trained(whole, *PRESETS[name])


@pytest.mark.parametrize("method", SNIPPETS)
def test_a_snippet_of_the_guide_trains_as_it_stands(method: str, work: Work) -> None:
    config, run = work.tmp / "config.json", work.run
    snippet, rates, parts = SNIPPETS[method]
    config.write_text(json.dumps({"training_method": method} | snippet))
    plain = work.overrides("steps=3", "save_every=1")
    sets = tuple(
        text for text in plain.sets if not text.startswith(("learning_rate=", "lora."))
    )
    assert train(replace(plain, config=config, sets=sets), run) == DONE
    trained(run, rates, parts)
    notes = of_kind(run, "start")[0]["notes"]
    new = method == "EMBEDDING"
    unused = ["learning_rate is unused: embedding_learning_rate is the new tokens' own"]
    assert [note for note in notes if "unused" in note] == unused * new
    assert any("'<videotune>'" in note for note in notes) == new, (
        "the default token is reported"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_has_the_settings_of_its_preset(name: str, preset: Make) -> None:
    """What stands in the preset, and was not set to another value, is what the run goes
    by, and comes from there.
    """
    from videotune.config.nested_keys import flatten
    from videotune.presets.shipped import read_preset

    resolved = resolve_config(preset(name, "steps=3"))[0]
    settings = flatten(resolved.config.model_dump(mode="json"))
    changed = {
        "base_model_name",
        "resolution",
        "steps",
        "sample_after",
        "dataloader_threads",
    }
    wanted = {
        key: value
        for key, value in flatten(read_preset(name)).items()
        if key not in changed
    }
    assert {key: settings[key] for key in wanted} == wanted
    assert {resolved.origins[key] for key in wanted} == {"preset"}


def test_ratios_16_and_8_keep_the_picture_and_every_second_frame(preset: Make) -> None:
    """16 is the autoencoder's own; 8 is twice its 4, so of 9 frames at 12 fps the
    window has 5.
    """
    job = open_job(*resolve_config(preset("wan 2.2 LoRA 8GB")))
    assert (job.spec.rules.spatial_stride, job.spec.rules.temporal_stride) == (16, 4)
    assert {str(shape) for shape in job.shapes} == {"5x32x32"}
    assert any(
        "one in 2 of 9 frames is kept, so a window has 5" in note for note in job.notes
    )
    assert {shape.fps for shape in job.shapes} == {6.0}
    assert job.library.windows


def test_the_guides_multiplier_is_not_called_unused(preset: Make) -> None:
    """Only what a person has set and nothing uses is said; a preset is for mixed
    datasets too.
    """
    job = open_job(*resolve_config(preset("wan 2.2 LoRA 8GB")))
    assert not any("video_batch_size_multiplier" in note for note in job.notes)
    unused = open_job(
        *resolve_config(
            preset("wan 2.2 LoRA 8GB", "video_config.video_batch_size_multiplier=0.25")
        )
    )
    assert any("video_batch_size_multiplier is unused" in note for note in unused.notes)


def test_streamed_blocks_leave_the_text_encoder_on_the_device(preset: Make) -> None:
    """A text encoder that trains needs as much on the card however many blocks of the
    denoiser wait on the host.
    """
    job = open_job(*resolve_config(preset("wan 2.2 Finetune")))
    facts = read_step_spec(PlanInputs.of(job, "FLOAT_32"))
    *trained, rest = facts.trained
    kept = {mode: sizes * 2 for mode, sizes in facts.kept.items()}
    more = replace(
        facts, blocks=facts.blocks * 2, trained=(*trained, *trained, rest), kept=kept
    )
    here, away = (
        need(more, Choice(1, "ON", streamed)).device["optimizer"] for streamed in (0, 4)
    )
    family = open_models(job.spec, job.base, job.config)
    numbers = sum(
        p.numel() for net in family.text_skeletons().values() for p in net.parameters()
    )
    assert here["text encoder's training"] == away["text encoder's training"]
    assert 16 * numbers <= here["text encoder's training"] <= 16 * numbers * 1.2, (
        "in pieces of 512 bytes"
    )
    assert 0 < away["optimizer"] < here["optimizer"], (
        "what trains outside of the blocks stays"
    )
