"""Print the rows of the README's table "Does it fit my card?", as `plan --card` calculates
them: python scripts/write_card_table.py [ROW ...]

ROW is a number from 0; without one all rows are calculated, which takes some minutes. The
clip is one of eight seconds in 1280x720 at 24 frames a second.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plan_tables import print_rows, write_example_clip

from videotune.commands.plan import plan
from videotune.config.base_models import download_size
from videotune.planner.gpus import find_card
from videotune.presets.shipped import read_preset

SECONDS = 8
FPS = 24


@dataclass(frozen=True)
class Row:
    """A card and a preset."""

    card: str
    preset: str
    mark: str = ""
    """Reference to a footnote."""


ROWS = (
    Row("RTX 4060", "wan 2.1 1.3B LoRA 16GB"),
    Row("RTX 4060", "wan 2.2 LoRA 8GB", mark=" ¹"),
    Row("RTX 4060", "wan 2.2 A14B LoRA 8GB"),
    Row("RTX 3060 12GB", "ltx 2B LoRA 12GB"),
    Row("RTX 4070", "wan 2.2 LoRA"),
    Row("RTX 4070", "wan 2.2 A14B LoRA 12GB"),
    Row("RTX 4080", "hunyuan 1.5 LoRA 16GB"),
    Row("RTX 4080", "hunyuan 13B LoRA 16GB"),
    Row("RTX 4070 Ti Super", "wan 2.1 1.3B LoRA 16GB"),
    Row("RTX 4080", "kandinsky 5 Lite LoRA 16GB"),
    Row("RTX 3090", "cogvideox 5B LoRA 24GB"),
    Row("RTX 4090", "wan 2.2 A14B LoRA 24GB"),
    Row("RTX 4090", "hunyuan 1.5 LoRA 24GB"),
    Row("RTX 4090", "ltx 13B LoRA 24GB"),
    Row("RTX 4090", "ltx 2.3 LoRA 24GB"),
    Row("RTX 5090", "ltx 2.3 LoRA 32GB"),
    Row("L40S", "wan 2.1 14B LoRA 48GB"),
)


def write_clip(folder: Path) -> None:
    """Write one clip with its caption: a bar that crosses the picture."""
    frames = np.zeros((SECONDS * FPS, 720, 1280, 3), np.uint8)
    for index, frame in enumerate(frames):
        frame[:, 8 * index : 8 * index + 60] = 200
    write_example_clip(folder, frames, FPS)


def line_of(row: Row, clips: Path) -> str:
    """Return a row of the table as Markdown."""
    result = plan(preset=row.preset, card=row.card, data=str(clips)).plan
    if not result["fits"]:
        raise SystemExit(f"{row.preset} does not fit {row.card}: change the row")

    frames, height, width = result["buckets"][0]["shape"].split("x")
    host = result["host"]["need_bytes"] / 2**30
    card = find_card(row.card)
    gigabytes = round(card.vram / 2**30)
    name = row.card.removesuffix(f" {gigabytes}GB")
    cells = (
        f"{gigabytes} GB ({name})",
        f"`{row.preset}`{row.mark}",
        f"{width}x{height}, {frames}",
        f"{host:.0f} GiB",
        hours_text(result["hours"] + result["hours_beside"]),
        str(download_size(str(read_preset(row.preset)["base_model_name"])) or ""),
    )
    return f"| {' | '.join(cells)} |"


def hours_text(hours: float) -> str:
    """Return hours in halves, from five up in whole ones."""
    rounded = round(hours) if hours >= 5 else round(2 * hours) / 2
    return "1 hour" if rounded == 1 else f"{rounded:g} hours"


if __name__ == "__main__":
    print_rows(ROWS, sys.argv[1:], write_clip, line_of)
