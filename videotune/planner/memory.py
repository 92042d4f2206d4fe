"""What a run needs of a device and of the host, how long its steps take, and which settings fit a card.

Steps and encoders are read on fake tensors and remembered in the cache; all else is arithmetic on what was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from videotune._version import __version__
from videotune.config import optimizers, schema
from videotune.files import Count, Number, checked, digest, write_json
from videotune.job.experts import trained
from videotune.job.job import Job
from videotune.memory.block_offload import spread
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON
from videotune.memory.device_buffers import SLOTS
from videotune.memory.host_weights import PIECE
from videotune.models.registry import find
from videotune.planner.gpus import Card
from videotune.planner.measure import (
    FEW,
    FIRST,
    KEPT,
    MORE,
    PASSES,
    CountsByPart,
    FakeRun,
    Reading,
    plus,
    weight_bytes,
)
from videotune.trainer.build import DTYPES, weights_of
from videotune.types import ClipShape, ModelSpec
from videotune.validation.selection import preview_settings

SPARE = 1.3
"""What activations are multiplied by: the allocator's pieces, and the libraries' own room, are not seen in shapes."""

ROOM = 2**30
"""Bytes for CUDA's context and its libraries."""


@dataclass(frozen=True)
class Choice:
    """Samples of a forward pass, gradient checkpointing, and how many of the blocks are streamed.

    ``accumulates``: a step has several passes, and the gradients of one are there during the next.
    """

    micro_batch: int
    checkpointing: str
    streamed: int
    accumulates: bool = False


@dataclass(frozen=True)
class StepSpec:
    """A whole network's step: readings with one and with two samples for OFF and ON.

    ``blocks``: bytes of each block's weights; ``trained``: of those that train, in each block and then in all else;
    ``kept``: bytes that each block keeps of one sample from forward to backward, for OFF and ON. ``elsewhere``: what the run
    holds when no step runs, by phase, each in several ways, the plainest first. ``work``: (tokens of a sample, operations of
    a step with it, all blocks computed again) of up to three shapes. ``moments``: the optimizer's state as a share of what
    was read. ``experts``: so many train in turns, and what trains of each, with its state and average, stays in memory.
    """

    one: Mapping[str, Reading]
    two: Mapping[str, Reading]
    blocks: tuple[Count, ...]
    trained: tuple[Count, ...]
    kept: Mapping[str, tuple[Count, ...]]
    work: tuple[tuple[Count, Number], ...] = ()
    elsewhere: Mapping[str, Mapping[str, CountsByPart]] = field(default_factory=dict)
    moments: Number = 1.0
    experts: Count = 1

    def at(self, mode: str, samples: int) -> Reading:
        """The reading with so many samples: between one and two every number goes in a straight line, and on from there."""
        one = self.one[mode]
        two = self.two[mode]
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
    gathered = dict.fromkeys(
        ("weights", "gradients") if full else split, GATHERED * max(spec.blocks, default=0)
    )

    def part(reading: Reading, samples: int) -> Reading:
        phases = {}
        for name, parts in reading.phases.items():
            own = {
                key: -(-size // processes) if key in split else size
                for key, size in parts.items()
            }
            phases[name] = plus(own, gathered) if name in PASSES else own
        return Reading(phases, reading.flops)

    return spec.changed(part)


@dataclass(frozen=True)
class Need:
    """What a choice needs: bytes by phase and part on the device; by part on the host; flops and bytes over the link of one
    micro-batch."""

    choice: Choice
    device: Mapping[str, CountsByPart]
    host: CountsByPart
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


def room(parts: CountsByPart) -> int:
    """Bytes that a card must have for this: what stays as it is, activations with some to spare, and the context."""
    moving = parts.get("activations", 0)
    return sum(parts.values()) - moving + math.ceil(SPARE * moving) + ROOM


def need(spec: StepSpec, choice: Choice) -> Need:
    """What a choice holds while it trains."""
    count = len(spec.blocks)
    batch = choice.micro_batch
    streamed = spread(count, choice.streamed / count)
    again = (
        range(count) if choice.checkpointing != OFF else streamed
    )  # blocks that are computed again in backward
    slots = min(SLOTS, len(streamed)) * max((spec.blocks[i] for i in streamed), default=0)
    streamed_bytes = sum(spec.blocks[i] for i in streamed)
    trained_bytes = sum(spec.trained[i] for i in streamed)
    stays = 1 - trained_bytes / max(1, sum(spec.trained))

    def on_device(name: str, parts: CountsByPart) -> dict[str, int]:
        here = dict(parts)
        here["weights"] = here.get("weights", 0) - (streamed_bytes - trained_bytes)
        here["optimizer"] = round(here.get("optimizer", 0) * spec.moments)
        updating = (
            ("activations",) if name not in PASSES else ()
        )  # float32 gradients of masters
        for part in ("trained", "optimizer", "ema", "gradients", *updating):
            copies = 1 if part in ("gradients", "activations") else spec.experts
            here[part] = round(here.get(part, 0) * stays * copies)
        here["ring"] = slots
        return {part: size for part, size in here.items() if size > 0}

    held = [(name, on_device(name, parts)) for name, parts in moments(spec, choice, again)]
    device = dict(
        sorted(held, key=lambda moment: sum(moment[1].values()))
    )  # of each phase its worst moment
    off = spec.at(OFF, batch).flops
    on = spec.at(ON, batch).flops
    host = {}
    moved = 0.0
    if streamed:
        # torch rounds what it pins up to powers of two
        host["streamed weights"] = streamed_bytes // PIECE * PIECE + (
            1 << (streamed_bytes % PIECE - 1).bit_length()
        )
        moved += 2.0 * streamed_bytes - slots
    if trained_bytes:
        host["masters, gradients and optimizer"] = round(trained_bytes * HOST_A_BYTE)
    if choice.checkpointing == CPU_OFFLOADED:
        host["block inputs"] = sum(
            1 << (size * batch - 1).bit_length() for size in spec.kept[ON]
        )
        moved += 2.0 * sum(spec.kept[ON]) * batch
    return Need(choice, device, host, off + len(again) / count * (on - off), moved)


def moments(
    spec: StepSpec, choice: Choice, again: Collection[int]
) -> Iterator[tuple[str, CountsByPart]]:
    """(phase, bytes by part) at each moment of a step that may be the worst of its phase; ``again`` as in ``need``.

    While a block computes, the blocks before it keep what they keep, and the gradients of those after it are there.
    """
    modes = [ON if i in again else OFF for i in range(len(spec.blocks))]
    readings = {mode: spec.at(mode, choice.micro_batch).phases for mode in MODES}
    kept = {mode: [choice.micro_batch * size for size in spec.kept[mode]] for mode in MODES}
    # blocks before the one that computes whose inputs are on the device
    ahead = 1 if choice.checkpointing == CPU_OFFLOADED else len(modes)
    last = readings[modes[-1]]
    whole = max(last[name].get("gradients", 0) for name in PASSES if name in last)
    each = (whole - last["backward"].get("gradients", 0)) / max(1, len(modes) - 1)

    def at(phase: str, i: int) -> tuple[str, CountsByPart]:
        parts = readings[modes[i]][phase]
        mode = modes[i]
        more = sum(kept[modes[j]][j] for j in range(max(0, i - ahead), i))
        more += 0 if phase == FIRST else kept[mode][i] - sum(kept[mode])
        behind = -i if phase == FIRST else len(modes) - 1 - i
        gradients = (
            whole if choice.accumulates else parts.get("gradients", 0) + round(behind * each)
        )
        return phase, {
            **parts,
            "activations": parts.get("activations", 0) + more,
            "gradients": gradients,
        }

    yield at("forward", len(modes) - 1)
    for i, size in enumerate(
        spec.kept[OFF]
    ):  # blocks of another list than the last are like the first
        yield at(
            FIRST if FIRST in last and (i == 0 or size != spec.kept[OFF][-1]) else "backward", i
        )
    yield from ((name, parts) for name, parts in last.items() if name not in (*PASSES, KEPT))


HOST_A_BYTE = 8.0
"""Bytes on the host a byte of bfloat16 weights that train and are streamed: float32 master, gradient and two moments."""


def others(
    spec: StepSpec, training: Need, vram: int | None
) -> dict[str, tuple[str, CountsByPart]]:
    """For each phase without a step, in which way it is done and what it then holds: the plainest way that fits.

    A preview is decoded beside the denoiser, with the denoiser set aside, or in tiles then.
    """
    resting = training.device.get("end", {})
    found: dict[str, tuple[str, CountsByPart]] = {}
    for phase, ways in spec.elsewhere.items():
        for way, own in ways.items():
            parts: CountsByPart = own
            if phase == "preview":
                left = (
                    resting
                    if way == UNCHANGED
                    else {k: v for k, v in resting.items() if k not in ("weights", "ring")}
                )
                parts = plus(own, left)
            found[phase] = (way, parts)
            if vram is None or room(parts) <= vram:
                break
    return found


UNCHANGED = "unchanged"
STREAMED = "blocks streamed from the host"
ASIDE = "the denoiser offloaded"
TILED = "the denoiser offloaded, decoded in tiles"
"""Ways of a phase without a step."""


def seconds(wanted: Need, batch: int, card: Card, lighter: float = 1.0) -> float:
    """Seconds of a step, calculated: operations at the rate a step reaches, unless what is moved takes longer.

    ``lighter``: the operations of this bucket's samples as a share of the dearest one's.
    """
    passes = -(-batch // min(wanted.choice.micro_batch, batch))
    return passes * max(
        lighter * wanted.flops / (card.reached * card.flops), wanted.moved / card.link
    )


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
    """What the person has decided; None: free to choose. ``waits`` False: block inputs cannot wait on the host.

    ``accumulates``: a step has several passes, also where none is split.
    """

    micro_batch: int | None = None
    checkpointing: str | None = None
    streamed: int | None = None
    waits: bool = True
    accumulates: bool = False


def choices(spec: StepSpec, batch: int, fixed: Fixed) -> list[Choice]:
    """All that may be chosen, the plainest first."""
    sizes = (
        [fixed.micro_batch]
        if fixed.micro_batch
        else sorted({-(-batch // n) for n in range(1, batch + 1)})[::-1]
    )
    modes = (
        [fixed.checkpointing]
        if fixed.checkpointing
        else [OFF, ON, *([CPU_OFFLOADED] if fixed.waits else [])]
    )
    streamed = [fixed.streamed] if fixed.streamed is not None else range(len(spec.blocks) + 1)
    several = {size: fixed.accumulates or size < batch for size in sizes}
    return [
        Choice(min(n, batch), mode, count, several[n])
        for count in streamed
        for mode in modes
        for n in sizes
    ]


def fastest(
    spec: StepSpec, batch: int, fixed: Fixed, vram: int, card: Card, host: int | None = None
) -> Need | None:
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
    return min(
        (need(spec, choice) for choice in choices(spec, batch, fixed)),
        key=lambda wanted: wanted.needed,
    )


MODES = ("OFF", "ON")
"""What is read of gradient checkpointing; CPU_OFFLOADED is ON with the kept inputs elsewhere."""


@dataclass(frozen=True)
class PlanInputs:
    """All that a plan of memory depends on: base model, config, dtype, the run's shapes (the dearest first), a preview's."""

    spec: ModelSpec
    folder: Path
    config: schema.Config
    dtype: str
    shapes: tuple[ClipShape, ...]
    preview: ClipShape | None

    @classmethod
    def of(cls, job: Job, dtype: str) -> PlanInputs:
        """Those of a job that names a base model."""
        assert job.base is not None
        config = job.config
        preview = (
            preview_settings(job).shape if config.sample_after != 0 and config.samples else None
        )
        return cls(job.spec, job.base.folder, config, dtype, job.shapes, preview)

    def fake_run(self) -> FakeRun:
        """The run on fake tensors."""
        dtype = DTYPES[self.dtype]
        weights = weights_of(self.config, self.dtype)
        return FakeRun(
            find(self.spec.name)(self.folder, torch.device("cpu"), dtype, weights), self.config
        )

    @property
    def key(self) -> str:
        """A hash of all that the step's spec depends on."""
        config = self.config
        configs = {
            str(path.relative_to(self.folder)): path.read_text()
            for path in self.folder.glob("*/config.json")
        }
        return digest(
            {
                "videotune": __version__,
                "configs": configs,
                "dtype": self.dtype,
                "weights": asdict(weights_of(config, self.dtype)),
                "method": [
                    config.training_method,
                    config.transformer.train,
                    config.transformer.layers,
                    config.experts,
                ],
                "text_encoder": config.text_encoder.train,
                "lora": config.lora.model_dump(mode="json"),
                "ema": config.ema.model_dump(mode="json"),
                "optimizer": [
                    config.optimizer.name,
                    config.optimizer.masters,
                    config.optimizer.step_in_backward,
                ],
                "isolated": not config.video_config.use_temporal_attention,
                "first_frame": bool(config.first_frame_probability),
                "shapes": [str(shape) for shape in self.shapes],
                "preview": str(self.preview),
            }
        )[:32]


def _file(job: Job, inputs: PlanInputs) -> Path:
    return job.cache / "plans" / f"{inputs.key}.json"


def step_spec(job: Job, dtype: str) -> StepSpec:
    """What the run's dearest step and its encoders hold, read on fake tensors and remembered in the cache."""
    inputs = PlanInputs.of(job, dtype)
    spec = _remembered(_file(job, inputs))
    if spec is None:
        spec = read_step_spec(inputs)
        write_json(_file(job, inputs), asdict(spec))
    return spec


def with_tiles(job: Job, dtype: str) -> StepSpec:
    """``step_spec`` with a preview that is decoded in tiles: slow to read, and wanted where nothing else fits alone."""
    inputs = PlanInputs.of(job, dtype)
    spec = step_spec(job, dtype)
    if inputs.preview is None or TILED in spec.elsewhere["preview"]:
        return spec
    preview = {
        **spec.elsewhere["preview"],
        TILED: inputs.fake_run().decode(inputs.preview, tiled=True),
    }
    spec = replace(spec, elsewhere={**spec.elsewhere, "preview": preview})
    write_json(_file(job, inputs), asdict(spec))
    return spec


def known_step_spec(job: Job, dtype: str) -> StepSpec | None:
    """``step_spec`` where it was read before; None where not."""
    return None if job.base is None else _remembered(_file(job, PlanInputs.of(job, dtype)))


def _remembered(place: Path) -> StepSpec | None:
    """What a file of the cache holds; None where there is none, and where it says what no reading gives: a dataset may
    bring its cache."""
    try:
        spec: StepSpec = checked(StepSpec, place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return spec if _is_consistent(spec) else None


def _is_consistent(spec: StepSpec) -> bool:
    """Whether the readings of a spec have the same phases, and its lists an entry for each block."""
    if not (
        spec.blocks
        and set(MODES) <= spec.one.keys() == spec.two.keys()
        and set(MODES) <= spec.kept.keys()
    ):
        return False
    phases = [(spec.one[mode].phases.keys(), spec.two[mode].phases.keys()) for mode in spec.one]
    lengths = {len(spec.trained) - 1, *map(len, spec.kept.values())}
    return lengths == {len(spec.blocks)} and all(
        {"forward", "backward"} <= one == two for one, two in phases
    )


def read_step_spec(inputs: PlanInputs) -> StepSpec:
    """What a run's dearest step and its encoders hold."""
    run = inputs.fake_run()
    config = inputs.config
    shape = inputs.shapes[0]
    blocks = tuple(size for sizes in run.blocks.values() for size in sizes)
    full = config.training_method == "FINE_TUNE" and config.transformer.train
    readings = [(mode, [run.deep_step(shape, n, mode) for n in (1, 2)]) for mode in MODES]
    spec = StepSpec(
        one={mode: one for mode, (one, _) in readings},
        two={mode: two for mode, (_, two) in readings},
        blocks=blocks,
        trained=(*blocks, weight_bytes(run.denoiser()) - sum(blocks))
        if full
        else (0,) * (len(blocks) + 1),
        kept={mode: kept_by_blocks(run, shape, mode) for mode in MODES},
        work=work(run, inputs),
        elsewhere=elsewhere(run, inputs),
        moments=optimizers.OPTIMIZERS[config.optimizer.name].state_bytes
        / optimizers.OPTIMIZERS["ADAMW"].state_bytes,
        experts=len(trained(inputs.spec, config)) if config.transformer.train else 1,
    )
    return with_text(spec, run) if config.text_in_step else spec


def with_text(spec: StepSpec, run: FakeRun) -> StepSpec:
    """The text encoder stays in memory while the denoiser trains, and its activations wait for the backward pass."""
    own, flops, _ = run.read_text()
    resident = {"text encoder": own["text encoder"]}
    if run.config.text_encoder.train:
        numbers = own["text encoder"] // run.family.dtype.itemsize
        # parts of its own: blocks of the denoiser that are streamed take nothing of this along
        resident["text encoder's training"] = 8 * numbers + round(8 * numbers * spec.moments)

    def more(reading: Reading, samples: int) -> Reading:
        waiting = {"activations": own.get("activations", 0) * samples}
        there = {
            name: resident | (waiting if name in PASSES else {}) for name in reading.phases
        }
        phases = {name: plus(parts, there[name]) for name, parts in reading.phases.items()}
        return Reading(phases, reading.flops + flops * samples)

    return spec.changed(more)


def work(run: FakeRun, inputs: PlanInputs) -> tuple[tuple[int, float], ...]:
    """(tokens, operations) of a sample of the cheapest shape, of one in the middle and of the dearest, computed again."""
    shapes = {inputs.spec.tokens(shape): shape for shape in inputs.shapes}
    counts = sorted(shapes)
    shapes[counts[-1]] = inputs.shapes[0]
    chosen = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
    return tuple((count, run.deep_step(shapes[count], 1, "ON").flops) for count in chosen)


def kept_by_blocks(run: FakeRun, shape: ClipShape, mode: str) -> tuple[int, ...]:
    """Bytes of activations that each block keeps of one sample from forward to backward."""
    few = {path: min(FEW, count) for path, count in run.depths.items()}
    found = list[int]()
    for path, count in run.depths.items():
        depths = few[path], min(MORE, count)
        readings = [
            run.step(shape, 1, mode, tuple({**few, path: depth}.items())) for depth in depths
        ]
        before, after = (reading.phases[KEPT].get("activations", 0) for reading in readings)
        found += [max(0, after - before) // max(1, depths[1] - depths[0])] * count
    return tuple(found)


def elsewhere(run: FakeRun, inputs: PlanInputs) -> dict[str, Mapping[str, CountsByPart]]:
    """What is held when no step runs: text encoder, autoencoder over the dearest clips, and over a preview; in each way."""
    text, _, encoders = run.read_text()
    streamed = text["text encoder"] - sum(
        sum(blocks) - SLOTS * max(blocks) for blocks in encoders
    )
    phases: dict[str, Mapping[str, CountsByPart]] = {
        "encoding text": {UNCHANGED: text, STREAMED: {**text, "text encoder": streamed}},
        "encoding clips": {UNCHANGED: run.encode(inputs.shapes[0])},
    }
    if inputs.preview is not None:
        phases["preview"] = dict.fromkeys((UNCHANGED, ASIDE), run.decode(inputs.preview))
    return phases
