"""The training objective: weight of each t, and the loss.

Training and validation share it. Noise and noise levels are drawn by the caller; the
noise paths are in ``noise_paths``, targets that a base model corrects in
``base_targets``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from videotune.diffusion.noise_paths import (
    flow_path,
    scaled_linear_alphas_cumprod,
    v_path,
)
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.types import Batch, LossOutput, NoisePath, Sound, Velocity

V_CONSTANTS = (
    "beta_start",
    "beta_end",
    "num_train_timesteps",
    "snr_shift_scale",
    "rescale_betas_zero_snr",
)
"""Constants of a checkpoint's scheduler that v-prediction needs.

A scheduler class's defaults are wrong for most checkpoints.
"""


class Predictor(Protocol):
    """A model family, as far as the loss needs it."""

    def predict(self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """Return v (B,C,F,H,W) float32 for noisy latents x_t at noise levels t (B,)."""

    def predict_with_sound(
        self, net: nn.Module, x_t: Tensor, t: Tensor, batch: Batch, sound_x_t: Tensor
    ) -> Velocity:
        """Return v of the video and of the sound, whose noise levels the batch has."""


@dataclass(frozen=True)
class Objective:
    """The expectation over t of w(t)·(d(e) + λ‖Δe‖²), with e the error of v."""

    noise_path: Callable[[Tensor], NoisePath]
    timesteps: TimestepSampler

    weighting: str = "none"
    """w(t): "none" or "min_snr"."""

    temporal_consistency: float = 0.0
    """λ, the weight of differences between neighbouring frames."""

    gamma: float = 5.0
    """γ of "min_snr"."""

    loss: str = "mse"
    """d(e): "mse" is e², the other kinds are in ``robust``."""

    delta: float = 0.1
    """δ of ``robust``."""

    sound_weight: float = 1.0
    """Factor of the sound's loss beside the video's."""

    def weight(self, t: Tensor) -> Tensor:
        """Return w(t), (B,) float32.

        min_snr is min(snr, γ)/(snr + 1) on the error of v. With snr = ᾱ/(1 - ᾱ) that is
        min(ᾱ, γ(1 - ᾱ)), which is 0 at zero terminal SNR. Source: Hang et al. 2023,
        "Efficient diffusion training via min-SNR weighting".
        """
        if self.weighting == "none":
            return torch.ones_like(t, dtype=torch.float32)
        path = self.noise_path(t)
        signal = path.alpha.square()
        noise = path.sigma.square()
        return torch.minimum(signal, self.gamma * noise).flatten()


def objective_for_prediction(
    prediction: Literal["flow", "v"],
    constants: Mapping[str, float],
    timesteps: TimestepSampler,
    weighting: str = "none",
    temporal_consistency: float = 0.0,
    gamma: float = 5.0,
) -> Objective:
    """Build the objective of a model that predicts v, of flow matching or v-prediction.

    Args:
        prediction: what the model predicts.
        constants: V_CONSTANTS for "v"; "flow" needs none.
        timesteps: Distribution of the noise levels.
        weighting: Weighting of "v".
        temporal_consistency: Weight of differences between frames.
        gamma: γ of the weighting.

    Raises:
        VideotuneError: A constant is missing.
    """
    if prediction == "flow":
        # Weighting and its γ are of v-prediction; for flow the config refuses them.
        return Objective(
            flow_path, timesteps, temporal_consistency=temporal_consistency
        )

    missing = [name for name in V_CONSTANTS if name not in constants]
    if missing:
        raise VideotuneError(
            f"scheduler/scheduler_config.json of this checkpoint lacks {', '.join(missing)}, "
            f"which v-prediction needs. Add them as the model's authors publish them."
        )
    num_timesteps = int(constants["num_train_timesteps"])

    def alphas_cumprod() -> Tensor:
        return scaled_linear_alphas_cumprod(
            constants["beta_start"],
            constants["beta_end"],
            num_timesteps,
            snr_shift=constants["snr_shift_scale"],
            zero_terminal_snr=bool(constants["rescale_betas_zero_snr"]),
        )

    on_grid = replace(timesteps, num_timesteps=num_timesteps)
    path = v_path(alphas_cumprod)
    return Objective(path, on_grid, weighting, temporal_consistency, gamma)


def denoising_loss(
    family: Predictor,
    net: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
    target: Velocity | None = None,
) -> LossOutput:
    """Return the loss of a batch, over what ``batch.loss_mask`` counts.

    It is s·w(t)·(d(e) + λ‖Δe‖²) / (1 + 2λ(F - 1)/F) with e = v_θ(x_t, t, c) - v and s
    the ``batch.loss_weight``. If sound is learnt, s·w(t)·d(e) of its error, times
    ``objective.sound_weight``, is added. The output's ``mse`` is ‖e‖² without weights, d and λ.

    Args:
        family: Predicts v.
        net: The denoiser.
        objective: w, d and λ.
        batch: Clean latents and their conditioning.
        t: Noise levels (B,).
        noise: (B,C,F,H,W) float32.
        target: Replaces the data's v; see ``base_targets``.
    """
    prediction, velocity = predict_and_target(family, net, objective, batch, t, noise)
    return loss_between(objective, batch, t, prediction, target or velocity)


def loss_between(
    objective: Objective,
    batch: Batch,
    t: Tensor,
    prediction: Velocity,
    target: Velocity,
) -> LossOutput:
    """Return the loss of a prediction to a target, as ``denoising_loss`` does.

    Args:
        objective: w, d and λ.
        batch: the batch that was predicted.
        t: noise levels (B,).
        prediction: v of the network.
        target: v that it should have predicted.
    """
    # A modality that is conditioning is fed clean and has no loss; at least one is learnt.
    video = None
    if not batch.video_is_conditioning:
        video = _video_loss(objective, batch, t, prediction, target)
    sound = None
    if batch.sound is not None and not batch.sound.is_conditioning:
        sound = _sound_loss(objective, batch, prediction, target)

    main = sound if video is None else video
    assert main is not None, "neither video nor sound is learnt"
    per_sample_loss = main.loss
    sound_mse = None
    if video is not None and sound is not None:
        per_sample_loss = video.loss + sound.loss
        sound_mse = sound.mse.detach()
    return LossOutput(
        loss=per_sample_loss.mean(),
        mse=main.mse.detach(),
        per_sample_loss=per_sample_loss.detach(),
        t=main.t,
        sound_mse=sound_mse,
    )


class _ModalityLoss(NamedTuple):
    """The loss of the video or of the sound of a batch; (B,) each."""

    t: Tensor
    mse: Tensor
    loss: Tensor
    """With its graph, and with the weights of noise levels and samples."""


def _video_loss(
    objective: Objective,
    batch: Batch,
    t: Tensor,
    prediction: Velocity,
    target: Velocity,
) -> _ModalityLoss:
    error = prediction.video - target.video
    mse = weighted_mean(error.square(), batch.loss_mask)
    weight = batch.loss_weight * objective.weight(t)
    loss = weight * _unweighted_video_loss(objective, batch, error, mse)
    return _ModalityLoss(t, mse, loss)


def _sound_loss(
    objective: Objective, batch: Batch, prediction: Velocity, target: Velocity
) -> _ModalityLoss:
    assert batch.sound is not None
    assert prediction.sound is not None
    assert target.sound is not None
    t = batch.sound.t
    error = prediction.sound - target.sound
    mse = error.square().flatten(1).mean(1)
    weight = batch.loss_weight * objective.weight(t)
    loss = weight * _unweighted_sound_loss(objective, batch, error)
    return _ModalityLoss(t, mse, loss)


def _unweighted_video_loss(
    objective: Objective, batch: Batch, error: Tensor, mse: Tensor
) -> Tensor:
    """Return the loss (B,) of the video, without the weights of t and of samples."""
    loss = mse
    if objective.loss != "mse":
        cost = robust(error, objective.loss, objective.delta)
        loss = weighted_mean(cost, batch.loss_mask)
    if objective.temporal_consistency > 0:
        assert objective.loss == "mse", "a config has one or the other"
        loss = with_flicker(mse, error, batch.loss_mask, objective.temporal_consistency)
    return loss


def _unweighted_sound_loss(objective: Objective, batch: Batch, error: Tensor) -> Tensor:
    """Return the loss (B,) of the sound, without the weights of t and of samples."""
    cost = error.square()
    if objective.loss != "mse":
        cost = robust(error, objective.loss, objective.delta)
    loss = cost.flatten(1).mean(1)
    if batch.video_is_conditioning:
        return loss  # there is no video loss to weigh it against
    return objective.sound_weight * loss


def predict_and_target(
    family: Predictor,
    net: nn.Module,
    objective: Objective,
    batch: Batch,
    t: Tensor,
    noise: Tensor,
) -> tuple[Velocity, Velocity]:
    """Return what a network predicts for the noisy inputs of a batch, and v of the data.

    Args:
        family: Predicts v.
        net: The denoiser.
        objective: Its noise path.
        batch: Clean latents and their conditioning.
        t: Noise levels (B,).
        noise: (B,C,F,H,W).
    """
    if batch.video_is_conditioning:
        # The video is fed clean, and ``t`` is the noise level of the sound.
        t = torch.zeros_like(t)

    x_t, v = noisy_and_velocity(objective, batch, t, noise)
    if batch.sound is None:
        prediction = Velocity(family.predict(net, x_t, t, batch).to(v.dtype))
        velocity = Velocity(v)
    else:
        sound_x_t, sound_v = noisy_sound(objective, batch.sound)
        prediction = family.predict_with_sound(net, x_t, t, batch, sound_x_t)
        velocity = Velocity(v, sound_v)

    assert prediction.video.shape == v.shape, (
        f"predicted {tuple(prediction.video.shape)} for latents {tuple(v.shape)}"
    )
    return prediction, velocity


def robust(error: Tensor, kind: str, delta: float) -> Tensor:
    """Return the cost of each element of an error e: about e² below δ, about 2δ|e|
    above it.

    huber is e² up to δ, then δ(2|e| - δ) (Huber 1964, times 2). pseudo_huber is
    2δ(√(e² + δ²) - δ), which is smooth: the distance of Song and Dhariwal 2023 (arXiv
    2310.14189, section 3.3) times 2δ, as in diffusers' training scripts.
    """
    if kind == "huber":
        zeros = torch.zeros_like(error)
        return 2 * nn.functional.huber_loss(error, zeros, reduction="none", delta=delta)
    return 2 * delta * (torch.hypot(error, torch.full_like(error, delta)) - delta)


def noisy_and_velocity(
    objective: Objective, batch: Batch, t: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the network's input x_t and its target v, (B,C,F,H,W) each, at t (B,)."""
    path = objective.noise_path(t)  # (B,1,1,1,1) each
    x_t = path.alpha * batch.x0 + path.sigma * noise
    v = path.d_alpha * batch.x0 + path.d_sigma * noise
    # conditioning stays clean
    x_t = torch.where(batch.conditioning_mask, batch.x0, x_t)
    x_t = torch.where(batch.dropped_frames_mask, noise, x_t)  # dropped frames are noise
    return x_t, v


def noisy_sound(objective: Objective, sound: Sound) -> tuple[Tensor, Tensor]:
    """Return the network's input x_t and its target v of the sound, (B,C,L,1,1) each."""
    path = objective.noise_path(sound.t)
    x_t = path.alpha * sound.x0 + path.sigma * sound.noise
    v = path.d_alpha * sound.x0 + path.d_sigma * sound.noise
    return x_t, v


def with_flicker(mse: Tensor, error: Tensor, weight: Tensor, strength: float) -> Tensor:
    """Return (mse + λ‖Δe‖²) / (1 + 2λ(F - 1)/F), (B,): flickering errors cost more.

    Δe is the error's difference between neighbouring latent frames, over pairs that
    both count. Its square is summed and divided by the same count as mse's: F frames
    have F - 1 pairs, and white error has E(Δe)² = 2E(e²), so the divisor keeps the
    loss's scale. The optimum is unchanged. If some frames do not count, (F - 1)/F is
    the share of counting pairs in counting frames.
    """
    # the minimum of both weights, not their product: halving all weights changes
    # nothing
    pairs = torch.minimum(weight[:, :, 1:], weight[:, :, :-1])
    pair_count = pairs.flatten(1).sum(1)
    frame_count = weight.flatten(1).sum(1)
    pairs_per_frame = _ratio(pair_count, frame_count)  # (B,): (F - 1)/F if all count
    # The mean over pairs becomes a sum over pairs divided by the count of frames.
    flicker = weighted_mean(error.diff(dim=2).square(), pairs) * pairs_per_frame
    return (mse + strength * flicker) / (1 + 2 * strength * pairs_per_frame)


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean of each sample, (B,); 0 if nothing counts.

    Args:
        x: (B,C,F,H,W).
        weight: (B,1,F,1 or H,1 or W).
    """
    weight = weight.expand(-1, -1, -1, *x.shape[-2:])
    total = (x * weight).flatten(1).sum(1)
    count = x.shape[1] * weight.flatten(1).sum(1)
    return _ratio(total, count)


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count, and 0 for a count of 0."""
    is_empty = count <= 0
    divisor = torch.where(is_empty, torch.ones_like(count), count)
    return torch.where(is_empty, torch.zeros_like(total), total / divisor)
