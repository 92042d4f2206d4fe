"""What previews that skip blocks save, and what they cost (``sample.cache_threshold``).

    python benchmarks/previews.py [--thresholds 0.02 0.05 0.1 0.2 0.4] [--steps 30]
    [--guidance 2] [--captions 24] [--out FILE] [--picture FILE] [--tiny]

The toy base model draws captions that it was taught, with its own scheduler. The same
samples are drawn with each threshold. Printed are the blocks that run as a share of all
blocks of the plain loop, the seconds as a share of the plain loop's, how far pixels are
from the plain samples' (of 255), and how many samples show what their caption says.
"""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from toy_runs import Clip, share_drawn_right

from videotune.commands.sample import Sampler, open_sampler, render
from videotune.commands.sample_options import SampleOptions
from videotune.data.video_writer import write_sheet
from videotune.files import write_json
from videotune.toy.shapes import KNOWN, caption

SHEET_CLIPS = 3
SHEET_FRAMES = 3
LABEL_WIDTH = 90


@dataclass(frozen=True)
class Row:
    """What was measured with one threshold."""

    threshold: float
    blocks: float
    """Blocks that ran, as a share of those of the plain loop."""
    seconds: float
    """Time of sampling and decoding, likewise."""
    pixels: float
    """Mean absolute difference from the plain samples, of 255."""
    drawn_right: float


def count_blocks(sampler: Sampler) -> Counter[str]:
    """Return a count of the blocks that run from now on, under "blocks"."""
    count: Counter[str] = Counter()

    def count_block(*_: Any) -> None:
        count["blocks"] += 1

    for net in sampler.nets.values():
        for path in sampler.family.spec.blocks:
            blocks = net.get_submodule(path)
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                # A block that is skipped is called, but not what is in it.
                next(block.children()).register_forward_hook(count_block)
    return count


def measure(arguments: argparse.Namespace) -> tuple[list[Row], list[list[Clip]]]:
    """Return a row and the samples of the plain loop and of each threshold."""
    options = SampleOptions(
        ("",),
        base="asset:toy",
        sets=(
            f"sample.steps={arguments.steps}",
            f"sample.guidance={arguments.guidance}",
        ),
    )
    sampler = open_sampler(options)
    count = count_blocks(sampler)
    looks = KNOWN[: arguments.captions]
    prompts = [caption(*look) for look in looks]
    seeds = [5000 + index for index in range(len(looks))]

    rows: list[Row] = []
    clips_of_rows: list[list[Clip]] = []
    plain_blocks = 0
    plain_seconds = 0.0
    for threshold in (0.0, *arguments.thresholds):
        count.clear()
        settings = replace(sampler.settings, cache_threshold=threshold)
        begun = time.perf_counter()
        clips = render(replace(sampler, settings=settings), prompts, seeds, title="")
        seconds = time.perf_counter() - begun
        if not rows:
            plain_blocks = count["blocks"]
            plain_seconds = seconds
            clips_of_rows.append(clips)
        difference = _mean_difference(clips_of_rows[0], clips)
        row = Row(
            threshold=threshold,
            blocks=round(count["blocks"] / plain_blocks, 3),
            seconds=round(seconds / plain_seconds, 3),
            pixels=round(difference, 2),
            drawn_right=share_drawn_right(clips, looks),
        )
        if rows:
            clips_of_rows.append(clips)
        rows.append(row)
        print(row, flush=True)
    return rows, clips_of_rows


def _mean_difference(first: Sequence[Clip], second: Sequence[Clip]) -> float:
    pairs = zip(first, second, strict=True)
    return float(np.mean([np.abs(a.astype(int) - b.astype(int)) for a, b in pairs]))


def show(rows: Sequence[Row]) -> None:
    """Print the table of the documentation."""
    print("| threshold | blocks | seconds | pixels | drawn right |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.threshold:g} | {row.blocks:.0%} | {row.seconds:.0%} "
            f"| {row.pixels:.1f} | {row.drawn_right:.0%} |"
        )


def draw_sheet(
    path: Path, rows: Sequence[Row], clips_of_rows: Sequence[Sequence[Clip]]
) -> None:
    """Write a picture with a row of frames for each threshold."""
    sheet = []
    for row, clips in zip(rows, clips_of_rows, strict=True):
        frames: list[Any] = []
        for clip in clips[:SHEET_CLIPS]:
            last = len(clip) - 1
            for number in range(SHEET_FRAMES):
                frames.append(clip[last * number // (SHEET_FRAMES - 1)])
        sheet.append((f"{row.threshold:g}", frames))
    write_sheet(path, sheet, LABEL_WIDTH)


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--thresholds", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.4])
    add("--steps", type=int, default=30)
    add("--guidance", type=float, default=2.0)
    add("--captions", type=int, default=24)
    add("--out", type=Path)
    add("--picture", type=Path)
    add("--tiny", action="store_true", help="seconds, with figures that mean nothing")

    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.thresholds = [0.2]
        arguments.steps = 3
        arguments.captions = 2
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse()
    rows, clips_of_rows = measure(arguments)
    show(rows)

    if arguments.out:
        write_json(
            arguments.out,
            {
                "steps": arguments.steps,
                "guidance": arguments.guidance,
                "captions": arguments.captions,
                "rows": [asdict(row) for row in rows],
            },
        )

    if arguments.picture:
        draw_sheet(arguments.picture, rows, clips_of_rows)


if __name__ == "__main__":
    main()
