"""Noising paths: x_t = alpha·x0 + sigma·noise and v = d_alpha·x0 + d_sigma·noise, one object for two kinds of model.

On both paths alpha·d_sigma - sigma·d_alpha = 1, so (x_t, v) and (x0, noise) are a rotation or a shear of one another, and
either pair gives the other back without a division.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videotune.types import Path


def flow_path(t: Tensor) -> Path:
    """The straight path of flow matching: x_t = (1 - t)·x0 + t·noise, v = noise - x0.

    t (B,) in [0, 1]. Source: Liu et al. 2022; Esser et al. 2024, eq. 13.
    """
    t = _column(t.float())
    one = torch.ones_like(t)
    return Path(alpha=1 - t, sigma=t, d_alpha=-one, d_sigma=one)


def v_path(t: Tensor, alphas_cumprod: Tensor) -> Path:
    """The variance-preserving path of v-prediction: alpha = √ᾱ, sigma = √(1 - ᾱ), v = alpha·noise - sigma·x0.

    t (B,) in [0, 1] stands for ``timestep_index``; alphas_cumprod (K,) float64. Source: Salimans & Ho 2022, appendix D.
    """
    return v_path_of(t, v_roots(alphas_cumprod, t.device))


def v_roots(alphas_cumprod: Tensor, device: torch.device) -> Tensor:
    """(√ᾱ, √(1 - ᾱ)) of each integer timestep, (2,K) float32 on the device: the table that ``v_path_of`` reads."""
    # Roots are taken in float64: 1 - ᾱ cancels at low noise, and some devices have no float64.
    alphas_cumprod = alphas_cumprod.double()
    return torch.stack([alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()]).float().to(device)


def v_path_of(t: Tensor, roots: Tensor) -> Path:
    """The path of v-prediction at t (B,), from its table (2,K) on the same device."""
    alpha, sigma = roots[:, timestep_index(t, roots.shape[1])]
    alpha, sigma = _column(alpha), _column(sigma)
    return Path(alpha=alpha, sigma=sigma, d_alpha=-sigma, d_sigma=alpha)


def timestep_index(t: Tensor, num_timesteps: int) -> Tensor:
    """The integer timestep k = t·(K - 1), rounded, (B,) int64, for which t (B,) in [0, 1] stands."""
    return (t.float() * (num_timesteps - 1)).round().long()


def scaled_linear_alphas_cumprod(
    beta_start: float, beta_end: float, steps: int, snr_shift: float = 1.0, zero_terminal_snr: bool = False
) -> Tensor:
    """ᾱ of each integer timestep: betas linear in their roots, the SNR divided by ``snr_shift``, √ᾱ brought to 0 at the end.

    Returns (steps,) float64, bit for bit what the diffusers schedulers of this kind hold. Source: Rombach et al. 2022
    (betas); Esser et al. 2024, section 5.3.2 (shift); Lin et al. 2023, algorithm 1 (zero terminal SNR).
    """
    betas = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=torch.float64) ** 2
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
    alphas_cumprod = alphas_cumprod / (snr_shift + (1 - snr_shift) * alphas_cumprod)
    if zero_terminal_snr:
        root = alphas_cumprod.sqrt()
        first, last = root[0], root[-1]
        alphas_cumprod = ((root - last) * (first / (first - last))) ** 2
    return alphas_cumprod


def x0_from(path: Path, x_t: Tensor, v: Tensor) -> Tensor:
    """The clean latents (B,C,F,H,W) that (x_t, v) stand for."""
    return path.d_sigma * x_t - path.sigma * v


def noise_from(path: Path, x_t: Tensor, v: Tensor) -> Tensor:
    """The noise (B,C,F,H,W) that (x_t, v) stand for."""
    return path.alpha * v - path.d_alpha * x_t


def _column(x: Tensor) -> Tensor:
    """(B,) -> (B,1,1,1,1), which broadcasts over latents."""
    return x.view(-1, 1, 1, 1, 1)
