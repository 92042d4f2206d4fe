"""The library: the clips of a run and their windows, and how it is put together."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from videotune.data.candidates import Candidate
from videotune.data.clip_accounts import account_of
from videotune.data.clip_table import ClipColumns, IdArray
from videotune.data.dataset_notes import VariantNotes
from videotune.data.library_snapshot import (
    Inputs,
    LibraryWriter,
    library_folder,
    read_library,
    temporary_folder,
)
from videotune.data.locations import Location
from videotune.data.media_info import MediaInfo
from videotune.data.window_table import WindowTableBuilder
from videotune.model_spec import VideoRules
from videotune.types import Clip, Window


@dataclass(frozen=True)
class Library:
    """The clips of a run and their windows, in path order."""

    clips: Sequence[Clip]
    """Clips for training, and those held out for validation."""

    windows: Sequence[Window]
    """Windows of training clips."""

    held_out_windows: Sequence[Window]
    """Windows of held-out clips."""

    skipped: tuple[tuple[str, str, str], ...]
    """Path, reason and detail of each file that is not used."""

    accounts: Sequence[dict[str, Any]]
    """One ``account_of`` per file."""

    notes: tuple[str, ...]
    """Notes on the datasets as a whole."""

    media: Mapping[str, MediaInfo]
    """Media info by clip id."""

    roots: tuple[Path, ...] = ()
    """Folders of the datasets."""

    @cached_property
    def regularization(self) -> frozenset[str]:
        """Ids of the regularization clips."""
        ids = self.columns.ids.array[self.columns.regularization]
        return frozenset(IdArray(ids))

    @cached_property
    def columns(self) -> ClipColumns:
        """The facts of the clips that decide a schedule."""
        return ClipColumns.of(self.clips)


class LibraryParts(NamedTuple):
    """What a library is put together from."""

    candidates: Sequence[Candidate]
    locations: Sequence[Location]
    notes: Sequence[str]
    rules: VideoRules
    seed: int
    """The run's seed."""


def build_in_memory(parts: LibraryParts) -> Library:
    """Put a library together as objects."""
    clips: list[Clip] = []
    windows = WindowTableBuilder()
    held_out_windows = WindowTableBuilder()
    skipped: list[tuple[str, str, str]] = []
    accounts: list[dict[str, Any]] = []
    media: dict[str, MediaInfo] = {}
    variant_notes = VariantNotes()

    for candidate in parts.candidates:
        problem = candidate.problem
        if problem is not None:
            skipped.append((candidate.path, problem.reason, problem.detail))
            accounts.append(account_of(candidate, None, parts.rules))
            continue

        clip = candidate.to_clip(parts.seed)
        clips.append(clip)
        accounts.append(account_of(candidate, clip, parts.rules))
        variant_notes.add(candidate, clip)
        media[candidate.clip_id] = candidate.media
        for companion in candidate.companions.values():
            media[companion.content_id] = companion.media
        table = held_out_windows if candidate.held_out else windows
        table.add(candidate.sampling.windows)

    return Library(
        clips=tuple(clips),
        windows=windows.table(),
        held_out_windows=held_out_windows.table(),
        skipped=tuple(skipped),
        accounts=tuple(accounts),
        notes=(*parts.notes, *variant_notes.notes()),
        media=media,
        roots=tuple(location.root for location in parts.locations),
    )


def build_in_files(parts: LibraryParts, inputs: Inputs | None) -> Library:
    """Put a large library together as rows of files.

    Args:
        parts: what it is put together from.
        inputs: for which files and settings it may be used again. None: for none.
    """
    if inputs is not None:
        # A full disk or a home without rights only costs the next start its time.
        with suppress(OSError):
            with library_folder(inputs) as folder:
                _write_library(folder, parts, inputs.fingerprint)
            return Library(**read_library(inputs.folder))
    folder = temporary_folder()
    _write_library(folder, parts, "")
    return Library(**read_library(folder))


def _write_library(folder: Path, parts: LibraryParts, fingerprint: str) -> None:
    writer = LibraryWriter(folder)
    variant_notes = VariantNotes()
    for candidate in parts.candidates:
        problem = candidate.problem
        if problem is not None:
            writer.skipped.append((candidate.path, problem.reason, problem.detail))
            writer.add_account(account_of(candidate, None, parts.rules))
            continue

        clip = candidate.to_clip(parts.seed)
        writer.add_clip(clip, candidate.sampling.windows)
        writer.add_account(account_of(candidate, clip, parts.rules))
        variant_notes.add(candidate, clip)
        writer.add_media(candidate.clip_id, candidate.media)
        for companion in candidate.companions.values():
            writer.add_media(companion.content_id, companion.media)

    writer.finish(
        notes=[*parts.notes, *variant_notes.notes()],
        roots=[location.root for location in parts.locations],
        fingerprint=fingerprint,
    )


def may_be_remembered(candidates: Sequence[Candidate], inputs: Inputs | None) -> bool:
    """Return whether a library would be the same as long as its files are: not if a
    problem may go away by itself, or a file is elsewhere.
    """
    if inputs is None:
        return False
    for candidate in candidates:
        problem = candidate.problem
        has_read = problem is None or candidate.content_id
        if not has_read and problem and problem.reason != "missing_file":
            return False
        paths = [str(candidate.file.path)]
        if candidate.file.caption_file is not None:
            paths.append(str(candidate.file.caption_file))
        for companion in candidate.companions.values():
            paths.append(str(companion.path))
            if companion.problem is not None and not companion.content_id:
                return False
        if candidate.file.media is not None or not inputs.covers(paths):
            return False
    return True
