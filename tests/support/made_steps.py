"""A made step of five blocks in the place of one that is read."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from videotune.job.job import Job
from videotune.memory.checkpointing import IN_PARTS, OFF, ON
from videotune.planner import fit
from videotune.planner.gpus import Card
from videotune.planner.ledger import Reading, Work
from videotune.planner.step_spec import StepSpec

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

    def reader(self, name: str) -> Callable[[Job, str], StepSpec]:
        def read(job: Job, dtype: str) -> StepSpec:
            assert (type(job), dtype) == (Job, DTYPE)
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
