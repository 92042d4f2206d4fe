"""Build the parts of a run from its config: the models on their device, the loss, and
where batches come from.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from videotune.adapters.layers import add_full
from videotune.adapters.lora import inject
from videotune.config.precision_checks import cannot_train_in_float16
from videotune.config.schema import Config
from videotune.data.clip_table import MediaSizes, clips_by_id
from videotune.diffusion.loss import Objective, objective_for_prediction
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.exporter.base_loras import merge_into_base
from videotune.job.job import Job
from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.batches import assemble
from videotune.latent_cache.conditions import SeparateCondition
from videotune.latent_cache.encode import (
    encode_condition_sample,
    encode_sample,
)
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.mask_reading import read_loss_mask
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.latent_cache.store import LatentCache
from videotune.memory import eight_bit_matmul
from videotune.memory.accelerator import (
    has_bf16,
    has_streams,
    local_device,
    needs_float16,
)
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.models.base_model import own_files, place
from videotune.models.registry import find
from videotune.types import BasePlace, Batch, LatentDistribution, WeightDtypes, Window

DTYPES = {
    "FLOAT_32": torch.float32,
    "BFLOAT_16": torch.bfloat16,
    "FLOAT_16": torch.float16,
}

NOT_ON_MPS = frozenset({"FLOAT_8", "NFLOAT_4"})
"""Weight dtypes that MPS does not have."""


def dtype_name(config: Config) -> str:
    """Return the train dtype that the config names, or the one that suits the device."""
    if config.train_dtype:
        return config.train_dtype
    device = local_device()
    # float16 only for a device that has no fast bf16.
    return half_precision(
        config, has_bf16=has_bf16(device), has_float16=needs_float16(device)
    )


def half_precision(config: Config, *, has_bf16: bool, has_float16: bool) -> str:
    """Return the train dtype that suits a device, FLOAT_32 if it has no fast one that
    the config can train in.
    """
    if has_bf16:
        return "BFLOAT_16"
    if has_float16 and cannot_train_in_float16(config) is None:
        return "FLOAT_16"
    return "FLOAT_32"


def weights_of(config: Config, dtype: str) -> WeightDtypes:
    """Return how the frozen weights of each part are stored in a run that computes in
    ``dtype``.
    """

    def stored_dtype(part_dtype: str) -> str | None:
        """Return a dtype other than the one that is computed in, else None."""
        weight_dtype = config.weight_dtype if part_dtype == "auto" else part_dtype
        return None if weight_dtype in ("auto", dtype) else weight_dtype

    text_dtype = stored_dtype(config.text_encoder.weight_dtype)
    if dtype == "FLOAT_16" and text_dtype is None:
        # Text encoders then compute in float32, from weights that take half of it.
        named_dtypes = (config.text_encoder.weight_dtype, config.weight_dtype)
        text_dtype = "FLOAT_16" if "FLOAT_16" in named_dtypes else "BFLOAT_16"

    matmul_dtype = config.transformer.matmul_dtype
    return WeightDtypes(
        transformer=stored_dtype(config.transformer.weight_dtype),
        text_encoder=text_dtype,
        matmul=None if matmul_dtype == "auto" else matmul_dtype,
    )


def open_models(
    spec: ModelSpec, base: BasePlace | None, config: Config
) -> DiffusersModel:
    """Open the base model.

    Raises VideotuneError if the config names no base model, or one that the device
    cannot hold as asked.
    """
    if base is None:
        raise VideotuneError(
            f"base_model_name: no {spec.title} is given. Set a folder in diffusers layout or a Hub id."
        )
    # ``base`` was found by its configs. Here its weights are needed too: they are checked,
    # and downloaded if it is a model of the Hub. If ``base_model_name`` is a single file,
    # ``base_parts`` is the model with all the other parts.
    model_of_parts = config.base_parts or base.name
    folder = place(model_of_parts, files=own_files(config, spec)).folder

    device = local_device()
    dtype = dtype_name(config)
    weights = weights_of(config, dtype)
    if device.type == "mps" and dtype == "FLOAT_16":
        raise VideotuneError("train_dtype: FLOAT_16 is for CUDA. Set FLOAT_32")
    if device.type == "mps" and NOT_ON_MPS & {
        weights.transformer,
        weights.text_encoder,
    }:
        raise VideotuneError(
            "weight_dtype: MPS has neither FLOAT_8 nor NFLOAT_4. Set INT_8"
        )
    if weights.matmul is not None:
        reason = eight_bit_matmul.refusal(weights.matmul, device)
        if reason is not None:
            raise VideotuneError(reason)

    family = find(spec.name)(folder, device, DTYPES[dtype], weights)
    # The family has read its spec from the folder. It is changed here as ``as_configured``
    # has changed the job's.
    if config.text_encoder.convention == "authors":
        family.spec = family.with_authors_text(family.spec)
    if config.generate is not None:
        family.spec = family.spec.with_sound(config.generate)
    if spec.connectors_in_step:
        family.spec = family.spec.with_connectors()
    merge_into_base(family, config.base_loras)
    return family


def make_objective(spec: ModelSpec, config: Config) -> Objective:
    """Return the loss that the config and the family name."""
    objective = objective_for_prediction(
        spec.prediction,
        spec.prediction_constants,
        make_timesteps(spec, config),
        weighting=config.loss_weighting,
        temporal_consistency=config.video_config.temporal_consistency_weight,
        gamma=config.loss_weighting_gamma,
    )
    return replace(
        objective,
        loss=config.loss,
        delta=config.loss_delta,
        sound_weight=config.sound.loss_weight,
    )


def make_timesteps(spec: ModelSpec, config: Config) -> TimestepSampler:
    """Return the noise levels that the config and the family name.

    A shift by resolution is left at the family's fixed one here, which validation keeps
    to; steps replace it in ``BatchSource.timesteps_of``.
    """
    shift = config.timestep_shift
    if shift is None or isinstance(shift, str):
        shift = spec.timestep_shift
    distribution = config.timestep_distribution or spec.timestep_distribution
    timesteps = TimestepSampler(
        distribution, shift, config.timestep_min, config.timestep_max
    )

    scale_name = "mode_scale" if timesteps.distribution == "MODE" else "scale"
    parameters = {
        "mean": config.timestep_mean,
        "std": config.timestep_std,
        "alpha": config.timestep_alpha,
        "beta": config.timestep_beta,
        scale_name: config.timestep_scale,
    }
    set_parameters: dict[str, Any] = {
        name: value for name, value in parameters.items() if value is not None
    }
    return replace(timesteps, **set_parameters)


def make_source(
    job: Job,
    family: DiffusersModel,
    store: LatentCache,
    objective: Objective,
    expert_schedule: ExpertSchedule | None = None,
) -> BatchSource:
    """Return where the run's batches come from.

    Args:
        job: what is to be done.
        family: the base model.
        store: the filled cache.
        objective: the loss, with its noise levels.
        expert_schedule: which expert trains at which step. None: noise levels are not
            limited to an expert's.
    """
    library = job.library
    keys = CacheKeys.of(family, job.config.seed)

    # A variant is one of the cached choices of crop and frames of a window.
    def encode(window: Window, variant: int) -> LatentDistribution:
        return encode_sample(
            family, keys, keys.frame_sample(window, variant), library.media
        )

    def read_mask(window: Window, variant: int) -> torch.Tensor:
        return read_loss_mask(
            keys.frame_sample(window, variant), job.spec.rules, library.media
        )

    def encode_condition(condition: SeparateCondition) -> dict[str, torch.Tensor]:
        return encode_condition_sample(family, keys, condition, library.media)

    source = BatchSource(
        config=job.config,
        spec=job.spec,
        store=store,
        keys=keys,
        collate_states=family.collate_states,
        clips=clips_by_id(library.clips),
        sizes=MediaSizes(library.media),
        buckets=job.buckets,
        schedule=job.schedule,
        objective=objective,
        encode=encode,
        read_mask=read_mask,
        encode_condition=encode_condition,
        expert_schedule=expert_schedule,
        pin=has_streams(local_device()),
    )
    # Computed now rather than in the first step.
    _ = source.latents_keys, source.text_keys
    return source


def plain_batch(source: BatchSource, window: Window) -> Batch:
    """Return a batch of one window with its first caption, nothing drawn or dropped, as
    validation reads it.
    """
    caption = source.clips[window.clip_id].captions[0]
    latents = source.plain_latents(window)
    condition_types = source.condition_reader.types_of_most_samples
    return assemble(source, [window], [caption], [latents], [condition_types])


def what_trains(
    net: nn.Module, spec: ModelSpec, config: Config
) -> Mapping[str, nn.Parameter]:
    """Return what would train of a network on the meta device, by name.

    An adapter is injected into it.

    Raises VideotuneError if the config names nothing that exists, or an adapter that
    does not fit.
    """
    if config.training_method == "FINE_TUNE":
        return add_full(net, spec, config.transformer.layers)
    # On the meta device PEFT makes the adapter's parameters without drawing numbers.
    with torch.device("meta"):
        return inject(net, spec, config.lora)
