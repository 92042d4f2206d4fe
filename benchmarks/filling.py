"""Filling the cache beside a simple loop that decodes, encodes and writes in turn.

    python benchmarks/filling.py [--rounds 5] [--seconds 30] [--json FILE] [--tiny]

loops: both fill a cache with the same windows of 480p files, by the toy base at 64 x 64,
with the same number of worker processes that decode ahead; rounds alternate. Ratio =
the simple loop's seconds / ours: above 1 we are faster. The toy's encoder is far faster
than a real one. On a GPU the encoder's own seconds vanish further.

parts: CPU seconds of one thread that a clip of a real size costs beside its encoder, and
the bytes that go to a card. The simple loop converts pixels to float32 on the host, and
its encoder waits while an entry is written. Ours sends bytes and writes in a thread.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import bootstrap, make

from videotune.config.resolve import parse
from videotune.data.dataset import Library, scan
from videotune.data.workers import Workers
from videotune.latent_cache.cache_items import CacheItems, missing_items
from videotune.latent_cache.decode_ahead import decode_ahead
from videotune.latent_cache.encode import encode_missing, tensors_of
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.pixels import to_model
from videotune.latent_cache.store import LatentCache
from videotune.memory.accelerator import local_device
from videotune.models.base import DiffusersModel
from videotune.models.base_model import of_base, place
from videotune.models.registry import find

CLIPS = {
    "LTX 2B, 49 frames of 768x512": ((49, 512, 768), (128, 7, 16, 24)),
    "Wan 1.3B, 81 frames of 832x480": ((81, 480, 832), (16, 21, 60, 104)),
}
"""(frames, height, width) and the shape of the latents."""


@dataclass(frozen=True)
class Work:
    """A model and the windows that it encodes."""

    family: DiffusersModel
    library: Library
    workers: Workers | None

    def todo(self, store: LatentCache) -> CacheItems:
        """Return what an empty cache lacks."""
        samples = tuple((window, 0) for window in self.library.windows)
        return missing_items(
            store, CacheKeys.of(self.family, 0), CacheItems((), samples)
        )


def simple_loop(work: Work, store: LatentCache) -> None:
    """Wait for the frames, convert, encode, check and write each window in turn."""
    keys = CacheKeys.of(work.family, 0)
    samples = (keys.frame_sample(*sample) for sample in work.todo(store).samples)
    for sample, frames, _ in decode_ahead(samples, work.library.media, work.workers):
        tensors = tensors_of(work.family.encode_video(to_model(frames)))
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise RuntimeError(f"{sample.window.id}: the latents are not finite")
        store.put("latents", keys.latents_key(sample), tensors, {})


def ours(work: Work, store: LatentCache) -> None:
    """Fill the cache as a run does."""
    media = work.library.media
    encode_missing(
        work.family, store, work.todo(store), media, 0, work.workers, ignore_progress
    )


def ignore_progress(subject: str, done: int, total: int) -> None:
    """Print nothing."""


WAYS: dict[str, Callable[[Work, LatentCache], None]] = {
    "ours": ours,
    "simple": simple_loop,
}


def seconds_of(way: str, work: Work) -> tuple[float, set[tuple[str, str]]]:
    """Fill a new cache; return the seconds, and the hash of each entry."""
    with tempfile.TemporaryDirectory() as folder:
        store = LatentCache(Path(folder) / "cache")
        begun = time.perf_counter()
        WAYS[way](work, store)
        seconds = time.perf_counter() - begun
        return seconds, {(entry.key, entry.hash) for entry in store.entries()}


def compare(work: Work, rounds: int) -> dict[str, Any]:
    """Alternate the two ways; the first of several rounds only warms."""
    warming = int(rounds > 1)
    ratios = []
    for index in range(warming + rounds):
        order = list(WAYS) if index % 2 else list(reversed(WAYS))
        took = {way: seconds_of(way, work) for way in order}
        if took["ours"][1] != took["simple"][1]:
            raise RuntimeError("the two caches differ")
        if index >= warming:
            ratios.append(took["simple"][0] / took["ours"][0])
    low, high = bootstrap(ratios)
    median = statistics.median(ratios)
    return {"median": median, "low": low, "high": high, "rounds": ratios}


def measure_loops(rounds: int, seconds: int) -> dict[str, Any]:
    """Compare the loops without worker processes and with one."""
    base = place("asset:toy").folder
    spec = of_base(base).read_spec(base)
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        path = make(Path(name), "h264-480p", seconds)
        path.with_suffix(".txt").write_text("a clip")
        settings = {
            "datasets": [{"path": name}],
            "video_config": {"max_duration": 20.0},
            "resolution": 64,
            "validation_fraction": 0.0,
        }

        library = scan(parse(settings), spec.rules, Path(name) / "index.sqlite")
        for count in (0, 1):
            family = find(spec.name)(base, local_device(), torch.float32)
            with Workers(count) if count else nullcontext() as workers:
                ratio = compare(Work(family, library, workers), rounds)

            ratio["windows"] = len(library.windows)
            figures[f"{count} workers"] = ratio
            print(
                f"{count} workers, {len(library.windows)} windows: ratio {ratio['median']:.2f} "
                f"({ratio['low']:.2f} to {ratio['high']:.2f})",
                flush=True,
            )
    return figures


def cpu_milliseconds(work: Callable[[], Any], rounds: int) -> float:
    """Return the least CPU time of this thread, which other programs disturb little."""
    times = []
    for _ in range(rounds):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return 1000 * min(times)


def measure_parts(rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Measure what a clip costs beside its encoder."""
    figures = {}
    torch.set_num_threads(1)
    for name, (size, latent_shape) in CLIPS.items():
        frames_shape = (5, 32, 32) if tiny else size
        frames = np.zeros((*frames_shape, 3), np.uint8)
        latents = {"mean": torch.zeros(latent_shape)}
        with tempfile.TemporaryDirectory() as folder:
            store = LatentCache(Path(folder) / "cache")
            part = {
                "convert_ms": cpu_milliseconds(partial(to_model, frames), rounds),
                "write_ms": cpu_milliseconds(
                    partial(store.put, "latents", "key", latents, {}), rounds
                ),
                "megabytes_simple": 4 * frames.nbytes / 1e6,
                "megabytes_ours": frames.nbytes / 1e6,
            }

        figures[name] = part
        print(
            f"{name}: converting {part['convert_ms']:.0f} ms, writing {part['write_ms']:.1f} ms, "
            f"to a card {part['megabytes_simple']:.0f} MB, ours {part['megabytes_ours']:.0f} MB",
            flush=True,
        )
    return figures


def main() -> None:
    """Measure the loops and the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=30, help="of the file")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.rounds = 1
        options.seconds = 4

    figures = {
        "device": str(local_device()),
        "loops": measure_loops(options.rounds, options.seconds),
        "parts": measure_parts(options.rounds, tiny=options.tiny),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
