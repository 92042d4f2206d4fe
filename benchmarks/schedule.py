"""What a step of the stream costs far into a large dataset, beside the permuted list that it does without.

    python benchmarks/schedule.py [--windows 100000000] [--buckets 12] [--step 10000000] [--json FILE] [--tiny]

One process, one thread, alternating samples of 1, 2 and 4 a step by bucket. Microseconds of ``picks`` are those of single
calls after the first, which alone chooses the stride; kilobytes, by tracemalloc, are the most that a step ever held, and
what is left after all of them (Python's own lists of freed tuples, some 250 kB in the end, are cleared before counting).
The list is numpy's permutation of the same windows, made once a pass by whoever draws from one. Absolute times are noise;
the ratio and the kilobytes are the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from pathlib import Path

import numpy as np

from videotune.cache.sampler import Schedule, _ends, _round_keys, _stride, picks, turns


def make_schedule(windows: int, buckets: int) -> Schedule:
    """So many windows in buckets of growing size."""
    parts = np.linspace(1, 3, buckets)
    sizes = [max(1, int(windows * part / parts.sum())) for part in parts]
    sizes[-1] += windows - sum(sizes)
    return Schedule(0, tuple(sizes), tuple((1, 2, 4)[i % 3] for i in range(buckets)))


def time_of_steps(schedule: Schedule, first: int, count: int) -> tuple[float, list[float]]:
    """(microseconds of the first call, of each further one)."""
    took = []
    for step in range(first, first + count + 1):
        begun = time.perf_counter()
        picks(schedule, step)
        took.append((time.perf_counter() - begun) * 1e6)
    return took[0], took[1:]


def kilobytes_of_steps(schedule: Schedule, first: int, count: int) -> tuple[float, float]:
    """(the most that drawing ever held, what is left after it)."""
    tracemalloc.start()
    for step in range(first, first + count):
        picks(schedule, step)
        if step % 50 == 0:
            gc.collect()
    gc.collect()
    left, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most / 1024, left / 1024


def time_of_list(windows: int) -> tuple[float, float]:
    """(microseconds, kilobytes) of a permuted list of all windows."""
    begun = time.perf_counter()
    order = np.random.default_rng(0).permutation(windows)
    return (time.perf_counter() - begun) * 1e6, order.nbytes / 1024


def main() -> None:
    """Measure, check that the steps add up, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10**8)
    parser.add_argument("--buckets", type=int, default=12)
    parser.add_argument("--step", type=int, default=10**7)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of a few seconds; its figures mean nothing")
    words = parser.parse_args()
    if words.tiny:
        words.windows, words.step, words.calls = 10**4, 10**4, 20
    schedule = make_schedule(words.windows, words.buckets)
    most, left = kilobytes_of_steps(schedule, words.step, words.calls)
    for remembered in (_ends, _stride, _round_keys):
        remembered.cache_clear()
    cold, warm = time_of_steps(schedule, words.step, words.calls)
    early, _ = time_of_steps(make_schedule(1000, words.buckets), 10, 1)
    _, small = time_of_steps(make_schedule(1000, words.buckets), 10, words.calls)
    assert sum(turns(schedule, bucket, words.step) for bucket in range(words.buckets)) == words.step
    list_us, list_kb = time_of_list(words.windows)
    typical = statistics.median(warm)
    figures = {
        "windows": words.windows,
        "step": words.step,
        "first_call_us": round(cold, 1),
        "picks_us": round(typical, 1),
        "picks_us_of_1000_windows": round(statistics.median(small), 1),
        "first_call_us_of_1000_windows": round(early, 1),
        "most_kb": round(most, 1),
        "left_kb": round(left, 1),
        "list_us": round(list_us, 1),
        "list_kb": round(list_kb, 1),
        "list_over_picks": round(list_us / typical, 1),
        "list_over_most": round(list_kb / most, 1),
    }
    print(json.dumps(figures, indent=2))
    if words.json:
        words.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
