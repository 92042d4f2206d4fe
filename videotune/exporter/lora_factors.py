"""Arithmetic on an update's factors in float64: norms, differences and nearest updates of lower rank, ΔW never built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from videotune.adapters.effect import change

if TYPE_CHECKING:
    from torch import Tensor

    from videotune.exporter.adapter_modules import Module

Factors = tuple["Tensor", "Tensor"]
"""B (out, r) and A (r, in) in float64; their product is ΔW."""


def factors(module: Module, weight: float = 1.0) -> Factors:
    """The factors of a LoRA's ΔW times ``weight``, the scale in B."""
    return module.parts["lora_B"].double() * (module.scale * weight), module.parts["lora_A"].double()


def concatenated(many: Sequence[Factors]) -> Factors:
    """Factors of the sum of products: exactly, with all their ranks."""
    return torch.cat([b for b, _ in many], 1), torch.cat([a for _, a in many])


def decomposed(pair: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """U (out, k), σ (k,), Vᵀ (k, in) of the product: the SVD of the small core between two QR decompositions."""
    (q, r), (p, s) = torch.linalg.qr(pair[0]), torch.linalg.qr(pair[1].T)
    u, sigma, v = torch.linalg.svd(r @ s.T)
    k = len(sigma)
    return q @ u[:, :k], sigma, v[:k] @ p.T


def norm_of(pair: Factors) -> float:
    """‖BA‖ (Frobenius), by the triangular factors of both: small differences of large numbers do not occur."""
    return float((torch.linalg.qr(pair[0]).R @ torch.linalg.qr(pair[1].T).R.T).norm())


def cut(svd: tuple[Tensor, Tensor, Tensor], rank: int) -> Factors:
    """The nearest factors of a rank (Eckart and Young 1936), √σ in each."""
    u, sigma, v = (svd[0][:, :rank], svd[1][:rank].sqrt(), svd[2][:rank])
    return u * sigma, sigma[:, None] * v


def rank_for(sigma: Tensor, error: float) -> int:
    """The lowest rank, at least 1, at which the part of ‖ΔW‖ that is lost is no more than ``error``."""
    lost = sigma.flip(0).square().cumsum(0).flip(0)  # what is lost when the k-th and all below are
    return max(1, int((lost > error**2 * float(lost[0])).sum()))


def norm(module: Module) -> float:
    """‖ΔW‖ of a module of any kind; of OFT ‖R - 1‖."""
    if "lora_A" in module.parts:
        return norm_of(factors(module))
    return float(change(module.parts, module.scale).norm())


def difference(one: Module, other: Module) -> float:
    """‖ΔW - ΔW'‖ / ‖ΔW‖; DoRA's magnitudes count with theirs."""
    if "lora_A" in one.parts:
        whole, off = norm(one), norm_of(concatenated([factors(one), factors(other, -1.0)]))
    else:
        mine = change(one.parts, one.scale)
        whole, off = float(mine.norm()), float((mine - change(other.parts, other.scale)).norm())
    worst = off / whole if whole else off
    if "lora_magnitude_vector" in one.parts:
        mine, theirs = (own.parts["lora_magnitude_vector"].double() for own in (one, other))
        worst = max(worst, float((mine - theirs).norm() / mine.norm()))
    return worst


SMALL, SPARE, TURNS = 1024, 16, 4
"""The smaller side up to which an SVD is whole; beyond it directions in excess of the rank, and rounds of refinement."""


def truncated(matrix: Tensor, rank: int) -> Factors:
    """The nearest factors of a matrix (out, in) in float64.

    By its whole SVD where that is small, else by a randomized one (Halko, Martinsson and Tropp 2011, arXiv 0909.4061).
    """
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= max(SMALL, rank + SPARE):
        return cut(torch.linalg.svd(matrix, full_matrices=False), rank)
    drawn = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(matrix @ torch.randn(matrix.shape[1], rank + SPARE, generator=drawn, dtype=matrix.dtype)).Q
    for _ in range(TURNS):
        q = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ q).Q).Q
    u, sigma, v = torch.linalg.svd(q.T @ matrix, full_matrices=False)
    return cut((q @ u, sigma, v), rank)
