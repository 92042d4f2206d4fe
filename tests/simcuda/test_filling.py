"""What filling the cache asks of a card, beside a loop that converts on the host."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simcuda import card
from tests.simcuda.child import on_card
from tests.simcuda.lab import PLAIN, Lab
from tests.support.run_parts import open_run
from videotune.latent_cache.cache_items import CacheItems, missing_items
from videotune.latent_cache.decode_ahead import frames_of
from videotune.latent_cache.encode import encode_missing, tensors_of
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.pixels import to_model
from videotune.latent_cache.store import LatentCache
from videotune.models.registry import find


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this thread sends to the card, but not the VAE's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if (
            func is torch.ops.aten._to_copy.default
            and not source.is_cuda
            and result.is_cuda
        ):
            self.total += source.nbytes
        return result


def noted(waits: list[str], sent: SentBytes, store: LatentCache) -> dict[str, Any]:
    """What a way of filling has asked for, and the entries that it has made."""
    return {
        "waits": waits.count("copy to the card"),
        "bytes": sent.total,
        "entries": sorted((entry.key, entry.hash) for entry in store.entries()),
    }


def filled(folder: str) -> dict[str, Any]:
    """Fill one cache with a loop and another as a run does."""
    lab, device = Lab(Path(folder)), torch.device("cuda")
    job = open_run(lab.words("wan", *PLAIN), lab.folder / "run").job
    assert job.base is not None
    family = find("wan")(job.base.folder, device, torch.float32)
    keys = CacheKeys.of(family, 0)
    samples = tuple((window, 0) for window in job.library.windows)
    media = job.library.media
    family.vae()  # its weights and statistics are on the card
    family.latent_statistics()
    seen: dict[str, Any] = {"clips": len(samples)}

    with card.watched() as watched:
        store = LatentCache(lab.folder / "simple")
        card.ops.waits()
        with SentBytes() as sent:
            for pair in samples:
                sample = keys.frame_sample(*pair)
                frames = frames_of([sample], media[sample.window.clip_id], None)
                latents = tensors_of(family.encode_video(to_model(frames)))
                store.put("latents", keys.latents_key(sample), latents, {})
        seen["simple"] = noted(card.ops.waits(), sent, store)
        seen["pixels"] = sum(
            window.shape.frames * window.shape.height * window.shape.width
            for window, _ in samples
        )

        store = LatentCache(lab.folder / "filled")
        todo = missing_items(store, keys, CacheItems((), samples))
        with SentBytes() as sent:
            encode_missing(family, store, todo, media, 0, None, lambda *_: None)
        seen["ours"] = noted(card.ops.waits(), sent, store)
    seen["errors"] = watched.errors
    return seen


def test_pixels_go_to_the_card_as_bytes_and_without_a_wait(tmp_path: Path) -> None:
    """The entries are the same to the bit."""
    seen = on_card(filled, tmp_path)
    simple, ours = seen["simple"], seen["ours"]
    assert seen["errors"] == []
    assert seen["clips"] == 8
    assert ours["entries"] == simple["entries"]
    assert simple["bytes"] - ours["bytes"] == (4 - 1) * 3 * seen["pixels"]
    assert ours["bytes"] < 1.01 * 3 * seen["pixels"]
    # Two waits a clip are for the statistics of the latents, after the encoder.
    assert (simple["waits"], ours["waits"]) == (3 * 8, 2 * 8)
