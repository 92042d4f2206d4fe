"""Read the batches of coming steps in threads, in the order of the steps."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.step_batch import StepBatch
from videotune.latent_cache.thread_pool import pool_without_openmp


def stream(
    source: BatchSource,
    first: int,
    last: int,
    threads: int,
    rank_and_size: tuple[int, int] = (0, 1),
    pad_empty_share: bool = False,
) -> Iterator[StepBatch]:
    """Yield the batches of the steps ``first`` to ``last``.

    The number of threads never changes them or their order.

    Args:
        source: where batches come from.
        first: the first step, counted from 1.
        last: the last step.
        threads: how many threads read ahead; with 0 the caller's thread reads each
            batch when it is asked for.
        rank_and_size: this process and the number of processes, see ``share_of``.
        pad_empty_share: see ``make_step_batch``.

    Yields:
        One batch a step; at most 2 · ``threads`` + 1 are in memory at a time, beside
            the one that the caller holds.
    """
    steps = range(first, last + 1)
    if threads == 0:
        for step in steps:
            yield make_step_batch(source, step, rank_and_size, pad_empty_share)
        return

    pool = pool_without_openmp(threads, "batches")
    pending: deque[Future[StepBatch]] = deque()
    try:
        for step in steps:
            pending.append(
                pool.submit(
                    make_step_batch, source, step, rank_and_size, pad_empty_share
                )
            )
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
