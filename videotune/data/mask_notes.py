"""Notes on the masks, start images and references of a dataset."""

from collections.abc import Sequence

from videotune.config.schema import Config
from videotune.data.candidates import Candidate
from videotune.data.companion_files import BESIDE
from videotune.data.companions import ALPHA, Companion
from videotune.data.remarks import Remark
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
    files = [dict(candidate.file.companions) for candidate in usable]
    unused_masks = sum("loss_mask" in roles for roles in files)
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
    for role in BESIDE:
        num_files = sum(role in roles for roles in files)
        if num_files and role not in config.condition_types:
            note = (
                f"{counted(num_files, 'clip')} with a {role} that is not used: "
                f"conditions has no {role}"
            )
            notes.append(Remark("unused_references", note))
    if "mask" in config.condition_types:
        num_masks = sum("mask" in candidate.companions for candidate in usable)
        notes.append(
            f"conditions: mask: {counted(num_masks, 'clip')} with a mask; of "
            f"{len(usable) - num_masks} a drawn box is hidden"
        )
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
    num_alpha = sum(mask.content_id.endswith(ALPHA) for mask in masks)
    sources = [f"{len(masks) - num_alpha} of files"] if num_alpha < len(masks) else []
    if num_alpha:
        sources.append(f"{num_alpha} of alpha channels")
    without_mask = len(masks_by_clip) - len(masks)
    note = f"{counted(len(masks), 'mask')} of the loss ({' and '.join(sources)})"
    if without_mask:
        note += f"; {counted(without_mask, 'clip')} without one, all of which counts 1"
    return [note]
