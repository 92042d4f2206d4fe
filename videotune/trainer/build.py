"""A job with its models: the family on its device, the cache filled, and where batches come from."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from videotune.adapters.layers import add_full
from videotune.adapters.lora import inject
from videotune.config.schema import Config
from videotune.diffusion.loss import Objective, objective
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.latent_cache.batches import BatchSource, assemble
from videotune.latent_cache.encode import encode_sample
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.latent_cache.store import LatentCache
from videotune.memory.accelerator import has_bf16, local_device, overlaps
from videotune.models.base import DiffusersModel
from videotune.models.base_model import own_files, place
from videotune.models.registry import find
from videotune.types import BasePlace, Batch, ModelSpec, WeightDtypes, Window

DTYPES = {"FLOAT_32": torch.float32, "BFLOAT_16": torch.bfloat16, "FLOAT_16": torch.float16}


def dtype_name(config: Config) -> str:
    """The train dtype as the config says, or what suits the device."""
    return config.train_dtype or ("BFLOAT_16" if has_bf16(local_device()) else "FLOAT_32")


def weights_of(config: Config, dtype: str) -> WeightDtypes:
    """How the frozen weights of each part are kept where the run is in ``dtype``."""

    def kept(own: str) -> str | None:
        asked = config.weight_dtype if own == "auto" else own
        return None if asked in ("auto", dtype) else asked

    return WeightDtypes(
        kept(config.transformer.weight_dtype), kept(config.text_encoder.weight_dtype)
    )


def open_models(spec: ModelSpec, base: BasePlace | None, config: Config) -> DiffusersModel:
    """The family over its base model.

    Raises VideotuneError where no base model is named.
    """
    if base is None:
        raise VideotuneError(
            f"base_model_name: which {spec.title}? Give a folder in diffusers layout or a Hub id."
        )
    folder = place(config.base_parts or base.name, files=own_files(config, spec)).folder
    device = local_device()
    dtype = dtype_name(config)
    weights = weights_of(config, dtype_name(config))
    if device.type == "mps" and {"FLOAT_8", "NFLOAT_4"} & {
        weights.transformer,
        weights.text_encoder,
    }:
        raise VideotuneError("weight_dtype: MPS has neither FLOAT_8 nor NFLOAT_4: set INT_8")
    return find(spec.name)(folder, device, DTYPES[dtype], weights)


def make_objective(spec: ModelSpec, config: Config) -> Objective:
    """The loss that the config and the family name."""
    weighting = (
        config.loss_weighting,
        config.video_config.temporal_consistency_weight,
        config.loss_weighting_gamma,
    )
    made = objective(spec.path, spec.path_constants, make_timesteps(spec, config), *weighting)
    return replace(made, loss=config.loss, delta=config.loss_delta)


def make_timesteps(spec: ModelSpec, config: Config) -> TimestepSampler:
    """The noise levels that the config and the family name.

    Of a shift by resolution it is the family's fixed one, which validation keeps to: see ``BatchSource.timesteps_of``.
    """
    asked = config.timestep_shift
    fixed = spec.timestep_shift if asked is None or isinstance(asked, str) else asked
    name = config.timestep_distribution or spec.timestep_distribution
    levels = TimestepSampler(name, fixed, config.timestep_min, config.timestep_max)
    given = {
        "mean": config.timestep_mean,
        "std": config.timestep_std,
        "alpha": config.timestep_alpha,
        "beta": config.timestep_beta,
        "mode_scale" if levels.distribution == "MODE" else "scale": config.timestep_scale,
    }
    numbers: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None
    }
    return replace(levels, **numbers)


def make_source(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    loss: Objective,
    expert_schedule: ExpertSchedule | None = None,
) -> BatchSource:
    """Where the run's batches come from."""
    library = job.library
    keys = CacheKeys.of(family, job.config.seed)
    source = BatchSource(
        config=job.config,
        spec=job.spec,
        store=store,
        keys=keys,
        condition=family.condition,
        clips={clip.id: clip for clip in library.clips},
        sizes={name: (media.width, media.height) for name, media in library.media.items()},
        buckets=job.buckets,
        schedule=job.schedule,
        objective=loss,
        encode=lambda window, variant: encode_sample(
            family, keys, keys.sample(window, variant), library.media
        ),
        expert_schedule=expert_schedule,
        pin=overlaps(local_device()),
    )
    _ = source.names  # made now, not in the first step
    return source


def plain_batch(source: BatchSource, window: Window) -> Batch:
    """A window alone with its first caption, nothing drawn or dropped: what validation reads."""
    caption = source.clips[window.clip_id].captions[0]
    return assemble(
        source, [window], [caption], [source.plain(window)], [source.conditions_on_first_frame]
    )


def what_trains(net: nn.Module, spec: ModelSpec, config: Config) -> Mapping[str, nn.Parameter]:
    """What would train of a skeleton, by name, without memory; an adapter is put into it.

    Raises VideotuneError where the config names nothing, or an adapter that does not fit.
    """
    if config.training_method == "FINE_TUNE":
        return add_full(net, config.transformer.layers)
    with torch.device("meta"):  # PEFT itself says how much there is, without a number drawn
        return inject(net, spec, config.lora)
