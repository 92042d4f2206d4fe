"""Arithmetic on what was read of a step: which settings fit a card, what each holds where, and how long a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from videotune.files import Count, Number
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON
from videotune.memory.device_buffers import SLOTS
from videotune.memory.weight_streaming import spread
from videotune.planner.cards import REACHED, Card
from videotune.planner.measure import Parts, Reading, plus

SPARE = 1.3
"""What activations are multiplied by: the allocator's pieces, and the libraries' own room, are not seen in shapes."""

ROOM = 2**30
"""Bytes for CUDA's context and its libraries."""


@dataclass(frozen=True)
class Choice:
    """Samples of a forward pass, gradient checkpointing, and how many of the blocks are streamed."""

    micro_batch: int
    checkpointing: str
    streamed: int


@dataclass(frozen=True)
class StepSpec:
    """A whole network's step: readings with one and with two samples for OFF and ON.

    ``blocks``: bytes of each block's weights; ``trained``: of those in it that train; ``kept``: activations that a block
    keeps of one sample from forward to backward. ``elsewhere``: what the run holds when no step runs, by phase, each in
    several ways, the plainest first. ``work``: (tokens of a sample, operations of a step with it, all blocks computed again)
    of up to three shapes. ``moments``: the optimizer's state as a share of what was read.
    """

    one: Mapping[str, Reading]
    two: Mapping[str, Reading]
    blocks: tuple[Count, ...]
    trained: tuple[Count, ...]
    kept: Parts
    work: tuple[tuple[Count, Number], ...] = ()
    elsewhere: Mapping[str, Mapping[str, Parts]] = field(default_factory=dict)
    moments: Number = 1.0

    def at(self, mode: str, samples: int) -> Reading:
        """The reading with so many samples: between one and two every number goes in a straight line, and on from there."""
        one, two = self.one[mode], self.two[mode]
        return one.extrapolated(one, two, samples - 1)

    def changed(self, change: Callable[[Reading, int], Reading]) -> StepSpec:
        """The spec with ``change(reading, samples)`` in the place of each reading."""
        one = {mode: change(reading, 1) for mode, reading in self.one.items()}
        two = {mode: change(reading, 2) for mode, reading in self.two.items()}
        return replace(self, one=one, two=two)


GATHERED = 2
"""Blocks that lie whole with a process that has shards of each: one computes, the next one arrives."""


def sharded(spec: StepSpec, processes: int, full: bool) -> StepSpec:
    """What each of several processes holds where weights are sharded, and with ``full`` all that trains of them.

    An adapter each has whole. What has another dtype than most stays whole too, which is little and not counted.
    """
    split = ("weights", "trained", "optimizer", "ema", "gradients") if full else ("weights",)
    gathered = dict.fromkeys(("weights", "gradients") if full else split, GATHERED * max(spec.blocks, default=0))

    def part(reading: Reading, samples: int) -> Reading:
        phases = {}
        for name, parts in reading.phases.items():
            own = {key: -(-size // processes) if key in split else size for key, size in parts.items()}
            phases[name] = plus(own, gathered) if name in ("forward", "backward") else own
        return Reading(phases, reading.flops)

    return spec.changed(part)


@dataclass(frozen=True)
class Need:
    """What a choice needs: bytes by phase and part on the device; by part on the host; flops and bytes over the link of one
    micro-batch."""

    choice: Choice
    device: Mapping[str, Parts]
    host: Parts
    flops: float
    moved: float

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(self.device, key=lambda phase: room(self.device[phase]))

    @property
    def allocated(self) -> int:
        """Bytes allocated at the worst moment."""
        return sum(self.device[self.worst].values())

    @property
    def needed(self) -> int:
        """Bytes that a card must have."""
        return room(self.device[self.worst])


def room(parts: Parts) -> int:
    """Bytes that a card must have for this: what stays as it is, activations with some to spare, and the context."""
    moving = parts.get("activations", 0)
    return sum(parts.values()) - moving + math.ceil(SPARE * moving) + ROOM


def need(spec: StepSpec, choice: Choice) -> Need:
    """What a choice holds while it trains."""
    b, count = choice.micro_batch, len(spec.blocks)
    # so few that each has a slot of its own: nothing would be won
    streamed = spread(count, choice.streamed / count) if choice.streamed > SLOTS else []
    resident = count - len(streamed)
    slots = SLOTS * max((spec.blocks[i] for i in streamed), default=0)
    streamed_bytes = sum(spec.blocks[i] for i in streamed)
    trained_bytes = sum(spec.trained[i] for i in streamed)
    stays = 1 - trained_bytes / max(1, sum(spec.trained))
    mixed = choice.checkpointing == OFF and bool(streamed)  # streamed blocks are computed again, the others keep all
    reading = spec.at(OFF if choice.checkpointing == OFF and not streamed else ON, b)
    flops = reading.flops
    if mixed:
        flops -= resident / count * (reading.flops - spec.at(OFF, b).flops)
    device = {}
    for name, parts in reading.phases.items():
        here = dict(parts)
        here["weights"] = here.get("weights", 0) - (streamed_bytes - trained_bytes)
        here["optimizer"] = round(here.get("optimizer", 0) * spec.moments)
        updating = ("activations",) if name not in ("forward", "backward") else ()  # float32 gradients of masters
        for part in ("trained", "optimizer", "ema", "gradients", *updating):
            here[part] = round(here.get(part, 0) * stays)
        here["ring"] = slots
        if name in ("forward", "backward"):
            if mixed:
                here["activations"] += resident * (spec.kept[OFF] - spec.kept[ON]) * b
            if choice.checkpointing == CPU_OFFLOADED:
                here["activations"] -= max(0, count - SLOTS) * spec.kept[ON] * b
        device[name] = {part: size for part, size in here.items() if size > 0}
    host, moved = {}, 0.0
    if streamed:
        host["streamed weights"] = streamed_bytes
        moved += 2.0 * streamed_bytes - slots
    if trained_bytes:
        host["masters, gradients and optimizer"] = round(trained_bytes * HOST_A_BYTE)
    if choice.checkpointing == CPU_OFFLOADED:
        host["block inputs"] = count * spec.kept[ON] * b
        moved += 2.0 * host["block inputs"]
    return Need(choice, device, host, flops, moved)


HOST_A_BYTE = 8.0
"""Bytes on the host a byte of bfloat16 weights that train and are streamed: float32 master, gradient and two moments."""


def others(spec: StepSpec, training: Need, vram: int | None) -> dict[str, tuple[str, Parts]]:
    """For each phase without a step, in which way it is done and what it then holds: the plainest way that fits.

    A preview is decoded beside the denoiser, with the denoiser set aside, or in tiles then.
    """
    resting = training.device.get("end", {})
    found: dict[str, tuple[str, Parts]] = {}
    for phase, ways in spec.elsewhere.items():
        for way, own in ways.items():
            parts: Parts = own
            if phase == "preview":
                left = resting if way == PLAIN else {k: v for k, v in resting.items() if k not in ("weights", "ring")}
                parts = plus(own, left)
            found[phase] = (way, parts)
            if vram is None or room(parts) <= vram:
                break
    return found


PLAIN, STREAMED, ASIDE = "as it is", "its blocks streamed", "the denoiser set aside"
TILED = "the denoiser set aside, decoded in tiles"
"""Ways of a phase without a step."""


def seconds(wanted: Need, batch: int, card: Card, lighter: float = 1.0) -> float:
    """Seconds of a step, calculated: operations at the rate a step reaches, unless what is moved takes longer.

    ``lighter``: the operations of this bucket's samples as a share of the dearest one's.
    """
    passes = -(-batch // min(wanted.choice.micro_batch, batch))
    return passes * max(lighter * wanted.flops / (REACHED * card.flops), wanted.moved / card.link)


def lighter(spec: StepSpec, tokens: int) -> float:
    """Operations of a sample of so many tokens as a share of the dearest one's: attention goes with their square."""
    known = sorted(dict(spec.work).items())
    if len(known) < 2:
        return 1.0
    x = np.array([float(count) for count, _ in known])
    line = np.polyfit(x / x[-1], [work / known[-1][1] for _, work in known], len(known) - 1)
    return float(np.polyval(line, tokens / x[-1]))


@dataclass(frozen=True)
class Fixed:
    """What the person has decided; None: free to choose. ``waits`` False: block inputs cannot wait on the host."""

    micro_batch: int | None = None
    checkpointing: str | None = None
    streamed: int | None = None
    waits: bool = True


def choices(spec: StepSpec, batch: int, fixed: Fixed) -> list[Choice]:
    """All that may be chosen, the plainest first."""
    sizes = [fixed.micro_batch] if fixed.micro_batch else sorted({-(-batch // n) for n in range(1, batch + 1)})[::-1]
    modes = [fixed.checkpointing] if fixed.checkpointing else [OFF, ON, *([CPU_OFFLOADED] if fixed.waits else [])]
    streamed = [fixed.streamed] if fixed.streamed is not None else range(len(spec.blocks) + 1)
    return [Choice(min(size, batch), mode, count) for count in streamed for mode in modes for size in sizes]


def fastest(spec: StepSpec, batch: int, fixed: Fixed, vram: int, card: Card, host: int | None = None) -> Need | None:
    """The choice with the shortest step among those that fit; of equals the plainest. None: nothing fits.

    ``host``: bytes of host memory that may be taken (None: not known).
    """
    best: tuple[float, Need] | None = None
    for wanted in (need(spec, choice) for choice in choices(spec, batch, fixed)):
        if wanted.needed <= vram and (host is None or sum(wanted.host.values()) <= host):
            took = seconds(wanted, batch, card)
            if best is None or took < best[0] * (1 - 1e-9):
                best = (took, wanted)
    return best and best[1]


def smallest(spec: StepSpec, batch: int, fixed: Fixed) -> Need:
    """The choice that needs least."""
    return min((need(spec, choice) for choice in choices(spec, batch, fixed)), key=lambda wanted: wanted.needed)
