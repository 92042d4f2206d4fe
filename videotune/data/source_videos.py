"""Source videos: which clips come from one video, and which are held out for
validation.

Clips of one video on both sides of the held-out split would make validation look better
than it is; clips wrongly assigned to one video cost validation its sources. So a name
counts only with evidence, and so does a picture (``picture_matching``).
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from videotune.data.packed_texts import PackedTexts, TextNumbers
from videotune.data.picture_matching import join_by_pictures
from videotune.data.picture_table import PictureTable
from videotune.data.remarks import Remark
from videotune.data.source_clips import SourceClip, SourceClipTable
from videotune.data.source_names import (
    CAMERA,
    NumberSeries,
    base_of_number,
    notes_on_letters,
    notes_on_series,
    sources_by_name,
    without_cut_marks,
)
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


class LookAlikes(NamedTuple):
    """Two clips of different names whose pictures match."""

    positions: tuple[int, int]
    """Where they are among the clips."""

    names: tuple[str, str]
    """Their file names."""


def group_by_source(
    clips: Sequence[SourceClip] | SourceClipTable,
    pictures: PictureTable | None = None,
) -> tuple[PackedTexts, list[str], list[LookAlikes]]:
    """Name the source video of each clip.

    A source is named "dataset/relative folder/stem without cut marks"; if pictures join
    several names, by the smallest of them. The result does not depend on the order of
    clips.

    Args:
        clips: the clips.
        pictures: their pictures, if they are at hand.

    Returns:
        The source of each clip, notes for the user, and for each join of two names by
        pictures the clips that match.
    """
    # 1. Sources by names, and which names pictures join: each label is a source video.
    table = SourceClipTable.of(clips)
    order = table.path_order()
    ordered_clips = table.take(order)
    names, series_by_folder, letter_series = sources_by_name(ordered_clips)
    numbers = TextNumbers()
    for name in names:
        numbers.add(name)
    name_numbers, first_clips = numbers.number_all()
    frames = pictures or PictureTable(table)
    label_of_name, pairs = join_by_pictures(frames, name_numbers)
    joined = _joined_names(label_of_name)

    # 2. Notes.
    labels = label_of_name[name_numbers]
    joined_series = _joined_series(ordered_clips, labels, series_by_folder)
    notes = notes_on_series(series_by_folder, joined_series)
    notes += notes_on_letters(letter_series)
    clip_count = int(np.isin(labels, list(joined)).sum())
    look_alikes = []
    for first, second in pairs:
        pair_names = (ordered_clips.path(first).name, ordered_clips.path(second).name)
        positions = (int(order[first]), int(order[second]))
        look_alikes.append(LookAlikes(positions, pair_names))
    notes += _notes_on_joined(joined, look_alikes, clip_count)

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
    return sources, notes, look_alikes


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
    series_by_folder: dict[str, list[NumberSeries]],
) -> set[str]:
    """Return "folder/base" of numbered names that pictures assign to one source video, of
    folders with one such series.
    """
    labels_of_series: dict[str, set[int]] = {}
    for folder, folder_series in series_by_folder.items():
        if not folder_series[0].are_cuts:
            labels_of_series[f"{folder}/{folder_series[0].base}"] = set()
    for position in range(len(clips) if labels_of_series else 0):
        path = clips.path(position)
        base = base_of_number(without_cut_marks(path.stem))
        if base is not None:
            series = f"{path.parent.as_posix()}/{base.casefold()}"
            if series in labels_of_series:
                labels_of_series[series].add(int(labels[position]))
    return {series for series, each in labels_of_series.items() if len(each) == 1}


def _notes_on_joined(
    joined: dict[int, list[int]], look_alikes: Sequence[LookAlikes], clip_count: int
) -> list[str]:
    """Report names that pictures assign to one source video.

    Args:
        joined: for each source video with several names, their numbers.
        look_alikes: clips that match, for each join.
        clip_count: how many clips these source videos have.
    """
    if not joined:
        return []
    first_name, second_name = look_alikes[0].names
    return [
        f"{clip_count} clips show {counted(len(joined), 'source video')}, to judge by their pictures "
        f"and names (such as {first_name} and {second_name}, which look alike)"
    ]


def hold_out(
    sources: Sequence[str],
    kinds: Sequence[str],
    fraction: float,
    seed: int,
    has_validation: bool = False,
    look_alikes: Sequence[LookAlikes] = (),
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
        look_alikes: clips whose pictures match, as ``group_by_source`` found them.

    Returns:
        For each clip whether it is held out, and notes.
    """
    if "validation" in kinds:
        is_held_out = [kind == "validation" for kind in kinds]
        notes = _notes_on_shared_sources(sources, kinds, look_alikes)
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


def _notes_on_shared_sources(
    sources: Sequence[str], kinds: Sequence[str], look_alikes: Sequence[LookAlikes]
) -> list[str]:
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
    shared |= _cut_from_trained_clips(sources, kinds, validation_sources)
    if not shared:
        return []

    pairs_by_source = _pairs_across(sources, kinds, look_alikes)
    examples = []
    for source in sorted(shared):
        video_name = source.rpartition("/")[2]
        examples += pairs_by_source.get(source, [f"cuts of {video_name}"])
    count = counted(len(shared), "source video")
    remedies = []
    if pairs_by_source:
        remedies.append("Keep both clips that look alike aside, or train on both")
    if shared - pairs_by_source.keys():
        remedies.append("Put all cuts of a video on one side")
    note = (
        f"validation and training share {count} ({some(examples, 3)}): "
        f"the validation loss will look better than it is. {'. '.join(remedies)}"
    )
    return [Remark("shared_sources", note)]


def _cut_from_trained_clips(
    sources: Sequence[str], kinds: Sequence[str], validation_sources: set[str]
) -> set[str]:
    """Return the sources of several validation clips that have the name of a clip that is
    trained whole: film_a and film_b, beside film.
    """
    validation_counts = Counter(
        source
        for source, kind in zip(sources, kinds, strict=True)
        if kind == "validation"
    )
    trained_names = {
        _name_of(source)
        for source, kind in zip(sources, kinds, strict=True)
        if kind != "validation"
    }

    found = set()
    for source in validation_sources:
        name = _name_of(source)
        has_several_cuts = validation_counts[source] > 1
        if has_several_cuts and name in trained_names and not CAMERA.match(name):
            found.add(source)
    return found


def _pairs_across(
    sources: Sequence[str], kinds: Sequence[str], look_alikes: Sequence[LookAlikes]
) -> dict[str, list[str]]:
    """Return a phrase for each pair of look-alikes of which one is a validation clip and
    the other is not, by source.
    """
    pairs_by_source: dict[str, list[str]] = {}
    for positions, names in look_alikes:
        is_validation = [kinds[position] == "validation" for position in positions]
        if is_validation[0] == is_validation[1]:
            continue
        validation_name, training_name = names if is_validation[0] else names[::-1]
        phrase = f"{validation_name}, kept aside, looks like {training_name}"
        pairs_by_source.setdefault(sources[positions[0]], []).append(phrase)
    return pairs_by_source


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
    if CAMERA.match(name) or name.isdigit():
        return set()
    return {name, base_of_number(name) or name}


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
