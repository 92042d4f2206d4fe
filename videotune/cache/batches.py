"""step -> the batch, its noise levels and its noise, from the cache: a pure function, and a stream that reads it ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import torch
from torch import Tensor

from videotune.cache.schedule import Schedule, picks
from videotune.cache.store import Store, latent_key, text_key
from videotune.diffusion.objective import Objective
from videotune.randomness import draws
from videotune.types import Batch, Clip, Condition, Window


@dataclass(frozen=True)
class Prepared:
    """One step's samples with everything that was drawn for them: t (B,), noise (B,C,F,H,W)."""

    step: int
    batch: Batch
    t: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Source:
    """Where batches come from. ``buckets`` are the schedule's, dearest first; ``condition`` is the family's."""

    store: Store
    prints: Mapping[str, str]
    tokens: int
    condition: Callable[[Sequence[Mapping[str, Tensor]]], Condition]
    clips: Mapping[str, Clip]
    buckets: tuple[tuple[Window, ...], ...]
    schedule: Schedule
    objective: Objective
    caption_dropout: float

    def text(self, caption: str) -> dict[str, Tensor]:
        """A caption's cached states."""
        return self.store.get("text", text_key(caption, self.prints["text_encoder"], self.tokens))

    def latents(self, window: Window, *name: str | int) -> Tensor:
        """A window's latents (C,F,H,W): the mean, or the draw called ``name`` where the family keeps a variance."""
        entry = self.store.get("latents", latent_key(window, self.prints["vae"]))
        if "logvar" not in entry:
            return entry["mean"]
        noise = draws(self.schedule.seed, "posterior", *name).standard_normal(entry["mean"].shape, "float32")
        return entry["mean"] + torch.exp(0.5 * entry["logvar"]) * torch.from_numpy(noise)


def assemble(source: Source, windows: Sequence[Window], captions: Sequence[str], latents: Sequence[Tensor]) -> Batch:
    """Windows of one bucket with their captions -> a Batch on the CPU."""
    x0 = torch.stack(list(latents))
    none = torch.zeros(len(windows), 1, x0.shape[2], 1, 1, dtype=torch.bool)
    return Batch(
        x0=x0,
        given=none,
        dropped=none,
        weight=torch.ones_like(none, dtype=torch.float32),
        cond=source.condition([source.text(caption) for caption in captions]),
        captions=tuple(captions),
        window_ids=tuple(window.id for window in windows),
        fps=torch.tensor([window.shape.fps for window in windows]),
    )


def prepare(source: Source, step: int) -> Prepared:
    """Everything step ``step`` (from 1) trains on. Each draw belongs to (seed, purpose, step, index of the sample)."""
    seed = source.schedule.seed
    bucket, places = picks(source.schedule, step)
    windows = [source.buckets[bucket][place] for place in places]
    latents = [source.latents(window, step, i) for i, window in enumerate(windows)]
    captions = [_caption(source, window, step, i) for i, window in enumerate(windows)]
    batch = assemble(source, windows, captions, latents)
    u = torch.tensor([draws(seed, "t", step, i).random() for i in range(len(windows))], dtype=torch.float64)
    shape = tuple(batch.x0.shape[1:])
    noise = [
        torch.from_numpy(draws(seed, "noise", step, i).standard_normal(shape, "float32")) for i in range(len(windows))
    ]
    return Prepared(step, batch, source.objective.timesteps.draw(u), torch.stack(noise))


def _caption(source: Source, window: Window, step: int, index: int) -> str:
    captions = source.clips[window.clip_id].captions
    random = draws(source.schedule.seed, "caption", step, index)
    if random.random() < source.caption_dropout:
        return ""
    return captions[int(random.integers(len(captions)))]


def quiet_pool(threads: int) -> ThreadPoolExecutor:
    """Threads whose torch operations stay in the one thread.

    Each thread that calls torch otherwise gets OpenMP workers of its own, which spin beside those of the training: on two
    cores a step then takes twice as long. The number of threads is a setting of each thread, but setting it also sets the
    default of those to come, so all are started first and the caller's number is put back after.
    """
    number, started = torch.get_num_threads(), Barrier(threads + 1)

    def become_one() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch asks for the default at a thread's first call: now, while that is 1
        started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches", initializer=become_one)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(number)
    return pool


def stream(source: Source, first: int, last: int, threads: int) -> Iterator[Prepared]:
    """Steps first … last, read ahead by ``threads`` threads (0: in the caller's own time). Order never depends on them."""
    steps = iter(range(first, last + 1))
    if threads == 0:
        yield from (prepare(source, step) for step in steps)
        return
    pool = quiet_pool(threads)
    ahead: deque[Future[Prepared]] = deque()
    try:
        for step in steps:
            ahead.append(pool.submit(prepare, source, step))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
