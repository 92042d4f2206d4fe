"""Which video a clip was cut from, by its file name: marks of cuts, numbers, letters.

A wrong join costs validation its sources, so a number or a letter counts only with
evidence.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from string import ascii_lowercase

from videotune.data.clip_file import CLIP_FOLDERS
from videotune.data.packed_texts import PackedTexts
from videotune.data.source_clips import SourceClipTable
from videotune.text import counted, some

_GAP = r"[-_. ]+"
_CUT_MARK = re.compile(
    rf"^(.+?){_GAP}(scene|part|segment|seg|chunk|clip|shot|cut)[-_. ]*\d+$",
    re.IGNORECASE,
)
# Six digits and more are dates, times or ids.
_NUMBER = re.compile(rf"^(.+?){_GAP}\d{{1,5}}$")
_LETTER = re.compile(rf"^(.+?){_GAP}([a-z])$", re.IGNORECASE)
_DATE = re.compile(r"(19|20)\d\d[-_. ]?\d\d[-_. ]?\d\d|\d\d[-_. ]\d\d[-_. ]\d\d$")
CAMERA = re.compile(
    r"(img|image|dsc[fn]?|mvi|mov|movie|vid|video|clip|gopr|g[hpx]|pxl|dji|sam|rec|recording"
    r"|capture|frame|untitled|sample)(\d*)",
    re.IGNORECASE,
)
"""Words that cameras, phones and people put before a mere number."""


@dataclass
class NumberSeries:
    """File names in one folder that differ only in the number at their end."""

    base: str
    """The name before the number, in lower case."""

    stems: set[str]

    are_cuts: bool = False
    """Whether they are cuts of one video, to judge by other series."""


@dataclass(frozen=True)
class _LetteredClip:
    """A clip whose name ends in a letter."""

    position: int

    letter: str
    """That letter, in lower case."""

    source: str
    """The clip's folder and its name before the letter."""


@dataclass(frozen=True)
class LetterSeries:
    """Clips whose names differ only in the letter at their end: film_a, film_b and so on."""

    source: str
    """The name of their source video."""

    positions: tuple[int, ...]


def sources_by_name(
    clips: SourceClipTable,
) -> tuple[PackedTexts, dict[str, list[NumberSeries]], list[LetterSeries]]:
    """Name the source of each clip by its file name.

    Numbered names are cuts only if their folder has at least two such series: a single
    series may be a camera's numbering. The same holds for names that end in letters. A
    clip that is kept aside is in a dataset of its own, so what holds for a folder holds
    for the same place in the other datasets (``_place_in_dataset``).

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
        bases_by_folder[folder] = {
            series.base for series in folder_series if series.are_cuts
        }

    names = PackedTexts()
    names_of_cuts: set[str] = set()
    for position in range(len(clips)):
        folder, stem = _folder_and_stem(clips, position)
        base = base_of_number(stem)
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
    return path.parent.as_posix(), without_cut_marks(path.stem)


def _find_series(clips: SourceClipTable) -> dict[str, list[NumberSeries]]:
    """Return the series of at least two numbered names, by folder."""
    stems_by_base: dict[tuple[str, str], set[str]] = defaultdict(set)
    for position in range(len(clips)):
        folder, stem = _folder_and_stem(clips, position)
        base = base_of_number(stem)
        if base is not None:
            stems_by_base[folder, base.casefold()].add(stem)

    series_by_folder: dict[str, list[NumberSeries]] = defaultdict(list)
    for (folder, base), series_stems in stems_by_base.items():
        if len(series_stems) > 1:
            series_by_folder[folder].append(NumberSeries(base, series_stems))

    places_of_cuts = {
        _place_in_dataset(folder)
        for folder, folder_series in series_by_folder.items()
        if len(folder_series) > 1
    }
    for folder, folder_series in series_by_folder.items():
        for series in folder_series:
            series.are_cuts = _place_in_dataset(folder) in places_of_cuts
    return series_by_folder


def _place_in_dataset(folder: str) -> tuple[str, ...]:
    """Return the names of a folder within its dataset. "videos" and "images" are places
    of clips and no names.
    """
    names = PurePosixPath(folder).parts[1:]
    return tuple(name for name in names if name not in CLIP_FOLDERS)


def _find_letter_series(clips: SourceClipTable) -> list[LetterSeries]:
    """Return the series of names that end in a, b, c and so on without a gap.

    They are cuts only if their folder, in all datasets, has at least two such series: a
    single one may be two versions of anything.
    """
    clips_by_base: dict[tuple[tuple[str, ...], str], list[_LetteredClip]] = {}
    for position in range(len(clips)):
        folder, stem = _folder_and_stem(clips, position)
        match = _LETTER.match(stem)
        if match is None or not _can_be_a_source(match[1]):
            continue
        clip = _LetteredClip(
            position, letter=match[2].casefold(), source=f"{folder}/{match[1]}"
        )
        place = _place_in_dataset(folder)
        clips_by_base.setdefault((place, match[1].casefold()), []).append(clip)

    series_by_place: dict[tuple[str, ...], list[LetterSeries]] = defaultdict(list)
    for (place, _), lettered_clips in clips_by_base.items():
        letters = "".join(sorted(clip.letter for clip in lettered_clips))
        if len(letters) > 1 and ascii_lowercase.startswith(letters):
            source = min(clip.source for clip in lettered_clips)
            positions = tuple(clip.position for clip in lettered_clips)
            series_by_place[place].append(LetterSeries(source, positions))

    letter_series = []
    for series_of_place in series_by_place.values():
        if len(series_of_place) > 1:
            letter_series += series_of_place
    return letter_series


def notes_on_letters(letter_series: Sequence[LetterSeries]) -> list[str]:
    """Report names that end in letters and were understood as cuts."""
    if not letter_series:
        return []
    clip_count = sum(len(series.positions) for series in letter_series)
    names = sorted(series.source.rpartition("/")[2] for series in letter_series)
    return [
        f"{clip_count} clips whose names end in letters (a, b, …) are treated as cuts of "
        f"{len(letter_series)} videos ({some(names, 3)})"
    ]


def notes_on_series(
    series_by_folder: dict[str, list[NumberSeries]], joined: set[str]
) -> list[str]:
    """Report how numbered names were understood.

    Args:
        series_by_folder: the series of each folder.
        joined: "folder/base" of series that are one source video by their pictures.
    """
    notes = []

    for folder, folder_series in sorted(series_by_folder.items()):
        if not folder_series[0].are_cuts:
            if f"{folder}/{folder_series[0].base}" in joined:
                continue  # the note on pictures says so
            stems = sorted(folder_series[0].stems)
            notes.append(
                f"{stems[0]} to {stems[-1]} in {folder} ({len(stems)} clips) are not treated "
                f"as cuts of one video; call cuts {base_of_number(stems[0])}-scene-001 …"
            )
        else:
            clip_count = sum(len(series.stems) for series in folder_series)
            listing = ", ".join(sorted(series.base for series in folder_series)[:3])
            if len(folder_series) > 3:
                listing += ", …"
            notes.append(
                f"{clip_count} clips in {folder} are treated as cuts of "
                f"{counted(len(folder_series), 'video')} ({listing})"
            )
    return notes


def without_cut_marks(stem: str) -> str:
    """Drop scene003, -Scene-001, part2 and the like.

    video_clip_3 stays as it is, since "video" does not name a source.
    """
    while True:
        match = _CUT_MARK.match(stem)
        if match is None:
            return stem
        is_weak_mark = match[2].lower() in ("clip", "shot", "cut")
        camera = CAMERA.fullmatch(match[1])
        if is_weak_mark and camera is not None and not camera[2]:
            return stem
        stem = match[1]


def base_of_number(stem: str) -> str | None:
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
    return not (CAMERA.fullmatch(parts[0]) or CAMERA.fullmatch(parts[-1]))
