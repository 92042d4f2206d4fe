"""Print the rows of docs/wan.md's table "What the presets need", as ``plan --vram``
calculates them: python scripts/write_wan_memory.py [ROW ...]

ROW is a number from 0; without one all rows are calculated, which takes some minutes. The
clip is one of six seconds in 720x480 at 24 frames a second.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plan_tables import print_rows, write_example_clip

from videotune.commands.plan import plan

PHASES = ("training", "encoding text", "encoding clips", "preview")


@dataclass(frozen=True)
class Row:
    """A preset, a card's memory in GiB, and settings beside those of the preset."""

    preset: str
    card: int
    sets: tuple[str, ...] = ()
    name: str = ""


AUTO = ("weight_dtype=auto",)

ROWS = (
    Row("wan 2.2 LoRA 8GB", 8),
    Row("wan 2.2 LoRA 8GB", 8, AUTO, "the same, `weight_dtype` auto"),
    Row("wan 2.2 LoRA", 12),
    Row("wan 2.2 LoRA", 16, AUTO, "the same, `weight_dtype` auto"),
    Row("wan 2.2 Embedding", 16),
    Row("wan 2.2 Embedding", 24, AUTO, "the same, `weight_dtype` auto"),
    Row("wan 2.2 Finetune", 180),
    Row(
        "wan 2.2 Finetune",
        80,
        ("text_encoder.train=false",),
        "the same, `text_encoder.train` false",
    ),
    Row("wan 2.2 A14B LoRA 8GB", 8),
    Row("wan 2.2 A14B LoRA 8GB", 8, AUTO, "the same, `weight_dtype` auto"),
    Row("wan 2.2 A14B LoRA 12GB", 12),
    Row("wan 2.2 A14B LoRA 24GB", 24),
    Row("wan 2.2 A14B I2V LoRA 24GB", 24),
)


def write_clip(folder: Path) -> None:
    """Write one clip with its caption."""
    write_example_clip(folder, np.zeros((144, 480, 720, 3), np.uint8), 24)


def line_of(row: Row, clips: Path) -> str:
    """Return a row of the table as Markdown, in GiB."""
    result = plan(
        preset=row.preset, vram=row.card, data=str(clips), sets=list(row.sets)
    ).plan
    phases = result["device"]["phases"]
    needs = []
    for name in PHASES:
        phase = phases.get(name)
        needs.append("–" if phase is None else gibibytes(phase["need_bytes"]))
    host = f"{result['host']['need_bytes'] / 2**30:.0f}"
    cells = (row.name or row.preset, f"{row.card} GB", *needs, host)
    return f"| {' | '.join(cells)} |"


def gibibytes(size: float) -> str:
    """Return bytes in GiB with three digits."""
    value = size / 2**30
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    print_rows(ROWS, sys.argv[1:], write_clip, line_of)
