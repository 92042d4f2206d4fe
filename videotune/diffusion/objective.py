"""What is minimised: a path, a distribution of timesteps, a weight for each and the price of flicker, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from videotune.diffusion.path import flow_path, scaled_linear_alphas_cumprod, v_path_of, v_roots
from videotune.diffusion.timesteps import Timesteps
from videotune.errors import VideotuneError
from videotune.types import Path

WEIGHTINGS = ("none", "min_snr")


@dataclass(frozen=True)
class Objective:
    """E over t of w(t)·(‖e‖² + λ‖Δe‖²), e the error of v; built by ``objective``, which checks it."""

    path: Callable[[Tensor], Path]
    timesteps: Timesteps
    weighting: str = "none"
    temporal_consistency: float = 0.0
    gamma: float = 5.0

    @property
    def num_timesteps(self) -> int | None:
        """K of a path that is a table; None where t is continuous."""
        return self.timesteps.num_timesteps

    def weight(self, t: Tensor) -> Tensor:
        """w(t), (B,) float32.

        min_snr is min(snr, γ)/(snr + 1) on the error of v; with snr = ᾱ/(1 - ᾱ) that is min(ᾱ, γ(1 - ᾱ)), which is 0
        at zero terminal SNR. Source: Hang et al. 2023, "Efficient diffusion training via min-SNR weighting".
        """
        if self.weighting == "none":
            return torch.ones_like(t, dtype=torch.float32)
        path = self.path(t)
        return torch.minimum(path.alpha.square(), self.gamma * path.sigma.square()).flatten()


def objective(
    spec_path: str,
    constants: Mapping[str, float],
    timesteps: Timesteps,
    weighting: str = "none",
    temporal_consistency: float = 0.0,
    gamma: float = 5.0,
) -> Objective:
    """The objective of a model whose path is "flow" or "v".

    ``constants`` of "v": beta_start, beta_end, num_train_timesteps, snr_shift_scale, rescale_betas_zero_snr, all of them
    required (a scheduler's own defaults are wrong for most checkpoints); "flow" needs none. Raises VideotuneError for an
    unknown name, a weighting that does not apply to the path, and numbers outside their range.
    """
    if spec_path not in _PATHS:
        raise VideotuneError(f"The model's path is {spec_path!r}; known are {', '.join(_PATHS)}.")
    if weighting not in WEIGHTINGS:
        raise VideotuneError(f"loss_weighting is {weighting!r}; choose one of {', '.join(WEIGHTINGS)}.")
    if weighting == "min_snr" and spec_path == "flow":
        raise VideotuneError(
            "loss_weighting is min_snr, which is defined for v-prediction; this model is trained by flow matching. "
            "Set loss_weighting to none, and use timestep_distribution to say which noise levels count."
        )
    if not 0 <= temporal_consistency <= 2:
        raise VideotuneError(
            f"video_config.temporal_consistency_weight is {temporal_consistency}; give a number from 0 to 2."
        )
    if not gamma > 0:
        raise VideotuneError(f"The gamma of min_snr is {gamma}; give a number above 0 (the paper's is 5).")
    path, num_timesteps = _PATHS[spec_path](constants)
    timesteps = replace(timesteps, num_timesteps=num_timesteps)
    return Objective(path, timesteps, weighting, float(temporal_consistency), float(gamma))


def _flow(constants: Mapping[str, float]) -> tuple[Callable[[Tensor], Path], int | None]:
    return flow_path, None


def _v(constants: Mapping[str, float]) -> tuple[Callable[[Tensor], Path], int | None]:
    names = ("beta_start", "beta_end", "num_train_timesteps", "snr_shift_scale", "rescale_betas_zero_snr")
    missing = [name for name in names if name not in constants]
    if missing:
        raise VideotuneError(
            f"The scheduler of this checkpoint does not say {', '.join(missing)}, which v-prediction needs; "
            "look into its scheduler/scheduler_config.json."
        )
    start, end, num, shift, zero_snr = (constants[name] for name in names)

    tables: dict[torch.device, Tensor] = {}

    def path(t: Tensor) -> Path:
        # One copy of the table for each device: a copy at every step would make the host wait for a CUDA device. What is
        # made while a plan runs under fake tensors is fake too, and stays out of it.
        faked = isinstance(t, FakeTensor)
        roots = None if faked else tables.get(t.device)
        if roots is None:
            roots = v_roots(scaled_linear_alphas_cumprod(start, end, int(num), shift, bool(zero_snr)), t.device)
            if not isinstance(roots, FakeTensor):
                tables[t.device] = roots
        return v_path_of(t, roots)

    return path, int(num)


_PATHS: dict[str, Callable[[Mapping[str, float]], tuple[Callable[[Tensor], Path], int | None]]] = {
    "flow": _flow,
    "v": _v,
}
