"""``cache``: encode clips and captions in advance; list, verify and prune what is
encoded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.commands.cache_folder import cache_address, cache_at
from videotune.console import bar, echo
from videotune.data.object_store import is_object_url
from videotune.distributed import join
from videotune.errors import VideotuneError
from videotune.job.job import Job, object_cache, open_job
from videotune.job.overrides import ConfigSource, resolve_config, to_overrides
from videotune.job.skips import refuse_skips
from videotune.latent_cache.cache_items import items_by_entry
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.maintenance import Damaged, Pruned, listing, prune, verify
from videotune.latent_cache.remote_entries import entries_of
from videotune.latent_cache.store import LatentCache
from videotune.reporter.contact_sheet import cache_pictures
from videotune.text import counted_are
from videotune.trainer.build import open_models
from videotune.trainer.cache_filling import fill_cache_of_run
from videotune.validation.callbacks import cache_items_of


@dataclass(frozen=True)
class CacheResult:
    """A filled cache."""

    folder: Path
    windows: int
    """Windows of the run in it."""


def cache(
    config: ConfigSource = None, *, allow_skips: str | None = None, **overrides: Any
) -> CacheResult:
    """Fill the cache with everything that a run of this config would need; several
    processes share the work.
    """
    with join() as dist:
        all_overrides = to_overrides(config, overrides, allow_skips)
        job = dist.main_first(lambda: open_job(*resolve_config(all_overrides)))
        refuse_skips(job, allow_skips)
        for note in job.notes:
            echo(f"note: {note}")

        family = open_models(job.spec, job.base, job.config)
        fill_cache_of_run(job, family, cache_items_of(job), dist)
        if is_object_url(job.config.cache_dir or "") and dist.is_main:
            # The machine that trains need not open a clip for them.
            cache_pictures(job)
        dist.barrier()
    return CacheResult(
        job.cache, len(job.library.windows) + len(job.library.held_out_windows)
    )


def open_store(path: Path) -> LatentCache:
    """Open the cache that a path or an address of an object store names, and print its
    notes.

    Raises VideotuneError if there is none.
    """
    address = cache_address(path)
    if address is None:
        store = LatentCache(cache_at(path))
    else:
        folder = object_cache(address)
        store = LatentCache(folder, remote=entries_of(address, folder))
        if not store.remote.sizes():
            raise VideotuneError(
                f"{address}: there is no entry of a cache. Name the address that cache_dir had."
            )
    print_notes(store)
    return store


def _store_of(job: Job) -> LatentCache:
    """Open the cache of a job with what an object store has of it, and print its notes."""
    remote = entries_of(job.config.cache_dir, job.cache)
    folder = job.cache if remote.sizes() else cache_at(job.cache)
    store = LatentCache(folder, remote=remote)
    print_notes(store)
    return store


def print_notes(store: LatentCache, first: int = 0) -> None:
    """Print the cache's notes from number ``first`` on, each once."""
    for note in dict.fromkeys(store.notes[first:]):
        echo(f"note: {note}")


def verify_cache(path: Path) -> tuple[LatentCache, int, list[Damaged]]:
    """Read every entry again and drop those that are damaged.

    Returns:
        The cache, how many entries it had, and the damaged ones.

    Raises:
        VideotuneError: if ``path`` has no cache, or another process is filling it.
    """
    store = open_store(path)
    names = {entry.name for entry in store.entries()} | store.remote.sizes().keys()
    with bar("verifying") as progress:
        return store, len(names), verify(store, progress.update)


def prune_cache(
    config: ConfigSource = None, *, yes: bool = False, **overrides: Any
) -> tuple[LatentCache, Pruned]:
    """Return the cache, and what of it a run of this config would not read; with
    ``yes`` that is removed.

    Raises VideotuneError if there is no cache yet, or another process is filling it.
    """
    job: Job = open_job(*resolve_config(to_overrides(config, overrides)))
    store = _store_of(job)
    if job.library.skipped:
        echo(
            f"note: {counted_are(len(job.library.skipped), 'clip')} skipped, whose entries "
            "count as not needed"
        )

    family = open_models(job.spec, job.base, job.config)
    keys = CacheKeys.of(family, job.config.seed)
    wanted = items_by_entry(keys, cache_items_of(job)).keys()
    notes_before = len(store.notes)
    pruned = prune(store, wanted, yes=yes)
    print_notes(store, notes_before)
    return store, pruned


def list_cache(path: Path) -> tuple[LatentCache, list[dict[str, Any]]]:
    """Return the cache and a row for each entry.

    Raises VideotuneError if ``path`` has no cache.
    """
    store = open_store(path)
    notes_before = len(store.notes)
    with bar("reading the headers of entries") as progress:
        rows = listing(store, progress.update)
    print_notes(store, notes_before)
    return store, rows
