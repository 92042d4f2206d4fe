"""What the schedule costs each of many processes: a simulation of 1,024 of them over a hundred million windows.

    python benchmarks/many.py [--processes 1024] [--windows 100000000] [--steps 3] [--json FILE] [--tiny]

Nothing is trained and nobody sends anything: one process plays each of the others in turn, with nothing remembered between
two of them, and draws what that one would: the windows of the whole step, since the journal names them all and the loss
is divided by their number, and of these its own part. Checked: the parts of all, put together in order, are the step of one
process; and over so many steps no window comes twice before a pass over its bucket is done. Kilobytes by tracemalloc;
milliseconds are noise between machines, their order is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from pathlib import Path

import numpy as np

from videotune.cache.batches import share_of, uniforms
from videotune.cache.sampler import Schedule, _ends, _round_keys, _stride, picks, visit
from videotune.rng import draws
from videotune.types import ClipShape, Window


def make_schedule(windows: int, processes: int, buckets: int = 12) -> Schedule:
    """So many windows in buckets of growing size, whose steps have 1, 2 or 4 samples a process."""
    parts = np.linspace(1, 3, buckets)
    sizes = [max(1, int(windows * part / parts.sum())) for part in parts]
    sizes[-1] += windows - sum(sizes)
    return Schedule(0, tuple(sizes), tuple((1, 2, 4)[i % 3] * processes for i in range(buckets)))


def forget() -> None:
    """As in a process that has just begun."""
    for remembered in (_ends, _stride, _round_keys):
        remembered.cache_clear()


def own_part(schedule: Schedule, step: int, rank: int, processes: int) -> tuple[int, tuple[int, ...]]:
    """(bucket, the windows of a process) at a step."""
    bucket, places = picks(schedule, step)
    lo, hi = share_of((rank, processes), len(places))
    return bucket, places[lo:hi]


def check(schedule: Schedule, first: int, steps: int, processes: int) -> int:
    """How many windows all processes together were given, after each was asked by itself."""
    seen: set[tuple[int, int, int]] = set()
    for step in range(first, first + steps):
        bucket, whole = picks(schedule, step)
        parts: list[int] = []
        for rank in range(processes):
            forget()
            own_bucket, own = own_part(schedule, step, rank, processes)
            assert own_bucket == bucket
            parts += own
        assert tuple(parts) == whole, f"step {step}: the parts are not the whole"
        shown = {(bucket, epoch, place) for place, epoch in zip(whole, visit(schedule, step), strict=True)}
        assert len(shown) == len(whole)
        assert seen.isdisjoint(shown), f"step {step}: a window came twice in a pass"
        seen |= shown
    return len(seen)


def timed(schedule: Schedule, first: int, steps: int) -> dict[str, float]:
    """Milliseconds of the first step of a process and of a later one, by what is drawn; kilobytes that it held at most."""
    forget()
    begun = time.perf_counter()
    picks(schedule, first)
    start = time.perf_counter() - begun
    windows, captions, levels, samples = [], [], [], []
    for step in range(first + 1, first + 1 + steps):
        begun = time.perf_counter()
        _, places = picks(schedule, step)
        visit(schedule, step)
        chosen = time.perf_counter()
        for index in range(len(places)):
            draws(0, "caption", step, index).random()
        told = time.perf_counter()
        uniforms(0, step, len(places), False)
        windows.append(chosen - begun)
        captions.append(told - chosen)
        levels.append(time.perf_counter() - told)
        samples.append(len(places))
    tracemalloc.start()
    picks(schedule, first)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    mean = {"windows": windows, "captions": captions, "noise levels": levels}
    found = {f"ms a step: {name}": round(1000 * statistics.mean(took), 3) for name, took in mean.items()}
    return {"samples a step": statistics.mean(samples), "ms at the start": round(1000 * start, 3), **found,
            "kB held by drawing a step": round(most / 1024, 1)}  # fmt: skip


def bytes_a_window(count: int = 100_000) -> float:
    """What a window of the library takes, beside its clip."""
    shape = ClipShape(17, 480, 832, 16.0)
    tracemalloc.start()
    held = [Window("0123456789abcdef", i * 0.5, i * 0.5 + 1.0625, shape) for i in range(count)]
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return now / len(held)


def main() -> None:
    """Simulate, check, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=10**8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of a few seconds; its figures mean nothing")
    words = parser.parse_args()
    if words.tiny:
        words.processes, words.windows, words.steps = 8, 10**5, 1
    schedule = make_schedule(words.windows, words.processes)
    first = 10**4
    found: dict[str, float] = {"processes": words.processes, "windows": words.windows}
    found |= timed(schedule, first, 20)
    found["bytes of a window in the library"] = round(bytes_a_window(), 1)
    found["GB of the library's windows"] = round(found["bytes of a window in the library"] * words.windows / 1e9, 1)
    found["windows checked"] = check(schedule, first, words.steps, words.processes)
    for name, value in found.items():
        print(f"{name:40} {value:,}")
    print("the parts of all processes are the steps of one, and no window came twice")
    if words.json:
        words.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
