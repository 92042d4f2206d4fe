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
    b = module.parts["lora_B"].double() * (module.scale * weight)
    a = module.parts["lora_A"].double()
    return b, a


def sum_factors(*summands: Factors) -> Factors:
    """Return factors whose product is the exact sum of the summands' products."""
    b = torch.cat([summand_b for summand_b, _ in summands], 1)
    a = torch.cat([summand_a for _, summand_a in summands])
    return b, a


def svd_of(factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (out, k), σ (k,), Vᵀ (k, in) of the product.

    It is the SVD of the small core between two QR decompositions.
    """
    b, a = factors
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.T)
    u, sigma, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return q_b @ u, sigma, v @ q_a.T


def product_norm(factors: Factors) -> float:
    """Return ‖BA‖ (Frobenius), from the triangular factors of both to avoid
    cancellation.
    """
    b, a = factors
    r_b = torch.linalg.qr(b).R
    r_a = torch.linalg.qr(a.T).R
    return float((r_b @ r_a.T).norm())


def truncate_svd(svd: tuple[Tensor, Tensor, Tensor], rank: int) -> Factors:
    """Return the nearest factors of a rank (Eckart and Young 1936), √σ in each."""
    u, sigma, v = svd
    root = sigma[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * v[:rank]


def rank_for(sigma: Tensor, error: float) -> int:
    """Return the lowest rank, at least 1, that loses at most the part ``error`` of
    ‖ΔW‖.
    """
    # lost[k]: ‖ΔW‖² that is lost without the k-th and all smaller singular values
    lost = sigma.square().flip(0).cumsum(0).flip(0)
    return max(1, int((lost > error**2 * lost[0]).sum()))


def low_rank_factors(matrix: Tensor, rank: int) -> Factors:
    """Return the nearest factors of a matrix (out, in) in float64.

    Small matrices get a full SVD, others a randomized one (Halko, Martinsson and Tropp
    2011, arXiv 0909.4061).
    """
    if min(matrix.shape) <= max(FULL_SVD_LIMIT, rank + OVERSAMPLING):
        return truncate_svd(torch.linalg.svd(matrix, full_matrices=False), rank)

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        u, sigma, v = torch.svd_lowrank(matrix, rank + OVERSAMPLING, POWER_ITERATIONS)
    return truncate_svd((u, sigma, v.T), rank)


def delta_norm(module: AdapterModule) -> float:
    """Return ‖ΔW‖ of a module of any kind; for OFT ‖R - 1‖."""
    if "lora_A" in module.parts:
        return product_norm(factors_of(module))
    if module.parts.keys() & LOKR_FACTORS:
        # ‖W1 ⊗ W2‖ = ‖W1‖ ‖W2‖
        w1_norm = float(lokr_factor(module.parts, "lokr_w1").norm())
        w2_norm = float(lokr_factor(module.parts, "lokr_w2").norm())
        return abs(module.scale) * w1_norm * w2_norm
    return float(module.delta.norm())


def relative_difference(expected: AdapterModule, actual: AdapterModule) -> float:
    """Return ‖ΔW - ΔW'‖ / ‖ΔW‖, or that of DoRA's magnitudes if it is larger."""
    if "lora_A" in expected.parts:
        difference = sum_factors(factors_of(expected), factors_of(actual, -1.0))
        delta_error = product_norm(difference)
    else:
        delta_error = float((expected.delta - actual.delta).norm())
    expected_norm = delta_norm(expected)
    if expected_norm:
        delta_error /= expected_norm

    expected_magnitude = _magnitude(expected)
    magnitude_difference = (expected_magnitude - _magnitude(actual)).norm()
    magnitude_error = float(magnitude_difference / expected_magnitude.norm())
    return max(delta_error, magnitude_error)


def _magnitude(module: AdapterModule) -> Tensor:
    """Return DoRA's magnitude in float64; 1 for other kinds."""
    return module.parts.get("lora_magnitude_vector", torch.ones(1)).double()
