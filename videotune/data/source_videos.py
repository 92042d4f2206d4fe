"""Which clips come from one source video (by their names, and by frames that nearly agree), and which are held out.

Two clips of one video on both sides of the held-out split would make validation look better than it is; clips wrongly
taken for one video cost validation its sources. So a name counts only with evidence, and so does a picture.
"""

import base64
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videotune.data.content_scan import GRID
from videotune.rng import key

SOURCES_NEEDED = 20
"""Below this number of source videos nothing is held out: every clip counts more in training than in validation."""

NEAR = 0.2
"""Frames agree when they differ by so much of their own structure. Re-encodes at half the size and CRF 35 differ by at most
0.10, frames 1/24 s apart by less than 0.2 in most shots, frames of unrelated clips by more than 1."""

NEAR_LEVELS = 10.0
"""And by at most so many levels of 255, however rich the picture is."""

RICH_LEVELS = 6.0
"""A picture whose structure (what is left of it without a plane through it) is weaker than this does not count."""

PLAIN_SHARE = 0.6
"""Nor does one of which more lies within 4 levels of one tone: black, a title, a drawing on a flat ground (0.75 and more;
real clips have at most 0.26)."""

COMMON = 4
"""A frame found in more than so many other videos is a logo or a title: then the middles must agree too."""

BLOCK = 256
"""Frames compared with all others at once."""

_GAP = r"[-_. ]+"
_MARK = re.compile(
    rf"^(.+?){_GAP}(scene|part|segment|seg|chunk|clip|shot|cut)[-_. ]*\d+$", re.IGNORECASE
)
_NUMBER = re.compile(rf"^(.+?){_GAP}\d{{1,5}}$")  # six digits and more are dates, times, ids
_DATE = re.compile(r"(19|20)\d\d[-_. ]?\d\d[-_. ]?\d\d|\d\d[-_. ]\d\d[-_. ]\d\d$")
_CAMERA = re.compile(
    r"(img|image|dsc[fn]?|mvi|mov|movie|vid|video|clip|gopr|g[hpx]|pxl|dji|sam|rec|recording|capture|frame|untitled|sample)"
    r"(\d*)",
    re.IGNORECASE,
)
"""What cameras, phones and people put before a mere number."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class SourceClip:
    """What tells a clip's source: its ``path`` from the dataset's name on, its length, and its content scan's signatures."""

    path: PurePosixPath
    seconds: float = 0.0
    signatures: tuple[str, ...] = ()


def group_by_source(clips: Sequence[SourceClip]) -> tuple[list[str], list[str]]:
    """The source video of each clip, and notes for the user.

    A source is named "dataset/relative folder/stem without cut marks"; where pictures join several, by the smallest of
    their names. Independent of the order of clips.
    """
    order = _order(clips)
    ordered = [clips[i] for i in order]
    names, notes = _by_name(ordered)
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    labels = _by_pictures(ordered, np.array([number[name] for name in names], np.int64))
    members: dict[int, dict[str, SourceClip]] = defaultdict(dict)
    result = [""] * len(clips)
    for clip, name, label in zip(ordered, names, labels.tolist(), strict=True):
        members[label].setdefault(name, clip)
    smallest = {label: min(group) for label, group in members.items()}
    for place, label in zip(order, labels.tolist(), strict=True):
        result[place] = smallest[label]
    joined = [list(group.values()) for group in members.values() if len(group) > 1]
    if joined:
        first, second = joined[0][:2]
        names_joined = f"{sum(map(len, joined))} file names come from {len(joined)} source videos, as the pictures show"
        notes.append(f"{names_joined} (such as {first.path.name} and {second.path.name})")
    return result, notes


def near_duplicates(clips: Sequence[SourceClip]) -> list[tuple[int, int]]:
    """Pairs (i, j) of clips that show nearly the same from begin to end; each clip once at most as the later, j.

    First, middle and last frame agree, and the lengths to 20 % or half a second. ``i`` is the first such clip in path
    order.
    """
    order = _order(clips)
    ordered = [clips[i] for i in order]
    frames = _Frames(ordered)
    pairs = []
    for row, others in frames.matches(frames.place == 1):
        clip = int(frames.clip[row])
        for other in sorted(set(frames.clip[others].tolist())):
            if other >= clip:
                break
            one = ordered[clip]
            two = ordered[other]
            rows = np.flatnonzero(frames.clip == clip)
            its = np.flatnonzero(frames.clip == other)
            same_length = abs(one.seconds - two.seconds) <= max(
                0.5, 0.2 * max(one.seconds, two.seconds)
            )
            whole = len(rows) == len(its) == len(one.signatures) == len(two.signatures)
            if whole and same_length and bool(frames.agree(rows, its).all()):
                pairs.append((other, clip))
                break
    return sorted((order[a], order[b]) for a, b in pairs)


def hold_out(
    sources: Sequence[str],
    kinds: Sequence[str],
    fraction: float,
    seed: int,
    validated: bool = False,
) -> tuple[list[bool], list[str]]:
    """For each clip whether it is held out, and notes; ``sources`` and ``kinds`` (of their datasets) are the clips'.

    Clips of validation datasets are held out, and then no others, also where none of them can be used (``validated``).
    Without such a dataset it is max(2, fraction) of the source videos of training datasets, those with the smallest keys of
    (seed, name); regularization clips are never held out.
    """
    if validated and "validation" not in kinds:
        return [False] * len(kinds), [
            "no validation: no clip of the validation datasets can be used"
        ]
    if "validation" in kinds:
        pairs = set(zip(sources, kinds, strict=True))
        trained = {source for source, kind in pairs if kind != "validation"}
        both = sorted(trained & {source for source, kind in pairs if kind == "validation"})
        listed = ", ".join(both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
        videos = "1 source video" if len(both) == 1 else f"{len(both)} source videos"
        note = f"validation and training share {videos} ({listed}): the validation loss will look better than it is"
        return [kind == "validation" for kind in kinds], [note] if both else []
    names = {source for source, kind in zip(sources, kinds, strict=True) if kind == "train"}
    if fraction == 0 or not names:
        return [False] * len(sources), []
    if len(names) < SOURCES_NEEDED:
        videos = f"{len(names)} source video{'s' * (len(names) != 1)}"
        clips = kinds.count("train")
        note = f"no clip is held out, so there is no verdict: {videos}, {SOURCES_NEEDED} are needed"
        cuts = f" ({clips} clips: some are cuts of one video, by their names or their pictures)"
        return [False] * len(sources), [note + (cuts if len(names) < clips else "")]
    count = max(2, math.floor(fraction * len(names) + 0.5))
    chosen = set(sorted(names, key=lambda name: (key(seed, "held out", name), name))[:count])
    also = {
        source for source, kind in zip(sources, kinds, strict=True) if kind == "regularization"
    } & chosen
    notes = [
        f"a cut of the held-out video {name} is among the regularization clips"
        for name in sorted(also)
    ]
    return [
        kind == "train" and source in chosen
        for source, kind in zip(sources, kinds, strict=True)
    ], notes


def _order(clips: Sequence[SourceClip]) -> list[int]:
    return sorted(range(len(clips)), key=lambda i: clips[i].path.as_posix())


def _by_name(clips: Sequence[SourceClip]) -> tuple[list[str], list[str]]:
    """The source that each clip's name tells, and notes on numbers that were not taken for cuts."""
    stems = [_unmarked(clip.path.stem) for clip in clips]
    folders = [clip.path.parent.as_posix() for clip in clips]
    series: dict[tuple[str, str], set[str]] = defaultdict(set)
    for stem, folder in zip(stems, folders, strict=True):
        if (base := _numbered(stem)) is not None:
            series[folder, base.casefold()].add(stem)
    many: dict[str, list[str]] = defaultdict(list)
    for (folder, base), members in series.items():
        if len(members) > 1:
            many[folder].append(base)
    names = []
    for stem, folder in zip(stems, folders, strict=True):
        base = _numbered(stem)
        is_cut = base is not None and len(many[folder]) > 1 and base.casefold() in many[folder]
        names.append(f"{folder}/{base if is_cut else stem}")
    return names, _notes_on_numbers(series, many)


def _notes_on_numbers(
    series: dict[tuple[str, str], set[str]], many: dict[str, list[str]]
) -> list[str]:
    notes = []
    for folder, bases in sorted(many.items()):
        listed = sorted(series[folder, bases[0]]) if len(bases) == 1 else []
        if listed:
            clips = f"{listed[0]} to {listed[-1]} in {folder} ({len(listed)} clips)"
            notes.append(
                f"{clips} are not taken for cuts of one video; call cuts {_numbered(listed[0])}-scene-001 …"
            )
        elif len(bases) > 1:
            count = sum(len(series[folder, base]) for base in bases)
            some = ", ".join(sorted(bases)[:3]) + (", …" if len(bases) > 3 else "")
            notes.append(
                f"{count} clips in {folder} are taken for cuts of {len(bases)} videos ({some})"
            )
    return notes


def _unmarked(stem: str) -> str:
    """The stem without scene003, -Scene-001, part2 and the like; video_clip_3 stays, for "video" is no name."""
    while (match := _MARK.match(stem)) is not None:
        weak = match[2].lower() in ("clip", "shot", "cut")
        generic = _CAMERA.fullmatch(match[1])
        if weak and generic is not None and not generic[2]:
            break
        stem = match[1]
    return stem


def _numbered(stem: str) -> str | None:
    """What stands before a number at the end, where that could be a cut's: no camera's name, no date."""
    match = _NUMBER.match(stem)
    if match is None or _DATE.search(stem):
        return None
    words = [word for word in re.split(_GAP, match[1]) if word]
    is_camera = not words or words[0].isdigit() or re.fullmatch(r"\d{6,}", words[-1])
    if is_camera or any(_CAMERA.fullmatch(word) for word in (words[0], words[-1])):
        return None
    return match[1]


def _by_pictures(clips: Sequence[SourceClip], named: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels of sources: ``named`` (N,), joined wherever frames of two agree."""
    labels = named.copy()
    frames = _Frames(clips)
    found: list[tuple[int, NDArray[np.int64]]] = []
    common = np.zeros(len(frames.clip), bool)

    def join(row: int, rows: NDArray[np.int64]) -> None:
        mine = labels[frames.clip[row]]
        theirs = labels[frames.clip[rows]]
        if (theirs != mine).any():
            there = np.unique(np.append(theirs, mine))
            labels[np.isin(labels, there)] = there[0]

    for row, others in frames.matches():
        own = frames.clip[row]
        is_there = np.zeros(len(clips), bool)  # faster than a sort where thousands agree
        is_there[named[frames.clip[others]]] = True
        common[row] = is_there.sum() - int(is_there[named[own]]) > COMMON
        if frames.place[row] == 1:
            join(row, others[frames.place[others] == 1])
        if not common[row]:
            found.append((row, others))
    for row, others in found:
        join(row, others[~common[others]])
    return labels


class _Frames:
    """The signatures of all clips that are rich enough to count, as vectors (N, 150), ordered by their mean brightness.

    ``clip`` (N,) whose they are; ``place`` (N,) 0 first, 1 middle (and stills), 2 last. A class, for it holds five arrays.
    """

    def __init__(self, clips: Sequence[SourceClip]) -> None:
        owner = [i for i, clip in enumerate(clips) for _ in clip.signatures]
        place = [
            k if len(clip.signatures) == 3 else 1
            for clip in clips
            for k in range(len(clip.signatures))
        ]
        texts = "".join(text for clip in clips for text in clip.signatures)
        cells = GRID * GRID
        raw = np.frombuffer(base64.b64decode(texts), np.uint8).astype(np.float32)
        raw = raw.reshape(len(owner), cells + cells // 2)
        structure, plain = _structure(raw[:, :cells])
        mean = raw[:, :cells].mean(1)
        order = np.argsort(mean, kind="stable")
        order = order[((structure >= RICH_LEVELS) & (plain <= PLAIN_SHARE))[order]]
        self.clip = np.array(owner, np.int64)[order]
        self.place = np.array(place, np.int64)[order]
        self._mean = mean[order]
        self._limit = np.minimum(NEAR * structure, NEAR_LEVELS)[order]
        # scaled so that a squared distance is that of brightness plus that of colour, each a mean over its cells
        sizes = np.array([cells] * cells + [cells // 2] * (cells // 2), np.float32)
        self._vectors = (raw[order] - 128) / np.sqrt(sizes)
        self._squares = (self._vectors**2).sum(1)

    def matches(
        self, among: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """For each row that agrees with rows of other clips: the row, and those; ``among`` some rows only."""
        rows = np.arange(len(self.clip)) if among is None else np.flatnonzero(among)
        for begin in range(0, len(rows), BLOCK):
            block = rows[begin : begin + BLOCK]
            low = self._mean[block[0]] - NEAR_LEVELS
            high = self._mean[block[-1]] + NEAR_LEVELS
            others = rows[
                np.searchsorted(self._mean[rows], low) : np.searchsorted(
                    self._mean[rows], high, "right"
                )
            ]
            near = self._near(
                block[:, None], others[None, :], self._vectors[block] @ self._vectors[others].T
            )
            near &= self.clip[block][:, None] != self.clip[others][None, :]
            for i in np.flatnonzero(near.any(1)).tolist():
                yield int(block[i]), others[near[i]]

    def agree(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each pair of rows whether they agree."""
        return self._near(a, b, (self._vectors[a] * self._vectors[b]).sum(1))

    def _near(
        self, a: NDArray[np.int64], b: NDArray[np.int64], products: NDArray[Any]
    ) -> NDArray[np.bool_]:
        limit = np.minimum(self._limit[a], self._limit[b]) ** 2
        return np.asarray(self._squares[a] + self._squares[b] - 2 * products <= limit)


def _structure(light: Vectors) -> tuple[Vectors, Vectors]:
    """Of pictures (N, 100): how far they are from a plane, in levels (N,); the share of cells of one tone (N,)."""
    rows, columns = np.mgrid[:GRID, :GRID].reshape(2, -1) - (GRID - 1) / 2
    basis = np.stack([np.ones(GRID * GRID), rows, columns], 1)
    basis = (basis / np.linalg.norm(basis, axis=0)).astype(np.float32)
    rest = light - (light @ basis) @ basis.T
    plain = (np.abs(light - np.median(light, 1, keepdims=True)) <= 4).mean(1, dtype=np.float32)
    return np.sqrt((rest**2).mean(1)), plain
