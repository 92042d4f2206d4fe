"""Filling the cache with what a run reads; several processes share the work out."""

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from videotune.console import bar, clock, echo
from videotune.data.workers import Workers
from videotune.distributed import DistributedContext
from videotune.errors import DoesNotFit, VideotuneError
from videotune.job.job import Job
from videotune.latent_cache.encode import (
    CacheItems,
    cut_captions,
    fill,
    fits_of,
    missing,
    shard_work,
)
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import LatentCache
from videotune.memory.out_of_memory import is_out_of_memory
from videotune.models.base import DiffusersModel
from videotune.trainer.text_encoders import live_text
from videotune.types import DETERMINISTIC_VARIANT, Window

ProgressFn = Callable[[str, int, int], None]
"""Called with what is encoded, how many are done, and how many there are."""


def reads_of(
    job: Job, prompts: Sequence[str] = (), windows: Sequence[Window] = ()
) -> CacheItems:
    """What a run reads from the cache: its training windows and captions, and what its callbacks ask for beside them.

    A training window that varies has as many variants as ``variants`` says (none for 0: then each sample is encoded anew);
    ``windows`` are read with nothing drawn. Where text is encoded in the step no caption is read.
    """
    variants = job.config.video_config.variants
    samples = []
    for window in job.library.windows:
        varies = window.varies or job.spec.image_noise
        samples += [(window, variant) for variant in (range(variants) if varies else (0,))]
    samples += [(window, DETERMINISTIC_VARIANT) for window in windows]
    return CacheItems(() if job.config.text_in_step else texts_of(job, prompts), tuple(samples))


def texts_of(job: Job, prompts: Sequence[str]) -> tuple[str, ...]:
    """Every text that the text encoder reads in a run."""
    return tuple(
        dict.fromkeys(
            [
                *(caption for clip in job.library.clips for caption in clip.captions),
                "",
                *prompts,
            ]
        )
    )


def fill_distributed(
    job: Job,
    family: DiffusersModel,
    reads: CacheItems,
    dist: DistributedContext,
    keep_bytes: int = 0,
    tell: ProgressFn | None = None,
) -> LatentCache:
    """The cache, with all that the run reads from it; processes that see the same folder share out what it lacks.

    One of them holds the folder's lock, so that no other run writes there. Machines with caches of their own each fill
    theirs.
    """
    store = LatentCache(job.cache, keep_bytes)
    work = partial(fill_cache, job, family, reads=reads, tell=tell)
    todo = missing_entries(job, family, store, reads) if dist.size > 1 else None
    if todo is None or not dist.all_agree(bool(todo))[0]:
        if dist.is_main:
            work(store)  # it prints what there is to say
        return store
    begun = time.monotonic()
    members = neighbours(job.cache, dist)
    own = shard_work(todo, members.index(dist.rank), len(members))
    leads = dist.rank == members[0]
    with store.filling() if leads else nullcontext():
        dist.barrier()
        work(store, own=own)
        dist.barrier()
    if leads:
        store = LatentCache(job.cache, keep_bytes)
        what = f"{len(todo.captions)} captions and {len(todo.samples)} windows into {job.cache}"
        echo(f"encoded {what} by {len(members)} processes in {clock(time.monotonic() - begun)}")
        work(store)
    dist.barrier()
    return store if leads else LatentCache(job.cache, keep_bytes)


def fill_cache(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    reads: CacheItems,
    own: CacheItems | None = None,
    tell: ProgressFn | None = None,
) -> None:
    """Encode what the cache lacks; of several processes its ``own`` part of that, under a lock that another one holds.

    Where the device has no room for the text encoder, once more with its blocks streamed from the host. Raises DoesNotFit
    where there is none then either, or none for the autoencoder.
    """

    def fill_once() -> None:
        seed = job.config.seed
        threads = job.config.dataloader_threads
        begun = time.monotonic()
        todo = missing_entries(job, family, store, reads) if own is None else own
        if todo:

            def report_progress(what: str, done: int, total: int) -> None:
                progress.update(done, total, what)
                if tell is not None:
                    tell(what, done, total)

            with (
                bar("encoding") as progress,
                Workers(threads) if threads else nullcontext() as workers,
            ):
                waited = fill(
                    family,
                    store,
                    todo,
                    job.library.media,
                    seed,
                    workers,
                    report_progress,
                    own is not None,
                )
            if own is None:
                what = f"{len(todo.captions)} captions and {len(todo.samples)} windows"
                took = time.monotonic() - begun
                wait = f"; {waited / took:.0%} of it waiting for frames: more dataloader_threads would help"
                slow = took > 5 and waited > 0.2 * took
                echo(
                    f"encoded {what} into {store.folder} in {clock(took)}{wait if slow else ''}"
                )
        if own is None:
            for note in store.notes:
                echo(f"note: {note}")
            texts = [text for text in reads.captions if text]
            echo_truncated(job, cut_captions(store, CacheKeys.of(family, seed), texts))

    try:
        fill_once()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        echo(
            "note: the device has no room for an encoder; the blocks of the text encoder now come from host memory"
        )
        family.free("text_encoder")
        family.free("vae")
        family.stream_text = echo
        try:
            fill_once()
        except (MemoryError, RuntimeError) as again:
            if not is_out_of_memory(again):
                raise
            raise DoesNotFit(
                f"the device has no room to encode {job.shapes[0]} pixels: fewer frames (video_config.frames) or a lower "
                "resolution would help, or a larger card for this part alone (videotune cache)"
            ) from again
        finally:
            family.stream_text = None


def missing_entries(
    job: Job, family: DiffusersModel, store: LatentCache, reads: CacheItems
) -> CacheItems:
    """What the cache does not have of what a run reads."""
    return missing(
        store, CacheKeys.of(family, job.config.seed), reads, fits_of(family, job.shapes[0])
    )


def echo_truncated(job: Job, cut: Sequence[str]) -> None:
    """Say which texts are longer than the model reads."""
    if cut:
        reads = f"the {job.spec.text_tokens} tokens that {job.spec.title} reads"
        echo(f"warning: {len(cut)} captions are longer than {reads} and are cut,")
        echo(f"  the first begins {cut[0][:60]!r}")


def echo_truncated_live(job: Job, family: DiffusersModel, prompts: Sequence[str]) -> None:
    """The same where text is encoded in the step and none is in the cache."""
    if live := live_text(job.config):
        lengths = {
            text: family.text_length(live.spell(text)) for text in texts_of(job, prompts)
        }
        echo_truncated(
            job, [text for text, length in lengths.items() if length > job.spec.text_tokens]
        )


def neighbours(folder: Path, dist: DistributedContext) -> list[int]:
    """The processes that see the same folder as this one, itself among them: those whose sign is there."""
    word = dist.broadcast(uuid.uuid4().hex)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sign = folder / f".here-{word}-{dist.rank}"
        sign.touch()
        dist.barrier()
        seen = sorted(
            int(path.name.rpartition("-")[2]) for path in folder.glob(f".here-{word}-*")
        )
        dist.barrier()
        sign.unlink()
    except OSError as error:
        raise VideotuneError(
            f"the cache {folder} cannot be written: {error}. Set cache_dir elsewhere."
        ) from error
    everyone = dist.all_gather(seen)
    if any(everyone[other] != seen for other in seen):
        raise VideotuneError(
            f"some processes see files of others in {folder}, and these do not see theirs: the folder is shared by halves. "
            "Set cache_dir to a folder that all machines share, or that each has for itself"
        )
    return seen
