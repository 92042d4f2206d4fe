"""What a choice of settings needs of a device and of the host, and which choice fits a
card.

All of it is arithmetic on a ``StepSpec``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from videotune.memory.block_offload import spread
from videotune.memory.checkpointing import (
    ATTENTION_SAVED,
    CPU_OFFLOADED,
    IN_PARTS,
    INPUTS_ON_HOST,
    OFF,
    ON,
)
from videotune.memory.device_buffers import SLOTS
from videotune.memory.host_weights import PIECE
from videotune.planner.gpus import Card
from videotune.planner.ledger import FIRST, KEPT, PASSES, CountsByPart, Work, plus
from videotune.planner.step_spec import UNCHANGED, StepSpec

SPARE = 1.3
"""Factor on activations: shapes do not show the allocator's fragments or libraries'
buffers.
"""

ROOM = 2**30
"""Bytes for CUDA's context and its libraries."""

HOST_BYTES = 8.0
"""Bytes on the host per byte of trained and streamed bfloat16 weights.

They are the float32 master, the gradient, and two moments.
"""

SAVING_SECONDS = 0.003
"""Seconds of the host for each block of a pass in which torch chooses what
ATTENTION_SAVED or IN_PARTS keeps.

Measured on one slow CPU core: 0.009.
"""

PRODUCTS_REACH = 0.69
ATTENTION_REACHES = 0.55
MEMORY_REACHES = 0.78
"""Shares of a card's rate that matrix products and attention reach, and of its
memory's bandwidth that all other operations reach; fitted to an H100.
"""

COMPILED_MOVES = 0.31
COMPILED_STARTS = 0.57
"""Shares of the bytes outside of products and attention that compiled blocks move, and of
the operations that the host starts; measured on an H200, for a model of 2B.
"""

LAUNCH_SECONDS = 40e-6
"""Seconds in which the host starts an operation.

Measured beside an H100 and an H200: 36e-6 to 70e-6, with more work in Python than today.
"""


EIGHT_BIT_RATE = 2.0
"""How many times as fast as bfloat16 a card multiplies eight-bit numbers, as the makers
state of every card that has such products. No card has measured it here.
"""


@dataclass(frozen=True)
class Choice:
    """Memory settings of a step."""

    micro_batch: int
    """Samples of a forward pass."""
    checkpointing: str
    streamed: int
    """Number of streamed blocks."""
    accumulates: bool = False
    """A step has several passes: the gradients of one exist during the next."""

    @property
    def recomputing(self) -> str:
        """The mode in which blocks that are computed again were read."""
        if self.checkpointing in (ATTENTION_SAVED, IN_PARTS):
            return self.checkpointing
        return ON

    @property
    def inputs_on_host(self) -> bool:
        """Whether the inputs of blocks wait on the host."""
        return self.checkpointing in INPUTS_ON_HOST


@dataclass(frozen=True)
class Need:
    """What a choice needs."""

    choice: Choice
    device: Mapping[str, CountsByPart]
    """Bytes on the device, by phase and part."""
    host: CountsByPart
    work: Work
    """What a micro-batch computes and moves on the device."""
    moved: float
    """Bytes of a micro-batch over the link between host and device."""
    blocks: int = 0
    """Number of blocks."""
    is_captured: bool = False
    """Whether passes are CUDA graphs, which the host starts at once."""

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


def with_overhead(parts: CountsByPart) -> dict[str, int]:
    """Return the parts, and what a card must have beside the tensors."""
    activations = parts.get("activations", 0)
    return {
        **parts,
        "allocator and libraries": math.ceil(SPARE * activations) - activations,
        "CUDA context": ROOM,
    }


def room(parts: CountsByPart) -> int:
    """Return the bytes that a card must have: the parts, with a margin, and the
    context.
    """
    return sum(with_overhead(parts).values())


def need(spec: StepSpec, choice: Choice) -> Need:
    """Return what a choice holds while it trains."""
    count = len(spec.blocks)
    streamed = spread(count, choice.streamed / count)
    recomputed = streamed if choice.checkpointing == OFF else range(count)

    moments = [
        (phase, _on_device(spec, streamed, phase, parts))
        for phase, parts in step_moments(spec, choice, recomputed)
    ]
    moments.sort(key=lambda moment: sum(moment[1].values()))
    device = dict(moments)  # of each phase its largest moment

    off = spec.at(OFF, choice.micro_batch).work
    on = spec.at(choice.recomputing, choice.micro_batch).work
    again = on.plus(off, -1)
    return Need(
        choice=choice,
        device=device,
        host=_on_host(spec, choice, streamed),
        work=off.plus(again, len(recomputed) / count),
        moved=_moved_bytes(spec, choice, streamed),
        blocks=count,
        is_captured=spec.captures and not streamed and not choice.inputs_on_host,
    )


def _ring_bytes(spec: StepSpec, streamed: Collection[int]) -> int:
    """Return the bytes of the device buffers through which blocks are streamed."""
    if not streamed:
        return 0
    return min(SLOTS, len(streamed)) * max(spec.blocks[i] for i in streamed)


def _on_device(
    spec: StepSpec, streamed: Collection[int], phase: str, parts: CountsByPart
) -> dict[str, int]:
    """Return the parts at a moment without the streamed blocks, which are on the host."""
    streamed_bytes = sum(spec.blocks[i] for i in streamed)
    trained_bytes = sum(spec.trained[i] for i in streamed)
    resident_share = 1 - trained_bytes / max(1, sum(spec.trained))

    sizes = dict(parts)
    sizes["weights"] = sizes.get("weights", 0) - (streamed_bytes - trained_bytes)
    sizes["optimizer"] = round(sizes.get("optimizer", 0) * spec.optimizer_share)
    scaled = ["trained", "optimizer", "ema", "gradients"]
    if phase not in PASSES:
        scaled.append("activations")  # float32 gradients of master weights
    for part in scaled:
        copies = 1 if part in ("gradients", "activations") else spec.experts
        sizes[part] = round(sizes.get(part, 0) * resident_share * copies)
    sizes["ring"] = _ring_bytes(spec, streamed)
    return {part: size for part, size in sizes.items() if size > 0}


def _on_host(
    spec: StepSpec, choice: Choice, streamed: Collection[int]
) -> dict[str, int]:
    """Return the bytes on the host by part."""
    streamed_bytes = sum(spec.blocks[i] for i in streamed)
    trained_bytes = sum(spec.trained[i] for i in streamed)
    host = {}
    if streamed:
        # torch rounds pinned memory up to powers of two
        whole_pieces = streamed_bytes // PIECE * PIECE
        remainder = streamed_bytes % PIECE
        host["streamed weights"] = whole_pieces + (1 << (remainder - 1).bit_length())
    if trained_bytes:
        host["masters, gradients and optimizer"] = round(trained_bytes * HOST_BYTES)
    if choice.inputs_on_host:
        inputs = [size * choice.micro_batch for size in spec.kept[ON]]
        host["block inputs"] = sum(1 << (size - 1).bit_length() for size in inputs)
    return host


def _moved_bytes(spec: StepSpec, choice: Choice, streamed: Collection[int]) -> float:
    """Return the bytes of a micro-batch over the link."""
    streamed_bytes = sum(spec.blocks[i] for i in streamed)
    moved = 2.0 * streamed_bytes - _ring_bytes(spec, streamed)
    if choice.inputs_on_host:
        moved += 2.0 * sum(spec.kept[ON]) * choice.micro_batch
    return moved


def step_moments(
    spec: StepSpec, choice: Choice, recomputed: Collection[int]
) -> Iterator[tuple[str, CountsByPart]]:
    """Yield each moment of a step that may be the largest of its phase.

    While a block computes, the blocks before it keep their activations, and the
    gradients of the blocks after it exist.

    Args:
        spec: The step.
        choice: The memory settings.
        recomputed: Blocks that are computed again in the backward pass.

    Yields:
        (phase, bytes by part)
    """
    modes = [
        choice.recomputing if i in recomputed else OFF for i in range(len(spec.blocks))
    ]
    readings = {mode: spec.at(mode, choice.micro_batch).phases for mode in spec.kept}
    last = readings[modes[-1]]
    passes = [phase for phase in PASSES if phase in last]
    all_gradients = max(last[phase].get("gradients", 0) for phase in passes)
    later_gradients = all_gradients - last["backward"].get("gradients", 0)
    gradients_per_block = later_gradients / max(1, len(modes) - 1)

    kept = {}
    for mode in spec.kept:
        kept[mode] = [choice.micro_batch * size for size in spec.kept[mode]]
    # number of blocks before the computing one whose inputs are on the device
    inputs_ahead = 1 if choice.inputs_on_host else len(modes)

    def moment(phase: str, i: int) -> tuple[str, CountsByPart]:
        mode = modes[i]
        parts = readings[mode][phase]
        activations = parts.get("activations", 0)
        activations += sum(
            kept[modes[j]][j] for j in range(max(0, i - inputs_ahead), i)
        )
        if phase == FIRST:
            blocks_behind = -i
        else:
            activations += kept[mode][i] - sum(kept[mode])
            blocks_behind = len(modes) - 1 - i

        gradients = parts.get("gradients", 0) + round(
            blocks_behind * gradients_per_block
        )
        if choice.accumulates:
            gradients = all_gradients
        return phase, {**parts, "activations": activations, "gradients": gradients}

    yield moment("forward", len(modes) - 1)
    for i, size in enumerate(spec.kept[OFF]):
        # blocks of another list than the last block's are like the first
        is_like_first = i == 0 or size != spec.kept[OFF][-1]
        yield moment(FIRST if FIRST in last and is_like_first else "backward", i)
    for phase, parts in last.items():
        if phase not in (*PASSES, KEPT):
            yield phase, parts


def fit_other_phases(
    spec: StepSpec, training: Need, vram: int | None
) -> dict[str, tuple[str, CountsByPart]]:
    """Return the way and the parts of each phase without a step: the plainest way that
    fits.

    A preview is decoded beside the denoiser, with the denoiser offloaded, or also in
    tiles.
    """
    resting = training.device.get("end", {})
    offloaded = {
        part: size for part, size in resting.items() if part not in ("weights", "ring")
    }
    chosen: dict[str, tuple[str, CountsByPart]] = {}
    for phase, ways in spec.other_phases.items():
        for way, phase_parts in ways.items():
            parts: CountsByPart = phase_parts
            if phase == "preview":
                denoiser = resting if way == UNCHANGED else offloaded
                parts = plus(parts, denoiser)
            chosen[phase] = (way, parts)
            if vram is None or room(parts) <= vram:
                break
    return chosen


def seconds(
    training: Need, batch: int, card: Card, relative_work: float = 1.0
) -> float:
    """Return the calculated seconds of a step: of the slowest of the card's operations,
    the host that starts them, and the link between them.

    Args:
        training: What the step needs.
        batch: Samples of the step.
        card: The card.
        relative_work: Operations of this bucket's samples as a share of the most
            expensive.
    """
    passes = -(-batch // min(training.choice.micro_batch, batch))
    computing = relative_work * card_seconds(training.work, card)
    moving = training.moved / card.link
    return passes * max(computing, moving, _host_seconds(training, card))


def compiled(training: Need) -> Need:
    """Return what a step of compiled blocks needs."""
    work = replace(
        training.work,
        moved=COMPILED_MOVES * training.work.moved,
        operations=COMPILED_STARTS * training.work.operations,
    )
    return replace(training, work=work)


def card_seconds(work: Work, card: Card) -> float:
    """Return the seconds in which a card does some work."""
    # operations of bfloat16 that take as long
    flops = work.flops - work.eight_bit * (1 - 1 / EIGHT_BIT_RATE)
    if card.bandwidth is None:
        return flops / (card.reached * card.flops)
    products = (flops - work.attention) / (PRODUCTS_REACH * card.flops)
    attention = work.attention / (ATTENTION_REACHES * card.flops)
    others = work.moved / (MEMORY_REACHES * card.bandwidth)
    return card.pace * (products + attention + others)


def _host_seconds(training: Need, card: Card) -> float:
    """Return the seconds in which the host starts the operations of a pass; those of an
    unknown card are counted with its operations.
    """
    if card.bandwidth is None or training.is_captured:
        return 0.0
    starting = LAUNCH_SECONDS * training.work.operations
    if training.choice.checkpointing in (ATTENTION_SAVED, IN_PARTS):
        starting += SAVING_SECONDS * training.blocks
    return starting


def relative_work(spec: StepSpec, tokens: int) -> float:
    """Return the operations of a sample as a share of the most expensive one's.

    A polynomial through the readings, since attention grows with the square of the
    tokens.
    """
    points = sorted(dict(spec.work).items())
    if len(points) < 2:
        return 1.0
    most_tokens, most_work = points[-1]
    x = np.array([float(count) for count, _ in points]) / float(most_tokens)
    y = [work / most_work for _, work in points]
    curve = np.polyfit(x, y, len(points) - 1)
    return float(np.polyval(curve, tokens / float(most_tokens)))


@dataclass(frozen=True)
class Constraints:
    """What the config has decided. None: free to choose."""

    micro_batch: int | None = None
    checkpointing: str | None = None
    streamed: int | None = None
    allows_cpu_offload: bool = True
    """Whether the inputs of blocks may wait on the host."""
    accumulates: bool = False
    """A step has several passes even if none is split."""
    tries_parts: bool = False
    """Also offer IN_PARTS. A spec may have its reading because of an earlier plan, which
    must not change this one.
    """


def choices(spec: StepSpec, batch: int, constraints: Constraints) -> list[Choice]:
    """Return all choices within the constraints, the plainest first."""
    if constraints.micro_batch:
        sizes = [constraints.micro_batch]
    else:
        sizes = sorted({-(-batch // n) for n in range(1, batch + 1)}, reverse=True)

    if constraints.checkpointing:
        modes = [constraints.checkpointing]
    elif constraints.allows_cpu_offload:
        modes = [OFF, ON, ATTENTION_SAVED, CPU_OFFLOADED]
        if constraints.tries_parts:
            modes.append(IN_PARTS)
    else:
        modes = [OFF, ON, ATTENTION_SAVED]

    counts = list(range(len(spec.blocks) + 1))
    if constraints.streamed is not None:
        counts = [constraints.streamed]

    result = []
    for streamed in counts:
        for mode in modes:
            # Streamed blocks have no attention to save: refused in a config.
            is_read = mode in spec.kept
            if mode == ATTENTION_SAVED and (streamed or not is_read):
                continue
            if mode == IN_PARTS and not is_read:
                continue
            for size in sizes:
                accumulates = constraints.accumulates or size < batch
                result.append(Choice(min(size, batch), mode, streamed, accumulates))
    return result


def fastest(
    spec: StepSpec,
    batch: int,
    constraints: Constraints,
    vram: float,
    card: Card,
    host: int | None = None,
) -> Need | None:
    """Return the fitting choice with the shortest step; of equals the plainest.

    Args:
        spec: The step.
        batch: Samples of a step.
        constraints: What the config has decided.
        vram: Bytes of the device; infinite without a limit.
        card: Rates of the device.
        host: Free bytes of host memory. None: unknown.

    Returns:
        None if nothing fits.
    """
    best: Need | None = None
    best_seconds = math.inf
    for choice in choices(spec, batch, constraints):
        training = need(spec, choice)
        fits_host = host is None or sum(training.host.values()) <= host
        if training.needed > vram or not fits_host:
            continue
        step_seconds = seconds(training, batch, card)
        if step_seconds < best_seconds * (1 - 1e-9):
            best = training
            best_seconds = step_seconds
    return best


def smallest(spec: StepSpec, batch: int, constraints: Constraints) -> Need:
    """Return the choice that needs least."""
    needs = [need(spec, choice) for choice in choices(spec, batch, constraints)]
    return min(needs, key=lambda training: training.needed)
