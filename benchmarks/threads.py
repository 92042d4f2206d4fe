"""Seconds of a training step of the toy by how OpenMP's threads are set, on a machine
that is idle and on one whose cores are taken by busy loops.

python benchmarks/threads.py [--rounds 3] [--tiny] prints a line a way, with its ratio to
the best of the same condition, and the ratio of our setting with its bound; it takes less
than a minute on two idle cores. Ways alternate within a round, so that a load from
elsewhere hits all of them. Torch's default takes up to half a minute a step beside busy
loops: there it is measured with --ways only.
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

SLOW = "torch's default"

WAYS: dict[str, dict[str, str]] = {
    SLOW: {},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    OURS: {},
}
SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
BUSY_LOOP = [sys.executable, "-c", "while True: pass"]


BOUND = 1.05
"""The most that a step with our setting may take, as a share of the best way's."""


def serve_steps(way: str) -> None:
    """Measure steps whenever a line with seconds comes on standard input.

    Each answer is the median seconds of a step, and the number of threads.
    """
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

    def step() -> float:
        begun = time.perf_counter()
        output = net(latents, t, text, return_dict=False)[0]
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begun

    step()
    print("ready", flush=True)
    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        seconds = [step()]
        while time.perf_counter() < end:
            seconds.append(step())
        print(median(seconds), torch.get_num_threads(), flush=True)


class Child:
    """A process that measures steps one way. It imports its libraries only once."""

    def __init__(self, way: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name not in SETTINGS
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", way],
            env=environment | WAYS[way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> list[str]:
        """Return the words of the next line."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words:
            raise RuntimeError("the process ended; its error is above")
        return words

    def measure(self, turn: float) -> tuple[float, int]:
        """Return the seconds of a step over a turn of some seconds, and the threads."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{turn}\n")
        self.process.stdin.flush()
        seconds, threads = self.read()
        return float(seconds), int(threads)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


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


def measure_condition(
    children: dict[str, Child], rounds: int, turn: float
) -> dict[str, tuple[list[float], int]]:
    """Return the seconds of a step in each round, and the threads, of each way."""
    measured: dict[str, tuple[list[float], int]] = {}
    for _ in range(rounds):
        for way, child in children.items():
            seconds, threads = child.measure(turn)
            earlier, _ = measured.get(way, ([], 0))
            measured[way] = ([*earlier, seconds], threads)
    return measured


def print_condition(
    condition: str, measured: dict[str, tuple[list[float], int]]
) -> None:
    """Print a line a way, and whether ours keeps to its bound."""
    best = min(median(seconds) for seconds, _ in measured.values())
    print(condition, flush=True)
    for way, (seconds, threads) in measured.items():
        step = median(seconds)
        spread = f"{1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}"
        print(
            f"  {way:16} {threads:2} threads {1000 * step:7.0f} ms a step"
            f" ({spread}) {step / best:5.2f} of the best"
        )
    if OURS in measured:
        ratio = median(measured[OURS][0]) / best
        verdict = "within" if ratio <= BOUND else "beyond"
        print(f"  ours is {ratio:.3f} of the best, {verdict} the bound of {BOUND}")


def main() -> None:
    """Measure every way under both conditions and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", type=float, default=0.7, help="seconds of a turn")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ways", nargs="*", choices=WAYS, help="only these")
    parser.add_argument("--child", choices=WAYS)
    options = parser.parse_args()
    if options.child:
        serve_steps(options.child)
        return

    ways = [SLOW, OURS] if options.tiny else options.ways or list(WAYS)
    cores = os.cpu_count() or 1
    busy = 1 if options.tiny else 2 * cores
    children: dict[str, Child] = {}
    try:
        for (
            way
        ) in ways:  # one after the other, as their imports would wait for each other
            children[way] = Child(way)
            children[way].read()

        rounds = 1 if options.tiny else options.rounds
        turn = 0.01 if options.tiny else options.turn
        print_condition("idle", measure_condition(children, rounds, turn))
        if not options.ways and not options.tiny:
            children.pop(SLOW).close()
        with busy_loops(busy):
            measured = measure_condition(children, rounds, turn)
        print_condition(f"{busy} busy loops", measured)
    finally:
        for child in children.values():
            child.close()


if __name__ == "__main__":
    main()
