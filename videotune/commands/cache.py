"""``cache``: encode clips and captions now, so that a training starts at once; list, verify and prune what is encoded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from videotune.console import bar, echo
from videotune.data.file_checks import refuse_linked_folder
from videotune.distributed import join
from videotune.errors import VideotuneError
from videotune.job.job import CACHE_NAME, Job, open_job, refuse_skips
from videotune.job.overrides import ConfigSource, Layers, overrides, resolve_config
from videotune.latent_cache.encode import entries_of
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.maintenance import Damaged, Pruned, listing, prune, verify
from videotune.latent_cache.store import LOCK, OLD_MANIFEST, LatentCache
from videotune.trainer.build import open_models
from videotune.trainer.cache_filling import fill_distributed
from videotune.validation.callbacks import reads_of_run


@dataclass(frozen=True)
class CacheResult:
    """Where the cache is, and how many windows of the run are in it."""

    folder: Path
    windows: int


def cache(
    config: ConfigSource = None, *, allow_skips: str | None = None, **layers: Unpack[Layers]
) -> CacheResult:
    """Fill the cache with everything that a run of this config would need; several processes share the work."""
    with join() as dist:
        job = dist.main_first(
            lambda: open_job(*resolve_config(overrides(config, layers, allow_skips)))
        )
        refuse_skips(job, allow_skips)
        for note in job.notes:
            echo(f"note: {note}")
        fill_distributed(
            job, open_models(job.spec, job.base, job.config), reads_of_run(job), dist
        )
        dist.barrier()
    return CacheResult(job.cache, len(job.library.windows) + len(job.library.held_out_windows))


def cache_at(place: Path) -> Path:
    """The cache folder that ``place`` is, or that the dataset folder ``place`` holds.

    Raises VideotuneError where there is none.
    """
    if (place / CACHE_NAME).is_dir():
        return refuse_linked_folder(place / CACHE_NAME)
    if place.name == CACHE_NAME or any(
        (place / name).exists() for name in (LOCK, OLD_MANIFEST)
    ):
        return place
    if (
        place.is_file() and (place.parent / CACHE_NAME).is_dir()
    ):  # an archive's cache lies beside it
        return refuse_linked_folder(place.parent / CACHE_NAME)
    if not place.is_dir():
        raise VideotuneError(
            f"{place}: there is no such folder. Name a cache folder, or a dataset that was encoded."
        )
    fault = f"{place}: neither a cache nor a dataset that holds one ({CACHE_NAME})."
    raise VideotuneError(
        f"{fault} `videotune cache --data DIR …` makes one; if cache_dir was set, name that folder."
    )


def open_store(place: Path) -> LatentCache:
    """The cache of ``cache_at``, with what it has to note printed."""
    store = LatentCache(cache_at(place))
    print_notes(store)
    return store


def print_notes(store: LatentCache, first: int = 0) -> None:
    """Print the store's notes from number ``first`` on, each once."""
    for note in dict.fromkeys(store.notes[first:]):
        echo(f"note: {note}")


def verify_cache(place: Path) -> tuple[LatentCache, int, list[Damaged]]:
    """Read every entry again and drop those that are damaged: the cache, its entries before, and the damaged ones.

    Raises VideotuneError where ``place`` holds no cache, or another process is filling it.
    """
    store = open_store(place)
    count = len(store.entries())
    with bar("verifying") as progress:
        return store, count, verify(store, progress.update)


def prune_cache(
    config: ConfigSource = None, *, yes: bool = False, **layers: Unpack[Layers]
) -> tuple[LatentCache, Pruned]:
    """The cache, and what of it a run of this config would not read; with ``yes`` that is removed.

    Raises VideotuneError where there is no cache yet, or another process is filling it.
    """
    job: Job = open_job(*resolve_config(overrides(config, layers)))
    store = open_store(job.cache)
    if job.library.skipped:
        echo(
            f"note: {len(job.library.skipped)} clips are skipped, so what was encoded of them counts as not needed"
        )
    reads = reads_of_run(job)
    keys = CacheKeys.of(open_models(job.spec, job.base, job.config), job.config.seed)
    printed = len(store.notes)
    pruned = prune(store, entries_of(keys, reads).keys(), yes=yes)
    print_notes(store, printed)
    return store, pruned


def list_cache(place: Path) -> tuple[LatentCache, list[dict[str, Any]]]:
    """The cache and a row for each entry; VideotuneError where ``place`` holds none."""
    store = open_store(place)
    return store, listing(store)
