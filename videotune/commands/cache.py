"""``cache``: encode clips and captions now, so that a training starts at once; list, verify and prune what is encoded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from videotune.console import bar, echo, out, print_table, size
from videotune.data.file_checks import refuse_linked_folder
from videotune.errors import DONE, SKIPPED, VideotuneError
from videotune.latent_cache import maintenance as care
from videotune.latent_cache.encode import entries_of
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import EARLIER, LOCK, Store
from videotune.text import counted
from videotune.trainer.cache_filling import fill_distributed
from videotune.trainer.components import open_models
from videotune.trainer.distributed import join
from videotune.trainer.resolve_config import Overrides, resolve_config, without_captions_too
from videotune.trainer.run_spec import CACHE_NAME, Job, open_job, refuse_skips
from videotune.validation.callbacks import reads_of_run


def cache(words: Overrides, *, allow_skips: str | None = None) -> int:
    """Fill the cache with everything that a run of these words would need; several processes share it out."""
    with join() as dist:
        job = dist.main_first(lambda: _job(without_captions_too(words, allow_skips)))
        refuse_skips(job, allow_skips)
        for note in job.notes:
            echo(f"note: {note}")
        family = open_models(job.spec, job.base, job.config)
        fill_distributed(job, family, reads_of_run(job), dist)
        if dist.is_main:
            out(f"{len(job.library.windows) + len(job.library.held_out_windows)} windows are cached in {job.cache}")
        dist.barrier()
    return DONE


def _job(words: Overrides) -> Job:
    resolved, spec, base = resolve_config(words)
    with bar("reading clips") as progress:
        return open_job(resolved, spec, base, lambda done, total, path: progress.update(done, total, path))


def cache_at(place: Path) -> Path:
    """The cache folder that ``place`` is, or that the dataset folder ``place`` holds.

    Raises VideotuneError where there is none.
    """
    if (place / CACHE_NAME).is_dir():
        return refuse_linked_folder(place / CACHE_NAME)
    if place.name == CACHE_NAME or any((place / name).exists() for name in (LOCK, EARLIER)):
        return place
    if place.is_file() and (place.parent / CACHE_NAME).is_dir():  # an archive's cache lies beside it
        return refuse_linked_folder(place.parent / CACHE_NAME)
    if not place.is_dir():
        raise VideotuneError(f"{place}: there is no such folder. Name a cache folder, or a dataset that was encoded.")
    raise VideotuneError(
        f"{place}: neither a cache nor a dataset that holds one ({CACHE_NAME}). `videotune cache --data DIR …` makes one; "
        "if cache_dir was set, name that folder."
    )


def _open(place: Path) -> Store:
    store = Store(cache_at(place))
    _say_notes(store)
    return store


def _say_notes(store: Store, first: int = 0) -> None:
    for note in dict.fromkeys(store.notes[first:]):
        echo(f"note: {note}")


def verify_cache(place: Path) -> int:
    """Read every entry again; those that are damaged are dropped and listed, and the exit code is 2.

    Raises VideotuneError where ``place`` holds no cache, or another process is filling it.
    """
    store = _open(place)
    count = len(store.entries())
    with bar("verifying") as progress:
        damaged = care.verify(store, progress.update)
    for row in damaged:
        out(f"{row.file}: {row.kind} of {row.of[:80]!r} {row.why}")
    if damaged:
        out(f"{len(damaged)} of {count} entries are damaged and were dropped; the next run makes them anew")
        return SKIPPED
    out(f"all {count} entries in {store.folder} are as they were written")
    return DONE


def prune_cache(words: Overrides, *, yes: bool = False) -> int:
    """Say what of the cache a run of these words would not read; with ``yes``, remove it.

    Raises VideotuneError where there is no cache yet, or another process is filling it.
    """
    job = _job(words)
    store = _open(job.cache)
    if job.library.skipped:
        echo(f"note: {len(job.library.skipped)} clips are skipped, so what was encoded of them counts as not needed")
    reads, keys = reads_of_run(job), CacheKeys.of(open_models(job.spec, job.base, job.config), job.config.seed)
    names = entries_of(keys, reads.captions, reads.samples).keys()
    said = len(store.notes)
    pruned = care.prune(store, names, yes=yes)
    _say_notes(store, said)
    for entry in pruned.entries[:20]:
        out(f"{entry.kind} of {entry.of[:80]!r}: {size(entry.bytes)}")
    if len(pruned.entries) > 20:
        out(f"… and {len(pruned.entries) - 20} more")
    for file in pruned.files[:20]:
        out(f"{file}: no entry")
    freed = f"{len(pruned.entries)} entries of {size(pruned.entry_bytes)}"
    freed += f" and {len(pruned.files)} other files of {size(pruned.file_bytes)}" if pruned.files else ""
    if yes:
        out(f"removed {freed}; {pruned.kept} entries stay in {store.folder}")
    elif pruned.entries or pruned.files:
        out(f"would remove {freed}; {pruned.kept} entries would stay. --yes does it")
    else:
        out(f"nothing to remove: all {pruned.kept} entries in {store.folder} are needed")
    return DONE


def list_cache(place: Path, *, as_json: bool = False, every: bool = False) -> int:
    """What a cache holds: a line for each encoder's entries, with ``every`` a row for each entry.

    Raises VideotuneError where ``place`` holds no cache.
    """
    store = _open(place)
    rows = care.listing(store)
    if as_json:
        print(json.dumps({"folder": str(store.folder), "entries": [row.to_json() for row in rows]}, indent=2))
        return DONE
    if not every:
        for line in by_encoder(rows):
            out(line)
        out(f"{len(rows)} entries, {size(sum(row.bytes for row in rows))} in {store.folder} (--all lists them)")
        return DONE
    cells = [
        [
            row.kind,
            row.of[:60],
            row.clip and Path(row.clip).name,
            ", ".join(f"{name} {what}" for name, what in row.tensors.items()),
            size(row.bytes),
            row.encoder and row.encoder[:8],
            row.made,
            row.key[:8],
        ]
        for row in rows
    ]
    print_table(
        str(store.folder), ["kind", "of", "clip", "holds", "bytes", "encoder", "made", "key"], cells, right=(4,)
    )
    out(f"{len(rows)} entries, {size(sum(row.bytes for row in rows))}")
    return DONE


def by_encoder(rows: Sequence[care.Row]) -> list[str]:
    """A line for what each encoder made: how much of what, its size, and when the last of it was made."""
    groups: dict[tuple[str, str], list[care.Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.encoder or ""), []).append(row)
    lines = []
    for (kind, encoder), own in groups.items():
        clips = len({row.clip for row in own})
        what = f"{counted(len(own), 'caption')}"
        if kind == "latents":
            what = f"{counted(len(own), 'window')} of {counted(clips, 'clip')}"
        made = max((row.made for row in own if row.made), default="")[:16].replace("T", " ")
        parts = [what, size(sum(row.bytes for row in own)), made]
        by = f"{'VAE' if kind == 'latents' else 'text encoder'} {encoder[:8]}"
        lines.append(f"{by}: {', '.join(part for part in parts if part)}")
    return lines
