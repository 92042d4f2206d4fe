"""What every command needs first: a settled config and base, with the library of clips and the schedule of a run.

Nothing here imports torch, so that ``check`` and ``plan`` of a dataset start at once.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from videotune.config.resolve import Resolved, intervals, total_steps
from videotune.config.schema import Config, Dataset
from videotune.console import bar, echo
from videotune.data.captions import with_token
from videotune.data.dataset import Library, buckets, crop_problem, scan
from videotune.data.file_checks import refuse_linked_folder
from videotune.errors import DoesNotFit, VideotuneError
from videotune.files import digest, user_cache
from videotune.latent_cache.exposure import Exposure, exposure
from videotune.latent_cache.sampler import Schedule, steps_per_epoch, times_seen
from videotune.types import BasePlace, ClipShape, ModelSpec, Window

CACHE_NAME = ".videotune-cache"
"""The folder in or beside a dataset that keeps what was encoded."""


@dataclass(frozen=True)
class ViewHistory:
    """What was shown before the data last changed, at the step of that change: views by window id."""

    step: int = 0
    views: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A settled run, before any model is loaded. ``buckets`` are the schedule's, the dearest first."""

    resolved: Resolved
    spec: ModelSpec
    base: BasePlace | None
    library: Library
    shapes: tuple[ClipShape, ...]
    buckets: tuple[tuple[Window, ...], ...]
    schedule: Schedule
    steps: int
    cache: Path
    notes: tuple[str, ...]
    processes: int = 1
    past: ViewHistory = field(default_factory=ViewHistory)

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.resolved.config

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the steps that each bucket has."""
        pairs = zip(self.buckets, self.schedule.batches, strict=True)
        turns = float(steps_per_epoch(self.schedule))
        return tuple(len(bucket) / batch / turns for bucket, batch in pairs)

    @property
    def effective_batch(self) -> int:
        """Samples of a step; of videos among images fewer, as the schedule says."""
        return self.config.batch_size * self.config.gradient_accumulation_steps * self.processes

    def exposure(self, steps: int) -> Exposure:
        """Views of every window and clip after so many steps; until the data last changed, those that were counted."""
        since = exposure(
            times_seen(self.schedule, steps), self.buckets, self.library.regularization
        )
        if not self.past.step:
            return since
        until = exposure(
            times_seen(self.schedule, self.past.step), self.buckets, self.library.regularization
        )
        return since.less(until).more(self.past.views, self.library.windows)

    def views_at(self, step: int) -> float:
        """How often a training window has been shown on average, repeats counted."""
        before, each = self._views
        return before + (step - self.past.step) * each

    @cached_property
    def _views(self) -> tuple[float, float]:
        """Views of a training window until the data last changed, and in a step since, on average."""
        windows = self.training_windows
        repeats = {clip.id: clip.repeats for clip in self.library.clips}
        before = sum(self.past.views.get(window.id, 0) for window in windows)
        entries = sum(repeats[window.clip_id] for window in windows)
        return before / len(windows), entries / len(windows) / float(
            steps_per_epoch(self.schedule)
        )

    @cached_property
    def training_windows(self) -> tuple[Window, ...]:
        """The windows that the run learns from; all of them where there are regularization clips alone."""
        kept = self.library.regularization
        windows = self.library.windows
        return tuple(window for window in windows if window.clip_id not in kept) or windows

    @cached_property
    def captions(self) -> dict[str, tuple[str, ...]]:
        """Each training window's captions, by the window's id."""
        captions = {clip.id: clip.captions for clip in self.library.clips}
        windows = self.library.windows
        return {
            window.id: captions[window.clip_id]
            for window in (*windows, *self.library.held_out_windows)
        }

    def data_digest(self) -> str:
        """Names what is trained on: windows, captions and the held-out clips."""
        clips = sorted(
            json.dumps({**asdict(clip), "path": "", "source": ""})
            for clip in self.library.clips
        )
        windows = [
            astuple(window)
            for window in (*self.library.windows, *self.library.held_out_windows)
        ]
        return digest({"clips": clips, "windows": windows})


def open_job(
    resolved: Resolved,
    spec: ModelSpec,
    base: BasePlace | None,
    *,
    to_look: bool = False,
    processes: int = 1,
) -> Job:
    """Scan the data and lay out the schedule of a run that begins in so many processes.

    Raises VideotuneError where no dataset is given, captions are missing or nothing can be used; but not ``to_look``:
    then a clip without a caption is one that is skipped, and there may be no window.
    """
    config = resolved.config
    if not config.datasets:
        raise VideotuneError(
            "datasets: which clips? Give --data DIR, or datasets in the config."
        )
    cache = cache_folder(config)
    weighing = [dataset for dataset in config.datasets if dataset.loss_weight > 0]
    if not weighing:
        raise VideotuneError(
            "datasets.loss_weight: it is 0 for all of them, so nothing would be trained"
        )
    try:
        with bar("reading clips") as progress:
            library = scan(
                _asked(config, weighing, spec, to_look),
                spec.rules,
                cache / "index.json",
                progress.update,
            )
    except OSError as error:
        raise VideotuneError(
            f"the cache {cache} cannot be written: {error}. Set cache_dir elsewhere."
        ) from error
    if not library.windows and not to_look:
        reasons = "".join(
            f"\n  {path}: {reason}: {detail}" for path, reason, detail in library.skipped[:10]
        )
        validated = (
            "all of them are held out: give a dataset of kind train"
            if library.clips
            else "none can be used:"
        )
        raise DoesNotFit(f"no clip can be trained on; {validated}{reasons}")
    library, told = holding_the_token(library, config)
    shaped = buckets(library)
    schedule, notes = make_schedule(config, shaped, library, processes)
    notes += [
        *sizes_as_read(resolved),
        *unused_keys(resolved, library, spec.image_noise),
        *told,
    ]
    named = resolved.origins.get("micro_batch_size") != "plan"
    if (
        named
        and config.micro_batch_size is not None
        and config.micro_batch_size > config.batch_size
    ):
        notes.append(
            f"micro_batch_size {config.micro_batch_size} is unused: batch_size is {config.batch_size}"
        )
    left_out = (dataset.path for dataset in config.datasets if dataset not in weighing)
    notes += [f"{path} is left out: its loss_weight is 0" for path in left_out]
    steps, arithmetic = total_steps(config, sum(schedule.sizes), steps_per_epoch(schedule))
    notes += [arithmetic] if arithmetic else []
    apart = intervals(config, steps_per_epoch(schedule))
    notes += [
        f"{key}_epochs {getattr(config, f'{key}_epochs'):g}: {key} = {count}"
        for key, count in apart.items()
    ]
    resolved = resolved.with_planned(apart)
    notes += epoch_notes(library, shaped, schedule, steps)
    shapes = tuple(shaped)
    groups = tuple(tuple(bucket) for bucket in shaped.values())
    said = (*library.notes, *notes)
    return Job(
        resolved, spec, base, library, shapes, groups, schedule, steps, cache, said, processes
    )


def _asked(config: Config, datasets: list[Dataset], spec: ModelSpec, to_look: bool) -> Config:
    """The config with what a scan needs settled: these datasets, a resolution, and no error ``to_look``."""
    resolution = spec.default_resolution if config.resolution is None else config.resolution
    changes: dict[str, Any] = {"datasets": datasets, "resolution": resolution}
    if to_look and config.missing_caption == "error":
        changes["missing_caption"] = "skip"
    return config.model_copy(update=changes)


def sizes_as_read(resolved: Resolved) -> list[str]:
    """How the person's resolution "HxW" was understood, since most programs name the width first."""
    asked = [resolved.config.resolution] if resolved.origins.get("resolution") == "user" else []
    asked += [dataset.resolution for dataset in resolved.config.datasets]
    each = [one for some in asked for one in (some if isinstance(some, list) else [some])]
    pairs = [str(one).split("x") for one in dict.fromkeys(each) if "x" in str(one)]
    return [
        f"resolution {high}x{wide} is read as {high} high, {wide} wide" for high, wide in pairs
    ]


def epoch_notes(
    library: Library,
    shaped: Mapping[ClipShape, Sequence[Window]],
    schedule: Schedule,
    steps: int,
) -> list[str]:
    """What regularization takes of the samples, and training clips that the run never shows."""
    if not library.windows:
        return []
    seen = exposure(times_seen(schedule, steps), list(shaped.values())).clips
    others = library.regularization
    notes = []
    total = sum(seen.values())
    aside = sum(count for name, count in seen.items() if name in others)
    if aside > total / 2:
        notes.append(
            f"regularization takes {aside / total:.0%} of the samples: give the training clips repeats"
        )
    unseen = sum(count == 0 for name, count in seen.items() if name not in others)
    if unseen:
        clips = "1 training clip is" if unseen == 1 else f"{unseen} training clips are"
        notes.append(f"{clips} never shown: {steps} steps are too few")
    return notes


def cache_folder(config: Config) -> Path:
    """Where the cache lies: as the config says, or in or beside the first dataset; for a Hub dataset in the user's cache."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    first = Path(config.datasets[0].path).expanduser()
    if first.exists():
        return refuse_linked_folder((first if first.is_dir() else first.parent) / CACHE_NAME)
    return user_cache() / re.sub(r"[^A-Za-z0-9._-]+", "--", config.datasets[0].path)


def mixes(library: Library) -> bool:
    """Whether there are images and videos."""
    return len({clip.still for clip in library.clips if not clip.held_out}) == 2


def unused_keys(resolved: Resolved, library: Library, noisy: bool) -> list[str]:
    """A sentence for each key that the person has set and nothing uses."""
    config = resolved.config
    video = resolved.config.video_config
    windows = (*library.windows, *library.held_out_windows)
    held_out = library.held_out_windows
    text = config.text_encoder
    new = config.training_method == "EMBEDDING"
    own_rate = (
        new
        and config.embedding_learning_rate is not None
        and "embedding_learning_rate is the new tokens' own"
    )
    own_rate = own_rate or (
        text.train
        and text.learning_rate is not None
        and "text_encoder.learning_rate is the text encoder's own"
    )
    embedding = (
        "embedding_learning_rate",
        "embedding.token",
        "embedding.vectors",
        "embedding.init_text",
    )
    reasons = {
        "learning_rate": not config.transformer.train and own_rate,
        **dict.fromkeys(embedding, not new and 'training_method is not "EMBEDDING"'),
        **dict.fromkeys(
            ("text_encoder.learning_rate", "text_encoder.layers"),
            not text.train and "the text encoder does not train",
        ),
        "video_config.video_batch_size_multiplier": not mixes(library)
        and "images and videos are not mixed here",
        "video_config.window_stride": video.windows != "slide"
        and 'video_config.windows is not "slide"',
        "video_config.keyframe_source": video.frame_sample_strategy != "keyframe"
        and 'frame_sample_strategy is not "keyframe"',
        "video_config.variants": not (noisy or any(window.varies for window in windows))
        and "nothing of a window is random",
        "video_config.windows": video.stretch and "stretch makes one window of each clip",
        "early_stopping": (
            config.validate_every == 0
            and "validate_every is 0, and only readings can say when to stop"
        )
        or (
            len({window.clip_id for window in held_out}) < 2
            and "fewer than two clips are held out, and only such clips tell learning from copying"
        ),
    }
    return [
        f"{name} is unused: {why}"
        for name, why in reasons.items()
        if why and resolved.origins[name] == "user"
    ]


def make_schedule(
    config: Config,
    shaped: Mapping[ClipShape, Sequence[Window]],
    library: Library,
    processes: int = 1,
) -> tuple[Schedule, list[str]]:
    """The schedule over the buckets, and what is to be said of the batch.

    Where images and videos are mixed, a step of a video bucket takes fewer samples, as the multiplier says.
    """
    given = config.video_config.video_batch_size_multiplier
    mixed = mixes(library)
    stills = {clip.id for clip in library.clips if clip.still}
    fewer = max(1, math.floor(config.batch_size * given))
    videos = [
        any(window.clip_id not in stills for window in bucket) for bucket in shaped.values()
    ]
    each = [fewer if mixed and video else config.batch_size for video in videos]
    batches = tuple(batch * config.gradient_accumulation_steps * processes for batch in each)
    sizes = tuple(len(bucket) for bucket in shaped.values())
    notes = []
    if mixed and fewer != config.batch_size:
        notes.append(
            f"images and videos are mixed: a step takes {max(batches)} images or {min(batches)} of videos "
            f"(video_batch_size_multiplier {given:g})"
        )
    return Schedule(
        config.seed, sizes or (1,), batches or (config.batch_size * processes,), config.shuffle
    ), notes


def crop_blocker(job: Job) -> str | None:
    """What is to be said where most of every clip is cropped away and the config does not allow it by name."""
    asked = job.config.resolution or job.spec.default_resolution
    return None if job.config.allow_crop else crop_problem(job.library, job.spec.rules, asked)


def refuse_nothing_to_learn(config: Config) -> None:
    """Raise VideotuneError where every sample's target is the base model's own prediction."""
    trained = [
        one for one in config.datasets if one.loss_weight > 0 and one.kind != "validation"
    ]
    if trained and all(
        one.kind == "regularization" and one.prior_preservation is not False for one in trained
    ):
        raise VideotuneError(
            "datasets: all of them are regularization, whose target is the base model's own prediction, so nothing would be "
            "learnt. Add a dataset of kind train"
        )


def refuse_skips(job: Job, allow: str | None) -> None:
    """Stop where clips are skipped and the person has not allowed so many by name ("all", or a number).

    Raises DoesNotFit that lists them, also where most of every clip is cropped away.
    """
    if (cropped := crop_blocker(job)) is not None:
        raise DoesNotFit(cropped)
    skipped = job.library.skipped
    if not skipped or (allow is not None and (allow == "all" or len(skipped) <= int(allow))):
        if bare := sum(reason.endswith("_caption") for _, reason, _ in skipped):
            echo(
                f"note: {len(skipped)} clips are left out, {bare} of them without a usable caption"
            )
        return
    lines = "\n".join(f"  {path}: {reason}: {detail}" for path, reason, detail in skipped[:10])
    more = f"\n  … and {len(skipped) - 10} more" if len(skipped) > 10 else ""
    raise DoesNotFit(
        f"{len(skipped)} of the clips would be skipped:\n{lines}{more}\n"
        f"Fix or remove them, or allow it: --allow-skips {len(skipped)}"
    )


def with_views(job: Job, account: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The clip account with the views of each training clip by the end."""
    seen = job.exposure(steps).clips if job.buckets else {}
    by_path = {
        clip.path: seen.get(clip.id, 0) for clip in job.library.clips if not clip.held_out
    }
    clips = [clip | {"views": by_path.get(clip["path"])} for clip in account["clips"]]
    return {**account, "clips": clips}


def holding_the_token(library: Library, config: Config) -> tuple[Library, list[str]]:
    """The library with the new token in every caption, since a caption without it would teach nothing; and what was done."""
    if config.training_method != "EMBEDDING":
        return library, []
    token = config.embedding.token
    before = [caption for clip in library.clips for caption in clip.captions]

    def held(captions: Iterable[str]) -> list[str]:
        return [with_token(caption, token) for caption in captions]

    told = [f"the new token is {token!r}: name it in prompts"]
    lacking = sum(token not in caption for caption in before)
    if lacking:
        told.append(
            f"{lacking} of {len(before)} captions do not hold {token!r}: it is put in front of them"
        )
    clips = tuple(replace(clip, captions=tuple(held(clip.captions))) for clip in library.clips)
    accounts = tuple(row | {"captions": held(row["captions"])} for row in library.accounts)
    return replace(library, clips=clips, accounts=accounts), told
