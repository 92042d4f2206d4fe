"""Datasets become a library of clips and windows, with an account of every file."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from videotune.config.data_schema import Dataset, VideoConfig
from videotune.config.schema import Config
from videotune.data.archives import ARCHIVE_SUFFIXES, FileProgressFn, silent
from videotune.data.candidates import Candidate, prepare_candidates
from videotune.data.clip_file import CLIP_SUFFIXES, ClipFile
from videotune.data.clip_sizes import SizeChoices, parse_resolution
from videotune.data.clip_table import map_rows
from videotune.data.companion_files import CompanionSettings
from videotune.data.companions import used_companions
from videotune.data.dataset_notes import notes_on_clips, notes_on_enlarged
from videotune.data.file_checks import ClipProblem, refuse_links
from videotune.data.frame_counts import (
    planned_frames,
    sample_fps,
    shrink_factor,
    split_by_frame_count,
)
from videotune.data.frame_folders import join_frames
from videotune.data.library import (
    Library,
    LibraryParts,
    build_in_files,
    build_in_memory,
    may_be_remembered,
)
from videotune.data.library_snapshot import (
    FEWEST_CLIPS,
    Inputs,
    has_many_files,
    read_snapshot,
)
from videotune.data.locations import Location, open_location
from videotune.data.mask_notes import notes_on_masks
from videotune.data.media_index import MediaIndex
from videotune.data.metadata_files import Columns
from videotune.data.object_store import is_object_url
from videotune.data.picture_matching import SourceClip, near_duplicates
from videotune.data.remarks import codes_of
from videotune.data.source_videos import group_by_source, hold_out
from videotune.data.window_table import (
    WindowTable,
    most_expensive_first,
)
from videotune.errors import VideotuneError
from videotune.files import CACHE_NAME
from videotune.model_spec import VideoRules


def scan(
    config: Config,
    rules: VideoRules,
    index_path: Path | None = None,
    progress: FileProgressFn = silent,
) -> Library:
    """Read the config's datasets into a library.

    Args:
        config: the run's config, with ``resolution`` set.
        rules: frames and sizes that the model accepts.
        index_path: the media index; files that it has are not opened. None keeps no
            index.
        progress: called with (files done, files in all, current file).

    Raises:
        VideotuneError: if a dataset has no clips, captions are missing without
            ``missing_caption``, or the model does not accept a setting.
    """
    notes = _check_settings(config, rules)
    if index_path is not None:
        refuse_links(index_path.parent)

    inputs = _snapshot_inputs(config, rules) if index_path is not None else None
    if inputs is not None:
        parts = read_snapshot(inputs)
        if parts is not None:
            return Library(**parts)

    listed = _list_files(config, rules, index_path, progress)
    candidates = listed.candidates
    locations = listed.locations
    notes += listed.notes

    index = MediaIndex(index_path, progress)
    for candidate in candidates:
        candidate.companions = used_companions(candidate.file, config)
    _examine(
        [candidate for candidate in candidates if candidate.problem is None],
        index,
        roots=[location.root for location in locations],
        until=config.video_config.max_duration,
        reads_sound=config.reads_sound,
    )

    prepare_candidates(candidates, config, rules)
    usable = [candidate for candidate in candidates if candidate.problem is None]
    notes += index.notes
    source_clips = _source_clips(usable, locations, config)
    _mark_near_duplicates(usable, source_clips)
    _look_at_uncaptioned(candidates, usable, locations, config)
    source_notes = _assign_sources(usable, source_clips)
    # Notes of ``_hold_out`` first: they may say that the validation loss is useless. Notes
    # on file names (``_assign_sources``) follow.
    notes += _hold_out(usable, config, rules)
    notes += source_notes
    for candidate in usable:
        candidate.mirror()
    notes += notes_on_clips(usable, config, rules)
    notes = [
        *notes_on_masks(candidates, usable, config),
        *notes_on_enlarged(usable, rules),
        *notes,
    ]
    parts_of_library = LibraryParts(candidates, locations, notes, rules, config.seed)
    # A note of the index is about this scan, and would be repeated at each later start.
    return _build_library(parts_of_library, None if index.notes else inputs)


def _build_library(parts: LibraryParts, remember_for: Inputs | None) -> Library:
    """Put a library together: in memory, or if it is large in files.

    Args:
        parts: what it is made of.
        remember_for: inputs by which a later start finds the files again. None: they are
            not kept.
    """
    if len(parts.candidates) < FEWEST_CLIPS:
        return build_in_memory(parts)
    is_lasting = may_be_remembered(parts.candidates, remember_for)
    return build_in_files(parts, remember_for if is_lasting else None)


@dataclass
class _ListedFiles:
    """The files of all datasets, before one of them is opened."""

    candidates: list[Candidate] = field(default_factory=list)
    locations: list[Location] = field(default_factory=list)
    """By dataset."""
    notes: list[str] = field(default_factory=list)


def _list_files(
    config: Config, rules: VideoRules, index_path: Path | None, progress: FileProgressFn
) -> _ListedFiles:
    """List the files of all datasets; what is not on this machine is fetched."""
    listed = _ListedFiles()
    for dataset in config.datasets:
        cache = Path(dataset.path) / CACHE_NAME
        if index_path is not None:
            cache = index_path.parent
        # Parsed before the files are fetched, so that a wrong resolution is reported at
        # once.
        size_choices = _size_choices(dataset, config, rules)
        video = _video_settings(dataset, config)
        location = _open(dataset, config, cache, progress)
        listed.locations.append(location)
        listed.notes += location.notes

        files, left_out = choose_evenly(location.files, dataset.max_clips)
        for file in files:
            candidate = Candidate(file, dataset, location, size_choices, video)
            listed.candidates.append(candidate)
            if file.frames:
                _join_frames(candidate, cache, progress)
        if left_out:
            listed.notes.append(_left_out_note(dataset, location, left_out))
    return listed


def _snapshot_inputs(config: Config, rules: VideoRules) -> Inputs | None:
    """Return what a library is made of, as it is now. None for a small library, or if a
    folder cannot be read.
    """
    inputs = Inputs(config, rules)
    if not has_many_files(inputs.folders, FEWEST_CLIPS):
        return None
    try:
        inputs.take_fingerprint()
    except OSError:
        return None  # reading the folder reports what is wrong with it
    return inputs


def _open(
    dataset: Dataset, config: Config, cache: Path, progress: FileProgressFn
) -> Location:
    mask_folder = None
    if config.loss_mask.is_used and dataset.loss_masks is not None:
        mask_folder = Path(dataset.loss_masks).expanduser()
    return open_location(
        dataset.path,
        cache,
        progress,
        dataset.caption_extension,
        frame_folders=dataset.frame_folder_fps is not None,
        columns=Columns(dataset.file_column, dataset.caption_column),
        companions=CompanionSettings(
            loss_masks=mask_folder,
            start_images="first_frame" in config.condition_types,
        ),
    )


def _examine(
    candidates: Sequence[Candidate],
    index: MediaIndex,
    *,
    roots: Sequence[Path],
    until: float,
    reads_sound: bool,
) -> None:
    """Set media info and scans of the candidates, or their problem.

    Args:
        candidates: files of all datasets.
        index: the media index.
        roots: folders of the datasets. The index drops its entries of files that have
            vanished from them.
        until: seconds of each clip to scan.
        reads_sound: whether to scan the sound of clips.
    """
    paths = [
        candidate.file.joined_video or candidate.file.path for candidate in candidates
    ]
    companions = {}
    for candidate in candidates:
        for companion in candidate.companions.values():
            if companion.problem is None:
                companions[companion.path] = companion

    examined = index.examine([*paths, *companions], roots, until)
    clips = examined[: len(paths)]
    if reads_sound:
        clips = index.listen(list(zip(paths, clips, strict=True)), until)
    for candidate, result in zip(candidates, clips, strict=True):
        candidate.content_id = candidate.file.content_id or result.id
        candidate.info = result.info
        candidate.scan = result.scan
        candidate.sound = result.sound
        candidate.problem = result.problem

    result_by_companion = dict(zip(companions, examined[len(paths) :], strict=True))
    for candidate in candidates:
        for companion in candidate.companions.values():
            if companion.path not in result_by_companion:
                continue
            result = result_by_companion[companion.path]
            companion.content_id = result.id
            companion.info = result.info
            companion.problem = result.problem


def _join_frames(candidate: Candidate, cache: Path, progress: FileProgressFn) -> None:
    """Join the frames of a folder into a file, or set the candidate's problem."""
    fps = candidate.dataset.frame_folder_fps
    assert fps is not None
    try:
        candidate.file = join_frames(candidate.file, cache, fps, progress)
    except ClipProblem as problem:
        candidate.problem = problem


def choose_evenly(
    files: Sequence[ClipFile], most: int | None
) -> tuple[list[ClipFile], list[ClipFile]]:
    """Return at most ``most`` files, spread evenly over their order, and the others."""
    count = len(files)
    if most is None or count <= most:
        return list(files), []
    chosen = {number * count // most for number in range(most)}
    left_out = [file for index, file in enumerate(files) if index not in chosen]
    return [files[index] for index in sorted(chosen)], left_out


def _left_out_note(
    dataset: Dataset, location: Location, left_out: Sequence[ClipFile]
) -> str:
    """Return the note on the clips that max_clips leaves out; the first have names."""
    names = [str(file.path.relative_to(location.root)) for file in left_out[:5]]
    if len(left_out) > 5:
        names.append("…")
    return (
        f"{dataset.path}: max_clips {dataset.max_clips} leaves out {len(left_out)} of "
        f"{len(location.files)} clips, evenly over their order ({', '.join(names)})"
    )


def _size_choices(dataset: Dataset, config: Config, rules: VideoRules) -> SizeChoices:
    """Parse the dataset's resolution, or else the config's."""
    resolution = config.resolution if dataset.resolution is None else dataset.resolution
    assert resolution is not None
    return parse_resolution(
        resolution, rules, shrink_factor(config.video_config, rules)
    )


def _video_settings(dataset: Dataset, config: Config) -> VideoConfig:
    """Return the config's frames and windows, with the windows of the dataset if it has
    any.
    """
    if dataset.windows is None:
        return config.video_config
    return config.video_config.model_copy(update={"windows": dataset.windows})


def _check_settings(config: Config, rules: VideoRules) -> list[str]:
    """Check the datasets' paths and the frame counts; return notes on unusual settings.

    Raises:
        VideotuneError: if a path appears twice, or the model does not accept the
            frames.
    """
    counts = Counter(dataset.path for dataset in config.datasets)
    for path, count in counts.items():
        if count > 1:
            raise VideotuneError(
                f"datasets: {path} is named {count} times. "
                "To show it more often, set its repeats."
            )

    for dataset in config.datasets:
        if dataset.loss_masks is not None and is_object_url(dataset.loss_masks):
            raise VideotuneError(
                f"datasets.loss_masks: {dataset.loss_masks} is on an object store, and only a folder of this "
                "machine can be named. Put the masks into loss_masks/ beside videos/ on the store."
            )
        if dataset.caption_extension.lower() in (*CLIP_SUFFIXES, *ARCHIVE_SUFFIXES):
            raise VideotuneError(
                f"datasets.caption_extension: {dataset.caption_extension} of {dataset.path} is "
                "the ending of clips or archives. Set that of the text files, such as .txt."
            )

    video = config.video_config
    for settings in split_by_frame_count(video):
        planned_frames(settings, rules)

    notes = []
    fps = sample_fps(video, rules)
    shrink = shrink_factor(video, rules)
    if abs(math.log(fps / rules.fps)) > math.log(1.2):
        notes.append(
            f"{fps:g} fps is far from the model's own {rules.fps:g} fps: its motion will be "
            f"{rules.fps / fps:.2g}x as fast as filmed"
        )
    if shrink > 1:
        notes.append(
            f"spatial_compression_ratio: clips are {shrink} times smaller than resolution"
        )
    if video.temporal_augmentation:
        notes.append(
            "temporal_augmentation changes motion: "
            "one pair of neighbouring frames in ten is swapped"
        )
    return notes


def _source_clips(
    candidates: Sequence[Candidate], locations: Sequence[Location], config: Config
) -> list[SourceClip]:
    """Return name, duration and pictures of each scanned candidate, in their order."""
    names = _dataset_names(locations, [dataset.path for dataset in config.datasets])
    clips = []
    for candidate in candidates:
        assert candidate.scan is not None
        path = PurePosixPath(names[candidate.location.root]) / candidate.relative
        signatures = candidate.scan.signatures
        clips.append(SourceClip(path, candidate.media.seconds, signatures))
    return clips


def _look_at_uncaptioned(
    candidates: Sequence[Candidate],
    usable: Sequence[Candidate],
    locations: Sequence[Location],
    config: Config,
) -> None:
    """Let clips that lack only a caption name clips that they look like."""
    uncaptioned = [
        candidate for candidate in candidates if candidate.lacks_only_caption
    ]
    if uncaptioned:
        looked_at = [*usable, *uncaptioned]
        _mark_near_duplicates(looked_at, _source_clips(looked_at, locations, config))


def _mark_near_duplicates(
    candidates: Sequence[Candidate], clips: Sequence[SourceClip]
) -> None:
    """Let clips that look nearly the same name each other, for a warning.

    Both stay in training. ``group_by_source`` compares pictures by itself, so that
    clips of one source are held out together.
    """
    for first_index, second_index in near_duplicates(clips):
        first = candidates[first_index]
        second = candidates[second_index]
        _set_looks_like(second, first)
        _set_looks_like(first, second)


def _set_looks_like(candidate: Candidate, other: Candidate) -> None:
    """Let a candidate name another; one that is used does not name one that is not."""
    names_unused = candidate.problem is None and other.problem is not None
    if candidate.looks_like is None and not names_unused:
        candidate.looks_like = str(other.relative)


def _assign_sources(
    usable: Sequence[Candidate], clips: Sequence[SourceClip]
) -> list[str]:
    """Set the source video of each candidate; return notes on how they were found."""
    sources, notes = group_by_source(clips)
    for candidate, source in zip(usable, sources, strict=True):
        candidate.source = source
    return notes


def _hold_out(
    usable: Sequence[Candidate], config: Config, rules: VideoRules
) -> list[str]:
    """Hold the clips of some sources out for validation; return notes on the choice."""
    held_out, notes = hold_out(
        [candidate.source for candidate in usable],
        kinds=[candidate.dataset.kind for candidate in usable],
        fraction=config.validation_fraction,
        seed=config.seed,
        has_validation=any(dataset.kind == "validation" for dataset in config.datasets),
    )
    for candidate, is_held_out in zip(usable, held_out, strict=True):
        candidate.held_out = is_held_out
        # Once more, because windows of held-out clips have nothing random.
        if is_held_out:
            candidate.place_windows(config, rules)
    return notes


def _dataset_names(
    locations: Sequence[Location], paths: Sequence[str]
) -> dict[Path, str]:
    """Return a name for each dataset's folder, with its parents' names if two are the
    same: "cats/clips" and "dogs/clips" keep their parents, "cats/clips" and "dogs" are
    "clips" and "dogs".
    """
    names = {location.root: location.name for location in locations}
    most_parts = max((len(root.absolute().parts) for root in names), default=1)
    for depth in range(1, most_parts):
        counts = Counter(names.values())
        for location, path in zip(locations, paths, strict=True):
            if counts[names[location.root]] > 1:
                parents = path.rstrip("/").split("/")[-1 - depth : -1]
                names[location.root] = "/".join([*parents, location.name])
    return names


def totals(library: Library) -> dict[str, int]:
    """Count the files found, used, held out and skipped; the first is the sum of the
    others.
    """
    held_out = int(library.columns.held_out.sum())
    counts = {
        "found": len(library.accounts),
        "used": len(library.clips) - held_out,
        "held_out": held_out,
        "skipped": len(library.skipped),
    }
    assert counts["found"] == counts["used"] + counts["held_out"] + counts["skipped"], (
        counts
    )
    return counts


def to_json(library: Library) -> dict[str, Any]:
    """Return the account as ``check --json`` prints it.

    It has the totals, every clip, the buckets of training windows, and the notes.
    """
    window_counts = WindowTable.of(library.windows).shape_counts()
    bucket_rows = [
        {"shape": str(shape), "sound": shape.sound, "windows": window_counts[shape]}
        for shape in sorted(window_counts, key=most_expensive_first)
    ]
    return {
        **totals(library),
        "clips": map_rows(library.accounts, lambda account: account),
        "buckets": bucket_rows,
        "notes": list(library.notes),
        "note_codes": codes_of(library.notes),
    }
