"""The files of datasets -> drafts: what is known of each, the windows and the size it takes, or why it is skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.files import digest
from videotune.types import VideoRules

from .buckets import Resolution, Size, check_resolution, choose_size, parse_resolution
from .captions import read_caption, with_trigger
from .facts import ClipProblem, Facts
from .folders import ClipFile, repeats_of
from .hdr import VERSION as TONE_MAPPING
from .index import Known, Progress, identify, recall
from .laying import LaidClip, lay, plain
from .layouts import Layout, open_layout
from .look import Look
from .windows import WindowSettings, fps_of, planned_frames

if TYPE_CHECKING:
    from .workers import Workers


@dataclass(frozen=True)
class Source:
    """A dataset: where it lies, and what the config says of it. ``resolution`` and ``windows`` None: the run's own."""

    path: str
    trigger: str | None = None
    kind: str = "train"
    repeats: int = 1
    loss_weight: float = 1.0
    target: str = "base"
    resolution: int | str | list[int | str] | None = None
    windows: str | None = None


@dataclass(frozen=True)
class LibrarySettings:
    """How datasets are read.

    ``resize`` is "center", "random", "pad" or "stretch"; ``shrink`` makes clips so many times smaller than ``resolution``
    says; ``missing_caption`` is "error", "skip", "empty" or "text", ``missing_caption_text`` then the text;
    ``validation_fraction`` the share of source videos to hold out.
    """

    windows: WindowSettings
    resolution: int | str | list[int | str] = 512
    resize: str = "center"
    shrink: int = 1
    missing_caption: str = "error"
    missing_caption_text: str | None = None
    validation_fraction: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Dataset:
    """A source as it was found: its files, and how its clips are laid and sized."""

    source: Source
    layout: Layout
    resolution: Resolution
    windows: WindowSettings


@dataclass(frozen=True)
class Found:
    """A file, the dataset that it belongs to, and what is known of it."""

    dataset: Dataset
    file: ClipFile
    known: Known
    look: Look | ClipProblem | None
    cuts: tuple[float, ...] | ClipProblem


@dataclass(frozen=True)
class Draft:
    """A file that can be used, before it is known whether it is held out: ``plainly`` is how it is laid then.

    ``written`` are its captions as they were found, ``captions`` those with the trigger.
    """

    found: Found
    facts: Facts
    written: tuple[str, ...]
    captions: tuple[str, ...]
    laid: LaidClip
    plainly: LaidClip
    size: Size

    @property
    def path(self) -> str:
        """Where the file lies."""
        return str(self.found.file.path)

    @property
    def repeats(self) -> tuple[str, int]:
        """The folder that says by its name how often the clip is repeated, and the number, as ``repeats_of`` does."""
        found = self.found
        trains = found.dataset.source.kind != "validation"
        return repeats_of(found.dataset.layout.root, found.file.path) if trains else ("", 1)

    @property
    def id(self) -> str:
        """Names the clip's pixels: the hash of its bytes, and where they are tone-mapped how."""
        own = self.found.known.id
        return own if self.facts.hdr is None else digest([own, "tone-mapped", TONE_MAPPING])


@dataclass(frozen=True)
class Skip:
    """A file that cannot be used."""

    path: str
    reason: str
    detail: str
    facts: Facts | None


def check(sources: Sequence[Source], settings: LibrarySettings) -> None:
    """VideotuneError for settings outside their range."""
    if not sources:
        raise VideotuneError("No dataset is given. Name a folder with --data, or in the config under datasets.")
    if settings.missing_caption not in ("error", "skip", "empty", "text"):
        raise VideotuneError(
            f'missing_caption is "{settings.missing_caption}"; it must be "error", "skip", "empty" or "text".'
        )
    if not 0 <= settings.validation_fraction < 1:
        raise VideotuneError(f"validation_fraction is {settings.validation_fraction}; it must lie in [0, 1).")
    seen: dict[str, int] = {}
    for source in sources:
        seen[source.path] = seen.get(source.path, 0) + 1
    twice = [path for path, count in seen.items() if count > 1]
    if twice:
        raise VideotuneError(
            f"datasets: {twice[0]} is named {seen[twice[0]]} times. To show it more often, set its repeats; to train it at "
            "several sizes, copy the folder."
        )


def notes_on_settings(settings: WindowSettings, shrink: int, rules: VideoRules) -> list[str]:
    """Sentences on a frame rate or a size that is not what one would expect."""
    planned_frames(settings, rules)
    notes = []
    fps = fps_of(settings, rules)
    if abs(math.log(fps / rules.fps)) > math.log(1.2):
        notes.append(
            f"frames are shown at {fps:g} fps, far from the model's own {rules.fps:g}: "
            f"played at the model's rate, motion is {rules.fps / fps:.2g}x as fast as filmed"
        )
    if shrink > 1:
        notes.append(f"spatial_compression_ratio: clips are made {shrink} times smaller than resolution says")
    if settings.temporal_augmentation:
        notes.append("temporal_augmentation changes motion: one neighbouring pair of frames in ten swaps places")
    return notes


def open_dataset(
    source: Source, rules: VideoRules, settings: LibrarySettings, cache: Path | None, progress: Progress | None
) -> Dataset:
    """The dataset's files, in path order, and its own resolution and windows."""
    resolution = parse_resolution(settings.resolution if source.resolution is None else source.resolution)
    check_resolution(resolution, rules, settings.shrink)
    windows = settings.windows if source.windows is None else replace(settings.windows, windows=source.windows)
    layout = open_layout(source.path, cache or Path(source.path) / ".videotune-cache", progress)
    return Dataset(source, layout, resolution, windows)


def look_at(
    datasets: Sequence[Dataset],
    settings: LibrarySettings,
    index_path: Path | None,
    progress: Progress | None,
    workers: Workers | None,
) -> tuple[list[Found], list[str]]:
    """Every file with what is known of it: facts, a look at its pictures, and its scene cuts where they are asked for."""
    files = [(dataset, file) for dataset in datasets for file in dataset.layout.files]
    roots = [dataset.layout.root for dataset in datasets]
    known, notes = identify([file.path for _, file in files], roots, index_path, progress, workers)
    until = {"until": settings.windows.max_duration}
    looks = recall("look", known, until, index_path, progress, workers)
    scenes: Sequence[Any] = [()] * len(files)
    if settings.windows.frame_sample_strategy == "keyframe" and settings.windows.keyframe_source == "scenes":
        scenes = recall("scenes", known, until, index_path, progress, workers)
    found = [
        Found(
            dataset,
            file,
            what,
            seen if isinstance(seen, ClipProblem) or seen is None else Look.from_json(seen),
            cuts if isinstance(cuts, ClipProblem) else tuple(cuts or ()),
        )
        for (dataset, file), what, seen, cuts in zip(files, known, looks, scenes, strict=True)
    ]
    return found, notes


def examine(found: Sequence[Found], rules: VideoRules, settings: LibrarySettings) -> list[Draft | Skip]:
    """One outcome a file, in order; VideotuneError for all captions that the settings do not allow to be missing."""
    outcomes: list[Draft | Skip] = []
    first: dict[str, Draft] = {}
    refused: list[tuple[str, ClipProblem]] = []
    for one in found:
        path = str(one.file.path)
        try:
            draft = _draft(one, first, rules, settings)
        except ClipProblem as problem:
            if problem.reason.endswith("_caption") and settings.missing_caption != "skip":
                refused.append((path, problem))
            outcomes.append(Skip(path, problem.reason, problem.detail, one.known.facts))
            continue
        first[one.known.id] = draft
        outcomes.append(draft)
    if refused:
        raise VideotuneError(_caption_message(refused))
    return outcomes


def _draft(found: Found, first: Mapping[str, Draft], rules: VideoRules, settings: LibrarySettings) -> Draft:
    """The clip with its windows, size and captions; ClipProblem where it cannot be used. ``first`` are drafts by id."""
    known, dataset = found.known, found.dataset
    if not found.file.there:
        raise ClipProblem("missing_file", f"{found.file.listed} names it, but it is not there")
    if known.facts is None:
        assert known.problem is not None
        raise ClipProblem(*known.problem)
    if known.id in first:
        raise ClipProblem("duplicate", _of_twin(found, first[known.id], settings))
    for seen in (found.look, found.cuts):
        if isinstance(seen, ClipProblem):
            raise seen
    assert not isinstance(found.cuts, ClipProblem)
    laid = lay(known.facts, dataset.windows, rules, found.cuts)
    if laid.reason is not None:
        raise ClipProblem(laid.reason, laid.detail or "")
    damaged = found.look.damaged_at if isinstance(found.look, Look) else None
    if damaged is not None and damaged < max(window.until for window in laid.windows):
        raise ClipProblem("decode_error", f"its pictures are damaged at {damaged:.2f} s, inside what would be used")
    written = _captions(found.file, settings)
    captions = tuple(with_trigger(caption, dataset.source.trigger) for caption in written)
    size = choose_size(known.facts.width, known.facts.height, dataset.resolution, rules, settings.shrink)
    plainly = lay(known.facts, plain(dataset.windows), rules, found.cuts)
    return Draft(found, known.facts, written, captions, laid, plainly, size)


def _of_twin(found: Found, twin: Draft, settings: LibrarySettings) -> str:
    """What is to be said of a file that another one is, byte by byte: also that its own captions are lost."""
    text = f"has the same bytes as {twin.found.file.path.relative_to(twin.found.dataset.layout.root)}"
    try:
        own = _captions(found.file, settings)
    except ClipProblem:
        return text
    return text if set(own) <= set(twin.written) else f"{text}, whose captions are used; its own differ and are not"


def _captions(file: ClipFile, settings: LibrarySettings) -> tuple[str, ...]:
    """The caption's variants; where none is there and that is allowed, the empty caption or the text for such clips."""
    try:
        if file.text is not None:
            if not any(text.strip() for text in file.text):
                raise ClipProblem("empty_caption", f"{file.listed} gives it no text")
            return file.text
        if file.caption is None:
            raise ClipProblem("missing_caption", file.why_missing)
        return read_caption(file.caption)
    except ClipProblem as problem:
        if problem.reason in ("missing_caption", "empty_caption"):
            if settings.missing_caption == "empty":
                return ("",)
            if settings.missing_caption == "text":
                assert settings.missing_caption_text is not None
                return (settings.missing_caption_text,)
        raise


def _caption_message(refused: Sequence[tuple[str, ClipProblem]]) -> str:
    lines = [f"  {path}: {problem.detail}" for path, problem in refused[:10]]
    if len(refused) > 10:
        lines.append(f"  … and {len(refused) - 10} more")
    undecodable = any(problem.reason == "undecodable_caption" for _, problem in refused)
    encoding = " Save those that are not UTF-8 as UTF-8." if undecodable else ""
    clips = "1 clip has" if len(refused) == 1 else f"{len(refused)} clips have"
    return (
        f"{clips} no usable caption:\n" + "\n".join(lines) + "\n"
        f"Write the missing captions.{encoding} Or set missing_caption to "
        '"skip" (these clips are left out), "empty" (they train with an empty caption) '
        'or "text" (they take missing_caption_text).'
    )
