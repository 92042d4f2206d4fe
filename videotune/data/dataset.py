"""Datasets become a library of clips and windows, with an account of every file."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from videotune.config.data_schema import Dataset, VideoConfig
from videotune.config.schema import Config
from videotune.data.archives import ARCHIVE_SUFFIXES, FileProgressFn, silent
from videotune.data.candidate_table import CandidateTable, DatasetSettings
from videotune.data.clip_comparison import compare_clips
from videotune.data.clip_file import CLIP_SUFFIXES, ClipFile, Role
from videotune.data.clip_sizes import SizeChoices, parse_resolution
from videotune.data.clip_table import map_rows
from videotune.data.companion_files import CompanionSettings
from videotune.data.companions import Companion, used_companions
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
from videotune.data.media_index import MediaIndex
from videotune.data.metadata_files import Columns
from videotune.data.object_store import is_object_url
from videotune.data.packed_rows import return_free_memory
from videotune.data.packed_texts import PackedPaths, TextNumbers
from videotune.data.preparation import prepare_candidates
from videotune.data.remarks import Urgent, codes_of
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
        index_path: the media index; files that it has are not read again. None keeps
            no index.
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
        fields = read_snapshot(inputs)
        if fields is not None:
            return Library(**fields)

    listed = _list_files(config, rules, index_path, progress)
    return_free_memory()
    candidates = listed.candidates
    notes += listed.notes

    index = MediaIndex(index_path, progress)
    _examine(candidates, index, config, roots=listed.roots)
    return_free_memory()
    # The inputs with which a snapshot of this library is written; None: none is.
    remember_for = inputs
    for candidate in prepare_candidates(candidates, config, rules):
        if remember_for is not None and not may_be_remembered(candidate, remember_for):
            remember_for = None

    notes += map(Urgent, index.notes)
    if index.notes:
        # They are about this scan, and would be repeated at each later start.
        remember_for = None
    notes += compare_clips(candidates, listed.locations, config, rules)
    parts = LibraryParts(candidates, listed.locations, notes, rules, config)
    if len(candidates) < FEWEST_CLIPS:
        return build_in_memory(parts)
    library = build_in_files(parts, remember_for)
    return_free_memory()
    return library


@dataclass
class _ListedFiles:
    """The files of all datasets, before one of them is opened."""

    candidates: CandidateTable = field(default_factory=CandidateTable)
    locations: list[Location] = field(default_factory=list)
    """By dataset."""
    notes: list[str] = field(default_factory=list)

    @property
    def roots(self) -> list[Path]:
        """Folders of the datasets."""
        return [location.root for location in self.locations]


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

        settings = DatasetSettings(dataset, location, size_choices, video)
        listed.candidates.add_dataset(settings)
        chosen, left_out = choose_evenly(len(location.files), dataset.max_clips)
        for position in chosen:
            file = location.files[position]
            problem = None
            if file.frames:
                file, problem = _join_frames(file, dataset, cache, progress)
            listed.candidates.add(file, problem)
        if len(left_out):
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
    candidates: CandidateTable,
    index: MediaIndex,
    config: Config,
    *,
    roots: Sequence[Path],
) -> None:
    """Set media info and scans of the candidates, or their problem.

    Args:
        candidates: files of all datasets.
        index: the media index.
        config: the run's config.
        roots: folders of the datasets. The index drops its entries of files that have
            vanished from them.
    """
    until = config.video_config.max_duration
    paths = PackedPaths()
    companion_paths = PackedPaths()
    companion_numbers = TextNumbers()
    for _, file in candidates.files_to_examine():
        paths.append(file.joined_video or file.path)
        for companion in used_companions(file, config).values():
            if companion.problem is None:
                companion_paths.append(companion.path)
                companion_numbers.add(str(companion.path))

    # Each companion is examined once, after the clips, in the order of the numbers: both
    # follow first occurrences.
    count = len(paths)
    _, first_companions = companion_numbers.number_all()
    for position in first_companions.tolist():
        paths.append(companion_paths[position])
    results = index.examine(paths, roots, until)
    clips = results
    if config.reads_sound:
        clips = index.listen(
            list(zip(paths[:count], results[:count], strict=True)), until
        )

    def read_companions(file: ClipFile) -> dict[Role, Companion]:
        companions = used_companions(file, config)
        for companion in companions.values():
            number = companion_numbers.number_of(str(companion.path))
            if number is not None:
                result = results[count + number]
                companion.content_id = result.id
                companion.info = result.info
                companion.problem = result.problem
        return companions

    candidates.set_examined(clips, read_companions)


def _join_frames(
    file: ClipFile, dataset: Dataset, cache: Path, progress: FileProgressFn
) -> tuple[ClipFile, ClipProblem | None]:
    """Join the frames of a folder into a file; return it, or the folder and its problem."""
    fps = dataset.frame_folder_fps
    assert fps is not None
    try:
        return join_frames(file, cache, fps, progress), None
    except ClipProblem as problem:
        return file, problem


def choose_evenly(count: int, most: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """Choose at most ``most`` of ``count`` files, spread evenly over their order; return
    their positions and those of the others.
    """
    if most is None or count <= most:
        return range(count), ()
    is_chosen = np.zeros(count, bool)
    is_chosen[[number * count // most for number in range(most)]] = True
    return np.flatnonzero(is_chosen).tolist(), np.flatnonzero(~is_chosen).tolist()


def _left_out_note(
    dataset: Dataset, location: Location, left_out: Sequence[int]
) -> str:
    """Return the note on the clips that max_clips leaves out; the first have names."""
    first_files = [location.files[position] for position in left_out[:5]]
    names = [str(file.path.relative_to(location.root)) for file in first_files]
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
