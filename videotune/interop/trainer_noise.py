"""Noise levels of other trainers, from their run options."""

import math

from videotune.diffusion.timesteps import TimestepSampler
from videotune.interop import rules
from videotune.interop.rules import Bucket, NoiseLevels
from videotune.interop.trainer_facts import TRAINER_FACTS, ForeignSection
from videotune.model_spec import ModelSpec


def _sampler(distribution: str, shift: float, **numbers: float) -> TimestepSampler:
    return TimestepSampler(distribution, shift, **numbers)  # type: ignore[arg-type]


def noise_levels(
    distribution: str, shift: float = 1.0, **numbers: float
) -> NoiseLevels:
    """Return the noise levels of a shifted distribution with its numbers."""
    return NoiseLevels(_sampler(distribution, shift or 1.0, **numbers))


def _area_shift(spec: ModelSpec, bucket: Bucket) -> float:
    _, height, width = bucket
    token_side = 2 * spec.rules.spatial_stride
    return rules.area_shift(height * width / token_side**2)


def musubi_noise(
    run: ForeignSection, spec: ModelSpec, bucket: Bucket
) -> NoiseLevels | str:
    """Return the noise levels of musubi's timestep sampling for a bucket."""
    low = run.min_timestep / 1000
    high = run.max_timestep / 1000
    mode = run.timestep_sampling
    sigmoid = {"std": run.sigmoid_scale}
    shift = 1.0
    numbers: dict[str, float] = {}
    match mode:
        case "uniform":
            distribution = "UNIFORM"
        case "sigmoid":
            distribution = "LOGIT_NORMAL"
            numbers = sigmoid
        case "shift":
            distribution = "LOGIT_NORMAL"
            shift = run.discrete_flow_shift
            numbers = sigmoid
        case "flux_shift":
            distribution = "LOGIT_NORMAL"
            shift = _area_shift(spec, bucket)
            numbers = sigmoid
        case "logsnr":
            distribution = "LOGIT_NORMAL"
            numbers = {"mean": -run.logit_mean / 2, "std": run.logit_std / 2}
        # In mode sigma, the scheduler shifts only generation, and an index counts from
        # noise to data.
        case "sigma" if run.weighting_scheme == "none" and (low, high) == (0, 1):
            distribution = "UNIFORM"
        case "sigma" if run.weighting_scheme == "logit_normal" and (low, high) == (
            0,
            1,
        ):
            distribution = "LOGIT_NORMAL"
            numbers = {"mean": -run.logit_mean, "std": run.logit_std}
        case _:
            name = f"{mode} {run.weighting_scheme}" if mode == "sigma" else mode
            return f"timestep_sampling {name} is not calculated here"

    if run.preserve_distribution_shape:
        return NoiseLevels(_sampler(distribution, shift, **numbers, lo=low, hi=high))
    return NoiseLevels(_sampler(distribution, shift, **numbers), low, high)


def diffusion_pipe_noise(
    run: ForeignSection, spec: ModelSpec, bucket: Bucket
) -> NoiseLevels:
    """Return the noise levels of diffusion-pipe for a bucket."""
    if spec.name in TRAINER_FACTS["diffusion-pipe"]["no_shift"]:
        shift = 1.0
    elif run.model_shift:
        shift = run.model_shift
    else:
        shift = _area_shift(spec, bucket) if run.model_flux_shift else 1.0

    limits = {"lo": run.model_min_t, "hi": run.model_max_t}
    if run.model_timestep_sample_method == "uniform":
        return noise_levels("UNIFORM", shift, **limits)
    return noise_levels("LOGIT_NORMAL", shift, **limits, std=run.model_sigmoid_scale)


def weighted_noise(run: ForeignSection, scheme: str) -> NoiseLevels | str:
    """Return the noise levels of a weighting scheme of finetrainers."""
    if scheme == "mode":
        return "flow_weighting_scheme mode is not calculated here"
    if scheme == "logit_normal":
        # The mean is negated, because an index counts from noise to data.
        return noise_levels(
            "LOGIT_NORMAL", mean=-run.flow_logit_mean, std=run.flow_logit_std
        )
    return noise_levels("UNIFORM")


def onetrainer_noise(run: ForeignSection) -> NoiseLevels | str:
    """Return the noise levels of OneTrainer's timestep distribution."""
    kind = run.timestep_distribution
    unknown = f"timestep_distribution {kind} with these strengths and shifts is not calculated here"
    strengths = (run.min_noising_strength, run.max_noising_strength)
    if run.dynamic_timestep_shifting or strengths != (0, 1):
        return unknown

    weight = run.noising_weight
    bias = run.noising_bias
    shift = run.timestep_shift
    match kind:
        case "UNIFORM":
            return noise_levels("UNIFORM", shift)
        case "LOGIT_NORMAL":
            return noise_levels("LOGIT_NORMAL", shift, mean=bias, std=weight + 1)
        case "HEAVY_TAIL":
            return noise_levels("MODE", shift, mode_scale=weight)
        case "BETA":
            alpha = max(1e-4, weight)
            return noise_levels("BETA", shift, alpha=alpha, beta=max(1e-4, bias))
    return unknown


def preprocessed_noise(
    run: ForeignSection, spec: ModelSpec, bucket: Bucket
) -> NoiseLevels | str:
    """Return the noise levels of the trainer with preprocessed clips for a bucket."""
    if run.flow_matching_timestep_sampling_mode == "uniform":
        return noise_levels("UNIFORM")

    frames, height, width = bucket
    spatial_stride = spec.rules.spatial_stride
    latent_frames = (frames - 1) // spec.rules.temporal_stride + 1
    tokens = latent_frames * (height // spatial_stride) * (width // spatial_stride)
    # Linear in the tokens: 0.95 at 1024, 2.05 at 4096, and not clamped beyond.
    mean = 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)
    std = run.flow_matching_timestep_sampling_params_std
    if spec.timestep_distribution != "STRETCHED_LOGIT_NORMAL":
        return noise_levels("LOGIT_NORMAL", mean=mean, std=std)
    if std != 1:
        return f"timestep_sampling_params.std {std:g} is not calculated here"
    return noise_levels("STRETCHED_LOGIT_NORMAL", shift=math.exp(mean))
