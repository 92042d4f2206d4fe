"""Predict samples of a batch in groups, where a network takes one kind at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from videotune.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.types import Batch


def predict_in_groups(
    predict: Callable[[Tensor, Tensor, Batch], Tensor],
    groups: Sequence[Hashable],
    x_t: Tensor,
    t: Tensor,
    batch: Batch,
) -> Tensor:
    """Return the predictions of samples that only those of their own group may see.

    Args:
        predict: returns v for noisy latents, noise levels and their batch.
        groups: the group of each sample.
        x_t: noisy latents (B,C,F,H,W).
        t: noise levels (B,).
        batch: the samples.

    Returns:
        v (B,C,F,H,W), in the order of the batch.
    """
    distinct_groups = list(dict.fromkeys(groups))
    if len(distinct_groups) == 1:
        return predict(x_t, t, batch)

    predictions: dict[int, Tensor] = {}
    for group in distinct_groups:
        rows = [row for row, other in enumerate(groups) if other == group]
        v = predict(pick(x_t, rows), pick(t, rows), take(batch, rows))
        predictions |= zip(rows, v.split(1), strict=True)
    return torch.cat([predictions[row] for row in range(len(groups))])


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return the samples of a batch at these positions, in their order."""
    return replace(
        batch.map(partial(pick, rows=rows)),
        captions=tuple(batch.captions[row] for row in rows),
        window_ids=tuple(batch.window_ids[row] for row in rows),
        prior_preservation=tuple(batch.prior_preservation[row] for row in rows),
    )


def pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a tensor; the device is not asked for anything."""
    return torch.cat([values[row : row + 1] for row in rows])
