"""Each trainer's handling of a dataset: the rules of ``rules.py`` with the config's
numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from videotune.errors import VideotuneError
from videotune.interop import rules, size_buckets
from videotune.interop.rules import Bucket, NoiseLevels, SourceVideo
from videotune.interop.trainer_facts import (
    TRAINER_FACTS,
    DatasetRules,
    ForeignSection,
    TrainerRules,
    model_number,
    read_datasets,
    read_section,
)
from videotune.interop.trainer_noise import (
    diffusion_pipe_noise,
    musubi_noise,
    noise_levels,
    onetrainer_noise,
    preprocessed_noise,
    weighted_noise,
)
from videotune.model_spec import ModelSpec

NOTABLE_RATIO = 1e-6
"""Difference of two aspect ratios that are not the same."""

PREPROCESSED = next(
    name for name, facts in TRAINER_FACTS.items() if facts.get("preprocessed")
)
"""The trainer that encodes clips in a separate command, whose options hold the buckets.
"""


def build_trainer_rules(
    trainer: str, values: Mapping[str, Any], spec: ModelSpec
) -> TrainerRules:
    """Build the rules of a trainer with its config's numbers.

    Args:
        trainer: the trainer's name.
        values: the config, as ``foreign_config.read_foreign_config`` returns it.
        spec: the base model.

    Raises:
        VideotuneError: for a trainer without rules for clips, for a value of another
            type, and for a config without a dataset of clips.
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
        noise=partial(musubi_noise, run, spec),
        scale=scale,
        read_scale=scale,
        accumulation=run.gradient_accumulation_steps,
    )


def _diffusion_pipe(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    batch_size = run.micro_batch_size_per_gpu * run.gradient_accumulation_steps
    dataset_rules = []
    findings: list[tuple[str, str]] = []
    for dataset in datasets:
        buckets: list[Bucket] = []
        for width, height, count in dataset.size_buckets:
            buckets.append((int(count), int(height), int(width)))
        counts = [int(count) for count in dataset.frame_buckets]
        if buckets:
            counts = [count for count, _, _ in buckets]

        findings += _size_bucket_findings(buckets)
        frames = partial(
            rules.resample_to_bucket,
            run.video_clip_mode,
            _count_chooser(buckets, counts),
            min((count for count in counts if count > 1), default=0),
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
    return TrainerRules(
        dataset_rules,
        partial(diffusion_pipe_noise, run, spec),
        findings=tuple(dict.fromkeys(findings)),
    )


def _count_chooser(
    buckets: Sequence[Bucket], counts: Sequence[int]
) -> Callable[[int, SourceVideo], int | None]:
    """Return the function that chooses the frames of a clip's bucket."""

    def by_size_bucket(length: int, clip: SourceVideo) -> int | None:
        bucket = size_buckets.size_bucket(buckets, length, clip)
        return None if bucket is None else bucket[0]

    def by_frame_bucket(length: int, clip: SourceVideo) -> int | None:
        return size_buckets.longest_filled(counts, length)

    return by_size_bucket if buckets else by_frame_bucket


def _size_bucket_findings(buckets: Sequence[Bucket]) -> Iterator[tuple[str, str]]:
    """Yield what becomes of size buckets whose order is not that of their ratios."""
    by_length, ratios = size_buckets.size_bucket_order(buckets)
    unused = [
        f"{width}x{height}x{count}" for count, height, width in by_length[len(ratios) :]
    ]
    if unused:
        yield (
            "bucket",
            f"Never used: size bucket {', '.join(unused)}. There is one bucket for each"
            " aspect ratio, the longest first, and two of yours have the same ratio.",
        )

    swapped = []
    for (count, height, width), ratio in zip(by_length, ratios, strict=False):
        if abs(width / height - ratio) > NOTABLE_RATIO:
            swapped.append(f"{width}x{height}x{count} for ratio {ratio:.2f}")
    if swapped:
        yield (
            "bucket",
            "Size buckets serve another aspect ratio than their own:"
            f" {', '.join(swapped)}. The longest bucket goes to the narrowest ratio; list"
            " buckets so that longer ones are narrower.",
        )


def _diffusion_pipe_sizes(
    dataset: ForeignSection, buckets: Sequence[Bucket], spec: ModelSpec
) -> Iterator[partial[rules.PixelSize]]:
    """Yield the size rule of each resolution, or the one of the size buckets."""
    if buckets:
        yield partial(size_buckets.size_of_bucket, buckets, spec.rules.fps)
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
                    size=partial(
                        rules.within_area, int(side), spec.rules.side_multiple
                    ),
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
                noise = noise_levels("LOGIT_NORMAL")
            case "linear" | "weighted":
                noise = noise_levels("UNIFORM")
            case "shift":
                shift = model_number("ai-toolkit", "shift", spec, spec.timestep_shift)
                noise = noise_levels("UNIFORM", shift)
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
    noise = weighted_noise(
        run, run.flow_weighting_scheme if spec.prediction == "flow" else "none"
    )
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
    noise = weighted_noise(run, scheme)

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
        noise = noise_levels("UNIFORM", shift)
    elif run.flow_use_beta_schedule:
        noise = noise_levels(
            "BETA",
            shift,
            alpha=run.flow_beta_schedule_alpha,
            beta=run.flow_beta_schedule_beta,
        )
    else:
        noise = noise_levels("LOGIT_NORMAL", shift, std=run.flow_sigmoid_scale)

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
        frames=partial(
            rules.leading_frames_in_range, count, min_frames, max_frames, step
        ),
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
    noise = onetrainer_noise(run)
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
        noise=partial(preprocessed_noise, run, spec),
        scale=run.lora_alpha / run.lora_rank,
        read_scale=1.0,
        accumulation=run.optimization_gradient_accumulation_steps,
    )


RulesBuilder = Callable[
    [ForeignSection, Sequence[ForeignSection], ModelSpec], TrainerRules
]

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
"""A trainer's name -> the function that builds its rules."""
