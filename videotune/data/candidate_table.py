"""The candidates of a scan as columns and rows of files, so that a million of them take
some hundred bytes each.

A candidate is put together when it is asked for: its file, the result of examining it,
what was prepared of it, and what follows from all clips together.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from videotune.config.data_schema import Dataset, VideoConfig
from videotune.data.candidates import Candidate
from videotune.data.clip_file import ClipFile, Role
from videotune.data.clip_sizes import Size, SizeChoices
from videotune.data.companions import Companion
from videotune.data.file_checks import ClipProblem
from videotune.data.index_rows import Examined
from videotune.data.locations import Location
from videotune.data.packed_rows import SpilledRows
from videotune.data.packed_texts import PackedTexts
from videotune.data.window_placement import WindowPlacement
from videotune.types import Window

NOT_EXAMINED = Examined("")
"""Result of a file that cannot be examined."""


class DatasetSettings(NamedTuple):
    """What the candidates of one dataset share."""

    dataset: Dataset
    location: Location
    size_choices: SizeChoices
    video: VideoConfig


class Preparation(NamedTuple):
    """What ``prepare_candidates`` sets of a candidate."""

    problem: ClipProblem | None
    companions: dict[Role, Companion]
    captions: tuple[str, ...]
    caption_texts: tuple[str, ...]
    size: Size
    placement: PackedPlacement

    @property
    def has_windows(self) -> bool:
        """Whether at least one window was placed."""
        return bool(self.placement.windows)

    @classmethod
    def of(cls, candidate: Candidate) -> Preparation:
        """Return what was set of a candidate."""
        return cls(
            problem=candidate.problem,
            companions=candidate.companions,
            captions=candidate.captions,
            caption_texts=candidate.caption_texts,
            size=candidate.size,
            placement=pack_placement(candidate.placement),
        )

    def apply(self, candidate: Candidate) -> None:
        """Set the same of another candidate."""
        candidate.problem = self.problem
        candidate.companions = self.companions
        candidate.captions = self.captions
        candidate.caption_texts = self.caption_texts
        candidate.size = self.size
        candidate.placement = unpack_placement(self.placement)


class PackedPlacement(NamedTuple):
    """A ``WindowPlacement`` with what its windows share in one place."""

    kinds: list[Window]
    """Windows without times, each the first of its kind."""
    windows: list[tuple[int, float, float]]
    """Number of the kind, start and end of each window."""
    placement: WindowPlacement
    """The placement without windows."""


def pack_placement(placement: WindowPlacement) -> PackedPlacement:
    """Return a placement in few bytes."""
    numbers: dict[Window, int] = {}
    windows = []
    for window in placement.windows:
        kind = _moved(window, 0.0, 0.0)
        number = numbers.setdefault(kind, len(numbers))
        windows.append((number, window.start, window.end))
    return PackedPlacement(list(numbers), windows, replace(placement, windows=()))


def unpack_placement(packed: PackedPlacement) -> WindowPlacement:
    """Return what ``pack_placement`` packed."""
    if not packed.windows:
        return packed.placement
    windows = [
        _moved(packed.kinds[number], start, end)
        for number, start, end in packed.windows
    ]
    return replace(packed.placement, windows=tuple(windows))


def _moved(window: Window, start: float, end: float) -> Window:
    """Return a window at another time; ``replace`` takes thrice as long."""
    return Window(
        window.clip_id,
        start,
        end,
        window.shape,
        window.sampling,
        window.swaps,
        window.resize,
        window.flip,
        window.companions,
    )


@dataclass
class JointResults:
    """What follows for each candidate from all clips together, by row."""

    sources: Sequence[str]
    """Source video of each usable candidate."""
    held_out: NDArray[np.bool_]
    """Of each usable candidate."""
    looks_like: dict[int, int]
    """Row of a clip that looks nearly the same."""
    finish: Callable[[Candidate], None]
    """Sets what depends on the others, such as the windows of a held-out clip."""


class CandidateTable(Sequence[Candidate]):
    """Candidates, ordered by dataset, then by path.

    A candidate that is read is a new object. What is set of it is lost, unless
    ``put_prepared`` keeps it.
    """

    def __init__(self) -> None:
        self._settings: list[DatasetSettings] = []
        self._dataset = array("i")
        self._files: SpilledRows[ClipFile] = SpilledRows()
        self._relative_paths = PackedTexts()
        self._ids_of_frame_folders: dict[int, str] = {}
        """Content ids, by row, of the folders of frames that are one clip."""
        self._problems: dict[int, ClipProblem] = {}
        """Problems of files that were known before any was examined."""

        self._examined: Sequence[Examined] = ()
        self._examined_position = array("i")
        """Position of each candidate's result; -1: it was not examined."""
        self._companions: Callable[[ClipFile], dict[Role, Companion]] | None = None
        self.content_ids = PackedTexts()
        """Content id of each candidate; "" if its bytes cannot be read."""
        self.seconds = array("d")
        """Duration of each candidate; 0 if it is unknown."""

        self._prepared: SpilledRows[Preparation | None] = SpilledRows()
        self._is_usable = bytearray()
        self._joint_results: JointResults | None = None
        self._usable_position: NDArray[np.int32] = np.zeros(0, np.int32)

    # -- listing -----------------------------------------------------------------------

    def add_dataset(self, settings: DatasetSettings) -> None:
        """Begin a dataset: the files that are added now are its."""
        self._settings.append(settings)

    def add(self, file: ClipFile, problem: ClipProblem | None = None) -> None:
        """Add a file of the last dataset, perhaps with a problem."""
        if problem is not None:
            self._problems[len(self._files)] = problem
        if file.content_id:
            self._ids_of_frame_folders[len(self._files)] = file.content_id
        root = self._settings[-1].location.root
        self._relative_paths.append(file.path.relative_to(root).as_posix())
        self._files.append(file)
        self._dataset.append(len(self._settings) - 1)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def datasets(self) -> NDArray[np.int32]:
        """Number of each candidate's dataset (N,)."""
        return np.frombuffer(self._dataset, np.int32)

    def settings_of(self, row: int) -> DatasetSettings:
        """Return what a candidate shares with its dataset."""
        return self._settings[self._dataset[row]]

    def file(self, row: int) -> ClipFile:
        """Return the file of a candidate."""
        return self._files[row]

    def relative_path(self, row: int) -> str:
        """Return the path of a candidate's file in its dataset."""
        return self._relative_paths[row]

    def files_to_examine(self) -> Iterator[tuple[int, ClipFile]]:
        """Yield the files without a problem, each with its row."""
        for row, file in enumerate(self._files):
            if row not in self._problems:
                yield row, file

    # -- what was read -----------------------------------------------------------------

    def set_examined(
        self,
        results: Sequence[Examined],
        companions: Callable[[ClipFile], dict[Role, Companion]],
    ) -> None:
        """Set the results of examining the files.

        Args:
            results: one for each of ``files_to_examine``; more may follow.
            companions: returns the companions of a clip, which were read.
        """
        self._examined = results
        self._companions = companions
        position = 0
        for row in range(len(self)):
            if row in self._problems:
                self._examined_position.append(-1)
            else:
                self._examined_position.append(position)
                position += 1

            result = self.examined(row)
            self.content_ids.append(self._ids_of_frame_folders.get(row, result.id))
            seconds = 0.0 if result.info is None else result.info.seconds
            self.seconds.append(seconds)

    def examined(self, row: int) -> Examined:
        """Return the result of examining a candidate's file."""
        position = self._examined_position[row]
        return self._examined[position] if position >= 0 else NOT_EXAMINED

    # -- what was prepared -------------------------------------------------------------

    def put_prepared(self, row: int, candidate: Candidate) -> None:
        """Keep what was set of a candidate.

        Args:
            row: its row; the rows may come in any order.
            candidate: as it was read, and then prepared.
        """
        while len(self._prepared) <= row:
            self._prepared.append(None)
            self._is_usable.append(False)
        self._prepared[row] = Preparation.of(candidate)
        self._is_usable[row] = candidate.problem is None

    def prepared_unusable(self) -> Iterator[tuple[int, Preparation]]:
        """Yield what was prepared of each candidate that has a problem, with its row."""
        flags = np.frombuffer(self._is_usable, np.bool_)
        for row in np.flatnonzero(~flags).tolist():
            preparation = self._prepared[row]
            assert preparation is not None
            yield row, preparation

    @property
    def usable(self) -> NDArray[np.int32]:
        """Rows of the candidates without a problem, once all are prepared."""
        flags = np.frombuffer(self._is_usable, np.bool_)
        return np.flatnonzero(flags).astype(np.int32)

    def is_usable(self, row: int) -> bool:
        """Return whether a prepared candidate has no problem."""
        return bool(self._is_usable[row])

    def set_joint_results(self, joint_results: JointResults) -> None:
        """Set what follows from all clips together."""
        usable = self.usable
        self._usable_position = np.full(len(self), -1, np.int32)
        self._usable_position[usable] = np.arange(len(usable), dtype=np.int32)
        self._joint_results = joint_results

    # -- reading -----------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        row = range(len(self))[index]
        # What its file gave, then its preparation, then the comparison of all clips.
        candidate = Candidate(self._files[row], *self.settings_of(row))
        candidate.problem = self._problems.get(row)
        self._apply_examined(row, candidate)
        prepared = self._prepared[row] if row < len(self._prepared) else None
        if prepared is not None:
            prepared.apply(candidate)
        if self._joint_results is not None:
            self._apply_joint_results(row, candidate, self._joint_results)
        return candidate

    def __iter__(self) -> Iterator[Candidate]:
        for row in range(len(self)):
            yield self[row]

    def _apply_examined(self, row: int, candidate: Candidate) -> None:
        """Set the result of examining a candidate's file, and its companions."""
        if self._companions is None:
            return
        candidate.companions = self._companions(candidate.file)
        if self._examined_position[row] < 0:
            return
        result = self.examined(row)
        candidate.content_id = candidate.file.content_id or result.id
        candidate.info = result.info
        candidate.scan = result.scan
        candidate.sound = result.sound
        candidate.problem = result.problem

    def _apply_joint_results(
        self, row: int, candidate: Candidate, joint_results: JointResults
    ) -> None:
        """Set what follows from all clips together."""
        similar_row = joint_results.looks_like.get(row)
        if similar_row is not None:
            candidate.looks_like = self.relative_path(similar_row)
        if candidate.problem is not None:
            return
        position = self._usable_position[row]
        candidate.source = joint_results.sources[position]
        candidate.held_out = bool(joint_results.held_out[position])
        joint_results.finish(candidate)
