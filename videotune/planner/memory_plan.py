"""What a run needs of a device and of the host, how long its steps take, and settings that make it fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from videotune._version import __version__
from videotune.config.optimizers import OPTIMIZERS
from videotune.config.schema import Config
from videotune.files import checked, digest, write_json
from videotune.memory.device_buffers import SLOTS
from videotune.models.registry import find
from videotune.planner.fake_run import FakeRun
from videotune.planner.measure import FEW, MORE, Parts, Reading, plus
from videotune.planner.memory import ASIDE, PLAIN, STREAMED, TILED, StepSpec
from videotune.trainer.components import DTYPES, weights_of
from videotune.trainer.run_spec import Job
from videotune.types import ClipShape, ModelSpec
from videotune.validation.previews import sample_settings, usual_shape

MODES = ("OFF", "ON")
"""What is read of gradient checkpointing; CPU_OFFLOADED is ON with the kept inputs elsewhere."""


@dataclass(frozen=True)
class PlanInputs:
    """All that a plan of memory depends on: base model, config, dtype, the run's shapes (the dearest first), a preview's."""

    spec: ModelSpec
    folder: Path
    config: Config
    dtype: str
    shapes: tuple[ClipShape, ...]
    preview: ClipShape | None

    @classmethod
    def of(cls, job: Job, dtype: str) -> PlanInputs:
        """Those of a job that names a base model."""
        assert job.base is not None
        config = job.config
        previews = bool(config.sample_after != 0 and config.samples)
        preview = sample_settings(config, job.spec, usual_shape(job)).shape if previews else None
        return cls(job.spec, job.base.folder, config, dtype, job.shapes, preview)

    def fake_run(self) -> FakeRun:
        """The run on fake tensors."""
        dtype, weights = DTYPES[self.dtype], weights_of(self.config, self.dtype)
        return FakeRun(find(self.spec.name)(self.folder, torch.device("cpu"), dtype, weights), self.config)

    @property
    def key(self) -> str:
        """A hash of all that the step's spec depends on."""
        config = self.config
        configs = {str(path.relative_to(self.folder)): path.read_text() for path in self.folder.glob("*/config.json")}
        return digest(
            {
                "videotune": __version__,
                "configs": configs,
                "dtype": self.dtype,
                "weights": asdict(weights_of(config, self.dtype)),
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
    inputs, spec = PlanInputs.of(job, dtype), step_spec(job, dtype)
    if inputs.preview is None or TILED in spec.elsewhere["preview"]:
        return spec
    preview = {**spec.elsewhere["preview"], TILED: inputs.fake_run().decode(inputs.preview, tiled=True)}
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
    modes = spec.one.keys() == spec.two.keys() and set(MODES) <= spec.one.keys()
    return spec if modes and spec.blocks else None


def read_step_spec(inputs: PlanInputs, encoders: bool = True) -> StepSpec:
    """What a run's dearest step and its encoders hold; ``encoders`` False: the step alone."""
    run, config, shape = inputs.fake_run(), inputs.config, inputs.shapes[0]
    blocks = tuple(size for sizes in run.blocks.values() for size in sizes)
    full = config.training_method == "FINE_TUNE" and config.transformer.train
    readings = [(mode, [run.deep_step(shape, n, mode) for n in (1, 2)]) for mode in MODES]
    spec = StepSpec(
        one={mode: one for mode, (one, _) in readings},
        two={mode: two for mode, (_, two) in readings},
        blocks=blocks,
        trained=blocks if full else (0,) * len(blocks),
        kept={mode: kept_a_block(run, shape, mode) for mode in MODES},
        work=work(run, inputs),
        elsewhere=elsewhere(run, inputs) if encoders else {},
        moments=OPTIMIZERS[config.optimizer.name].state_bytes / OPTIMIZERS["ADAMW"].state_bytes,
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
        phases = {
            name: plus(parts, resident | (waiting if name in ("forward", "backward") else {}))
            for name, parts in reading.phases.items()
        }
        return Reading(phases, reading.flops + flops * samples)

    return spec.changed(more)


def work(run: FakeRun, inputs: PlanInputs) -> tuple[tuple[int, float], ...]:
    """(tokens, operations) of a sample of the cheapest shape, of one in the middle and of the dearest, computed again."""
    shapes = {inputs.spec.tokens(shape): shape for shape in inputs.shapes}
    counts = sorted(shapes)
    shapes[counts[-1]] = inputs.shapes[0]
    chosen = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
    return tuple((count, run.deep_step(shapes[count], 1, "ON").flops) for count in chosen)


def kept_a_block(run: FakeRun, shape: ClipShape, mode: str) -> int:
    """Bytes of activations that a block of the first list keeps of one sample from forward to backward."""
    few = {path: min(FEW, count) for path, count in run.depths.items()}
    path, count = next(iter(run.depths.items()))
    more = min(MORE, count)
    if more <= few[path]:
        return 0
    readings = [run.step(shape, 1, mode, tuple({**few, path: depth}.items())) for depth in (few[path], more)]
    before, after = (reading.phases["forward"].get("activations", 0) for reading in readings)
    return max(0, (after - before) // (more - few[path]))


def elsewhere(run: FakeRun, inputs: PlanInputs) -> dict[str, Mapping[str, Parts]]:
    """What is held when no step runs: text encoder, autoencoder over the dearest clips, and over a preview; in each way."""
    text, _, encoders = run.read_text()
    streamed = text["text encoder"] - sum(sum(blocks) - SLOTS * max(blocks) for blocks in encoders)
    phases: dict[str, Mapping[str, Parts]] = {
        "encoding text": {PLAIN: text, STREAMED: {**text, "text encoder": streamed}},
        "encoding clips": {PLAIN: run.encode(inputs.shapes[0])},
    }
    if inputs.preview is not None:
        phases["preview"] = dict.fromkeys((PLAIN, ASIDE), run.decode(inputs.preview))
    return phases
