"""Made steps in the place of those that are read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from videotune.job.job import Job
from videotune.memory.checkpointing import IN_PARTS, OFF, ON
from videotune.models.base import DiffusersModel
from videotune.planner import fit
from videotune.planner.gpus import Card
from videotune.planner.ledger import Reading, Work
from videotune.planner.step_spec import StepSpec
from videotune.types import ClipShape

DTYPE = "FLOAT_32"

SLOW_LINK = Card("a card with a slow link", 1 << 40, flops=1e14, link=1e2)
"""It computes a block again sooner than it gets its weights from the host."""


def reading(mode: str, samples: int) -> Reading:
    """Two samples together are less work than one after the other."""
    activations = {OFF: 1500, ON: 300, IN_PARTS: 50}[mode]
    flops = {OFF: 3e12, ON: 4e12, IN_PARTS: 5e12}[mode]
    parts = {"weights": 300, "activations": activations * samples}
    phases = {
        "forward": parts,
        "backward": {**parts, "gradients": 10},
        "end": {"weights": 300},
    }
    return Reading(phases, Work(flops * (1 + 0.8 * (samples - 1))))


def made_spec(*modes: str, **previews: int) -> StepSpec:
    """Five blocks of 40 bytes beside 100, and previews with these activations."""
    preview = {
        way: {"autoencoder": 30, "activations": size} for way, size in previews.items()
    }
    return StepSpec(
        one_sample={mode: reading(mode, 1) for mode in modes},
        two_samples={mode: reading(mode, 2) for mode in modes},
        blocks=(40,) * 5,
        trained=(0,) * 6,
        kept={mode: (60 if mode == OFF else 6,) * 5 for mode in modes},
        encoding_flops_per_pixel=1.0,
        other_phases={"preview": preview} if preview else {},
    )


@dataclass
class Specs:
    """What a fit finds in the place of readings, and which of them it has read."""

    plain: StepSpec = field(default_factory=lambda: made_spec(OFF, ON))
    in_parts: StepSpec = field(default_factory=lambda: made_spec(OFF, ON, IN_PARTS))
    with_tiles: StepSpec | None = None
    read: list[str] = field(default_factory=list)
    dtype: str = DTYPE

    def reader(self, name: str) -> Callable[[Job, str], StepSpec]:
        def read(job: Job, dtype: str) -> StepSpec:
            assert (type(job), dtype) == (Job, self.dtype)
            self.read.append(name)
            spec: StepSpec = getattr(self, name)
            return spec

        return read


def specs_in_place(monkeypatch: pytest.MonkeyPatch) -> Specs:
    """Return what every fit of a test finds."""
    specs = Specs()
    monkeypatch.setattr(fit, "step_spec", specs.reader("plain"))
    monkeypatch.setattr(fit, "step_spec_in_parts", specs.reader("in_parts"))
    monkeypatch.setattr(fit, "step_spec_with_tiles", specs.reader("with_tiles"))
    return specs


class StepRun:
    """Readings of a network of two lists of blocks, with a factor that tells where they
    come from.
    """

    blocks: ClassVar = {"first": [1, 2, 3], "second": [4]}
    other_weights = 90

    family: DiffusersModel
    """Set where the run is asked for it."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def deep_step(self, shape: ClipShape, samples: int, mode: str) -> Reading:
        size = self.factor * (shape.height * samples + len(mode))
        names = ("forward", "backward", "end")
        phases = {name: {"weights": size} for name in names}
        return Reading(phases, Work(10.0 * size))

    def kept_by_block(self, shape: ClipShape, mode: str) -> dict[str, int]:
        first = self.factor * (shape.height + len(mode))
        return {"first": first, "second": first + 1}

    def encode(self, shape: ClipShape) -> tuple[dict[str, int], float]:
        return {"vae": shape.frames}, 6.0 * shape.frames * shape.height * shape.width

    def decode(self, shape: ClipShape, tiled: bool = False) -> dict[str, int]:
        return {"vae": shape.frames if tiled else 2 * shape.frames}

    def read_text(self) -> tuple[dict[str, int], float, list[list[int]]]:
        return {"text encoder": 400, "activations": 6}, 50.0, [[10, 30]]

    def text_size(self) -> tuple[int, int]:
        return 3, 1000
