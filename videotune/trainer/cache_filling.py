"""Fill the cache with what a run reads. Several processes share the work."""

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from videotune.console import bar, echo
from videotune.data.workers import Workers
from videotune.distributed import DistributedContext
from videotune.errors import DoesNotFit
from videotune.job.job import Job
from videotune.latent_cache.cache_items import (
    CacheItems,
    items_by_entry,
    missing_items,
    shard_work,
)
from videotune.latent_cache.conditions import (
    SOUND,
    SeparateCondition,
    channel_samples,
    channel_sets,
    condition_samples,
    conditions_of_most_samples,
    num_boxes,
    shown_on_channels,
)
from videotune.latent_cache.encode import ProgressFn, cut_captions, encode_missing
from videotune.latent_cache.encoder_failures import TextEncoderFull
from videotune.latent_cache.fitting import fits_of
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.remote_entries import entries_of
from videotune.latent_cache.store import LatentCache
from videotune.models.base import DiffusersModel
from videotune.text import counted, counted_are, duration
from videotune.trainer.cache_sharing import add_findings, processes_sharing
from videotune.trainer.text_encoders import live_text
from videotune.types import DETERMINISTIC_VARIANT, Window

SLOW_DECODING_SECONDS = 5
SLOW_DECODING_SHARE = 0.2
"""From this time on, and this share of it spent waiting for frames, a hint on threads
is printed.
"""


def reads_of(
    job: Job, prompts: Sequence[str] = (), windows: Sequence[Window] = ()
) -> CacheItems:
    """Return what a run reads from the cache.

    A training window that varies has ``variants`` variants; with 0 none is cached,
    because each sample is encoded in its step. If text is encoded in the step, no
    caption is cached.

    Args:
        job: what is to be done.
        prompts: texts that callbacks read.
        windows: windows that callbacks read, without random frames, crop or image noise.
    """
    cached_variants = range(job.config.video_config.variants)
    samples: list[tuple[Window, int]] = []
    for window in job.library.windows:
        varies = window.varies or job.spec.image_noise
        for variant in cached_variants if varies else (0,):
            samples.append((window, variant))
    for window in windows:
        samples.append((window, DETERMINISTIC_VARIANT))

    captions = () if job.config.text_in_step else texts_of(job, prompts)
    conditions = _conditions_of(job, samples)
    return CacheItems(captions, tuple(samples), conditions=tuple(conditions))


def _conditions_of(
    job: Job, samples: Sequence[tuple[Window, int]]
) -> list[SeparateCondition]:
    """Return the conditions of samples, and their sound, that have entries of their own.

    A mask of a clip without a mask file hides a drawn box. A step draws one of several
    boxes, and each has an entry. A sample without random parts has the first box, and only
    the conditions that at least half of the samples have.
    """
    types_of_most_samples = conditions_of_most_samples(job.config, job.spec)
    drawn_sets = channel_sets(job.config, job.spec)

    conditions: list[SeparateCondition] = []
    for window, variant in samples:
        is_plain = variant == DETERMINISTIC_VARIANT
        only_types = types_of_most_samples if is_plain else None
        # Of each condition, its samples: one for each box that a mask may hide, else one.
        samples_by_condition = [
            *_conditions_not_on_channels(job, window, variant, only_types),
            *_conditions_on_channels(job, window, variant, drawn_sets, only_types),
        ]
        for samples_of_boxes in samples_by_condition:
            conditions += samples_of_boxes[:1] if is_plain else samples_of_boxes

        if window.shape.sound:
            conditions.append(SeparateCondition(window, variant, SOUND))
    return conditions


def _conditions_not_on_channels(
    job: Job, window: Window, variant: int, only_types: frozenset[str] | None
) -> list[list[SeparateCondition]]:
    """Return the conditions of a sample that channels do not show, each with its boxes.

    Args:
        job: what is to be done.
        window: the sample's window.
        variant: its variant.
        only_types: the types that are read. None: all.
    """
    encoded = []
    for condition in job.config.conditions:
        is_read = only_types is None or condition.type in only_types
        if is_read and not job.spec.is_on_channels(condition.type):
            samples = condition_samples(
                window, variant, condition, num_boxes(job.config), job.spec
            )
            encoded.append(samples)
    return encoded


def _conditions_on_channels(
    job: Job,
    window: Window,
    variant: int,
    drawn_sets: Sequence[frozenset[str]],
    only_set: frozenset[str] | None,
) -> list[list[SeparateCondition]]:
    """Return what channels may show of a sample, each with its boxes.

    Args:
        job: what is to be done.
        window: the sample's window.
        variant: its variant.
        drawn_sets: types of conditions that a step may draw together (``channel_sets``).
        only_set: the one of them that is read. None: each.
    """
    # A still cannot show most conditions, so several sets come down to the same one.
    shown_sets = [shown_on_channels(types, window, job.spec) for types in drawn_sets]
    sets = list(dict.fromkeys(shown_sets))
    if only_set is not None:
        shown = shown_on_channels(only_set, window, job.spec)
        sets = [types for types in sets if types == shown]

    encoded = []
    for types in sets:
        if job.spec.need_own_entry(types):
            encoded.append(
                channel_samples(
                    window, variant, types, job.config, num_boxes(job.config)
                )
            )
    return encoded


def texts_of(job: Job, prompts: Sequence[str]) -> tuple[str, ...]:
    """Return every text that the text encoder reads in a run, each once, captions
    first.
    """
    texts: list[str] = []
    for clip in job.library.clips:
        texts += clip.captions
    return tuple(dict.fromkeys([*texts, "", *prompts]))


def fill_cache_of_run(
    job: Job,
    family: DiffusersModel,
    reads: CacheItems,
    dist: DistributedContext,
    keep_bytes: int = 0,
    on_progress: ProgressFn | None = None,
) -> LatentCache:
    """Return the cache with everything that the run reads.

    Processes that see the same folder share what is missing in it, and one of them
    holds the folder's lock, so that no other run writes there. Machines with caches of
    their own each fill theirs.

    Args:
        job: what is to be done.
        family: the base model.
        reads: what the run reads.
        dist: this process among those of the run.
        keep_bytes: how much of the cache stays in memory.
        on_progress: called with the progress of the encoding.
    """
    remote = entries_of(job.config.cache_dir, job.cache)
    store = LatentCache(job.cache, keep_bytes, remote)
    if dist.size == 1:
        fill_cache(job, family, store, reads, on_progress=on_progress)
        return store

    todo = missing_of_run(job, family, store, reads)
    anything_missing = dist.any_process(bool(todo))[0]
    if anything_missing:
        share_store = store
        members = _encode_shares(
            job, family, share_store, reads, todo, dist, on_progress
        )
        is_leader = dist.rank == members[0]
        # What the others have written is read from the disk.
        store = LatentCache(job.cache, keep_bytes, remote)
        add_findings(store, share_store, members, dist)
    else:
        is_leader = dist.is_main

    # All is encoded, unless somebody has removed something meanwhile. So this only prints
    # the notes, and finishes the uploads.
    if is_leader:
        fill_cache(job, family, store, reads, on_progress=on_progress)
    dist.barrier()
    return store


def _encode_shares(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    reads: CacheItems,
    todo: CacheItems,
    dist: DistributedContext,
    on_progress: ProgressFn | None,
) -> list[int]:
    """Encode this process's share of what is missing, and wait for the others.

    Returns:
        The ranks of the processes that see the same folder. The first one is their leader
        and held the folder's lock.
    """
    begun = time.monotonic()
    members = processes_sharing(job.cache, dist)
    is_leader = dist.rank == members[0]
    own_share = shard_work(todo, members.index(dist.rank), len(members))
    with store.write_lock() if is_leader else nullcontext():
        dist.barrier()
        fill_cache(job, family, store, reads, share=own_share, on_progress=on_progress)
        dist.barrier()

    if is_leader:
        took = duration(time.monotonic() - begun)
        echo(
            f"encoded {items_text(todo)} into {job.cache} "
            f"with {counted(len(members), 'process', 'processes')} in {took}"
        )
    return members


def fill_cache(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    reads: CacheItems,
    share: CacheItems | None = None,
    on_progress: ProgressFn | None = None,
) -> None:
    """Encode what is missing in the cache.

    If the text encoder does not fit the device, neither loaded nor while it encodes, its
    blocks are streamed from the host in a second try.

    Args:
        job: what is to be done.
        family: the base model.
        store: the cache.
        reads: what the run reads.
        share: this process's share of what is missing, if the processes of a run fill the
            cache together: the leader among them, perhaps this process, holds the lock
            and prints the notes later. None: this process encodes everything that is
            missing by itself, takes the lock and prints.
        on_progress: called with the progress.

    Raises:
        DoesNotFit: if the second try has no room either.
        VideotuneError: if a clip cannot be encoded, also for lack of memory.
    """
    with suppress(TextEncoderFull):
        _encode_and_report(job, family, store, reads, share, on_progress)
        return

    # Here the error is gone, and with it the frames that hold the encoder's tensors.
    echo(
        "note: the text encoder does not fit the device; "
        "its blocks are now streamed from host memory"
    )
    family.free("text_encoder")
    family.free("vae")
    _encode_with_text_on_the_host(job, family, store, reads, share, on_progress)


def _encode_with_text_on_the_host(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    reads: CacheItems,
    share: CacheItems | None,
    on_progress: ProgressFn | None,
) -> None:
    """Encode with the blocks of the text encoder on the host.

    Raises DoesNotFit if that needs too much memory.
    """
    family.stream_text = echo
    try:
        _encode_and_report(job, family, store, reads, share, on_progress)
    except TextEncoderFull as error:
        raise DoesNotFit(
            "the device has no room for the text encoder, not even with its blocks on "
            "the host. Encode on a larger GPU first (videotune cache)."
        ) from error
    finally:
        family.stream_text = None


def _encode_and_report(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    reads: CacheItems,
    share: CacheItems | None,
    on_progress: ProgressFn | None,
) -> None:
    """Encode what is missing, show the progress, and print what there is to say about
    the cache.
    """
    begun = time.monotonic()
    todo = missing_of_run(job, family, store, reads) if share is None else share
    if todo:
        waited = _encode_with_progress(
            job, family, store, todo, on_progress, lock_is_held=share is not None
        )
        if share is None:
            _print_encoded(store, todo, seconds=time.monotonic() - begun, waited=waited)

    keys = CacheKeys.of(family, job.config.seed)
    # Nothing to do unless the entries are also on an object store (``remote_entries``).
    store.finish_uploads(items_by_entry(keys, reads) if share is None else ())
    # If processes fill the cache together, their leader prints the notes at the end.
    if share is None:
        for note in store.notes:
            echo(f"note: {note}")
        _echo_masks_without_effect(store.masks_without_effect)
        captions = [caption for caption in reads.captions if caption]
        echo_truncated(job, cut_captions(store, keys, captions))


def _encode_with_progress(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    todo: CacheItems,
    on_progress: ProgressFn | None,
    *,
    lock_is_held: bool,
) -> float:
    """Encode with a progress bar and decoding workers, and return the seconds waited
    for frames.
    """
    threads = job.config.dataloader_threads
    with (
        bar("encoding") as progress,
        Workers(threads) if threads else nullcontext() as workers,
    ):

        def report(subject: str, done: int, total: int) -> None:
            progress.update(done, total, subject)
            if on_progress is not None:
                on_progress(subject, done, total)

        return encode_missing(
            family,
            store,
            todo,
            job.library.media,
            seed=job.config.seed,
            workers=workers,
            progress=report,
            lock_is_held=lock_is_held,
        )


def _echo_masks_without_effect(count: int) -> None:
    """Print how many masks were encoded that leave nothing to learn, or hide nothing."""
    if not count:
        return
    echo(
        f"note: conditions: mask: {counted(count, 'mask')} hide everything or nothing at this "
        "size, so these samples are trained without a mask. A cell stays visible only if the mask is "
        "black there and in the cells around it. Use smaller white parts, or a larger resolution"
    )


def _print_encoded(
    store: LatentCache, todo: CacheItems, *, seconds: float, waited: float
) -> None:
    message = f"encoded {items_text(todo)} into {store.folder} in {duration(seconds)}"
    share_waited = waited / seconds
    if seconds > SLOW_DECODING_SECONDS and share_waited > SLOW_DECODING_SHARE:
        message += f"; {share_waited:.0%} of it waiting for frames: more dataloader_threads would help"
    echo(message)


def items_text(items: CacheItems) -> str:
    """Return how many captions and windows there are."""
    captions = counted(len(items.captions), "caption")
    windows = counted(len(items.samples), "window")
    parts = [captions, windows]
    if items.masks:
        parts.append(counted(len(items.masks), "mask"))
    if items.conditions:
        parts.append(counted(len(items.conditions), "condition"))
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def missing_of_run(
    job: Job, family: DiffusersModel, store: LatentCache, reads: CacheItems
) -> CacheItems:
    """Return what a run reads and the cache does not have."""
    keys = CacheKeys.of(family, job.config.seed)
    return missing_items(
        store, keys, reads, fits_of(family, caption_shape=job.shapes[0])
    )


def echo_truncated(job: Job, cut: Sequence[str]) -> None:
    """Print which captions are longer than the model reads."""
    if not cut:
        return
    echo(
        f"warning: {counted_are(len(cut), 'caption')} cut: longer than the "
        f"{job.spec.text_tokens} tokens that {job.spec.title} reads. Shorten them;"
    )
    echo(f"  the first begins {cut[0][:60]!r}")


def echo_truncated_live(
    job: Job, family: DiffusersModel, prompts: Sequence[str]
) -> None:
    """Print which captions are cut if text is encoded in the step and none is cached."""
    text = live_text(job.config)
    if text is None:
        return
    cut = []
    for caption in texts_of(job, prompts):
        if family.text_length(text.with_all_tokens(caption)) > job.spec.text_tokens:
            cut.append(caption)
    echo_truncated(job, cut)
