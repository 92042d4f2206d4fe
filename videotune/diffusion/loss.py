"""What is minimised, given (t, noise): noising path, weight of each t, and the loss that training and validation share.

Noising paths: x_t = alpha·x0 + sigma·noise and v = d_alpha·x0 + d_sigma·noise, one object for two kinds of model. On both
alpha·d_sigma - sigma·d_alpha = 1, so (x_t, v) and (x0, noise) are a rotation or a shear of one another, and either pair
gives the other back without a division.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.types import Batch, NoisePath, StepOutput

V_CONSTANTS = (
    "beta_start",
    "beta_end",
    "num_train_timesteps",
    "snr_shift_scale",
    "rescale_betas_zero_snr",
)
"""What v-prediction needs of a checkpoint's scheduler; a scheduler's own defaults are wrong for most checkpoints."""


class Predictor(Protocol):
    """A model family, as far as the loss needs it."""

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v (B,C,F,H,W) float32 for noisy latents x_t at noise levels t (B,)."""


@dataclass(frozen=True)
class Objective:
    """E over t of w(t)·(d(e) + λ‖Δe‖²), e the error of v, λ ``temporal_consistency``; built by ``objective``.

    ``loss``: d(e) is e² (mse), or one of ``robust`` with ``delta``.
    """

    path: Callable[[Tensor], NoisePath]
    timesteps: TimestepSampler
    weighting: str = "none"
    temporal_consistency: float = 0.0
    gamma: float = 5.0
    loss: str = "mse"
    delta: float = 0.1

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
    timesteps: TimestepSampler,
    weighting: str = "none",
    temporal_consistency: float = 0.0,
    gamma: float = 5.0,
) -> Objective:
    """The objective of a model whose path is "flow" or "v"; ``constants`` of "v" are V_CONSTANTS, "flow" needs none.

    ``weighting`` and ``gamma`` are for "v". Raises VideotuneError where a constant is missing.
    """
    if spec_path == "flow":
        return Objective(flow_path, timesteps, temporal_consistency=temporal_consistency)
    missing = [name for name in V_CONSTANTS if name not in constants]
    if missing:
        raise VideotuneError(
            f"The scheduler of this checkpoint does not say {', '.join(missing)}, which v-prediction needs; "
            "look into its scheduler/scheduler_config.json."
        )
    start, end, num, shift, zero_snr = (constants[name] for name in V_CONSTANTS)
    timesteps = replace(timesteps, num_timesteps=int(num))
    path = v_path(
        lambda: scaled_linear_alphas_cumprod(start, end, int(num), shift, bool(zero_snr))
    )
    return Objective(path, timesteps, weighting, temporal_consistency, gamma)


def flow_path(t: Tensor) -> NoisePath:
    """The straight path of flow matching: x_t = (1 - t)·x0 + t·noise, v = noise - x0.

    t (B,) in [0, 1]. Source: Liu et al. 2022; Esser et al. 2024, eq. 13.
    """
    t = _column(t.float())
    one = torch.ones_like(t)
    return NoisePath(alpha=1 - t, sigma=t, d_alpha=-one, d_sigma=one)


def v_path(alphas_cumprod: Callable[[], Tensor]) -> Callable[[Tensor], NoisePath]:
    """The variance-preserving path of v-prediction: alpha = √ᾱ, sigma = √(1 - ᾱ), v = alpha·noise - sigma·x0.

    t (B,) in [0, 1] stands for ``timestep_index``; ``alphas_cumprod`` gives ᾱ (K,) float64. The roots are copied to each
    device once: a copy at every step would make the host wait for a CUDA device. Source: Salimans & Ho 2022, appendix D.
    """
    tables: dict[torch.device, Tensor] = {}

    def path(t: Tensor) -> NoisePath:
        roots = tables.get(t.device)
        if roots is None or isinstance(t, FakeTensor):
            # Roots are taken in float64: 1 - ᾱ cancels at low noise, and some devices have no float64.
            bar = alphas_cumprod().double()
            roots = torch.stack([bar.sqrt(), (1 - bar).sqrt()]).float().to(t.device)
            if not isinstance(roots, FakeTensor):
                tables[t.device] = roots
        alpha, sigma = map(_column, roots[:, timestep_index(t, roots.shape[1])])
        return NoisePath(alpha=alpha, sigma=sigma, d_alpha=-sigma, d_sigma=alpha)

    return path


def timestep_index(t: Tensor, num_timesteps: int) -> Tensor:
    """The integer timestep k = t·(K - 1), rounded, (B,) int64, for which t (B,) in [0, 1] stands."""
    return (t.float() * (num_timesteps - 1)).round().long()


def scaled_linear_alphas_cumprod(
    beta_start: float,
    beta_end: float,
    steps: int,
    snr_shift: float = 1.0,
    zero_terminal_snr: bool = False,
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
        first = root[0]
        last = root[-1]
        alphas_cumprod = ((root - last) * (first / (first - last))) ** 2
    return alphas_cumprod


def denoising_loss(
    family: Predictor,
    net: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
    target: Tensor | None = None,
) -> StepOutput:
    """s·w(t)·(‖e‖² + λ‖Δe‖²) / (1 + 2λ(F - 1)/F) with e = v_θ(x_t, t, c) - v, over what ``batch.loss_mask`` counts.

    t (B,), noise (B,C,F,H,W) float32, both drawn by the caller; s is ``batch.loss_weight``; ``target`` (B,C,F,H,W) takes the
    place of the data's v, see ``prior_target``. ``per_clip`` is what ``loss`` is the mean of; ``mse`` is ‖e‖² alone, so
    that runs with other weights, scales and λ compare.
    """
    x_t, v = noisy(objective, batch, t, noise)
    prediction = family.predict(net, x_t, t, batch).to(v.dtype)
    assert prediction.shape == v.shape, (
        f"predicted {tuple(prediction.shape)} for latents {tuple(v.shape)}"
    )
    error = prediction - (v if target is None else target)
    mse = weighted_mean(error.square(), batch.loss_mask)  # (B,)
    per_clip = mse
    if objective.loss != "mse":
        per_clip = weighted_mean(
            robust(error, objective.loss, objective.delta), batch.loss_mask
        )
    if objective.temporal_consistency > 0:
        per_clip = with_flicker(mse, error, batch.loss_mask, objective.temporal_consistency)
    per_clip = batch.loss_weight * objective.weight(t) * per_clip
    return StepOutput(per_clip.mean(), mse.detach(), per_clip.detach(), t)


def robust(error: Tensor, kind: str, delta: float) -> Tensor:
    """What each element of an error costs: e² where |e| is far below ``delta`` δ, 2δ|e| where it is far above.

    huber: e² up to δ, then δ(2|e| - δ) (Huber 1964, times 2). pseudo_huber: 2δ(√(e² + δ²) - δ), smooth: the distance of
    Song and Dhariwal 2023 (arXiv 2310.14189, section 3.3) times 2δ, as diffusers' training scripts have it.
    """
    if kind == "huber":
        return 2 * nn.functional.huber_loss(
            error, torch.zeros_like(error), reduction="none", delta=delta
        )
    return 2 * delta * (torch.hypot(error, torch.full_like(error, delta)) - delta)


def noisy(
    objective: Objective, batch: Batch, t: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """What the network sees and what it should say of it: (x_t, v), (B,C,F,H,W) each; t (B,)."""
    path = objective.path(t)  # (B,1,1,1,1) each
    x_t = path.alpha * batch.x0 + path.sigma * noise
    v = path.d_alpha * batch.x0 + path.d_sigma * noise
    x_t = torch.where(batch.conditioning_mask, batch.x0, x_t)  # given frames stay clean
    x_t = torch.where(batch.dropped_frames_mask, noise, x_t)  # dropped frames say nothing
    return x_t, v


def prior_target(
    family: Predictor,
    base: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
    which: Sequence[int],
) -> Tensor:
    """v (B,C,F,H,W), for the samples in ``which`` the one that ``base`` predicts: a target for ``denoising_loss``.

    What the base predicts for the same x_t, t and caption is what a regularization sample must stay at (Li & Hoiem 2016,
    "Learning without forgetting", arXiv 1606.09282). Those samples alone run through ``base``, without a graph.
    """
    x_t, v = noisy(objective, batch, t, noise)

    def pick(x: Tensor) -> Tensor:
        return torch.stack(
            [x[i] for i in which]
        )  # by plain numbers: an index tensor would wait for the device

    captions, ids = (
        tuple(names[i] for i in which) for names in (batch.captions, batch.window_ids)
    )
    part = replace(batch.map(pick), captions=captions, window_ids=ids)
    with torch.no_grad():
        predicted = family.predict(base, pick(x_t), pick(t), part).to(v.dtype)
    target = list(v)
    for i, own in zip(which, predicted, strict=True):
        target[i] = own
    return torch.stack(target)


def with_flicker(mse: Tensor, error: Tensor, weight: Tensor, strength: float) -> Tensor:
    """(mse + λ‖Δe‖²) / (1 + 2λ(F - 1)/F), (B,): errors should not flicker; the optimum is unchanged.

    Δe is the error's difference between neighbouring latent frames, over pairs that both count, and its square is summed
    and divided by the same count as mse's: F frames have F - 1 pairs, and white error has E(Δe)² = 2E(e²), so the
    divisor keeps the loss's scale. Where frames do not count, (F - 1)/F is the pairs that count over the frames that count.
    """
    # The lesser of the two weights, not their product: halving every weight must change nothing.
    pairs = torch.minimum(weight[:, :, 1:], weight[:, :, :-1])
    share = _ratio(
        pairs.flatten(1).sum(1), weight.flatten(1).sum(1)
    )  # (B,): (F - 1)/F where all frames count
    flicker = weighted_mean(error.diff(dim=2).square(), pairs) * share
    return (mse + strength * flicker) / (1 + 2 * strength * share)


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """The mean of x (B,C,F,H,W) under weight (B,1,F,1 or H,1 or W), for each sample: (B,); the mean of nothing is 0."""
    weight = weight.expand(-1, -1, -1, *x.shape[-2:])
    return _ratio((x * weight).flatten(1).sum(1), x.shape[1] * weight.flatten(1).sum(1))


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    """total / count, and 0 where nothing was counted."""
    nothing = count <= 0
    return torch.where(
        nothing,
        torch.zeros_like(total),
        total / torch.where(nothing, torch.ones_like(count), count),
    )


def _column(x: Tensor) -> Tensor:
    """(B,) -> (B,1,1,1,1), which broadcasts over latents."""
    return x.view(-1, 1, 1, 1, 1)
