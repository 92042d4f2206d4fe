"""The part of the picture that counts: what is padded has no weight in the loss."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from videotune.data.clip_sizes import padded_box
from videotune.types import Window


def picture_mask(
    windows: Sequence[Window], sizes: Mapping[str, tuple[int, int]], x0: Tensor
) -> Tensor:
    """Return 1 where a latent cell shows some of the picture, 0 where it shows only the
    black border.

    Args:
        windows: the samples' windows.
        sizes: (width, height) in pixels of each clip, by id.
        x0: latents of the samples (B,C,F,H,W).

    Returns:
        (B,1,F,1,1), or (B,1,F,H,W) if a window is padded.
    """
    frames, rows, columns = x0.shape[2:]
    if all(window.resize != "pad" for window in windows):
        return torch.ones(len(windows), 1, frames, 1, 1)

    masks = torch.ones(len(windows), 1, frames, rows, columns)
    for mask, window in zip(masks, windows, strict=True):
        if window.resize != "pad":
            continue
        shape = window.shape
        clip_width, clip_height = sizes[window.clip_id]
        top, left, picture_height, picture_width = padded_box(
            clip_width, clip_height, (shape.height, shape.width)
        )
        has_rows = _covered_cells(top, picture_height, rows, shape.height // rows)
        cell_width = shape.width // columns
        has_columns = _covered_cells(left, picture_width, columns, cell_width)
        if window.flip:
            # It is not known here which variant is mirrored, so cells count that hold
            # picture in either; borders differ by a pixel if their sum is odd.
            has_columns |= has_columns.flip(0)
        mask[:, :, ~has_rows] = 0
        mask[..., ~has_columns] = 0
    return masks


def _covered_cells(begin: int, length: int, cells: int, cell_size: int) -> Tensor:
    """Return which of ``cells`` cells of ``cell_size`` pixels hold pixels of [begin,
    begin + length): (cells,) bool.
    """
    cell_begins = torch.arange(cells) * cell_size
    cell_ends = cell_begins + cell_size
    begins_before_end = cell_begins < begin + length
    ends_after_begin = cell_ends > begin
    return begins_before_end & ends_after_begin
