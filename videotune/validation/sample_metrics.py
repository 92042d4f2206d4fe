"""Samples that are measured: a few small ones at checkpoints, compared with the clips and with the base model's samples.

Nothing of the training moves, a measurement that fails is a warning, and what the budget does not allow is "not measured".
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.console import bar
from videotune.data.decode import decode
from videotune.data.frame_sampling import sample_window
from videotune.data.video_writer import write_video
from videotune.files import checked, digest, read_json, write_json, write_whole
from videotune.job.job import Job
from videotune.sampling.pipeline import file_name
from videotune.trainer.trainer import Trainer, due
from videotune.types import DETERMINISTIC_VARIANT, Window
from videotune.validation import metrics
from videotune.validation.decoding import SamplingCallback, of_main
from videotune.validation.metrics import Baselines, FrameEmbedding, Gallery, Known, Nearest
from videotune.validation.overhead import metrics_spacing, share_of_run
from videotune.validation.selection import SampleMetricsPlan, identity_of, spread

Frames = NDArray[np.uint8]

SIDE = 64
"""The shorter side of the frames that clips are compared by."""

MOST_WINDOWS = 256
"""So many windows are compared with at most."""

MOST_FRAMES = 18
"""So many frames of a window are kept, every second or third of a longer one; more where samples are short.

Of every second frame, copies of what moves fast (a galloping horse) are half a pair of frames off, and come to 0.55
instead of 0.68."""

MOST_IN_ALL = 4608
"""So many frames are kept at most of all windows together: 150 MB of the heuristic's vectors."""

MOST_QUERIES = 64
"""So many clips say at most how near clips come that are no copies."""

OF_DATA = 32
"""So many windows say how the data moves."""


@dataclass(frozen=True)
class EmbeddedClips:
    """Training windows to compare with, of every ``every``-th frame; how near clips come that are no copies (None: known
    already); how the data moves.
    """

    gallery: Gallery
    every: int
    baselines: Baselines | None
    motion: Mapping[str, float | None]


def every_of(job: Job, plan: SampleMetricsPlan) -> int:
    """Every how many frames are compared, so that of a usual window 18 are at most, and of a sample no fewer than 3."""
    longest = max(window.shape.frames for window in job.training_windows)
    return max(1, min(-(-longest // MOST_FRAMES), plan.settings.shape.frames // 2))


def compared_windows(job: Job, plan: SampleMetricsPlan) -> tuple[Window, ...]:
    """At most 256 training windows, fewer of long ones: first those with a prompt as caption, then others evenly."""
    longest = max(window.shape.frames for window in job.training_windows)
    most = min(MOST_WINDOWS, max(8, MOST_IN_ALL // -(-longest // every_of(job, plan))))
    prompts = set(plan.prompts)
    own = [window for window in job.training_windows if prompts & set(job.captions[window.id])]
    first = spread(own, most // 2)
    return tuple(dict.fromkeys([*first, *spread(job.training_windows, most - len(first))]))


def name_of(job: Job, plan: SampleMetricsPlan, embedding: FrameEmbedding) -> str:
    """8 hex digits: readings of one name compare."""
    windows = [
        [window.id for window in part]
        for part in (compared_windows(job, plan), job.library.held_out_windows)
    ]
    return digest([identity_of(plan), embedding.name, windows])[:8]


def embed_clips(
    job: Job, plan: SampleMetricsPlan, embedding: FrameEmbedding, with_baselines: bool
) -> EmbeddedClips:
    """Decode and embed the clips; the baselines too where they are wanted."""
    clips = {clip.id: clip for clip in job.library.clips}
    every = every_of(job, plan)
    length = plan.settings.shape.frames
    windows = compared_windows(job, plan)
    asking = (
        {window.id for window in spread(windows, MOST_QUERIES)} if with_baselines else set()
    )
    moving = {window.id for window in spread(windows, OF_DATA)}
    known = []
    training = []
    motion = []
    with bar("looking at the clips") as progress:
        for done, (window, frames) in enumerate(small_frames(job, plan, windows), 1):
            clip = clips[window.clip_id]
            known.append(
                Known(clip.path, clip.source, metrics.in_views(embedding, frames[::every]))
            )
            if window.id in asking:
                training.append(
                    (clip.source, metrics.both_ways(embedding, frames[:length][::every]))
                )
            if window.id in moving:
                motion.append(metrics.measures(frames[:length]))
            progress.update(done, len(windows))
    gallery = Gallery(known)
    found = None
    if with_baselines:
        held: dict[str, list[Any]] = {}
        for window, frames in small_frames(
            job, plan, spread(job.library.held_out_windows, MOST_QUERIES)
        ):
            seen = metrics.both_ways(embedding, frames[:length][::every])
            held.setdefault(clips[window.clip_id].source, []).append(seen)
        found = metrics.baselines(gallery, held, training)
    return EmbeddedClips(gallery, every, found, metrics.mean_measures(motion))


def small_frames(
    job: Job, plan: SampleMetricsPlan, windows: Sequence[Window]
) -> Iterator[tuple[Window, NDArray[np.uint8]]]:
    """Each window's frames as the model is shown them, without any draw, in the samples' aspect and small."""
    shape = plan.settings.shape
    scale = SIDE / min(shape.height, shape.width)
    height = round(shape.height * scale)
    width = round(shape.width * scale)
    for window in windows:
        times = sample_window(window, DETERMINISTIC_VARIANT, job.config.seed).times
        yield (
            window,
            decode(job.library.media[window.clip_id], times, height, width, window.resize),
        )


FILE = "sample_metrics.json"
"""What the base's samples gave, and what clips give that are no copies; in the run folder."""

FOLDER = "sample_metrics"
"""Where in the run folder the samples lie: the base's as pixels (base.npz), the others as videos."""


@dataclass(frozen=True)
class Measured:
    """What samples gave, before it is compared with anything."""

    nearest: tuple[Nearest, ...]
    diversity: float | None
    motion: Mapping[str, float | None] = field(default_factory=dict)


class SampleMetricsCallback(SamplingCallback):
    """Samples at checkpoints, measured; ``embedding`` and ``clips`` are made when they are needed first."""

    what = "sample metrics"
    state = "probing"
    failure = "the sample metrics at step {} failed"

    def __init__(self, job: Job, plan: SampleMetricsPlan) -> None:
        self.job = job
        self.plan = plan
        self._budget = job.config.sample_metrics.budget
        self.every = metrics_spacing(plan, job)
        self.embedding: FrameEmbedding | None = None
        self.clips: EmbeddedClips | None = None

    def prompts(self) -> Sequence[str]:
        """The samples' prompts."""
        return self.plan.prompts

    def windows(self) -> Sequence[Window]:
        """Those whose first frame a sample is conditioned on."""
        return self.plan.first

    def check(self, takes_part: bool) -> None:
        """Raise VideotuneError for an encoder that cannot be read."""
        if takes_part:
            encoder = self.job.config.sample_metrics.encoder
            self.embedding = (
                metrics.default_embedding()
                if encoder is None
                else metrics.open_encoder(encoder)
            )

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether the base, or a checkpoint, was not measured."""
        measured = any(
            line["step"] == step for line in trainer.journal.history.of_kind("sample_metrics")
        )
        wanted = (step == 0 or due(step, self.every, trainer.job.steps)) and not measured
        return wanted and not self.has_failed(trainer, step)

    def run(self, trainer: Trainer, step: int) -> None:
        """Sample and measure; at step 0 the samples are the base's. Videos are written, so that a user can look at them."""
        with self.contained(trainer, step):
            why = of_main(
                trainer, self._why_not(trainer, step) if trainer.dist.is_main else None
            )
            if why is not None:
                trainer.journal.event("sample_metrics", step=step, not_measured=why)
                return
            begun = time.perf_counter()
            plan = self.plan
            samples = [(plan.prompts[i], seed) for i, seed in plan.pairs]
            first = [plan.first[i] for i, _ in plan.pairs] if plan.first else []
            films = self.frames(trainer, step, plan.settings, samples, first)
            if not trainer.dist.is_main:
                return
            for path, frames in zip(paths_of(trainer.run, plan, step), films, strict=True):
                write_video(path, frames, plan.settings.shape.fps)
            if step == 0:
                keep_base(trainer.run, self.plan, films)
            with trainer.breaking():
                fields = self._compared(trainer, films, step)
            trainer.journal.event(
                "sample_metrics",
                step=step,
                **fields,
                seconds=round(time.perf_counter() - begun, 3),
            )

    def _why_not(self, trainer: Trainer, step: int) -> str | None:
        """Why nothing is measured here, in words; None where it is."""
        if step == 0:
            if self.every:  # the base's samples alone would say nothing
                return None
            need = f"{2 * share_of_run(self.plan, trainer.job):.2g}"
            most = f"{self._budget:g}"
            return f"budget: two measurements would take about {need} of the run, above sample_metrics.budget {most}"
        kept = trainer.run / FILE
        if not kept.is_file() or not base_file(trainer.run).is_file():
            return "the base's samples were not generated before step 1, so there is nothing to compare with"
        if read_json(kept)["drawing"] != identity_of(self.plan):
            return "prompts, shape or steps of the sample metrics are no longer those of the base's samples"
        return None

    def _compared(self, trainer: Trainer, films: Sequence[Frames], step: int) -> dict[str, Any]:
        """A journal line's fields: what the samples gave beside what the base's gave and the clips do."""
        job = trainer.job
        plan = self.plan
        embedding = self.embedding
        assert embedding is not None
        kept = read_json(trainer.run / FILE)
        name = name_of(job, plan, embedding)
        old = kept.get("reading", {})
        if self.clips is None:
            self.clips = embed_clips(
                job, plan, embedding, with_baselines=old.get("name") != name
            )
        clips = self.clips
        now = measured(plan, embedding, clips, films)
        if (
            old.get("name") != name
        ):  # the first reading, or other clips or another encoder since
            with np.load(base_file(trainer.run)) as file:
                base = (
                    now if step == 0 else measured(plan, embedding, clips, list(file["films"]))
                )
            assert clips.baselines is not None
            old = {
                "name": name,
                "baselines": asdict(clips.baselines),
                "data": clips.motion,
                "base": asdict(base),
            }
            write_json(trainer.run / FILE, kept | {"reading": old})
        base = checked(Measured, json.dumps(old["base"]))
        usual = Baselines(
            tuple(old["baselines"]["held_out"]), tuple(old["baselines"]["others"])
        )
        line = usual.line([one.similarity for one in base.nearest])
        paths = [
            path.relative_to(trainer.run).as_posix()
            for path in paths_of(trainer.run, plan, step)
        ]
        samples = [
            {
                "prompt": plan.prompts[i],
                "seed": seed,
                "path": path,
                "clip": one.clip,
                "similarity": round(one.similarity, 4),
                "copy": line is not None and one.similarity > line,
            }
            for (i, seed), path, one in zip(plan.pairs, paths, now.nearest, strict=True)
        ]
        return {
            "sample_metrics": name,
            "embedding": embedding.name,
            "heuristic": embedding.name == metrics.HEURISTIC,
            "samples": samples,
            "replication": {
                "mean": mean_of(now),
                "base": mean_of(base),
                "copies": sum(sample["copy"] for sample in samples),
                "base_copies": sum(
                    line is not None and one.similarity > line for one in base.nearest
                ),
                "line": None if line is None else round(line, 4),
                "windows": len(clips.gallery.known),
                **usual.to_json(),
            },
            "diversity": beside(now.diversity, base=base.diversity),
            "motion": {
                k: beside(value, base=base.motion[k], data=old["data"][k])
                for k, value in now.motion.items()
            },
        }


def paths_of(run: Path, plan: SampleMetricsPlan, step: int) -> list[Path]:
    """Where the samples of a step lie."""
    return [run / FOLDER / file_name(step, plan.prompts[i], seed) for i, seed in plan.pairs]


def base_file(run: Path) -> Path:
    """The pixels of the base's samples."""
    return run / FOLDER / "base.npz"


def keep_base(run: Path, plan: SampleMetricsPlan, films: Sequence[Frames]) -> None:
    """Keep the base's samples: after the first step nobody can generate them again."""
    write_whole(
        base_file(run),
        lambda aside: np.savez_compressed(aside, films=np.stack(films)),
        durable=False,
    )
    write_json(run / FILE, {"drawing": identity_of(plan)})


def measured(
    plan: SampleMetricsPlan,
    embedding: FrameEmbedding,
    clips: EmbeddedClips,
    films: Sequence[Frames],
) -> Measured:
    """Each sample's nearest clip, the diversity of each prompt's samples, and how they move."""
    seen = [metrics.both_ways(embedding, frames[:: clips.every]) for frames in films]
    nearest = [clips.gallery.nearest(one) for one in seen]
    by_prompt: list[list[Any]] = [[] for _ in plan.prompts]
    for (number, _), one in zip(plan.pairs, seen, strict=True):
        by_prompt[number].append(one[0])
    return Measured(
        tuple(one for one in nearest if one is not None),
        metrics.diversity(by_prompt),
        metrics.mean_measures([metrics.measures(frames) for frames in films]),
    )


def mean_of(one: Measured) -> float:
    """The mean similarity of samples to their nearest clips."""
    return round(sum(found.similarity for found in one.nearest) / len(one.nearest), 4)


def beside(value: float | None, **others: float | None) -> dict[str, float | None]:
    """A value beside others, and its ratio to each: ``to_base`` and so on; None where one is missing or 0."""
    out: dict[str, float | None] = {"value": _short(value)}
    for name, other in others.items():
        out[name] = _short(other)
        out[f"to_{name}"] = None if value is None or not other else _short(value / other)
    return out


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
