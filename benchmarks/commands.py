"""CPU seconds of commands that answer at once, as ratios to ``python -c "import torch"``.

python benchmarks/commands.py [--tiny] [--rounds 3] [--presets NAME ...] runs `--help`,
`doctor` and a plan of each preset in turn, each in a fresh process with an empty cache,
and prints the median of the rounds. The bounds are those of an idle core that imports
torch in 1.2 s; on others the ratio says more.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from videotune.presets import shipped
from videotune.toy.dataset import encode_clip

PROGRAM = (sys.executable, "-m", "videotune")
TORCH = (sys.executable, "-c", "import torch")
TINY_PRESETS = ("wan 2.1 1.3B LoRA 16GB",)
FITS_OR_NOT = (0, 2)
"""Exit codes of a plan."""


@dataclass(frozen=True)
class Row:
    """A command and the CPU seconds that it may take."""

    title: str
    command: tuple[str, ...]
    bound: float


def rows(presets: Sequence[str]) -> list[Row]:
    """Return the commands that are measured."""
    result = [
        Row("--help", (*PROGRAM, "--help"), 0.3),
        Row("doctor", (*PROGRAM, "doctor"), 1.2),
    ]
    for preset in presets:
        command = (*PROGRAM, "plan", "clips", "--preset", preset, "--card", "rtx 4090")
        result.append(Row(f"plan, {preset}", command, 2.5))
    return result


def write_example_clip(folder: Path) -> None:
    """Write one clip of six seconds in 1280x720, with its caption."""
    folder.mkdir()
    frames = np.zeros((144, 720, 1280, 3), np.uint8)
    for index, frame in enumerate(frames):
        frame[:, 8 * index : 8 * index + 60] = 200
    encode_clip(folder / "bar.mp4", frames, 24)
    (folder / "bar.txt").write_text("a bar crosses the picture\n", encoding="utf-8")


def cpu_seconds(command: Sequence[str], folder: Path) -> float:
    """Return the CPU seconds of a command and of all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode not in FITS_OR_NOT:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(command: Sequence[str], rounds: int) -> float:
    """Return the median CPU seconds of a command, each time beside clips without a
    cache.
    """
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            write_example_clip(Path(folder) / "clips")
            seconds.append(cpu_seconds(command, Path(folder)))
    return median(seconds)


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="one preset, once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--presets", nargs="*")
    arguments = parser.parse_args()
    rounds = 1 if arguments.tiny else arguments.rounds
    presets = arguments.presets
    if presets is None:
        presets = TINY_PRESETS if arguments.tiny else shipped.preset_names()

    torch_seconds = measured(TORCH, rounds)
    print(f"{'import torch':<46}{torch_seconds:6.2f} s")
    for row in rows(presets):
        seconds = measured(row.command, rounds)
        ratio = seconds / torch_seconds
        print(
            f"{row.title:<46}{seconds:6.2f} s{ratio:6.2f} x torch, bound {row.bound} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
