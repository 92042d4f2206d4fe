"""The options of ``videotune plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from videotune.cli.options import Opt
from videotune.errors import VideotuneError

TimestepsOption = Annotated[
    bool,
    Opt("--timesteps", help="show the trained noise levels instead; needs no clips"),
]


def parse_vram(text: str | None) -> float | None:
    """Return the GB of "16", "16 GB" or "16GB"."""
    if text is None:
        return None
    from videotune.planner.gpus import memory_in_name

    has_unit = not text.strip()[-1:].isdigit()
    gigabytes = memory_in_name(text if has_unit else f"{text} GB")
    if gigabytes is None or gigabytes < 1:
        raise VideotuneError(
            f"--vram {text[:40]!r}: not a number of GB of at least 1. Write --vram 16"
        )
    return gigabytes


WaysOption = Annotated[
    bool,
    Opt(
        "--ways",
        help="compare the ways of computing a step: checkpointing, compile, eight bits",
    ),
]
VramOption = Annotated[
    float | None,
    Opt(
        parser=str,
        callback=parse_vram,
        metavar="GB",
        help="memory of the card in GB, as it is sold: print what fits, and how",
    ),
]
CardOption = Annotated[
    str | None,
    Opt(
        help="the card by its name, such as 'rtx 4090': its memory, and seconds a step"
    ),
]
GpusOption = Annotated[
    int | None,
    Opt(
        min=1,
        max=1024,
        help="plan so many of these cards in each machine, and how they share samples (default: context_parallel)",
    ),
]
PriceOption = Annotated[
    float | None,
    Opt(
        min=0.0001,
        max=1e9,
        help="price of an hour of each machine: print what the run costs",
    ),
]
NodesOption = Annotated[
    int,
    Opt(min=1, max=4096, help="plan so many machines with these cards"),
]
NetworkOption = Annotated[
    float | None,
    Opt(
        min=0.1,
        metavar="GBIT",
        help="Gbit/s of each machine's network (default: that of the card's usual machines)",
    ),
]
SimulateOption = Annotated[
    bool,
    Opt(
        "--simulate",
        help="simulate the steps: work of each process, cache reads, checkpoints",
    ),
]
ScheduleOption = Annotated[
    Path | None,
    Opt(
        dir_okay=False,
        help="with --simulate: write who trains which samples into a file, a JSON line a step",
    ),
]
StorageOption = Annotated[
    float | None,
    Opt(
        min=0.001,
        metavar="GB",
        help="with --simulate: GB a second that the disk of the run folder takes (default: 2)",
    ),
]
OutOption = Annotated[
    Path,
    Opt("--out", help="the run folder, whose disk must have room"),
]
Views = Annotated[
    list[int] | None,
    Opt(min=1, help="print the steps for N views (default: 10, 20, 50, 100)"),
]


def refuse_without_simulation(
    schedule: Path | None, storage: float | None, *, simulate: bool
) -> None:
    """Raise VideotuneError for options that only a simulation reads."""
    if simulate:
        return
    for name, value in (("--schedule", schedule), ("--storage", storage)):
        if value is not None:
            raise VideotuneError(f"{name}: only a simulation uses it. Add --simulate")
