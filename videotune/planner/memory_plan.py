"""What a run needs of a device and of the host, how long its steps take, and settings that make it fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from videotune import __version__
from videotune.config.optimizers import OPTIMIZERS
from videotune.config.schema import Config
from videotune.files import checked, digest, read_json, write_json
from videotune.models.registry import find
from videotune.planner.fake_run import FakeRun
from videotune.planner.measure import Reading
from videotune.planner.memory import ASIDE, PLAIN, SLOTS, STREAMED, TILED, StepSpec
from videotune.planner.shallow import FEW, MORE, Depths, deep
from videotune.train.components import dtype_of, weights_of
from videotune.train.run_spec import Job
from videotune.types import ClipShape, ModelSpec
from videotune.validation.previews import sample_settings, usual_shape

MODES = ("OFF", "ON")
"""What is read of gradient checkpointing; CPU_OFFLOADED is ON with the kept inputs elsewhere."""


@dataclass(frozen=True)
class Wanted:
    """What is to be read: a base model's configs, the run's config, its shapes, the dearest first, and its previews'."""

    spec: ModelSpec
    folder: Path
    config: Config
    shapes: tuple[ClipShape, ...]
    preview: ClipShape | None

    def key(self, dtype: str) -> str:
        """Names all that the facts depend on."""
        config = self.config
        configs = {str(path.relative_to(self.folder)): path.read_text() for path in self.folder.glob("*/config.json")}
        return digest(
            {
                "videotune": __version__,
                "configs": configs,
                "dtype": dtype,
                "weights": asdict(weights_of(config, dtype)),
                "method": [config.training_method, config.transformer.train, config.transformer.layers],
                "text_encoder": config.text_encoder.train,
                "lora": config.lora.model_dump(mode="json"),
                "ema": config.ema.model_dump(mode="json"),
                "optimizer": [config.optimizer.name, config.optimizer.masters, config.optimizer.step_in_backward],
                "isolated": not config.video_config.use_temporal_attention,
                "first_frame": bool(config.first_frame_probability),
                "shapes": [str(shape) for shape in self.shapes],
                "preview": str(self.preview),
            }
        )[:32]


def step_spec(job: Job, dtype: str) -> StepSpec:
    """What the run's dearest step and its encoders hold, read under tensors without memory and remembered in the cache."""
    wanted = wanted_of(job)
    place = job.cache / "plans" / f"{wanted.key(dtype)}.json"
    if (remembered := _remembered(place)) is not None:
        return remembered
    facts = read_facts(wanted, dtype)
    write_json(place, to_json(facts))
    return facts


def tiled_too(job: Job, dtype: str, facts: StepSpec) -> StepSpec:
    """The facts with a preview that is decoded in tiles: dear to read, and wanted where nothing else fits alone."""
    wanted = wanted_of(job)
    if wanted.preview is None or TILED in facts.elsewhere["preview"]:
        return facts
    family = find(wanted.spec.name)(
        wanted.folder, torch.device("cpu"), dtype_of(dtype), weights_of(wanted.config, dtype)
    )
    tiled = _autoencoder(FakeRun(family, wanted.config).decode(wanted.preview, tiled=True))
    preview = {**facts.elsewhere["preview"], TILED: tiled}
    facts = replace(facts, elsewhere={**facts.elsewhere, "preview": preview})
    write_json(job.cache / "plans" / f"{wanted.key(dtype)}.json", to_json(facts))
    return facts


def known_facts(job: Job, dtype: str) -> StepSpec | None:
    """``step_spec`` where they were read before; None where not."""
    place = job.cache / "plans" / f"{wanted_of(job).key(dtype)}.json" if job.base is not None else None
    return None if place is None else _remembered(place)


def _remembered(place: Path) -> StepSpec | None:
    """The facts in a file of the cache; None where there is none, and where it says what no reading gives: a dataset may
    bring its cache."""
    try:
        facts = from_json(read_json(place))
    except (OSError, ValueError, RecursionError):
        return None
    modes = facts.one.keys() == facts.two.keys() and {"OFF", "ON"} <= facts.one.keys()
    return facts if modes and facts.blocks else None


def wanted_of(job: Job) -> Wanted:
    """What is to be read of a job that names a base model."""
    assert job.base is not None
    config = job.config
    previews = bool(config.sample_after and config.samples)
    preview = sample_settings(config, job.spec, usual_shape(job)).shape if previews else None
    return Wanted(job.spec, job.base.folder, config, job.shapes, preview)


def read_facts(wanted: Wanted, dtype: str, encoders: bool = True) -> StepSpec:
    """What a run's dearest step and its encoders hold; ``encoders`` False: the step alone."""
    family = find(wanted.spec.name)(
        wanted.folder, torch.device("cpu"), dtype_of(dtype), weights_of(wanted.config, dtype)
    )
    seen, config = FakeRun(family, wanted.config), wanted.config
    whole, shape = seen.whole(), wanted.shapes[0]
    counts = {path: len(blocks) for path, blocks in whole.items()}
    read: dict[tuple[str, int, Depths], Reading] = {}

    def reading(mode: str, samples: int, depths: Depths) -> Reading:
        if (mode, samples, depths) not in read:
            read[mode, samples, depths] = seen.step(shape, samples, mode, depths)
        return read[mode, samples, depths]

    several = (1, 2)
    deeps = {(mode, n): deep(lambda d, m=mode, n=n: reading(m, n, d), counts) for mode in MODES for n in several}  # type: ignore[misc]
    blocks = tuple(size for sizes in whole.values() for size in sizes)
    full = config.training_method == "FINE_TUNE" and config.transformer.train
    facts = StepSpec(
        one={mode: deeps[mode, 1] for mode in MODES},
        two={mode: deeps[mode, 2] for mode in MODES},
        blocks=blocks,
        trained=blocks if full else (0,) * len(blocks),
        kept={mode: kept_a_block(lambda d, m=mode: reading(m, 1, d), counts) for mode in MODES},
        work=work(wanted, lambda s: deep(lambda d: seen.step(s, 1, "ON", d), counts).flops, deeps["ON", 1].flops),
        elsewhere=elsewhere(seen, wanted) if encoders else {},
        moments=OPTIMIZERS[config.optimizer.name].state_bytes / OPTIMIZERS["ADAMW"].state_bytes,
    )
    return with_text(facts, seen, config) if config.text_in_step else facts


def with_text(facts: StepSpec, seen: FakeRun, config: Config) -> StepSpec:
    """The text encoder stays in memory while the denoiser trains, and its activations wait for the backward pass."""
    text, _ = seen.read_text()
    (own,) = text.phases.values()
    beside = {"text encoder": own["weights"]}
    if config.text_encoder.train:
        numbers = own["weights"] // seen.family.dtype.itemsize
        # parts of its own: blocks of the denoiser that are streamed take nothing of this along
        beside["text encoder's training"] = 8 * numbers + round(8 * numbers * facts.moments)
    waiting = own.get("activations", 0)

    def more(reading: Reading, samples: int) -> Reading:
        phases = {}
        for name, parts in reading.phases.items():
            added = beside | ({"activations": waiting * samples} if name in ("forward", "backward") else {})
            phases[name] = {part: parts.get(part, 0) + added.get(part, 0) for part in sorted({*parts, *added})}
        return Reading(phases, reading.flops + text.flops * samples)

    one = {mode: more(reading, 1) for mode, reading in facts.one.items()}
    two = {mode: more(reading, 2) for mode, reading in facts.two.items()}
    return replace(facts, one=one, two=two)


def work(wanted: Wanted, flops: Callable[[ClipShape], float], dearest: float) -> tuple[tuple[int, float], ...]:
    """(tokens, operations) of a sample of the dearest shape, of one in the middle and of the cheapest."""
    shapes = {wanted.spec.tokens(shape): shape for shape in wanted.shapes}
    counts = sorted(shapes)
    chosen = {counts[0], counts[len(counts) // 2]} - {counts[-1]}
    return (*((count, flops(shapes[count])) for count in sorted(chosen)), (counts[-1], dearest))


def kept_a_block(read: Any, counts: Mapping[str, int]) -> int:
    """Bytes of activations that a block of the first list keeps of one sample from forward to backward."""
    few = {path: min(FEW, count) for path, count in counts.items()}
    path, count = next(iter(counts.items()))
    more = min(MORE, count)
    if more <= few[path]:
        return 0
    one, other = read(tuple(few.items())), read(tuple({**few, path: more}.items()))
    before, after = (reading.phases["forward"].get("activations", 0) for reading in (one, other))
    return max(0, (after - before) // (more - few[path]))


def elsewhere(seen: FakeRun, wanted: Wanted) -> dict[str, Mapping[str, Mapping[str, int]]]:
    """What is held when no step runs: text encoder, autoencoder over the dearest clips, and over a preview; in each way."""
    text, longest = seen.read_text()
    (parts,) = text.phases.values()
    activations = parts.get("activations", 0)
    streamed = parts["weights"] - sum(sum(blocks) - SLOTS * max(blocks) for blocks in longest)
    phases: dict[str, Mapping[str, Mapping[str, int]]] = {
        "encoding text": {
            PLAIN: {"text encoder": parts["weights"], "activations": activations},
            STREAMED: {"text encoder": streamed, "activations": activations},
        },
        "encoding clips": {PLAIN: _autoencoder(seen.encode(wanted.shapes[0]))},
    }
    if wanted.preview is not None:
        decoding = _autoencoder(seen.decode(wanted.preview))
        phases["preview"] = {PLAIN: decoding, ASIDE: decoding}
    return phases


def _autoencoder(reading: Reading) -> dict[str, int]:
    (parts,) = reading.phases.values()
    return {"autoencoder": parts["weights"], "activations": parts.get("activations", 0)}


def to_json(facts: StepSpec) -> dict[str, Any]:
    """As a file keeps it."""
    return asdict(facts)


def from_json(kept: Mapping[str, Any]) -> StepSpec:
    """The inverse of ``to_json``; ValueError where it holds anything but finite numbers from 0 on."""
    facts: StepSpec = checked(StepSpec, json.dumps(kept))
    return facts
