"""Predict samples of a batch in groups, where a network takes one kind at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from videotune.lazy import torch
from videotune.types import take_rows

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
        v = predict(take_rows(x_t, rows), take_rows(t, rows), batch.take(rows))
        predictions |= zip(rows, v, strict=True)
    return torch.stack([predictions[row] for row in range(len(groups))])
