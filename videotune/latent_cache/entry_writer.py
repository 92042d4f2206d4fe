"""Write entries of the cache while the encoder computes the next ones."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from videotune.latent_cache.store import LatentCache
from videotune.latent_cache.thread_pool import pool_without_openmp

PENDING_ENTRIES = 2
"""Entries that may wait for the disk. A kill loses them, as it loses the entry that is
being encoded.
"""


class EntryWriter:
    """Hashes and writes entries in the order in which they come, in a thread if the
    encoder runs on a card. On a CPU the thread would take the encoder's time.

    Use it as a context manager: at its end everything is on the disk, also if the block
    has failed.
    """

    def __init__(self, store: LatentCache, device: torch.device) -> None:
        self.store = store
        self._pool = None if device.type == "cpu" else pool_without_openmp(1, "entries")
        self._pending: deque[Future[None]] = deque()

    def put(
        self,
        kind: str,
        key: str,
        tensors: Mapping[str, Tensor],
        about: Mapping[str, Any],
    ) -> None:
        """Hand an entry over, see ``LatentCache.put``; wait while too many are pending.

        Nobody may write to the tensors afterwards.

        Raises:
            VideotuneError: if this entry or an earlier one could not be written.
        """
        if self._pool is None:
            self.store.put(kind, key, tensors, about)
            return
        while len(self._pending) >= PENDING_ENTRIES:
            self._pending.popleft().result()
        write = self._pool.submit(self.store.put, kind, key, tensors, about)
        self._pending.append(write)

    def __enter__(self) -> "EntryWriter":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the disk. Raises VideotuneError if an entry could not be written."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        for write in self._pending:
            write.result()
