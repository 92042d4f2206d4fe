"""Seconds of a training step of the toy by how OpenMP's threads are set, on a machine
that is idle and on one whose cores are taken by busy loops.

python benchmarks/threads.py [--rounds 5] [--tiny] prints a line a way, with its ratio to
the best of the same condition. Ways alternate within a round, so that a load from
elsewhere hits all of them.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

OURS = "ours"
"""What videotune sets by itself (``videotune.cpu_threads``)."""

WAYS: dict[str, dict[str, str]] = {
    "torch's default": {},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    OURS: {},
}
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
BUSY_LOOP = [sys.executable, "-c", "while True: pass"]


def measure_step(steps: int, way: str) -> None:
    """Print the seconds of a step, in a process of its own."""
    if way == OURS:
        from videotune import cpu_threads

        cpu_threads.configure()

    import logging
    import time
    from importlib import resources

    # it warns, when diffusers imports it, of a package that nothing here needs
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import torch
    from diffusers import WanTransformer3DModel

    folder = Path(str(resources.files("videotune"))) / "assets" / "toy"
    net = WanTransformer3DModel.from_pretrained(folder / "transformer")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    if way == OURS:
        cpu_threads.fit_to_model(sum(each.numel() for each in net.parameters()))

    latents = torch.randn(8, 12, 5, 8, 8)
    text = torch.randn(8, 24, 64)
    t = torch.rand(8) * 1000
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        output = net(latents, t, text, return_dict=False)[0]
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    print(median(seconds[len(seconds) // 5 :]), torch.get_num_threads())


def run_way(way: str, steps: int) -> tuple[float, int]:
    """Return the seconds of a step, and the threads it had."""
    environment = {
        name: value for name, value in os.environ.items() if name not in SETTINGS
    }
    done = subprocess.run(
        [sys.executable, __file__, "--steps", str(steps), "--child", way],
        env=environment | WAYS[way],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, threads = done.stdout.split()[-2:]
    return float(seconds), int(threads)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep cores busy for a block."""
    loops = [subprocess.Popen(BUSY_LOOP) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Measure every way under both conditions and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ways", nargs="*", choices=WAYS, help="only these")
    parser.add_argument("--child", choices=WAYS)
    options = parser.parse_args()
    if options.child:
        measure_step(options.steps, options.child)
        return

    rounds = 1 if options.tiny else options.rounds
    steps = 2 if options.tiny else options.steps
    ways = ["torch's default", OURS] if options.tiny else options.ways or list(WAYS)
    cores = os.cpu_count() or 1
    busy = 1 if options.tiny else 2 * cores
    for condition, loops in (("idle", 0), (f"{busy} busy loops", busy)):
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        threads = {}
        with busy_loops(loops):
            for _ in range(rounds):
                for way in ways:
                    step_seconds, threads[way] = run_way(way, steps)
                    seconds[way].append(step_seconds)

        best = min(median(values) for values in seconds.values())
        print(condition, flush=True)
        for way, values in seconds.items():
            step = median(values)
            spread = f"{1000 * min(values):.0f} to {1000 * max(values):.0f}"
            print(
                f"  {way:16} {threads[way]:2} threads {1000 * step:7.0f} ms a step"
                f" ({spread}) {step / best:5.2f} of the best"
            )


if __name__ == "__main__":
    main()
