"""Read the batches of coming steps in threads, in the order of the steps."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier

import torch

from videotune.latent_cache.batches import BatchSource, make_step_batch
from videotune.latent_cache.step_batch import StepBatch


def stream(
    source: BatchSource,
    first: int,
    last: int,
    threads: int,
    rank_and_size: tuple[int, int] = (0, 1),
    spares: bool = False,
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
        spares: see ``make_step_batch``.

    Yields:
        One batch a step; at most 2 · ``threads`` + 1 are in memory at a time.
    """
    steps = range(first, last + 1)
    if threads == 0:
        for step in steps:
            yield make_step_batch(source, step, rank_and_size, spares)
        return

    pool = pool_without_openmp(threads)
    pending: deque[Future[StepBatch]] = deque()
    try:
        for step in steps:
            pending.append(
                pool.submit(make_step_batch, source, step, rank_and_size, spares)
            )
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def pool_without_openmp(threads: int) -> ThreadPoolExecutor:
    """Start threads whose torch operations use one thread each.

    A thread that calls torch otherwise gets OpenMP workers of its own, which spin
    beside those of the training: on two cores a step then takes twice as long. The
    number of threads is a setting of each thread, but setting it also changes the
    default of threads to come. So all are started first, and then the caller's number
    is restored.
    """
    callers_threads = torch.get_num_threads()
    all_started = Barrier(threads + 1)

    def use_one_thread() -> None:
        torch.set_num_threads(1)
        # torch reads the default at a thread's first call: now, while it is 1
        torch.get_num_threads()
        all_started.wait()

    pool = ThreadPoolExecutor(
        threads, thread_name_prefix="batches", initializer=use_one_thread
    )
    # Each task starts a thread, since the threads before it wait at the barrier.
    for _ in range(threads):
        pool.submit(int)
    all_started.wait()
    torch.set_num_threads(callers_threads)
    return pool
