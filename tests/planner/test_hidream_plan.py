"""HiDream-I1 in a plan: tensors without numbers cannot be routed, so its experts have a stand-in there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planner.planning_kit import bytes_of, held_by_a_real_step
from videotune.config.load import preset_names, preset_reasons, read_preset
from videotune.config.resolve import resolve
from videotune.config.schema import Config
from videotune.models.hidream import HiDream
from videotune.models.registry import find
from videotune.planner.fake_run import FakeRun
from videotune.planner.fit import OPEN
from videotune.types import ClipShape

OURS = [name for name in preset_names() if name.startswith("hidream")]


@pytest.mark.parametrize(("targets", "method"), [("attention", "LORA"), ("attention", "FINE_TUNE")])
def test_a_plan_holds_what_a_step_holds(targets: str, method: str, tiny_bases: Callable[..., Path]) -> None:
    """Within 5 %: the very step on real tensors, routed as the numbers say, by the allocator's own events."""
    folder, shape = tiny_bases("hidream"), ClipShape(1, 96, 96, 1.0)
    config, cpu = Config(training_method=method, lora={"targets": targets}), torch.device("cpu")
    planned = FakeRun(find("hidream")(folder, cpu, torch.float32), config, piece=1).deep_step(shape, 2, "OFF")
    real = held_by_a_real_step(find("hidream")(folder, cpu, torch.float32), config, shape, 2, "OFF")
    assert planned.peak == pytest.approx(real, rel=0.05)


def test_a_plan_reads_all_text_encoders_and_their_blocks(tiny_bases: Callable[..., Path]) -> None:
    family: Any = find("hidream")(tiny_bases("hidream"), torch.device("cpu"), torch.float32)
    parts, _, blocks = FakeRun(family, Config(), piece=1).read_text()
    encoders = [part.encoder for part in family.text_parts().values()]
    assert parts["text encoder"] == pytest.approx(sum(bytes_of(net) for net in encoders), rel=1e-3)
    assert [len(one) for one in blocks] == [1, 1, 2, 2]  # the tiny T5's one block is a list of two layers itself


@pytest.mark.parametrize("name", OURS)
def test_presets_ask_for_what_the_model_takes(name: str) -> None:
    from videotune.data.buckets import parse_resolution

    preset = read_preset(name)
    config = resolve({}, preset, HiDream.spec).config
    parse_resolution(preset["resolution"], HiDream.spec.rules)
    assert (config.lora.targets, config.timestep_shift, config.training_method) == ("attention", 3.0, "LORA")
    assert not set(OPEN) & set(preset), "memory is left to the plan"
    assert "docs/hidream.md" in preset_reasons(name)["base_model_name"]


def test_there_are_presets() -> None:
    assert len(OURS) == 4
