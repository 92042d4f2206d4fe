"""What a plan counts of text connectors that run in the step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planner.test_planner import held_by_a_real_step, peak, plan_inputs
from tests.support.clips import noise, write_dataset
from tests.support.trainers import Lab, job_of, overrides_of
from videotune.commands.cache import cache, list_cache
from videotune.config.schema import Config
from videotune.memory.checkpointing import OFF, ON
from videotune.models.registry import find
from videotune.planner.measure import FakeRun, weight_bytes
from videotune.planner.plan import make_plan
from videotune.planner.read_step import fake_run
from videotune.types import ClipShape

Bases = Callable[..., Path]
BOTH = ["attention", "connectors"]


def families(folder: Path, sound: bool = False) -> tuple[Any, Any]:
    """A checkpoint without and with the connectors in the step."""
    opened = []
    for in_step in (False, True):
        family = find("ltx2")(folder, torch.device("cpu"), torch.float32)
        if sound:
            family.spec = family.spec.with_sound(["video", "sound"])
        if in_step:
            family.spec = family.spec.with_connectors()
        opened.append(family)
    return opened[0], opened[1]


@pytest.mark.parametrize("version", find("ltx2").variants)
def test_their_weights_are_counted_without_the_projections(
    version: str, tiny_bases: Bases
) -> None:
    folder = tiny_bases("ltx2", version)
    plain, in_step = families(folder)
    connectors = in_step.part_skeleton("connectors")
    used = sum(
        parameter.nbytes
        for name, parameter in connectors.named_parameters()
        if "text_proj_in" not in name
    )
    weights = [
        weight_bytes(FakeRun(each, Config()).denoiser()) for each in (plain, in_step)
    ]
    assert weights[1] - weights[0] == used > 0
    assert FakeRun(in_step, Config()).depths == {
        "connectors.video_connector.transformer_blocks": 1,
        "connectors.audio_connector.transformer_blocks": 1,
        "transformer_blocks": 2,
    }


@pytest.mark.parametrize("sound", [False, True])
def test_a_real_step_holds_what_was_read(sound: bool, tiny_bases: Bases) -> None:
    """Within 2 %, as for other networks: the very step, by the allocator's events."""
    _, family = families(tiny_bases("ltx2"), sound)
    config = Config(lora={"targets": BOTH})
    shape = ClipShape(17, 128, 128, 24.0, sound=sound)
    run = FakeRun(family, config, piece=1)
    for checkpointing in (OFF, ON):
        held = held_by_a_real_step(family, config, shape, 2, checkpointing)
        planned = peak(run.deep_step(shape, 2, checkpointing))
        assert planned == pytest.approx(held, rel=0.02), checkpointing


def test_their_adapter_and_activations_are_counted(tiny_bases: Bases) -> None:
    _, family = families(tiny_bases("ltx2"))
    shape = ClipShape(9, 64, 64, 24.0)
    readings = {}
    for targets in ("attention", "connectors"):
        run = FakeRun(family, Config(lora={"targets": targets, "rank": 4}), piece=1)
        readings[targets] = run.deep_step(shape, 1, OFF).phases["backward"]
        trained = readings[targets]["trained"]
        if targets == "connectors":
            # Six modules of one block: four of 32 x 32, and 32 x 128 both ways.
            assert trained == 4 * 4 * (4 * (32 + 32) + 2 * (32 + 128))
    assert all(reading["activations"] > 0 for reading in readings.values())


def test_plans_with_connectors_have_a_key_of_their_own(tiny_bases: Bases) -> None:
    base = tiny_bases("ltx2")
    keys = {
        plan_inputs(base, f"lora.targets={targets}").key
        for targets in ("attention", "connectors", '["attention","connectors"]')
    }
    assert len(keys) == 3
    inputs = plan_inputs(base, "lora.targets=connectors")
    assert inputs.key != replace(inputs, spec=plan_inputs(base, "").spec).key
    assert fake_run(inputs).family.spec.connectors_in_step


@pytest.mark.parametrize("version", find("ltx2").variants)
def test_the_plans_bytes_of_captions_bound_what_the_cache_writes(
    version: str, tiny_bases: Bases, tmp_path: Path
) -> None:
    frames = {f"{name}.mkv": noise(9, 64, 64, seed=ord(name)) for name in "ab"}
    clips = write_dataset(tmp_path / "clips", frames, {}, fps=24)
    lab = Lab(tiny_bases("ltx2", version), clips, tmp_path / "cache", tmp_path)
    written = {}
    planned = {}
    for targets in ("attention", "connectors"):
        chosen = {"lora.targets": targets, "resolution": "64x64"}
        planned[targets] = make_plan(job_of(lab, chosen))["disk"]["text_bytes_at_most"]
        folder = cache(overrides_of(lab, chosen)).folder
        store, _ = list_cache(folder)
        written[targets] = {
            entry.name: entry.bytes for entry in store.entries() if entry.kind == "text"
        }
    # Both are there beside each other, under names of their own.
    added = written["connectors"].keys() - written["attention"].keys()
    assert len(added) == len(written["attention"]) == len(written["connectors"]) / 2
    of_connectors = sum(written["connectors"][name] for name in added)
    assert of_connectors < planned["connectors"] <= planned["attention"]
    assert of_connectors < 0.05 * sum(written["attention"].values())
