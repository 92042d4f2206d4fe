"""What each trainer does with a dataset, read from its config: the rules of ``rules.py`` with that config's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.diffusion.timesteps import Timesteps
from videotune.errors import VideotuneError
from videotune.files import read_json
from videotune.interop import rules
from videotune.interop.rules import Bucket, Frames, Noise, Sizes
from videotune.types import ModelSpec

SOURCES: Mapping[str, Any] = read_json(Path(__file__).with_name("practices.json"))
"""By trainer: the repository, the commit and the files in which its rules were read, and numbers that hang on the model."""


@dataclass(frozen=True)
class DatasetRules:
    """What becomes of the clips of one dataset.

    ``size`` answers for a clip with (width, height, frames of its samples); ``drops_rest``: samples that do not fill a batch
    are left out; ``stretches``: frames are resized without a crop.
    """

    name: str
    frames: Frames
    size: Callable[[int, int, int], rules.Size]
    batch: int = 1
    repeats: float = 1
    drops_rest: bool = False
    stretches: bool = False


@dataclass(frozen=True)
class Practice:
    """A trainer's rules for a run. ``noise`` answers for a bucket (frames, height, width); a text says why it cannot.

    ``scale`` is alpha / rank in training; ``read_scale`` what readers apply of the file that it saves.
    """

    datasets: tuple[DatasetRules, ...]
    noise: Callable[[Bucket], Noise | str]
    scale: float
    read_scale: float
    accumulation: int = 1


class Values:
    """A trainer's flat values below a prefix, with a second prefix for what the first does not say."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", general: str | None = None) -> None:
        self.values, self.prefix, self.general = values, prefix, general

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` where neither prefix has it, or it is null."""
        for prefix in (self.prefix, self.general):
            if prefix is not None and self.values.get(prefix + key) is not None:
                return self.values[prefix + key]
        return default

    def number(self, key: str, default: float) -> float:
        """The value as a number. Raises VideotuneError where it is none."""
        value = self.get(key, default)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise VideotuneError(f"{self.prefix}{key}: {str(value)[:40]!r} is no number") from error

    def listed(self, key: str, default: list[Any]) -> list[Any]:
        """The value as a list; one value is a list of one."""
        value = self.get(key, default)
        return value if isinstance(value, list) else [value]

    def sections(self, key: str, general: str | None = None) -> Iterator[Values]:
        """The entries of a list of mappings, in order."""
        begin = f"{self.prefix}{key}."
        found = {name[len(begin) :].split(".")[0] for name in self.values if name.startswith(begin)}
        for index in sorted((one for one in found if one.isdigit()), key=int):
            yield Values(self.values, f"{begin}{index}.", general)


def practice_of(trainer: str, values: Mapping[str, Any], spec: ModelSpec) -> Practice:
    """The rules of a trainer with its config's numbers; ``values`` as ``theirs.read_theirs`` gives them.

    Raises VideotuneError for a trainer of pictures, and for a config that names no dataset of clips.
    """
    if trainer not in TRAINERS:
        raise VideotuneError(f"autopsy: {trainer} is not known here; known are {', '.join(TRAINERS)}")
    practice = TRAINERS[trainer](Values(values), spec)
    if not practice.datasets:
        raise VideotuneError(f"autopsy: this {trainer} config names no dataset of clips; give its dataset file too")
    return practice


def _of_model(trainer: str, table: str, spec: ModelSpec, default: Any) -> Any:
    """A number of a trainer that hangs on the model family, or on its spatial stride too."""
    numbers = SOURCES[trainer].get(table, {})
    return numbers.get(f"{spec.name}/{spec.rules.spatial_stride}", numbers.get(spec.name, default))


def _any_frames(size: Sizes) -> Callable[[int, int, int], rules.Size]:
    return lambda width, height, _: size(width, height)


def _flow(distribution: str, shift: float = 1.0, low: float = 0.0, high: float = 1.0, **numbers: float) -> Noise:
    return Noise(Timesteps(distribution, shift, **numbers), low, high)  # type: ignore[arg-type]


def _musubi(values: Values, spec: ModelSpec) -> Practice:
    datasets = []
    for one in values.sections("dataset_config.datasets", "dataset_config.general."):
        if one.get("video_directory") is None and one.get("video_jsonl_file") is None:
            continue
        size = [int(side) for side in one.listed("resolution", [960, 544])] * 2
        source, mode = one.get("source_fps"), one.get("frame_extraction", "head")
        frames = rules.extracted(
            mode,
            [int(count) for count in one.listed("target_frames", [1])],
            4,
            rates=(one.number("source_fps", 0), spec.rules.fps) if source else None,
            stride=int(one.number("frame_stride", 1)),
            samples=int(one.number("frame_sample", 1)),
            most=int(one.number("max_frames", 129)),
        )
        buckets = rules.area_buckets((size[0], size[1]), _of_model("musubi", "multiple", spec, 16))
        batch, repeats = int(one.number("batch_size", 1)), one.number("num_repeats", 1)
        datasets.append(DatasetRules(one.prefix[:-1], frames, _any_frames(buckets), batch, repeats))
    scale = values.number("network_alpha", 1) / values.number("network_dim", 4)
    accumulation = int(values.number("gradient_accumulation_steps", 1))
    return Practice(tuple(datasets), lambda bucket: _musubi_noise(values, spec, bucket), scale, scale, accumulation)


def _musubi_noise(values: Values, spec: ModelSpec, bucket: Bucket) -> Noise | str:
    mode, shift = values.get("timestep_sampling", "sigma"), values.number("discrete_flow_shift", 1)
    low, high = (values.number(key, default) / 1000 for key, default in (("min_timestep", 0), ("max_timestep", 1000)))
    std = values.number("sigmoid_scale", 1)
    if mode == "flux_shift":
        shift = rules.shift_of_area(bucket[1] * bucket[2] / (2 * spec.rules.spatial_stride) ** 2)
    if values.get("preserve_distribution_shape") and mode != "sigma":
        cut = {"lo": low, "hi": high}
        low, high = 0.0, 1.0
    else:
        cut = {}
    weighting = values.get("weighting_scheme", "none")
    match mode:
        case "uniform":
            return _flow("UNIFORM", 1.0, low, high, **cut)
        case "sigmoid":
            return _flow("LOGIT_NORMAL", 1.0, low, high, std=std, **cut)
        case "shift" | "flux_shift":
            return _flow("LOGIT_NORMAL", shift, low, high, std=std, **cut)
        case "logsnr":
            mean, spread = values.number("logit_mean", 0), values.number("logit_std", 1)
            return _flow("LOGIT_NORMAL", 1.0, low, high, mean=-mean / 2, std=spread / 2, **cut)
        # the scheduler shifts in generation alone, and an index counts from noise to data
        case "sigma" if (low, high) == (0, 1) and weighting == "logit_normal":
            mean, spread = values.number("logit_mean", 0), values.number("logit_std", 1)
            return _flow("LOGIT_NORMAL", mean=-mean, std=spread)
        case "sigma" if (low, high) == (0, 1) and weighting != "mode":
            return _flow("UNIFORM")
    return f"timestep_sampling {mode} with weighting_scheme {weighting} is not calculated here"


def _diffusion_pipe(values: Values, spec: ModelSpec) -> Practice:
    shared, datasets, step = Values(values.values, "dataset."), [], spec.rules.frame_step
    multiple, mode = spec.rules.side_multiple, values.get("video_clip_mode", "single_beginning")
    accumulation = int(values.number("gradient_accumulation_steps", 1))
    batch = int(values.number("micro_batch_size_per_gpu", 1)) * accumulation
    for one in shared.sections("directory", "dataset."):
        common = {"batch": batch, "repeats": one.number("num_repeats", 1), "drops_rest": True}
        sizes = one.get("size_buckets")
        if sizes is not None:
            buckets = [(int(frames), int(height), int(width)) for width, height, frames in sizes]
            shaped = [(bucket[0], bucket[2] / bucket[1]) for bucket in buckets]
            frames = rules.resampled(mode, shaped, step, spec.rules.fps)

            def choose(width: int, height: int, count: int, among: list[Bucket] = buckets) -> rules.Size:
                return rules.nearest_bucket(among, by_ratio=True, frames=count)(width, height)

            datasets.append(DatasetRules(one.prefix[:-1], frames, choose, **common))
            continue
        counts = [(int(count), None) for count in one.listed("frame_buckets", [1])]
        frames = rules.resampled(mode, counts, step, spec.rules.fps)
        for entry in one.listed("resolutions", [spec.default_resolution]):
            side = (entry[0] * entry[1]) ** 0.5 if isinstance(entry, list) else float(entry)
            size = _any_frames(rules.ratio_buckets(side, _ratios(one), multiple))
            datasets.append(DatasetRules(one.prefix[:-1], frames, size, **common))
    return Practice(tuple(datasets), lambda bucket: _diffusion_pipe_noise(values, spec, bucket), 1.0, 1.0)


def _ratios(one: Values) -> list[float]:
    """The ratios of width to height that diffusion-pipe's dataset file allows."""
    if not one.get("enable_ar_bucket", False):
        return [1.0]
    if (given := one.get("ar_buckets")) is not None:
        return [entry[0] / entry[1] if isinstance(entry, list) else float(entry) for entry in given]
    lowest, highest, count = (one.number(key, default) for key, default in (("min_ar", 0.5), ("max_ar", 2), ("num_ar_buckets", 7)))
    return [float(ratio) for ratio in rules.np.geomspace(lowest, highest, num=int(count))]


def _diffusion_pipe_noise(values: Values, spec: ModelSpec, bucket: Bucket) -> Noise | str:
    model = Values(values.values, "model.")
    shift = model.number("shift", 0)
    if not shift and model.get("flux_shift"):
        shift = rules.shift_of_area(bucket[1] * bucket[2] / (2 * spec.rules.spatial_stride) ** 2)
    if spec.name in SOURCES["diffusion-pipe"]["no_shift"]:
        shift = 0
    cut = {"lo": model.number("min_t", 0), "hi": model.number("max_t", 1)}
    if model.get("timestep_sample_method", "logit_normal") == "uniform":
        return _flow("UNIFORM", shift or 1.0, **cut)
    return _flow("LOGIT_NORMAL", shift or 1.0, std=model.number("sigmoid_scale", 1), **cut)


def _ai_toolkit(values: Values, spec: ModelSpec) -> Practice:
    process, datasets = Values(values.values, "config.process.0."), []
    train = Values(values.values, f"{process.prefix}train.")
    for one in process.sections("datasets"):
        auto, count = bool(one.get("auto_frame_count", False)), int(one.number("num_frames", 1))
        if count == 1 and not auto:
            continue
        shrink, trim = one.get("shrink_video_to_frames", True), one.get("trim_auto_frame_count_tail", True)
        frames = rules.stretched(count, one.number("fps", 24), shrink, auto, trim, spec.rules.frame_step)
        for side in one.listed("resolution", [512]):
            size = rules.never_larger(int(side), spec.rules.side_multiple)
            repeats, batch = one.number("num_repeats", 1), int(train.number("batch_size", 1))
            datasets.append(DatasetRules(one.prefix[:-1], frames, _any_frames(size), batch, repeats))
    kind, balance = train.get("timestep_type", "sigmoid"), train.get("content_or_style", "balanced")
    if balance != "balanced" or kind not in ("sigmoid", "linear", "weighted", "shift"):
        noise: Noise | str = f"timestep_type {kind} with content_or_style {balance} is not calculated here"
    elif kind == "sigmoid":
        noise = _flow("LOGIT_NORMAL")
    else:
        noise = _flow("UNIFORM", _of_model("ai-toolkit", "shift", spec, spec.timestep_shift) if kind == "shift" else 1.0)
    accumulation = int(train.number("gradient_accumulation_steps", train.number("gradient_accumulation", 1)))
    return Practice(tuple(datasets), lambda _: noise, 1.0, 1.0, accumulation)


def _finetrainers(values: Values, spec: ModelSpec) -> Practice:
    datasets = []
    for one in values.sections("dataset_config.datasets"):
        buckets = one.get("video_resolution_buckets")
        if buckets:
            datasets.append(_spread_dataset(one, [tuple(map(int, bucket)) for bucket in buckets], values))
    scale = values.number("lora_alpha", 64) / values.number("rank", 64)
    scheme = values.get("flow_weighting_scheme", "none")
    return Practice(
        tuple(datasets),
        lambda _: _weighted(values, scheme),
        scale,
        1.0,  # alpha stands in the file's header under a key that other readers do not know
        int(values.number("gradient_accumulation_steps", 1)),
    )


def _spread_dataset(one: Values, buckets: list[Any], values: Values) -> DatasetRules:
    def choose(width: int, height: int, count: int) -> rules.Size:
        return rules.nearest_bucket(buckets, by_ratio=True, frames=count)(width, height)

    stretches = one.get("reshape_mode", "bicubic") == "bicubic"
    batch = int(values.number("batch_size", 1))
    return DatasetRules(one.prefix[:-1], rules.spread(buckets), choose, batch, drops_rest=True, stretches=stretches)


def _weighted(values: Values, scheme: str) -> Noise | str:
    if scheme == "logit_normal":
        mean, std = values.number("flow_logit_mean", 0), values.number("flow_logit_std", 1)
        return _flow("LOGIT_NORMAL", mean=-mean, std=std)  # an index counts from noise to data
    return "flow_weighting_scheme mode is not calculated here" if scheme == "mode" else _flow("UNIFORM")


def _video_model_studio(values: Values, spec: ModelSpec) -> Practice:
    facts = SOURCES["videomodelstudio"]
    named = str(values.get("resolution", next(iter(facts["resolutions"]))))
    height, width = facts["resolutions"].get(named, next(iter(facts["resolutions"].values())))
    buckets = [(count, height, width) for count in facts["frames"]]
    dataset = _spread_dataset(values, buckets, values)
    scale = values.number("lora_alpha", 128) / values.number("lora_rank", 128)
    scheme = "none" if spec.name in facts["uniform"] else "logit_normal"
    return Practice((dataset,), lambda _: _weighted(values, scheme), scale, 1.0)


def _simpletuner(values: Values, spec: ModelSpec) -> Practice:
    datasets, step = [], _of_model("simpletuner", "frame_step", spec, 1)
    for one in values.sections("data_backend_config"):
        if one.get("dataset_type") != "video" or one.get("disabled"):
            continue
        count = int(one.number("video.num_frames", 125))
        count = rules.step_rounded(count, step)
        least, most = one.number("video.min_frames", count), one.number("video.max_frames", float("inf"))
        frames = rules.bounded(count, rules.step_rounded(int(least), step), most, step)
        kind = one.get("resolution_type", values.get("resolution_type", "pixel_area"))
        side = one.number("resolution", values.number("resolution", 1024))
        side = (side * 1e6) ** 0.5 if kind == "area" else side
        square = bool(one.get("crop", False)) and one.get("crop_aspect", "square") == "square"
        multiple = int(values.number("aspect_bucket_alignment", 64))
        size = rules.own_ratio(side, multiple, square, kind == "pixel")
        repeats, batch = one.number("repeats", 0) + 1, int(values.number("train_batch_size", 1))
        datasets.append(DatasetRules(one.prefix[:-1], frames, _any_frames(size), batch, repeats))
    rank = values.number("lora_rank", 16)
    scale = values.number("lora_alpha", rank) / rank
    shift = values.number("flow_schedule_shift", 3.0) or 1.0
    if values.get("flow_use_uniform_schedule"):
        noise = _flow("UNIFORM", shift)
    elif values.get("flow_use_beta_schedule"):
        alpha, beta = (values.number(f"flow_beta_schedule_{name}", 2.0) for name in ("alpha", "beta"))
        noise = _flow("BETA", shift, alpha=alpha, beta=beta)
    else:
        noise = _flow("LOGIT_NORMAL", shift, std=values.number("flow_sigmoid_scale", 1.0))
    return Practice(
        tuple(datasets), lambda _: noise, scale, scale, int(values.number("gradient_accumulation_steps", 1))
    )


def _onetrainer(values: Values, spec: ModelSpec) -> Practice:
    frames, batch = rules.following(int(values.number("frames", 25))), int(values.number("batch_size", 1))
    sides = [side.strip() for side in str(values.get("resolution", "512")).split(",")]
    concepts = [*values.sections("concept_file_name"), *values.sections("concepts")]
    datasets = []
    for one in concepts:
        repeats = one.number("balancing", 1) if one.get("balancing_strategy", "REPEATS") == "REPEATS" else 1
        for side in sides:
            if "x" in side:
                wide, high = (int(part) // 64 * 64 for part in side.split("x"))

                def fixed(width: int, height: int, count: int, size: rules.Size = (wide, high)) -> rules.Size:
                    return size

                datasets.append(DatasetRules(one.prefix[:-1], frames, fixed, batch, repeats, True))
            else:
                size = _any_frames(rules.listed_aspects(int(side), 64))
                datasets.append(DatasetRules(one.prefix[:-1], frames, size, batch, repeats, True))
    rank = values.number("lora_rank", 16)
    scale = values.number("lora_alpha", 1.0) / rank
    accumulation = int(values.number("gradient_accumulation_steps", 1))
    return Practice(tuple(datasets), lambda _: _onetrainer_noise(values), scale, scale, accumulation)


def _onetrainer_noise(values: Values) -> Noise | str:
    kind, shift = values.get("timestep_distribution", "UNIFORM"), values.number("timestep_shift", 1.0)
    weight, bias = values.number("noising_weight", 0.0), values.number("noising_bias", 0.0)
    low, high = values.number("min_noising_strength", 0.0), values.number("max_noising_strength", 1.0)
    if values.get("dynamic_timestep_shifting") or (low, high) != (0, 1):
        return "dynamic_timestep_shifting and noising strengths other than 0 and 1 are not calculated here"
    match kind:
        case "UNIFORM":
            return _flow("UNIFORM", shift)
        case "LOGIT_NORMAL":
            return _flow("LOGIT_NORMAL", shift, mean=bias, std=weight + 1)
        case "HEAVY_TAIL":
            return _flow("MODE", shift, mode_scale=weight)
        case "BETA":
            return _flow("BETA", shift, alpha=max(1e-4, weight), beta=max(1e-4, bias))
    return f"timestep_distribution {kind} is not calculated here"


def _ltx_trainer(values: Values, spec: ModelSpec) -> Practice:
    text = str(values.get("resolution_buckets", ""))
    dims = values.get("validation.video_dims")
    entries = [entry.split("x") for entry in text.split(";") if entry] or ([dims] if dims else [])
    buckets = [(int(frames), int(height), int(width)) for width, height, frames in entries]
    frames = rules.first([bucket[0] for bucket in buckets], "the fewest of a resolution bucket are") if buckets else None
    size = _any_frames(rules.nearest_bucket(buckets, by_ratio=False)) if buckets else None
    batch = int(values.number("optimization.batch_size", 2))
    datasets = (DatasetRules("preprocess_dataset.py", frames, size, batch, drops_rest=True),) if frames and size else ()
    scale = values.number("lora.alpha", 64) / values.number("lora.rank", 64)
    accumulation = int(values.number("optimization.gradient_accumulation_steps", 1))

    def noise(bucket: Bucket) -> Noise | str:
        if values.get("flow_matching.timestep_sampling_mode", "shifted_logit_normal") == "uniform":
            return _flow("UNIFORM")
        stride, step = spec.rules.spatial_stride, spec.rules.temporal_stride
        tokens = ((bucket[0] - 1) // step + 1) * (bucket[1] // stride) * (bucket[2] // stride)
        mean = 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)
        return _flow("LOGIT_NORMAL", mean=mean, std=values.number("flow_matching.timestep_sampling_params.std", 1.0))

    return Practice(datasets, noise, scale, 1.0, accumulation)


TRAINERS: Mapping[str, Callable[[Values, ModelSpec], Practice]] = {
    "musubi": _musubi,
    "diffusion-pipe": _diffusion_pipe,
    "ai-toolkit": _ai_toolkit,
    "finetrainers": _finetrainers,
    "videomodelstudio": _video_model_studio,
    "simpletuner": _simpletuner,
    "onetrainer": _onetrainer,
    "ltx-trainer": _ltx_trainer,
}
"""A trainer's name -> its practice."""
