"""Notes on the masks, start images and references of a dataset."""

from videotune.config.schema import Config
from videotune.data.candidates import Candidate
from videotune.data.clip_file import ClipFile, Role
from videotune.data.companion_files import FOLDER_OF_ROLE
from videotune.data.companions import column_of, is_missing
from videotune.data.file_checks import ClipProblem
from videotune.data.remarks import Remark, RemarkCode
from videotune.errors import VideotuneError
from videotune.text import counted


class MaskNotes:
    """Collects notes on which clips have masks, start images and references, one file
    after the other.

    Args:
        config: the run's config.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loss_masks = _LossMasks(config)
        self._start_images = 0
        self._condition_masks = 0
        self._clips = 0
        conditions = config.condition_types
        self._unused = {role: 0 for role in FOLDER_OF_ROLE if role not in conditions}
        """Clips with a file in a role that the config does not use."""
        self._unread_columns: dict[Role, dict[str, _UnreadColumn]] = {}
        """Columns of metadata with the name of such a role whose values are no files."""

    def add(self, candidate: Candidate) -> None:
        """Add a file, whether it becomes a clip or not."""
        if candidate.problem is not None:
            self._loss_masks.add_problem(candidate.problem)
            return
        self._clips += 1
        self._loss_masks.add(candidate)
        self._start_images += "start_image" in candidate.companions
        self._condition_masks += "mask" in candidate.companions
        for role in self._unused:
            self._unused[role] += _has_file(candidate.file, role)
            self._add_unread_column(candidate.file, role)
        if not self._config.loss_mask.is_used:
            self._add_unread_column(candidate.file, "loss_mask")

    def notes(self) -> list[str]:
        """Return the notes.

        Raises:
            VideotuneError: if the config uses masks and no clip has one.
        """
        conditions = self._config.condition_types
        notes = self._loss_masks.notes()
        if self._start_images:
            notes.append(
                f"{counted(self._start_images, 'image')} of images/ with the name of a video in videos/: "
                "used as that video's start image, not as a clip"
            )

        for role, clips in self._unused.items():
            if clips:
                note = (
                    f"{counted(clips, 'clip')} with a {role} that is not used: "
                    f"conditions has no {role}"
                )
                notes.append(Remark("unused_references", note))
            notes += self._unread_column_notes(role, "unused_references")
        if not self._config.loss_mask.is_used and "mask" not in conditions:
            notes += self._unread_column_notes("loss_mask", "unused_masks")
        if "mask" in conditions:
            notes.append(
                f"conditions: mask: {counted(self._condition_masks, 'clip')} with a mask; of "
                f"{self._clips - self._condition_masks} a drawn box is hidden"
            )
        return notes

    def _add_unread_column(self, file: ClipFile, role: Role) -> None:
        """Count a value of a column that names no file."""
        path = dict(file.companions).get(role)
        if path is None or file.metadata_row is None or not is_missing(file, path):
            return
        metadata_file = file.metadata_row.rpartition(":")[0]
        name = f"the column {column_of(file, role)} of {metadata_file}"
        columns = self._unread_columns.setdefault(role, {})
        columns.setdefault(name, _UnreadColumn()).add(path.name)

    def _unread_column_notes(self, role: Role, code: RemarkCode) -> list[str]:
        """Return a note for each column of metadata that has the name of a role the config
        does not use, and values that are no files: it may mean something else.
        """
        notes: list[str] = []
        for name, column in self._unread_columns.get(role, {}).items():
            examples = ", ".join(dict.fromkeys(column.first_values))
            note = (
                f"{name} is not used: it names no file for {counted(column.clips, 'clip')} ({examples}). "
                "Rename the column if it is not the clip's file"
            )
            notes.append(Remark(code, note))
        return notes


class _UnreadColumn:
    """A column of metadata whose values are no files."""

    def __init__(self) -> None:
        self.clips = 0
        self.first_values: list[str] = []
        """The values of the first three clips."""

    def add(self, value: str) -> None:
        """Add the value of a clip."""
        self.clips += 1
        if len(self.first_values) < 3:
            self.first_values.append(value)


class _LossMasks:
    """Masks of the loss."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clips = 0
        self._masks = 0
        self._alpha_masks = 0
        self._unused_masks = 0
        """Clips with a mask file, which count if the config does not use masks."""
        self._any_bad = False
        """Whether a clip is skipped because its mask cannot be used."""

    def add_problem(self, problem: ClipProblem) -> None:
        """Add the problem of a clip that is skipped."""
        self._any_bad = self._any_bad or problem.reason == "bad_mask"

    def add(self, candidate: Candidate) -> None:
        """Add a usable clip."""
        self._clips += 1
        self._unused_masks += _has_file(candidate.file, "loss_mask")
        mask = candidate.companions.get("loss_mask")
        if mask is not None:
            self._masks += 1
            self._alpha_masks += mask.is_alpha

    def notes(self) -> list[str]:
        """Return a note on how many clips have a mask.

        Raises:
            VideotuneError: if the config uses masks and no clip has one.
        """
        if not self._config.loss_mask.is_used:
            return self._unused_notes()
        if not self._masks and self._any_bad:
            return []
        if not self._masks:
            raise VideotuneError(
                "loss_mask.outside: no clip has a mask. Put masks with the names of the clips into "
                "masks/ beside videos/, name them in the column mask of a metadata file, set their folder "
                "(datasets.loss_masks), or leave it out."
            )

        sources = []
        if self._alpha_masks < self._masks:
            sources.append(f"{self._masks - self._alpha_masks} of files")
        if self._alpha_masks:
            sources.append(f"{self._alpha_masks} of alpha channels")
        without_mask = self._clips - self._masks
        note = f"{counted(self._masks, 'mask')} of the loss ({' and '.join(sources)})"
        if without_mask:
            note += (
                f"; {counted(without_mask, 'clip')} without one, all of which counts 1"
            )
        return [note]

    def _unused_notes(self) -> list[str]:
        """Return a note on masks that the config does not use."""
        if not self._unused_masks or "mask" in self._config.condition_types:
            return []
        note = (
            f"{counted(self._unused_masks, 'clip')} with a mask that is not used: with "
            "--set loss_mask.outside=0 the loss counts only where the mask is white"
        )
        return [Remark("unused_masks", note)]


def _has_file(file: ClipFile, role: Role) -> bool:
    """Return whether a clip has a companion in a role that is on the disk."""
    path = dict(file.companions).get(role)
    return path is not None and not is_missing(file, path)
