"""The denoising loss, given (t, noise): the heart of the trainer, shared by training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from videotune.diffusion.objective import Objective
from videotune.types import Batch, Family, StepOut


def denoising_loss(
    family: Family,
    net: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
    target: Tensor | None = None,
) -> StepOut:
    """s·w(t)·(‖e‖² + λ‖Δe‖²) / (1 + 2λ(F - 1)/F) with e = v_θ(x_t, t, c) - v, over what ``batch.weight`` counts.

    t (B,), noise (B,C,F,H,W) float32, both drawn by the caller; s is ``batch.scale``; ``target`` (B,C,F,H,W) takes the
    place of the data's v, see ``prior_target``. ``per_clip`` is what ``loss`` is the mean of; ``mse`` is ‖e‖² alone, so
    that runs with other weights, scales and λ compare.
    """
    x_t, v = noisy(objective, batch, t, noise)
    prediction = family.predict(net, x_t, t, batch).to(v.dtype)
    assert prediction.shape == v.shape, f"predicted {tuple(prediction.shape)} for latents {tuple(v.shape)}"
    error = prediction - (v if target is None else target)
    mse = weighted_mean(error.square(), batch.weight)  # (B,)
    per_clip = mse
    if objective.temporal_consistency > 0:
        per_clip = with_flicker(mse, error, batch.weight, objective.temporal_consistency)
    per_clip = batch.scale * objective.weight(t) * per_clip
    return StepOut(per_clip.mean(), mse.detach(), per_clip.detach(), t)


def noisy(objective: Objective, batch: Batch, t: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """What the network sees and what it should say of it: (x_t, v), (B,C,F,H,W) each; t (B,)."""
    path = objective.path(t)  # (B,1,1,1,1) each
    x_t = path.alpha * batch.x0 + path.sigma * noise
    v = path.d_alpha * batch.x0 + path.d_sigma * noise
    x_t = torch.where(batch.given, batch.x0, x_t)  # given frames stay clean
    x_t = torch.where(batch.dropped, noise, x_t)  # dropped frames say nothing
    return x_t, v


def prior_target(
    family: Family,
    base: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
    anchored: Sequence[int],
) -> Tensor:
    """v (B,C,F,H,W), for the samples in ``anchored`` the one that ``base`` predicts: a target for ``denoising_loss``.

    What the base says of the same x_t, t and caption is what a regularization sample must stay at (Li & Hoiem 2016,
    "Learning without forgetting", arXiv 1606.09282). Those samples alone run through ``base``, without a graph.
    """
    x_t, v = noisy(objective, batch, t, noise)

    def pick(x: Tensor) -> Tensor:
        return torch.stack([x[i] for i in anchored])  # by plain numbers: an index tensor would wait for the device

    part = replace(
        batch.map(pick),
        captions=tuple(batch.captions[i] for i in anchored),
        window_ids=tuple(batch.window_ids[i] for i in anchored),
    )
    with torch.no_grad():
        said = family.predict(base, pick(x_t), pick(t), part).to(v.dtype)
    target = list(v)
    for i, answer in zip(anchored, said, strict=True):
        target[i] = answer
    return torch.stack(target)


def with_flicker(mse: Tensor, error: Tensor, weight: Tensor, strength: float) -> Tensor:
    """(mse + λ‖Δe‖²) / (1 + 2λ(F - 1)/F), (B,): errors should not flicker; the optimum is unchanged.

    Δe is the error's difference between neighbouring latent frames, over pairs that both count, and its square is summed
    and divided by the same count as mse's: F frames have F - 1 pairs, and white error has E(Δe)² = 2E(e²), so the
    divisor keeps the loss's scale. Where frames do not count, (F - 1)/F is the pairs that count over the frames that count.
    """
    # The lesser of the two weights, not their product: halving every weight must change nothing.
    pairs = torch.minimum(weight[:, :, 1:], weight[:, :, :-1])
    share = _ratio(pairs.flatten(1).sum(1), weight.flatten(1).sum(1))  # (B,): (F - 1)/F where all frames count
    flicker = weighted_mean(error.diff(dim=2).square(), pairs) * share
    return (mse + strength * flicker) / (1 + 2 * strength * share)


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """The mean of x (B,C,F,H,W) under weight (B,1,F,1 or H,1 or W), for each sample: (B,); the mean of nothing is 0."""
    weight = weight.expand(-1, -1, -1, *x.shape[-2:])
    return _ratio((x * weight).flatten(1).sum(1), x.shape[1] * weight.flatten(1).sum(1))


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    """total / count, and 0 where nothing was counted."""
    nothing = count <= 0
    return torch.where(nothing, torch.zeros_like(total), total / torch.where(nothing, torch.ones_like(count), count))
