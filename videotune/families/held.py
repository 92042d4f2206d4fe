"""Parts of a checkpoint that are loaded at their first use and kept until they are freed."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Held:
    """What a family has in memory beside its denoiser: "text_encoder", "vae", and what goes with them.

    Whoever uses the VAE holds ``vae_lock``: whoever frees it waits for them, and one that keeps its state between frames
    in itself works on one clip at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.vae_lock = RLock()
        self._device = device
        self._parts: dict[str, Any] = {}

    def get(self, name: str, load: Callable[[], Any]) -> Any:
        """The part of this name; ``load`` makes it where it is not there."""
        if name not in self._parts:
            self._parts[name] = load()
        return self._parts[name]

    def free(self, *names: str) -> None:
        """Drop parts from memory, and hand what the allocator kept for them back to the card."""
        with self.vae_lock:
            for name in names:
                self._parts.pop(name, None)
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
