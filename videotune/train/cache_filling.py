"""What several processes of a run share out: the network's weights (``sharding`` FULL), and what has to be encoded."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from videotune.cache.encode import dealt
from videotune.cache.shards import KINDS
from videotune.cache.store import Store
from videotune.config.schema import Config
from videotune.console import clock, echo
from videotune.errors import VideotuneError
from videotune.train.components import Tell, fill_cache, lacks
from videotune.train.distributed import DistributedContext
from videotune.train.run_spec import Job
from videotune.types import Family


def sharded(config: Config, dist: DistributedContext) -> bool:
    """Whether no process has the whole network: then all run it in step, also for readings and previews."""
    return config.sharding == "FULL" and dist.size > 1


def fill_distributed(
    job: Job,
    family: Family,
    extra: Sequence[str],
    dist: DistributedContext,
    keep_bytes: int = 0,
    tell: Tell | None = None,
) -> Store:
    """The cache, with all that the run reads from it; what it lacks, the processes that see the same folder share out.

    One of them holds the folder's lock, so that no other run writes there, and packs what the others have written. Machines
    that have caches of their own each fill theirs. ``tell`` as in ``fill_once``.
    """
    store, fill = Store(job.cache, keep_bytes), partial(fill_cache, job, family, tell=tell)
    if dist.size == 1:
        fill(store, extra)
        return store
    todo = lacks(job, family, store, extra)
    if not dist.all_agree(bool(todo))[0]:
        if dist.is_main:
            fill(store, extra)  # it says what there is to say
        return store
    begun, members = time.monotonic(), neighbours(job.cache, dist)
    own = dealt(todo, members.index(dist.rank), len(members))
    if dist.rank == members[0]:
        with store.filling():
            dist.barrier()
            fill(store, extra, own)
            dist.barrier()
        store = Store(job.cache, keep_bytes)
        with store.filling():
            for kind in KINDS:
                store.pack(kind)
        told = f"{len(todo.captions)} captions and {len(todo.takes)} windows into {job.cache}"
        echo(f"encoded {told} by {len(members)} processes in {clock(time.monotonic() - begun)}")
        fill(store, extra)
        dist.barrier()
        return store
    dist.barrier()
    fill(store, extra, own)
    dist.barrier()
    dist.barrier()
    return Store(job.cache, keep_bytes)


def neighbours(folder: Path, dist: DistributedContext) -> list[int]:
    """The processes that see the same folder as this one, itself among them: those whose sign is there."""
    word = dist.broadcast(uuid.uuid4().hex)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sign = folder / f".here-{word}-{dist.rank}"
        sign.touch()
        dist.barrier()
        seen = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(f".here-{word}-*"))
        dist.barrier()
        sign.unlink()
    except OSError as error:
        raise VideotuneError(f"the cache {folder} cannot be written: {error}. Set cache_dir elsewhere.") from error
    everyone = dist.all_gather(seen)
    if any(everyone[other] != seen for other in seen):
        raise VideotuneError(
            f"some processes see files of others in {folder}, and these do not see theirs: the folder is shared by halves. "
            "Set cache_dir to a folder that all machines share, or that each has for itself"
        )
    return seen
