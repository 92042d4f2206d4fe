"""Generate a few small samples at checkpoints and compare them with the training clips.

The samples are also compared with the base model's samples. Sampling does not change
the training; a failure is a warning, and a measurement that the budget does not allow
is recorded as "not measured".
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from videotune.data.video_writer import write_video
from videotune.files import checked, read_json, write_json, write_whole
from videotune.job.job import Job
from videotune.models.base import DiffusersModel
from videotune.sampling.picture_measure import measure_picture
from videotune.sampling.pipeline import file_name
from videotune.trainer.trainer import Trainer, due
from videotune.types import Window
from videotune.validation import metrics
from videotune.validation.decoding import SamplingCallback, broadcast_from_main
from videotune.validation.embeddings import (
    HEURISTIC,
    FrameEmbedding,
    default_embedding,
    embed_with_mirror,
    open_encoder,
)
from videotune.validation.metrics import Baselines, NearestClip
from videotune.validation.overhead import metrics_spacing, share_of_run
from videotune.validation.reference_clips import (
    EmbeddedClips,
    Frames,
    embed_clips,
    reading_name,
)
from videotune.validation.sample_metrics_plan import (
    SampleMetricsPlan,
    sampling_identity,
)

FILE = "sample_metrics.json"
"""File with the measurements of the base's samples and the baselines."""

FOLDER = "sample_metrics"
"""Folder of the samples: the base's as pixels (base.npz), the others as videos."""


@dataclass(frozen=True)
class SampleReading:
    """Measurements of the samples of one step."""

    nearest: tuple[NearestClip, ...]
    diversity: float | None
    motion: Mapping[str, float | None] = field(default_factory=dict)


class SampleMetricsCallback(SamplingCallback):
    """Generate and measure samples at checkpoints.

    The training clips are embedded at the first measurement.
    """

    title = "sample metrics"
    heartbeat_state = "probing"
    failure_prefix = "the sample metrics at step {} failed"

    def __init__(self, job: Job, plan: SampleMetricsPlan) -> None:
        self.job = job
        self.plan = plan
        self._budget = job.config.sample_metrics.budget
        self.every = metrics_spacing(plan, job)
        self.embedding: FrameEmbedding | None = None
        self.clips: EmbeddedClips | None = None

    def prompts(self) -> Sequence[str]:
        """Return the prompts of the samples."""
        return self.plan.prompts

    def windows(self) -> Sequence[Window]:
        """Return the windows whose first frame a sample is conditioned on."""
        return self.plan.condition_windows

    def check(self, family: DiffusersModel, *, takes_part: bool) -> None:
        """Load the encoder; raise VideotuneError if that fails."""
        if not takes_part:
            return
        encoder = self.job.config.sample_metrics.encoder
        if encoder is None:
            self.embedding = default_embedding()
        else:
            self.embedding = open_encoder(encoder)

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether the base model or a checkpoint was not measured yet."""
        is_due = step == 0 or due(step, self.every, trainer.job.steps)
        if not is_due:
            return False
        lines = trainer.journal.history.of_kind("sample_metrics")
        is_measured = any(line["step"] == step for line in lines)
        return not is_measured and not self.has_failed(trainer, step)

    def run(self, trainer: Trainer, step: int) -> None:
        """Generate, write and measure samples; those of step 0 are the base model's."""
        with self.failures_as_warnings(trainer, step):
            reason = None
            if trainer.dist.is_main:
                reason = self._reason_to_skip(trainer, step)
            reason = broadcast_from_main(trainer, reason)
            if reason is not None:
                trainer.journal.event("sample_metrics", step=step, not_measured=reason)
                return

            started = time.perf_counter()
            videos = self._generate_samples(trainer, step)
            if not trainer.dist.is_main:
                return

            fps = self.plan.settings.shape.fps
            paths = sample_paths(trainer.run, self.plan, step)
            for path, frames in zip(paths, videos, strict=True):
                write_video(path, frames, fps)
            if step == 0:
                save_base(trainer.run, self.plan, videos)

            with trainer.interruptible():
                fields = self._measure(trainer, videos, step)
            rules = trainer.family.spec.rules
            for sample, frames in zip(fields["samples"], videos, strict=True):
                sample["picture"] = measure_picture(frames, rules)
            seconds = round(time.perf_counter() - started, 3)
            trainer.journal.event(
                "sample_metrics", step=step, **fields, seconds=seconds
            )

    def _generate_samples(self, trainer: Trainer, step: int) -> list[np.ndarray]:
        plan = self.plan
        samples = [(plan.prompts[index], seed) for index, seed in plan.pairs]
        conditions = []
        if plan.condition_windows:
            windows = [plan.condition_windows[index] for index, _ in plan.pairs]
            conditions_of = trainer.source.plain_latents_with_conditions
            if self.job.spec.has_conditioning_modality:
                conditions_of = trainer.source.conditioning_modality
            conditions = [conditions_of(window) for window in windows]
        rendered = self.samples(trainer, step, plan.settings, samples, conditions)
        return [sample.frames for sample in rendered]

    def _reason_to_skip(self, trainer: Trainer, step: int) -> str | None:
        """Return why nothing can be measured at ``step``, or None."""
        if step == 0:
            # Without a second measurement the base's samples would be of no use.
            if self.every:
                return None
            required = f"{2 * share_of_run(self.plan, trainer.job):.2g}"
            return (
                f"budget: two measurements would take about {required} of the run, "
                f"more than sample_metrics.budget {self._budget:g}"
            )

        base_reading = trainer.run / FILE
        if not base_reading.is_file() or not base_file(trainer.run).is_file():
            return "no samples were generated before step 1, so there is nothing to compare with"
        if read_json(base_reading)["drawing"] != sampling_identity(self.plan):
            return (
                "the prompts, shape or steps of the sample metrics differ from those "
                "of the samples before training"
            )
        return None

    def _measure(
        self, trainer: Trainer, videos: Sequence[Frames], step: int
    ) -> dict[str, Any]:
        """Measure the samples of a step and return the fields of the journal line."""
        assert self.embedding is not None
        stored = read_json(trainer.run / FILE)
        name = reading_name(trainer.job, self.plan, self.embedding)
        base_reading = stored.get("reading", {})

        # The base is read again if the clips or the encoder have changed.
        is_base_outdated = base_reading.get("name") != name
        if self.clips is None:
            self.clips = embed_clips(
                trainer.job, self.plan, self.embedding, with_baselines=is_base_outdated
            )
        reading = read_samples(self.plan, self.embedding, self.clips, videos)
        if is_base_outdated:
            base = reading
            if step != 0:
                base = self._read_base(trainer.run)
            base_reading = _base_to_json(name, base, self.clips)
            write_json(trainer.run / FILE, stored | {"reading": base_reading})

        paths = [
            path.relative_to(trainer.run).as_posix()
            for path in sample_paths(trainer.run, self.plan, step)
        ]
        return self._journal_fields(reading, base_reading, paths)

    def _read_base(self, run: Path) -> SampleReading:
        assert self.embedding is not None
        assert self.clips is not None
        with np.load(base_file(run)) as file:
            return read_samples(
                self.plan, self.embedding, self.clips, list(file["films"])
            )

    def _journal_fields(
        self,
        reading: SampleReading,
        base_reading: Mapping[str, Any],
        paths: Sequence[str],
    ) -> dict[str, Any]:
        """Relate a reading to the base model's and to the training clips."""
        assert self.embedding is not None
        assert self.clips is not None
        base = checked(SampleReading, json.dumps(base_reading["base"]))
        baselines = Baselines(
            tuple(base_reading["baselines"]["held_out"]),
            tuple(base_reading["baselines"]["others"]),
        )
        line = baselines.line([clip.similarity for clip in base.nearest])

        samples = []
        pairs = zip(self.plan.pairs, paths, reading.nearest, strict=True)
        for (prompt_index, seed), path, nearest in pairs:
            sample = {
                "prompt": self.plan.prompts[prompt_index],
                "seed": seed,
                "path": path,
                "clip": nearest.clip,
                "similarity": round(nearest.similarity, 4),
                "copy": _is_copy(nearest, line),
            }
            samples.append(sample)

        motion = {}
        for key, value in reading.motion.items():
            data = base_reading["data"][key]
            motion[key] = with_ratios(value, base=base.motion[key], data=data)
        replication = {
            "mean": mean_similarity(reading),
            "base": mean_similarity(base),
            "copies": sum(_is_copy(nearest, line) for nearest in reading.nearest),
            "base_copies": sum(_is_copy(nearest, line) for nearest in base.nearest),
            "line": None if line is None else round(line, 4),
            "windows": len(self.clips.gallery.windows),
            **baselines.to_json(),
        }
        return {
            "sample_metrics": base_reading["name"],
            "embedding": self.embedding.name,
            "heuristic": self.embedding.name == HEURISTIC,
            "samples": samples,
            "replication": replication,
            "diversity": with_ratios(reading.diversity, base=base.diversity),
            "motion": motion,
        }


def _is_copy(nearest: NearestClip, line: float | None) -> bool:
    return line is not None and nearest.similarity > line


def _base_to_json(
    name: str, base: SampleReading, clips: EmbeddedClips
) -> dict[str, Any]:
    assert clips.baselines is not None
    return {
        "name": name,
        "baselines": asdict(clips.baselines),
        "data": clips.motion,
        "base": asdict(base),
    }


def sample_paths(run: Path, plan: SampleMetricsPlan, step: int) -> list[Path]:
    """Return the paths of the samples of a step."""
    return [
        run / FOLDER / file_name(step, plan.prompts[index], seed)
        for index, seed in plan.pairs
    ]


def base_file(run: Path) -> Path:
    """Return the path of the pixels of the base model's samples."""
    return run / FOLDER / "base.npz"


def save_base(run: Path, plan: SampleMetricsPlan, videos: Sequence[Frames]) -> None:
    """Save the base's samples, which cannot be generated again after the first step."""
    write_whole(
        base_file(run),
        lambda temporary: np.savez_compressed(temporary, films=np.stack(videos)),
        durable=False,
    )
    write_json(run / FILE, {"drawing": sampling_identity(plan)})


def read_samples(
    plan: SampleMetricsPlan,
    embedding: FrameEmbedding,
    clips: EmbeddedClips,
    videos: Sequence[Frames],
) -> SampleReading:
    """Measure samples: nearest clips, diversity per prompt, and motion."""
    vectors = [embed_with_mirror(embedding, video[:: clips.every]) for video in videos]
    matches = [clips.gallery.nearest(sample) for sample in vectors]

    by_prompt: list[list[Any]] = [[] for _ in plan.prompts]
    for (prompt_index, _), sample in zip(plan.pairs, vectors, strict=True):
        by_prompt[prompt_index].append(sample[0])

    return SampleReading(
        nearest=tuple(match for match in matches if match is not None),
        diversity=metrics.diversity(by_prompt),
        motion=metrics.mean_motion([metrics.motion_stats(video) for video in videos]),
    )


def mean_similarity(reading: SampleReading) -> float:
    """Return the mean similarity of samples to their nearest clips."""
    total = sum(nearest.similarity for nearest in reading.nearest)
    return round(total / len(reading.nearest), 4)


def with_ratios(
    value: float | None, **references: float | None
) -> dict[str, float | None]:
    """Return a value, its references, and its ratio to each as ``to_<name>``.

    A ratio is None if a number is missing or the reference is 0.
    """
    fields: dict[str, float | None] = {"value": _round_digits(value)}
    for name, reference in references.items():
        fields[name] = _round_digits(reference)
        ratio = None
        if value is not None and reference:
            ratio = _round_digits(value / reference)
        fields[f"to_{name}"] = ratio
    return fields


def _round_digits(value: float | None) -> float | None:
    """Round to five significant digits."""
    return None if value is None else float(f"{value:.5g}")
