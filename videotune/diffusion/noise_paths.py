"""Noise paths: how data and noise mix at each noise level t, and what v is there.

A noise path is x_t = alpha·x0 + sigma·noise with v = d_alpha·x0 + d_sigma·noise, one
object for flow matching and v-prediction. On both, alpha·d_sigma - sigma·d_alpha = 1:
(x_t, v) is a linear map of (x0, noise) with determinant 1, and either pair gives the other
one without a division.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from videotune.types import (
    NoisePath,
)


def flow_path(t: Tensor) -> NoisePath:
    """Return the straight path of flow matching: x_t = (1 - t)·x0 + t·noise, v = noise
    - x0.

    t (B,) in [0, 1]. Source: Liu et al. 2022; Esser et al. 2024, eq. 13.
    """
    t = _column(t.float())
    ones = torch.ones_like(t)
    return NoisePath(alpha=1 - t, sigma=t, d_alpha=-ones, d_sigma=ones)


def v_path(alphas_cumprod: Callable[[], Tensor]) -> Callable[[Tensor], NoisePath]:
    """Return the variance-preserving path of v-prediction.

    alpha = √ᾱ, sigma = √(1 - ᾱ), v = alpha·noise - sigma·x0. Source: Salimans & Ho
    2022, appendix D.

    Args:
        alphas_cumprod: Returns ᾱ (K,) float64 of the integer timesteps, to which t (B,)
            in [0, 1] is mapped by ``timestep_index``.
    """
    return _VariancePreservingPath(alphas_cumprod)


class _VariancePreservingPath:
    """√ᾱ and √(1 - ᾱ) of each timestep, on each device that was used.

    A copy at every step would make the host wait for a CUDA device.
    """

    def __init__(self, alphas_cumprod: Callable[[], Tensor]) -> None:
        self._alphas_cumprod = alphas_cumprod
        self._roots: dict[torch.device, Tensor] = {}

    def __call__(self, t: Tensor) -> NoisePath:
        roots = self._roots_on(t)
        at_t = roots[:, timestep_index(t, roots.shape[1])]
        alpha = _column(at_t[0])
        sigma = _column(at_t[1])
        return NoisePath(alpha=alpha, sigma=sigma, d_alpha=-sigma, d_sigma=alpha)

    def _roots_on(self, t: Tensor) -> Tensor:
        """Return the roots (2,K) float32 on the device of t."""
        roots = self._roots.get(t.device)
        if roots is None or isinstance(t, FakeTensor):
            # in float64, since 1 - ᾱ cancels at low noise; some devices have no float64
            alphas_cumprod = self._alphas_cumprod().double()
            roots = torch.stack([alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()])
            roots = roots.float().to(t.device)
            if not isinstance(roots, FakeTensor):
                self._roots[t.device] = roots
        return roots


def timestep_index(t: Tensor, num_timesteps: int) -> Tensor:
    """Return the integer timestep k = t·(K - 1), rounded, (B,) int64, of t (B,) in [0,
    1].
    """
    position = t.float() * (num_timesteps - 1)
    return position.round().long()


def scaled_linear_alphas_cumprod(
    beta_start: float,
    beta_end: float,
    steps: int,
    snr_shift: float = 1.0,
    zero_terminal_snr: bool = False,
) -> Tensor:
    """Return ᾱ of each integer timestep, (steps,) float64.

    It is bit for bit what the diffusers schedulers of this kind have. Source: Rombach
    et al. 2022 (betas); Esser et al. 2024, section 5.3.2 (shift); Lin et al. 2023,
    algorithm 1 (zero terminal SNR).

    Args:
        beta_start: First beta; betas are linear in their roots.
        beta_end: Last beta.
        steps: Number of timesteps.
        snr_shift: Divisor of the SNR.
        zero_terminal_snr: Bring √ᾱ to 0 at the end.
    """
    first_root = beta_start**0.5
    last_root = beta_end**0.5
    roots = torch.linspace(first_root, last_root, steps, dtype=torch.float64)
    betas = roots**2

    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
    alphas_cumprod = alphas_cumprod / (snr_shift + (1 - snr_shift) * alphas_cumprod)
    if zero_terminal_snr:
        root = alphas_cumprod.sqrt()
        first = root[0]
        last = root[-1]
        stretch = first / (first - last)
        alphas_cumprod = ((root - last) * stretch) ** 2
    return alphas_cumprod


def _column(x: Tensor) -> Tensor:
    """Return (B,) as (B,1,1,1,1), which broadcasts over latents."""
    return x.view(-1, 1, 1, 1, 1)
