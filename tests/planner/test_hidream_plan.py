"""HiDream-I1 in a plan: tensors without numbers cannot be routed, so its experts have a stand-in there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planner.planning_kit import bytes_of, held_by_a_real_step
from videotune.config.schema import Config
from videotune.models.registry import find
from videotune.planner.fake_run import FakeRun
from videotune.types import ClipShape


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
