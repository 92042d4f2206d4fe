"""The library: the clips of a run and their windows, and how it is put together."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from videotune.config.schema import Config
from videotune.data.candidate_table import CandidateTable
from videotune.data.candidates import Candidate
from videotune.data.clip_accounts import account_of
from videotune.data.clip_table import ClipColumns, IdArray
from videotune.data.dataset_notes import ClipNotes, VariantNotes
from videotune.data.library_snapshot import (
    Inputs,
    LibraryWriter,
    library_folder,
    read_library,
    temporary_folder,
)
from videotune.data.locations import Location
from videotune.data.mask_notes import MaskNotes
from videotune.data.media_info import MediaInfo
from videotune.data.window_table import WindowTableBuilder
from videotune.model_spec import VideoRules
from videotune.types import Clip, Window


@dataclass(frozen=True)
class Library:
    """The clips of a run and their windows, ordered by dataset, then by path."""

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
    """Media info by file id: of clips, and of the companions that they use."""

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

    candidates: CandidateTable
    locations: Sequence[Location]
    notes: Sequence[str]
    """Notes that do not depend on single clips."""
    rules: VideoRules
    config: Config

    @property
    def roots(self) -> list[Path]:
        """Folders of the datasets."""
        return [location.root for location in self.locations]


class LibrarySink(Protocol):
    """What receives the parts of a library, one file after the other."""

    skipped: list[tuple[str, str, str]]
    """Path, reason and detail of each file that is not used."""

    def add_account(self, account: dict[str, Any]) -> None:
        """Append the account of a file."""

    def add_media(self, file_id: str, info: MediaInfo) -> None:
        """Append the media info of a clip or of a file that belongs to one."""

    def add_clip(self, clip: Clip, windows: Sequence[Window]) -> None:
        """Append a clip with its windows."""


class _MemorySink:
    """Collects a library as objects."""

    def __init__(self) -> None:
        self.skipped: list[tuple[str, str, str]] = []
        self._clips: list[Clip] = []
        self._windows = WindowTableBuilder()
        self._held_out_windows = WindowTableBuilder()
        self._accounts: list[dict[str, Any]] = []
        self._media: dict[str, MediaInfo] = {}

    def add_account(self, account: dict[str, Any]) -> None:
        self._accounts.append(account)

    def add_media(self, file_id: str, info: MediaInfo) -> None:
        self._media[file_id] = info

    def add_clip(self, clip: Clip, windows: Sequence[Window]) -> None:
        self._clips.append(clip)
        table = self._held_out_windows if clip.held_out else self._windows
        table.add_clip(windows)

    def library(self, notes: Sequence[str], roots: Sequence[Path]) -> Library:
        """Return the library of everything that was added."""
        return Library(
            clips=tuple(self._clips),
            windows=self._windows.table(),
            held_out_windows=self._held_out_windows.table(),
            skipped=tuple(self.skipped),
            accounts=tuple(self._accounts),
            notes=tuple(notes),
            media=self._media,
            roots=tuple(roots),
        )


def _fill(sink: LibrarySink, parts: LibraryParts) -> list[str]:
    """Add every file of the datasets to the sink; return all notes of the library.

    Raises:
        VideotuneError: if the config uses masks and no clip has one.
    """
    mask_notes = MaskNotes(parts.config)
    clip_notes = ClipNotes(parts.config, parts.rules)
    variant_notes = VariantNotes()
    for candidate in parts.candidates:
        mask_notes.add(candidate)
        problem = candidate.problem
        if problem is not None:
            sink.skipped.append((candidate.path, problem.reason, problem.detail))
            sink.add_account(account_of(candidate, None, parts.rules))
            continue

        clip = candidate.to_clip(parts.config.seed)
        sink.add_clip(clip, candidate.placement.windows)
        sink.add_account(account_of(candidate, clip, parts.rules))
        clip_notes.add(candidate)
        variant_notes.add(candidate, clip)
        sink.add_media(candidate.clip_id, candidate.media)
        for companion in candidate.companions.values():
            sink.add_media(companion.file_id, companion.media)

    usable = parts.candidates.usable
    return [
        *mask_notes.notes(),
        *clip_notes.notes_on_enlarged(),
        *parts.notes,
        *clip_notes.notes(lambda number: parts.candidates[usable[number]].captions),
        *variant_notes.notes(),
    ]


def build_in_memory(parts: LibraryParts) -> Library:
    """Put a library together as objects."""
    sink = _MemorySink()
    notes = _fill(sink, parts)
    return sink.library(notes, parts.roots)


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
    """Write a library into a folder."""
    writer = LibraryWriter(folder)
    notes = _fill(writer, parts)
    writer.finish(notes=notes, roots=parts.roots, fingerprint=fingerprint)


def may_be_remembered(candidate: Candidate, inputs: Inputs) -> bool:
    """Return whether a snapshot with this file can be reused while the files are
    unchanged.

    It cannot if a problem may go away by itself, or if a file is not in the folders that
    are compared.
    """
    if _is_transient(candidate) or candidate.file.joined_video is not None:
        return False
    paths = [candidate.file.path]
    if candidate.file.caption_file is not None:
        paths.append(candidate.file.caption_file)
    paths += [companion.path for companion in candidate.companions.values()]
    return inputs.covers(map(str, paths))


def _is_transient(candidate: Candidate) -> bool:
    """Return whether a problem of a candidate or its companions may go away although the
    files stay the same, such as missing rights.

    The bytes of such a file could not be read. A missing file that appears changes the
    fingerprint.
    """
    problem = candidate.problem
    is_missing = problem is not None and problem.reason == "missing_file"
    if problem is not None and not candidate.content_id and not is_missing:
        return True
    return any(
        companion.problem is not None and not companion.content_id
        for companion in candidate.companions.values()
    )
