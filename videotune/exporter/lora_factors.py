"""Norms, differences and low-rank versions of LoRA factors in float64; ΔW is not built."""

import torch
from torch import Tensor

from videotune.adapters.effect import lokr_factor
from videotune.exporter.adapter_modules import AdapterModule

Factors = tuple[Tensor, Tensor]
"""B (out, r) and A (r, in) in float64; their product is ΔW."""

LOKR_FACTORS = {"lokr_w2", "lokr_w2_a"}
"""Tensors of which every LoKr has one."""

FULL_SVD_LIMIT = 1024
"""Largest smaller side of a matrix whose full SVD is computed."""

OVERSAMPLING = 16
"""Directions beyond the rank in a randomized SVD."""

POWER_ITERATIONS = 4
"""Rounds of refinement in a randomized SVD."""


def factors_of(module: AdapterModule, weight: float = 1.0) -> Factors:
    """Return the factors of a LoRA's ΔW times ``weight``, with the scale in B."""
    factor = module.scale * weight
    b = module.parts["lora_B"].double() * factor
    a = module.parts["lora_A"].double()
    return b, a


def sum_factors(*summands: Factors) -> Factors:
    """Return factors whose product is the exact sum of the summands' products."""
    all_b = []
    all_a = []
    for summand_b, summand_a in summands:
        all_b.append(summand_b)
        all_a.append(summand_a)
    return torch.cat(all_b, dim=1), torch.cat(all_a, dim=0)


def svd_of(factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (out, k), σ (k,), Vᵀ (k, in) of the product.

    It is the SVD of the small core between two QR decompositions.
    """
    b, a = factors
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.T)
    core = r_b @ r_a.T
    u, sigma, v = torch.linalg.svd(core, full_matrices=False)
    return q_b @ u, sigma, v @ q_a.T


def product_norm(factors: Factors) -> float:
    """Return ‖BA‖ (Frobenius), from the triangular factors of both to avoid
    cancellation.
    """
    b, a = factors
    r_b = torch.linalg.qr(b).R
    r_a = torch.linalg.qr(a.T).R
    core = r_b @ r_a.T
    return float(core.norm())


def truncate_svd(svd: tuple[Tensor, Tensor, Tensor], rank: int) -> Factors:
    """Return the nearest factors of a rank (Eckart and Young 1936), √σ in each."""
    u, sigma, v = svd
    root = sigma[:rank].sqrt()
    b = u[:, :rank] * root
    a = root[:, None] * v[:rank]
    return b, a


def rank_for(sigma: Tensor, error: float) -> int:
    """Return the lowest rank, at least 1, that loses at most the part ``error`` of
    ‖ΔW‖.
    """
    smallest_first = sigma.square().flip(0)
    # lost[k]: ‖ΔW‖² that is lost without the k-th and all smaller singular values
    lost = smallest_first.cumsum(0).flip(0)
    most_lost = error**2 * lost[0]
    is_needed = lost > most_lost
    return max(1, int(is_needed.sum()))


def low_rank_factors(matrix: Tensor, rank: int) -> Factors:
    """Return the nearest factors of a matrix (out, in) in float64.

    Small matrices get a full SVD, others a randomized one (Halko, Martinsson and Tropp
    2011, arXiv 0909.4061).
    """
    directions = rank + OVERSAMPLING
    smaller_side = min(matrix.shape)
    if smaller_side <= max(FULL_SVD_LIMIT, directions):
        full_svd = torch.linalg.svd(matrix, full_matrices=False)
        return truncate_svd(full_svd, rank)

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        u, sigma, v = torch.svd_lowrank(matrix, directions, POWER_ITERATIONS)
    return truncate_svd((u, sigma, v.T), rank)


def delta_norm(module: AdapterModule) -> float:
    """Return ‖ΔW‖ of a module of any kind; for OFT ‖R - 1‖."""
    if "lora_A" in module.parts:
        return product_norm(factors_of(module))
    if module.parts.keys() & LOKR_FACTORS:
        # ‖W1 ⊗ W2‖ = ‖W1‖ ‖W2‖
        w1 = lokr_factor(module.parts, "lokr_w1")
        w2 = lokr_factor(module.parts, "lokr_w2")
        return abs(module.scale) * float(w1.norm()) * float(w2.norm())
    return float(module.delta.norm())


def relative_difference(expected: AdapterModule, actual: AdapterModule) -> float:
    """Return ‖ΔW - ΔW'‖ / ‖ΔW‖, or that of DoRA's magnitudes if it is larger."""
    if "lora_A" in expected.parts:
        negative = factors_of(actual, -1.0)
        difference_factors = sum_factors(factors_of(expected), negative)
        delta_error = product_norm(difference_factors)
    else:
        difference = expected.delta - actual.delta
        delta_error = float(difference.norm())
    expected_norm = delta_norm(expected)
    if expected_norm:
        delta_error /= expected_norm

    expected_magnitude = _magnitude(expected)
    magnitude_difference = expected_magnitude - _magnitude(actual)
    relative = magnitude_difference.norm() / expected_magnitude.norm()
    magnitude_error = float(relative)
    return max(delta_error, magnitude_error)


def _magnitude(module: AdapterModule) -> Tensor:
    """Return DoRA's magnitude in float64; 1 for other kinds."""
    ones = torch.ones(1)
    magnitude = module.parts.get("lora_magnitude_vector", ones)
    return magnitude.double()
