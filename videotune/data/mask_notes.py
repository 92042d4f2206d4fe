"""Notes on the masks, start images and references of a dataset."""

from collections.abc import Sequence
from pathlib import Path

from videotune.config.schema import Config
from videotune.data.candidates import Candidate
from videotune.data.clip_file import ClipFile, Role
from videotune.data.companion_files import FOLDER_OF_ROLE
from videotune.data.companions import Companion, column_of, is_missing
from videotune.data.remarks import Remark, RemarkCode
from videotune.errors import VideotuneError
from videotune.text import counted


def notes_on_masks(
    candidates: Sequence[Candidate], usable: Sequence[Candidate], config: Config
) -> list[str]:
    """Return notes on which clips have masks, start images and references.

    Args:
        candidates: all files.
        usable: those that become clips.
        config: the run's config.

    Raises:
        VideotuneError: if the config uses masks and no clip has one.
    """
    loss_masks = [candidate.companions.get("loss_mask") for candidate in usable]
    files = [candidate.file for candidate in usable]
    unused_masks = len(_existing(files, "loss_mask"))
    any_bad = any(
        candidate.problem is not None and candidate.problem.reason == "bad_mask"
        for candidate in candidates
    )
    notes = _loss_mask_notes(loss_masks, unused_masks, config, any_bad=any_bad)

    num_start_images = sum("start_image" in item.companions for item in usable)
    if num_start_images:
        notes.append(
            f"{counted(num_start_images, 'image')} of images/ with the name of a video in videos/: "
            "used as that video's start image, not as a clip"
        )
    for role in FOLDER_OF_ROLE:
        if role in config.condition_types:
            continue
        num_files = len(_existing(files, role))
        if num_files:
            note = (
                f"{counted(num_files, 'clip')} with a {role} that is not used: "
                f"conditions has no {role}"
            )
            notes.append(Remark("unused_references", note))
        notes += _unread_column_notes(files, role, "unused_references")
    if not config.loss_mask.is_used and "mask" not in config.condition_types:
        notes += _unread_column_notes(files, "loss_mask", "unused_masks")
    if "mask" in config.condition_types:
        num_masks = sum("mask" in candidate.companions for candidate in usable)
        notes.append(
            f"conditions: mask: {counted(num_masks, 'clip')} with a mask; of "
            f"{len(usable) - num_masks} a drawn box is hidden"
        )
    return notes


def _existing(files: Sequence[ClipFile], role: Role) -> list[Path]:
    """Return the clips' companions in a role that are on the disk."""
    paths = []
    for file in files:
        path = dict(file.companions).get(role)
        if path is not None and not is_missing(file, path):
            paths.append(path)
    return paths


def _unread_column_notes(
    files: Sequence[ClipFile], role: Role, code: RemarkCode
) -> list[str]:
    """Return a note for each column of metadata that has the name of a role the config
    does not use, and values that are no files: it may mean something else.
    """
    values_by_column: dict[str, list[str]] = {}
    for file in files:
        path = dict(file.companions).get(role)
        if path is None or file.metadata_row is None or not is_missing(file, path):
            continue
        metadata_file = file.metadata_row.rpartition(":")[0]
        column = f"the column {column_of(file, role)} of {metadata_file}"
        values_by_column.setdefault(column, []).append(path.name)

    notes: list[str] = []
    for column, values in values_by_column.items():
        examples = ", ".join(dict.fromkeys(values[:3]))
        note = (
            f"{column} is not used: it names no file for {counted(len(values), 'clip')} ({examples}). "
            "Rename the column if it is not the clip's file"
        )
        notes.append(Remark(code, note))
    return notes


def _loss_mask_notes(
    masks_by_clip: Sequence[Companion | None],
    unused_masks: int,
    config: Config,
    *,
    any_bad: bool,
) -> list[str]:
    """Return a note on how many clips have a mask.

    Args:
        masks_by_clip: the mask of each clip that is used.
        unused_masks: clips with a mask file, if the config does not use masks.
        config: the run's config.
        any_bad: a clip is skipped because its mask cannot be used.

    Raises:
        VideotuneError: if the config uses masks and no clip has one.
    """
    if not config.loss_mask.is_used:
        if not unused_masks or "mask" in config.condition_types:
            return []
        note = (
            f"{counted(unused_masks, 'clip')} with a mask that is not used: with "
            "--set loss_mask.outside=0 the loss counts only where the mask is white"
        )
        return [Remark("unused_masks", note)]

    masks = [mask for mask in masks_by_clip if mask is not None]
    if not masks and any_bad:
        return []
    if not masks:
        raise VideotuneError(
            "loss_mask.outside: no clip has a mask. Put masks with the names of the clips into "
            "masks/ beside videos/, name them in the column mask of a metadata file, set their folder "
            "(datasets.loss_masks), or leave it out."
        )
    num_alpha = sum(mask.is_alpha for mask in masks)
    sources = [f"{len(masks) - num_alpha} of files"] if num_alpha < len(masks) else []
    if num_alpha:
        sources.append(f"{num_alpha} of alpha channels")
    without_mask = len(masks_by_clip) - len(masks)
    note = f"{counted(len(masks), 'mask')} of the loss ({' and '.join(sources)})"
    if without_mask:
        note += f"; {counted(without_mask, 'clip')} without one, all of which counts 1"
    return [note]
