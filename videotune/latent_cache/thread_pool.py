"""Threads that call torch beside the training or an encoder."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch


def pool_without_openmp(threads: int, name: str) -> ThreadPoolExecutor:
    """Start threads whose torch operations use one thread each.

    A thread that calls torch otherwise gets OpenMP workers of its own, which spin
    beside those of the training: on two cores a step then takes twice as long. The
    number of threads is a setting of each thread, but setting it also changes the
    default of threads to come. So all are started first, and then the caller's number
    is restored.

    Args:
        threads: how many to start.
        name: beginning of the threads' names.
    """
    callers_threads = torch.get_num_threads()
    all_started = Barrier(threads + 1)

    def use_one_thread() -> None:
        torch.set_num_threads(1)
        # torch reads the default at a thread's first call: now, while it is 1.
        torch.get_num_threads()
        all_started.wait()

    pool = ThreadPoolExecutor(
        threads, thread_name_prefix=name, initializer=use_one_thread
    )
    # Each task starts a thread, since the threads before it wait at the barrier.
    for _ in range(threads):
        pool.submit(int)
    all_started.wait()
    torch.set_num_threads(callers_threads)
    return pool
