"""Source videos: which clips come from one video, and which are held out for
validation.

Clips of one video on both sides of the held-out split would make validation look better
than it is; clips wrongly assigned to one video cost validation its sources. So a name
counts only with evidence, and so does a picture (``picture_matching``).
"""

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from videotune.data.packed_texts import PackedTexts, TextNumbers
from videotune.data.picture_matching import join_by_pictures
from videotune.data.picture_table import PictureTable
from videotune.data.remarks import Remark
from videotune.data.source_clips import SourceClip, SourceClipTable
from videotune.rng import key
from videotune.text import counted, counted_are, some

HELD_OUT_NEEDED = 2
"""A verdict needs at least this many held-out clips, to know how they scatter."""

HELD_OUT_DEPENDABLE = 6
"""A verdict on at least this many clips is dependable: on six it was right for 17 of 20 runs
that copy (docs/monitor.md). Two clips scatter so much that only a large change shows.
"""

SOURCES_NEEDED = 20
"""With fewer source videos nothing is held out: every clip is worth more in training.
"""

_GAP = r"[-_. ]+"
_CUT_MARK = re.compile(
    rf"^(.+?){_GAP}(scene|part|segment|seg|chunk|clip|shot|cut)[-_. ]*\d+$",
    re.IGNORECASE,
)
# Six digits and more are dates, times or ids.
_NUMBER = re.compile(rf"^(.+?){_GAP}\d{{1,5}}$")
_LETTER = re.compile(rf"^(.+?){_GAP}([a-z])$", re.IGNORECASE)
_DATE = re.compile(r"(19|20)\d\d[-_. ]?\d\d[-_. ]?\d\d|\d\d[-_. ]\d\d[-_. ]\d\d$")
_CAMERA = re.compile(
    r"(img|image|dsc[fn]?|mvi|mov|movie|vid|video|clip|gopr|g[hpx]|pxl|dji|sam|rec|recording"
    r"|capture|frame|untitled|sample)(\d*)",
    re.IGNORECASE,
)
"""Words that cameras, phones and people put before a mere number."""


@dataclass
class _Series:
    """File names in one folder that differ only in the number at their end."""

    base: str
    """The name before the number, in lower case."""

    stems: set[str]


@dataclass(frozen=True)
class _LetterSeries:
    """Clips whose names differ only in the letter at their end: film_a, film_b and so on."""

    source: str
    """The name of their source video."""

    positions: tuple[int, ...]


def group_by_source(
    clips: Sequence[SourceClip] | SourceClipTable,
    pictures: PictureTable | None = None,
) -> tuple[PackedTexts, list[str]]:
    """Name the source video of each clip.

    A source is named "dataset/relative folder/stem without cut marks"; if pictures join
    several names, by the smallest of them. The result does not depend on the order of
    clips.

    Args:
        clips: the clips.
        pictures: their pictures, if they are at hand.

    Returns:
        The source of each clip, and notes for the user.
    """
    # 1. Sources by names, and which names pictures join: each label is a source video.
    table = SourceClipTable.of(clips)
    order = table.path_order()
    ordered_clips = table.take(order)
    names, series_by_folder, letter_series = _sources_by_name(ordered_clips)
    numbers = TextNumbers()
    for name in names:
        numbers.add(name)
    name_numbers, first_clips = numbers.number_all()
    label_of_name = join_by_pictures(pictures or PictureTable(table), name_numbers)
    joined = _joined_names(label_of_name)

    # 2. Notes.
    labels = label_of_name[name_numbers]
    joined_series = _joined_series(ordered_clips, labels, series_by_folder)
    notes = _notes_on_series(series_by_folder, joined_series)
    notes += _notes_on_letters(letter_series)
    clip_count = int(np.isin(labels, list(joined)).sum())
    notes += _notes_on_joined(ordered_clips, joined, first_clips, clip_count)

    # 3. The source of each clip, in the order in which the clips were given.
    smallest_names = {}
    for label, numbers_of_label in joined.items():
        smallest_names[label] = min(names[first_clips[k]] for k in numbers_of_label)

    position_of_clip = np.empty(len(order), np.int32)
    position_of_clip[order] = np.arange(len(order), dtype=np.int32)
    sources = PackedTexts()
    for position in position_of_clip.tolist():
        label = int(labels[position])
        sources.append(smallest_names.get(label) or names[position])
    return sources, notes


def _joined_names(label_of_name: NDArray[np.int32]) -> dict[int, list[int]]:
    """Return the numbers of the names of each source video that has several, by label;
    all in the order of their first clips.
    """
    counts = np.bincount(label_of_name)
    joined: dict[int, list[int]] = {}
    for number in np.flatnonzero(counts[label_of_name] > 1).tolist():
        joined.setdefault(int(label_of_name[number]), []).append(number)
    return joined


def _joined_series(
    clips: SourceClipTable,
    labels: NDArray[np.int32],
    series_by_folder: dict[str, list[_Series]],
) -> set[str]:
    """Return "folder/base" of numbered names that pictures assign to one source video, of
    folders with one such series.
    """
    labels_of_series: dict[str, set[int]] = {}
    for folder, folder_series in series_by_folder.items():
        if len(folder_series) == 1:
            labels_of_series[f"{folder}/{folder_series[0].base}"] = set()
    for position in range(len(clips) if labels_of_series else 0):
        path = clips.path(position)
        base = _base_of_number(_without_cut_marks(path.stem))
        if base is not None:
            series = f"{path.parent.as_posix()}/{base.casefold()}"
            if series in labels_of_series:
                labels_of_series[series].add(int(labels[position]))
    return {series for series, each in labels_of_series.items() if len(each) == 1}


def _notes_on_joined(
    clips: SourceClipTable,
    joined: dict[int, list[int]],
    first_clips: NDArray[np.int32],
    clip_count: int,
) -> list[str]:
    """Report names that pictures assign to one source video.

    Args:
        clips: the clips.
        joined: for each source video with several names, their numbers.
        first_clips: position of the first clip of each name.
        clip_count: how many clips these source videos have.
    """
    if not joined:
        return []
    first_numbers = next(iter(joined.values()))[:2]
    first, second = [clips.path(first_clips[number]) for number in first_numbers]
    return [
        f"{clip_count} clips show {counted(len(joined), 'source video')}, to judge by their pictures "
        f"(such as {first.name} and {second.name})"
    ]


def hold_out(
    sources: Sequence[str],
    kinds: Sequence[str],
    fraction: float,
    seed: int,
    has_validation: bool = False,
) -> tuple[list[bool], list[str]]:
    """Choose the clips that are held out for validation.

    If there is a validation dataset, its clips are held out and no others, even if none
    of them can be used. Otherwise ``fraction`` of the source videos of training datasets
    are held out, at least two: those with the smallest keys of (seed, name). Regularization
    clips are never held out.

    Args:
        sources: source video of each clip.
        kinds: kind of each clip's dataset.
        fraction: share of source videos to hold out.
        seed: the run's seed.
        has_validation: whether there is a validation dataset.

    Returns:
        For each clip whether it is held out, and notes.
    """
    if "validation" in kinds:
        is_held_out = [kind == "validation" for kind in kinds]
        notes = _notes_on_shared_sources(sources, kinds)
        return is_held_out, [*notes, *_few_held_out_notes(sum(is_held_out))]
    if has_validation:
        note = "no validation: no clip of the validation datasets can be used"
        return [False] * len(kinds), [note]

    names = _sources_of("train", sources, kinds)
    if fraction == 0 or not names:
        return [False] * len(sources), []
    if len(names) < SOURCES_NEEDED:
        return [False] * len(sources), [
            _too_few_sources_note(len(names), kinds.count("train"))
        ]

    count = max(2, math.floor(fraction * len(names) + 0.5))
    drawn_names = heapq.nsmallest(
        count, names, key=lambda name: (key(seed, "held out", name), name)
    )
    held_out_names = set(drawn_names)
    is_held_out = [
        kind == "train" and source in held_out_names
        for source, kind in zip(sources, kinds, strict=True)
    ]

    leaked_names = held_out_names & _sources_of("regularization", sources, kinds)
    notes = [
        f"a cut of {name}, which is kept aside, is among the regularization clips"
        for name in sorted(leaked_names)
    ]
    return is_held_out, notes


def _sources_of(kind: str, sources: Sequence[str], kinds: Sequence[str]) -> set[str]:
    """Return the sources of clips whose dataset has this kind."""
    return {
        source
        for source, clip_kind in zip(sources, kinds, strict=True)
        if clip_kind == kind
    }


def _notes_on_shared_sources(sources: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Report source videos that have clips both in validation and in training."""
    training_sources = _sources_of("train", sources, kinds)
    training_sources |= _sources_of("regularization", sources, kinds)
    validation_sources = _sources_of("validation", sources, kinds)
    shared = validation_sources & training_sources
    clip_counts = Counter(
        source
        for source, kind in zip(sources, kinds, strict=True)
        if kind != "validation"
    )
    # A name counts as a video's only if several clips share it.
    cut_names = {_name_of(source) for source, count in clip_counts.items() if count > 1}
    for source in validation_sources:
        if not _names_of_video(source).isdisjoint(cut_names):
            shared.add(source)
    if not shared:
        return []

    names = sorted(shared)
    listing = ", ".join(names[:3])
    if len(names) > 3:
        listing += f" and {len(names) - 3} more"
    count = "1 source video" if len(names) == 1 else f"{len(names)} source videos"
    note = (
        f"validation and training share {count} ({listing}): "
        "the validation loss will look better than it is. Put all cuts of a video on one side"
    )
    return [Remark("shared_sources", note)]


def _name_of(source: str) -> str:
    """Return the name of a source video without its folder."""
    return source.rpartition("/")[2].casefold()


def _names_of_video(source: str) -> set[str]:
    """Return names that clips of another folder would have if they were cuts of the same
    video: of "film_03", "film_03" and "film".

    A clip that was moved into a folder of its own lacks the other cuts there, which would
    show that its number is a cut's. Names that cameras give occur in any folder, so they
    return none.
    """
    name = _name_of(source)
    if _CAMERA.match(name) or name.isdigit():
        return set()
    return {name, _base_of_number(name) or name}


UNKNOWN_COPYING = "so it cannot be told whether the model copies your clips"


LEAST_HELD_OUT = (
    f"{HELD_OUT_NEEDED} are the least; a verdict on so few shows only large changes, and "
    f"from {HELD_OUT_DEPENDABLE} on it is dependable"
)
"""What a user should know of the number of clips to keep aside."""


def _too_few_sources_note(source_count: int, clip_count: int) -> str:
    plural = "" if source_count == 1 else "s"
    note = (
        f"no clip is kept aside for checking, {UNKNOWN_COPYING}: {source_count} source video{plural}, "
        f"{SOURCES_NEEDED} are needed"
    )
    if source_count < clip_count:
        note += (
            f" ({clip_count} clips: some are cuts of one video, by their names or their "
            "pictures)"
        )

    note += (
        f". Add clips, or put {HELD_OUT_NEEDED} or more into a folder of their own: "
        "--held-out FOLDER"
    )
    if source_count < clip_count:
        note += ", all cuts of a video together"
    note += f" ({HELD_OUT_DEPENDABLE} for a dependable verdict)"
    return Remark("none_held_out", note)


def _few_held_out_notes(held_out: int) -> list[str]:
    """Return a note if clips are held out, but too few of them for a verdict, or for one
    that is dependable.
    """
    if held_out >= HELD_OUT_DEPENDABLE:
        return []
    if held_out >= HELD_OUT_NEEDED:
        clips = counted_are(held_out, "clip")
        return [Remark("few_dependable", f"{clips} kept aside: {LEAST_HELD_OUT}")]
    note = (
        f"{counted_are(held_out, 'clip')} kept aside, {UNKNOWN_COPYING}: "
        f"{HELD_OUT_NEEDED} are needed. Put more clips into the dataset of kind "
        f"validation (--held-out FOLDER): {LEAST_HELD_OUT}"
    )
    return [Remark("few_held_out", note)]


def _sources_by_name(
    clips: SourceClipTable,
) -> tuple[PackedTexts, dict[str, list[_Series]], list[_LetterSeries]]:
    """Name the source of each clip by its file name.

    Numbered names are cuts only if their folder has at least two such series: a single
    series may be a camera's numbering. The same holds for names that end in letters.

    Returns:
        The sources, the series of each folder, and the series of letters.
    """
    letter_series = _find_letter_series(clips)
    source_of_letter: dict[int, str] = {}
    for series in letter_series:
        source_of_letter.update(dict.fromkeys(series.positions, series.source))

    series_by_folder = _find_series(clips)
    bases_by_folder: dict[str, set[str]] = {}
    for folder, folder_series in series_by_folder.items():
        if len(folder_series) > 1:
            bases_by_folder[folder] = {series.base for series in folder_series}

    names = PackedTexts()
    names_of_cuts: set[str] = set()
    for position in range(len(clips)):
        folder, stem = _folder_and_stem(clips, position)
        base = _base_of_number(stem)
        name = stem
        if base is not None and base.casefold() in bases_by_folder.get(folder, ()):
            name = base

        source = source_of_letter.get(position) or f"{folder}/{name}"
        names.append(source)
        is_cut = not source.endswith(f"/{clips.path(position).stem}")
        if is_cut:
            names_of_cuts.add(_without_case(source))
    return _spelled_alike(names, names_of_cuts), series_by_folder, letter_series


def _spelled_alike(names: PackedTexts, names_of_cuts: set[str]) -> PackedTexts:
    """Return the names of sources, with one spelling for the cuts of a video whose names
    differ in case: the smallest of theirs.

    Names of which no clip is a cut keep their case: it may tell two ids apart.

    Args:
        names: the name of each clip's source.
        names_of_cuts: those that were shortened to a video's name, without case.
    """
    spellings: dict[str, str] = {}
    for name in names:
        without_case = _without_case(name)
        if without_case in names_of_cuts:
            spelling = spellings.get(without_case, name)
            spellings[without_case] = min(name, spelling)

    respelled = PackedTexts()
    for name in names:
        respelled.append(spellings.get(_without_case(name), name))
    return respelled


def _without_case(source: str) -> str:
    """Return a source's name without case; folders keep theirs."""
    folder, _, name = source.rpartition("/")
    return f"{folder}/{name.casefold()}"


def _folder_and_stem(clips: SourceClipTable, position: int) -> tuple[str, str]:
    """Return a clip's folder, and its name without suffix and cut marks."""
    path = clips.path(position)
    return path.parent.as_posix(), _without_cut_marks(path.stem)


def _find_series(clips: SourceClipTable) -> dict[str, list[_Series]]:
    """Return the series of at least two numbered names, by folder."""
    stems_by_base: dict[tuple[str, str], set[str]] = defaultdict(set)
    for position in range(len(clips)):
        folder, stem = _folder_and_stem(clips, position)
        base = _base_of_number(stem)
        if base is not None:
            stems_by_base[folder, base.casefold()].add(stem)

    series_by_folder: dict[str, list[_Series]] = defaultdict(list)
    for (folder, base), series_stems in stems_by_base.items():
        if len(series_stems) > 1:
            series_by_folder[folder].append(_Series(base, series_stems))
    return series_by_folder


def _find_letter_series(clips: SourceClipTable) -> list[_LetterSeries]:
    """Return the series of names that end in a, b, c and so on without a gap.

    They are cuts only if their folder has at least two such series: a single one may be
    two versions of anything. A clip that is kept aside is in a dataset of its own, so a
    folder has the same place in each dataset.
    """
    places: dict[tuple[tuple[str, ...], str], list[tuple[int, str, str]]] = {}
    for position in range(len(clips)):
        folder, stem = _folder_and_stem(clips, position)
        match = _LETTER.match(stem)
        if match is None or not _can_be_a_source(match[1]):
            continue
        relative_folder = PurePosixPath(folder).parts[1:]
        places.setdefault((relative_folder, match[1].casefold()), []).append(
            (position, match[2].casefold(), f"{folder}/{match[1]}")
        )

    series_by_folder: dict[tuple[str, ...], list[_LetterSeries]] = defaultdict(list)
    for (relative_folder, _), entries in places.items():
        letters = "".join(sorted(letter for _, letter, _ in entries))
        if len(letters) > 1 and ascii_lowercase.startswith(letters):
            source = min(name for _, _, name in entries)
            positions = tuple(position for position, _, _ in entries)
            series_by_folder[relative_folder].append(_LetterSeries(source, positions))
    return [
        series
        for folder_series in series_by_folder.values()
        for series in folder_series
        if len(folder_series) > 1
    ]


def _notes_on_letters(letter_series: Sequence[_LetterSeries]) -> list[str]:
    """Report names that end in letters and were understood as cuts."""
    if not letter_series:
        return []
    clip_count = sum(len(series.positions) for series in letter_series)
    names = sorted(series.source.rpartition("/")[2] for series in letter_series)
    return [
        f"{clip_count} clips whose names end in letters (a, b, …) are treated as cuts of "
        f"{len(letter_series)} videos ({some(names, 3)})"
    ]


def _notes_on_series(
    series_by_folder: dict[str, list[_Series]], joined: set[str]
) -> list[str]:
    """Report how numbered names were understood.

    Args:
        series_by_folder: the series of each folder.
        joined: "folder/base" of series that are one source video by their pictures.
    """
    notes = []

    for folder, folder_series in sorted(series_by_folder.items()):
        if len(folder_series) == 1:
            if f"{folder}/{folder_series[0].base}" in joined:
                continue  # the note on pictures says so
            stems = sorted(folder_series[0].stems)
            notes.append(
                f"{stems[0]} to {stems[-1]} in {folder} ({len(stems)} clips) are not treated "
                f"as cuts of one video; call cuts {_base_of_number(stems[0])}-scene-001 …"
            )
        elif len(folder_series) > 1:
            clip_count = sum(len(series.stems) for series in folder_series)
            listing = ", ".join(sorted(series.base for series in folder_series)[:3])
            if len(folder_series) > 3:
                listing += ", …"
            notes.append(
                f"{clip_count} clips in {folder} are treated as cuts of "
                f"{len(folder_series)} videos ({listing})"
            )
    return notes


def _without_cut_marks(stem: str) -> str:
    """Drop scene003, -Scene-001, part2 and the like.

    video_clip_3 stays as it is, since "video" does not name a source.
    """
    while True:
        match = _CUT_MARK.match(stem)
        if match is None:
            return stem
        is_weak_mark = match[2].lower() in ("clip", "shot", "cut")
        camera = _CAMERA.fullmatch(match[1])
        if is_weak_mark and camera is not None and not camera[2]:
            return stem
        stem = match[1]


def _base_of_number(stem: str) -> str | None:
    """Return the name before a number at the end, if that number can be a cut's.

    The number of a camera, or part of a date, returns None.
    """
    match = _NUMBER.match(stem)
    if match is None or _DATE.search(stem):
        return None

    return match[1] if _can_be_a_source(match[1]) else None


def _can_be_a_source(base: str) -> bool:
    """Return whether what is before a number or a letter can be the name of a video.

    The word of a camera, a number and a date cannot.
    """
    parts = [part for part in re.split(_GAP, base) if part]
    if not parts or parts[0].isdigit() or re.fullmatch(r"\d{6,}", parts[-1]):
        return False
    return not (_CAMERA.fullmatch(parts[0]) or _CAMERA.fullmatch(parts[-1]))
