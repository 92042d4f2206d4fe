"""What a run's most expensive step and its encoders hold.

``memory`` calculates from it what each choice of settings needs; ``read_step`` finds
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from videotune.config import optimizers, schema
from videotune.config.optimizer_classes import is_class
from videotune.files import Count, Number
from videotune.job.experts import trained
from videotune.memory.checkpointing import ATTENTION_SAVED, IN_PARTS, OFF, ON
from videotune.memory.device_buffers import SLOTS
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.planner.cache_size import pixels_of
from videotune.planner.ledger import KEPT, PASSES, CountsByPart, Reading, Work, plus
from videotune.planner.plan_inputs import PlanInputs
from videotune.trainer.build import what_trains
from videotune.trainer.optimizer_bytes import state_bytes
from videotune.types import ClipShape

MODES = (OFF, ATTENTION_SAVED, ON)
"""Gradient checkpointing that is read; CPU_OFFLOADED is ON with the kept inputs on the
host. IN_PARTS is read only where nothing else fits, and its kept inputs are there too.
"""

UNCHANGED = "unchanged"
STREAMED = "blocks streamed from the host"
ASIDE = "the denoiser offloaded"
TILED = "the denoiser offloaded, decoded in tiles"
"""Ways of a phase without a step."""

GATHERED = 2
"""Blocks that are whole on a process with shards of each: one computes, the next one
arrives.
"""


PASSES_OF_BLOCK = 3
"""Passes of a block at most: forward, forward again, and backward."""

ATTENTION_PASSES = 3.5
"""Operations of attention forward and backward, as a multiple of those forward."""

EXCHANGED = 2
EXCHANGE_MOVES = 28
EXCHANGE_STARTS = 14
"""What an attention adds whose tokens several processes share: tensors of its size that
exist beside the activations, that are moved on the device, and kernels. Read on fake
tensors of a network of 1.3 billion parameters.
"""


@dataclass(frozen=True)
class StepSpec:
    """The step of a whole network, and what the run holds between steps."""

    one_sample: Mapping[str, Reading]
    two_samples: Mapping[str, Reading]
    """Readings of a step with one and with two samples, for each of MODES."""

    blocks: tuple[Count, ...]
    """Bytes of each block's weights."""

    trained: tuple[Count, ...]
    """Bytes of the trained weights of each block, and then of everything else."""

    kept: Mapping[str, tuple[Count, ...]]
    """Bytes that each block keeps of one sample from forward to backward, for each of
    MODES.
    """

    encoding_flops_per_pixel: Number = field(kw_only=True)
    """Operations of the autoencoder for each pixel of a clip that it encodes."""

    work: tuple[tuple[Count, Number], ...] = ()
    """(tokens of a sample, operations of its step, with every block recomputed), per
    shape.
    """

    other_phases: Mapping[str, Mapping[str, CountsByPart]] = field(default_factory=dict)
    """Bytes of the phases without a step, by phase and way, the plainest way first."""

    optimizer_share: Number = 1.0
    """The optimizer's state as a share of the one that was read."""

    experts: Count = 1
    """Trained experts.

    What trains of each stays in memory, with its state and average.
    """

    captures: bool = False
    """Whether passes are CUDA graphs where no block is streamed; it is set for a run, and
    never stored.
    """

    def at(self, mode: str, samples: int) -> Reading:
        """Return the reading with a number of samples: every number is affine in it."""
        one = self.one_sample[mode]
        two = self.two_samples[mode]
        return one.extrapolated(one, two, samples - 1)

    def changed(self, change: Callable[[Reading, int], Reading]) -> StepSpec:
        """Return the spec with ``change(reading, samples)`` in place of each reading."""
        one_sample = {mode: change(read, 1) for mode, read in self.one_sample.items()}
        two_samples = {mode: change(read, 2) for mode, read in self.two_samples.items()}
        return replace(self, one_sample=one_sample, two_samples=two_samples)


def sharded(spec: StepSpec, processes: int, full: bool) -> StepSpec:
    """Return what each of several processes holds if the weights are sharded.

    Adapters are whole on each process. So are weights of another dtype than the most,
    which are few and not counted.

    Args:
        spec: The step on one process.
        processes: Number of processes.
        full: Also shard everything that trains.
    """
    if full:
        split = {"weights", "trained", "optimizer", "ema", "gradients"}
        gathered_parts = ["weights", "gradients"]
    else:
        split = {"weights"}
        gathered_parts = ["weights"]
    gathered = dict.fromkeys(gathered_parts, GATHERED * max(spec.blocks, default=0))

    def shard(reading: Reading, samples: int) -> Reading:
        phases = {}
        for phase, parts in reading.phases.items():
            sizes = {}
            for part, size in parts.items():
                sizes[part] = -(-size // processes) if part in split else size
            phases[phase] = plus(sizes, gathered) if phase in PASSES else sizes
        return Reading(phases, reading.work)

    return spec.changed(shard)


def with_shared_samples(spec: StepSpec, parts: int, exchanged: float) -> StepSpec:
    """Return the step of a process that shares each sample with others, by its tokens.

    Of a sample it holds and computes its part. Keys and values of captions, which each
    process has whole, are few and counted so too. diffusers computes attention once more
    in its backward pass.

    Args:
        spec: The step of whole samples.
        parts: Processes that share a sample.
        exchanged: Bytes of one tensor that attention exchanges, of a whole sample.
    """
    attention_forward = spec.one_sample[OFF].work.attention / ATTENTION_PASSES

    def share(reading: Reading, samples: int) -> Reading:
        phases = {}
        for phase, sizes in reading.phases.items():
            shared = dict(sizes)
            if phase in (*PASSES, KEPT):
                shared["activations"] = -(-sizes.get("activations", 0) // parts)
            if phase in PASSES:
                shared["exchanged by attention"] = round(
                    EXCHANGED * samples * exchanged / parts
                )
            phases[phase] = shared

        again = samples * attention_forward
        work = reading.work.plus(Work(flops=again, attention=again)).shared(parts)
        moved = EXCHANGE_MOVES * samples * exchanged / parts
        exchange = Work(flops=0, moved=moved, operations=EXCHANGE_STARTS)
        attentions = PASSES_OF_BLOCK * len(spec.blocks)
        return Reading(phases, work.plus(exchange, attentions))

    # Nothing of attention can be saved.
    kept = {
        mode: tuple(-(-size // parts) for size in sizes)
        for mode, sizes in spec.kept.items()
        if mode not in (ATTENTION_SAVED, IN_PARTS)
    }
    return replace(spec.changed(share), kept=kept)


def is_consistent(spec: StepSpec) -> bool:
    """Whether a stored spec has what a run reads: all readings the same phases, all lists
    an entry for each block, and nothing that is a run's own.
    """
    modes = set(MODES)
    has_modes = (
        modes <= spec.one_sample.keys() == spec.two_samples.keys()
        and modes <= spec.kept.keys()
    )
    if not spec.blocks or not has_modes or spec.captures:
        return False

    for mode, one in spec.one_sample.items():
        two = spec.two_samples[mode]
        if not {"forward", "backward"} <= one.phases.keys() == two.phases.keys():
            return False
    lengths = {len(spec.trained) - 1, *map(len, spec.kept.values())}
    return lengths == {len(spec.blocks)}


class StepReadings(Protocol):
    """Where the numbers of a spec come from: a run on fake tensors, or a table of such
    runs.
    """

    @property
    def blocks(self) -> Mapping[str, Sequence[int]]:
        """Bytes of the weights of each block, by list of blocks; without adapters."""

    @property
    def other_weights(self) -> int:
        """Bytes of the denoiser's weights outside of blocks."""

    def deep_step(self, shape: ClipShape, samples: int, checkpointing: str) -> Reading:
        """Read a training step of the whole network."""

    def kept_by_block(self, shape: ClipShape, checkpointing: str) -> Mapping[str, int]:
        """Read the bytes of activations that a block of each list keeps of one sample
        until the backward pass.
        """

    def encode(self, shape: ClipShape) -> tuple[CountsByPart, float]:
        """Read the VAE that encodes one clip: bytes by part, and operations."""

    def decode(self, shape: ClipShape, tiled: bool = False) -> CountsByPart:
        """Read the VAE that decodes one preview, whole or in tiles: bytes by part."""

    def read_text(self) -> tuple[CountsByPart, float, list[list[int]]]:
        """Read the text encoder: bytes by part, operations, bytes of each block of each
        encoder.
        """

    def text_size(self) -> tuple[int, int]:
        """Return how many modules and numbers of the text encoders train."""


def assemble(
    readings: StepReadings,
    inputs: PlanInputs,
    family: DiffusersModel,
    parts: StepReadings | None = None,
) -> StepSpec:
    """Return the spec of a run's most expensive step and of its other phases.

    Args:
        readings: what is read of the step in MODES, and of the other phases.
        inputs: of the plan.
        family: the base model's.
        parts: what is read of a step IN_PARTS. None: that is left out.
    """
    config = inputs.config
    shape = inputs.shapes[0]
    blocks = tuple(chain.from_iterable(readings.blocks.values()))
    trained_bytes = (0,) * (len(blocks) + 1)
    if config.training_method == "FINE_TUNE" and config.transformer.train:
        trained_bytes = (*blocks, readings.other_weights)
    encoding, encoding_flops = readings.encode(shape)

    sources = dict.fromkeys(MODES, readings)
    if parts is not None:
        sources[IN_PARTS] = parts
    one_sample = {}
    two_samples = {}
    kept_by_mode = {}
    for mode, source in sources.items():
        one_sample[mode] = source.deep_step(shape, 1, mode)
        two_samples[mode] = source.deep_step(shape, 2, mode)
        kept_by_mode[mode] = kept_by_blocks(source, shape, mode)

    spec = StepSpec(
        one_sample=one_sample,
        two_samples=two_samples,
        blocks=blocks,
        trained=trained_bytes,
        kept=kept_by_mode,
        encoding_flops_per_pixel=encoding_flops / pixels_of(shape),
        work=read_work(readings, inputs),
        other_phases=read_other_phases(readings, inputs, encoding),
        optimizer_share=state_bytes_per_number(family, inputs.spec, config)
        / optimizers.OPTIMIZERS["ADAMW"].state_bytes,
        experts=len(trained(inputs.spec, config)) if config.transformer.train else 1,
    )
    if not config.text_in_step:
        return spec
    return with_text_encoder(spec, readings, config)


def state_bytes_per_number(
    family: DiffusersModel, spec: ModelSpec, config: schema.Config
) -> float:
    """Return the optimizer's bytes of state for each number that trains.

    A class may keep more for some shapes than for others, so its bytes are those of the
    shapes of the whole denoiser; those of text encoders are taken for the same.
    """
    settings = config.optimizer
    if not is_class(settings.name):
        return optimizers.OPTIMIZERS[settings.name].state_bytes
    shapes: list[tuple[int, ...]] = [(config.embedding.vectors, spec.text_width)]
    if config.transformer.train:
        parameters = what_trains(family.skeleton(), spec, config)
        shapes = [tuple(parameter.shape) for parameter in parameters.values()]
    return state_bytes(settings, shapes) / sum(map(math.prod, shapes))


def with_text_encoder(
    spec: StepSpec, readings: StepReadings, config: schema.Config
) -> StepSpec:
    """Return the spec of a step in which the text encoder runs too.

    The encoder stays in memory while the denoiser trains, and its activations wait for
    the backward pass.
    """
    encoder, flops, _ = readings.read_text()
    resident = {"text encoder": encoder["text encoder"]}
    if config.text_encoder.train:
        _, numbers = readings.text_size()
        # a part of its own: streaming blocks of the denoiser frees nothing of it
        training = 8 * numbers + round(8 * numbers * spec.optimizer_share)
        resident["text encoder's training"] = training

    def add_encoder(reading: Reading, samples: int) -> Reading:
        waiting = {"activations": encoder.get("activations", 0) * samples}
        phases = {}
        for phase, parts in reading.phases.items():
            added = resident | waiting if phase in PASSES else resident
            phases[phase] = plus(parts, added)
        return Reading(phases, reading.work.plus(Work(flops), samples))

    return spec.changed(add_encoder)


def read_work(
    readings: StepReadings, inputs: PlanInputs
) -> tuple[tuple[int, float], ...]:
    """Return (tokens, operations) of the cheapest, a middle and the most expensive
    shape.
    """
    shapes = {inputs.spec.tokens(shape): shape for shape in inputs.shapes}
    counts = sorted(shapes)
    shapes[counts[-1]] = inputs.shapes[0]
    chosen = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
    return tuple(
        (count, readings.deep_step(shapes[count], 1, ON).work.flops) for count in chosen
    )


def kept_by_blocks(
    readings: StepReadings, shape: ClipShape, mode: str
) -> tuple[int, ...]:
    """Return the bytes of activations that each block keeps until the backward pass."""
    kept = readings.kept_by_block(shape, mode)
    sizes: list[int] = []
    for path, blocks in readings.blocks.items():
        sizes += [kept[path]] * len(blocks)
    return tuple(sizes)


def read_other_phases(
    readings: StepReadings, inputs: PlanInputs, encoding: CountsByPart
) -> dict[str, Mapping[str, CountsByPart]]:
    """Read what is held when no step runs: encoding text, encoding clips, and a
    preview.

    Args:
        readings: Where the numbers come from.
        inputs: What the plan depends on.
        encoding: Bytes by part while a clip is encoded.
    """
    text, _, encoders = readings.read_text()
    streamed = text["text encoder"]
    for blocks in encoders:
        streamed -= sum(blocks) - SLOTS * max(blocks)

    phases: dict[str, Mapping[str, CountsByPart]] = {
        "encoding text": {
            UNCHANGED: text,
            STREAMED: {**text, "text encoder": streamed},
        },
        "encoding clips": {UNCHANGED: encoding},
    }
    if inputs.preview is not None:
        preview = readings.decode(inputs.preview)
        phases["preview"] = dict.fromkeys((UNCHANGED, ASIDE), preview)
    return phases
