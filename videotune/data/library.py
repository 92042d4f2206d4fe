"""Folders -> Library: which clips are used, which are held out, which are skipped and why, and the windows to train on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from videotune.errors import VideotuneError
from videotune.randomness import key
from videotune.types import Clip, ClipShape, VideoRules, Window

from .account import ClipAccount, clip_account, skipped_account
from .buckets import Resolution, Size, check_resolution, choose_size, parse_resolution
from .captions import ClipFile, find_clips, read_caption, with_trigger
from .facts import ClipProblem, Facts
from .index import Known, Progress, identify
from .windows import LaidClip, WindowSettings, fps_of, lay, planned_frames

SOURCES_NEEDED = 20
"""Below this number of source videos nothing is held out: every clip counts more in training than in validation."""

_CUT = re.compile(r"[-_. ]+(?:scene|part|clip|shot|cut|segment|seg|chunk)?[-_. ]?\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A dataset folder, with the trigger word that its captions get."""

    path: str
    trigger: str | None = None


@dataclass(frozen=True)
class LibrarySettings:
    """How folders are read.

    ``missing_caption`` is "error", "skip" or "empty"; ``validation_fraction`` the share of source videos to hold out.
    """

    windows: WindowSettings
    resolution: int | str | list[int | str] = 512
    missing_caption: str = "error"
    validation_fraction: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Library:
    """The clips of a run and the windows laid over them.

    ``clips`` are those used and those held out; ``windows`` those of training clips, ``held_out_windows`` the others', each
    in path order; ``skipped`` (path, reason, detail); ``accounts`` one a file found; ``notes`` what is to be said about
    the whole; ``facts`` by clip id.
    """

    clips: tuple[Clip, ...]
    windows: tuple[Window, ...]
    held_out_windows: tuple[Window, ...]
    skipped: tuple[tuple[str, str, str], ...]
    accounts: tuple[ClipAccount, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Facts]


@dataclass(frozen=True)
class _Draft:
    """A file that can be used, before it is known whether it is held out."""

    path: str
    source: str
    id: str
    facts: Facts
    captions: tuple[str, ...]
    laid: LaidClip
    size: Size


@dataclass(frozen=True)
class _Skip:
    """A file that cannot be used."""

    path: str
    reason: str
    detail: str
    facts: Facts | None


def scan(
    sources: Sequence[Source],
    rules: VideoRules,
    settings: LibrarySettings,
    index_path: Path | None = None,
    progress: Progress | None = None,
) -> Library:
    """Read dataset folders into a Library; files are opened only where the index does not know them.

    VideotuneError for a folder without videos, for captions that are not there unless ``missing_caption`` allows it, and
    for settings that the model cannot take.
    """
    _check(sources, settings)
    resolution = parse_resolution(settings.resolution)
    check_resolution(resolution, rules)
    notes = _notes_on_time(settings.windows, rules)
    found = [(source, file) for source in sources for file in find_clips(Path(source.path))]
    roots = [Path(source.path) for source in sources]
    known, index_notes = identify([file.path for _, file in found], roots, index_path, progress)
    outcomes = _examine(found, known, rules, settings, resolution)
    usable = [outcome for outcome in outcomes if isinstance(outcome, _Draft)]
    held_out, split_note = _held_out({draft.source for draft in usable}, len(usable), settings)
    notes += [*index_notes, *([split_note] if split_note else [])]
    return _assemble(outcomes, held_out, notes)


def _check(sources: Sequence[Source], settings: LibrarySettings) -> None:
    """VideotuneError for settings outside their range."""
    if not sources:
        raise VideotuneError("No dataset is given. Name a folder with --data, or in the config under datasets.")
    if settings.missing_caption not in ("error", "skip", "empty"):
        raise VideotuneError(f'missing_caption is "{settings.missing_caption}"; it must be "error", "skip" or "empty".')
    if not 0 <= settings.validation_fraction < 1:
        raise VideotuneError(f"validation_fraction is {settings.validation_fraction}; it must lie in [0, 1).")


def _notes_on_time(settings: WindowSettings, rules: VideoRules) -> list[str]:
    """Sentences on a frame count that is changed, and on a frame rate that is not the model's."""
    _, changed = planned_frames(settings, rules)
    notes = [changed] if changed else []
    fps = fps_of(settings, rules)
    if abs(math.log(fps / rules.fps)) > math.log(1.2):
        notes.append(
            f"target_fps {fps:g} is far from the model's own {rules.fps:g}: "
            f"played at the model's rate, motion is {rules.fps / fps:.2g}x as fast as filmed"
        )
    return notes


def _examine(
    found: Sequence[tuple[Source, ClipFile]],
    known: Sequence[Known],
    rules: VideoRules,
    settings: LibrarySettings,
    resolution: Resolution,
) -> list[_Draft | _Skip]:
    """One outcome a file, in order; VideotuneError for all captions that the settings do not allow to be missing."""
    outcomes: list[_Draft | _Skip] = []
    first: dict[str, str] = {}
    refused: list[tuple[str, ClipProblem]] = []
    for (source, file), what in zip(found, known, strict=True):
        path = str(file.path)
        try:
            draft = _draft(source, file, what, first, rules, settings, resolution)
        except ClipProblem as problem:
            if problem.reason.endswith("_caption") and settings.missing_caption != "skip":
                refused.append((path, problem))
            outcomes.append(_Skip(path, problem.reason, problem.detail, what.facts))
            continue
        first[what.id] = path
        outcomes.append(draft)
    if refused:
        raise VideotuneError(_caption_message(refused))
    return outcomes


def _draft(
    source: Source,
    file: ClipFile,
    known: Known,
    first: Mapping[str, str],
    rules: VideoRules,
    settings: LibrarySettings,
    resolution: Resolution,
) -> _Draft:
    """The clip with its windows, size and captions; ClipProblem where it cannot be used. ``first`` are files by id."""
    if known.facts is None:
        assert known.problem is not None
        raise ClipProblem(*known.problem)
    if known.id in first:
        raise ClipProblem("duplicate", f"has the same bytes as {first[known.id]}")
    laid = lay(known.facts, settings.windows, rules)
    if laid.reason is not None:
        raise ClipProblem(laid.reason, laid.detail or "")
    captions = tuple(with_trigger(caption, source.trigger) for caption in _captions(file, settings.missing_caption))
    size = choose_size(known.facts.width, known.facts.height, resolution, rules)
    name = source_name(file.path, Path(source.path))
    return _Draft(str(file.path), name, known.id, known.facts, captions, laid, size)


def _captions(file: ClipFile, missing: str) -> tuple[str, ...]:
    """The caption's variants; the empty caption where none is there and that is allowed."""
    try:
        if file.caption is None:
            raise ClipProblem("missing_caption", f"{file.expected} is not there")
        return read_caption(file.caption)
    except ClipProblem as problem:
        if missing == "empty" and problem.reason in ("missing_caption", "empty_caption"):
            return ("",)
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
        '"skip" (these clips are left out) or "empty" (they train with an empty caption).'
    )


def source_name(path: Path, root: Path) -> str:
    """The video that a file was cut from: its name without trailing scene or part numbers, in the same folder.

    film_scene003.mp4, film-part2.mp4 and film_0003.mp4 are all cuts of "film". Begins with the dataset folder's name.
    """
    stem = path.stem
    while (shorter := _CUT.sub("", stem)) != stem and shorter:
        stem = shorter
    return (Path(root.absolute().name) / path.relative_to(root).parent / stem).as_posix()


def _held_out(sources: set[str], clips: int, settings: LibrarySettings) -> tuple[set[str], str | None]:
    """The source videos to hold out, by the smallest keys of (seed, name), and a note where none can be."""
    if settings.validation_fraction == 0:
        return set(), None
    if len(sources) < SOURCES_NEEDED:
        note = f"no validation: {len(sources)} source videos, {SOURCES_NEEDED} are needed"
        if len(sources) < clips:
            note += (
                f" ({clips} clips: names that differ only in a trailing number, such as _0003, -part2 or _scene003, "
                "are taken for cuts of one video)"
            )
        return set(), note
    count = max(2, math.floor(settings.validation_fraction * len(sources) + 0.5))
    ordered = sorted(sources, key=lambda name: (key(settings.seed, "held out", name), name))
    return set(ordered[:count]), None


def _assemble(outcomes: Sequence[_Draft | _Skip], held_out: set[str], notes: Sequence[str]) -> Library:
    clips: list[Clip] = []
    windows: dict[bool, list[Window]] = {False: [], True: []}
    accounts: list[ClipAccount] = []
    for outcome in outcomes:
        if isinstance(outcome, _Skip):
            accounts.append(skipped_account(outcome.path, outcome.reason, outcome.detail, outcome.facts))
            continue
        held = outcome.source in held_out
        clips.append(Clip(outcome.id, outcome.path, outcome.source, outcome.captions, held))
        for laid in outcome.laid.windows:
            shape = ClipShape(laid.frames, *outcome.size, outcome.laid.fps)
            windows[held].append(Window(outcome.id, laid.start, laid.start + laid.frames / shape.fps, shape))
        accounts.append(
            clip_account(
                outcome.path, outcome.id, held, outcome.facts, outcome.laid, outcome.size, list(outcome.captions)
            )
        )
    return Library(
        clips=tuple(clips),
        windows=tuple(windows[False]),
        held_out_windows=tuple(windows[True]),
        skipped=tuple((o.path, o.reason, o.detail) for o in outcomes if isinstance(o, _Skip)),
        accounts=tuple(accounts),
        notes=tuple(notes),
        facts={outcome.id: outcome.facts for outcome in outcomes if isinstance(outcome, _Draft)},
    )


def buckets(library: Library) -> dict[ClipShape, list[Window]]:
    """The training windows by shape, the dearest shape (frames · height · width) first, windows in path order."""
    shapes = {window.shape for window in library.windows}
    ordered = sorted(shapes, key=lambda shape: (-shape.frames * shape.height * shape.width, shape))
    return {shape: [window for window in library.windows if window.shape == shape] for shape in ordered}
