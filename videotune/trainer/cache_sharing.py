"""Processes that fill one cache folder together: which they are, and what they found."""

import uuid
from collections.abc import Sequence
from pathlib import Path

from videotune.distributed import DistributedContext
from videotune.errors import VideotuneError
from videotune.latent_cache.store import LatentCache


def processes_sharing(folder: Path, dist: DistributedContext) -> list[int]:
    """Return the ranks of the processes that see the same folder as this one, itself
    included.

    Each process leaves a file in the folder and looks for those of the others.

    Raises:
        VideotuneError: if the folder cannot be written, or if not all of them see each
            other's files.
    """
    run_id = dist.broadcast(uuid.uuid4().hex)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own_sign = folder / f".here-{run_id}-{dist.rank}"
        own_sign.touch()
        dist.barrier()
        signs = folder.glob(f".here-{run_id}-*")
        visible = sorted(int(sign.name.rpartition("-")[2]) for sign in signs)
        dist.barrier()
        own_sign.unlink()
    except OSError as error:
        raise VideotuneError(
            f"the cache {folder} cannot be written: {error}. Set cache_dir to another folder."
        ) from error

    visible_to = dist.all_gather(visible)
    if any(visible_to[rank] != visible for rank in visible):
        raise VideotuneError(
            f"the cache {folder}: only some processes see the files that others write there. "
            "Set cache_dir to a folder that all machines share, or to one that each machine has for itself"
        )
    return visible


def add_findings(
    store: LatentCache,
    share_store: LatentCache,
    members: Sequence[int],
    dist: DistributedContext,
) -> None:
    """Add to a cache what the processes that filled it found, so that its notes say it.

    Args:
        store: the cache, opened after all shares were encoded.
        share_store: the same cache, through which this process encoded its share.
        members: ranks of the processes that see its folder.
        dist: this process among those of the run.
    """
    findings = dist.all_gather((share_store.notes, share_store.masks_without_effect))
    for rank in members:
        notes, masks_without_effect = findings[rank]
        # What is wrong with the folder was found by each of them.
        store.notes += [note for note in notes if note not in store.notes]
        store.masks_without_effect += masks_without_effect
