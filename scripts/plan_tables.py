"""What the scripts that print tables of plans share: an example clip, and the rows that
the command line names.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from videotune.toy.dataset import encode_clip

RowType = TypeVar("RowType")


def write_example_clip(folder: Path, frames: np.ndarray, fps: int) -> None:
    """Write one clip with its caption.

    Args:
        folder: where to.
        frames: uint8 (T,H,W,3).
        fps: frames a second.
    """
    encode_clip(folder / "bar.mp4", frames, fps)
    (folder / "bar.txt").write_text("a bar crosses the picture\n", encoding="utf-8")


def print_rows(
    rows: Sequence[RowType],
    numbers: Sequence[str],
    write_clip: Callable[[Path], None],
    line_of: Callable[[RowType, Path], str],
) -> None:
    """Print the rows of a table, each as soon as it is calculated.

    Args:
        rows: all rows.
        numbers: which of them, from 0. Empty: all.
        write_clip: writes the clip that they are planned for into a folder.
        line_of: returns a row as Markdown, planned for the clips of a folder.
    """
    chosen = [rows[int(number)] for number in numbers] or list(rows)
    with TemporaryDirectory() as folder:
        clips = Path(folder)
        write_clip(clips)
        for row in chosen:
            print(line_of(row, clips), flush=True)
