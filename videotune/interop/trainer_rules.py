"""Each trainer's handling of a dataset: the rules of ``rules.py`` with the config's numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.interop import rules
from videotune.interop.rules import Bucket, NoiseLevels
from videotune.interop.trainer_facts import (
    TRAINER_FACTS,
    DatasetRules,
    ForeignSection,
    TrainerRules,
    model_number,
    read_datasets,
    read_section,
)
from videotune.types import ModelSpec

PREPROCESSED = next(name for name, facts in TRAINER_FACTS.items() if facts.get("preprocessed"))
"""The trainer that encodes clips in a separate command, whose options hold the buckets."""


def build_trainer_rules(
    trainer: str, values: Mapping[str, Any], spec: ModelSpec
) -> TrainerRules:
    """Build the rules of a trainer with its config's numbers.

    Args:
        trainer: the trainer's name.
        values: the config, as ``foreign_config.read_foreign_config`` returns it.
        spec: the base model.

    Raises:
        VideotuneError: for a trainer without rules for clips, for a value of another type, and
            for a config without a dataset of clips.
    """
    if trainer not in TRAINERS:
        raise VideotuneError(
            f"the rules of {trainer} for clips are not known; known are {', '.join(TRAINERS)}"
        )

    table = TRAINER_FACTS[trainer]
    run_table = table["run"]
    run = read_section(
        values=values,
        prefix=run_table["prefix"],
        general=run_table.get("general"),
        defaults=run_table["defaults"],
    )
    datasets = list(read_datasets(values, table.get("dataset")))
    trainer_rules = TRAINERS[trainer](run, datasets, spec)
    if not trainer_rules.datasets:
        raise VideotuneError(
            f"this {trainer} config names no dataset of clips: give its dataset's config too"
        )
    return trainer_rules


def _sampler(distribution: str, shift: float, **numbers: float) -> TimestepSampler:
    return TimestepSampler(distribution, shift, **numbers)  # type: ignore[arg-type]


def _noise_levels(distribution: str, shift: float = 1.0, **numbers: float) -> NoiseLevels:
    return NoiseLevels(_sampler(distribution, shift or 1.0, **numbers))


def _area_shift(spec: ModelSpec, bucket: Bucket) -> float:
    _, height, width = bucket
    token_side = 2 * spec.rules.spatial_stride
    return rules.area_shift(height * width / token_side**2)


def _musubi(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    def dataset_rules(dataset: ForeignSection) -> DatasetRules:
        rates = (dataset.source_fps, spec.rules.fps) if dataset.source_fps else None
        frames = partial(
            rules.extract_windows,
            dataset.frame_extraction,
            dataset.target_frames,
            4,
            rates,
            (dataset.frame_stride, dataset.frame_sample, dataset.max_frames),
        )
        # One side means a square.
        resolution = (dataset.resolution * 2)[:2]
        return DatasetRules(
            name=dataset.name,
            frames=frames,
            size=partial(rules.area_buckets, resolution, 16),
            batch=dataset.batch_size,
            repeats=dataset.num_repeats,
        )

    scale = run.network_alpha / run.network_dim
    return TrainerRules(
        datasets=[dataset_rules(dataset) for dataset in datasets],
        noise=partial(_musubi_noise, run, spec),
        scale=scale,
        read_scale=scale,
        accumulation=run.gradient_accumulation_steps,
    )


def _musubi_noise(run: ForeignSection, spec: ModelSpec, bucket: Bucket) -> NoiseLevels | str:
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
        # In mode sigma, the scheduler shifts only generation, and an index counts from noise to
        # data.
        case "sigma" if run.weighting_scheme == "none" and (low, high) == (0, 1):
            distribution = "UNIFORM"
        case "sigma" if run.weighting_scheme == "logit_normal" and (low, high) == (0, 1):
            distribution = "LOGIT_NORMAL"
            numbers = {"mean": -run.logit_mean, "std": run.logit_std}
        case _:
            name = f"{mode} {run.weighting_scheme}" if mode == "sigma" else mode
            return f"timestep_sampling {name} is not calculated here"

    if run.preserve_distribution_shape:
        return NoiseLevels(_sampler(distribution, shift, **numbers, lo=low, hi=high))
    return NoiseLevels(_sampler(distribution, shift, **numbers), low, high)


def _diffusion_pipe(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    batch_size = run.micro_batch_size_per_gpu * run.gradient_accumulation_steps
    dataset_rules = []
    for dataset in datasets:
        buckets: list[Bucket] = []
        frame_buckets: list[tuple[int, float | None]] = []
        for width, height, count in dataset.size_buckets:
            buckets.append((int(count), int(height), int(width)))
            frame_buckets.append((int(count), int(width) / int(height)))
        if not buckets:
            frame_buckets = [(int(count), None) for count in dataset.frame_buckets]

        frames = partial(
            rules.resample_to_bucket,
            run.video_clip_mode,
            frame_buckets,
            spec.rules.frame_step,
            spec.rules.fps,
        )
        for size in _diffusion_pipe_sizes(dataset, buckets, spec):
            dataset_rules.append(
                DatasetRules(
                    name=dataset.name,
                    frames=frames,
                    size=size,
                    batch=batch_size,
                    repeats=dataset.num_repeats,
                    drops_rest=True,
                )
            )
    return TrainerRules(dataset_rules, partial(_diffusion_pipe_noise, run, spec))


def _diffusion_pipe_sizes(
    dataset: ForeignSection, buckets: Sequence[Bucket], spec: ModelSpec
) -> Iterator[partial[rules.PixelSize]]:
    """Yield the size rule of each resolution, or the one of the size buckets."""
    if buckets:
        yield partial(rules.bucket_by_ratio, buckets)
        return

    for entry in dataset.resolutions:
        if isinstance(entry, list):
            side = (entry[0] * entry[1]) ** 0.5
        else:
            side = float(entry)
        ratios = _diffusion_pipe_ratios(dataset)
        yield partial(rules.ratio_buckets, side, ratios, spec.rules.side_multiple)


def _diffusion_pipe_ratios(dataset: ForeignSection) -> list[float]:
    if not dataset.enable_ar_bucket:
        return [1.0]
    if dataset.ar_buckets:
        return [
            entry[0] / entry[1] if isinstance(entry, list) else float(entry)
            for entry in dataset.ar_buckets
        ]
    ratios = np.geomspace(dataset.min_ar, dataset.max_ar, dataset.num_ar_buckets)
    return [float(ratio) for ratio in ratios]


def _diffusion_pipe_noise(run: ForeignSection, spec: ModelSpec, bucket: Bucket) -> NoiseLevels:
    if spec.name in TRAINER_FACTS["diffusion-pipe"]["no_shift"]:
        shift = 1.0
    elif run.model_shift:
        shift = run.model_shift
    else:
        shift = _area_shift(spec, bucket) if run.model_flux_shift else 1.0

    limits = {"lo": run.model_min_t, "hi": run.model_max_t}
    if run.model_timestep_sample_method == "uniform":
        return _noise_levels("UNIFORM", shift, **limits)
    return _noise_levels("LOGIT_NORMAL", shift, **limits, std=run.model_sigmoid_scale)


def _ai_toolkit(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    dataset_rules = []
    for dataset in datasets:
        has_clips = dataset.num_frames > 1 or dataset.auto_frame_count
        if not has_clips:
            continue
        frames = partial(
            rules.fixed_count_frames,
            dataset.num_frames,
            dataset.fps,
            dataset.shrink_video_to_frames,
            dataset.auto_frame_count,
            dataset.trim_auto_frame_count_tail,
            spec.rules.frame_step,
        )
        for side in dataset.resolution:
            dataset_rules.append(
                DatasetRules(
                    name=dataset.name,
                    frames=frames,
                    size=partial(rules.within_area, int(side), spec.rules.side_multiple),
                    batch=run.batch_size,
                    repeats=dataset.num_repeats,
                )
            )

    noise: NoiseLevels | str = (
        f"timestep_type {run.timestep_type} with content_or_style {run.content_or_style} is not"
        " calculated here"
    )
    if run.content_or_style == "balanced":
        match run.timestep_type:
            case "sigmoid":
                noise = _noise_levels("LOGIT_NORMAL")
            case "linear" | "weighted":
                noise = _noise_levels("UNIFORM")
            case "shift":
                shift = model_number("ai-toolkit", "shift", spec, spec.timestep_shift)
                noise = _noise_levels("UNIFORM", shift)
    return TrainerRules(
        datasets=dataset_rules,
        noise=lambda _: noise,
        accumulation=max(run.gradient_accumulation_steps, run.gradient_accumulation),
    )


def _finetrainers(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    dataset_rules = []
    for dataset in datasets:
        dataset_rules.append(
            _finetrainers_dataset(
                name=dataset.name,
                shapes=dataset.video_resolution_buckets,
                run=run,
                reshape_mode=dataset.reshape_mode,
            )
        )
    noise = _weighted_noise(run, run.flow_weighting_scheme if spec.path == "flow" else "none")
    return TrainerRules(
        datasets=dataset_rules,
        noise=lambda _: noise,
        scale=run.lora_alpha / run.rank,
        # alpha is in the file's header under a key that other readers do not know.
        read_scale=1.0,
        accumulation=run.gradient_accumulation_steps,
    )


def _finetrainers_dataset(
    name: str, shapes: Sequence[Any], run: ForeignSection, reshape_mode: str
) -> DatasetRules:
    buckets = [(int(count), int(height), int(width)) for count, height, width in shapes]
    return DatasetRules(
        name=name,
        frames=partial(rules.spread_over_clip, buckets),
        size=partial(rules.bucket_by_ratio, buckets),
        batch=run.batch_size,
        drops_rest=True,
        stretches=reshape_mode == "bicubic",
    )


def _weighted_noise(run: ForeignSection, scheme: str) -> NoiseLevels | str:
    """Return the noise levels of a weighting scheme of finetrainers."""
    if scheme == "mode":
        return "flow_weighting_scheme mode is not calculated here"
    if scheme == "logit_normal":
        # The mean is negated, because an index counts from noise to data.
        return _noise_levels("LOGIT_NORMAL", mean=-run.flow_logit_mean, std=run.flow_logit_std)
    return _noise_levels("UNIFORM")


def _video_model_studio(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    facts = TRAINER_FACTS["videomodelstudio"]
    default_size = next(iter(facts["resolutions"].values()))
    height, width = facts["resolutions"].get(run.resolution, default_size)
    dataset_rules = _finetrainers_dataset(
        name="session",
        shapes=[(count, height, width) for count in facts["frames"]],
        run=run,
        reshape_mode="bicubic",
    )
    scheme = "none" if spec.name in facts["uniform"] else "logit_normal"
    noise = _weighted_noise(run, scheme)

    return TrainerRules(
        datasets=[dataset_rules],
        noise=lambda _: noise,
        scale=run.lora_alpha / run.lora_rank,
        read_scale=1.0,
        accumulation=run.gradient_accumulation_steps,
    )


def _simpletuner(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    dataset_rules = [
        _simpletuner_dataset(run, dataset, spec)
        for dataset in datasets
        if dataset.dataset_type == "video" and not dataset.disabled
    ]

    shift = run.flow_schedule_shift
    if run.flow_use_uniform_schedule:
        noise = _noise_levels("UNIFORM", shift)
    elif run.flow_use_beta_schedule:
        noise = _noise_levels(
            "BETA",
            shift,
            alpha=run.flow_beta_schedule_alpha,
            beta=run.flow_beta_schedule_beta,
        )
    else:
        noise = _noise_levels("LOGIT_NORMAL", shift, std=run.flow_sigmoid_scale)

    scale = (run.lora_alpha or run.lora_rank) / run.lora_rank
    return TrainerRules(
        datasets=dataset_rules,
        noise=lambda _: noise,
        scale=scale,
        read_scale=scale,
        accumulation=run.gradient_accumulation_steps,
    )


def _simpletuner_dataset(
    run: ForeignSection, dataset: ForeignSection, spec: ModelSpec
) -> DatasetRules:
    step = model_number("simpletuner", "frame_step", spec, 1)
    count = rules.floor_to_step(dataset.video_num_frames, step)
    min_frames = rules.floor_to_step(dataset.video_min_frames or count, step)
    max_frames = dataset.video_max_frames or float("inf")

    # A resolution of type "area" is in megapixels.
    resolution_type = dataset.resolution_type or run.resolution_type
    side = dataset.resolution or run.resolution
    if resolution_type == "area":
        side = (side * 1e6) ** 0.5
    is_square = dataset.crop and dataset.crop_aspect == "square"
    return DatasetRules(
        name=dataset.name,
        frames=partial(rules.leading_frames_in_range, count, min_frames, max_frames, step),
        size=partial(
            rules.source_ratio,
            side,
            run.aspect_bucket_alignment,
            is_square,
            resolution_type == "pixel",
        ),
        batch=run.train_batch_size,
        repeats=dataset.repeats + 1,
    )


def _onetrainer(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    dataset_rules = []
    for dataset in datasets:
        repeats = dataset.balancing if dataset.balancing_strategy == "REPEATS" else 1
        for resolution in run.resolution.split(","):
            dataset_rules.append(
                DatasetRules(
                    name=dataset.name,
                    frames=partial(rules.frames_from_start, run.frames),
                    size=_onetrainer_size(resolution),
                    batch=run.batch_size,
                    repeats=repeats,
                    drops_rest=True,
                )
            )

    scale = run.lora_alpha / run.lora_rank
    noise = _onetrainer_noise(run)
    return TrainerRules(
        datasets=dataset_rules,
        noise=lambda _: noise,
        scale=scale,
        read_scale=scale,
        accumulation=run.gradient_accumulation_steps,
    )


def _onetrainer_size(resolution: str) -> partial[rules.PixelSize]:
    """Return the size rule of a resolution, "512" or "640x480" (width first)."""
    first_side, times, second_side = resolution.strip().partition("x")
    if not times:
        return partial(rules.listed_aspects, int(first_side), 64)
    height = rules.nearest_multiple(int(second_side), 64)
    width = rules.nearest_multiple(int(first_side), 64)
    return partial(rules.bucket_by_sides, [(1, height, width)])


def _onetrainer_noise(run: ForeignSection) -> NoiseLevels | str:
    kind = run.timestep_distribution
    unknown = (
        f"timestep_distribution {kind} with these strengths and shifts is not calculated here"
    )
    strengths = (run.min_noising_strength, run.max_noising_strength)
    if run.dynamic_timestep_shifting or strengths != (0, 1):
        return unknown

    weight = run.noising_weight
    bias = run.noising_bias
    shift = run.timestep_shift
    match kind:
        case "UNIFORM":
            return _noise_levels("UNIFORM", shift)
        case "LOGIT_NORMAL":
            return _noise_levels("LOGIT_NORMAL", shift, mean=bias, std=weight + 1)
        case "HEAVY_TAIL":
            return _noise_levels("MODE", shift, mode_scale=weight)
        case "BETA":
            alpha = max(1e-4, weight)
            return _noise_levels("BETA", shift, alpha=alpha, beta=max(1e-4, bias))
    return unknown


def _preprocessed(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    shapes = [entry.split("x") for entry in run.resolution_buckets.split(";") if entry]
    if not shapes and run.validation_video_dims:
        shapes = [run.validation_video_dims]
    buckets = [(int(count), int(height), int(width)) for width, height, count in shapes]

    dataset_rules = []
    if buckets:
        counts = [bucket[0] for bucket in buckets]
        reason = "the fewest of a resolution bucket are"
        dataset_rules.append(
            DatasetRules(
                name="preprocess_dataset.py",
                frames=partial(rules.leading_frames, counts, reason),
                size=partial(rules.bucket_by_sides, buckets),
                batch=run.optimization_batch_size,
                drops_rest=True,
            )
        )
    return TrainerRules(
        datasets=dataset_rules,
        noise=partial(_preprocessed_noise, run, spec),
        scale=run.lora_alpha / run.lora_rank,
        read_scale=1.0,
        accumulation=run.optimization_gradient_accumulation_steps,
    )


def _preprocessed_noise(run: ForeignSection, spec: ModelSpec, bucket: Bucket) -> NoiseLevels:
    if run.flow_matching_timestep_sampling_mode == "uniform":
        return _noise_levels("UNIFORM")

    frames, height, width = bucket
    spatial_stride = spec.rules.spatial_stride
    latent_frames = (frames - 1) // spec.rules.temporal_stride + 1
    tokens = latent_frames * (height // spatial_stride) * (width // spatial_stride)
    # Linear in the tokens: 0.95 at 1024, 2.05 at 4096, and not clamped beyond.
    mean = 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)
    return _noise_levels(
        "LOGIT_NORMAL", mean=mean, std=run.flow_matching_timestep_sampling_params_std
    )


RulesBuilder = Callable[[ForeignSection, Sequence[ForeignSection], ModelSpec], TrainerRules]

TRAINERS: Mapping[str, RulesBuilder] = {
    "musubi": _musubi,
    "diffusion-pipe": _diffusion_pipe,
    "ai-toolkit": _ai_toolkit,
    "finetrainers": _finetrainers,
    "videomodelstudio": _video_model_studio,
    "simpletuner": _simpletuner,
    "onetrainer": _onetrainer,
    PREPROCESSED: _preprocessed,
}
"""A trainer's name -> the function that builds its rules from the run, the datasets and the model."""
