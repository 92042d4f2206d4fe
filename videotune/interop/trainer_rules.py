"""What each trainer does with a dataset, read from its config: the rules of ``rules.py`` with that config's numbers.

``trainer_rules.json`` has the keys that are read, with their defaults, and where each rule is known from.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.interop import rules
from videotune.interop.rules import Bucket, FrameIndices, NoiseLevels, PixelSize, SourceVideo
from videotune.types import ModelSpec

TRAINER_FACTS: Mapping[str, Any] = read_json(Path(__file__).with_name("trainer_rules.json"))
"""By trainer: where its rules are known from, its keys with their defaults, and numbers that hang on the model."""

PREPROCESSED = next(name for name, facts in TRAINER_FACTS.items() if facts.get("preprocessed"))
"""The trainer that encodes clips in a separate command, whose options hold the buckets."""

HUGE_NUMBER = re.compile(r"(?<![\d.])\d{7,}|inf|nan")
"""A number in a value that is larger than any that a dataset can mean."""

ForeignSection = Any
"""The values of one part of a config as attributes, dots as underscores; those that it does not name are its defaults."""


@dataclass(frozen=True)
class DatasetRules:
    """What becomes of the clips of one dataset.

    ``frames`` and ``size`` are rules of ``rules.py``. ``drops_rest``: samples that do not fill a batch are left out;
    ``stretches``: frames are resized without a crop.
    """

    name: str
    frames: Callable[[SourceVideo], FrameIndices]
    size: Callable[[SourceVideo, int], PixelSize]
    batch: int = 1
    repeats: float = 1
    drops_rest: bool = False
    stretches: bool = False


@dataclass(frozen=True)
class TrainerRules:
    """A trainer's rules for a run. ``noise`` answers for a bucket (frames, height, width); a text says why it cannot.

    ``scale`` is alpha / rank in training; ``read_scale`` what readers apply of the file that it saves.
    """

    datasets: Sequence[DatasetRules]
    noise: Callable[[Bucket], NoiseLevels | str]
    scale: float = 1.0
    read_scale: float = 1.0
    accumulation: int = 1


def build_trainer_rules(
    trainer: str, values: Mapping[str, Any], spec: ModelSpec
) -> TrainerRules:
    """The rules of a trainer with its config's numbers; ``values`` as ``theirs.read_theirs`` gives them.

    Raises VideotuneError for a trainer of pictures, for a value of another type, and where no dataset of clips is named.
    """
    if trainer not in TRAINERS:
        raise VideotuneError(
            f"the rules of {trainer} for clips are not known; known are {', '.join(TRAINERS)}"
        )
    table = TRAINER_FACTS[trainer]
    run = _section(
        values, table["run"]["prefix"], table["run"].get("general"), table["run"]["defaults"]
    )
    applied = TRAINERS[trainer](run, list(_datasets(values, table.get("dataset"))), spec)
    if not applied.datasets:
        raise VideotuneError(
            f"this {trainer} config names no dataset of clips: give its dataset's config too"
        )
    return applied


def _datasets(
    values: Mapping[str, Any], table: Mapping[str, Any] | None
) -> Iterator[ForeignSection]:
    """The datasets of a config that have one of the keys by which one is of clips."""
    for begin in (table["list"], table.get("also", table["list"])) if table else ():
        found = {
            key[len(begin) + 1 :].split(".")[0] for key in values if key.startswith(f"{begin}.")
        }
        for prefix in (
            f"{begin}.{index}."
            for index in sorted((one for one in found if one.isdigit()), key=int)
        ):
            if table and any(prefix + key in values for key in table["clips"]):
                yield _section(values, prefix, table.get("general"), table["defaults"])
        if found:
            return


def _section(
    values: Mapping[str, Any], prefix: str, general: str | None, defaults: Mapping[str, Any]
) -> ForeignSection:
    """The keys of ``defaults`` below a prefix, or below ``general``, as the types of their defaults."""
    section = SimpleNamespace(name=prefix[:-1])
    for key, default in defaults.items():
        given = (values.get(begin + key) for begin in (prefix, general) if begin is not None)
        value = next((value for value in given if value is not None), default)
        try:
            typed = (
                [value]
                if isinstance(default, list) and not isinstance(value, list)
                else type(default)(value)
            )
        except (TypeError, ValueError) as error:
            raise VideotuneError(
                f"{prefix}{key}: {str(value)[:40]!r} is no {type(default).__name__}"
            ) from error
        if HUGE_NUMBER.search(str(typed)):
            raise VideotuneError(
                f"{prefix}{key}: {str(value)[:40]} is no number of frames, pixels or samples"
            )
        setattr(section, key.replace(".", "_"), typed)
    return section


def _number(trainer: str, table: str, spec: ModelSpec, default: float) -> Any:
    """A number of a trainer that hangs on the model family, or on its spatial stride too."""
    numbers = TRAINER_FACTS[trainer][table]
    return numbers.get(
        f"{spec.name}/{spec.rules.spatial_stride}", numbers.get(spec.name, default)
    )


def _flow(distribution: str, shift: float = 1.0, **numbers: float) -> NoiseLevels:
    return NoiseLevels(TimestepSampler(distribution, shift or 1.0, **numbers))  # type: ignore[arg-type]


def _area_shift(spec: ModelSpec, bucket: Bucket) -> float:
    return rules.area_shift(bucket[1] * bucket[2] / (2 * spec.rules.spatial_stride) ** 2)


def _musubi(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    def dataset(one: ForeignSection) -> DatasetRules:
        rates = (one.source_fps, spec.rules.fps) if one.source_fps else None
        windows = one.frame_stride, one.frame_sample, one.max_frames
        frames = partial(
            rules.extract_windows, one.frame_extraction, one.target_frames, 4, rates, windows
        )
        size = partial(rules.area_buckets, (one.resolution * 2)[:2], 16)
        return DatasetRules(one.name, frames, size, one.batch_size, one.num_repeats)

    def noise(bucket: Bucket) -> NoiseLevels | str:
        low = run.min_timestep / 1000
        high = run.max_timestep / 1000
        mode = run.timestep_sampling
        shift = _area_shift(spec, bucket) if mode == "flux_shift" else run.discrete_flow_shift
        levels = {
            "uniform": ("UNIFORM", 1.0, {}),
            "sigmoid": ("LOGIT_NORMAL", 1.0, {"std": run.sigmoid_scale}),
            "shift": ("LOGIT_NORMAL", shift, {"std": run.sigmoid_scale}),
            "flux_shift": ("LOGIT_NORMAL", shift, {"std": run.sigmoid_scale}),
            "logsnr": (
                "LOGIT_NORMAL",
                1.0,
                {"mean": -run.logit_mean / 2, "std": run.logit_std / 2},
            ),
            # of sigma the scheduler shifts in generation alone, and an index counts from noise to data
            "sigma none": ("UNIFORM", 1.0, {}),
            "sigma logit_normal": (
                "LOGIT_NORMAL",
                1.0,
                {"mean": -run.logit_mean, "std": run.logit_std},
            ),
        }
        name = f"{mode} {run.weighting_scheme}" if mode == "sigma" else mode
        if name not in levels or (mode == "sigma" and (low, high) != (0, 1)):
            return f"timestep_sampling {name} is not calculated here"
        distribution, moved, numbers = levels[name]
        cut = {"lo": low, "hi": high} if run.preserve_distribution_shape else {}
        return NoiseLevels(
            TimestepSampler(distribution, moved, **numbers, **cut),
            *((0, 1) if cut else (low, high)),
        )

    scale = run.network_alpha / run.network_dim
    return TrainerRules(
        [dataset(one) for one in datasets], noise, scale, scale, run.gradient_accumulation_steps
    )


def _diffusion_pipe(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    batch = run.micro_batch_size_per_gpu * run.gradient_accumulation_steps
    step = spec.rules.frame_step

    def ratios(one: ForeignSection) -> list[float]:
        if not one.enable_ar_bucket:
            return [1.0]
        given = [
            entry[0] / entry[1] if isinstance(entry, list) else float(entry)
            for entry in one.ar_buckets
        ]
        return given or [
            float(ratio) for ratio in np.geomspace(one.min_ar, one.max_ar, one.num_ar_buckets)
        ]

    def all_rules(one: ForeignSection) -> Iterator[DatasetRules]:
        buckets = [
            (int(count), int(height), int(width)) for width, height, count in one.size_buckets
        ]
        shaped: list[tuple[int, float | None]] = [
            (count, width / height) for count, height, width in buckets
        ]
        counts = shaped or [(int(count), None) for count in one.frame_buckets]
        frames = partial(
            rules.resample_to_bucket, run.video_clip_mode, counts, step, spec.rules.fps
        )
        sides = [
            (entry[0] * entry[1]) ** 0.5 if isinstance(entry, list) else float(entry)
            for entry in one.resolutions
        ]
        sizes = [
            partial(rules.ratio_buckets, side, ratios(one), spec.rules.side_multiple)
            for side in sides
        ]
        for size in [partial(rules.bucket_by_ratio, buckets)] if buckets else sizes:
            yield DatasetRules(one.name, frames, size, batch, one.num_repeats, drops_rest=True)

    def noise(bucket: Bucket) -> NoiseLevels | str:
        shift = run.model_shift or (_area_shift(spec, bucket) if run.model_flux_shift else 1.0)
        shift = 1.0 if spec.name in TRAINER_FACTS["diffusion-pipe"]["no_shift"] else shift
        uniform = run.model_timestep_sample_method == "uniform"
        own = {} if uniform else {"std": run.model_sigmoid_scale}
        return _flow(
            "UNIFORM" if uniform else "LOGIT_NORMAL",
            shift,
            lo=run.model_min_t,
            hi=run.model_max_t,
            **own,
        )

    return TrainerRules([own for one in datasets for own in all_rules(one)], noise)


def _ai_toolkit(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    found = []
    for one in (one for one in datasets if one.num_frames > 1 or one.auto_frame_count):
        how = one.shrink_video_to_frames, one.auto_frame_count, one.trim_auto_frame_count_tail
        frames = partial(
            rules.fixed_count_frames, one.num_frames, one.fps, *how, spec.rules.frame_step
        )
        sizes = [
            partial(rules.within_area, int(side), spec.rules.side_multiple)
            for side in one.resolution
        ]
        found += [
            DatasetRules(one.name, frames, size, run.batch_size, one.num_repeats)
            for size in sizes
        ]
    shift = _number("ai-toolkit", "shift", spec, spec.timestep_shift)
    known = {"sigmoid": _flow("LOGIT_NORMAL"), "linear": _flow("UNIFORM"), "weighted": _flow("UNIFORM"),
             "shift": _flow("UNIFORM", shift)}  # fmt: skip
    why = f"timestep_type {run.timestep_type} with content_or_style {run.content_or_style} is not calculated here"
    noise = known.get(run.timestep_type, why) if run.content_or_style == "balanced" else why
    accumulation = max(run.gradient_accumulation_steps, run.gradient_accumulation)
    return TrainerRules(found, lambda _: noise, accumulation=accumulation)


def _finetrainers(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    found = [
        _spread(one.name, one.video_resolution_buckets, run, one.reshape_mode)
        for one in datasets
    ]
    noise = _weighted(run, run.flow_weighting_scheme if spec.path == "flow" else "none")
    # alpha stands in the file's header under a key that other readers do not know
    return TrainerRules(
        found, lambda _: noise, run.lora_alpha / run.rank, 1.0, run.gradient_accumulation_steps
    )


def _spread(name: str, buckets: Sequence[Any], run: ForeignSection, mode: str) -> DatasetRules:
    known = [(int(count), int(height), int(width)) for count, height, width in buckets]
    frames = partial(rules.spread_over_clip, known)
    size = partial(rules.bucket_by_ratio, known)
    return DatasetRules(
        name, frames, size, run.batch_size, drops_rest=True, stretches=mode == "bicubic"
    )


def _weighted(run: ForeignSection, scheme: str) -> NoiseLevels | str:
    if scheme == "mode":
        return "flow_weighting_scheme mode is not calculated here"
    own = {
        "mean": -run.flow_logit_mean,
        "std": run.flow_logit_std,
    }  # an index counts from noise to data
    return _flow("LOGIT_NORMAL", **own) if scheme == "logit_normal" else _flow("UNIFORM")


def _video_model_studio(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    facts = TRAINER_FACTS["videomodelstudio"]
    height, width = facts["resolutions"].get(
        run.resolution, next(iter(facts["resolutions"].values()))
    )
    dataset = _spread(
        "session", [(count, height, width) for count in facts["frames"]], run, "bicubic"
    )
    noise = _weighted(run, "none" if spec.name in facts["uniform"] else "logit_normal")
    scale = run.lora_alpha / run.lora_rank
    return TrainerRules([dataset], lambda _: noise, scale, 1.0, run.gradient_accumulation_steps)


def _simpletuner(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    step = _number("simpletuner", "frame_step", spec, 1)

    def dataset(one: ForeignSection) -> DatasetRules:
        count = rules.floor_to_step(one.video_num_frames, step)
        least = rules.floor_to_step(one.video_min_frames or count, step)
        frames = partial(
            rules.leading_frames_in_range,
            count,
            least,
            one.video_max_frames or float("inf"),
            step,
        )
        kind = one.resolution_type or run.resolution_type
        side = one.resolution or run.resolution
        side = (side * 1e6) ** 0.5 if kind == "area" else side
        square = one.crop and one.crop_aspect == "square"
        size = partial(
            rules.source_ratio, side, run.aspect_bucket_alignment, square, kind == "pixel"
        )
        return DatasetRules(one.name, frames, size, run.train_batch_size, one.repeats + 1)

    if run.flow_use_uniform_schedule:
        noise = _flow("UNIFORM", run.flow_schedule_shift)
    elif run.flow_use_beta_schedule:
        own = {"alpha": run.flow_beta_schedule_alpha, "beta": run.flow_beta_schedule_beta}
        noise = _flow("BETA", run.flow_schedule_shift, **own)
    else:
        noise = _flow("LOGIT_NORMAL", run.flow_schedule_shift, std=run.flow_sigmoid_scale)
    clips = [
        dataset(one) for one in datasets if one.dataset_type == "video" and not one.disabled
    ]
    scale = (run.lora_alpha or run.lora_rank) / run.lora_rank
    return TrainerRules(clips, lambda _: noise, scale, scale, run.gradient_accumulation_steps)


def _onetrainer(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    frames = partial(rules.frames_from_start, run.frames)
    found = []
    for one in datasets:
        repeats = one.balancing if one.balancing_strategy == "REPEATS" else 1
        for side in run.resolution.split(","):
            wide, times, high = side.strip().partition("x")
            fixed = (
                [
                    (
                        1,
                        rules.nearest_multiple(int(high), 64),
                        rules.nearest_multiple(int(wide), 64),
                    )
                ]
                if times
                else []
            )
            size = (
                partial(rules.bucket_by_sides, fixed)
                if times
                else partial(rules.listed_aspects, int(wide), 64)
            )
            found.append(
                DatasetRules(one.name, frames, size, run.batch_size, repeats, drops_rest=True)
            )
    weight = run.noising_weight
    bias = run.noising_bias
    kind = run.timestep_distribution
    known: dict[str, dict[str, float]] = {
        "UNIFORM": {}, "LOGIT_NORMAL": {"mean": bias, "std": weight + 1}, "HEAVY_TAIL": {"mode_scale": weight},
        "BETA": {"alpha": max(1e-4, weight), "beta": max(1e-4, bias)},
    }  # fmt: skip
    plain = not run.dynamic_timestep_shifting and (
        run.min_noising_strength,
        run.max_noising_strength,
    ) == (0, 1)
    noise: NoiseLevels | str = (
        f"timestep_distribution {kind} with these strengths and shifts is not calculated here"
    )
    if plain and kind in known:
        noise = _flow(
            "MODE" if kind == "HEAVY_TAIL" else kind, run.timestep_shift, **known[kind]
        )
    scale = run.lora_alpha / run.lora_rank
    return TrainerRules(found, lambda _: noise, scale, scale, run.gradient_accumulation_steps)


def _preprocessed(
    run: ForeignSection, datasets: Sequence[ForeignSection], spec: ModelSpec
) -> TrainerRules:
    dims = run.validation_video_dims
    entries = [entry.split("x") for entry in run.resolution_buckets.split(";") if entry] or (
        [dims] if dims else []
    )
    buckets = [(int(count), int(height), int(width)) for width, height, count in entries]
    frames = partial(
        rules.leading_frames,
        [bucket[0] for bucket in buckets],
        "the fewest of a resolution bucket are",
    )
    size = partial(rules.bucket_by_sides, buckets)
    batch = run.optimization_batch_size

    def noise(bucket: Bucket) -> NoiseLevels | str:
        if run.flow_matching_timestep_sampling_mode == "uniform":
            return _flow("UNIFORM")
        stride = spec.rules.spatial_stride
        step = spec.rules.temporal_stride
        tokens = ((bucket[0] - 1) // step + 1) * (bucket[1] // stride) * (bucket[2] // stride)
        mean = 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)  # not held at 4096 tokens
        return _flow(
            "LOGIT_NORMAL", mean=mean, std=run.flow_matching_timestep_sampling_params_std
        )

    found = (
        [DatasetRules("preprocess_dataset.py", frames, size, batch, drops_rest=True)]
        if buckets
        else []
    )
    return TrainerRules(
        found,
        noise,
        run.lora_alpha / run.lora_rank,
        1.0,
        run.optimization_gradient_accumulation_steps,
    )


TRAINERS: Mapping[str, Callable[[ForeignSection, Sequence[ForeignSection], ModelSpec], TrainerRules]] = {
    "musubi": _musubi, "diffusion-pipe": _diffusion_pipe, "ai-toolkit": _ai_toolkit, "finetrainers": _finetrainers,
    "videomodelstudio": _video_model_studio, "simpletuner": _simpletuner, "onetrainer": _onetrainer,
    PREPROCESSED: _preprocessed,
}  # fmt: skip
"""A trainer's name -> the function of its rules."""
