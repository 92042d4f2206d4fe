"""Arithmetic on an update's factors in float64: norms, differences and nearest updates of lower rank, ΔW never built."""

import torch
from torch import Tensor

from videotune.exporter.adapter_modules import Module

Factors = tuple[Tensor, Tensor]
"""B (out, r) and A (r, in) in float64; their product is ΔW."""

SMALL = 1024
SPARE = 16
TURNS = 4
"""The smaller side up to which an SVD is whole; beyond it directions in excess of the rank, and rounds of refinement."""


def factors(module: Module, weight: float = 1.0) -> Factors:
    """The factors of a LoRA's ΔW times ``weight``, the scale in B."""
    return module.parts["lora_B"].double() * (module.scale * weight), module.parts[
        "lora_A"
    ].double()


def total(*many: Factors) -> Factors:
    """Factors of the sum of products: exactly, with all their ranks."""
    return torch.cat([b for b, _ in many], 1), torch.cat([a for _, a in many])


def decomposed(pair: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """U (out, k), σ (k,), Vᵀ (k, in) of the product: the SVD of the small core between two QR decompositions."""
    (q, r) = torch.linalg.qr(pair[0])
    (p, s) = torch.linalg.qr(pair[1].T)
    u, sigma, v = torch.linalg.svd(r @ s.T, full_matrices=False)
    return q @ u, sigma, v @ p.T


def norm_of(pair: Factors) -> float:
    """‖BA‖ (Frobenius), by the triangular factors of both: small differences of large numbers do not occur."""
    return float((torch.linalg.qr(pair[0]).R @ torch.linalg.qr(pair[1].T).R.T).norm())


def cut(svd: tuple[Tensor, Tensor, Tensor], rank: int) -> Factors:
    """The nearest factors of a rank (Eckart and Young 1936), √σ in each."""
    root = svd[1][:rank].sqrt()
    return svd[0][:, :rank] * root, root[:, None] * svd[2][:rank]


def rank_for(sigma: Tensor, error: float) -> int:
    """The lowest rank, at least 1, at which the part of ‖ΔW‖ that is lost is no more than ``error``."""
    lost = (
        sigma.square().flip(0).cumsum(0).flip(0)
    )  # what is lost without the k-th and all below
    return max(1, int((lost > error**2 * lost[0]).sum()))


def truncated(matrix: Tensor, rank: int) -> Factors:
    """The nearest factors of a matrix (out, in) in float64.

    By its whole SVD where that is small, else by a randomized one (Halko, Martinsson and Tropp 2011, arXiv 0909.4061).
    """
    if min(matrix.shape) <= max(SMALL, rank + SPARE):
        return cut(torch.linalg.svd(matrix, full_matrices=False), rank)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        u, sigma, v = torch.svd_lowrank(matrix, rank + SPARE, TURNS)
    return cut((u, sigma, v.T), rank)


def norm(module: Module) -> float:
    """‖ΔW‖ of a module of any kind; of OFT ‖R - 1‖."""
    return norm_of(factors(module)) if "lora_A" in module.parts else float(module.delta.norm())


def difference(one: Module, other: Module) -> float:
    """‖ΔW - ΔW'‖ / ‖ΔW‖; DoRA's magnitudes count with theirs."""
    if "lora_A" in one.parts:
        off = norm_of(total(factors(one), factors(other, -1.0)))
    else:
        off = float((one.delta - other.delta).norm())
    whole = norm(one)
    mine, theirs = (
        own.parts.get("lora_magnitude_vector", torch.ones(1)).double() for own in (one, other)
    )
    return max(off / whole if whole else off, float((mine - theirs).norm() / mine.norm()))
