"""Where batches come from: the cache, the clips, and the schedule over their windows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from videotune.config.schema import Config
from videotune.data.window_table import earlier_copies
from videotune.diffusion.loss import Objective
from videotune.diffusion.timesteps import TimestepSampler, shift_of_tokens
from videotune.latent_cache.condition_reader import ConditionReader, DrawnConditions
from videotune.latent_cache.conditioning_cells import appended_latents
from videotune.latent_cache.conditions import (
    LATENTS,
    SOUND,
    SeparateCondition,
    condition_key,
)
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.sampler import ExpertSchedule, Schedule, bucket_of
from videotune.latent_cache.store import LatentCache
from videotune.model_spec import ModelSpec
from videotune.rng import generator_for
from videotune.types import (
    DETERMINISTIC_VARIANT,
    Clip,
    Conditioning,
    LatentDistribution,
    Window,
)

KEYS_IN_MEMORY = 200_000
"""Entries of the cache, at most, whose keys are made before the first step."""


@dataclass(frozen=True)
class BatchSource:
    """Where batches come from: the cache, the clips, and the schedule over their
    windows.
    """

    config: Config
    spec: ModelSpec
    store: LatentCache
    keys: CacheKeys
    collate_states: Callable[[Sequence[Mapping[str, Tensor]]], Conditioning]
    """Joins the cached states of samples; the family's own function."""
    clips: Mapping[str, Clip]
    """Clips by id."""
    sizes: Mapping[str, tuple[int, int]]
    """(width, height) in pixels of each clip, by id."""
    buckets: tuple[Sequence[Window], ...]
    """Windows of the schedule's buckets, in the order of ``Job.buckets``."""
    schedule: Schedule
    objective: Objective
    encode: Callable[[Window, int], LatentDistribution] | None = None
    """Makes the latents of a sample where no variants are cached
    (``video_config.variants`` 0).
    """
    read_mask: Callable[[Window, int], Tensor] | None = None
    """Makes the loss mask of such a sample, (F,H,W): the share of each cell."""
    expert_schedule: ExpertSchedule | None = None
    pin: bool = False
    """Whether the batches of steps are put into pinned memory."""
    encode_condition: Callable[[SeparateCondition], dict[str, Tensor]] | None = None
    """Makes a condition of such a sample, see ``encode_condition_sample``."""
    _encode_lock: Lock = field(
        default_factory=Lock, init=False, repr=False, compare=False
    )

    def timesteps_of(self, step: int, modality: str = "video") -> TimestepSampler:
        """Return the noise levels that a step draws from: with its bucket's shift,
        within its expert's range.

        Args:
            step: the step.
            modality: "video", or "sound", whose shift is that of its own tokens.
        """
        timesteps = self.objective.timesteps

        shift_rule = self.spec.shift_by_tokens
        if self.config.timestep_shift == "resolution" and shift_rule is not None:
            shape = self.buckets[bucket_of(self.schedule, step)][0].shape
            tokens = self.spec.video_tokens(shape)
            if modality == "sound":
                assert self.spec.sound is not None
                tokens = self.spec.sound.latents(shape)
            shift = shift_of_tokens(tokens, shift_rule)
            timesteps = replace(timesteps, shift=shift)

        if self.expert_schedule is not None:
            name = self.expert_schedule.at(step)
            expert = next(expert for expert in self.spec.experts if expert.name == name)
            timesteps = timesteps.within(expert.t_lo, expert.t_hi)
        return timesteps

    def text_states(self, caption: str) -> dict[str, Tensor]:
        """Return a caption's cached states."""
        key = self.text_keys.get(caption) or self.keys.text_key(caption)
        return self.store.get("text", key)

    def draw_latents(
        self, window: Window, variant: int, random_name: tuple[str | int, ...]
    ) -> LatentDistribution:
        """Return a window's latents as a mean without variance.

        If the family caches a variance, the latents are drawn by the counted generator
        that is named ``random_name``.
        """
        distribution = self._distribution(window, variant)
        if distribution.logvar is None:
            return distribution

        generator = generator_for(self.keys.seed, "posterior", *random_name)
        noise = torch.from_numpy(
            generator.standard_normal(distribution.mean.shape, "float32")
        )
        drawn = distribution.mean + torch.exp(0.5 * distribution.logvar) * noise
        return replace(distribution, mean=drawn, logvar=None)

    def plain_latents(self, window: Window) -> LatentDistribution:
        """Return a window without random frames, crop or image noise, as validation and
        previews read it.
        """
        return self.draw_latents(window, DETERMINISTIC_VARIANT, (window.id,))

    def plain_latents_with_conditions(self, window: Window) -> LatentDistribution:
        """Return a plain window with the conditions that most samples have, as
        previews read it.
        """
        latents = self.plain_latents(window)
        reader = self.condition_reader
        types = reader.types_of_most_samples
        sample = DrawnConditions(window, DETERMINISTIC_VARIANT, types)
        encoded = reader.encoded_conditions(sample)
        states = reader.channel_states(sample, latents.extras)
        latents = replace(latents, extras=states | appended_latents(encoded, self.spec))
        # The sampler takes a first frame from the latents by itself: without ``known``, it
        # is given that frame at most.
        if set(filter(self.spec.is_in_place, types)) == {"first_frame"}:
            return latents
        x0 = latents.mean.clone()
        known = reader.write_conditioning_cells(x0, sample, encoded, latents.start)
        return replace(latents, mean=x0, known=known)

    def conditioning_modality(self, window: Window) -> LatentDistribution:
        """Return a window's video or sound that is given to a sample of the other modality.

        If only sound is learnt it is the whole video, with all cells known; if only video
        is learnt, the conditions that most samples have, and the clip's sound. If both are
        learnt neither is given, and this is not called.
        """
        if "video" not in self.spec.generates:
            latents = self.plain_latents(window)
            everything = torch.ones(latents.mean.shape[1:], dtype=torch.bool)
            return replace(latents, known=everything)
        latents = self.plain_latents_with_conditions(window)
        sound = SeparateCondition(window, DETERMINISTIC_VARIANT, SOUND)
        return replace(latents, sound=self.condition_tensors(sound)[LATENTS])

    @cached_property
    def condition_reader(self) -> ConditionReader:
        """What samples are given of their clips."""
        return ConditionReader(self.config, self.spec, self.condition_tensors)

    def condition_tensors(self, sample: SeparateCondition) -> dict[str, Tensor]:
        """Return the tensors of a condition or sound that has an entry of its own in the
        cache, beside the clip's latents.
        """
        if self.is_encoded_in_step(sample.window, sample.variant):
            assert self.encode_condition is not None, "an encoder is needed"
            with self._encode_lock:
                return self.encode_condition(sample)
        return self.store.get("conditions", condition_key(self.keys, sample))

    @property
    def num_variants(self) -> int:
        """How many variants of a window that varies are cached."""
        return self.config.video_config.variants

    def varies(self, window: Window) -> bool:
        """Whether the variants of a window differ."""
        return window.varies or self.keys.image_noise

    def is_encoded_in_step(self, window: Window, variant: int) -> bool:
        """Whether a sample is encoded in its step, because no variants are cached."""
        is_plain = variant == DETERMINISTIC_VARIANT
        return self.num_variants == 0 and not is_plain and self.varies(window)

    def variant_in_epoch(self, bucket: int, position: int, epoch: int) -> int:
        """Return which variant the window at ``position`` of a bucket shows in epoch
        ``epoch``.
        """
        window = self.buckets[bucket][position]
        if not self.varies(window):
            return 0

        # A window with r repeats is seen r times an epoch, each time in its next
        # variant.
        repeats = self.clips[window.clip_id].repeats
        views_before = epoch * repeats
        if repeats > 1:
            views_before += int(self._earlier_copies[bucket][position])
        return views_before % self.num_variants if self.num_variants else views_before

    @cached_property
    def latents_keys(self) -> dict[tuple[Window, int], str]:
        """Keys of the latents that steps read, by window and variant.

        Empty for a large dataset, whose steps make the keys that they need.
        """
        if not self._keys_fit_memory:
            return {}
        keys: dict[tuple[Window, int], str] = {}
        for bucket in self.buckets:
            for window in dict.fromkeys(bucket):
                variants = range(self.num_variants) if self.varies(window) else (0,)
                for variant in variants:
                    sample = self.keys.frame_sample(window, variant)
                    keys[window, variant] = self.keys.latents_key(sample)
        return keys

    @cached_property
    def text_keys(self) -> dict[str, str]:
        """Keys of the text states that steps read, by caption. Empty for a large
        dataset.
        """
        if not self._keys_fit_memory:
            return {}
        captions = {""}  # of dropped captions, and of guidance
        if not self.text_in_step:
            for clip in self.clips.values():
                captions.update(clip.captions)
        return {caption: self.keys.text_key(caption) for caption in captions}

    @property
    def _keys_fit_memory(self) -> bool:
        num_windows = sum(len(bucket) for bucket in self.buckets)
        return num_windows * max(1, self.num_variants) <= KEYS_IN_MEMORY

    @cached_property
    def text_in_step(self) -> bool:
        """Whether captions are encoded in the step. Then no text states are cached."""
        return self.config.text_in_step

    @cached_property
    def _earlier_copies(self) -> tuple[NDArray[np.int64], ...]:
        """For each position of each bucket, how many positions before it have the same
        window.
        """
        return tuple(earlier_copies(bucket) for bucket in self.buckets)

    def _distribution(self, window: Window, variant: int) -> LatentDistribution:
        """Return a window's cached latents, or encode them if its variants are not
        cached.
        """
        if self.is_encoded_in_step(window, variant):
            assert self.encode is not None, (
                "without cached variants an encoder is needed"
            )
            with self._encode_lock:
                return self.encode(window, variant)

        key = self.latents_keys.get((window, variant))
        if key is None:
            key = self.keys.latents_key(self.keys.frame_sample(window, variant))
        tensors = dict(self.store.get("latents", key))
        mean = tensors.pop("mean")
        logvar = tensors.pop("logvar", None)
        start = tensors.pop("start", None)
        return LatentDistribution(mean, logvar, extras=tensors, start=start)

    def mask_weight(self, window: Window, variant: int) -> Tensor | None:
        """Return the loss's weight in each cell of a sample, (F,H,W), or None if its
        clip has no mask.
        """
        key = self.keys.mask_key(self.keys.frame_sample(window, variant))
        if key is None:
            return None

        if self.is_encoded_in_step(window, variant):
            assert self.read_mask is not None, "without cached variants masks are read"
            share = self.read_mask(window, variant)
        else:
            share = self.store.get("masks", key)["share"].clamp(0, 1)
        settings = self.config.loss_mask
        return settings.outside + (settings.inside - settings.outside) * share
