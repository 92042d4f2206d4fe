"""What videotune adds to a training step and to a start, as ratios to a bare PyTorch
loop in the same run.

    python benchmarks/step.py [--rounds 6] [--steps 100] [--batch 8] [--starts 6]
    [--json FILE] [--tiny]

(a) host time per step outside forward, backward and optimizer; (b) seconds per step of
the whole loop (batches read from the cache, counted draws, journal, progress, control
file) over those of a bare loop of forward, backward and optimizer on the same inputs:
the median step of each of the alternating rounds, with a bootstrap interval; (c)
seconds from process start to the first step, and the peak memory until then, over those
of ``bare.py``, with a warm cache. Absolute times are noise; the ratios are the result.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from videotune.config.schema import Optimizer
from videotune.job.overrides import Overrides
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.step_batch import StepBatch
from videotune.planner.plan import make_plan
from videotune.planner.settings import chosen_for_run
from videotune.toy.dataset import write_dataset
from videotune.trainer.loop import train_steps
from videotune.trainer.optimizers import make_optimizer
from videotune.trainer.progress import write_step
from videotune.trainer.resume import open_run
from videotune.trainer.setup import build_trainer
from videotune.trainer.trainer import Trainer
from videotune.types import Batch

QUIET = ("sample_after=0", "validate_every=0", "save_every=0")


class NoBar:
    """The loop's progress bar, unseen; its text is still made."""

    def update(
        self, done: int, total: int, text: str = "", left: float | None = None
    ) -> None:
        """Nothing to show."""


def open_trainer(data: Path, out: Path, sets: Sequence[str]) -> Trainer:
    """A run of the toy preset, up to its first step."""
    words = Overrides(preset="toy", data=str(data), sets=(*QUIET, *sets))
    opened = open_run(words, out, None, chosen_for_run)
    return build_trainer(opened, out, make_plan(opened.job))


def only(one: StepBatch) -> Batch:
    """The samples of a step, which has some in a process that is alone."""
    assert one.batch is not None
    return one.batch


def bare_loop(
    trainer: Trainer, inputs: Sequence[StepBatch], optimizer: Any
) -> Iterator[float]:
    """Forward, backward, optimizer on inputs made beforehand; yields the seconds of
    each step.
    """
    made = []
    for one in inputs:
        t = one.t.view(-1, 1, 1, 1, 1)
        batch = only(one)
        made.append(
            (
                (1 - t) * batch.x0 + t * one.noise,
                one.t * 1000,
                batch.conditioning.text,
                one.noise - batch.x0,
            )
        )
    for x_t, told, text, target in made:
        begun = time.perf_counter()
        out = trainer.net(
            hidden_states=x_t,
            timestep=told,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
        (out - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield time.perf_counter() - begun


def our_loop(
    trainer: Trainer, records: Iterator[Any], steps: int
) -> Iterator[tuple[float, float]]:
    """The product's own loop; yields the seconds of each step, and those outside
    forward, backward and optimizer.
    """
    from videotune.runs.run_dir import poll_control

    late = None
    for _ in range(steps):
        begun = time.perf_counter()
        record = next(records)
        if late is not None:
            write_step(trainer, late, NoBar())
        late = record
        poll_control(trainer.run)
        took = time.perf_counter() - begun
        seconds = record.clock.read()
        yield (
            took,
            took - seconds["forward"] - seconds["backward"] - seconds["optimizer"],
        )


def bootstrap(ratios: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """95 % interval of the mean of the rounds' ratios."""
    pick = random.Random(0)
    means = sorted(
        statistics.fmean(pick.choices(ratios, k=len(ratios))) for _ in range(draws)
    )
    return means[draws // 40], means[-draws // 40]


def steps_part(folder: Path, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """(a) and (b)."""
    sets = (f"steps={rounds * steps + 60}", f"batch_size={batch}")
    trainer = open_trainer(folder / "clips", folder / "run", sets)
    inputs = [make_step_batch(trainer.source, step) for step in range(1, steps + 1)]
    bare_optimizer = make_optimizer(
        {"transformer": list(trainer.parameters.values())}, Optimizer()
    )
    records = train_steps(trainer)
    ratios = []
    outside = []
    whole = []
    warm = min(50, steps)
    (
        list(our_loop(trainer, records, warm)),
        list(bare_loop(trainer, inputs[:warm], bare_optimizer)),
    )  # the heap grows first
    for index in range(rounds):
        parts: dict[str, float] = {}
        for which in ("ours", "bare") if index % 2 else ("bare", "ours"):
            if which == "ours":
                pairs = list(our_loop(trainer, records, steps))
                parts["ours"] = statistics.median(took for took, _ in pairs)
                outside += [rest for _, rest in pairs]
                whole += [took for took, _ in pairs]
            else:
                parts["bare"] = statistics.median(
                    bare_loop(trainer, inputs, bare_optimizer)
                )
        ratios.append(parts["ours"] / parts["bare"])
        print(
            f"round {index + 1}: ours {parts['ours'] * 1e3:.1f} ms, bare {parts['bare'] * 1e3:.1f} ms, {ratios[-1]:.3f}"
        )
    trainer.journal.close()
    low, high = bootstrap(ratios)
    allowed = 0.003 + 0.01 * statistics.median(whole)
    return {
        "host_outside_ms": {
            "median": statistics.median(outside) * 1e3,
            "allowed": allowed * 1e3,
        },
        "step_ms": statistics.median(whole) * 1e3,
        "step_ratio": {
            "mean": statistics.fmean(ratios),
            "low": low,
            "high": high,
            "allowed": 1.05,
            "rounds": ratios,
        },
    }


def peak(pid: int) -> int:
    """Peak resident kilobytes of a living process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise RuntimeError("no VmHWM")


def start_ours(folder: Path, index: int) -> tuple[float, int]:
    """(seconds, kB) until the first step's line is in the journal."""
    run = folder / f"start-{index}"
    command = [
        sys.executable,
        "-m",
        "videotune",
        "train",
        "--preset",
        "toy",
        "--data",
        str(folder / "clips"),
    ]
    command += [
        "--out",
        str(run),
        "--set",
        "steps=1",
        *(word for text in QUIET for word in ("--set", text)),
    ]
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    journal = run / "journal.jsonl"
    while not (journal.is_file() and '"kind": "step"' in journal.read_text()):
        if process.poll() is not None:
            raise RuntimeError(f"{command} ended with {process.returncode}")
        time.sleep(0.002)
    figures = time.perf_counter() - begun, peak(process.pid)
    process.kill()
    process.wait()
    return figures


def start_bare(transformer: Path, batch: Path) -> tuple[float, int]:
    """(seconds, kB) until the bare script says that it has taken its step."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("bare.py")),
        str(transformer),
        str(batch),
    ]
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("first step")
    taken = time.perf_counter() - begun
    _, _, usage = os.wait4(process.pid, 0)
    return taken, usage.ru_maxrss


def starts_part(folder: Path, starts: int) -> dict[str, Any]:
    """(c)."""
    trainer = open_trainer(folder / "clips", folder / "warm", ("steps=2",))
    one = make_step_batch(trainer.source, 1)
    trainer.journal.close()
    batch = folder / "batch.safetensors"
    tensors = {
        "x0": only(one).x0,
        "noise": one.noise,
        "t": one.t,
        "text": only(one).conditioning.text,
    }
    save_file({key: value.contiguous() for key, value in tensors.items()}, batch)
    transformer = trainer.family.folder / "transformer"
    ours = []
    bare = []
    for index in range(starts + (starts > 1)):
        pair = start_ours(folder, index), start_bare(transformer, batch)
        if index == 0 and starts > 1:
            continue  # fills the file cache
        ours.append(pair[0])
        bare.append(pair[1])
        (took, kilobytes), (their_took, their_kilobytes) = pair
        print(
            f"start {index}: ours {took:.2f} s {kilobytes >> 10} MB, bare {their_took:.2f} s {their_kilobytes >> 10} MB"
        )
    seconds = statistics.median(o[0] / b[0] for o, b in zip(ours, bare, strict=True))
    memory = statistics.median(o[1] / b[1] for o, b in zip(ours, bare, strict=True))
    return {
        "start_ratio": {"median": seconds, "allowed": 1.2},
        "peak_memory_ratio": {"median": memory, "allowed": 1.3},
    }


def main() -> None:
    """Run the parts and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--batch",
        type=int,
        default=8,
        help="8: a step as long as in published comparisons",
    )
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a rehearsal of a few seconds; its figures mean nothing",
    )
    words = parser.parse_args()
    if words.tiny:
        words.rounds = 1
        words.steps = 2
        words.batch = 1
        words.starts = 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = 2 if words.tiny else 24
        write_dataset(folder / "clips", concept_clips=count, reminder_clips=count)
        figures = starts_part(folder, words.starts) | steps_part(
            folder, words.rounds, words.steps, words.batch
        )
    print(json.dumps(figures, indent=2))
    if words.json:
        words.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
