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
from videotune.errors import VideotuneError
from videotune.run.console import clock, say
from videotune.run.job import Job
from videotune.run.models import Tell, fill_cache, lacks
from videotune.train.crew import Crew
from videotune.types import Family


def sharded(config: Config, crew: Crew) -> bool:
    """Whether no process has the whole network: then all run it in step, also for readings and previews."""
    return config.sharding == "FULL" and crew.size > 1


def fill_together(
    job: Job, family: Family, extra: Sequence[str], crew: Crew, keep_bytes: int = 0, tell: Tell | None = None
) -> Store:
    """The cache, with all that the run reads from it; what it lacks, the processes that see the same folder share out.

    One of them holds the folder's lock, so that no other run writes there, and packs what the others have written. Machines
    that have caches of their own each fill theirs. ``tell`` as in ``fill_once``.
    """
    store, fill = Store(job.cache, keep_bytes), partial(fill_cache, job, family, tell=tell)
    if crew.size == 1:
        fill(store, extra)
        return store
    todo = lacks(job, family, store, extra)
    if not crew.agree(bool(todo))[0]:
        if crew.first:
            fill(store, extra)  # it says what there is to say
        return store
    begun, members = time.monotonic(), neighbours(job.cache, crew)
    own = dealt(todo, members.index(crew.rank), len(members))
    if crew.rank == members[0]:
        with store.filling():
            crew.wait()
            fill(store, extra, own)
            crew.wait()
        store = Store(job.cache, keep_bytes)
        with store.filling():
            for kind in KINDS:
                store.pack(kind)
        told = f"{len(todo.captions)} captions and {len(todo.takes)} windows into {job.cache}"
        say(f"encoded {told} by {len(members)} processes in {clock(time.monotonic() - begun)}")
        fill(store, extra)
        crew.wait()
        return store
    crew.wait()
    fill(store, extra, own)
    crew.wait()
    crew.wait()
    return Store(job.cache, keep_bytes)


def neighbours(folder: Path, crew: Crew) -> list[int]:
    """The processes that see the same folder as this one, itself among them: those whose sign is there."""
    word = crew.told(uuid.uuid4().hex)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sign = folder / f".here-{word}-{crew.rank}"
        sign.touch()
        crew.wait()
        seen = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(f".here-{word}-*"))
        crew.wait()
        sign.unlink()
    except OSError as error:
        raise VideotuneError(f"the cache {folder} cannot be written: {error}. Set cache_dir elsewhere.") from error
    everyone = crew.gather(seen)
    if any(everyone[other] != seen for other in seen):
        raise VideotuneError(
            f"some processes see files of others in {folder}, and these do not see theirs: the folder is shared by halves. "
            "Set cache_dir to a folder that all machines share, or that each has for itself"
        )
    return seen
