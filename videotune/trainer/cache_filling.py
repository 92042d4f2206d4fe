"""Filling the cache with what a run reads; several processes share the work out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from videotune.console import bar, clock, echo
from videotune.data.workers import Workers
from videotune.errors import DoesNotFit, VideotuneError
from videotune.latent_cache.encode import FillReport, Todo, cut_captions, dealt, fill, fits_of, missing
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import Store
from videotune.trainer.distributed import DistributedContext
from videotune.trainer.run_spec import Job
from videotune.trainer.step import of_memory
from videotune.trainer.text_encoders import cut_prompts, live_text
from videotune.types import PLAIN, Family, Window

OnProgress = Callable[[str, int, int], None]
"""Called with what is encoded, how many are done, and how many there are."""


@dataclass(frozen=True)
class Reads:
    """What a run reads from the cache: texts, and (window, variant) pairs.

    ``texts``: every text that the run feeds; where text is encoded in the step none of them is cached.
    """

    texts: tuple[str, ...]
    samples: tuple[tuple[Window, int], ...]
    text_is_cached: bool

    @property
    def captions(self) -> tuple[str, ...]:
        """The texts that are cached."""
        return self.texts if self.text_is_cached else ()


def reads_of(job: Job, prompts: Sequence[str] = (), windows: Sequence[Window] = ()) -> Reads:
    """What a run reads: its training windows and captions, and what its callbacks ask for beside them.

    A training window that varies has as many variants as ``variants`` says (none for 0: then each sample is encoded anew);
    ``windows`` are read with nothing drawn.
    """
    variants, samples = job.config.video_config.variants, []
    for window in job.library.windows:
        varies = window.varies or job.spec.image_noise
        samples += [(window, variant) for variant in (range(variants) if varies else (0,))]
    samples += [(window, PLAIN) for window in windows]
    captions = [caption for clip in job.library.clips for caption in clip.captions]
    return Reads(tuple(dict.fromkeys([*captions, "", *prompts])), tuple(samples), not job.config.text_in_step)


def fill_distributed(
    job: Job,
    family: Family,
    reads: Reads,
    dist: DistributedContext,
    keep_bytes: int = 0,
    on_progress: OnProgress | None = None,
) -> Store:
    """The cache, with all that the run reads from it; processes that see the same folder share out what it lacks.

    One of them holds the folder's lock, so that no other run writes there. Machines
    with caches of their own each fill theirs.
    """
    store, work = Store(job.cache, keep_bytes), partial(fill_cache, job, family, reads=reads, on_progress=on_progress)
    if dist.size == 1:
        work(store)
        return store
    todo = lacks(job, family, store, reads)
    if not dist.all_agree(bool(todo))[0]:
        if dist.is_main:
            work(store)  # it prints what there is to say
        return store
    begun, members = time.monotonic(), neighbours(job.cache, dist)
    own = dealt(todo, members.index(dist.rank), len(members))
    if dist.rank == members[0]:
        with store.filling():
            dist.barrier()
            work(store, own=own)
            dist.barrier()
        store = Store(job.cache, keep_bytes)
        what = f"{len(todo.captions)} captions and {len(todo.samples)} windows into {job.cache}"
        echo(f"encoded {what} by {len(members)} processes in {clock(time.monotonic() - begun)}")
        work(store)
        dist.barrier()
        return store
    dist.barrier()
    work(store, own=own)
    dist.barrier()
    dist.barrier()
    return Store(job.cache, keep_bytes)


def fill_cache(
    job: Job,
    family: Family,
    store: Store,
    reads: Reads,
    own: Todo | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """``fill_once``; where the device has no room for the text encoder, once more with its blocks streamed from the host.

    Raises DoesNotFit where there is none then either, or none for the autoencoder.
    """
    try:
        fill_once(job, family, store, reads, own, on_progress)
    except (MemoryError, RuntimeError) as error:
        if not of_memory(error):
            raise
        echo("note: the device has no room for an encoder; the blocks of the text encoder now come from host memory")
        family.free("text_encoder")
        family.free("vae")
        family.stream_text = echo
        try:
            fill_once(job, family, store, reads, own, on_progress)
        except (MemoryError, RuntimeError) as again:
            if not of_memory(again):
                raise
            raise DoesNotFit(
                f"the device has no room to encode {job.shapes[0]} pixels: fewer frames (video_config.frames) or a lower "
                "resolution would help, or a larger card for this part alone (videotune cache)"
            ) from again
        finally:
            family.stream_text = None


def lacks(job: Job, family: Family, store: Store, reads: Reads) -> Todo:
    """What the cache does not have of what a run reads."""
    keys = CacheKeys.of(family, job.config.seed)
    return missing(store, keys, reads.captions, reads.samples, fits_of(family, job.shapes[0]))


def fill_once(
    job: Job, family: Family, store: Store, reads: Reads, own: Todo | None, on_progress: OnProgress | None
) -> None:
    """Encode what the cache lacks; of several processes its ``own`` part of that, under a lock that another one holds."""
    todo = lacks(job, family, store, reads) if own is None else own
    if todo:
        threads = job.config.dataloader_threads

        def report_progress(what: str, done: int, total: int) -> None:
            progress.update(done, total, what)
            if on_progress is not None:
                on_progress(what, done, total)

        with bar("encoding") as progress, Workers(threads) if threads else nullcontext() as workers:
            report = fill(
                family, store, todo, job.library.media, job.config.seed, workers, report_progress, own is not None
            )
        if own is None:
            echo(
                f"encoded {report.captions} captions and {report.samples} windows into {store.folder} {waiting(report)}"
            )
    if own is not None:
        return
    for note in store.notes:
        echo(f"note: {note}")
    echo_truncated(job, cut_captions(store, CacheKeys.of(family, job.config.seed), [t for t in reads.captions if t]))


def echo_truncated_live(job: Job, family: Family, reads: Reads) -> None:
    """The same where text is encoded in the step and none is in the cache."""
    live = live_text(job.config)
    if live is not None:
        echo_truncated(job, cut_prompts(family, live, reads.texts))


def echo_truncated(job: Job, cut: Sequence[str]) -> None:
    """Say which texts are longer than the model reads."""
    tokens = job.spec.text_tokens
    if cut:
        echo(
            f"warning: {len(cut)} captions are longer than the {tokens} tokens that {job.spec.title} reads and are cut,"
        )
        echo(f"  the first begins {cut[0][:60]!r}")


def waiting(report: FillReport) -> str:
    """How long it took, and whether it waited for frames; dataloader_threads is the remedy."""
    text = f"in {clock(report.seconds)}"
    if report.seconds > 5 and report.waited > 0.2 * report.seconds:
        return (
            f"{text}; {report.waited / report.seconds:.0%} of it waiting for frames: more dataloader_threads would help"
        )
    return text


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
