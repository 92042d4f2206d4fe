"""What a journal of a million steps costs: CPU seconds and memory of reading it,
cutting it, and writing the page.

``python benchmarks/journal.py [STEPS] [--tiny]``
"""

import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from videotune.reporter.build import write_report
from videotune.runs.journal import History


def write(run: Path, steps: int) -> None:
    """Lines as a training writes them: a step of four samples each, a save and the
    views at each thousandth.
    """
    names = [f"{number:012x}@0.000+17x64x64" for number in range(400)]
    draw = random.Random(0)
    seconds = {
        "data": 0.0001,
        "experts": 0.0,
        "forward": 0.1234,
        "backward": 0.1234,
        "optimizer": 0.01,
    }
    with (run / "journal.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            by_t = [draw.random() if place == step % 9 else None for place in range(9)]
            line: dict[str, Any] = {
                "kind": "step",
                "step": step,
                "loss": draw.random(),
                "mse": draw.random(),
            }
            line |= {
                "by_t": by_t,
                "lr": {"transformer": 0.001},
                "grad_norm": draw.random(),
            }
            line |= {
                "window_ids": draw.choices(names, k=4),
                "seconds": seconds,
                "captions": [0, 0, 1, 0],
            }
            file.write(json.dumps(line) + "\n")
            if step % 1000 == 0:
                views = {
                    "kind": "views",
                    "time": 1.0,
                    "step": step,
                    "clips": dict.fromkeys(names, step),
                }
                save = {
                    "kind": "save",
                    "time": 1.0,
                    "step": step,
                    "path": f"checkpoints/step-{step}",
                }
                file.write(json.dumps(save) + "\n" + json.dumps(views) + "\n")


def measured(what: str, work: Callable[[], Any]) -> Any:
    """Print the CPU seconds of some work, and the most memory so far."""
    begun = time.process_time()
    done = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{what}: {time.process_time() - begun:.1f} s, {peak:.0f} MB at the peak so far"
    )
    return done


def main() -> None:
    """Measure a journal of so many steps."""
    named = [word for word in sys.argv[1:] if word != "--tiny"]
    steps = int(named[0]) if named else 1_000_000 if "--tiny" not in sys.argv else 200
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write(run, steps)
        measured("nothing", lambda: None)
        history = measured("reading", lambda: History(run))
        measured("cutting 500 steps off", lambda: history.cut(steps - 500))
        measured(
            "the page that ends a resume",
            lambda: write_report(run, (history.events, history.steps)),
        )


if __name__ == "__main__":
    main()
