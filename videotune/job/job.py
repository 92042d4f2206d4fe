"""A job: a resolved config and base model, with the library of clips and the schedule
of the run.

Nothing here imports torch, so that ``check`` and ``plan`` of a dataset start at once.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from videotune.config.resolve import Resolved, intervals, total_steps
from videotune.config.schema import Config, Dataset
from videotune.console import bar
from videotune.data.buckets import buckets, is_shown
from videotune.data.clip_table import map_rows
from videotune.data.dataset import scan
from videotune.data.file_checks import refuse_linked_folder
from videotune.data.library import Library
from videotune.data.media_index import INDEX_NAME
from videotune.data.object_files import set_bound
from videotune.data.object_store import is_object_url, parse_url
from videotune.data.remarks import most_serious_first
from videotune.data.remote_cache_files import index_on_store
from videotune.data.window_table import WindowTable
from videotune.errors import DoesNotFit, VideotuneError
from videotune.files import CACHE_NAME, digest, user_cache
from videotune.job.new_token import with_new_token
from videotune.job.notes import (
    epoch_notes,
    interval_notes,
    micro_batch_notes,
    pictures_only_notes,
    preview_notes,
    rate_notes,
    reading_notes,
    unused_keys,
    unweighted_notes,
    warmup_note,
)
from videotune.job.schedule import make_schedule
from videotune.latent_cache.exposure import Exposure, exposure, views_of_clips
from videotune.latent_cache.sampler import (
    Schedule,
    bucket_steps_until,
    phases_of,
    shown_windows,
    steps_per_epoch,
    times_seen,
    views_by_position,
    weights_of,
)
from videotune.model_spec import ModelSpec
from videotune.text import reason_words
from videotune.types import BasePlace, Clip, ClipShape, Pacing, Window


@dataclass(frozen=True)
class ViewHistory:
    """What had been shown when the data last changed."""

    step: int = 0
    """The step of that change."""
    views: Mapping[str, int] = field(default_factory=dict)
    """Views by window id."""


@dataclass(frozen=True)
class Job:
    """A resolved run, before any model is loaded."""

    resolved: Resolved
    spec: ModelSpec
    base: BasePlace | None
    library: Library
    shapes: tuple[ClipShape, ...]
    """Shapes of the buckets."""
    buckets: tuple[Sequence[Window], ...]
    """Windows of the schedule's buckets: phase by phase, in each the most expensive bucket
    first. A window of a clip with ``repeats`` r is r times in its bucket.
    """
    schedule: Schedule
    steps: int
    cache: Path
    notes: tuple[str, ...]
    """Sentences for the user."""
    processes: int = 1
    """How many processes trained when the run began; those that share each sample count
    as one. A resume keeps it, so that a step keeps its samples.
    """
    view_history: ViewHistory = field(default_factory=ViewHistory)
    sampled_prompts: Mapping[int, str] = field(default_factory=dict)
    """The newest prompt by seed of the previews that a resumed run has made."""

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.resolved.config

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the steps that each bucket has."""
        if self.schedule.phases:
            counts = bucket_steps_until(self.schedule, self.steps)
            return tuple(count / self.steps for count in counts)

        epoch_steps = float(steps_per_epoch(self.schedule))
        return tuple(
            len(bucket) * float(weight) / batch / epoch_steps
            for bucket, batch, weight in zip(
                self.buckets,
                self.schedule.batch_sizes,
                weights_of(self.schedule),
                strict=True,
            )
        )

    @cached_property
    def shapes_by_cost(self) -> tuple[ClipShape, ...]:
        """The different shapes of the buckets, the most expensive first."""
        costs = {}
        for shape in self.shapes:
            costs[shape] = (shape.frames * shape.height * shape.width, shape.sound)
        return tuple(sorted(costs, key=costs.__getitem__, reverse=True))

    @property
    def effective_batch(self) -> int:
        """Samples of a step.

        If images and videos are mixed, a step of videos has fewer.
        """
        return (
            self.config.batch_size
            * self.config.gradient_accumulation_steps
            * self.processes
        )

    def exposure(self, steps: int) -> Exposure:
        """Return the views of every window and clip after ``steps`` steps.

        Until the data last changed these are the views that were counted, from then on
        those of the schedule.
        """
        scheduled = self._scheduled_exposure(steps)
        if not self.view_history.step:
            return scheduled
        until_change = self._scheduled_exposure(self.view_history.step)
        return scheduled.minus(until_change).plus(
            self.view_history.views, self.library.windows
        )

    def _scheduled_exposure(self, steps: int) -> Exposure:
        views = times_seen(self.schedule, steps)
        return exposure(views, self.buckets, self.library.regularization)

    def views_at(self, step: int) -> float:
        """Return how often a training window has been shown on average. A clip's
        ``repeats`` are views like others.
        """
        views, views_per_step = self._mean_views
        phases = phases_of(self.schedule)
        for phase, phase_views in zip(phases, views_per_step, strict=True):
            steps = phase.steps_until(step) - phase.steps_until(self.view_history.step)
            views += steps * phase_views
        return views

    @cached_property
    def _mean_views(self) -> tuple[float, tuple[float, ...]]:
        """Mean views of a training window: until the data last changed, and for each
        step of each phase.
        """
        windows = self.training_windows
        views_before = sum(
            self.view_history.views.get(window.id, 0) for window in windows
        )

        training_ids = {window.id for window in windows}
        # The buckets of a phase follow those of the phase before.
        buckets_left = iter(self.buckets)
        views_per_step = []
        for phase in phases_of(self.schedule):
            shown_positions = 0.0
            for weight in weights_of(phase.schedule):
                bucket = next(buckets_left)
                in_training = sum(window.id in training_ids for window in bucket)
                shown_positions += in_training * float(weight)
            epoch_steps = float(steps_per_epoch(phase.schedule))
            views_per_step.append(shown_positions / len(windows) / epoch_steps)
        return views_before / len(windows), tuple(views_per_step)

    @cached_property
    def training_windows(self) -> Sequence[Window]:
        """The windows that the run learns from: all but those of regularization, unless
        there are no others.
        """
        regularization = self.library.regularization
        windows = self.library.windows
        if not regularization:
            return windows
        table = WindowTable.of(windows)
        learnt_owners = np.array(
            [clip_id not in regularization for clip_id in table.clip_ids], bool
        )
        training = table.take(np.flatnonzero(learnt_owners[table.owners()]))
        return training if len(training) else windows

    @cached_property
    def captions(self) -> dict[str, tuple[str, ...]]:
        """Captions of each window, by the window's id."""
        captions = {clip.id: clip.captions for clip in self.library.clips}
        windows = (*self.library.windows, *self.library.held_out_windows)
        return {window.id: captions[window.clip_id] for window in windows}

    def data_digest(self) -> str:
        """Return a hash of what is trained on: windows, captions and the held-out
        clips.
        """
        clips = []
        for clip in self.library.clips:
            clips.append(json.dumps(_trained_values(clip)))
        windows = (*self.library.windows, *self.library.held_out_windows)
        content = {
            "clips": sorted(clips),
            "windows": [_window_values(window) for window in windows],
        }
        return digest(content)


def _trained_values(clip: Clip) -> dict[str, Any]:
    """Return what is trained of a clip.

    Runs from before a field was there have the same hash, as long as it is its default.
    """
    values = {**asdict(clip), "path": "", "source": ""}
    for name, default in (("caption_dropout", None), ("pacing", asdict(Pacing()))):
        if values[name] == default:
            del values[name]
    return values


def _window_values(window: Window) -> tuple[Any, ...]:
    """Return the values of a window, without those of its last fields that are their
    defaults: runs from before these fields were there have the same hash.
    """
    values = astuple(window)  # … flip, companions
    if window.companions:
        return values
    if window.flip:
        return values[:-1]
    return values[:-2]


def open_job(
    resolved: Resolved,
    spec: ModelSpec,
    base: BasePlace | None,
    *,
    to_look: bool = False,
    processes: int = 1,
) -> Job:
    """Scan the data and lay out the schedule of a run.

    Args:
        to_look: only look at the data: a clip without a caption is skipped, and there
            may be no window.
        processes: how many processes train; those that share each sample count as one.

    Raises:
        VideotuneError: if no dataset is given, captions are missing or no clip can be
            used.
    """
    config = resolved.config
    datasets = _trained_datasets(config)
    cache = cache_folder(config)
    library = _scan(config, datasets, spec, cache, to_look=to_look)
    library, token_notes = with_new_token(library, config)
    windows_by_bucket = buckets(library)
    schedule, schedule_notes = make_schedule(
        config, windows_by_bucket, library, processes
    )
    notes = [
        *rate_notes(config),
        *pictures_only_notes(library, spec),
        *reading_notes(resolved, spec),
        *library.notes,
        *schedule_notes,
        *unused_keys(resolved, library, spec, max(schedule.batch_sizes)),
        *token_notes,
        *micro_batch_notes(resolved),
        *unweighted_notes(config),
    ]

    epoch_steps = steps_per_epoch(schedule)
    steps, arithmetic = total_steps(config, shown_windows(schedule), epoch_steps)
    _refuse_idle_steps(library, steps)
    if arithmetic:
        notes.append(arithmetic)
    notes += warmup_note(config, steps)
    steps_between = intervals(config, epoch_steps)
    notes += interval_notes(config, steps_between)
    sample_after = steps_between.get("sample_after", config.sample_after)
    notes += preview_notes(config, library, sample_after)
    notes += epoch_notes(library, tuple(windows_by_bucket.values()), schedule, steps)

    return Job(
        resolved=resolved.with_planned(steps_between),
        spec=spec,
        base=base,
        library=library,
        shapes=tuple(key.shape for key in windows_by_bucket),
        buckets=tuple(windows_by_bucket.values()),
        schedule=schedule,
        steps=steps,
        cache=cache,
        notes=tuple(most_serious_first(notes)),
        processes=processes,
    )


def _trained_datasets(config: Config) -> list[Dataset]:
    """Return the datasets with a weight in the loss. Raises VideotuneError if there are
    none.
    """
    if not config.datasets:
        raise VideotuneError(
            "datasets: none is given. Pass --data DIR, or set datasets in the config."
        )
    datasets = [dataset for dataset in config.datasets if dataset.loss_weight > 0]
    if not datasets:
        raise VideotuneError(
            "datasets.loss_weight: it is 0 for all datasets, so nothing would be trained"
        )
    return datasets


def _scan(
    config: Config,
    datasets: list[Dataset],
    spec: ModelSpec,
    cache: Path,
    *,
    to_look: bool,
) -> Library:
    """Read the clips of the datasets.

    Raises DoesNotFit if none can be trained on, unless ``to_look``.
    """
    settings = _scan_config(config, datasets, spec, to_look=to_look)
    set_bound(config.object_cache_gb)
    try:
        index = cache / INDEX_NAME
        with index_on_store(config.cache_dir, index), bar("reading clips") as progress:
            library = scan(settings, spec.rules, index, progress.update)
    except OSError as error:
        raise VideotuneError(
            f"the cache {cache} cannot be written: {error}. Set cache_dir to another folder."
        ) from error

    if not library.windows and not to_look:
        if library.clips:
            reason = "all of them are kept aside. Add a dataset of kind train"
        else:
            reason = "none can be used:"
        skipped = "".join(
            f"\n  {path}: {reason_words(code)}: {detail}"
            for path, code, detail in library.skipped[:10]
        )
        raise DoesNotFit(f"no clip can be trained on; {reason}{skipped}")
    return library


def _scan_config(
    config: Config, datasets: list[Dataset], spec: ModelSpec, *, to_look: bool
) -> Config:
    """Return the config for a scan: with these datasets, a resolution, and, to look only,
    nothing that would be an error.
    """
    changes: dict[str, Any] = {"datasets": datasets}
    if config.resolution is None:
        changes["resolution"] = spec.default_resolution
    if to_look and config.missing_caption == "error":
        changes["missing_caption"] = "skip"
    return config.model_copy(update=changes)


def cache_folder(config: Config) -> Path:
    """Return the cache folder: as the config says, or in or beside the first dataset;
    of a dataset of the Hub, or where either is on an object store, the user's cache.
    """
    if config.cache_dir is not None and is_object_url(config.cache_dir):
        return object_cache(str(parse_url(config.cache_dir)))
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()

    name = config.datasets[0].path
    if is_object_url(name):
        return object_cache(name)
    first = Path(name).expanduser()
    if first.exists():
        folder = first if first.is_dir() else first.parent
        return refuse_linked_folder(folder / CACHE_NAME)
    return user_cache() / re.sub(r"[^A-Za-z0-9._-]+", "--", name)


def object_cache(url: str) -> Path:
    """Return the folder in the user's cache that belongs to an address of an object
    store. Its name has a hash, since addresses may differ only in characters that no
    folder's name has.
    """
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", url.rstrip("/"))[:80]
    return user_cache() / f"{readable}-{digest(url.rstrip('/'))[:12]}"


def _refuse_idle_steps(library: Library, steps: int) -> None:
    """Raise VideotuneError if the last steps have nothing to train on."""
    columns = library.columns
    numbers = np.unique(columns.pacing[~columns.held_out]).tolist()
    pacings = [columns.pacings[number] for number in numbers]
    if pacings and not any(is_shown(pacing, steps) for pacing in pacings):
        last_step = max(pacing.until_step for pacing in pacings)
        raise VideotuneError(
            f"datasets.until_step: no dataset is trained after step {last_step}, and the run has {steps} steps. "
            f"Set steps to {last_step}, or let a dataset go on"
        )


def refuse_nothing_to_learn(config: Config) -> None:
    """Raise VideotuneError if the target of every sample is the base model's own
    prediction.
    """
    trained = [
        dataset
        for dataset in config.datasets
        if dataset.loss_weight > 0 and dataset.kind != "validation"
    ]
    preserved = [
        dataset
        for dataset in trained
        if dataset.kind == "regularization" and dataset.prior_preservation is not False
    ]

    if trained and len(preserved) == len(trained):
        raise VideotuneError(
            "datasets: all of them are regularization, whose target is the base model's own prediction, "
            "so the run would learn nothing. Add a dataset of kind train"
        )


def with_views(job: Job, account: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the clip account with the views of each training clip after ``steps``
    steps.
    """
    columns = job.library.columns
    if not job.buckets:
        views = np.zeros(len(columns.ids), np.int64)
    elif job.view_history.step:
        views_by_id = job.exposure(steps).clips
        views = np.array([views_by_id.get(name, 0) for name in columns.ids])
    else:
        position_views = views_by_position(job.schedule, steps)
        views = views_of_clips(position_views, job.buckets, columns)
        views = np.maximum(views, 0)  # -1: a clip without a window

    def with_views_of(row: dict[str, Any]) -> dict[str, Any]:
        (position,) = columns.ids.positions([row["id"] or ""]).tolist()
        is_shown = position >= 0 and not columns.held_out[position]
        return row | {"views": int(views[position]) if is_shown else None}

    return {**account, "clips": map_rows(account["clips"], with_views_of)}
