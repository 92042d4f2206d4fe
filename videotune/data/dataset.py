"""Datasets -> a library of clips: which are used, held out or skipped and why, and the windows to train on."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from videotune.config.schema import Config
from videotune.data.archives import FileProgressFn, silent
from videotune.data.buckets import kept_share, parse_resolution, suits
from videotune.data.candidates import Candidate, account_of, examine, notes_on_clips
from videotune.data.file_checks import refuse_links
from videotune.data.frame_sampling import each_count, fps_of, planned_frames, shrink_factor
from videotune.data.locations import Location, open_location
from videotune.data.media_index import MediaIndex
from videotune.data.media_info import MediaInfo
from videotune.data.source_videos import SourceClip, group_by_source, hold_out, near_duplicates
from videotune.errors import VideotuneError
from videotune.types import Clip, ClipShape, VideoRules, Window


@dataclass(frozen=True)
class Library:
    """The clips of a run and their windows.

    ``clips`` are those used and those held out; ``windows`` those of training clips, ``held_out_windows`` the others', each
    in path order; ``skipped`` (path, reason, detail); ``accounts`` (``account_of``) one a file found; ``notes`` on the
    whole; ``media`` info by clip id; ``roots`` the folders in which the datasets lie.
    """

    clips: tuple[Clip, ...]
    windows: tuple[Window, ...]
    held_out_windows: tuple[Window, ...]
    skipped: tuple[tuple[str, str, str], ...]
    accounts: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    media: Mapping[str, MediaInfo]
    roots: tuple[Path, ...] = ()

    @cached_property
    def regularization(self) -> frozenset[str]:
        """The ids of the clips that train the model to stay as it is."""
        return frozenset(clip.id for clip in self.clips if clip.kind == "regularization")


def scan(
    config: Config,
    rules: VideoRules,
    index_path: Path | None = None,
    progress: FileProgressFn = silent,
) -> Library:
    """Read the config's datasets into a library; files are opened only where the index does not know them.

    ``config.resolution`` must be set. VideotuneError for a dataset without clips, for captions that do not exist unless
    ``missing_caption`` allows it, and for settings that the model cannot take.
    """
    notes = _notes_on_settings(config, rules)
    if index_path is not None:
        refuse_links(index_path.parent)
    candidates: list[Candidate] = []
    locations: list[Location] = []
    for dataset in config.datasets:
        resolution = config.resolution if dataset.resolution is None else dataset.resolution
        assert resolution is not None
        choices = parse_resolution(resolution, rules, shrink_factor(config.video_config, rules))
        windows = {} if dataset.windows is None else {"windows": dataset.windows}
        video = config.video_config.model_copy(update=windows)
        cache = (
            Path(dataset.path) / ".videotune-cache" if index_path is None else index_path.parent
        )
        locations.append(open_location(dataset.path, cache, progress))
        notes += locations[-1].notes
        candidates += [
            Candidate(file, dataset, locations[-1], choices, video)
            for file in locations[-1].files
        ]
    index = MediaIndex(index_path, progress)
    roots = [location.root for location in locations]
    until = config.video_config.max_duration
    for one, examined in zip(
        candidates, index.examine([c.file.path for c in candidates], roots, until), strict=True
    ):
        one.content_id, one.info, one.scan, one.problem = examined
    examine(candidates, config, rules)
    usable = [candidate for candidate in candidates if candidate.problem is None]
    notes += index.notes + _hold_out(usable, locations, config, rules)
    notes += notes_on_clips(usable, config.video_config, rules)
    return _library(candidates, locations, notes, rules)


def _notes_on_settings(config: Config, rules: VideoRules) -> list[str]:
    """Sentences on a frame rate or a size that is not what one would expect."""
    counts = Counter(dataset.path for dataset in config.datasets)
    for path, count in counts.items():
        if count > 1:
            raise VideotuneError(
                f"datasets: {path} is named {count} times. To show it more often, set its repeats."
            )
    video = config.video_config
    for one in each_count(video):
        planned_frames(one, rules)
    notes = []
    fps = fps_of(video, rules)
    shrink = shrink_factor(video, rules)
    if abs(math.log(fps / rules.fps)) > math.log(1.2):
        speed = f"{rules.fps / fps:.2g}x as fast"
        notes.append(
            f"{fps:g} fps is far from the model's own {rules.fps:g}: there motion is {speed} as filmed"
        )
    if shrink > 1:
        notes.append(
            f"spatial_compression_ratio: clips are made {shrink} times smaller than resolution says"
        )
    if video.temporal_augmentation:
        notes.append(
            "temporal_augmentation changes motion: one neighbouring pair of frames in ten swaps places"
        )
    return notes


def _hold_out(
    usable: Sequence[Candidate],
    locations: Sequence[Location],
    config: Config,
    rules: VideoRules,
) -> list[str]:
    """Find the source videos and near-duplicates of clips, and hold some sources out; returns notes."""
    names = _dataset_names(locations, [dataset.path for dataset in config.datasets])
    clips = [
        SourceClip(
            PurePosixPath(names[one.location.root]) / one.relative,
            one.media.seconds,
            one.scan.signatures,
        )
        for one in usable
        if one.scan is not None
    ]
    for i, j in near_duplicates(clips):
        for one, other in ((usable[j], usable[i]), (usable[i], usable[j])):
            one.duplicate = one.duplicate or str(other.relative)
    sources, notes = group_by_source(clips)
    kinds = [candidate.dataset.kind for candidate in usable]
    validated = any(dataset.kind == "validation" for dataset in config.datasets)
    held_out, more = hold_out(
        sources, kinds, config.validation_fraction, config.seed, validated
    )
    for candidate, source, held in zip(usable, sources, held_out, strict=True):
        candidate.source = source
        candidate.held_out = held
        if held:  # its windows have nothing random
            candidate.sample(config, rules)
    return notes + more


def _dataset_names(locations: Sequence[Location], paths: Sequence[str]) -> dict[Path, str]:
    """A name for each dataset's folder: its own, with its parents' where two have the same."""
    names = {location.root: location.name for location in locations}
    for depth in range(1, max((len(root.absolute().parts) for root in names), default=1)):
        counts = Counter(names.values())
        for location, path in zip(locations, paths, strict=True):
            if counts[names[location.root]] > 1:
                above = path.rstrip("/").split("/")[-1 - depth : -1]
                names[location.root] = "/".join([*above, location.name])
    return names


def _library(
    candidates: Sequence[Candidate],
    locations: Sequence[Location],
    notes: Sequence[str],
    rules: VideoRules,
) -> Library:
    clips = [
        candidate.clip() if candidate.problem is None else None for candidate in candidates
    ]
    usable = [candidate for candidate in candidates if candidate.problem is None]
    return Library(
        clips=tuple(clip for clip in clips if clip is not None),
        windows=tuple(
            window for one in usable if not one.held_out for window in one.sampling.windows
        ),
        held_out_windows=tuple(
            window for one in usable if one.held_out for window in one.sampling.windows
        ),
        skipped=tuple(
            (c.path, c.problem.reason, c.problem.detail)
            for c in candidates
            if c.problem is not None
        ),
        accounts=tuple(
            account_of(one, clip, rules) for one, clip in zip(candidates, clips, strict=True)
        ),
        notes=tuple(notes),
        media={candidate.clip_id: candidate.media for candidate in usable},
        roots=tuple(location.root for location in locations),
    )


def _dearest_first(shape: ClipShape) -> tuple[int, ClipShape]:
    return -shape.frames * shape.height * shape.width, shape


def buckets(library: Library) -> dict[ClipShape, list[Window]]:
    """The training windows by shape, the dearest shape (frames · height · width) first, in path order.

    A window of a dataset with repeats stands in its bucket so many times: all windows, then those with a second copy, ….
    """
    repeats = {clip.id: clip.repeats for clip in library.clips}
    shapes = sorted({window.shape for window in library.windows}, key=_dearest_first)
    entries: dict[ClipShape, list[Window]] = {shape: [] for shape in shapes}
    for copy in range(max(repeats.values(), default=1)):
        for window in library.windows:
            if copy < repeats[window.clip_id]:
                entries[window.shape].append(window)
    return entries


def crops_too_much(library: Library, rules: VideoRules, asked: object) -> str | None:
    """A sentence where the crop takes more than half of every clip: mostly height and width were exchanged."""
    sizes = {window.clip_id: window for window in (*library.windows, *library.held_out_windows)}
    rows = [
        (
            library.media[name].width,
            library.media[name].height,
            (window.shape.height, window.shape.width),
        )
        for name, window in sizes.items()
        if window.resize in ("center", "random")
    ]
    kept = max((kept_share(*row) for row in rows), default=1.0)
    if len(rows) < len(sizes) or kept >= 0.5:
        return None
    high, wide = rows[0][2]
    turned = min(kept_share(width, height, size[::-1]) for width, height, size in rows) > kept
    better = 'resize="pad" keeps all of them'
    if turned and suits((wide, high), rules):
        better = (
            f'width={high} and height={wide} (resolution "{wide}x{high}") keep more of them'
        )
    crops = f"makes frames {wide} wide and {high} high, and crops away {1 - kept:.0%} or more of every clip"
    return (
        f"resolution: {asked} {crops}; {better}. Set that, or allow_crop=true if it is meant."
    )


def totals(library: Library) -> dict[str, int]:
    """How many files were found, used, held out and skipped; the first is the sum of the others."""
    accounts = library.accounts
    counts = {
        "found": len(accounts),
        "used": sum(row["used"] for row in accounts),
        "held_out": sum(row["held_out"] for row in accounts),
        "skipped": sum(row["reason"] is not None for row in accounts),
    }
    assert counts["found"] == counts["used"] + counts["held_out"] + counts["skipped"], counts
    assert counts["skipped"] == len(library.skipped), counts
    assert counts["found"] == len(library.clips) + len(library.skipped), counts
    return counts


def to_json(library: Library) -> dict[str, Any]:
    """The account as ``check --json`` gives it: the totals, every clip, the buckets of training windows, and notes."""
    shapes = Counter(window.shape for window in library.windows)
    return {
        **totals(library),
        "clips": list(library.accounts),
        "buckets": [
            {"shape": str(shape), "windows": shapes[shape]}
            for shape in sorted(shapes, key=_dearest_first)
        ],
        "notes": list(library.notes),
    }
