"""What a run's most expensive step and its encoders hold, read on fake tensors.

Reading takes seconds to minutes, so a spec is stored in the cache. ``memory``
calculates from it what each choice of settings needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from videotune._version import __version__
from videotune.config import optimizers, schema
from videotune.config.optimizer_classes import is_class
from videotune.files import Count, Number, checked, digest, write_json
from videotune.job.experts import trained
from videotune.job.job import Job
from videotune.latent_cache.clip_ends import appended_sizes
from videotune.memory.checkpointing import ATTENTION_SAVED, OFF, ON
from videotune.memory.device_buffers import SLOTS
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.models.registry import find
from videotune.planner.cache_size import pixels_of
from videotune.planner.ledger import CountsByPart, Reading, plus
from videotune.planner.measure import FEW, KEPT, MORE, PASSES, FakeRun, weight_bytes
from videotune.trainer.build import DTYPES, weights_of, what_trains
from videotune.trainer.optimizer_bytes import state_bytes
from videotune.trainer.text_encoders import text_size
from videotune.types import ClipShape
from videotune.validation.selection import preview_settings

MODES = (OFF, ATTENTION_SAVED, ON)
"""Gradient checkpointing that is read; CPU_OFFLOADED is ON with the kept inputs on the
host.
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
        return Reading(phases, reading.flops)

    return spec.changed(shard)


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan of memory depends on."""

    spec: ModelSpec
    folder: Path
    """Folder of the base model."""
    config: schema.Config
    dtype: str
    shapes: tuple[ClipShape, ...]
    """The run's shapes, the most expensive first."""
    preview: ClipShape | None
    """Shape of a preview; None without previews."""

    @classmethod
    def of(cls, job: Job, dtype: str) -> PlanInputs:
        """Return the inputs of a job that names a base model."""
        assert job.base is not None
        config = job.config
        preview = None
        if config.sample_after != 0 and config.samples:
            preview = preview_settings(job).shape
        return cls(
            job.spec, job.base.folder, config, dtype, job.shapes_by_cost, preview
        )

    def fake_run(self) -> FakeRun:
        """Return the run on fake tensors."""
        dtype = DTYPES[self.dtype]
        weights = weights_of(self.config, self.dtype)
        family = find(self.spec.name)(self.folder, torch.device("cpu"), dtype, weights)
        if self.spec.authors_text:
            family.spec = family.with_authors_text(family.spec)
        if self.spec.reads_sound:
            family.spec = family.spec.with_sound(self.spec.generates)
        if self.spec.connectors_in_step:
            family.spec = family.spec.with_connectors()
        return FakeRun(family, self.config)

    @property
    def key(self) -> str:
        """A hash of everything that the step's spec depends on."""
        config = self.config
        configs = {}
        for path in self.folder.glob("*/config.json"):
            configs[str(path.relative_to(self.folder))] = path.read_text()
        inputs = {
            "videotune": __version__,
            "encoding": find(self.spec.name).encoding,
            "authors_text": self.spec.authors_text,
            "configs": configs,
            "dtype": self.dtype,
            "weights": asdict(weights_of(config, self.dtype)),
            "method": [
                config.training_method,
                config.transformer.train,
                config.transformer.layers,
                config.experts,
            ],
            "text_encoder": [config.text_encoder.train, config.text_encoder.layers],
            "lora": config.lora.model_dump(mode="json"),
            "ema": config.ema.model_dump(mode="json"),
            "optimizer": [
                config.optimizer.name,
                config.optimizer.args,
                config.optimizer.masters,
                config.optimizer.step_in_backward,
            ],
            "isolated": not config.video_config.use_temporal_attention,
            "first_frame": bool(config.first_frame_probability),
            "shapes": [str(shape) for shape in self.shapes],
            "preview": str(self.preview),
        }
        if self.spec.connectors_in_step:
            inputs["connectors"] = True
        if self.spec.reads_sound:
            has_sound = [shape.sound for shape in self.shapes]
            inputs["sound"] = [list(self.spec.generates), has_sound]
        if config.conditions:
            inputs["conditions"] = sorted(item.type for item in config.conditions)
            inputs["appended"] = [
                appended_sizes(config, shape, self.spec) for shape in self.shapes
            ]
        return digest(inputs)[:32]


def step_spec(job: Job, dtype: str) -> StepSpec:
    """Return the spec of a run's most expensive step, from the cache if it was read
    before.
    """
    inputs = PlanInputs.of(job, dtype)
    file = _cache_file(job, inputs)
    spec = _read_cached(file)
    if spec is None:
        spec = read_step_spec(inputs)
        write_json(file, asdict(spec))
    return spec


def step_spec_with_tiles(job: Job, dtype: str) -> StepSpec:
    """Return ``step_spec`` with a preview that is decoded in tiles.

    This is slow to read, and only needed if a preview does not fit otherwise.
    """
    inputs = PlanInputs.of(job, dtype)
    spec = step_spec(job, dtype)
    if inputs.preview is None or TILED in spec.other_phases["preview"]:
        return spec

    tiled = inputs.fake_run().decode(inputs.preview, tiled=True)
    preview = {**spec.other_phases["preview"], TILED: tiled}
    spec = replace(spec, other_phases={**spec.other_phases, "preview": preview})
    write_json(_cache_file(job, inputs), asdict(spec))
    return spec


def known_step_spec(job: Job, dtype: str) -> StepSpec | None:
    """Return ``step_spec`` if it was read before."""
    if job.base is None:
        return None
    return _read_cached(_cache_file(job, PlanInputs.of(job, dtype)))


def _cache_file(job: Job, inputs: PlanInputs) -> Path:
    return job.cache / "plans" / f"{inputs.key}.json"


def _read_cached(path: Path) -> StepSpec | None:
    """Return the spec of a cache file; None without one, or with impossible values.

    A dataset may bring its cache, so the file is not trusted.
    """
    try:
        spec: StepSpec = checked(StepSpec, path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return spec if _is_consistent(spec) else None


def _is_consistent(spec: StepSpec) -> bool:
    """Whether all readings have the same phases, and all lists an entry for each block."""
    modes = set(MODES)
    has_modes = (
        modes <= spec.one_sample.keys() == spec.two_samples.keys()
        and modes <= spec.kept.keys()
    )
    if not spec.blocks or not has_modes:
        return False

    for mode, one in spec.one_sample.items():
        two = spec.two_samples[mode]
        if not {"forward", "backward"} <= one.phases.keys() == two.phases.keys():
            return False
    lengths = {len(spec.trained) - 1, *map(len, spec.kept.values())}
    return lengths == {len(spec.blocks)}


def read_step_spec(inputs: PlanInputs) -> StepSpec:
    """Read what a run's most expensive step and its encoders hold."""
    run = inputs.fake_run()
    config = inputs.config
    shape = inputs.shapes[0]
    blocks = tuple(chain.from_iterable(run.blocks.values()))
    trained_bytes = (0,) * (len(blocks) + 1)
    if config.training_method == "FINE_TUNE" and config.transformer.train:
        trained_bytes = (*blocks, weight_bytes(run.denoiser()) - sum(blocks))
    encoding, encoding_flops = run.encode(shape)

    one_sample = {}
    two_samples = {}
    for mode in MODES:
        one_sample[mode] = run.deep_step(shape, 1, mode)
        two_samples[mode] = run.deep_step(shape, 2, mode)

    spec = StepSpec(
        one_sample=one_sample,
        two_samples=two_samples,
        blocks=blocks,
        trained=trained_bytes,
        kept={mode: kept_by_blocks(run, shape, mode) for mode in MODES},
        encoding_flops_per_pixel=encoding_flops / pixels_of(shape),
        work=read_work(run, inputs),
        other_phases=read_other_phases(run, inputs, encoding),
        optimizer_share=state_bytes_per_number(run.family, inputs.spec, config)
        / optimizers.OPTIMIZERS["ADAMW"].state_bytes,
        experts=len(trained(inputs.spec, config)) if config.transformer.train else 1,
    )
    return with_text_encoder(spec, run) if config.text_in_step else spec


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


def with_text_encoder(spec: StepSpec, run: FakeRun) -> StepSpec:
    """Return the spec of a step in which the text encoder runs too.

    The encoder stays in memory while the denoiser trains, and its activations wait for
    the backward pass.
    """
    encoder, flops, _ = run.read_text()
    resident = {"text encoder": encoder["text encoder"]}
    if run.config.text_encoder.train:
        _, numbers = text_size(run.family, run.config)
        # a part of its own: streaming blocks of the denoiser frees nothing of it
        training = 8 * numbers + round(8 * numbers * spec.optimizer_share)
        resident["text encoder's training"] = training

    def add_encoder(reading: Reading, samples: int) -> Reading:
        waiting = {"activations": encoder.get("activations", 0) * samples}
        phases = {}
        for phase, parts in reading.phases.items():
            added = resident | waiting if phase in PASSES else resident
            phases[phase] = plus(parts, added)
        return Reading(phases, reading.flops + flops * samples)

    return spec.changed(add_encoder)


def read_work(run: FakeRun, inputs: PlanInputs) -> tuple[tuple[int, float], ...]:
    """Return (tokens, operations) of the cheapest, a middle and the most expensive
    shape.
    """
    shapes = {inputs.spec.tokens(shape): shape for shape in inputs.shapes}
    counts = sorted(shapes)
    shapes[counts[-1]] = inputs.shapes[0]
    chosen = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
    return tuple(
        (count, run.deep_step(shapes[count], 1, "ON").flops) for count in chosen
    )


def kept_by_blocks(run: FakeRun, shape: ClipShape, mode: str) -> tuple[int, ...]:
    """Return the bytes of activations that each block keeps until the backward pass."""
    shallow = {path: min(FEW, count) for path, count in run.depths.items()}
    sizes: list[int] = []
    for path, count in run.depths.items():
        depths = (shallow[path], min(MORE, count))
        activations = []
        for depth in depths:
            network = tuple({**shallow, path: depth}.items())
            reading = run.step(shape, 1, mode, network)
            activations.append(reading.phases[KEPT].get("activations", 0))
        grown = max(0, activations[1] - activations[0])
        sizes += [grown // max(1, depths[1] - depths[0])] * count
    return tuple(sizes)


def read_other_phases(
    run: FakeRun, inputs: PlanInputs, encoding: CountsByPart
) -> dict[str, Mapping[str, CountsByPart]]:
    """Read what is held when no step runs: encoding text, encoding clips, and a
    preview.

    Args:
        run: The fake run.
        inputs: What the plan depends on.
        encoding: Bytes by part while a clip is encoded.
    """
    text, _, encoders = run.read_text()
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
        preview = run.decode(inputs.preview)
        phases["preview"] = dict.fromkeys((UNCHANGED, ASIDE), preview)
    return phases
